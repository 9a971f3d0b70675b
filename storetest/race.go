package storetest

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

func testWaitForCommit(t *testing.T, s *suite) {
	holder := s.mustBeNew(t, claimOf("1"))
	s.write(t, holder, "label")
	var waiting []<-chan result
	for range 3 {
		waiting = append(waiting, s.claimInBackground(bounded(t), claimOf("1")))
	}
	for _, done := range waiting {
		requireWaiting(t, done)
	}
	require.NoError(t, holder.Commit(bounded(t), nil))
	for _, done := range waiting {
		r := await(t, done)
		require.NoError(t, r.err)
		require.NotNil(t, r.record, "the claim that was waited for is committed: this one is a duplicate")
	}
	s.requireEffects(t, "label")
}

func testWaitForRollback(t *testing.T, s *suite) {
	holder := s.mustBeNew(t, claimOf("1"))
	s.write(t, holder, "of the first")
	waiting := s.claimInBackground(bounded(t), claimOf("1"))
	requireWaiting(t, waiting)
	require.NoError(t, holder.Rollback(bounded(t)))
	r := await(t, waiting)
	require.NoError(t, r.err)
	require.NotNil(t, r.tx, "the claim that was waited for is rolled back: this one is new")
	s.write(t, r.tx, "of the second")
	require.NoError(t, r.tx.Commit(bounded(t), nil))
	s.requireEffects(t, "of the second")
}

func testWaitAtMost(t *testing.T, s *suite) {
	const limit = 300 * time.Millisecond
	c := claimOf("1")
	c.InFlight = idempotency.WaitAtMost(limit)
	holder := s.mustBeNew(t, c)

	begun := time.Now()
	_, _, err := s.claim(bounded(t), c)
	require.ErrorIs(t, err, idempotency.ErrInFlight)
	require.GreaterOrEqual(t, time.Since(begun), limit-50*time.Millisecond, "it gave up too early")

	c.InFlight = idempotency.WaitAtMost(patience)
	waiting := s.claimInBackground(bounded(t), c)
	requireWaiting(t, waiting)
	require.NoError(t, holder.Commit(bounded(t), nil))
	r := await(t, waiting)
	require.NoError(t, r.err)
	require.NotNil(t, r.record)
}

func testFailFast(t *testing.T, s *suite) {
	c := claimOf("1")
	c.InFlight = idempotency.FailFast()
	holder := s.mustBeNew(t, c)
	done := s.claimInBackground(bounded(t), c)
	select {
	case r := <-done:
		require.ErrorIs(t, r.err, idempotency.ErrInFlight)
	case <-time.After(patience / 4):
		require.FailNow(t, "FailFast waits")
	}
	require.NoError(t, holder.Rollback(bounded(t)))
	s.process(t, c) // it is not in flight any more
	s.mustBeDuplicate(t, c)
}

// testBoundDoesNotStay holds a claim that was bounded: the bound is not the handler's, nor the next claim's on the
// connection.
func testBoundDoesNotStay(t *testing.T, s *suite) {
	c := claimOf("bounded")
	c.InFlight = idempotency.FailFast()
	for range 20 {
		c.EventID += "."
		s.process(t, c)
	}
	holder := s.mustBeNew(t, claimOf("1"))
	waiting := s.claimInBackground(bounded(t), claimOf("1"))
	requireWaiting(t, waiting)
	require.NoError(t, holder.Commit(bounded(t), nil))
	require.NotNil(t, await(t, waiting).record)
}

// testManyClaimants has far more deliveries than connections: each event has one effect, whichever attempt succeeds.
func testManyClaimants(t *testing.T, s *suite) {
	const events, deliveries, atOnce = 20, 12, 12
	ctx := bounded(t)
	var mu sync.Mutex
	committed := make(map[string]int)
	var errs []error

	slots := make(chan struct{}, atOnce)
	var workers sync.WaitGroup
	for i := range events * deliveries {
		eventID := fmt.Sprint(i % events)
		last := i >= events*(deliveries-1)
		slots <- struct{}{}
		workers.Go(func() {
			defer func() { <-slots }()
			err := func() error {
				tx, record, err := s.claim(ctx, claimOf(eventID))
				if err != nil || record != nil {
					return err
				}
				if err := s.Write(ctx, tx.Raw(), eventID); err != nil {
					_ = tx.Rollback(ctx)
					return err
				}
				if !last && rand.N(2) == 0 { //nolint:gosec // not a secret
					return tx.Rollback(ctx)
				}
				if err := tx.Commit(ctx, nil); err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				committed[eventID]++
				return nil
			}()
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	workers.Wait()
	require.Empty(t, errs)
	effects, err := s.Effects(ctx)
	require.NoError(t, err)
	require.Len(t, effects, events)
	for eventID, n := range effects {
		require.Equal(t, 1, n, "effects of event %q", eventID)
		require.Equal(t, 1, committed[eventID], "commits of event %q", eventID)
	}
}
