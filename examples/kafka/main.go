// Command kafka is the shipping service on Kafka: "consume" in one terminal, "produce" in another.
package main

import (
	"strings"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-idempotency/idempotency/examples/shipping"
)

func main() {
	brokers := strings.Split(shipping.Setting("IDEMPOTENCY_KAFKA_BROKERS", "127.0.0.1:9092"), ",")
	shipping.Main(broker(brokers, "shipping"))
}

func broker(brokers []string, group string) shipping.Broker {
	return shipping.Broker{
		NewPublisher: func(logger watermill.LoggerAdapter) (message.Publisher, error) {
			return kafka.NewPublisher(kafka.PublisherConfig{
				Brokers:               brokers,
				Marshaler:             kafka.DefaultMarshaler{},
				OverwriteSaramaConfig: publisherConfig(),
			}, logger)
		},
		NewSubscriber: func(logger watermill.LoggerAdapter) (message.Subscriber, error) {
			return kafka.NewSubscriber(kafka.SubscriberConfig{
				Brokers:               brokers,
				Unmarshaler:           kafka.DefaultMarshaler{},
				ConsumerGroup:         group,
				NackResendSleep:       time.Second, // what cannot be processed now need not be tried at once
				OverwriteSaramaConfig: subscriberConfig(),
			}, logger)
		},
	}
}

// version is the oldest broker that is spoken to. The adapter's default, 1.0.0, uses requests that Kafka 4 is about to
// refuse: its brokers accept clients of 2.1 and newer.
var version = sarama.V2_1_0_0

func publisherConfig() *sarama.Config {
	config := kafka.DefaultSaramaSyncPublisherConfig()
	config.Version = version
	config.Producer.RequiredAcks = sarama.WaitForAll // an event that one replica has can be lost with it
	return config
}

func subscriberConfig() *sarama.Config {
	config := kafka.DefaultSaramaSubscriberConfig()
	config.Version = version
	// The adapter's default is the newest offset: a group that is new, or was away for longer than its offsets are kept,
	// would skip what was published before.
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	return config
}
