package integration_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// rabbitTransport is watermill-amqp/v2, with a queue for each topic.
type rabbitTransport struct {
	*testing.T
	url    string
	config amqp.Config
}

func newRabbit(t *testing.T, arguments amqp091.Table) *rabbitTransport {
	t.Helper()
	r := &rabbitTransport{T: t, url: setting(t, "IDEMPOTENCY_AMQP_URL")}
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

func (r *rabbitTransport) withChannel(fn func(*amqp091.Channel)) {
	r.Helper()
	conn, err := amqp091.Dial(r.url)
	require.NoError(r, err)
	defer func() { _ = conn.Close() }()
	channel, err := conn.Channel()
	require.NoError(r, err)
	fn(channel)
}

func (r *rabbitTransport) create(topic string, _ int32) {
	r.Helper()
	r.declare(topic)
	r.Cleanup(func() { r.delete(topic) })
}

func (r *rabbitTransport) delete(topic string) {
	r.Helper()
	r.withChannel(func(c *amqp091.Channel) {
		_, err := c.QueueDelete(topic, false, false, false)
		require.NoError(r, err)
	})
}

func (r *rabbitTransport) declare(topic string) {
	r.Helper()
	r.withChannel(func(c *amqp091.Channel) {
		_, err := c.QueueDeclare(topic, true, false, false, false, r.config.Queue.Arguments)
		require.NoError(r, err)
	})
}

func (r *rabbitTransport) publisher() message.Publisher {
	r.Helper()
	publisher, err := amqp.NewPublisher(r.config, watermill.NopLogger{})
	require.NoError(r, err)
	return publisher
}

func (r *rabbitTransport) subscriber(_ string) message.Subscriber {
	r.Helper()
	subscriber, err := amqp.NewSubscriber(r.config, watermill.NopLogger{})
	require.NoError(r, err)
	return subscriber
}

// unacked is the number of messages in the queue. What a running consumer holds is not seen: it is back, or gone, once that
// has closed.
func (r *rabbitTransport) unacked(topic string) (n int) {
	r.Helper()
	r.withChannel(func(c *amqp091.Channel) {
		queue, err := c.QueueDeclarePassive(topic, true, false, false, false, r.config.Queue.Arguments)
		require.NoError(r, err)
		n = queue.Messages
	})
	return n
}
