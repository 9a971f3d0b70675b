// Package shipping is the service of the examples: it creates a shipping label for each order. The broker is the caller's.
package shipping

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/postgres"
)

// schema holds the second layer of protection: whatever events say, an order has one initial label. Messages that come
// again are the first layer's business, the middleware's.
const schema = `create table if not exists shipping_label (
	order_id   text not null,
	kind       text not null,
	created_at timestamptz not null default now(),
	primary key (order_id, kind)
)`

// OrderPlaced is what the service consumes.
type OrderPlaced struct {
	OrderID string `json:"order_id"`
}

// createLabel is the handler. What it writes is committed with the claim of the event, or not at all.
func createLabel(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	var event OrderPlaced
	if err := json.Unmarshal(msg.Payload, &event); err != nil {
		return fmt.Errorf("order: %w", err)
	}
	tag, err := tx.Exec(ctx, `insert into shipping_label (order_id, kind) values ($1, 'initial') on conflict do nothing`, event.OrderID)
	if err != nil {
		return err
	}
	if tag.RowsAffected() == 0 {
		return idempotency.AfterCommit(ctx, func(context.Context) error {
			fmt.Printf("order %s has its label already, by another event\n", event.OrderID)
			return nil
		})
	}
	return nil
}

// Migrate creates the tables of the service and of the middleware.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	if err := postgres.Migrate(ctx, pool); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, schema)
	return err
}

// NewRouter returns the service, consuming the topic from the subscriber. Events that can never be processed go to the
// topic "<topic>.dead"; trouble with the database leaves events with the broker.
func NewRouter(ctx context.Context, pool *pgxpool.Pool, topic string, subscriber message.Subscriber, deadLetters message.Publisher, observer idempotency.Observer) (*message.Router, error) {
	store, err := postgres.New(ctx, pool)
	if err != nil {
		return nil, err
	}
	idem, err := idempotency.New(store,
		idempotency.WithSubscriberID("shipping.create-label.v1"),
		idempotency.WithoutPhantomCheck(), // neither Kafka's marshaler nor that of amqpmessage makes phantoms
		idempotency.WithObserver(observer))
	if err != nil {
		return nil, err
	}
	poison, err := middleware.PoisonQueueWithFilter(deadLetters, topic+".dead", func(err error) bool {
		return !idempotency.IsTransient(err)
	})
	if err != nil {
		return nil, err
	}
	retry := middleware.Retry{
		MaxRetries:          3,
		InitialInterval:     200 * time.Millisecond,
		MaxInterval:         5 * time.Second,
		Multiplier:          2,
		ResetContextOnRetry: true,
		ShouldRetry:         func(p middleware.RetryParams) bool { return !idempotency.IsPermanent(p.Err) },
	}

	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, watermill.NewSlogLogger(nil))
	if err != nil {
		return nil, err
	}
	router.AddConsumerHandler("create-label", topic, subscriber, idempotency.ConsumerHandler(createLabel)).
		AddMiddleware(poison, retry.Middleware, idem.Middleware, middleware.Recoverer)
	return router, nil
}

// Produce publishes an event for each order, and each event as often as repeat says: what a broker does that has not
// heard an ack. The event ID is stamped once.
func Produce(publisher message.Publisher, topic string, orders, repeat int) error {
	if orders < 1 || repeat < 1 {
		return errors.New("orders and repeat must be positive")
	}
	for i := range orders {
		payload, err := json.Marshal(OrderPlaced{OrderID: fmt.Sprint(i + 1)})
		if err != nil {
			return err
		}
		eventID := fmt.Sprintf("order-%d-placed", i+1)
		for range repeat {
			msg := message.NewMessage(watermill.NewUUID(), payload)
			msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
			if err := publisher.Publish(topic, msg); err != nil {
				return err
			}
		}
	}
	return nil
}

// Print is an observer that prints a line for each delivery.
func Print(out io.Writer) idempotency.Observer {
	return idempotency.ObserverFunc(func(_ context.Context, e idempotency.Event) {
		fmt.Fprintf(out, "%-15s %s\n", e.Outcome, e.Key.EventID)
	})
}
