package idempotency

import (
	"context"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Limits of what one handler call may return under [Replay].
const (
	// MaxProducedMessages is the number of messages.
	MaxProducedMessages = 10_000
	// MaxProducedSize is the sum of their payloads and metadata in bytes: 64 MiB.
	MaxProducedSize = 64 << 20
	// MaxProducedUUIDLength is the length of a UUID in bytes.
	MaxProducedUUIDLength = 255
)

// Produced is the policy for messages that handlers return: [Replay], [Outbox] or [Refuse].
//
// Watermill's router publishes what a handler returns after all middleware, so after the commit. If that fails, the
// redelivery is a duplicate, and without a policy the messages would be gone.
type Produced interface {
	validate() error
	// settle runs inside the transaction, with the handler's context. It returns what the claim's transaction stores and
	// what the router publishes.
	settle(ctx context.Context, produced []*message.Message) (stored, published []*message.Message, err error)
}

// Replay stores the messages in the claim's transaction and lets the router publish them. A duplicate returns them again,
// with the same UUIDs, order, metadata and payloads. Once the router has acked, the stored copies are removed in the
// background, a moment later and many at a time: so a crash, a failed publish or a lost ack can repeat a produced message,
// never lose one, and a late duplicate publishes nothing. Handlers that return nothing pay nothing.
//
// A message without a UUID gets one, and one without [EventIDMetadata] is stamped with its UUID, so that a consumer
// downstream recognises the repetition. Metadata that is copied from the consumed message carries the consumed event's ID
// along: set another one, or delete it, for a message that tells of another event.
//
// More or longer messages than [MaxProducedMessages], [MaxProducedSize] and [MaxProducedUUIDLength] allow, and nil
// messages, are [ErrProducedInvalid] before the commit.
func Replay() Produced { return replay{} }

// Outbox publishes the messages through pub inside the handler's transaction, which pub finds in the messages' context,
// to the topic that the handler has in the router. The router is given none. Package outbox makes such a publisher, and
// relays what it stores.
func Outbox(pub message.Publisher) Produced { return outbox{pub} }

// Refuse makes a handler that returns messages fail with [ErrProducedRefused] before the commit. It is for services whose
// messages all go through a publisher of their own.
func Refuse() Produced { return refuse{} }

type replay struct{}

func (replay) validate() error { return nil }

func (replay) settle(_ context.Context, produced []*message.Message) (stored, published []*message.Message, err error) {
	if err := stampProduced(produced); err != nil {
		return nil, nil, err
	}
	if len(produced) > MaxProducedMessages {
		return nil, nil, fmt.Errorf("%w: %d messages, %d are allowed: let the handler publish through an outbox", ErrProducedInvalid, len(produced), MaxProducedMessages)
	}
	size := 0
	for i, msg := range produced {
		if len(msg.UUID) > MaxProducedUUIDLength || !utf8.ValidString(msg.UUID) || containsNUL(msg.UUID) {
			return nil, nil, fmt.Errorf("%w: message %d has a UUID that cannot be stored: at most %d bytes of UTF-8 without NUL", ErrProducedInvalid, i, MaxProducedUUIDLength)
		}
		size += len(msg.Payload)
		for name, value := range msg.Metadata {
			size += len(name) + len(value)
		}
	}
	if size > MaxProducedSize {
		return nil, nil, fmt.Errorf("%w: %d bytes of payload and metadata, %d are allowed: let the handler publish through an outbox", ErrProducedInvalid, size, MaxProducedSize)
	}
	return produced, produced, nil
}

type outbox struct{ pub message.Publisher }

func (o outbox) validate() error {
	if o.pub == nil {
		return errors.New("Outbox: the publisher is nil")
	}
	return nil
}

func (o outbox) settle(ctx context.Context, produced []*message.Message) (stored, published []*message.Message, err error) {
	if len(produced) == 0 {
		return nil, nil, nil
	}
	topic := message.PublishTopicFromCtx(ctx)
	if topic == "" {
		return nil, nil, fmt.Errorf("%w: Outbox: the router has no publish topic for this handler: add it by router.AddHandler, or let it publish by itself", ErrProducedInvalid)
	}
	if err := stampProduced(produced); err != nil {
		return nil, nil, err
	}
	for _, msg := range produced {
		// What the handler returned may carry no context or another one; the transaction is in the handler's. The
		// consumed message itself, if it is among them, has it already.
		original := msg.Context()
		msg.SetContext(ctx)
		defer msg.SetContext(original) //nolint:contextcheck // it is the message's own
	}
	if err := o.pub.Publish(topic, produced...); err != nil {
		return nil, nil, fmt.Errorf("outbox: publish to topic %q in the handler's transaction: %w", topic, err)
	}
	return nil, nil, nil
}

type refuse struct{}

func (refuse) validate() error { return nil }

func (refuse) settle(_ context.Context, produced []*message.Message) (stored, published []*message.Message, err error) {
	if len(produced) > 0 {
		return nil, nil, fmt.Errorf("%w: %d of them", ErrProducedRefused, len(produced))
	}
	return nil, nil, nil
}
