package amqpmessage_test

import (
	"context"
	"crypto/rand"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

// queue is a queue of a test in RabbitMQ, and a client that is not Watermill.
type queue struct {
	*testing.T
	*amqp091.Channel
	name   string
	config amqp.Config
}

func newQueue(t *testing.T, arguments amqp091.Table) *queue {
	t.Helper()
	if testing.Short() {
		t.Skip("needs RabbitMQ: not run with -short")
	}
	url := os.Getenv("IDEMPOTENCY_AMQP_URL")
	if url == "" {
		t.Fatal("IDEMPOTENCY_AMQP_URL is not set: run integration/services/start.sh and then: . .services/env")
	}
	conn, err := amqp091.Dial(url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	channel, err := conn.Channel()
	require.NoError(t, err)
	q := &queue{T: t, Channel: channel, name: "marshaler-" + strings.ToLower(rand.Text()), config: amqp.NewDurableQueueConfig(url)}
	q.config.Queue.Arguments = arguments
	q.config.Publish.ConfirmDelivery = true
	q.config.Marshaler = amqpmessage.Marshaler{}
	q.declare(q.name, arguments)
	return q
}

func (q *queue) declare(name string, arguments amqp091.Table) {
	q.Helper()
	_, err := q.QueueDeclare(name, true, false, false, false, arguments)
	require.NoError(q, err)
	q.Cleanup(func() {
		_, err := q.QueueDelete(name, false, false, false)
		require.NoError(q, err)
	})
}

func (q *queue) send(to string, publishing amqp091.Publishing) {
	q.Helper()
	publishing.DeliveryMode = amqp091.Persistent
	require.NoError(q, q.PublishWithContext(q.Context(), "", to, true, false, publishing))
}

// get waits for a delivery.
func (q *queue) get() (delivery amqp091.Delivery) {
	q.Helper()
	require.Eventually(q, func() bool {
		var ok bool
		var err error
		delivery, ok, err = q.Get(q.name, false)
		require.NoError(q, err)
		return ok
	}, patience, 5*time.Millisecond)
	return delivery
}

func (q *queue) publish(messages ...*message.Message) {
	q.Helper()
	publisher, err := amqp.NewPublisher(q.config, watermill.NopLogger{})
	require.NoError(q, err)
	require.NoError(q, publisher.Publish(q.name, messages...))
	require.NoError(q, publisher.Close())
}

// handle runs a router with one handler until the test ends.
func (q *queue) handle(parallel int, handler message.NoPublishHandlerFunc) {
	q.Helper()
	subscriber, err := amqp.NewSubscriber(q.config, watermill.NopLogger{})
	require.NoError(q, err)
	several, err := amqpmessage.Parallel(subscriber, parallel)
	require.NoError(q, err)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	require.NoError(q, err)
	router.AddConsumerHandler("handler", q.name, several, handler)
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(context.WithoutCancel(q.Context())) }()
	receive(q.T, router.Running())
	q.Cleanup(func() {
		require.NoError(q, router.Close())
		require.NoError(q, receive(q.T, stopped))
	})
}

// The message was dead-lettered once, and nacked once on a quorum queue. It can be consumed, and published again.
func TestTrap23_HeadersOfTheBrokerAreNoStrings(t *testing.T) {
	t.Parallel()
	q := newQueue(t, amqp091.Table{"x-queue-type": "quorum"})
	parking := q.name + ".parking"
	q.declare(parking, amqp091.Table{"x-message-ttl": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": q.name})
	foreign := amqp091.Table{}
	for name, header := range headers {
		if name != "not a number" && name != "infinity" && name != "array of none" { // RabbitMQ closes the connection over them
			foreign[name] = header.value
		}
	}
	q.send(parking, amqp091.Publishing{MessageId: "order-1-placed", Timestamp: sent, Headers: foreign})
	delivery := q.get()
	require.IsType(t, []any{}, delivery.Headers["x-death"])
	_, err := amqp.DefaultMarshaler{}.Unmarshal(delivery)
	require.Error(t, err, "the default marshaler has learnt it: this module may go")
	require.NoError(t, delivery.Nack(false, true))

	received := make(chan *message.Message, 1)
	q.handle(1, func(msg *message.Message) error {
		received <- msg
		return nil
	})
	first := receive(t, received)
	require.Equal(t, "order-1-placed", first.UUID)
	require.Contains(t, first.Metadata["x-death"], `"reason":"expired"`)
	require.Equal(t, "1", first.Metadata["x-delivery-count"])
	for name := range foreign {
		require.Equal(t, headers[name].text, first.Metadata[name], name)
	}

	q.publish(first.Copy())
	second := receive(t, received)
	for name := range first.Metadata {
		if strings.HasPrefix(name, "x-") {
			require.NotContains(t, second.Metadata, name)
			delete(first.Metadata, name)
		}
	}
	require.True(t, first.Equals(second), "%v is %v", first.Metadata, second.Metadata)
}

// A carbon copy is sent once, and the message that is published again, as to a dead-letter queue, is not refused for it.
func TestTrap23_CarbonCopies(t *testing.T) {
	t.Parallel()
	q := newQueue(t, nil)
	copies := q.name + ".copies"
	q.declare(copies, nil)
	q.send(q.name, amqp091.Publishing{MessageId: "1", Headers: amqp091.Table{"CC": []any{copies}}})
	delivery := q.get()
	require.NoError(t, delivery.Ack(false))
	msg, err := amqpmessage.Marshaler{}.Unmarshal(delivery)
	require.NoError(t, err)
	require.JSONEq(t, `["`+copies+`"]`, msg.Metadata["CC"])

	q.publish(msg)
	require.Equal(t, "1", q.get().MessageId)
	state, err := q.QueueDeclarePassive(copies, true, false, false, false, nil)
	require.NoError(t, err)
	require.Equal(t, 1, state.Messages)
}

// watermill-amqp hands over an empty message when its channel closes, here because the queue is deleted.
func TestTrap16_NoPhantomReachesAHandler(t *testing.T) {
	t.Parallel()
	q := newQueue(t, nil)
	received := make(chan *message.Message, 10)
	q.handle(1, func(msg *message.Message) error {
		received <- msg
		return nil
	})
	q.send(q.name, amqp091.Publishing{MessageId: "1"})
	require.Equal(t, "1", receive(t, received).UUID)
	_, err := q.QueueDelete(q.name, false, false, false)
	require.NoError(t, err)
	require.Eventually(t, func() bool { // it has reconnected, and declared the queue
		channel, err := amqp091Channel(q)
		require.NoError(t, err)
		defer func() { _ = channel.Close() }()
		state, err := channel.QueueDeclarePassive(q.name, true, false, false, false, nil)
		return err == nil && state.Consumers == 1
	}, patience, 20*time.Millisecond)
	q.send(q.name, amqp091.Publishing{MessageId: "2"})
	require.Equal(t, "2", receive(t, received).UUID, "a phantom")
}

// amqp091Channel is for what may fail, which closes a channel.
func amqp091Channel(q *queue) (*amqp091.Channel, error) {
	conn, err := amqp091.Dial(os.Getenv("IDEMPOTENCY_AMQP_URL"))
	if err != nil {
		return nil, err
	}
	q.Cleanup(func() { _ = conn.Close() })
	return conn.Channel()
}

func TestParallelHasSeveralMessagesInFlight(t *testing.T) {
	t.Parallel()
	const n = 5
	q := newQueue(t, nil)
	var inFlight atomic.Int32
	entered, leave := make(chan struct{}, 2*n), make(chan struct{})
	q.handle(n, func(*message.Message) error {
		inFlight.Add(1)
		defer inFlight.Add(-1)
		entered <- struct{}{}
		<-leave
		return nil
	})
	for range 2 * n {
		q.send(q.name, amqp091.Publishing{MessageId: "1"})
	}
	for range n {
		receive(t, entered)
	}
	select {
	case <-entered:
		require.FailNow(t, "one too many")
	case <-time.After(300 * time.Millisecond):
	}
	require.Equal(t, int32(n), inFlight.Load())
	close(leave)
	for range n {
		receive(t, entered)
	}
	require.Eventually(t, func() bool { return inFlight.Load() == 0 }, patience, 5*time.Millisecond)
}
