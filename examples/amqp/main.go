// Command amqp is the shipping service on RabbitMQ: "consume" in one terminal, "produce" in another.
package main

import (
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/watermill-idempotency/idempotency/examples/shipping"
)

func main() {
	shipping.Main(broker(shipping.Setting("IDEMPOTENCY_AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/")))
}

func broker(url string) shipping.Broker {
	config := amqp.NewDurableQueueConfig(url)
	config.Queue.Arguments = amqp091.Table{"x-queue-type": "quorum"} // replicated, where there is a cluster
	config.Consume.Qos.PrefetchCount = 10                            // messages in flight: the pool needs as many connections
	config.Publish.ConfirmDelivery = true                            // without it, Publish returns before the broker has the event
	config.Marshaler = Marshaler{}
	return shipping.Broker{
		NewPublisher: func(logger watermill.LoggerAdapter) (message.Publisher, error) {
			return amqp.NewPublisher(config, logger)
		},
		NewSubscriber: func(logger watermill.LoggerAdapter) (message.Subscriber, error) {
			return amqp.NewSubscriber(config, logger)
		},
	}
}
