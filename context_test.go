package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
)

// writer is an interface that the transaction satisfies, as sqlc's DBTX is.
type writer interface{ Write(effect string) error }

func TestTransactionIsFoundByTypeAndByInterface(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		byType, err := idempotency.TxFromContext[*idempotencytest.MemTx](ctx)
		require.NoError(t, err)
		byInterface, err := idempotency.TxFromContext[writer](ctx)
		require.NoError(t, err)
		require.Same(t, byType, byInterface)

		claim, ok := idempotency.ClaimFromContext(ctx)
		require.True(t, ok)
		require.Equal(t, idempotency.Key{SubscriberID: "shipping", EventID: "1"}, claim.Key)
		require.Equal(t, "shipping/1", claim.String())

		_, err = idempotency.TxFromContext[fmt.Stringer](ctx)
		require.ErrorIs(t, err, idempotency.ErrNoTx)
		require.EqualError(t, err, "idempotency: no transaction in context: want fmt.Stringer, but the middleware's store hands out *idempotencytest.MemTx")
		return nil, err
	})
	_, err := handle(order("1"))
	require.ErrorIs(t, err, idempotency.ErrNoTx)
	require.True(t, idempotency.IsTransient(err), "a wiring mistake empties no topic into a dead-letter queue")
	require.False(t, idempotency.IsPermanent(err))
}

func TestWithoutMiddlewareThereIsNoTransaction(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, err := idempotency.TxFromContext[writer](ctx)
	require.ErrorIs(t, err, idempotency.ErrNoTx)
	require.ErrorContains(t, err, "is the middleware on this handler")
	require.ErrorIs(t, idempotency.MarkRollback(ctx, errBusiness), idempotency.ErrNoTx)
	require.ErrorIs(t, idempotency.AfterCommit(ctx, func(context.Context) error { return nil }), idempotency.ErrNoTx)
	_, ok := idempotency.ClaimFromContext(ctx)
	require.False(t, ok)

	_, err = idempotency.Handler(createLabel)(order("1"))
	require.ErrorIs(t, err, idempotency.ErrNoTx)
	consumer := idempotency.ConsumerHandler(func(context.Context, writer, *message.Message) error { return nil })
	require.ErrorIs(t, consumer(order("1")), idempotency.ErrNoTx)
}

func TestTrap09_NothingReachesAnEndedTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var kept context.Context
	handle := b.Middleware.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		kept = msg.Context() //nolint:fatcontext // a handler that keeps it
		require.ErrorContains(t, idempotency.AfterCommit(kept, nil), "nil")
		return nil, nil
	})
	_, err := handle(order("1"))
	require.NoError(t, err)

	_, err = idempotency.TxFromContext[writer](kept)
	require.ErrorIs(t, err, idempotency.ErrTxEnded)
	require.ErrorIs(t, idempotency.MarkRollback(kept, errBusiness), idempotency.ErrTxEnded)
	require.ErrorIs(t, idempotency.AfterCommit(kept, func(context.Context) error { return nil }), idempotency.ErrTxEnded)
}

func TestTrap09_TransactionEndedByTheHandlerIsNotAcked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.store.commit = func(context.Context) error { return fmt.Errorf("commit: %w", idempotency.ErrTxEnded) }
	_, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(order("1"))
	require.ErrorIs(t, err, idempotency.ErrTxEnded)
	require.NotErrorIs(t, err, idempotency.ErrCommitUnknown)
	require.Equal(t, []idempotency.Outcome{idempotency.HandlerFailed}, b.observed.outcomes())
}

func TestErrorSaysWhere(t *testing.T) {
	t.Parallel()
	err := error(&idempotency.Error{
		Op: idempotency.OpCommit, Key: idempotency.Key{SubscriberID: "s", EventID: "e"}, Handler: "h", Topic: "t",
		Err: errors.New("idempotency: the cause"),
	})
	require.EqualError(t, err, `idempotency: commit in handler "h" on topic "t" for subscriber "s", event "e": the cause`)
	require.False(t, idempotency.IsTransient(err))
	require.False(t, idempotency.IsPermanent(err))
	require.False(t, idempotency.IsPermanent(nil))
	require.False(t, idempotency.IsTransient(nil))
}

func TestNamesOfOutcomesAndFaults(t *testing.T) {
	t.Parallel()
	for outcome, want := range map[idempotency.Outcome]string{
		idempotency.Processed: "processed", idempotency.Duplicate: "duplicate", idempotency.ClaimInFlight: "in_flight",
		idempotency.HandlerFailed: "handler_failed", idempotency.HandlerPanicked: "handler_panicked", idempotency.Retried: "retried",
		idempotency.Transient: "transient", idempotency.Permanent: "permanent", idempotency.CommitUnknown: "commit_unknown",
		0: "Outcome(0)",
	} {
		require.Equal(t, want, outcome.String())
	}
	for fault, want := range map[idempotency.Fault]string{
		idempotency.FaultOther: "other", idempotency.FaultConflict: "conflict", idempotency.FaultUnavailable: "unavailable", 9: "Fault(9)",
	} {
		require.Equal(t, want, fault.String())
	}
}
