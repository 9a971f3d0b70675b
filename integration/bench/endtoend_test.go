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
)

// partitions of the Kafka topic, and the prefetch count of the RabbitMQ consumer, which is as many messages in flight.
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
	config.Consume.Qos.PrefetchCount = inFlight
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
	return publisher, subscriber
}

// BenchmarkEndToEnd is a router that empties a topic; the handler runs one statement. deduplicator is Watermill's own
// middleware before a plain transaction: it remembers IDs in the memory of one process before the handler runs, so it
// drops what failed and comes again, and knows nothing after a restart or in another instance.
func BenchmarkEndToEnd(b *testing.B) {
	for name, open := range map[string]broker{"kafka": openKafka, "rabbitmq": openRabbit} {
		for _, impl := range []string{"plain", "middleware", "deduplicator"} {
			b.Run(fmt.Sprintf("broker=%s/impl=%s", name, impl), func(b *testing.B) { endToEnd(b, open, impl) })
		}
	}
}

func endToEnd(b *testing.B, open broker, impl string) {
	b.Helper()
	f := setup(b, inFlight)
	publisher, subscriber := open(b, f.schema)
	require.NoError(b, each(8, b.N, func(i int) error { return publisher.Publish(f.schema, newMessage(fmt.Sprintf("event-%d", i))) }))
	require.NoError(b, publisher.Close())

	var handled atomic.Int64
	started, done := make(chan struct{}), make(chan struct{})
	count := func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := next(msg)
			if err != nil {
				return produced, err
			}
			n := handled.Add(1)
			if n == 1 {
				close(started) // the broker has assigned its partitions
			}
			if n == int64(b.N) {
				close(done)
			}
			return produced, nil
		}
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, watermill.NopLogger{})
	require.NoError(b, err)
	handle := message.HandlerFunc(func(msg *message.Message) ([]*message.Message, error) {
		return nil, f.plain(msg.Context(), msg.UUID)
	})
	if impl == "middleware" {
		handle = f.handler()
	}
	added := router.AddConsumerHandler("create-label", f.schema, subscriber, func(msg *message.Message) error {
		_, err := handle(msg)
		return err
	})
	added.AddMiddleware(count)
	switch impl {
	case "middleware":
		added.AddMiddleware(newMiddleware(b, f.store).Middleware)
	case "deduplicator":
		added.AddMiddleware((&middleware.Deduplicator{KeyFactory: middleware.NewMessageHasherFromMetadataField("event_id")}).Middleware)
	}
	ctx, cancel := context.WithTimeout(b.Context(), 2*time.Minute)
	defer cancel()
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(ctx) }()
	await := func(event chan struct{}) {
		select {
		case <-event:
		case <-ctx.Done():
			require.FailNow(b, "the topic is not emptied", "%d of %d messages", handled.Load(), b.N)
		}
	}
	await(started)
	b.ResetTimer()
	await(done)
	b.StopTimer()
	b.ReportMetric(float64(b.N)/max(b.Elapsed().Seconds(), 1e-9), "msg/s")
	require.NoError(b, router.Close())
	require.NoError(b, <-stopped)
	var labels int
	require.NoError(b, f.pool.QueryRow(b.Context(), "select count(*) from "+f.schema+".shipping_label").Scan(&labels))
	require.Equal(b, b.N, labels)
}
