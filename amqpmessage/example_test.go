package amqpmessage_test

import (
	"fmt"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

// A message from a producer that is not Watermill, which was nacked once on a quorum queue.
func ExampleMarshaler_Unmarshal() {
	msg, err := amqpmessage.Marshaler{}.Unmarshal(amqp091.Delivery{
		MessageId: "order-1-placed",
		Type:      "order.placed",
		Headers:   amqp091.Table{"x-delivery-count": int64(1), "tags": []any{"new", int32(7)}},
		Body:      []byte(`{"order":1}`),
	})
	fmt.Println(err)
	fmt.Println(msg.UUID)
	for _, name := range []string{amqpmessage.MessageID, amqpmessage.Type, "x-delivery-count", "tags"} {
		fmt.Println(name, "=", msg.Metadata.Get(name))
	}
	// Output:
	// <nil>
	// order-1-placed
	// message_id = order-1-placed
	// type = order.placed
	// x-delivery-count = 1
	// tags = ["new",7]
}
