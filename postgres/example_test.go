package postgres_test

import (
	"context"
	"log"
	"os"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/postgres"
)

func createLabel(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	_, err := tx.Exec(ctx, `insert into shipping_label (order_id) values ($1)`, string(msg.Payload))
	return err
}

func Example() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := postgres.Migrate(ctx, pool); err != nil {
		log.Print(err)
		return
	}
	store, err := postgres.New(ctx, pool)
	if err != nil {
		log.Print(err)
		return
	}
	idem, err := idempotency.New(store, idempotency.WithSubscriberID("shipping.create-label.v1"))
	if err != nil {
		log.Print(err)
		return
	}

	subscriber := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{}) // or Kafka, or RabbitMQ
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		log.Print(err)
		return
	}
	router.AddConsumerHandler("create-label", "orders", subscriber, idempotency.ConsumerHandler(createLabel)).
		AddMiddleware(idem.Middleware)
	if err := router.Run(ctx); err != nil {
		log.Print(err)
	}
}

// The cleaner runs beside the router, for as long as the service does.
func ExampleStore_Clean() {
	ctx := context.Background() // the service's, which ends with it
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	store, err := postgres.New(ctx, pool, postgres.WithRetention(14*24*time.Hour))
	if err != nil {
		log.Print(err)
		return
	}
	logger := watermill.NewSlogLogger(nil)
	cleaned := make(chan error, 1)
	go func() { cleaned <- store.Clean(ctx, time.Minute, logger) }()
	// ... router.Run(ctx)
	if err := <-cleaned; err != nil {
		log.Print(err)
	}
}

// A handler that was removed before it had published leaves stored messages behind: they are found, published in another
// way, and removed.
func ExampleStore_Unacked() {
	publish := func(ctx context.Context, store *postgres.Store, pub message.Publisher) error {
		events, err := store.Unacked(ctx, 24*time.Hour, 100)
		if err != nil {
			return err
		}
		for _, event := range events {
			record, err := store.Lookup(ctx, event.Key)
			if err != nil {
				return err
			}
			if record == nil { // its claim was deleted by hand
				continue
			}
			if err := pub.Publish("labels", record.Produced...); err != nil {
				return err
			}
			if err := store.Acked(ctx, []idempotency.Key{event.Key}); err != nil {
				return err
			}
		}
		return nil
	}
	_ = publish
}
