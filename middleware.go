package idempotency

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Middleware makes handlers idempotent: [Middleware.Middleware] is what goes into the router. It is safe for concurrent
// use, and one value may serve any number of handlers.
type Middleware struct {
	config
	route func(ctx context.Context) (Store, error)
	scope any // what subscriber IDs must be unique in
	acks  ackQueue

	commits       deadlines
	warnInside    sync.Once
	warnRetention sync.Once
}

// New returns a middleware on the store. It opens nothing and starts no goroutine. The error names all mistakes in the
// options.
func New(store Store, opts ...Option) (*Middleware, error) {
	if err := checkStore(store); err != nil {
		return nil, fmt.Errorf("idempotency: New: %w", err)
	}
	return newMiddleware(store, func(context.Context) (Store, error) { return store, nil }, opts)
}

// NewRouting is [New] with a store for each message: route chooses it by the values of the message's context, for example
// the database of a tenant that an outer middleware put there. An error of route leaves the message with the broker. The
// same event must always find the same store, and route must return the same Store value for it.
func NewRouting(route func(ctx context.Context) (Store, error), opts ...Option) (*Middleware, error) {
	if route == nil {
		return nil, errors.New("idempotency: NewRouting: the function is nil")
	}
	return newMiddleware(nil, route, opts)
}

func newMiddleware(scope any, route func(ctx context.Context) (Store, error), opts []Option) (*Middleware, error) {
	m := &Middleware{config: defaultConfig(), route: route, scope: scope}
	for _, opt := range opts {
		if opt == nil {
			return nil, errors.New("idempotency: an option is nil")
		}
		opt.apply(&m.config)
	}
	if err := m.validate(); err != nil {
		return nil, fmt.Errorf("idempotency: %w", err)
	}
	if scope == nil {
		m.scope = m
	}
	m.fingerprint.seal()
	m.commits.timeout = m.commitTimeout
	m.acks.logger, m.acks.timeout = m.logger, m.commitTimeout
	return m, nil
}

// checkStore refuses what cannot be compared: stores are kept as keys of maps.
func checkStore(store Store) error {
	if store == nil {
		return errors.New("the store is nil")
	}
	if !reflect.TypeOf(store).Comparable() {
		return fmt.Errorf("the store, a %T, cannot be compared: use a pointer to it", store)
	}
	return nil
}

// Flush removes the stored produced messages of what has been acked, instead of a moment later in the background. Call it
// after the router has closed, so that a late duplicate after the next start publishes nothing; what it leaves behind is
// published once more by such a duplicate, and harms nothing else.
func (m *Middleware) Flush(ctx context.Context) error {
	if err := m.acks.sweep(ctx); err != nil {
		return fmt.Errorf("idempotency: Flush: %w", err)
	}
	return nil
}

// Middleware is the message.HandlerMiddleware: give it to router.AddMiddleware or handler.AddMiddleware, inside of (so,
// after) PoisonQueue, Retry and Timeout, and outside of (before) CorrelationID and Recoverer.
//
// It claims the event in a transaction, runs next with that transaction in the message's context, and commits. A duplicate
// skips next and returns what it had produced, unless that has been acked; one with other content is a [*ConflictError]. On
// every error it returns no messages, and the transaction is rolled back. An error of next is returned as it is, unless
// the database is to blame for it; all others are an [*Error], see [IsPermanent] and [IsTransient].
func (m *Middleware) Middleware(next message.HandlerFunc) message.HandlerFunc {
	var named registration
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		handler := message.HandlerNameFromCtx(ctx)
		if slices.Contains(m.ignoredHandlers, handler) {
			return next(msg)
		}
		d := &delivery{m: m, msg: msg, handler: handler}

		// 1 The key, and the store that it is unique in. 2 The fingerprint of the content.
		err := d.identify(ctx, &named)
		if d.isInside(ctx) {
			return next(msg)
		}
		if err != nil {
			return nil, d.fail(ctx, OpKey, err)
		}
		for {
			produced, err := d.attempt(ctx, next)
			if !d.again {
				return produced, err
			}
			d.pause(ctx)
		}
	}
}

// attempt runs the handler in one transaction.
func (d *delivery) attempt(ctx context.Context, next message.HandlerFunc) ([]*message.Message, error) {
	d.begin()
	clock := time.Now()
	lap := func() time.Duration {
		took := time.Since(clock) // half the price of time.Now
		clock = clock.Add(took)
		return took
	}

	// 3 BEGIN and the claim.
	tx, record, err := d.claimEvent(ctx)
	d.event.Claim = lap()
	if err != nil {
		return nil, d.fail(ctx, OpClaim, err)
	}
	if record != nil {
		return d.duplicate(ctx, record)
	}

	// Whichever way this function is left, also by a panic or runtime.Goexit of the handler, the message gets its context
	// back; if the transaction was not committed, it is rolled back, and the message is as it came.
	a := &attempt{Context: ctx, claim: d.claim, msg: d.msg, raw: tx.Raw()}
	original := snapshot(d.msg)
	returned, committed := false, false
	defer func() {
		d.msg.SetContext(ctx)
		if committed {
			original.release()
			return
		}
		_, _ = a.end()
		d.rollback(ctx, tx)
		original.restore(d.msg)
		if !returned {
			d.event.Handle = lap()
			d.report(ctx, HandlerPanicked, errHandlerLeft)
		}
	}()

	if err := d.m.horizon.check(d.msg, d.claim.EventID, clock); err != nil {
		returned = true
		return nil, d.fail(ctx, OpClaim, err)
	}

	// 4 The handler.
	d.msg.SetContext(a) //nolint:contextcheck // it is made of ctx
	produced, err := next(d.msg)

	// 5 What it produced, in the same transaction.
	var stored []*message.Message
	op := OpHandler
	if err == nil && a.marked() == nil {
		op = OpProduced
		stored, produced, err = d.settle(a, produced) //nolint:contextcheck // as above
	}
	hooks, mark := a.end()
	returned = true
	d.event.Handle = lap()
	if mark != nil {
		op, err = OpHandler, markedError(mark, err)
	}
	if err != nil {
		return nil, d.fail(ctx, op, err)
	}

	// 6 COMMIT, also when the router is closing.
	d.event.EarlyAck = isClosed(d.msg.Acked())
	err = tx.Commit(d.m.commits.detached(ctx, clock), stored)
	d.event.Commit = lap()
	if err != nil {
		return nil, d.fail(ctx, OpCommit, err)
	}

	// 7 From here on nothing turns success into failure. The router publishes what is returned, and acks.
	committed = true
	d.event.HookErr = d.runHooks(ctx, hooks)
	d.published(ctx, Processed, produced, len(stored) > 0)
	return produced, nil
}
