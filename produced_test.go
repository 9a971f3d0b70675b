package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
)

func TestReplayGivesADuplicateTheSameMessages(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(func(*message.Message) ([]*message.Message, error) {
		plain := message.NewMessage("", []byte("b"))
		plain.Metadata = nil
		return []*message.Message{order("a"), plain}, nil
	})
	first, err := handle(order("1")) // the publish fails, and the message comes again
	require.NoError(t, err)
	second, err := handle(order("1"))
	require.NoError(t, err)
	require.Len(t, second, 2)
	for i := range first {
		require.True(t, first[i].Equals(second[i]))
		require.NotSame(t, first[i], second[i])
		require.NotEmpty(t, second[i].UUID)
	}
	require.Equal(t, "a", second[0].Metadata.Get(idempotency.EventIDMetadata), "an event ID of its own is kept")
	require.Equal(t, second[1].UUID, second[1].Metadata.Get(idempotency.EventIDMetadata))
	require.Equal(t, 2, b.observed.all()[1].Produced)
}

func TestReplayForgetsAfterTheAck(t *testing.T) {
	t.Parallel()
	produce := func(*message.Message) ([]*message.Message, error) { return []*message.Message{order("produced")}, nil }

	t.Run("at once in this process, and by Flush", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		handle := b.Middleware.Middleware(produce)
		msg := order("1")
		_, err := handle(msg)
		require.NoError(t, err)
		require.NoError(t, b.Flush(t.Context()))
		require.Len(t, stored(t, b), 1, "not before the ack")
		msg.Ack()
		late, err := handle(order("1"))
		require.NoError(t, err)
		require.Empty(t, late)
		require.NoError(t, b.Flush(t.Context()))
		require.Empty(t, stored(t, b))
	})
	t.Run("in the background, in batches", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			b := setup(t)
			var mu sync.Mutex
			var batches []int
			fail := true
			b.store.acked = func(keys []idempotency.Key) error {
				mu.Lock()
				defer mu.Unlock()
				if fail {
					return errDown
				}
				batches = append(batches, len(keys))
				return nil
			}
			handle := b.Middleware.Middleware(produce)
			for i := range 1200 {
				msg := order(strings.Repeat("i", i+1))
				if i >= idempotency.MaxEventIDLength {
					msg = order(strings.Repeat("j", i-1000))
				}
				_, err := handle(msg)
				require.NoError(t, err)
				msg.Ack()
			}
			time.Sleep(time.Second) //nolint:forbidigo // synctest's clock
			synctest.Wait()
			mu.Lock()
			require.Empty(t, batches)
			fail = false
			mu.Unlock()
			time.Sleep(time.Second) //nolint:forbidigo // synctest's clock
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			require.Equal(t, []int{500, 500, 200}, batches)
			require.Empty(t, stored(t, b))
		})
	})
	t.Run("also while a duplicate reads", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		handle := b.Middleware.Middleware(produce)
		msg := order("1")
		_, err := handle(msg)
		require.NoError(t, err)
		msg.Ack()
		b.store.read = sync.OnceFunc(func() { require.NoError(t, b.Flush(t.Context())) })
		late, err := handle(order("1"))
		require.NoError(t, err)
		require.Empty(t, late, "the record shows what was removed when it had been read")
	})
	t.Run("not after a nack", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		handle := b.Middleware.Middleware(produce)
		msg := order("1")
		_, err := handle(msg)
		require.NoError(t, err)
		msg.Nack()
		require.NoError(t, b.Flush(t.Context()))
		require.Len(t, stored(t, b), 1)

		again := order("1")
		produced, err := handle(again)
		require.NoError(t, err)
		require.Len(t, produced, 1)
		again.Ack()
		require.NoError(t, b.Flush(t.Context()))
		require.Empty(t, stored(t, b))
	})
	t.Run("Flush tells a failure", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		b.store.acked = func([]idempotency.Key) error { return errDown }
		msg := order("1")
		_, err := b.Middleware.Middleware(produce)(msg)
		require.NoError(t, err)
		msg.Ack()
		require.ErrorIs(t, b.Flush(t.Context()), errDown)
		b.store.acked = nil
		require.NoError(t, b.Flush(t.Context()))
	})
}

// stored returns what the store would hand to a duplicate of event 1.
func stored(t *testing.T, b *bundle) []*message.Message {
	t.Helper()
	_, record, err := b.store.MemStore.Claim(t.Context(), idempotency.Claim{Key: idempotency.Key{SubscriberID: "shipping", EventID: "1"}})
	require.NoError(t, err)
	if record == nil {
		return nil
	}
	return record.Produced
}

func TestReplayOfTheConsumedMessageItself(t *testing.T) {
	t.Parallel()
	b := setup(t)
	type contextKey struct{}
	ctx := context.WithValue(t.Context(), contextKey{}, "consumed")
	handle := b.Middleware.Middleware(message.PassthroughHandler)
	for range 2 {
		msg := order("1")
		msg.SetContext(ctx)
		produced, err := handle(msg)
		require.NoError(t, err)
		require.Len(t, produced, 1)
		require.True(t, produced[0].Equals(order("1")))
		_, inTransaction := idempotency.ClaimFromContext(produced[0].Context())
		require.False(t, inTransaction)
	}
}

func TestProducedMessagesCarryNoTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		out := order("produced")
		out.SetContext(msg.Context())
		return []*message.Message{out}, nil
	})
	produced, err := handle(order("1"))
	require.NoError(t, err)
	_, err = idempotency.TxFromContext[*idempotencytest.MemTx](produced[0].Context())
	require.ErrorIs(t, err, idempotency.ErrNoTx)
}

func TestReplayRefusesWhatItCannotStore(t *testing.T) {
	t.Parallel()
	large := message.NewMessage("large", bytes.Repeat([]byte("x"), idempotency.MaxProducedSize+1))
	largeMetadata := order("metadata")
	largeMetadata.Metadata.Set("x", strings.Repeat("x", idempotency.MaxProducedSize))
	for name, produced := range map[string][]*message.Message{
		"nil":              {order("a"), nil},
		"too many":         slices.Repeat([]*message.Message{order("a")}, idempotency.MaxProducedMessages+1),
		"payload too big":  {large},
		"metadata too big": {largeMetadata},
		"UUID too long":    {message.NewMessage(strings.Repeat("x", idempotency.MaxProducedUUIDLength+1), nil)},
		"UUID with NUL":    {message.NewMessage("a\x00", nil)},
		"UUID not UTF-8":   {message.NewMessage("\xff", nil)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			out, err := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) { return produced, nil }))(order("1"))
			require.ErrorIs(t, err, idempotency.ErrProducedInvalid)
			require.False(t, idempotency.IsPermanent(err))
			require.Nil(t, out)
			require.Empty(t, b.store.Effects())
			require.Equal(t, []idempotency.Outcome{idempotency.HandlerFailed}, b.observed.outcomes())
		})
	}
}

func TestRefuse(t *testing.T) {
	t.Parallel()
	b := setup(t, idempotency.WithProduced(idempotency.Refuse()))
	produce := true
	handle := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
		if produce {
			return []*message.Message{order("produced")}, nil
		}
		return nil, nil
	}))
	out, err := handle(order("1"))
	require.ErrorIs(t, err, idempotency.ErrProducedRefused)
	require.Nil(t, out)
	require.Empty(t, b.store.Effects())
	produce = false
	_, err = handle(order("1"))
	require.NoError(t, err)
}

type publisherFunc func(topic string, messages ...*message.Message) error

func (f publisherFunc) Publish(topic string, messages ...*message.Message) error {
	return f(topic, messages...)
}
func (publisherFunc) Close() error { return nil }

func TestOutboxPublishesInTheTransaction(t *testing.T) {
	t.Parallel()
	var failing error
	pub := publisherFunc(func(topic string, messages ...*message.Message) error {
		for _, msg := range messages {
			tx, err := idempotency.TxFromContext[*idempotencytest.MemTx](msg.Context())
			if err != nil {
				return err
			}
			if err := tx.Write(topic + ": " + msg.Metadata.Get(idempotency.EventIDMetadata)); err != nil {
				return err
			}
		}
		defer func() { failing = nil }()
		return failing
	})
	b := setup(t, idempotency.WithProduced(idempotency.Outbox(pub)))

	failing = errors.New("UUID is too long")
	r := startRouter(t)
	r.add("fan-out", "orders", "labels", b.Middleware.Middleware, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{order("a"), msg}, nil
	})
	r.run()
	r.publish("orders", order("1"))
	require.Equal(t, []string{"labels: a", "labels: 1"}, b.store.Effects())
	require.Equal(t, []idempotency.Outcome{idempotency.HandlerFailed, idempotency.Processed}, b.observed.outcomes())
	require.Empty(t, r.published(), "the router was given nothing")
}

// A handler that has succeeded is not undone because its router is closing.
func TestTrap11_OutboxPublishesThoughTheContextHasEnded(t *testing.T) {
	t.Parallel()
	b := setup(t, idempotency.WithProduced(idempotency.Outbox(publisherFunc(func(_ string, messages ...*message.Message) error {
		return messages[0].Context().Err()
	}))))
	r := startRouter(t)
	var cancel context.CancelFunc
	cancellable := func(next message.HandlerFunc) message.HandlerFunc {
		inside := b.Middleware.Middleware(next)
		return func(msg *message.Message) ([]*message.Message, error) {
			var ctx context.Context
			ctx, cancel = context.WithCancel(msg.Context())
			msg.SetContext(ctx)
			return inside(msg)
		}
	}
	r.add("create-label", "orders", "labels", cancellable, writeThen(func(*message.Message) ([]*message.Message, error) {
		cancel()
		return []*message.Message{order("a")}, nil
	}))
	r.run()
	r.publish("orders", order("1"))
	require.Equal(t, []idempotency.Outcome{idempotency.Processed}, b.observed.outcomes())
	require.Len(t, b.store.Effects(), 1)
}

func TestOutboxNeedsAPublishTopic(t *testing.T) {
	t.Parallel()
	b := setup(t, idempotency.WithProduced(idempotency.Outbox(publisherFunc(func(string, ...*message.Message) error { return nil }))))
	_, err := b.Middleware.Middleware(message.PassthroughHandler)(order("1"))
	require.ErrorIs(t, err, idempotency.ErrProducedInvalid)
	require.ErrorContains(t, err, "no publish topic")
}
