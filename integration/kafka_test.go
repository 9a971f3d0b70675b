package integration_test

import (
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

// kafkaTransport is watermill-kafka/v3. A topic's group has the topic's name.
type kafkaTransport struct {
	*testing.T
	brokers []string
	client  sarama.Client
	// rebalanceTimeout is how long the broker waits for a consumer whose handler runs.
	rebalanceTimeout time.Duration
}

func newKafka(t *testing.T) *kafkaTransport {
	t.Helper()
	k := &kafkaTransport{T: t, brokers: strings.Split(setting(t, "IDEMPOTENCY_KAFKA_BROKERS"), ","), rebalanceTimeout: time.Minute}
	var err error
	k.client, err = sarama.NewClient(k.brokers, k.config())
	require.NoError(t, err)
	t.Cleanup(func() { _ = k.client.Close() })
	return k
}

func (k *kafkaTransport) config() *sarama.Config {
	config := kafka.DefaultSaramaSubscriberConfig()
	config.Version = sarama.V2_1_0_0
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Interval = 100 * time.Millisecond
	config.Consumer.Group.Session.Timeout = 6 * time.Second // the least that a broker allows: how long a killed consumer is missed
	config.Consumer.Group.Heartbeat.Interval = 300 * time.Millisecond
	config.Consumer.Group.Rebalance.Timeout = k.rebalanceTimeout
	config.Consumer.Group.Rebalance.Retry.Backoff = 200 * time.Millisecond
	config.Producer.Return.Successes = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	return config
}

func (k *kafkaTransport) admin() sarama.ClusterAdmin {
	k.Helper()
	admin, err := sarama.NewClusterAdminFromClient(k.client)
	require.NoError(k, err)
	return admin
}

func (k *kafkaTransport) create(topic string, partitions int32) {
	k.Helper()
	admin := k.admin()
	require.NoError(k, admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: partitions, ReplicationFactor: 1}, false))
	k.Cleanup(func() {
		_ = admin.DeleteTopic(topic)
		_ = admin.DeleteConsumerGroup(topic)
	})
}

func (k *kafkaTransport) publisher() message.Publisher {
	k.Helper()
	publisher, err := kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: k.brokers, Marshaler: kafka.DefaultMarshaler{}, OverwriteSaramaConfig: k.config(),
	}, watermill.NopLogger{})
	require.NoError(k, err)
	return publisher
}

func (k *kafkaTransport) subscriber(topic string) message.Subscriber {
	k.Helper()
	subscriber, err := kafka.NewSubscriber(kafka.SubscriberConfig{
		Brokers: k.brokers, Unmarshaler: kafka.DefaultMarshaler{}, ConsumerGroup: topic, OverwriteSaramaConfig: k.config(),
		NackResendSleep: 10 * time.Millisecond, ReconnectRetrySleep: 100 * time.Millisecond,
	}, watermill.NopLogger{})
	require.NoError(k, err)
	return subscriber
}

// unacked is the lag of the group.
func (k *kafkaTransport) unacked(topic string) int {
	k.Helper()
	require.NoError(k, k.client.RefreshMetadata(topic))
	partitions, err := k.client.Partitions(topic)
	require.NoError(k, err)
	committed, err := k.admin().ListConsumerGroupOffsets(topic, map[string][]int32{topic: partitions})
	require.NoError(k, err)
	var lag int64
	for _, partition := range partitions {
		end, err := k.client.GetOffset(topic, partition, sarama.OffsetNewest)
		require.NoError(k, err)
		lag += end - max(0, committed.GetBlock(topic, partition).Offset) // -1 is none
	}
	return int(lag)
}
