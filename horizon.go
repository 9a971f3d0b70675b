package idempotency

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/oklog/ulid"
)

// TimeFunc returns when an event happened, for [WithReplayHorizon]: the producer's time, which is the same on every
// delivery and every replay. eventID is what the key function has returned. It returns [ErrMissingTime] if the message
// carries none, so that [FirstTime] can go on; any other error is a permanent [ErrInvalidTime].
//
// Kafka's timestamp of a message is in its context; it is new each time the event is published, so a replay from a
// dead-letter topic looks young. With watermill-kafka:
//
//	func(msg *message.Message, _ string) (time.Time, error) {
//		at, ok := kafka.MessageTimestampFromCtx(msg.Context())
//		if !ok {
//			return at, idempotency.ErrMissingTime
//		}
//		return at, nil
//	}
type TimeFunc func(msg *message.Message, eventID string) (time.Time, error)

// MetadataTime takes the time from the metadata with the given name, in the form of RFC 3339.
func MetadataTime(name string) TimeFunc {
	return func(msg *message.Message, _ string) (time.Time, error) {
		value, ok := msg.Metadata[name]
		if !ok {
			return time.Time{}, fmt.Errorf("%w: metadata %q is not set", ErrMissingTime, name)
		}
		return time.Parse(time.RFC3339, value)
	}
}

// CloudEventTime takes the time of a CloudEvent, from metadata or the payload, as [CloudEventKey] does the event ID. It is
// an optional attribute: see [FirstTime].
func CloudEventTime(opts ...CloudEventOption) TimeFunc {
	c := newCloudEvents(opts)
	return func(msg *message.Message, _ string) (time.Time, error) {
		attributes, err := c.attributes(msg, "time")
		if err != nil {
			return time.Time{}, err
		}
		value, ok := attributes["time"]
		if !ok {
			return time.Time{}, fmt.Errorf("%w: the message has no CloudEvents attribute \"time\"", ErrMissingTime)
		}
		return time.Parse(time.RFC3339, value)
	}
}

// EventIDTime takes the time out of an event ID that has one inside: a UUID of version 1, 6 or 7 (RFC 9562), or a ULID. Of
// an ID by [CloudEventKey] it looks at the id alone.
func EventIDTime() TimeFunc {
	return func(_ *message.Message, eventID string) (time.Time, error) {
		id := eventID[strings.LastIndexByte(eventID, ' ')+1:]
		if parsed, err := uuid.Parse(id); err == nil {
			switch parsed.Version() {
			case 1, 6, 7:
				return time.Unix(parsed.Time().UnixTime()), nil
			}
		} else if parsed, err := ulid.ParseStrict(id); err == nil {
			return ulid.Time(parsed.Time()), nil
		}
		return time.Time{}, fmt.Errorf("%w: the event ID is no UUID of version 1, 6 or 7 and no ULID", ErrMissingTime)
	}
}

// FirstTime takes the first time that is there: it goes on to the next function only on [ErrMissingTime].
func FirstTime(fns ...TimeFunc) TimeFunc {
	return func(msg *message.Message, eventID string) (time.Time, error) {
		var missing []error
		for _, fn := range fns {
			at, err := fn(msg, eventID)
			if !errors.Is(err, ErrMissingTime) {
				return at, err
			}
			missing = append(missing, err)
		}
		return time.Time{}, errors.Join(missing...)
	}
}

// horizon is the age that an event may have: past it, its record may be purged, and its first delivery is not told from a
// later one.
type horizon struct {
	limit time.Duration
	time  TimeFunc
	isSet bool
}

// check refuses a new event that is too old to be known as new. now is the clock of this machine, as the records are of the
// database's: let the retention be longer than the horizon by more than the two can differ.
func (h *horizon) check(msg *message.Message, eventID string, now time.Time) error {
	if !h.isSet {
		return nil
	}
	var at time.Time
	err := guard(func() (err error) {
		at, err = h.time(msg, eventID)
		return err
	})
	switch {
	case errors.Is(err, ErrMissingTime):
		return err
	case err != nil:
		return fmt.Errorf("%w: %w", ErrInvalidTime, err)
	case now.Sub(at) > h.limit:
		return fmt.Errorf("%w: it happened at %s, %v ago, and the horizon is %v", ErrBeyondHorizon, at.UTC().Format(time.RFC3339Nano), now.Sub(at).Round(time.Millisecond), h.limit)
	}
	return nil
}

// warnHorizon tells once of a store that purges records too early for the horizon.
func (m *Middleware) warnHorizon(store Store) {
	if !m.horizon.isSet {
		return
	}
	keeps, ok := store.(interface {
		Retention() (d time.Duration, ok bool)
	})
	if !ok {
		return
	}
	if retention, ok := keeps.Retention(); ok && retention < m.horizon.limit {
		m.warnRetention.Do(func() {
			m.logger.Error("idempotency: records are purged before the replay horizon: an event between the two would be processed again; raise the retention, or lower the horizon", nil,
				watermill.LogFields{"retention": retention, "horizon": m.horizon.limit})
		})
	}
}
