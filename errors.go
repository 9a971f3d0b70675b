package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Errors for which [IsPermanent] is true: the message is at fault, another delivery cannot help.
var (
	// ErrMissingKey means that the message carries no event ID where the key function looks.
	ErrMissingKey = errors.New("event ID is missing")
	// ErrInvalidKey means that the message carries an event ID that cannot be used. The errors below are the reasons, and
	// errors.Is(err, ErrInvalidKey) is true for each.
	ErrInvalidKey = errors.New("event ID is invalid")
	// ErrKeyEmpty means that the event ID is there and empty.
	ErrKeyEmpty = fmt.Errorf("%w: it is empty", ErrInvalidKey)
	// ErrKeyTooLong means that the event ID has more than [MaxEventIDLength] bytes.
	ErrKeyTooLong = fmt.Errorf("%w: it has more than %d bytes", ErrInvalidKey, MaxEventIDLength)
	// ErrKeyHasNUL means that the event ID contains a NUL byte, which no text column holds.
	ErrKeyHasNUL = fmt.Errorf("%w: it contains a NUL byte", ErrInvalidKey)
	// ErrKeyNotUTF8 means that the event ID is not valid UTF-8, which no text column holds.
	ErrKeyNotUTF8 = fmt.Errorf("%w: it is not valid UTF-8", ErrInvalidKey)
	// ErrKeyFunc means that the key function failed or panicked on the message.
	ErrKeyFunc = fmt.Errorf("%w: the key function failed", ErrInvalidKey)
	// ErrKeyAmbiguous means that the message carries the parts of the event ID more than once, with different values.
	ErrKeyAmbiguous = fmt.Errorf("%w: it is there more than once, with different values", ErrInvalidKey)

	// ErrConflict means that the message carries a known event ID and other content: see [ConflictError].
	ErrConflict = errors.New("event ID is used for another content")
	// ErrNotCanonical means that the function of [WithCanonicalPayload] failed or panicked on the payload.
	ErrNotCanonical = errors.New("the payload has no canonical form")
	// ErrBeyondHorizon means that the event is new to the store and older than [WithReplayHorizon] says, so that it may
	// have been processed and its record purged.
	ErrBeyondHorizon = errors.New("the event is older than the replay horizon")
	// ErrMissingTime means that an event that is new to the store carries no time where the function of
	// [WithReplayHorizon] looks, so that its age is not known.
	ErrMissingTime = errors.New("the event has no time")
	// ErrInvalidTime means that the function of [WithReplayHorizon] failed or panicked on the message.
	ErrInvalidTime = errors.New("the time of the event is invalid")
)

var permanent = []error{ErrMissingKey, ErrInvalidKey, ErrConflict, ErrNotCanonical, ErrBeyondHorizon, ErrMissingTime, ErrInvalidTime}

// Errors about a delivery: the message is not at fault, and another delivery will tell.
var (
	// ErrPhantomMessage means a message without UUID, metadata and payload. watermill-amqp's own marshaler hands such
	// messages over when a channel closes (its consumer reads from the closed delivery channel); nothing was sent, so
	// there is nothing to keep. Where they are sent, as tombstones on Kafka, see [WithoutPhantomCheck].
	ErrPhantomMessage = errors.New("message without UUID, metadata and payload, as AMQP hands over when a channel closes")
	// ErrInFlight means that another delivery of the event is being processed, and the policy was not to wait longer.
	ErrInFlight = errors.New("another delivery of this event is in flight")
	// ErrCommitUnknown means that the answer to COMMIT was lost: the claim either exists now or it does not. The
	// redelivery's claim decides.
	ErrCommitUnknown = errors.New("the outcome of the commit is unknown")
	// ErrRolledBack means that the transaction was rolled back although the handler returned no error: it swallowed an
	// SQL error, a deferred constraint failed at COMMIT, or [MarkRollback] was called.
	ErrRolledBack = errors.New("the transaction was rolled back")
)

// Errors about the program: the message is not at fault, and must not end in a dead-letter queue.
var (
	// ErrNoTx means that the context carries no transaction of the wanted type.
	ErrNoTx = errors.New("no transaction in context")
	// ErrTxEnded means that the handler ended the transaction, which is the middleware's to end, or used it after it had
	// returned.
	ErrTxEnded = errors.New("the transaction has ended")
	// ErrNoSubscriber means that there is no subscriber ID: none is configured, and no router named the handler.
	ErrNoSubscriber = errors.New("no subscriber ID")
	// ErrSharedSubscriber means that two handlers of this process use one subscriber ID, so that each would take the
	// other's events for duplicates.
	ErrSharedSubscriber = errors.New("subscriber ID is used by two handlers")
	// ErrProducedRefused means that a handler returned messages under [Refuse].
	ErrProducedRefused = errors.New("the handler returned messages, which WithProduced(Refuse()) forbids")
	// ErrProducedInvalid means that a handler returned messages that cannot be stored, see [Replay].
	ErrProducedInvalid = errors.New("the handler returned messages that cannot be stored")
)

// Errors about the database, found when a store opens. Each would lose or double messages later, or fail each of them.
var (
	// ErrSchema means that the tables are missing, or not what this version needs.
	ErrSchema = errors.New("the tables are not as they must be")
	// ErrNotDurable means that a commit does not survive a crash, so that a message would be acked and its effect lost.
	ErrNotDurable = errors.New("commits are not durable")
	// ErrReadOnly means that the server or the session cannot write.
	ErrReadOnly = errors.New("the database is read-only")
	// ErrPrivilege means that the role lacks a privilege on the tables.
	ErrPrivilege = errors.New("a privilege is missing")
)

// Op is the step at which a message failed.
type Op string

// The steps of a message's way through the middleware.
const (
	OpKey      Op = "key"
	OpClaim    Op = "claim"
	OpHandler  Op = "handler"
	OpProduced Op = "produced"
	OpCommit   Op = "commit"
)

// Error says where a message failed: the step, the handler, the topic and the key, as far as they are known. Err is the
// cause. Errors that a handler returns are handed on as they are, without an Error around them, unless the database is to
// blame: so what a handler returns is what outer middleware compares.
type Error struct {
	Op      Op
	Key     Key
	Handler string
	Topic   string
	Err     error

	transient bool
}

// Error implements error.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("idempotency: ")
	b.WriteString(string(e.Op))
	if e.Handler != "" {
		fmt.Fprintf(&b, " in handler %q", e.Handler)
	}
	if e.Topic != "" {
		fmt.Fprintf(&b, " on topic %q", e.Topic)
	}
	if e.Key.SubscriberID != "" {
		fmt.Fprintf(&b, " for subscriber %q", e.Key.SubscriberID)
	}
	if e.Key.EventID != "" {
		fmt.Fprintf(&b, ", event %q", e.Key.EventID)
	}
	b.WriteString(": ")
	b.WriteString(strings.TrimPrefix(e.Err.Error(), "idempotency: "))
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// IsPermanent reports whether the message itself is at fault, so that another delivery cannot help. It fits Watermill's
// middleware.PoisonQueueWithFilter as it is.
func IsPermanent(err error) bool {
	return slices.ContainsFunc(permanent, func(target error) bool { return errors.Is(err, target) })
}

// IsTransient reports whether the message is not at fault and must stay with the broker: the database had trouble, also
// under a handler's own statement; another delivery is in flight; the context was cancelled, as when a router closes; or
// the program is wired wrongly. A dead-letter filter takes what is neither this nor from a handler that may yet succeed:
//
//	middleware.PoisonQueueWithFilter(pub, "orders.dead", func(err error) bool { return !idempotency.IsTransient(err) })
func IsTransient(err error) bool {
	var e *Error
	if errors.As(err, &e) && e.transient {
		return true
	}
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, ErrNoTx) || errors.Is(err, ErrTxEnded)
}
