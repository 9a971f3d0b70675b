package integration_test

import (
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// rabbitTransport is watermill-amqp/v2, with a queue for each topic.
type rabbitTransport struct {
	url    string
	config amqp.Config
}

func newRabbit(t *testing.T, arguments amqp091.Table) *rabbitTransport {
	t.Helper()
	r := &rabbitTransport{url: setting(t, "IDEMPOTENCY_AMQP_URL")}
	r.config = amqp.NewDurableQueueConfig(r.url)
	r.config.Queue.Arguments = arguments
	r.config.Publish.ConfirmDelivery = true
	r.config.Publish.ChannelPoolSize = 8
	r.config.Marshaler = stringsOnly{}
	return r
}

// stringsOnly drops headers that are no strings: a quorum queue adds x-delivery-count after a Nack, and the default
// marshaler would refuse the message for ever.
type stringsOnly struct{ amqp.DefaultMarshaler }

func (m stringsOnly) Unmarshal(delivery amqp091.Delivery) (*message.Message, error) {
	headers := make(amqp091.Table, len(delivery.Headers))
	for name, value := range delivery.Headers {
		if text, ok := value.(string); ok {
			headers[name] = text
		}
	}
	delivery.Headers = headers
	return m.DefaultMarshaler.Unmarshal(delivery)
}

func (r *rabbitTransport) withChannel(t *testing.T, fn func(*amqp091.Channel)) {
	t.Helper()
	conn, err := amqp091.Dial(r.url)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	channel, err := conn.Channel()
	require.NoError(t, err)
	fn(channel)
}

func (r *rabbitTransport) create(t *testing.T, topic string, _ int32) {
	t.Helper()
	r.declare(t, topic)
	t.Cleanup(func() { r.delete(t, topic) })
}

func (r *rabbitTransport) delete(t *testing.T, topic string) {
	t.Helper()
	r.withChannel(t, func(c *amqp091.Channel) {
		_, err := c.QueueDelete(topic, false, false, false)
		require.NoError(t, err)
	})
}

func (r *rabbitTransport) declare(t *testing.T, topic string) {
	t.Helper()
	r.withChannel(t, func(c *amqp091.Channel) {
		_, err := c.QueueDeclare(topic, true, false, false, false, r.config.Queue.Arguments)
		require.NoError(t, err)
	})
}

func (r *rabbitTransport) publisher(t *testing.T) message.Publisher {
	t.Helper()
	publisher, err := amqp.NewPublisher(r.config, watermill.NopLogger{})
	require.NoError(t, err)
	return &guardedPublisher{Publisher: publisher}
}

// guardedPublisher keeps Publish and Close apart, as the router does not: in the adapter, the two are a data race.
type guardedPublisher struct {
	message.Publisher
	mu sync.RWMutex
}

func (p *guardedPublisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.Publisher.Publish(topic, messages...)
}

func (p *guardedPublisher) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.Publisher.Close()
}

func (r *rabbitTransport) subscriber(t *testing.T, _ string) message.Subscriber {
	t.Helper()
	subscriber, err := amqp.NewSubscriber(r.config, watermill.NopLogger{})
	require.NoError(t, err)
	return subscriber
}

// unacked is the number of messages in the queue. What a running consumer holds is not seen: it is back, or gone, once that
// has closed.
func (r *rabbitTransport) unacked(t *testing.T, topic string) (n int) {
	t.Helper()
	r.withChannel(t, func(c *amqp091.Channel) {
		queue, err := c.QueueDeclarePassive(topic, true, false, false, false, r.config.Queue.Arguments)
		require.NoError(t, err)
		n = queue.Messages
	})
	return n
}

