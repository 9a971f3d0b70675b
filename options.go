package idempotency

import (
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// Option configures a [Middleware]. Where an option is given twice, the last one wins, unless it says that it adds.
type Option interface{ apply(*config) }

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

type config struct {
	subscriberID     *string
	subscriberPrefix *string
	key              KeyFunc
	phantomsPass     bool
	fingerprint      fingerprint
	horizon          horizon
	inFlight         InFlight
	produced         Produced
	retries          int
	commitTimeout    time.Duration
	ignoredHandlers  []string
	logger           watermill.LoggerAdapter
	observers        []Observer
}

func defaultConfig() config {
	return config{
		key:             MetadataKey(EventIDMetadata),
		fingerprint:     defaultFingerprint(),
		produced:        Replay(),
		retries:         3,
		commitTimeout:   10 * time.Second,
		ignoredHandlers: []string{"events_forwarder", "requeuer"},
		logger:          watermill.NewSlogLogger(nil),
	}
}

// WithSubscriberID names the logical subscriber, at most [MaxSubscriberIDLength] bytes of UTF-8. Use it where the
// middleware is on one handler (handler.AddMiddleware), and choose a name that outlives refactorings: with another ID,
// every old event is new.
//
// The default is the router's handler name: renaming the handler makes old events new. A cqrs.EventGroupProcessor has one
// handler name, and so one claim, for all handlers of the group.
func WithSubscriberID(id string) Option {
	return optionFunc(func(c *config) { c.subscriberID = &id })
}

// WithSubscriberPrefix makes the subscriber ID of each handler the prefix followed by the router's handler name. Use it
// where one middleware serves a whole router (router.AddMiddleware) and services share a table: "shipping." gives
// "shipping.create-label". It excludes [WithSubscriberID]. The default is no prefix.
func WithSubscriberPrefix(prefix string) Option {
	return optionFunc(func(c *config) { c.subscriberPrefix = &prefix })
}

// WithKey says how the event ID is taken from a message. The default is [MetadataKey] of [EventIDMetadata].
func WithKey(fn KeyFunc) Option {
	return optionFunc(func(c *config) { c.key = fn })
}

// WithoutPhantomCheck lets the key function judge messages without UUID, metadata and payload as any others: without an
// event ID they are [ErrMissingKey], which is permanent. Use it on Kafka, where a tombstone without headers is such a message,
// and holds up its partition as long as it is an [ErrPhantomMessage]; and with module amqpmessage, which drops phantoms. The
// default is the check, for watermill-amqp's own marshaler.
func WithoutPhantomCheck() Option {
	return optionFunc(func(c *config) { c.phantomsPass = true })
}

// WithoutFingerprint stores no fingerprints and compares none: a message with a known event ID is a duplicate whatever it
// contains. The default is to compare: see [ConflictError].
func WithoutFingerprint() Option {
	return optionFunc(func(c *config) { c.fingerprint.off = true })
}

// WithTypeMetadata names the metadata that tells the type of an event, which is part of its content: the first that is set
// counts. Without a name, the type is not compared. The default is the "type" of CloudEvents in all spellings, and "name",
// which Watermill's CQRS marshalers set. Take only what brokers, retries and replays keep. Fingerprints under other
// names are not compared with each other: what was processed before the change is known by its event ID alone.
func WithTypeMetadata(names ...string) Option {
	return optionFunc(func(c *config) { c.fingerprint.typeMetadata = names })
}

// WithSourceMetadata names the metadata that tells the source of an event, as [WithTypeMetadata] does for its type. The
// default is the "source" of CloudEvents in all spellings.
func WithSourceMetadata(names ...string) Option {
	return optionFunc(func(c *config) { c.fingerprint.sourceMetadata = names })
}

// WithCanonicalPayload brings payloads into a canonical form before they are compared, for producers that serialise an
// event anew when they send it again: then the order of JSON members is no conflict, and a changed value is one. It takes
// the Transform function of a library of RFC 8785, for example github.com/gowebpki/jcs. An error of fn is a permanent
// [ErrNotCanonical]; empty payloads are not given to it. It must not write to payload. The default is to compare payloads byte by byte. Fingerprints
// with and without it are not compared with each other.
func WithCanonicalPayload(fn func(payload []byte) ([]byte, error)) Option {
	return optionFunc(func(c *config) {
		c.fingerprint.canonical = fn
		c.fingerprint.isCanonical = true
	})
}

// WithReplayHorizon refuses events older than d that are new to the store ([ErrBeyondHorizon]): their records may have been
// purged, so they are not taken for new. Set d to at most the retention of the store, and the retention to more than
// brokers and people replay. at says when an event happened; events without a time are refused, too. What has a record is
// a duplicate, however old. The default is no horizon: an event without a record is new.
func WithReplayHorizon(d time.Duration, at TimeFunc) Option {
	return optionFunc(func(c *config) { c.horizon = horizon{limit: d, time: at, isSet: true} })
}

// WithInFlight says what happens to a delivery whose event is being processed by another one: [Wait], [WaitAtMost] or
// [FailFast]. The default is Wait.
func WithInFlight(p InFlight) Option {
	return optionFunc(func(c *config) { c.inFlight = p })
}

// WithProduced says what happens to the messages that handlers return: [Replay], [Outbox] or [Refuse]. The default is
// Replay.
func WithProduced(p Produced) Option {
	return optionFunc(func(c *config) { c.produced = p })
}

// WithRetries sets how often a delivery is tried again at once, in a fresh transaction and with the message as it came,
// after a serialization failure or a deadlock. The default is 3; 0 hands every such error to the router.
func WithRetries(n int) Option {
	return optionFunc(func(c *config) { c.retries = n })
}

// WithCommitTimeout bounds the COMMIT, which may get up to an eighth less (commits share a timer), and apart from it the
// [AfterCommit] functions and the rollback. They are detached from the message's context, because a handler that has
// succeeded is committed even when its router is closing. The default is 10 s; it must be positive. Let the router's
// CloseTimeout be longer.
func WithCommitTimeout(d time.Duration) Option {
	return optionFunc(func(c *config) { c.commitTimeout = d })
}

// WithIgnoredHandlers adds router handler names that a router-level middleware leaves alone: their messages pass without a
// claim. "events_forwarder" and "requeuer", the names that Watermill's Forwarder and Requeuer have, are always among them:
// the envelopes of the first carry no event ID, and the second must see a message as often as it is requeued.
func WithIgnoredHandlers(names ...string) Option {
	return optionFunc(func(c *config) { c.ignoredHandlers = append(c.ignoredHandlers, names...) })
}

// WithLogger sets the logger. The default is Watermill's adapter of slog.Default().
//
// Levels: Error for what nobody else can tell (a message acked before its commit, a failed [AfterCommit] function, a
// panicking observer), Info for a retry in place and a double installation, Debug for a duplicate. Errors that
// are returned are not logged: the router does. What is processed is told to observers only.
func WithLogger(l watermill.LoggerAdapter) Option {
	return optionFunc(func(c *config) { c.logger = l })
}

// WithObserver adds an observer of outcomes. It may be given more than once: all are told, in order.
func WithObserver(o Observer) Option {
	return optionFunc(func(c *config) { c.observers = append(c.observers, o) })
}

// validate reports all mistakes at once.
func (c *config) validate() error {
	var errs []error
	mistake := func(option, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", option, fmt.Sprintf(format, args...)))
	}
	if c.subscriberID != nil {
		if err := checkSubscriberID(*c.subscriberID); err != nil {
			mistake("WithSubscriberID", "%v", err)
		}
	}
	if c.subscriberPrefix != nil {
		if err := checkSubscriberID(*c.subscriberPrefix); err != nil {
			mistake("WithSubscriberPrefix", "%v", err)
		}
		if c.subscriberID != nil {
			mistake("WithSubscriberPrefix", "it excludes WithSubscriberID: take one")
		}
	}
	if c.key == nil {
		mistake("WithKey", "the function is nil")
	}
	if c.fingerprint.isCanonical && c.fingerprint.canonical == nil {
		mistake("WithCanonicalPayload", "the function is nil")
	}
	if c.fingerprint.isCanonical && c.fingerprint.off {
		mistake("WithCanonicalPayload", "it is for the fingerprint, which WithoutFingerprint switches off: take one")
	}
	if c.horizon.isSet && c.horizon.time == nil {
		mistake("WithReplayHorizon", "the function is nil")
	}
	if c.horizon.isSet && c.horizon.limit <= 0 {
		mistake("WithReplayHorizon", "%v is not positive", c.horizon.limit)
	}
	if c.inFlight.policy == waitAtMost && c.inFlight.limit <= 0 {
		mistake("WithInFlight", "WaitAtMost needs a positive duration, not %v", c.inFlight.limit)
	}
	if c.produced == nil {
		mistake("WithProduced", "the policy is nil")
	} else if err := c.produced.validate(); err != nil {
		mistake("WithProduced", "%v", err)
	}
	if c.retries < 0 {
		mistake("WithRetries", "%d is negative", c.retries)
	}
	if c.commitTimeout <= 0 {
		mistake("WithCommitTimeout", "%v is not positive", c.commitTimeout)
	}
	if c.logger == nil {
		mistake("WithLogger", "the logger is nil: give watermill.NopLogger{} for silence")
	}
	for _, o := range c.observers {
		if o == nil {
			mistake("WithObserver", "the observer is nil")
		}
	}
	return errors.Join(errs...)
}
