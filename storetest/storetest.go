// Package storetest is the suite that every [idempotency.Store] must pass. An author of a store calls [Run] from a test:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) storetest.Backend {
//			store := … // empty, for this test alone
//			return storetest.Backend{Store: store, Write: …, Effects: …}
//		})
//	}
//
// It may become stricter in a minor version: a store that fails then has broken the contract all along.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// Backend is a store under test, with what the suite needs to see and to break. Functions that are nil say that the
// engine has no such thing; the tests of it are then not part of the suite.
type Backend struct {
	// Store is empty, and has the resources for 16 transactions at once.
	Store idempotency.Store
	// Write records an effect in a transaction, which is what [idempotency.Tx.Raw] has returned. Required.
	Write func(ctx context.Context, tx any, effect string) error
	// Effects tells how often each effect is committed. Required.
	Effects func(ctx context.Context) (map[string]int, error)

	// Abort makes the transaction fail the way that a failed statement does whose error the handler swallows.
	Abort func(ctx context.Context, tx any) error
	// EndByHand ends the transaction behind the store's back, in the ways a handler can: each is a test.
	EndByHand map[string]func(ctx context.Context, tx any) error
	// Disconnect breaks the connection under the transaction.
	Disconnect func(ctx context.Context, tx any) error

	// OneWriter says that the engine lets one transaction write at a time, so that the claims of all keys wait for each
	// other.
	OneWriter bool
}

// patience is how long the suite waits for what must happen, and glance how long it looks whether something happens that
// must not.
const (
	patience = 20 * time.Second
	glance   = 100 * time.Millisecond
)

// Run runs the suite. open is called once for each test.
func Run(t *testing.T, open func(t *testing.T) Backend) {
	t.Helper()
	for _, test := range []struct {
		name string
		run  func(t *testing.T, s *suite)
	}{
		{"claim/first delivery", testFirstDelivery},
		{"claim/rollback", testRollback},
		{"claim/end twice", testEndTwice},
		{"claim/independent keys", testIndependentKeys},
		{"claim/fingerprint", testFingerprint},
		{"claim/classify", testClassify},
		{"key/bytes", testKeysAreBytes},
		{"produced/round trip", testProducedRoundTrip},
		{"produced/order", testProducedOrder},
		{"produced/fresh", testProducedAreFresh},
		{"produced/rollback", testProducedRollBack},
		{"produced/acked", testAcked},
		{"produced/acked at once", testAckedConcurrently},
		{"race/wait for commit", testWaitForCommit},
		{"race/wait for rollback", testWaitForRollback},
		{"race/wait at most", testWaitAtMost},
		{"race/fail fast", testFailFast},
		{"race/bound does not stay", testBoundDoesNotStay},
		{"race/many claimants", testManyClaimants},
		{"context/cancelled before", testCancelledBefore},
		{"context/cancelled while waiting", testCancelledWhileWaiting},
		{"context/cancelled after", testCancelledAfter},
		{"context/cancelled commit", testCancelledCommit},
		{"fault/aborted", testAborted},
		{"fault/ended by hand", testEndedByHand},
		{"fault/disconnected", testDisconnected},
		{"fault/used after the end", testUsedAfterEnd},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &suite{Backend: open(t)}
			require.NotNil(t, s.Store, "Backend.Store is required")
			require.NotNil(t, s.Write, "Backend.Write is required")
			require.NotNil(t, s.Effects, "Backend.Effects is required")
			test.run(t, s)
			s.requireNoLeak(t)
		})
	}
}

type suite struct{ Backend }

func claimOf(eventID string) idempotency.Claim {
	return idempotency.Claim{Key: idempotency.Key{SubscriberID: "shipping", EventID: eventID}, Topic: "orders"}
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// claim claims as the middleware does: a conflict is tried again.
func (s *suite) claim(ctx context.Context, c idempotency.Claim) (tx idempotency.Tx, record *idempotency.Record, err error) {
	for range 20 {
		tx, record, err = s.Store.Claim(ctx, c)
		if err == nil || s.Store.Classify(err) != idempotency.FaultConflict {
			break
		}
	}
	results := 0
	for _, given := range []bool{tx != nil, record != nil, err != nil} {
		if given {
			results++
		}
	}
	if results != 1 {
		err = fmt.Errorf("the method Claim returned %d results that are not nil, and must return exactly one: transaction %v, record %v, error %w", results, tx, record, err)
	}
	return tx, record, err
}

// claimFree claims an event that nobody holds. On a slow machine a bounded claim may give up all the same: it is tried again.
func (s *suite) claimFree(ctx context.Context, c idempotency.Claim) (tx idempotency.Tx, record *idempotency.Record, err error) {
	for {
		tx, record, err = s.claim(ctx, c)
		if !errors.Is(err, idempotency.ErrInFlight) || ctx.Err() != nil {
			return tx, record, err
		}
	}
}

// mustBeNew claims an event that has not been processed.
func (s *suite) mustBeNew(t *testing.T, c idempotency.Claim) idempotency.Tx {
	t.Helper()
	tx, record, err := s.claimFree(bounded(t), c)
	require.NoError(t, err)
	require.Nil(t, record, "event %q was never committed, and is taken for a duplicate", c.EventID)
	return tx
}

// mustBeDuplicate claims an event that has been processed.
func (s *suite) mustBeDuplicate(t *testing.T, c idempotency.Claim) *idempotency.Record {
	t.Helper()
	tx, record, err := s.claimFree(bounded(t), c)
	require.NoError(t, err)
	if tx != nil {
		_ = tx.Rollback(bounded(t))
	}
	require.NotNil(t, record, "event %q was committed, and is claimed once more", c.EventID)
	require.Equal(t, c.Key, record.Key)
	return record
}

// process claims an event, writes its effect and commits.
func (s *suite) process(t *testing.T, c idempotency.Claim) {
	t.Helper()
	tx := s.mustBeNew(t, c)
	s.write(t, tx, c.EventID)
	require.NoError(t, tx.Commit(bounded(t), nil))
}

func (s *suite) write(t *testing.T, tx idempotency.Tx, effect string) {
	t.Helper()
	require.NoError(t, s.Write(bounded(t), tx.Raw(), effect))
}

func (s *suite) requireEffects(t *testing.T, effects ...string) {
	t.Helper()
	want := make(map[string]int)
	for _, effect := range effects {
		want[effect]++
	}
	got, err := s.Effects(bounded(t))
	require.NoError(t, err)
	if len(want) == 0 {
		require.Empty(t, got, "committed effects")
		return
	}
	require.Equal(t, want, got, "committed effects")
}

// requireNoLeak runs more transactions than any pool has connections: one that was not given back is missed.
func (s *suite) requireNoLeak(t *testing.T) {
	t.Helper()
	for i := range 40 {
		c := claimOf(fmt.Sprintf("leak %d", i%20))
		tx, record, err := s.claim(bounded(t), c)
		require.NoError(t, err, "claim %d after the test: was a connection not given back, or a lock kept?", i)
		require.Equal(t, i >= 20, record != nil)
		if tx != nil {
			require.NoError(t, tx.Commit(bounded(t), nil))
		}
	}
}

// result is what a claim in another goroutine returned.
type result struct {
	tx     idempotency.Tx
	record *idempotency.Record
	err    error
}

func (s *suite) claimInBackground(ctx context.Context, c idempotency.Claim) <-chan result {
	done := make(chan result, 1)
	go func() {
		tx, record, err := s.claim(ctx, c)
		done <- result{tx, record, err}
	}()
	return done
}

func await(t *testing.T, done <-chan result) result {
	t.Helper()
	select {
	case r := <-done:
		return r
	case <-time.After(patience):
		require.FailNow(t, "the claim does not return")
		return result{}
	}
}

func requireWaiting(t *testing.T, done <-chan result) {
	t.Helper()
	select {
	case r := <-done:
		require.FailNow(t, "the claim did not wait for the one that holds the key", "%+v", r)
	case <-time.After(glance):
	}
}

var errPlain = errors.New("an error that is not the database's")
