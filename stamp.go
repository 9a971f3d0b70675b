package idempotency

import (
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
)

// StampEventID is the message.PublisherDecorator for producers: it gives each message without [EventIDMetadata] one, a new
// UUIDv7 (RFC 9562), before it is published. It writes to the message, so a producer that publishes the same message again
// after an error, the forwarder and dead-letter replays keep the ID.
//
//	pub, err := idempotency.StampEventID(pub)
//	router.AddPublisherDecorators(idempotency.StampEventID)
//
// A producer that makes the message anew for each try must set the ID itself, and so must a router that passes on messages
// of others: each delivery would get another ID. It is safe for concurrent use if pub is.
func StampEventID(pub message.Publisher) (message.Publisher, error) {
	if pub == nil {
		return nil, fmt.Errorf("idempotency: StampEventID: the publisher is nil")
	}
	return stampingPublisher{pub}, nil
}

type stampingPublisher struct{ message.Publisher }

// Publish implements message.Publisher.
func (p stampingPublisher) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if msg == nil || msg.Metadata[EventIDMetadata] != "" {
			continue
		}
		id, err := uuid.NewV7()
		if err != nil {
			return fmt.Errorf("idempotency: make an event ID: %w", err)
		}
		setEventID(msg, id.String())
	}
	return p.Publisher.Publish(topic, messages...)
}

// stampProduced gives messages that a handler returned what makes them recognisable when they come again: a UUID and an
// event ID.
func stampProduced(produced []*message.Message) error {
	for i, msg := range produced {
		if msg == nil {
			return fmt.Errorf("%w: message %d is nil", ErrProducedInvalid, i)
		}
		if msg.UUID == "" {
			msg.UUID = watermill.NewUUID()
		}
		if msg.Metadata[EventIDMetadata] == "" {
			setEventID(msg, msg.UUID)
		}
	}
	return nil
}

func setEventID(msg *message.Message, id string) {
	if msg.Metadata == nil {
		msg.Metadata = make(message.Metadata)
	}
	msg.Metadata[EventIDMetadata] = id
}
