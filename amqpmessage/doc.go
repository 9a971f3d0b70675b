// Package amqpmessage is what a consumer on RabbitMQ needs beside watermill-amqp/v2: a [Marshaler] that takes whatever a
// broker and producers that are not Watermill may send, and [Parallel] for several messages in flight.
//
//	config := amqp.NewDurableQueueConfig(url)
//	config.Marshaler = amqpmessage.Marshaler{}
//	subscriber, err := amqp.NewSubscriber(config, logger)
//	parallel, err := amqpmessage.Parallel(subscriber, 10)
//
// watermill-amqp's own DefaultMarshaler drops all properties of AMQP, also the message ID, and refuses each message with a
// header that is not a string: x-death, once it was dead-lettered, and x-delivery-count, after one Nack on a quorum queue.
// A message that is refused comes again at once, for ever, before any middleware sees it.
//
// It is a module of its own, so that a service on another broker does not compile AMQP.
package amqpmessage
