// Command quickstart shows the middleware at work, with no server: Watermill's GoChannel delivers, SQLite keeps.
//
// Three instances of a shipping service consume orders, and the channel gives each of them every message. Some orders are
// published twice, one order fails twice after its label was written, and one order comes a second time as another event.
// The same run without protection comes first.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	_ "modernc.org/sqlite"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

const (
	orders    = 20
	again     = 5  // the first orders are published once more
	jammed    = 7  // this order fails twice
	twice     = 12 // this order comes as two events
	instances = 3
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// counts is what happened in one run.
type counts struct {
	published, delivered, failed, processed, duplicates, refused atomic.Int64
	labels                                                       int
}

func run(ctx context.Context, out io.Writer) error {
	dir, err := os.MkdirTemp("", "quickstart")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()

	var unprotected, protected counts
	if err := consume(ctx, filepath.Join(dir, "unprotected.db"), false, &unprotected); err != nil {
		return err
	}
	if err := consume(ctx, filepath.Join(dir, "protected.db"), true, &protected); err != nil {
		return err
	}

	table := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\twithout\twith the middleware\t")
	row := func(name string, a, b any) { fmt.Fprintf(table, "%s\t%v\t%v\t\n", name, a, b) }
	row("orders", orders, orders)
	row("events published", unprotected.published.Load(), protected.published.Load())
	row("deliveries", unprotected.delivered.Load(), protected.delivered.Load())
	row("attempts that failed", unprotected.failed.Load(), protected.failed.Load())
	row("events processed", unprotected.processed.Load(), protected.processed.Load())
	row("duplicates skipped", "-", protected.duplicates.Load())
	row("refused by the business rule", "-", protected.refused.Load())
	row("labels created", unprotected.labels, protected.labels)
	if err := table.Flush(); err != nil {
		return err
	}
	if protected.labels != orders {
		return fmt.Errorf("%d labels for %d orders", protected.labels, orders)
	}
	return nil
}

// consume publishes the orders to the instances of the service, waits until all is acked, and counts.
func consume(ctx context.Context, file string, protect bool, c *counts) (err error) {
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	schema := "create table shipping_label (order_id int not null)"
	if protect {
		// The second layer: whatever events say, an order has one initial label.
		schema = "create table shipping_label (order_id int not null unique)"
	}
	if _, err := db.ExecContext(ctx, schema); err != nil {
		return err
	}

	service := &service{counts: c}
	handler := service.unprotected(db) //nolint:contextcheck // it takes the message's
	var inside []message.HandlerMiddleware
	if protect {
		handler = idempotency.ConsumerHandler(service.createLabel)
		idem, err := newMiddleware(ctx, db, c)
		if err != nil {
			return err
		}
		inside = append(inside, idem.Middleware) // the one line
	}

	channel := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	for range instances {
		router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		router.AddMiddleware(c.countDeliveries)
		router.AddConsumerHandler("create-label", "orders", channel, handler).AddMiddleware(inside...)
		stopped := make(chan error, 1)
		go func() { stopped <- router.Run(ctx) }()
		<-router.Running()
		defer func() { err = errors.Join(err, router.Close(), <-stopped) }()
	}

	for i := 1; i <= orders; i++ {
		if err := c.publish(channel, fmt.Sprintf("order-%d-placed", i), i); err != nil {
			return err
		}
	}
	for i := 1; i <= again; i++ { // the producer did not hear the broker's answer
		if err := c.publish(channel, fmt.Sprintf("order-%d-placed", i), i); err != nil {
			return err
		}
	}
	if err := c.publish(channel, fmt.Sprintf("order-%d-confirmed", twice), twice); err != nil {
		return err
	}
	return db.QueryRowContext(ctx, "select count(*) from shipping_label").Scan(&c.labels)
}

// newMiddleware is all that a service sets up.
func newMiddleware(ctx context.Context, db *sql.DB, observer idempotency.Observer) (*idempotency.Middleware, error) {
	if err := sqlstore.Migrate(ctx, db, sqlstore.SQLite()); err != nil {
		return nil, err
	}
	store, err := sqlstore.New(ctx, db, sqlstore.SQLite())
	if err != nil {
		return nil, err
	}
	return idempotency.New(store,
		idempotency.WithSubscriberID("shipping.create-label.v1"),
		idempotency.WithObserver(observer))
}

type service struct {
	*counts
	jams atomic.Int64
}

// createLabel is the handler. What it writes is committed with the claim of the event, or not at all.
func (s *service) createLabel(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	order := string(msg.Payload)
	result, err := tx.ExecContext(ctx, "insert into shipping_label (order_id) values (?) on conflict do nothing", order)
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil {
		return err
	} else if n == 0 {
		s.refused.Add(1) // the order has its label, by another event
	}
	if order == fmt.Sprint(jammed) && s.jams.Add(1) <= 2 {
		return errors.New("the printer is jammed")
	}
	return nil
}

// unprotected runs the handler in a transaction of its own, as a service without the middleware does.
func (s *service) unprotected(db *sql.DB) message.NoPublishHandlerFunc {
	return func(msg *message.Message) error {
		tx, err := db.BeginTx(msg.Context(), nil)
		if err != nil {
			return err
		}
		if err := s.createLabel(msg.Context(), tx, msg); err != nil {
			s.failed.Add(1)
			return errors.Join(err, tx.Rollback())
		}
		s.processed.Add(1)
		return tx.Commit()
	}
}

func (c *counts) publish(publisher message.Publisher, eventID string, order int) error {
	c.published.Add(1)
	msg := message.NewMessage(watermill.NewUUID(), fmt.Append(nil, order))
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return publisher.Publish("orders", msg)
}

func (c *counts) countDeliveries(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		c.delivered.Add(1)
		return next(msg)
	}
}

// Observe implements [idempotency.Observer].
func (c *counts) Observe(_ context.Context, e idempotency.Event) {
	switch e.Outcome {
	case idempotency.Processed:
		c.processed.Add(1)
	case idempotency.Duplicate:
		c.duplicates.Add(1)
	case idempotency.HandlerFailed, idempotency.HandlerPanicked, idempotency.Transient, idempotency.Permanent,
		idempotency.Conflict, idempotency.ClaimInFlight, idempotency.Retried, idempotency.CommitUnknown:
		c.failed.Add(1)
	}
}
