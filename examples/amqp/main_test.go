package main

import (
	"testing"

	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/examples/internal/e2e"
	"github.com/watermill-idempotency/idempotency/examples/shipping"
)

func TestExampleOnRabbitMQ(t *testing.T) {
	t.Parallel()
	topic := e2e.Topic()
	url := e2e.Setting(t, "IDEMPOTENCY_AMQP_URL")
	service := e2e.Start(t, broker(url), topic)
	t.Cleanup(func() { deleteQueues(t, url, topic, topic+".dead") })
	require.NoError(t, shipping.Produce(service.Publisher, topic, 20, 3))
	service.RequireLabels(t, 20, 60)
}

func deleteQueues(t *testing.T, url string, names ...string) {
	t.Helper()
	conn, err := amqp091.Dial(url)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	channel, err := conn.Channel()
	require.NoError(t, err)
	for _, name := range names {
		_, err = channel.QueueDelete(name, false, false, false)
		require.NoError(t, err)
	}
}
