package bench

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

// inFlight is the number of partitions of a Kafka topic, and of subscriptions to a RabbitMQ queue.
const inFlight = 12

// broker makes a topic of its own, and returns both ends of it.
type broker func(b *testing.B, topic string) (message.Publisher, message.Subscriber)

func address(b *testing.B, variable string) string {
	b.Helper()
	value := os.Getenv(variable)
	if value == "" {
		b.Fatalf("%s is not set: run integration/services/start.sh and then: . .services/env", variable)
	}
	return value
}

func openKafka(b *testing.B, topic string) (message.Publisher, message.Subscriber) {
	b.Helper()
	brokers := strings.Split(address(b, "IDEMPOTENCY_KAFKA_BROKERS"), ",")
	config := kafka.DefaultSaramaSubscriberConfig()
	config.Version = sarama.V2_1_0_0
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Producer.Return.Successes = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	admin, err := sarama.NewClusterAdmin(brokers, config)
	require.NoError(b, err)
	require.NoError(b, admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: inFlight, ReplicationFactor: 1}, false))
	b.Cleanup(func() {
		_ = admin.DeleteTopic(topic)
		_ = admin.DeleteConsumerGroup(topic)
		_ = admin.Close()
	})
	publisher, err := kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: brokers, Marshaler: kafka.DefaultMarshaler{}, OverwriteSaramaConfig: config,
	}, watermill.NopLogger{})
	require.NoError(b, err)
	subscriber, err := kafka.NewSubscriber(kafka.SubscriberConfig{
		Brokers: brokers, Unmarshaler: kafka.DefaultMarshaler{}, ConsumerGroup: topic, OverwriteSaramaConfig: config,
	}, watermill.NopLogger{})
	require.NoError(b, err)
	return publisher, subscriber
}

func openRabbit(b *testing.B, topic string) (message.Publisher, message.Subscriber) {
	b.Helper()
	url := address(b, "IDEMPOTENCY_AMQP_URL")
	config := amqp.NewDurableQueueConfig(url)
	config.Consume.Qos.PrefetchCount = 5 // for each subscription
	config.Publish.ConfirmDelivery = true
	config.Publish.ChannelPoolSize = 8
	b.Cleanup(func() {
		conn, err := amqp091.Dial(url)
		require.NoError(b, err)
		defer func() { _ = conn.Close() }()
		channel, err := conn.Channel()
		require.NoError(b, err)
		_, err = channel.QueueDelete(topic, false, false, false)
		require.NoError(b, err)
	})
	publisher, err := amqp.NewPublisher(config, watermill.NopLogger{})
	require.NoError(b, err)
	subscriber, err := amqp.NewSubscriber(config, watermill.NopLogger{})
	require.NoError(b, err)
	require.NoError(b, subscriber.SubscribeInitialize(topic)) // without a queue, what is published is dropped
	parallel, err := amqpmessage.Parallel(subscriber, inFlight)
	require.NoError(b, err)
	return publisher, parallel
}

// BenchmarkEndToEnd compares handlers of a router that empty topics of their own; each runs one statement. deduplicator is
// Watermill's own middleware before a plain transaction: it remembers IDs in the memory of one process before the handler
// runs, so it drops what failed and comes again, and knows nothing after a restart or in another instance.
func BenchmarkEndToEnd(b *testing.B) {
	for name, open := range map[string]broker{"kafka": openKafka, "rabbitmq": openRabbit} {
		for _, distance := range []time.Duration{0, time.Millisecond} {
			b.Run(fmt.Sprintf("broker=%s/added=%v", name, distance), func(b *testing.B) { endToEnd(b, open, distance) })
		}
	}
}

func endToEnd(b *testing.B, open broker, distance time.Duration) {
	b.Helper()
	const turn = 20 * inFlight
	turns := turnsOf(b, turn)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, watermill.NopLogger{})
	require.NoError(b, err)
	var fixtures []*fixture
	var contenders []contender
	for _, name := range []string{"middleware", "plain", "deduplicator"} {
		f := setupAt(b, at(b, inFlight, distance))
		publisher, subscriber := open(b, f.schema)
		// More than are taken, so that no partition is empty before the last turn is over.
		require.NoError(b, each(8, turns*turn*5/4+turn, func(i int) error {
			return publisher.Publish(f.schema, newMessage(fmt.Sprintf("event-%d", i)))
		}))
		require.NoError(b, publisher.Close())
		handle := f.handler()
		added := router.AddConsumerHandler(name, f.schema, subscriber, func(msg *message.Message) error {
			if name == "middleware" {
				_, err := handle(msg)
				return err
			}
			return f.plain(msg.Context(), msg.UUID)
		})
		g := newGate(turn)
		added.AddMiddleware(g.middleware)
		switch name {
		case "middleware":
			added.AddMiddleware(newMiddleware(b, f.store).Middleware)
		case "deduplicator":
			added.AddMiddleware((&middleware.Deduplicator{KeyFactory: middleware.NewMessageHasherFromMetadataField("event_id")}).Middleware)
		}
		contenders = append(contenders, contender{name, func(int) time.Duration { return g.open(b, turn) / turn }})
		fixtures = append(fixtures, f)
	}
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(ctx) }()
	for _, c := range contenders {
		c.take(0) // the broker assigns partitions, and connections prepare statements
	}
	compare(b, turn, contenders, "middleware/plain", "deduplicator/plain")
	require.NoError(b, router.Close())
	require.NoError(b, <-stopped)
	for _, f := range fixtures {
		f.requireLabels(b, (turns+1)*turn)
	}
}

// A gate is a middleware that holds all messages, except those that it is open for.
type gate struct {
	passes chan struct{}
	closed chan struct{}
	left   atomic.Int64
}

func newGate(most int) *gate {
	return &gate{passes: make(chan struct{}, most), closed: make(chan struct{})}
}

func (g *gate) middleware(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		select {
		case <-g.passes:
		case <-msg.Context().Done():
			return nil, msg.Context().Err()
		}
		produced, err := next(msg)
		if err == nil && g.left.Add(-1) == 0 {
			g.closed <- struct{}{}
		}
		return produced, err
	}
}

// open lets n messages pass, and returns how long they took.
func (g *gate) open(b *testing.B, n int) time.Duration {
	b.Helper()
	began := time.Now()
	g.left.Store(int64(n))
	for range n {
		g.passes <- struct{}{}
	}
	select {
	case <-g.closed:
	case <-time.After(time.Minute):
		require.FailNow(b, "a turn does not end", "%d of %d messages are left", g.left.Load(), n)
	}
	return time.Since(began)
}
