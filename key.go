package idempotency

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// EventIDMetadata is the metadata key that [MetadataKey] reads by default and that produced messages are stamped with.
const EventIDMetadata = "event_id"

// KeyFunc returns the event ID of a message. It must be a pure function of the message: the same event gives the same ID
// on every delivery. It returns [ErrMissingKey] if the message carries none, so that [FirstOf] can go on; any other error,
// and a panic, is a permanent [ErrKeyFunc].
//
// The middleware checks the ID: it must be valid UTF-8, not empty, without NUL bytes and of at most [MaxEventIDLength]
// bytes.
type KeyFunc func(msg *message.Message) (string, error)

// MetadataKey takes the event ID from the metadata with the given name.
func MetadataKey(name string) KeyFunc {
	return func(msg *message.Message) (string, error) {
		id, ok := msg.Metadata[name]
		if !ok {
			return "", fmt.Errorf("%w: metadata %q is not set: let the producer stamp it once, or choose another key by WithKey", ErrMissingKey, name)
		}
		return id, nil
	}
}

// MessageUUID takes the message's UUID. Take it only where the producer sets it once per event: Watermill's CQRS
// marshalers make a new one at each Publish, and it is empty on messages of producers that are not Watermill.
func MessageUUID() KeyFunc {
	return func(msg *message.Message) (string, error) {
		if msg.UUID == "" {
			return "", fmt.Errorf("%w: the message has no UUID: its producer is not Watermill, choose another key by WithKey", ErrMissingKey)
		}
		return msg.UUID, nil
	}
}

// FirstOf takes the first event ID that is there: it goes on to the next function only on [ErrMissingKey]. An ID that is
// there and invalid is an error, not a reason to look elsewhere.
func FirstOf(fns ...KeyFunc) KeyFunc {
	return func(msg *message.Message) (string, error) {
		var missing []error
		for _, fn := range fns {
			id, err := fn(msg)
			if !errors.Is(err, ErrMissingKey) {
				return id, err
			}
			missing = append(missing, err)
		}
		return "", errors.Join(missing...)
	}
}

// isPhantom tells whether nothing was sent at all, see [ErrPhantomMessage].
func isPhantom(msg *message.Message) bool {
	return msg.UUID == "" && len(msg.Metadata) == 0 && len(msg.Payload) == 0
}

// eventID asks fn and checks its answer. Every error is permanent.
func eventID(fn KeyFunc, msg *message.Message) (id string, err error) {
	defer func() {
		if r := recover(); r != nil {
			id, err = "", fmt.Errorf("%w: panic: %v", ErrKeyFunc, r)
		}
	}()
	id, err = fn(msg)
	if err != nil {
		if !IsPermanent(err) {
			err = fmt.Errorf("%w: %w", ErrKeyFunc, err)
		}
		return "", err
	}
	return id, checkEventID(id)
}

func checkEventID(id string) error {
	switch {
	case id == "":
		return ErrKeyEmpty
	case len(id) > MaxEventIDLength:
		return fmt.Errorf("%w: %d", ErrKeyTooLong, len(id))
	case containsNUL(id):
		return ErrKeyHasNUL
	case !utf8.ValidString(id):
		return ErrKeyNotUTF8
	}
	return nil
}

func checkSubscriberID(id string) error {
	switch {
	case id == "":
		return errors.New("it is empty")
	case len(id) > MaxSubscriberIDLength:
		return fmt.Errorf("it has %d bytes, %d are allowed", len(id), MaxSubscriberIDLength)
	case containsNUL(id):
		return errors.New("it contains a NUL byte")
	case !utf8.ValidString(id):
		return errors.New("it is not valid UTF-8")
	}
	return nil
}

func containsNUL(s string) bool { return strings.IndexByte(s, 0) >= 0 }
