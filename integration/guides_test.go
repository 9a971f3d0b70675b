package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
)

// byOrder puts the events of an order into one partition.
func byOrder(_ string, msg *message.Message) (string, error) {
	var order struct {
		OrderID string `json:"orderId"`
	}
	err := json.Unmarshal(msg.Payload, &order)
	return order.OrderID, err
}

// kafkaTime is in the documentation of idempotency.TimeFunc.
func kafkaTime(msg *message.Message, _ string) (time.Time, error) {
	at, ok := kafka.MessageTimestampFromCtx(msg.Context())
	if !ok {
		return at, idempotency.ErrMissingTime
	}
	return at, nil
}

// What the guides say of Kafka: events of an order come one after the other, also past a Nack, which holds up its partition
// and no other; the timestamp is that of the publishing.
func TestKafkaKeepsTheOrderOfAnOrder(t *testing.T) {
	t.Parallel()
	k := newKafka(t)
	topic := "guides-" + watermill.NewShortUUID()
	k.create(topic, 2)
	marshaler := kafka.NewWithPartitioningMarshaler(byOrder)
	pub, err := kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: k.brokers, Marshaler: marshaler, OverwriteSaramaConfig: k.config(),
	}, watermill.NopLogger{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pub.Close()) })

	const orders, versions = 8, 3
	publish := func(order, version int) {
		msg := message.NewMessage(watermill.NewUUID(), fmt.Appendf(nil, `{"orderId":"O-%d"}`, order))
		msg.Metadata.Set(idempotency.EventIDMetadata, fmt.Sprintf("%d/%d", order, version))
		require.NoError(t, pub.Publish(topic, msg))
	}
	for version := range versions {
		for order := range orders {
			publish(order, version)
		}
	}

	idem, err := idempotency.New(idempotencytest.NewMemStore(), idempotency.WithLogger(watermill.NopLogger{}),
		idempotency.WithReplayHorizon(time.Hour, kafkaTime))
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	require.NoError(t, err)
	var (
		mu       sync.Mutex
		seen     [orders][]int // the versions of each order, in the order of their processing
		times    []time.Time
		all      = make(chan struct{})
		nacked   int
		repeated bool
	)
	router.AddConsumerHandler("orders", topic, k.subscriber(topic), func(msg *message.Message) error {
		var order, version int
		if _, err := fmt.Sscanf(msg.Metadata.Get(idempotency.EventIDMetadata), "%d/%d", &order, &version); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if repeated {
			at, err := kafkaTime(msg, "")
			times = append(times, at)
			close(all)
			return err
		}
		// The first event of all fails until another partition is through, and that waits for the first failure.
		through := slices.ContainsFunc(seen[:], func(processed []int) bool { return len(processed) == versions })
		if order == 0 && version == 0 && !through {
			nacked++
			return errors.New("not yet")
		}
		if version == versions-1 && nacked == 0 {
			return errors.New("not yet")
		}
		seen[order] = append(seen[order], version)
		if order == 0 && version == 0 {
			at, err := kafkaTime(msg, "")
			if err != nil {
				return err
			}
			times = append(times, at)
		}
		for _, processed := range seen {
			if len(processed) != versions {
				return nil
			}
		}
		repeated = true
		close(all)
		return nil
	}).AddMiddleware(idem.Middleware)
	done := make(chan error, 1)
	go func() { done <- router.Run(context.WithoutCancel(t.Context())) }()
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-done)
	})
	wait := func() {
		t.Helper()
		select {
		case <-all:
		case <-time.After(time.Minute):
			mu.Lock()
			defer mu.Unlock()
			t.Fatalf("not all is processed: %v", seen)
		}
	}
	wait()
	mu.Lock()
	require.Positive(t, nacked)
	for order, processed := range seen {
		require.Equal(t, []int{0, 1, 2}, processed, "order %d", order)
	}
	all = make(chan struct{})
	mu.Unlock()

	publish(0, versions) // as a dead-letter topic would be replayed
	wait()
	mu.Lock()
	defer mu.Unlock()
	require.True(t, times[1].After(times[0]), "%v", times)
}
