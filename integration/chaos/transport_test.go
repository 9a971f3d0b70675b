package chaos_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

const (
	partitions = 12 // of Kafka: handlers at once in a group
	prefetch   = 4  // of RabbitMQ: handlers at once in a consumer
)

// transport is what a broker does for consumers and for the judge. Its calls may fail while the broker restarts.
type transport interface {
	create(topic string) error
	// send publishes as a producer without a router; each message may come twice if it fails.
	send(topic string, messages ...*message.Message) error
	publisher() (message.Publisher, error)
	subscriber(topic string) (message.Subscriber, error)
	// unacked returns how many messages of the topic the broker would deliver (again) if all consumers were gone.
	unacked(topic string) (int, error)
	// drain returns the messages of a topic that has no consumer.
	drain(topic string) ([]*message.Message, error)
}

const (
	onKafka   = "kafka"
	onClassic = "rabbitmq"
	onQuorum  = "rabbitmq-quorum"
)

var transportNames = []string{onKafka, onClassic, onQuorum}

// newTransport goes over the addresses in via; Kafka tells clients its own, which is in direct.
func newTransport(name string, via, direct addresses) transport {
	if name == onKafka {
		return &kafkaTransport{via.Kafka, direct.Kafka}
	}
	r := &rabbitTransport{amqp.NewDurableQueueConfig(via.AMQP)}
	if name == onQuorum {
		r.config.Queue.Arguments = amqp091.Table{"x-queue-type": "quorum"}
	}
	r.config.Connection.Reconnect = &amqp.ReconnectConfig{
		BackoffInitialInterval: 100 * time.Millisecond, BackoffMultiplier: 1.5, BackoffMaxInterval: time.Second,
	}
	r.config.Marshaler = stringsOnly{}
	return r
}

// kafkaTransport is watermill-kafka/v3. A topic's group has the topic's name.
type kafkaTransport struct{ via, direct string }

// detour dials another address than the broker's own.
type detour string

func (d detour) Dial(network, _ string) (net.Conn, error) {
	return net.DialTimeout(network, string(d), 5*time.Second)
}

func (k *kafkaTransport) config() *sarama.Config {
	config := kafka.DefaultSaramaSubscriberConfig()
	config.Version = sarama.V2_1_0_0
	config.Net.Proxy.Enable, config.Net.Proxy.Dialer = true, detour(k.via)
	config.Net.ReadTimeout, config.Net.WriteTimeout = 5*time.Second, 5*time.Second
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Interval = 100 * time.Millisecond
	config.Consumer.Group.Session.Timeout = 2 * time.Second // how long a killed consumer is missed
	config.Consumer.Group.Heartbeat.Interval = 300 * time.Millisecond
	config.Consumer.Group.Rebalance.Timeout = 10 * time.Second
	config.Consumer.Group.Rebalance.Retry.Backoff = 200 * time.Millisecond
	config.Producer.Return.Successes = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	return config
}

func (k *kafkaTransport) with(fn func(sarama.Client, sarama.ClusterAdmin) error) error {
	client, err := sarama.NewClient([]string{k.direct}, k.config())
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	admin, err := sarama.NewClusterAdminFromClient(client)
	if err != nil {
		return err
	}
	return fn(client, admin)
}

func (k *kafkaTransport) create(topic string) error {
	return k.with(func(_ sarama.Client, admin sarama.ClusterAdmin) error {
		return admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: partitions, ReplicationFactor: 1}, false)
	})
}

func (k *kafkaTransport) send(topic string, messages ...*message.Message) error {
	return k.with(func(client sarama.Client, _ sarama.ClusterAdmin) error {
		producer, err := sarama.NewSyncProducerFromClient(client)
		if err != nil {
			return err
		}
		defer func() { _ = producer.Close() }()
		for _, msg := range messages {
			record, err := kafka.DefaultMarshaler{}.Marshal(topic, msg)
			if err != nil {
				return err
			}
			if _, _, err := producer.SendMessage(record); err != nil {
				return err
			}
		}
		return nil
	})
}

func (k *kafkaTransport) publisher() (message.Publisher, error) {
	return kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: []string{k.direct}, Marshaler: kafka.DefaultMarshaler{}, OverwriteSaramaConfig: k.config(),
	}, watermill.NopLogger{})
}

func (k *kafkaTransport) subscriber(topic string) (message.Subscriber, error) {
	return kafka.NewSubscriber(kafka.SubscriberConfig{
		Brokers: []string{k.direct}, Unmarshaler: kafka.DefaultMarshaler{}, ConsumerGroup: topic, OverwriteSaramaConfig: k.config(),
		NackResendSleep: 10 * time.Millisecond, ReconnectRetrySleep: 100 * time.Millisecond,
	}, watermill.NopLogger{})
}

// unacked is the lag of the group.
func (k *kafkaTransport) unacked(topic string) (lag int, err error) {
	err = k.with(func(client sarama.Client, admin sarama.ClusterAdmin) error {
		all, err := client.Partitions(topic)
		if err != nil {
			return err
		}
		committed, err := admin.ListConsumerGroupOffsets(topic, map[string][]int32{topic: all})
		if err != nil {
			return err
		}
		for _, partition := range all {
			end, err := client.GetOffset(topic, partition, sarama.OffsetNewest)
			if err != nil {
				return err
			}
			block := committed.GetBlock(topic, partition)
			if block == nil {
				return fmt.Errorf("the broker does not tell offsets: %w", committed.Err) // it has just started
			}
			lag += int(end - max(0, block.Offset)) // -1 is none
		}
		return nil
	})
	return lag, err
}

func (k *kafkaTransport) drain(topic string) (messages []*message.Message, err error) {
	err = k.with(func(client sarama.Client, _ sarama.ClusterAdmin) error {
		consumer, err := sarama.NewConsumerFromClient(client)
		if err != nil {
			return err
		}
		defer func() { _ = consumer.Close() }()
		for partition := range int32(partitions) {
			end, err := client.GetOffset(topic, partition, sarama.OffsetNewest)
			if err != nil {
				return err
			}
			from, err := consumer.ConsumePartition(topic, partition, sarama.OffsetOldest)
			if err != nil {
				return err
			}
			for next := int64(0); next < end; {
				select {
				case record := <-from.Messages():
					msg, err := kafka.DefaultMarshaler{}.Unmarshal(record)
					if err != nil {
						return err
					}
					messages, next = append(messages, msg), record.Offset+1
				case <-time.After(patience):
					return context.DeadlineExceeded
				}
			}
			_ = from.Close()
		}
		return nil
	})
	return messages, err
}

// rabbitTransport consumes by watermill-amqp/v2, with a queue for each topic, and publishes by itself.
type rabbitTransport struct{ config amqp.Config }

// stringsOnly drops headers that are no strings: a quorum queue adds x-delivery-count after a Nack, and the default
// marshaler would refuse the message for ever.
type stringsOnly struct{ amqp.DefaultMarshaler }

func (m stringsOnly) Unmarshal(delivery amqp091.Delivery) (*message.Message, error) {
	headers := make(amqp091.Table, len(delivery.Headers))
	for name, value := range delivery.Headers {
		if text, ok := value.(string); ok {
			headers[name] = text
		}
	}
	delivery.Headers = headers
	return m.DefaultMarshaler.Unmarshal(delivery)
}

func (r *rabbitTransport) with(fn func(*amqp091.Channel) error) error {
	conn, err := r.dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseDeadline(time.Now().Add(time.Second)) }()
	// A broker that is starting, or that is short of credit, may leave a request without an answer.
	bound := time.AfterFunc(3*confirmation, func() { _ = conn.CloseDeadline(time.Now()) })
	defer bound.Stop()
	channel, err := conn.Channel()
	if err != nil {
		return err
	}
	return fn(channel)
}

func (r *rabbitTransport) create(topic string) error {
	return r.with(func(c *amqp091.Channel) error {
		_, err := c.QueueDeclare(topic, true, false, false, false, r.config.Queue.Arguments)
		return err
	})
}

func (r *rabbitTransport) send(topic string, messages ...*message.Message) error {
	return r.with(func(c *amqp091.Channel) error { return r.publish(c, topic, messages) })
}

// confirmation is how long a publish waits for the broker's. After a crash, a quorum queue may never give it.
const confirmation = 5 * time.Second

func (r *rabbitTransport) publish(c *amqp091.Channel, topic string, messages []*message.Message) error {
	if err := c.Confirm(false); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), confirmation)
	defer cancel()
	for _, msg := range messages {
		publishing, err := r.config.Marshaler.Marshal(msg)
		if err != nil {
			return err
		}
		deferred, err := c.PublishWithDeferredConfirmWithContext(ctx, "", topic, false, false, publishing)
		if err != nil {
			return err
		}
		if acked, err := deferred.WaitContext(ctx); err != nil {
			return err
		} else if !acked {
			return errors.New("the broker refuses the message, or is gone")
		}
	}
	return nil
}

// rabbitPublisher takes the place of that of watermill-amqp, which waits for confirmations without a bound: its router
// would not close.
type rabbitPublisher struct {
	*rabbitTransport
	mu   sync.Mutex
	conn *amqp091.Connection // nil if there is none, or it has failed
}

func (p *rabbitPublisher) Publish(topic string, messages ...*message.Message) error {
	conn, err := p.connection()
	if err != nil {
		return err
	}
	channel, err := conn.Channel()
	if err == nil {
		defer func() { _ = channel.Close() }()
		err = p.publish(channel, topic, messages)
	}
	if err != nil {
		p.drop(conn)
	}
	return err
}

func (p *rabbitPublisher) connection() (*amqp091.Connection, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn != nil {
		return p.conn, nil
	}
	conn, err := p.dial()
	if err == nil {
		p.conn = conn
	}
	return conn, err
}

// drop lets the next Publish connect anew, and ends those that use the connection now.
func (p *rabbitPublisher) drop(conn *amqp091.Connection) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == conn {
		p.conn = nil
	}
	_ = conn.CloseDeadline(time.Now().Add(time.Second))
}

func (p *rabbitPublisher) Close() error {
	if conn, err := p.connection(); err == nil {
		p.drop(conn)
	}
	return nil
}

func (r *rabbitTransport) publisher() (message.Publisher, error) {
	p := &rabbitPublisher{rabbitTransport: r}
	_, err := p.connection()
	return p, err
}

func (r *rabbitTransport) dial() (*amqp091.Connection, error) {
	return amqp091.DialConfig(r.config.Connection.AmqpURI, amqp091.Config{Heartbeat: 5 * time.Second, Dial: amqp091.DefaultDial(5 * time.Second)})
}

func (r *rabbitTransport) subscriber(string) (message.Subscriber, error) {
	subscriber, err := amqp.NewSubscriber(r.config, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	return amqpmessage.Parallel(subscriber, prefetch)
}

// unacked is the number of messages in the queue. What a running consumer holds is not seen: it is back, or gone, once that
// has ended.
func (r *rabbitTransport) unacked(topic string) (n int, err error) {
	err = r.with(func(c *amqp091.Channel) error {
		queue, err := c.QueueDeclarePassive(topic, true, false, false, false, r.config.Queue.Arguments)
		n = queue.Messages
		return err
	})
	return n, err
}

func (r *rabbitTransport) drain(topic string) (messages []*message.Message, err error) {
	err = r.with(func(c *amqp091.Channel) error {
		for {
			delivery, ok, err := c.Get(topic, true)
			if err != nil || !ok {
				return err
			}
			msg, err := r.config.Marshaler.Unmarshal(delivery)
			if err != nil {
				return err
			}
			messages = append(messages, msg)
		}
	})
	return messages, err
}

// withApplicationName marks the connections of consumers, so that they can be found, and terminated.
func withApplicationName(address, name string) (string, error) {
	parsed, err := url.Parse(address)
	if err != nil {
		return "", err
	}
	query := parsed.Query()
	query.Set("application_name", name)
	parsed.RawQuery = query.Encode()
	return parsed.String(), nil
}
