package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
)

// The middleware in a router. The in-memory store stands for postgres.New or sqlstore.New, and *idempotencytest.MemTx for
// pgx.Tx or *sql.Tx.
func Example() {
	store := idempotencytest.NewMemStore()
	idem, err := idempotency.New(store, idempotency.WithSubscriberID("shipping.create-label.v1"))
	if err != nil {
		log.Fatal(err)
	}

	pubSub := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		log.Fatal(err)
	}
	router.AddConsumerHandler("create-label", "orders", pubSub,
		idempotency.ConsumerHandler(func(_ context.Context, tx *idempotencytest.MemTx, msg *message.Message) error {
			return tx.Write("label for " + string(msg.Payload))
		})).AddMiddleware(idem.Middleware)

	go func() {
		if err := router.Run(context.Background()); err != nil {
			log.Print(err)
		}
	}()
	<-router.Running()

	for range 3 { // at least once
		msg := message.NewMessage(watermill.NewUUID(), []byte("order 7"))
		msg.Metadata.Set("event_id", "order-7-placed")
		if err := pubSub.Publish("orders", msg); err != nil {
			log.Fatal(err)
		}
	}
	if err := router.Close(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(store.Effects())
	// Output: [label for order 7]
}

func order7() *message.Message {
	msg := message.NewMessage("", []byte("order 7"))
	msg.Metadata.Set("event_id", "order-7-placed")
	return msg
}

func newMiddleware(store idempotency.Store, opts ...idempotency.Option) *idempotency.Middleware {
	m, err := idempotency.New(store, append(opts, idempotency.WithSubscriberID("shipping"))...)
	if err != nil {
		log.Fatal(err)
	}
	return m
}

// A handler that returns messages. The duplicate returns them again, the same ones, because no ack has confirmed that
// they were published.
func ExampleHandler() {
	handle := newMiddleware(idempotencytest.NewMemStore()).Middleware(
		idempotency.Handler(func(_ context.Context, tx *idempotencytest.MemTx, msg *message.Message) ([]*message.Message, error) {
			if err := tx.Write("label for " + string(msg.Payload)); err != nil {
				return nil, err
			}
			return []*message.Message{message.NewMessage("label-1", []byte("label created"))}, nil
		}))
	for range 2 {
		produced, err := handle(order7())
		fmt.Println(produced[0].UUID, produced[0].Metadata["event_id"], err)
	}
	// Output:
	// label-1 label-1 <nil>
	// label-1 label-1 <nil>
}

// A handler with its transaction as a parameter, in a router.
func ExampleConsumerHandler() {
	createLabel := func(_ context.Context, tx *idempotencytest.MemTx, msg *message.Message) error {
		return tx.Write("label for " + string(msg.Payload))
	}
	handler := idempotency.ConsumerHandler(createLabel) // for router.AddConsumerHandler
	// Without the middleware, the handler refuses to run.
	fmt.Println(handler(order7()))
	// Output: idempotency: no transaction in context: is the middleware on this handler, and does this context come from msg.Context()?
}

// A CQRS handler gets a context and an event; the transaction is in the context. T may be an interface that the
// transaction satisfies.
func ExampleTxFromContext() {
	store := idempotencytest.NewMemStore()
	onOrderPlaced := func(ctx context.Context, event string) error {
		tx, err := idempotency.TxFromContext[interface{ Write(effect string) error }](ctx)
		if err != nil {
			return err
		}
		return tx.Write("label for " + event)
	}
	handle := newMiddleware(store).Middleware(func(msg *message.Message) ([]*message.Message, error) {
		return nil, onOrderPlaced(msg.Context(), string(msg.Payload))
	})
	_, err := handle(order7())
	fmt.Println(store.Effects(), err)
	// Output: [label for order 7] <nil>
}

// The subscriber and event IDs make a stable key for a call to somebody else.
func ExampleClaimFromContext() {
	handle := newMiddleware(idempotencytest.NewMemStore()).Middleware(func(msg *message.Message) ([]*message.Message, error) {
		claim, _ := idempotency.ClaimFromContext(msg.Context())
		fmt.Println("Idempotency-Key:", claim.Key)
		return nil, nil
	})
	_, _ = handle(order7())
	// Output: Idempotency-Key: shipping/order-7-placed
}

// Code between the handler and the middleware may turn an error into nil; a mark cannot be lost on the way.
func ExampleMarkRollback() {
	store := idempotencytest.NewMemStore()
	handle := newMiddleware(store).Middleware(func(msg *message.Message) ([]*message.Message, error) {
		return nil, idempotency.MarkRollback(msg.Context(), errors.New("out of paper"))
	})
	_, err := handle(order7())
	fmt.Println(err)
	// Output: idempotency: handler for subscriber "shipping", event "order-7-placed": the transaction was rolled back: out of paper
}

// A cache is dropped once the new state is there for others to see.
func ExampleAfterCommit() {
	handle := newMiddleware(idempotencytest.NewMemStore()).Middleware(func(msg *message.Message) ([]*message.Message, error) {
		err := idempotency.AfterCommit(msg.Context(), func(context.Context) error {
			fmt.Println("drop the cache")
			return nil
		})
		fmt.Println("handled")
		return nil, err
	})
	_, _ = handle(order7())
	// Output:
	// handled
	// drop the cache
}

// The event ID is in one of two places: CloudEvents' header on Kafka, or the message's UUID.
func ExampleFirstOf() {
	key := idempotency.FirstOf(idempotency.MetadataKey("ce_id"), idempotency.MessageUUID())
	id, err := key(message.NewMessage("uuid-1", nil))
	fmt.Println(id, err)
	// Output: uuid-1 <nil>
}

// Each tenant has a database of its own. An outer middleware puts the tenant into the message's context.
func ExampleNewRouting() {
	type tenantKey struct{}
	stores := map[string]idempotency.Store{ // postgres.New, one for each pool
		"acme":   idempotencytest.NewMemStore(),
		"globex": idempotencytest.NewMemStore(),
	}
	idem, err := idempotency.NewRouting(func(ctx context.Context) (idempotency.Store, error) {
		tenant, _ := ctx.Value(tenantKey{}).(string)
		store, ok := stores[tenant]
		if !ok {
			return nil, fmt.Errorf("no database for tenant %q", tenant)
		}
		return store, nil
	}, idempotency.WithSubscriberID("shipping"))
	if err != nil {
		log.Fatal(err)
	}
	handle := idem.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		fmt.Println("processed for", msg.Context().Value(tenantKey{}))
		return nil, nil
	})
	for _, tenant := range []string{"acme", "globex", "acme"} {
		msg := order7()
		msg.SetContext(context.WithValue(msg.Context(), tenantKey{}, tenant))
		_, _ = handle(msg)
	}
	// Output:
	// processed for acme
	// processed for globex
}

// Messages that can never succeed go to a dead-letter topic; database trouble and a closing router leave them with the
// broker.
func ExampleIsTransient() {
	deadLetters := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	poison, err := middleware.PoisonQueueWithFilter(deadLetters, "orders.dead", func(err error) bool {
		return !idempotency.IsTransient(err)
	})
	if err != nil {
		log.Fatal(err)
	}
	handle := poison(newMiddleware(idempotencytest.NewMemStore()).Middleware(message.PassthroughHandler))

	noEventID := message.NewMessage("1", nil)
	_, err = handle(noEventID)
	fmt.Println(err, noEventID.Metadata.Get(middleware.ReasonForPoisonedKey))
	// Output: <nil> idempotency: key for subscriber "shipping": event ID is missing: metadata "event_id" is not set: let the producer stamp it once, or choose another key by WithKey
}

// An observer counts outcomes.
func ExampleWithObserver() {
	count := make(map[idempotency.Outcome]int) // with a mutex, where there are goroutines
	handle := newMiddleware(idempotencytest.NewMemStore(),
		idempotency.WithObserver(idempotency.ObserverFunc(func(_ context.Context, e idempotency.Event) { count[e.Outcome]++ })),
	).Middleware(message.PassthroughHandler)
	for range 3 {
		_, _ = handle(order7())
	}
	fmt.Println(count[idempotency.Processed], count[idempotency.Duplicate])
	// Output: 1 2
}

// Another content under a known event ID is never processed, and never dropped: it is an error for which IsPermanent is
// true, so middleware.PoisonQueueWithFilter puts the message aside.
func ExampleConflictError() {
	handle := newMiddleware(idempotencytest.NewMemStore()).Middleware(
		func(*message.Message) ([]*message.Message, error) { return nil, nil })
	_, err := handle(order7())
	fmt.Println(err)

	other := order7()
	other.Payload = []byte("order 8")
	_, err = handle(other)
	var conflict *idempotency.ConflictError
	fmt.Println(errors.As(err, &conflict), conflict.Key, conflict.Differs, idempotency.IsPermanent(err))
	// Output:
	// <nil>
	// true shipping/order-7-placed [payload] true
}

// A CloudEvent is identified by its source and its ID together, wherever the transport has put them.
func ExampleCloudEventKey() {
	key := idempotency.FirstOf(idempotency.CloudEventKey(), idempotency.MetadataKey("event_id"))
	msg := message.NewMessage("", nil)
	msg.Metadata.Set("ce_source", "/shop/eu")
	msg.Metadata.Set("ce_id", "42")
	fmt.Println(key(msg))
	fmt.Println(key(order7()))
	// Output:
	// /shop/eu 42 <nil>
	// order-7-placed <nil>
}

// Claims are kept for 30 days, and events can be replayed for ever: what is older than the claims is not taken for new.
func ExampleWithReplayHorizon() {
	handle := newMiddleware(idempotencytest.NewMemStore(),
		idempotency.WithReplayHorizon(29*24*time.Hour, idempotency.FirstTime(idempotency.CloudEventTime(), idempotency.MetadataTime("placed_at"))),
	).Middleware(func(*message.Message) ([]*message.Message, error) { return nil, nil })
	msg := order7()
	msg.Metadata.Set("placed_at", "2020-01-01T00:00:00Z")
	_, err := handle(msg)
	fmt.Println(errors.Is(err, idempotency.ErrBeyondHorizon))
	// Output: true
}

// A producer: each event gets its ID once, and keeps it when the producer tries again.
func ExampleStampEventID() {
	channel := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
	pub, err := idempotency.StampEventID(channel)
	if err != nil {
		log.Fatal(err)
	}
	msg := message.NewMessage(watermill.NewUUID(), []byte("order 7"))
	for range 2 {
		if err := pub.Publish("orders", msg); err != nil {
			log.Fatal(err)
		}
	}
	received, err := channel.Subscribe(context.Background(), "orders")
	if err != nil {
		log.Fatal(err)
	}
	first := <-received
	first.Ack()
	second := <-received
	second.Ack()
	if err := channel.Close(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(first.Metadata["event_id"]), first.Metadata["event_id"] == second.Metadata["event_id"])
	// Output: 36 true
}
