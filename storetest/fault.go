package storetest

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

func testCancelledBefore(t *testing.T, s *suite) {
	s.process(t, claimOf("processed"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, eventID := range []string{"new", "processed"} {
		_, _, err := s.claim(ctx, claimOf(eventID))
		require.ErrorIs(t, err, context.Canceled, "an error, and neither new nor a duplicate")
	}
	s.process(t, claimOf("new"))
}

func testCancelledWhileWaiting(t *testing.T, s *suite) {
	holder := s.mustBeNew(t, claimOf("1"))
	ctx, cancel := context.WithCancel(t.Context())
	waiting := s.claimInBackground(ctx, claimOf("1"))
	requireWaiting(t, waiting)
	cancel()
	r := await(t, waiting)
	require.ErrorIs(t, r.err, context.Canceled)
	s.write(t, holder, "label")
	require.NoError(t, holder.Commit(bounded(t), nil), "the one that holds the claim is not concerned")
	s.mustBeDuplicate(t, claimOf("1"))
	s.requireEffects(t, "label")
}

func testCancelledAfter(t *testing.T, s *suite) {
	ctx, cancel := context.WithCancel(t.Context())
	tx, _, err := s.claim(ctx, claimOf("1"))
	require.NoError(t, err)
	cancel()
	time.Sleep(glance) //nolint:forbidigo // that nothing happens shows only in time
	s.write(t, tx, "label")
	require.NoError(t, tx.Commit(bounded(t), nil), "the context of the claim is not that of the transaction")
	s.requireEffects(t, "label")
	s.mustBeDuplicate(t, claimOf("1"))
}

// testCancelledCommit accepts whatever the outcome is, as long as the error tells the truth about it.
func testCancelledCommit(t *testing.T, s *suite) {
	tx := s.mustBeNew(t, claimOf("1"))
	s.write(t, tx, "label")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := tx.Commit(ctx, nil)
	again, record, claimErr := s.claim(bounded(t), claimOf("1"))
	require.NoError(t, claimErr)
	if again != nil {
		require.Error(t, err, "Commit returned nil, and nothing is committed")
		require.NoError(t, again.Rollback(bounded(t)))
		s.requireEffects(t)
		return
	}
	require.NotErrorIs(t, err, idempotency.ErrRolledBack, "the claim is committed: %v", record)
	s.requireEffects(t, "label")
}

func testAborted(t *testing.T, s *suite) {
	if s.Abort == nil {
		t.Skip("the engine has no aborted transactions")
	}
	tx := s.mustBeNew(t, claimOf("1"))
	s.write(t, tx, "label")
	require.NoError(t, s.Abort(bounded(t), tx.Raw()))
	err := tx.Commit(bounded(t), nil)
	require.ErrorIs(t, err, idempotency.ErrRolledBack, "COMMIT of an aborted transaction is a rollback: the message must not be acked")
	s.requireEffects(t)

	tx = s.mustBeNew(t, claimOf("1"))
	require.NoError(t, s.Abort(bounded(t), tx.Raw()))
	require.NoError(t, tx.Rollback(bounded(t)))
	s.process(t, claimOf("1"))
}

func testEndedByHand(t *testing.T, s *suite) {
	if len(s.EndByHand) == 0 {
		t.Skip("a handler cannot end the transaction")
	}
	for how, end := range s.EndByHand {
		t.Run(how, func(t *testing.T) {
			tx := s.mustBeNew(t, claimOf(how))
			require.NoError(t, end(bounded(t), tx.Raw()))
			require.ErrorIs(t, tx.Commit(bounded(t), nil), idempotency.ErrTxEnded, "the message must not be acked: perhaps nothing is committed")

			tx = s.mustBeNew(t, claimOf(how+", with produced"))
			require.NoError(t, end(bounded(t), tx.Raw()))
			require.ErrorIs(t, tx.Commit(bounded(t), []*message.Message{newMessage("1", nil, nil)}), idempotency.ErrTxEnded)
			again, record, err := s.claimFree(bounded(t), claimOf(how+", with produced"))
			require.NoError(t, err)
			if record != nil {
				require.Len(t, record.Produced, 1, "the handler has committed the claim: the redelivery must find what was produced")
			} else {
				require.NoError(t, again.Commit(bounded(t), nil))
				require.Empty(t, s.mustBeDuplicate(t, claimOf(how+", with produced")).Produced, "what a failed attempt has produced")
			}

			tx = s.mustBeNew(t, claimOf(how+", then rolled back"))
			require.NoError(t, end(bounded(t), tx.Raw()))
			require.NotPanics(t, func() { _ = tx.Rollback(bounded(t)) })
		})
	}
}

func testDisconnected(t *testing.T, s *suite) {
	if s.Disconnect == nil {
		t.Skip("the engine has no connections")
	}
	tx := s.mustBeNew(t, claimOf("1"))
	s.write(t, tx, "label")
	require.NoError(t, s.Disconnect(bounded(t), tx.Raw()))
	require.Error(t, tx.Commit(bounded(t), nil))
	s.requireEffects(t)

	tx = s.mustBeNew(t, claimOf("1"))
	require.NoError(t, s.Disconnect(bounded(t), tx.Raw()))
	require.NotPanics(t, func() { _ = tx.Rollback(bounded(t)) })

	tx = s.mustBeNew(t, claimOf("1"))
	require.NoError(t, s.Disconnect(bounded(t), tx.Raw()))
	err := s.Write(bounded(t), tx.Raw(), "label")
	require.Error(t, err)
	require.Equal(t, idempotency.FaultUnavailable, s.Store.Classify(err), "a statement on a lost connection: %v", err)
	require.NoError(t, ignore(tx.Rollback(bounded(t))))
	s.process(t, claimOf("1"))
}

// ignore is for a rollback on a connection that is gone: whether it fails is the driver's to say.
func ignore(error) error { return nil }

func testUsedAfterEnd(t *testing.T, s *suite) {
	committed := s.mustBeNew(t, claimOf("committed"))
	require.NoError(t, committed.Commit(bounded(t), nil))
	rolledBack := s.mustBeNew(t, claimOf("rolled back"))
	require.NoError(t, rolledBack.Rollback(bounded(t)))
	for _, tx := range []idempotency.Tx{committed, rolledBack} {
		require.Error(t, s.Write(bounded(t), tx.Raw(), "too late"), "a handler that keeps its transaction writes with it no more")
	}
	s.requireEffects(t)
}
