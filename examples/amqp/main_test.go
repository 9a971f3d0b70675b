package main

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
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

// A message that was dead-lettered once, and nacked once on a quorum queue, has headers that are no strings. The default
// marshaler refuses it for ever.
func TestTrap23_HeadersOfTheBrokerAreNoStrings(t *testing.T) {
	t.Parallel()
	topic := e2e.Topic()
	url := e2e.Setting(t, "IDEMPOTENCY_AMQP_URL")
	channel := dial(t, url)
	parking := topic + ".parking"
	_, err := channel.QueueDeclare(parking, true, false, false, false, amqp091.Table{
		"x-message-ttl": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": topic,
	})
	require.NoError(t, err)
	_, err = channel.QueueDeclare(topic, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"})
	require.NoError(t, err)
	t.Cleanup(func() { deleteQueues(t, url, topic, topic+".dead", parking) })

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, channel.PublishWithContext(ctx, "", parking, true, false, amqp091.Publishing{
		MessageId: "order-1-placed", DeliveryMode: amqp091.Persistent, Body: []byte(`{"order_id":"1"}`),
		Headers: amqp091.Table{"event_id": "order-1-placed", "attempt": int32(1), "nested": amqp091.Table{"a": int64(1)}},
	}))
	var delivery amqp091.Delivery
	require.Eventually(t, func() bool { // it has come from the parking queue: nack it once
		var ok bool
		delivery, ok, err = channel.Get(topic, false)
		require.NoError(t, err)
		return ok
	}, time.Minute, 10*time.Millisecond)
	require.IsType(t, []any{}, delivery.Headers["x-death"])
	_, err = amqp.DefaultMarshaler{}.Unmarshal(delivery)
	require.Error(t, err, "the default marshaler has learnt it: this one may go")
	require.NoError(t, delivery.Nack(false, true))

	service := e2e.Start(t, broker(url), topic)
	service.RequireLabels(t, 1, 1)
}

func TestMarshalerKeepsWhatAMQPHas(t *testing.T) {
	t.Parallel()
	sent := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	msg, err := Marshaler{}.Unmarshal(amqp091.Delivery{
		MessageId: "m", CorrelationId: "c", Type: "t", ContentType: "application/json", AppId: "a", Timestamp: sent,
		Body: []byte("body"),
		Headers: amqp091.Table{
			"string": "s", "nil": nil, "bool": true, "byte": byte(1), "int": int64(-2), "float": float32(0.1), "bytes": []byte("b"),
			"time": sent, "decimal": amqp091.Decimal{Scale: 1, Value: 15},
			"table": amqp091.Table{"k": "v"}, "array": []any{int32(1), "x", amqp091.Table{"count": int64(3)}},
			"type":                           "a header wins",
			amqp.DefaultMessageUUIDHeaderKey: "uuid",
		},
	})
	require.NoError(t, err)
	require.Equal(t, "uuid", msg.UUID)
	require.Equal(t, message.Payload("body"), msg.Payload)
	require.Equal(t, message.Metadata{
		"message_id": "m", "correlation_id": "c", "type": "a header wins", "content_type": "application/json", "app_id": "a",
		"timestamp": "2026-01-02T03:04:05Z", "string": "s", "nil": "", "bool": "true", "byte": "1", "int": "-2", "float": "0.1", "bytes": "b",
		"time": "2026-01-02T03:04:05Z", "decimal": "{1 15}", "table": `{"k":"v"}`, "array": `[1,"x",{"count":3}]`,
	}, msg.Metadata)

	msg.Metadata.Set("x-death", "[]")
	msg.Metadata.Set("x-first-death-queue", "q")
	publishing, err := Marshaler{}.Marshal(msg)
	require.NoError(t, err)
	require.Equal(t, "m", publishing.MessageId)
	require.Equal(t, "c", publishing.CorrelationId)
	require.Equal(t, "application/json", publishing.ContentType)
	require.Equal(t, sent, publishing.Timestamp)
	require.Equal(t, amqp091.Persistent, publishing.DeliveryMode)
	require.NotContains(t, publishing.Headers, "x-death", "what the broker owns is not sent again")
	require.NotContains(t, publishing.Headers, "x-first-death-queue")
	again, err := Marshaler{}.Unmarshal(amqp091.Delivery{
		MessageId: publishing.MessageId, CorrelationId: publishing.CorrelationId, Type: publishing.Type, ContentType: publishing.ContentType,
		AppId: publishing.AppId, Timestamp: publishing.Timestamp, Headers: publishing.Headers, Body: publishing.Body,
	})
	require.NoError(t, err)
	delete(msg.Metadata, "x-death")
	delete(msg.Metadata, "x-first-death-queue")
	require.True(t, msg.Equals(again))
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
