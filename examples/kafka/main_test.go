package main

import (
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/examples/internal/e2e"
	"github.com/watermill-idempotency/idempotency/examples/shipping"
)

// The group is new and its topic older than the group: what was published before counts, and a Kafka 4 broker accepts the
// client.
func TestTrap24_ExampleOnKafka4(t *testing.T) {
	t.Parallel()
	topic := e2e.Topic()
	b := broker(strings.Split(e2e.Setting(t, "IDEMPOTENCY_KAFKA_BROKERS"), ","), "group-of-"+topic)
	publisher, err := b.NewPublisher(watermill.NopLogger{})
	require.NoError(t, err)
	require.NoError(t, shipping.Produce(publisher, topic, 20, 3))
	require.NoError(t, publisher.Close())

	service := e2e.Start(t, b, topic)
	service.RequireLabels(t, 20, 60)
}
