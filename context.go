package idempotency

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// attempt is one run of a handler inside a claim's transaction. It is the message's context meanwhile.
type attempt struct {
	context.Context //nolint:containedctx // the one that the message came with

	claim Claim
	msg   *message.Message
	raw   any

	mu       sync.Mutex
	ended    bool
	rollback error
	hooks    []func(ctx context.Context) error
}

type attemptKey struct{}

// Value implements context.Context: the attempt is found in itself.
func (a *attempt) Value(key any) any {
	if key == (attemptKey{}) {
		return a
	}
	return a.Context.Value(key)
}

func attemptFromContext(ctx context.Context) *attempt {
	a, _ := ctx.Value(attemptKey{}).(*attempt)
	return a
}

// end closes the attempt: from here on the context leads to no transaction, marks nothing and takes no hooks. It returns
// what the handler left behind.
func (a *attempt) end() (hooks []func(ctx context.Context) error, rollback error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	return a.hooks, a.rollback
}

func (a *attempt) marked() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rollback
}

func (a *attempt) active() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.ended
}

// whileActive runs fn if ctx belongs to a handler that is running.
func whileActive(ctx context.Context, fn func(a *attempt)) error {
	a := attemptFromContext(ctx)
	if a == nil {
		return fmt.Errorf("idempotency: %w: is the middleware on this handler, and does this context come from msg.Context()?", ErrNoTx)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		return fmt.Errorf("idempotency: event %q: %w: this context belongs to a handler that has returned", a.claim.EventID, ErrTxEnded)
	}
	fn(a)
	return nil
}

// TxFromContext returns the transaction that ctx, which comes from msg.Context(), belongs to. T is what the store hands
// out (pgx.Tx for package postgres, *sql.Tx for package sqlstore) or any interface that it satisfies, such as the DBTX
// that sqlc generates.
//
// The error is one for which errors.Is(err, ErrNoTx) is true if there is no transaction or one of another type, and
// errors.Is(err, ErrTxEnded) if the handler has already returned. The transaction is for the handler's own goroutine.
func TxFromContext[T any](ctx context.Context) (T, error) {
	var (
		tx  T
		raw any
	)
	if err := whileActive(ctx, func(a *attempt) { raw = a.raw }); err != nil {
		return tx, err
	}
	tx, ok := raw.(T)
	if !ok {
		return tx, fmt.Errorf("idempotency: %w: want %v, but the middleware's store hands out %T", ErrNoTx, reflect.TypeFor[T](), raw)
	}
	return tx, nil
}

// Handler adapts a function that takes its transaction as a parameter, so that it cannot be forgotten, to a Watermill
// handler that returns messages. T is inferred; see [TxFromContext] for what it may be.
func Handler[T any](fn func(ctx context.Context, tx T, msg *message.Message) ([]*message.Message, error)) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		tx, err := TxFromContext[T](ctx)
		if err != nil {
			return nil, err
		}
		return fn(ctx, tx, msg)
	}
}

// ConsumerHandler is [Handler] for functions that return no messages.
func ConsumerHandler[T any](fn func(ctx context.Context, tx T, msg *message.Message) error) message.NoPublishHandlerFunc {
	return func(msg *message.Message) error {
		ctx := msg.Context()
		tx, err := TxFromContext[T](ctx)
		if err != nil {
			return err
		}
		return fn(ctx, tx, msg)
	}
}

// ClaimFromContext returns the claim that ctx belongs to: the subscriber and event IDs are good parts of keys for
// external calls. The second result is false outside a handler under the middleware.
func ClaimFromContext(ctx context.Context) (Claim, bool) {
	a := attemptFromContext(ctx)
	if a == nil {
		return Claim{}, false
	}
	return a.claim, true
}

// MarkRollback makes the middleware roll back and return an error that wraps cause, whatever the handler returns. It is
// for code that turns errors into nil between the handler and the middleware: cqrs.CommandProcessorConfig's
// AckCommandHandlingErrors and requestreply's AckCommandErrors do. The first cause wins.
//
// The error is one for which errors.Is(err, ErrNoTx) or errors.Is(err, ErrTxEnded) is true, as with [TxFromContext]. It
// is safe for concurrent use.
func MarkRollback(ctx context.Context, cause error) error {
	if cause == nil {
		cause = errors.New("no cause given")
	}
	return whileActive(ctx, func(a *attempt) {
		if a.rollback == nil {
			a.rollback = cause
		}
	})
}

// AfterCommit runs fn once the transaction that ctx belongs to has committed, and not at all if it does not. Functions run
// in the order in which they were given, before the message is acked, with the values of the message's context and the
// commit timeout as deadline. The commit stands: an error or a panic in fn is logged and told to the observer, and the
// message is acked all the same. A crash between commit and fn loses the call, so it is for hints (a cache to drop, a
// metric), not for effects.
//
// Errors are those of [MarkRollback]. It is safe for concurrent use.
func AfterCommit(ctx context.Context, fn func(ctx context.Context) error) error {
	if fn == nil {
		return errors.New("idempotency: AfterCommit: the function is nil")
	}
	return whileActive(ctx, func(a *attempt) { a.hooks = append(a.hooks, fn) })
}
