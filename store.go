package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Limits of a [Key], in bytes. Every store accepts keys up to these lengths, so that a service can change its database
// without changing its keys. Together they stay below the 2,704 bytes of a PostgreSQL index entry and the 3,072 bytes of
// an InnoDB one.
const (
	MaxSubscriberIDLength = 255
	MaxEventIDLength      = 1024
)

// Key identifies one event for one logical subscriber. Both parts are compared byte by byte: they are never trimmed,
// folded or normalised.
type Key struct {
	// SubscriberID names the logical subscriber, for example "shipping.create-label.v1". All instances of a service
	// share it; two handlers never do.
	SubscriberID string
	// EventID is what the producer stamped on the event once, and what survives retries, redelivery and replay.
	EventID string
}

// String returns the key in the form that logs and errors use.
func (k Key) String() string { return fmt.Sprintf("%s/%s", k.SubscriberID, k.EventID) }

// Claim is what a store needs to claim an event.
type Claim struct {
	Key
	// Topic the message was received from, kept for operators. It is not part of the identity.
	Topic string
	// Fingerprint of the message's content; nil if none is taken. It is returned in the [Record] of a duplicate.
	Fingerprint []byte
	// InFlight says what to do when another delivery of the event holds the claim and has not committed yet.
	InFlight InFlight
}

// Record is a committed claim, met by a duplicate.
type Record struct {
	Key
	Topic       string
	Fingerprint []byte
	// ClaimedAt is when the transaction that processed the event began, by the database's clock.
	ClaimedAt time.Time
	// Produced are the messages that the handler returned, in order, as long as [Store.Acked] has not removed them.
	// Each call gives fresh messages: they are the caller's.
	Produced []*message.Message
}

// Store is what a back end implements. It is stable: it grows only by optional interfaces. The suite in package storetest
// tells whether an implementation keeps the contract. All methods are safe for concurrent use.
type Store interface {
	// Claim begins a transaction and inserts the claim in it. Exactly one of the results is not nil: the transaction
	// that holds the claim, the record of a duplicate, or an error. Only a committed claim makes a duplicate; an
	// error, whichever, never does.
	//
	// ctx carries the values of the message's context. Its cancellation ends a claim that waits, and must not end the
	// transaction that was returned: that one lives until Commit or Rollback.
	//
	// A claim that meets an uncommitted one of the same key waits until that one ends, within the bounds of c.InFlight:
	// past them, the error is one for which errors.Is(err, ErrInFlight) is true.
	Claim(ctx context.Context, c Claim) (Tx, *Record, error)

	// Acked removes the stored produced messages of the keys, once the router has published and acked them. The claims
	// stay. It is called in the background, with many keys at once; a failure is logged and tried again.
	Acked(ctx context.Context, keys []Key) error

	// Classify tells what kind of trouble err is. It is asked about errors of the store itself and about errors that
	// handlers return, so it looks through wrapping, and decides by code, never by text.
	Classify(err error) Fault
}

// Tx is a transaction that holds a claim. It is used by one goroutine at a time.
type Tx interface {
	// Raw returns what handlers ask for with [TxFromContext] or [Handler], for example a pgx.Tx or a *sql.Tx.
	Raw() any

	// Commit stores produced, which is empty for most handlers, and commits. It returns nil only if the claim, what the
	// handler wrote and produced are durable. If they are known to be gone, the error is one for which
	// errors.Is(err, ErrRolledBack) is true; after any other error the outcome is unknown. If the handler has ended the
	// transaction by itself, errors.Is(err, ErrTxEnded) is true; if it has committed the claim, produced is stored all the
	// same, because the redelivery is a duplicate. Whatever is returned, the transaction is over and its connection is given
	// back.
	//
	// ctx has the commit timeout as its deadline and is not cancelled before, also not when Commit has returned: nothing may
	// stay behind that waits for its end.
	Commit(ctx context.Context, produced []*message.Message) error

	// Rollback undoes the claim and what the handler wrote, and gives the connection back. It does nothing after Commit
	// or Rollback. It must not panic, also on a connection that is broken or still busy.
	Rollback(ctx context.Context) error
}

// Fault is what a [Store] makes of an error.
type Fault uint8

const (
	// FaultOther is an error that is not the database's, or one that would come again: a constraint that is violated, a
	// column that is missing.
	FaultOther Fault = iota
	// FaultConflict is a serialization failure or a deadlock: a fresh transaction may succeed at once, so the
	// middleware tries again in place, see [WithRetries].
	FaultConflict
	// FaultUnavailable is a database that cannot be reached, is shutting down, has no connection or no lock to give: a
	// later delivery may succeed.
	FaultUnavailable
)

// String returns the fault in one word.
func (f Fault) String() string {
	switch f {
	case FaultOther:
		return "other"
	case FaultConflict:
		return "conflict"
	case FaultUnavailable:
		return "unavailable"
	}
	return fmt.Sprintf("Fault(%d)", uint8(f))
}

// InFlight says what a claim does when another delivery of the same event is being processed. That happens: a Kafka
// rebalance does not stop a running handler, and a closing AMQP consumer hands its message on at once. The zero value is
// [Wait].
type InFlight struct {
	policy inFlightPolicy
	limit  time.Duration
}

type inFlightPolicy uint8

const (
	wait inFlightPolicy = iota
	waitAtMost
	failFast
)

// Wait lets the claim wait until the other delivery commits or rolls back, or the message's context ends. It is the
// default: the outcome is then known at once, and the price is a connection that is held while waiting.
func Wait() InFlight { return InFlight{} }

// WaitAtMost lets the claim wait for at most d. Past that, the message is not acked and [ErrInFlight] is returned. d must
// be positive; stores may round it up to a millisecond.
func WaitAtMost(d time.Duration) InFlight { return InFlight{policy: waitAtMost, limit: d} }

// FailFast does not wait: the message is not acked and [ErrInFlight] is returned. On a broker that redelivers without a
// delay, put a delay behind it.
func FailFast() InFlight { return InFlight{policy: failFast} }

// Limit returns how long a claim may wait, and whether it is limited at all. A limit of zero is [FailFast].
func (p InFlight) Limit() (limit time.Duration, bounded bool) {
	return p.limit, p.policy != wait
}
