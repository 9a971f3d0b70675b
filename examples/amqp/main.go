// Command amqp is the shipping service on RabbitMQ: "consume" in one terminal, "produce" in another.
package main

import (
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
	"github.com/watermill-idempotency/idempotency/examples/shipping"
)

// inFlight is how many messages the service handles at once, and so how many connections of the pool it uses.
const inFlight = 4

func main() {
	shipping.Main(broker(shipping.Setting("IDEMPOTENCY_AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/")))
}

func broker(url string) shipping.Broker {
	config := amqp.NewDurableQueueConfig(url)
	config.Queue.Arguments = amqp091.Table{"x-queue-type": "quorum"} // replicated, where there is a cluster
	config.Publish.ConfirmDelivery = true                            // without it, Publish returns before the broker has the event
	config.Marshaler = amqpmessage.Marshaler{}
	return shipping.Broker{
		NewPublisher: func(logger watermill.LoggerAdapter) (message.Publisher, error) {
			return amqp.NewPublisher(config, logger)
		},
		NewSubscriber: func(logger watermill.LoggerAdapter) (message.Subscriber, error) {
			subscriber, err := amqp.NewSubscriber(config, logger)
			if err != nil {
				return nil, err
			}
			return amqpmessage.Parallel(subscriber, inFlight) // the pool needs a connection for each
		},
	}
}
