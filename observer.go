package idempotency

import (
	"context"
	"fmt"
	"time"
)

// Observer is told what became of each delivery. Observe is called on the message's goroutine before the message is acked
// or nacked, so it must be quick, and from many goroutines at once. A panic in it is caught and logged, and changes
// nothing about the message.
type Observer interface {
	Observe(ctx context.Context, e Event)
}

// ObserverFunc is a function as an [Observer].
type ObserverFunc func(ctx context.Context, e Event)

// Observe calls f.
func (f ObserverFunc) Observe(ctx context.Context, e Event) { f(ctx, e) }

// Outcome is what became of a delivery.
type Outcome uint8

// The outcomes. Each delivery has exactly one, apart from [Retried], which comes once for each attempt that was repeated
// in place before the outcome.
const (
	// Processed: the handler succeeded and its transaction committed. The message is acked once what it produced is
	// published.
	Processed Outcome = iota + 1
	// Duplicate: the event has been processed before. The handler was skipped; what it produced then, and no ack has
	// confirmed, is published again; the message is acked.
	Duplicate
	// ClaimInFlight: another delivery of the event held the claim for longer than the policy lets wait.
	ClaimInFlight
	// HandlerFailed: the handler returned an error, marked the transaction for rollback, or left it so that it could not
	// be committed. Everything is rolled back.
	HandlerFailed
	// HandlerPanicked: the handler panicked, or left by runtime.Goexit. Everything is rolled back.
	HandlerPanicked
	// Retried: a serialization failure or a deadlock; a fresh transaction follows at once.
	Retried
	// Transient: the database had trouble, the handler gave up because its context had ended (a router that closes, a
	// timeout), or the program is wired wrongly. The message is not at fault.
	Transient
	// Permanent: the message is at fault, see [IsPermanent].
	Permanent
	// CommitUnknown: the answer to COMMIT was lost. The redelivery tells.
	CommitUnknown
	// Conflict: the event has been processed before, with other content, see [ConflictError]. The message is at fault.
	Conflict
)

// String returns the outcome as metrics and logs name it, for example "handler_failed".
func (o Outcome) String() string {
	switch o {
	case Processed:
		return "processed"
	case Duplicate:
		return "duplicate"
	case ClaimInFlight:
		return "in_flight"
	case HandlerFailed:
		return "handler_failed"
	case HandlerPanicked:
		return "handler_panicked"
	case Retried:
		return "retried"
	case Transient:
		return "transient"
	case Permanent:
		return "permanent"
	case CommitUnknown:
		return "commit_unknown"
	case Conflict:
		return "conflict"
	}
	return fmt.Sprintf("Outcome(%d)", uint8(o))
}

// Event describes one outcome. New fields may be added.
type Event struct {
	Outcome Outcome
	Key     Key
	Handler string
	Topic   string

	// Attempt counts the transactions of this delivery, from 1.
	Attempt int
	// Claim is the time that BEGIN and the claim took. It includes the wait for a connection and, under [Wait], the wait
	// for another delivery of the event: a claim that takes as long as a handler has waited for one.
	Claim time.Duration
	// Handle is the time in the handler, Commit that of storing produced messages and committing.
	Handle, Commit time.Duration

	// ClaimedAt is, for [Duplicate] and [Conflict], when the event was claimed by the delivery that processed it, by the
	// database's clock, and Age how long ago that is by the clock of this machine: the longest that comes up is what the
	// retention of the store must exceed.
	ClaimedAt time.Time
	Age       time.Duration
	// Produced is the number of messages that the router was given to publish.
	Produced int
	// EarlyAck tells that the message was acked before the commit, by middleware.InstantAck or by the handler itself:
	// had the attempt failed, the event would have been lost. If it has, it is.
	EarlyAck bool
	// Err is why the message was not processed; nil for [Processed] and [Duplicate].
	Err error
	// HookErr joins what [AfterCommit] functions returned, or panicked with.
	HookErr error
}
