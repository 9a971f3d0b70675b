package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/outbox"
)

var errPrinter = errors.New("the label printer is out of paper")

type (
	OrderPaid    struct{ Order int }
	LabelCreated struct{ Order int }
	OrderShipped struct{ Order int }
	NotifyBuyer  struct{ Order int }
)

// A CQRS event handler publishes two events and a command through buses on the outbox, and fails the first time.
func TestBusesPublishInTheHandlersTransaction(t *testing.T) {
	t.Parallel()
	forEachStore(t, func(t *testing.T, b *bundle) {
		t.Helper()
		marshaler := cqrs.JSONMarshaler{GenerateName: cqrs.StructName}
		events, err := cqrs.NewEventBusWithConfig(b.pub, cqrs.EventBusConfig{
			GeneratePublishTopic: func(p cqrs.GenerateEventPublishTopicParams) (string, error) { return p.EventName, nil },
			Marshaler:            marshaler,
		})
		require.NoError(t, err)
		commands, err := cqrs.NewCommandBusWithConfig(b.pub, cqrs.CommandBusConfig{
			GeneratePublishTopic: func(p cqrs.CommandBusGeneratePublishTopicParams) (string, error) { return p.CommandName, nil },
			Marshaler:            marshaler,
		})
		require.NoError(t, err)

		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		require.NoError(t, err)
		source := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
		idem, err := idempotency.New(b.store, idempotency.WithLogger(watermill.NopLogger{}))
		require.NoError(t, err)
		router.AddMiddleware(idem.Middleware)
		processor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
			GenerateSubscribeTopic: func(p cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return p.EventName, nil },
			SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
				return source, nil
			},
			Marshaler: marshaler,
		})
		require.NoError(t, err)

		committed := make(chan int, 2) // in the outbox, at the beginning of each attempt
		attempts := 0
		require.NoError(t, processor.AddHandlers(cqrs.NewEventHandler("create-label", func(ctx context.Context, e *OrderPaid) error {
			attempts++
			committed <- b.rows(t) //nolint:contextcheck // it looks from outside
			err := errors.Join(
				events.Publish(ctx, &LabelCreated{e.Order}),
				commands.Send(ctx, &NotifyBuyer{e.Order}),
				events.Publish(ctx, &OrderShipped{e.Order}),
			)
			if attempts == 1 {
				return errors.Join(err, errPrinter)
			}
			return err
		})))
		done := make(chan error, 1)
		go func() { done <- router.Run(t.Context()) }()
		<-router.Running()

		paid := message.NewMessage("uuid", message.Payload(`{"Order":1}`))
		paid.Metadata.Set("name", "OrderPaid")
		paid.Metadata.Set(idempotency.EventIDMetadata, "paid-1")
		require.NoError(t, source.Publish("OrderPaid", paid))
		require.Eventually(t, func() bool { return b.rows(t) > 0 }, patience, millisecond)
		require.NoError(t, router.Close())
		require.NoError(t, <-done)

		require.Zero(t, <-committed)
		require.Zero(t, <-committed, "what the failed attempt published is in the outbox")
		forwarded := b.forwarded(t)
		require.Equal(t, []string{`LabelCreated: {"Order":1}`, `NotifyBuyer: {"Order":1}`, `OrderShipped: {"Order":1}`}, texts(forwarded))
		seen := map[string]bool{}
		for _, r := range forwarded {
			require.Equal(t, r.uuid, r.eventID)
			require.False(t, seen[r.eventID])
			seen[r.eventID] = true
		}
	})
}

// Returned messages go into the outbox, and the router gets none.
func TestReturnedMessagesGoIntoTheOutbox(t *testing.T) {
	t.Parallel()
	forEachStore(t, func(t *testing.T, b *bundle) {
		t.Helper()
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		require.NoError(t, err)
		source := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
		idem, err := idempotency.New(b.store, idempotency.WithProduced(idempotency.Outbox(b.pub)), idempotency.WithLogger(watermill.NopLogger{}))
		require.NoError(t, err)
		var direct broker
		attempts := 0
		router.AddHandler("create-label", "orders", source, "labels", &direct, func(*message.Message) ([]*message.Message, error) {
			attempts++
			if attempts == 1 {
				return []*message.Message{message.NewMessage("lost", nil)}, errPrinter
			}
			return []*message.Message{message.NewMessage("1", []byte("first")), message.NewMessage("", []byte("second"))}, nil
		}).AddMiddleware(idem.Middleware)
		done := make(chan error, 1)
		go func() { done <- router.Run(t.Context()) }()
		<-router.Running()
		for range 2 { // the second is a duplicate
			msg := message.NewMessage("uuid", nil)
			msg.Metadata.Set(idempotency.EventIDMetadata, "paid-1")
			require.NoError(t, source.Publish("orders", msg))
		}
		require.Eventually(t, func() bool { return b.rows(t) == 2 }, patience, millisecond)
		require.NoError(t, router.Close())
		require.NoError(t, <-done)

		require.Empty(t, direct.all())
		forwarded := b.forwarded(t)
		require.Equal(t, []string{"labels: first", "labels: second"}, texts(forwarded))
		require.Equal(t, "1", forwarded[0].eventID)
		require.NotEmpty(t, forwarded[1].uuid)
		require.Equal(t, forwarded[1].uuid, forwarded[1].eventID)
	})
}

func TestOutsideOfATransaction(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")

	err := b.pub.Publish("labels", newMessage(t.Context(), "refused"))
	require.ErrorIs(t, err, idempotency.ErrNoTx)
	require.ErrorContains(t, err, "WithOwnTransaction")

	own := b.publisher(t, outbox.WithOwnTransaction())
	require.NoError(t, own.Publish("labels", newMessage(t.Context(), "first"), newMessage(t.Context(), "second")))
	require.Equal(t, []string{"labels: first", "labels: second"}, b.forwardedTexts(t))

	// A handler that has returned is not outside: what it publishes late belonged to its transaction.
	late := make(chan *message.Message, 1)
	require.NoError(t, b.handle(t, "1", func(ctx context.Context) error { late <- newMessage(ctx, "late"); return nil }))
	require.ErrorIs(t, own.Publish("labels", <-late), idempotency.ErrTxEnded)

	// One call, one transaction.
	outside := newMessage(t.Context(), "outside")
	require.ErrorIs(t, b.handle(t, "2", func(ctx context.Context) error {
		return own.Publish("labels", newMessage(ctx, "inside"), outside)
	}), idempotency.ErrNoTx)

	// In a handler the option changes nothing.
	require.ErrorIs(t, b.handle(t, "3", func(ctx context.Context) error {
		return errors.Join(own.Publish("labels", newMessage(ctx, "rolled back")), errPrinter)
	}), errPrinter)
	require.Equal(t, 3, b.rows(t), "the two, and the last of forwarded")
}

func TestOtherStoresAreRefused(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	b.store = idempotencytest.NewMemStore()
	err := b.handle(t, "1", func(ctx context.Context) error { return b.pub.Publish("labels", newMessage(ctx, "")) })
	require.ErrorIs(t, err, idempotency.ErrNoTx)
	require.ErrorContains(t, err, "*idempotencytest.MemTx")
}

// Each of these aborted the handler's transaction, or changed the message.
func TestTrap26_WhatCannotBeStoredDoesNotReachTheDatabase(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("u", idempotency.MaxProducedUUIDLength)
	text := func(uuid, name, value string) *message.Message {
		msg := message.NewMessage(uuid, nil)
		msg.Metadata.Set(name, value)
		return msg
	}
	tests := map[string]struct {
		topic string
		msgs  []*message.Message
		err   error
		want  int
	}{
		"nothing":               {topic: "labels"},
		"a UUID over 36":        {topic: "labels", msgs: []*message.Message{message.NewMessage(long, nil)}, want: 1},
		"a UUID too long":       {topic: "labels", msgs: []*message.Message{message.NewMessage(long+"u", nil)}, err: outbox.ErrInvalidMessage},
		"a UUID with NUL":       {topic: "labels", msgs: []*message.Message{message.NewMessage("a\x00b", nil)}, want: 1},
		"a UUID not UTF-8":      {topic: "labels", msgs: []*message.Message{message.NewMessage("\xff", nil)}, err: outbox.ErrInvalidMessage},
		"a binary payload":      {topic: "labels", msgs: []*message.Message{message.NewMessage("a", []byte{0, 0xff, 0xfe})}, want: 1},
		"no payload":            {topic: "labels", msgs: []*message.Message{message.NewMessage("a", nil)}, want: 1},
		"metadata with NUL":     {topic: "labels", msgs: []*message.Message{text("a", "b\x00", "c\x00")}, want: 1},
		"metadata not UTF-8":    {topic: "labels", msgs: []*message.Message{text("a", "b", "\xff")}, err: outbox.ErrInvalidMessage},
		"a name not UTF-8":      {topic: "labels", msgs: []*message.Message{text("a", "\xff", "b")}, err: outbox.ErrInvalidMessage},
		"a second one is wrong": {topic: "labels", msgs: []*message.Message{text("a", "b", "c"), text("a", "b", "\xff")}, err: outbox.ErrInvalidMessage},
		"nil":                   {topic: "labels", msgs: []*message.Message{nil}, err: outbox.ErrInvalidMessage},
		"no topic":              {topic: "", msgs: []*message.Message{message.NewMessage("a", nil)}, err: outbox.ErrInvalidMessage},
		"too large": {
			topic: "labels", msgs: []*message.Message{message.NewMessage("a", make([]byte, outbox.MaxMessageSize+1))},
			err: outbox.ErrInvalidMessage,
		},
		"more than there are parameters": {topic: "labels", msgs: many(40_000), want: 40_000},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, "pgx")
			require.NoError(t, b.handle(t, name, func(ctx context.Context) error {
				for _, msg := range test.msgs {
					if msg != nil {
						msg.SetContext(ctx)
					}
				}
				require.ErrorIs(t, b.pub.Publish(test.topic, test.msgs...), test.err)
				tx, err := idempotency.TxFromContext[pgx.Tx](ctx)
				if err != nil {
					return err
				}
				_, err = tx.Exec(ctx, "select 1") // the transaction goes on
				return err
			}))
			require.Equal(t, test.want, b.rows(t))
		})
	}
}

func many(n int) []*message.Message {
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = message.NewMessage(strconv.Itoa(i), nil)
	}
	return msgs
}

// Whatever is in a message comes out of the forwarder as it was, and in order, also over the bounds of a statement.
func TestMessagesAreForwardedAsTheyWere(t *testing.T) {
	t.Parallel()
	forEachStore(t, func(t *testing.T, b *bundle) {
		t.Helper()
		var want []*message.Message
		require.NoError(t, b.handle(t, "1", func(ctx context.Context) error {
			for i := range 250 {
				msg := newMessage(ctx, fmt.Sprintf("%d\x00\xff<&>", i))
				msg.Metadata.Set("name\x00<&>\u2028", "välue\x00")
				want = append(want, msg)
			}
			large := newMessage(ctx, strings.Repeat("x", 3<<20))
			want = append(want, large, newMessage(ctx, "after"))
			return b.pub.Publish("labels", want...)
		}))
		got := b.forwarded(t)
		require.Len(t, got, len(want))
		for i, msg := range want {
			require.Equal(t, msg.UUID, got[i].uuid)
			require.Equal(t, string(msg.Payload), got[i].payload)
			require.Equal(t, msg.Metadata, got[i].metadata)
		}
	})
}

// The modes differ in who knows the types of parameters.
func TestEveryExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			config := pgtest.Config(t, 4)
			config.ConnConfig.DefaultQueryExecMode = mode
			b := setupWith(t, "pgx", config)
			require.NoError(t, b.handle(t, "1", func(ctx context.Context) error {
				return b.pub.Publish("labels", newMessage(ctx, "first\x00"), newMessage(ctx, "second"))
			}))
			require.Equal(t, []string{"labels: first\x00", "labels: second"}, b.forwardedTexts(t))
		})
	}
}

// The statement is qualified: a session's search path does not matter.
func TestSearchPathOfASessionDoesNotMatter(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	require.NoError(t, b.handle(t, "1", func(ctx context.Context) error {
		tx, err := idempotency.TxFromContext[pgx.Tx](ctx)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "set local search_path = ''"); err != nil {
			return err
		}
		return b.pub.Publish("labels", newMessage(ctx, "first"))
	}))
	require.Equal(t, 1, b.rows(t))
}

func TestClosingDoesNotMakePublishFail(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	require.NoError(t, b.handle(t, "1", func(ctx context.Context) error {
		return errors.Join(b.pub.Close(), b.pub.Publish("labels", newMessage(ctx, "first")))
	}))
	require.Equal(t, 1, b.rows(t))
}
