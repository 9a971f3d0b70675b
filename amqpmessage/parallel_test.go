package amqpmessage_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

func TestParallelRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	_, err := amqpmessage.Parallel(nil, 1)
	require.Error(t, err)
	_, err = amqpmessage.Parallel(&subscriptions{}, 0)
	require.ErrorContains(t, err, "0 subscriptions")
}

func TestParallelSubscribesAsOftenOrNotAtAll(t *testing.T) {
	t.Parallel()
	s := &subscriptions{fail: 4}
	parallel, err := amqpmessage.Parallel(s, 3)
	require.NoError(t, err)
	messages, err := parallel.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	require.Len(t, s.contexts, 3)
	for i, channel := range s.channels {
		channel <- message.NewMessage(string(rune('a'+i)), nil)
		require.Equal(t, string(rune('a'+i)), receive(t, messages).UUID)
	}

	_, err = parallel.Subscribe(t.Context(), "orders") // the first of these three fails
	require.ErrorIs(t, err, errFull)
	s.fail = 6
	_, err = parallel.Subscribe(t.Context(), "orders") // and now the second one
	require.ErrorIs(t, err, errFull)
	require.ErrorContains(t, err, `subscription 2 of 3 to "orders"`)
	for _, ctx := range s.contexts[:3] {
		require.NoError(t, ctx.Err())
	}
	require.ErrorIs(t, s.contexts[4].Err(), context.Canceled, "what was subscribed already ends")
	for _, channel := range s.channels {
		close(channel)
	}
	_, open := <-messages
	require.False(t, open, "the subscriptions have ended")
}

// Nobody reads any more: what the subscriptions hand over goes back, and none of them is stuck.
func TestParallelGivesBackWhatNobodyTakes(t *testing.T) {
	t.Parallel()
	for name, stop := range map[string]func(message.Subscriber, context.CancelFunc){
		"closed":    func(s message.Subscriber, _ context.CancelFunc) { _ = s.Close() },
		"cancelled": func(_ message.Subscriber, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s := &subscriptions{}
			parallel, err := amqpmessage.Parallel(s, 2)
			require.NoError(t, err)
			messages, err := parallel.Subscribe(ctx, "orders")
			require.NoError(t, err)
			held := message.NewMessage("1", nil)
			s.channels[0] <- held
			stop(parallel, cancel)
			receive(t, held.Nacked())
			for _, channel := range s.channels {
				close(channel)
			}
			_, open := <-messages
			require.False(t, open)
			require.NoError(t, parallel.Close(), "twice")
		})
	}
}

func TestParallelWithAPubSub(t *testing.T) {
	t.Parallel()
	channel := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	parallel, err := amqpmessage.Parallel(channel, 2)
	require.NoError(t, err)
	messages, err := parallel.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	require.NoError(t, channel.Publish("orders", message.NewMessage("1", nil)))
	for range 2 { // GoChannel has no groups: each subscription gets it, before either is acked
		msg := receive(t, messages)
		defer msg.Ack()
		require.NoError(t, msg.Context().Err())
	}
	require.NoError(t, parallel.Close())
	_, open := <-messages
	require.False(t, open)
}

var errFull = errors.New("no channel left")

// subscriptions is a subscriber that fails in one of its calls.
type subscriptions struct {
	fail     int
	contexts []context.Context
	channels []chan *message.Message
}

func (s *subscriptions) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	s.contexts = append(s.contexts, ctx)
	if len(s.contexts) == s.fail {
		return nil, errFull
	}
	channel := make(chan *message.Message)
	s.channels = append(s.channels, channel)
	return channel, nil
}

func (*subscriptions) Close() error { return nil }

func receive[T any](t *testing.T, from <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-from:
	case <-time.After(patience):
		require.FailNow(t, "nothing came")
	}
	return value
}
