// Command quarantine shows what becomes of a message that has the event ID of another one and other content: it is neither
// processed nor dropped, but waits in a topic of its own until somebody has looked at it, and released it or thrown it
// away. It needs no server: Watermill's GoChannel delivers, SQLite keeps.
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
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/gowebpki/jcs"
	_ "modernc.org/sqlite"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

const (
	orders      = "orders"
	quarantined = "orders.quarantine"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "quarantine")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "shop.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.ExecContext(ctx, "create table shipping_label (content text not null)"); err != nil {
		return err
	}

	channel := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	quarantine, err := channel.Subscribe(ctx, quarantined)
	if err != nil {
		return err
	}
	router, err := newRouter(ctx, db, channel)
	if err != nil {
		return err
	}
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(ctx) }()
	<-router.Running()
	defer func() { err = errors.Join(err, router.Close(), <-stopped) }()

	published := make(chan error, 1)
	go func() {
		published <- errors.Join(
			publish(channel, "order-7-placed", `{"order":7,"to":"Ada"}`),
			publish(channel, "order-7-placed", `{"to": "Ada", "order": 7}`), // the same, serialised anew
			publish(channel, "order-7-placed", `{"order":8,"to":"Bob"}`),    // another order
		)
	}()

	// Inspect.
	msg := <-quarantine
	fmt.Fprintln(out, "quarantined:", string(msg.Payload))
	fmt.Fprintln(out, "reason:     ", msg.Metadata.Get(middleware.ReasonForPoisonedKey))
	if err := printLabels(ctx, out, db); err != nil {
		return err
	}

	// Release, as an event of its own. The new ID is made from what is known and not at random, so that releasing the
	// message twice has one effect.
	msg.Ack()
	if err := <-published; err != nil {
		return err
	}
	if err := publish(channel, "order-8-placed", string(msg.Payload)); err != nil {
		return err
	}
	return printLabels(ctx, out, db)
}

// newRouter makes a service that puts aside what is permanently at fault, conflicts among it.
func newRouter(ctx context.Context, db *sql.DB, channel *gochannel.GoChannel) (*message.Router, error) {
	if err := sqlstore.Migrate(ctx, db, sqlstore.SQLite()); err != nil {
		return nil, err
	}
	store, err := sqlstore.New(ctx, db, sqlstore.SQLite())
	if err != nil {
		return nil, err
	}
	idem, err := idempotency.New(store,
		idempotency.WithSubscriberID("shipping.create-label.v1"),
		idempotency.WithCanonicalPayload(jcs.Transform)) // RFC 8785
	if err != nil {
		return nil, err
	}
	quarantine, err := middleware.PoisonQueueWithFilter(channel, quarantined, idempotency.IsPermanent)
	if err != nil {
		return nil, err
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	router.AddConsumerHandler("create-label", orders, channel, idempotency.ConsumerHandler(createLabel)).
		AddMiddleware(quarantine, idem.Middleware)
	return router, nil
}

func createLabel(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	_, err := tx.ExecContext(ctx, "insert into shipping_label (content) values (?)", string(msg.Payload))
	return err
}

func publish(publisher message.Publisher, eventID, payload string) error {
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return publisher.Publish(orders, msg)
}

func printLabels(ctx context.Context, out io.Writer, db *sql.DB) error {
	rows, err := db.QueryContext(ctx, "select content from shipping_label order by content")
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var content string
		if err := rows.Scan(&content); err != nil {
			return err
		}
		fmt.Fprintln(out, "label:      ", content)
	}
	return rows.Err()
}
