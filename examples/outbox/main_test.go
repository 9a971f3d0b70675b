package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/examples/internal/e2e"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/outbox"
)

const patience = time.Minute

func TestExampleOnRabbitMQ(t *testing.T) {
	t.Parallel()
	config := amqpConfig(e2e.Setting(t, "IDEMPOTENCY_AMQP_URL"))
	prefix := e2e.Topic()
	for _, event := range []string{"OrderPlaced", "LabelCreated", "PickupRequested"} {
		deleteQueue(t, config.Connection.AmqpURI, prefix+"shipping."+event)
	}
	testExample(t, rabbitMQ{config}, prefix)
}

func TestExampleOnKafka(t *testing.T) {
	t.Parallel()
	testExample(t, kafkaBroker(t), e2e.Topic())
}

func kafkaBroker(t *testing.T) apacheKafka {
	t.Helper()
	return apacheKafka{strings.Split(e2e.Setting(t, "IDEMPOTENCY_KAFKA_BROKERS"), ",")}
}

// testExample places orders twice each, and waits for their events downstream.
func testExample(t *testing.T, b broker, prefix string) {
	t.Helper()
	const orders = 10
	var mu sync.Mutex
	var got, want []string
	pool := newPool(t)
	s := service{pool: pool, broker: b, prefix: prefix, logger: watermill.NopLogger{}, received: func(event string) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, event)
	}}
	for i := range orders {
		want = append(want, fmt.Sprintf("label for order %d", i+1), fmt.Sprintf("pickup for order %d", i+1))
	}
	slices.Sort(want)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- s.run(ctx, orders) }()
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(got) >= len(want)
	}, patience, 10*time.Millisecond)
	cancel()
	require.NoError(t, <-ended)
	slices.Sort(got)
	require.Equal(t, want, got)

	var labels, events int
	require.NoError(t, pool.QueryRow(t.Context(), "select (select count(*) from shipping_label), (select count(*) from watermill_outbox)").Scan(&labels, &events))
	require.Equal(t, orders, labels)
	require.Equal(t, 2*orders, events)
}

// A queue that refuses what is too much says so in its confirm, and only there.
func TestTrap27_RabbitMQConfirms(t *testing.T) {
	t.Parallel()
	config := amqpConfig(e2e.Setting(t, "IDEMPOTENCY_AMQP_URL"))
	config.Queue.Arguments = amqp091.Table{"x-max-length": 1, "x-overflow": "reject-publish"}
	topic := e2e.Topic()
	deleteQueue(t, config.Connection.AmqpURI, topic)
	channel := dial(t, config.Connection.AmqpURI)
	_, err := channel.QueueDeclare(topic, true, false, false, false, config.Queue.Arguments)
	require.NoError(t, err)
	forward(t, rabbitMQ{config}, topic, 3)
	for i := range 3 {
		var delivery amqp091.Delivery
		require.Eventually(t, func() (ok bool) {
			delivery, ok, err = channel.Get(topic, true)
			return ok
		}, patience, 10*time.Millisecond, "message %d is lost: %v", i, err)
		require.Equal(t, fmt.Sprint(i), string(delivery.Body))
	}
}

// RabbitMQ confirms what leads to no queue, and drops it.
func TestTrap27_RabbitMQNeedsTheQueue(t *testing.T) {
	t.Parallel()
	config := amqpConfig(e2e.Setting(t, "IDEMPOTENCY_AMQP_URL"))
	topic := e2e.Topic()
	deleteQueue(t, config.Connection.AmqpURI, topic)
	publisher, err := rabbitMQ{config}.publisher(watermill.NopLogger{})
	require.NoError(t, err)
	require.NoError(t, publisher.Publish(topic, message.NewMessage("1", []byte("body"))))
	require.NoError(t, publisher.Close())
	delivery, ok, err := dial(t, config.Connection.AmqpURI).Get(topic, true)
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, "body", string(delivery.Body))
}

// Kafka is asked for acks from all replicas, on the wire.
func TestTrap27_KafkaAcksFromAll(t *testing.T) {
	t.Parallel()
	const topic = "labels"
	kafka := sarama.NewMockBroker(t, 1)
	defer kafka.Close()
	kafka.SetHandlerByMap(map[string]sarama.MockResponse{
		"MetadataRequest": sarama.NewMockMetadataResponse(t).SetBroker(kafka.Addr(), kafka.BrokerID()).SetLeader(topic, 0, kafka.BrokerID()),
		"ProduceRequest":  sarama.NewMockProduceResponse(t).SetVersion(7),
	})
	publisher, err := apacheKafka{[]string{kafka.Addr()}}.publisher(watermill.NopLogger{})
	require.NoError(t, err)
	require.NoError(t, publisher.Publish(topic, message.NewMessage("1", nil)))
	require.NoError(t, publisher.Close())
	var acks []sarama.RequiredAcks
	for _, exchange := range kafka.History() {
		if request, ok := exchange.Request.(*sarama.ProduceRequest); ok {
			acks = append(acks, request.RequiredAcks)
		}
	}
	require.Equal(t, []sarama.RequiredAcks{sarama.WaitForAll}, acks)
}

// forward stores messages "0", "1" ... and forwards them until the test ends.
func forward(t *testing.T, b broker, topic string, n int) {
	t.Helper()
	db := stdlib.OpenDBFromPool(newPool(t))
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, outbox.Migrate(t.Context(), db))
	stored, err := outbox.New(t.Context(), db, outbox.WithOwnTransaction())
	require.NoError(t, err)
	for i := range n {
		require.NoError(t, stored.Publish(topic, message.NewMessage("", []byte(fmt.Sprint(i)))))
	}
	publisher, err := b.publisher(watermill.NopLogger{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = publisher.Close() })
	forwarder, err := outbox.NewForwarder(t.Context(), db, publisher, outbox.WithLogger(watermill.NopLogger{}))
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- forwarder.Run(context.WithoutCancel(t.Context())) }()
	<-forwarder.Running()
	t.Cleanup(func() {
		require.NoError(t, forwarder.Close())
		require.NoError(t, <-ended)
	})
}

func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	config := pgtest.Config(t, 16)
	config.ConnConfig.RuntimeParams["search_path"] = pgtest.Schema(t)
	return pgtest.Open(t, config)
}

func dial(t *testing.T, url string) *amqp091.Channel {
	t.Helper()
	conn, err := amqp091.Dial(url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	channel, err := conn.Channel()
	require.NoError(t, err)
	return channel
}

// deleteQueue deletes it with the test.
func deleteQueue(t *testing.T, url, name string) {
	t.Helper()
	t.Cleanup(func() {
		_, err := dial(t, url).QueueDelete(name, false, false, false)
		require.NoError(t, err)
	})
}
