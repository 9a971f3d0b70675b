package main

import (
	"sync"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

// broker makes publishers that are fit for a forwarder: they return nil only for what the broker has stored.
type broker interface {
	publisher(logger watermill.LoggerAdapter) (message.Publisher, error)
	subscriber(group string, logger watermill.LoggerAdapter) (message.Subscriber, error)
}

type rabbitMQ struct{ config amqp.Config }

func amqpConfig(url string) amqp.Config {
	config := amqp.NewDurableQueueConfig(url)
	config.Queue.Arguments = amqp091.Table{"x-queue-type": "quorum"} // replicated, where there is a cluster
	config.Consume.Qos.PrefetchCount = 5
	config.Marshaler = amqpmessage.Marshaler{} // the default one refuses what a quorum queue delivers a second time
	// Without confirms, a message is gone when the connection breaks or the queue refuses it. Not Transactional: it hides
	// errors.
	config.Publish.ConfirmDelivery = true
	config.Publish.ChannelPoolSize = 1 // instead of a new channel for each message
	return config
}

func (b rabbitMQ) publisher(logger watermill.LoggerAdapter) (message.Publisher, error) {
	publisher, err := amqp.NewPublisher(b.config, logger)
	if err != nil {
		return nil, err
	}
	declarer, err := amqp.NewSubscriber(b.config, logger)
	if err != nil {
		_ = publisher.Close()
		return nil, err
	}
	return &declaring{Publisher: publisher, declarer: declarer}, nil
}

func (b rabbitMQ) subscriber(_ string, logger watermill.LoggerAdapter) (message.Subscriber, error) {
	return amqp.NewSubscriber(b.config, logger)
}

// declaring declares a queue before the first message goes there: RabbitMQ drops what leads to no queue, and confirms it.
type declaring struct {
	message.Publisher
	declarer *amqp.Subscriber
	declared sync.Map
}

// Publish implements message.Publisher.
func (d *declaring) Publish(topic string, messages ...*message.Message) error {
	if _, ok := d.declared.Load(topic); !ok {
		if err := d.declarer.SubscribeInitialize(topic); err != nil {
			return err
		}
		d.declared.Store(topic, true)
	}
	return d.Publisher.Publish(topic, messages...)
}

// Close implements message.Publisher.
func (d *declaring) Close() error {
	_ = d.declarer.Close()
	return d.Publisher.Close()
}

type apacheKafka struct{ addresses []string }

func (b apacheKafka) publisher(logger watermill.LoggerAdapter) (message.Publisher, error) {
	config := kafka.DefaultSaramaSyncPublisherConfig()
	config.Version = sarama.V2_1_0_0 // the oldest that Kafka 4 accepts
	// Watermill's default is the ack of one replica, and a message that one replica has is lost with it. Topics need a
	// min.insync.replicas of at least two for it to count.
	config.Producer.RequiredAcks = sarama.WaitForAll
	return kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: b.addresses, Marshaler: kafka.DefaultMarshaler{}, OverwriteSaramaConfig: config,
	}, logger)
}

func (b apacheKafka) subscriber(group string, logger watermill.LoggerAdapter) (message.Subscriber, error) {
	config := kafka.DefaultSaramaSubscriberConfig()
	config.Version = sarama.V2_1_0_0
	config.Consumer.Offsets.Initial = sarama.OffsetOldest // the default would skip what was published before
	return kafka.NewSubscriber(kafka.SubscriberConfig{
		Brokers: b.addresses, Unmarshaler: kafka.DefaultMarshaler{}, ConsumerGroup: group, OverwriteSaramaConfig: config,
	}, logger)
}
