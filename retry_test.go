package idempotency_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// A conflict at any step is tried again in a fresh transaction, with the message as it came.
func TestTrap13_ConflictsAreRetriedInPlace(t *testing.T) {
	t.Parallel()
	for _, op := range []idempotency.Op{idempotency.OpClaim, idempotency.OpHandler, idempotency.OpCommit} {
		t.Run(string(op), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			left := 2
			conflict := func() error {
				if left == 0 {
					return nil
				}
				left--
				return fmt.Errorf("%w: %w", idempotency.ErrRolledBack, errConflict)
			}
			switch op {
			case idempotency.OpClaim:
				b.store.claim = func(context.Context, idempotency.Claim) error { return conflict() }
			case idempotency.OpCommit:
				b.store.commit = func(context.Context) error { return conflict() }
			case idempotency.OpHandler, idempotency.OpKey, idempotency.OpProduced:
			}
			calls := 0
			handle := b.Middleware.Middleware(writeThen(func(msg *message.Message) ([]*message.Message, error) {
				calls++
				require.Empty(t, msg.Metadata.Get("attempt"), "the message is as it came")
				msg.Metadata.Set("attempt", "1")
				if op == idempotency.OpHandler {
					if err := conflict(); err != nil {
						return nil, err
					}
				}
				return []*message.Message{order("produced")}, nil
			}))

			produced, err := handle(order("1"))
			require.NoError(t, err)
			require.Len(t, produced, 1, "nothing of the first attempts is published")
			require.Equal(t, []string{"label for 1"}, b.store.Effects())
			require.Equal(t, []idempotency.Outcome{idempotency.Retried, idempotency.Retried, idempotency.Processed}, b.observed.outcomes())
			events := b.observed.all()
			require.Equal(t, []int{1, 2, 3}, []int{events[0].Attempt, events[1].Attempt, events[2].Attempt})
			require.ErrorIs(t, events[0].Err, errConflict)
			require.Len(t, b.logs.Captured()[watermill.InfoLogLevel], 2)
			if op == idempotency.OpClaim {
				require.Equal(t, 1, calls)
			} else {
				require.Equal(t, 3, calls)
			}
		})
	}
}

func TestTrap13_RetriesAreBounded(t *testing.T) {
	t.Parallel()
	for _, retries := range []int{0, 2} {
		b := setup(t, idempotency.WithRetries(retries))
		calls := 0
		_, err := b.Middleware.Middleware(func(*message.Message) ([]*message.Message, error) {
			calls++
			return nil, errConflict
		})(order("1"))
		require.ErrorIs(t, err, errConflict)
		require.True(t, idempotency.IsTransient(err), "the message is not at fault")
		require.Equal(t, retries+1, calls)
		outcomes := b.observed.outcomes()
		require.Len(t, outcomes, retries+1)
		require.Equal(t, idempotency.Transient, outcomes[retries])
	}
}

func TestNoRetryWhenTheContextHasEnded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ctx, cancel := context.WithCancel(t.Context())
	msg := order("1")
	msg.SetContext(ctx)
	_, err := b.Middleware.Middleware(func(*message.Message) ([]*message.Message, error) {
		cancel()
		return nil, errConflict
	})(msg)
	require.ErrorIs(t, err, errConflict)
	require.Equal(t, []idempotency.Outcome{idempotency.Transient}, b.observed.outcomes())
}

// A conflict is no proof that the commit did nothing, unless the store says so.
func TestTrap03_CommitOfUnknownOutcomeIsNotTriedAgainInPlace(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.store.commit = func(context.Context) error { return errConflict }
	_, err := b.Middleware.Middleware(func(*message.Message) ([]*message.Message, error) { return nil, nil })(order("1"))
	require.ErrorIs(t, err, idempotency.ErrCommitUnknown)
	require.Equal(t, []idempotency.Outcome{idempotency.CommitUnknown}, b.observed.outcomes())
}
