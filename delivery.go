package idempotency

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// delivery is one message's way through the middleware, in one attempt or more.
type delivery struct {
	m       *Middleware
	msg     *message.Message
	handler string
	store   Store
	claim   Claim

	attempts int
	again    bool  // another attempt follows
	event    Event // of this attempt
}

// identify finds the key and the store, and takes the fingerprint.
func (d *delivery) identify(ctx context.Context, named *registration) error {
	d.claim.Topic = message.SubscribeTopicFromCtx(ctx)
	d.claim.InFlight = d.m.inFlight
	var err error
	if d.claim.SubscriberID, err = named.resolve(d.m, d.handler); err != nil {
		return err
	}
	if !d.m.phantomsPass && isPhantom(d.msg) {
		return ErrPhantomMessage
	}
	if d.claim.EventID, err = eventID(d.m.key, d.msg); err != nil {
		return err
	}
	if d.store, err = d.m.route(ctx); err != nil {
		return fmt.Errorf("choose a store: %w", err)
	}
	if err = checkStore(d.store); err != nil {
		return fmt.Errorf("choose a store: %w", err)
	}
	d.m.warnHorizon(d.store)
	d.claim.Fingerprint, err = d.m.fingerprint.of(d.msg)
	return err
}

// isInside tells whether the middleware is on this message already, further out: a claim of the same event in a second
// transaction would wait for the first for ever. A message of its own that a handler sent on, with its context, is not
// inside: it has another key.
func (d *delivery) isInside(ctx context.Context) bool {
	outer := attemptFromContext(ctx)
	if outer == nil || !outer.active() || outer.msg != d.msg && outer.claim.Key != d.claim.Key {
		return false
	}
	d.m.warnInside.Do(func() {
		d.m.logger.Info("idempotency: the middleware is on this handler twice: the outer one, of the router, counts, and this one lets its messages pass",
			watermill.LogFields{"handler": d.handler, "subscriber": d.claim.SubscriberID, "outer_subscriber": outer.claim.SubscriberID})
	})
	return true
}

func (d *delivery) begin() {
	d.attempts++
	d.again = false
	d.event = Event{}
}

// claimEvent claims. The record of a duplicate shows what the event has produced, as long as no ack has confirmed that it
// is published: an ack of this process may be ahead of the store. A record that was read while the background removed what
// is acked may show what is neither stored nor remembered any more, so it is read again.
func (d *delivery) claimEvent(ctx context.Context) (Tx, *Record, error) {
	for again := false; ; again = true {
		removals := d.m.acks.removals.Load()
		tx, record, err := d.store.Claim(ctx, d.claim)
		switch {
		case record == nil || len(record.Produced) == 0:
		case d.m.acks.acked(d.store, d.claim.Key):
			record.Produced = nil
		case !again && removals != d.m.acks.removals.Load():
			continue
		}
		return tx, record, err
	}
}

// duplicate hands out what the event has produced. It refuses other content under the same ID.
func (d *delivery) duplicate(ctx context.Context, record *Record) ([]*message.Message, error) {
	d.event.ClaimedAt, d.event.Age = record.ClaimedAt, max(0, time.Since(record.ClaimedAt))
	if err := d.m.fingerprint.compare(d.claim.Fingerprint, record); err != nil {
		return nil, d.fail(ctx, OpClaim, err)
	}
	produced := record.Produced
	d.event.EarlyAck = isClosed(d.msg.Acked())
	d.published(ctx, Duplicate, produced, len(produced) > 0)
	return produced, nil
}

// published ends a delivery that will be acked.
func (d *delivery) published(ctx context.Context, outcome Outcome, produced []*message.Message, stored bool) {
	for _, msg := range produced {
		// A handler that made its messages with the context of the consumed one leaves the ended transaction in them.
		if attemptFromContext(msg.Context()) != attemptFromContext(ctx) { //nolint:contextcheck // it is the message's own
			msg.SetContext(ctx)
		}
	}
	// An early ack tells nothing about the publish to come.
	if stored && !d.event.EarlyAck {
		d.m.acks.watch(d.store, d.claim.Key, d.msg) //nolint:contextcheck // the background outlives the message
	}
	d.event.Produced = len(produced)
	d.report(ctx, outcome, nil)
}

// pause lets the transaction that was in the way end.
func (d *delivery) pause(ctx context.Context) {
	timer := time.NewTimer(time.Millisecond + rand.N(time.Duration(d.attempts)*10*time.Millisecond)) //nolint:gosec // jitter
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done(): // the next claim tells
	}
}

// detached returns a context that does not end with ctx, but when the commit timeout has passed.
func (d *delivery) detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d.m.commitTimeout)
}

func (d *delivery) rollback(ctx context.Context, tx Tx) {
	ctx, cancel := d.detached(ctx)
	defer cancel()
	if err := tx.Rollback(ctx); err != nil {
		// The server rolls back what it hears no more of.
		d.m.logger.Debug("idempotency: rollback failed, the connection is closed", d.fields().Add(watermill.LogFields{"err": err.Error()}))
	}
}

// settle is detached like the commit: a handler that has succeeded is not undone because its router is closing.
func (d *delivery) settle(inside context.Context, produced []*message.Message) (stored, published []*message.Message, err error) {
	if len(produced) == 0 {
		return nil, nil, nil
	}
	ctx, cancel := d.detached(inside)
	defer cancel()
	return d.m.produced.settle(ctx, produced)
}

// runHooks runs the functions of [AfterCommit].
func (d *delivery) runHooks(ctx context.Context, hooks []func(ctx context.Context) error) error {
	if len(hooks) == 0 {
		return nil
	}
	ctx, cancel := d.detached(ctx)
	defer cancel()
	var errs []error
	for _, hook := range hooks {
		if err := guard(func() error { return hook(ctx) }); err != nil {
			errs = append(errs, err)
		}
	}
	err := errors.Join(errs...)
	if err != nil {
		d.m.logger.Error("idempotency: after-commit function failed; the commit stands, and the message is acked", err, d.fields())
	}
	return err
}

// fail ends an attempt: it decides what became of it and whether another one follows, reports that, and says in the error
// where it happened.
func (d *delivery) fail(ctx context.Context, op Op, err error) error {
	outcome, transient := d.judge(op, err)
	if outcome == CommitUnknown {
		err = fmt.Errorf("%w: %w", ErrCommitUnknown, err)
	}
	if d.store != nil && outcome != CommitUnknown && d.store.Classify(err) == FaultConflict && d.attempts <= d.m.retries && ctx.Err() == nil {
		outcome, d.again = Retried, true
	}
	// What a handler returned is what outer middleware compares.
	if op != OpHandler || transient || errors.Is(err, ErrRolledBack) {
		err = &Error{Op: op, Key: d.claim.Key, Handler: d.handler, Topic: d.claim.Topic, Err: err, transient: transient}
	}
	d.event.EarlyAck = isClosed(d.msg.Acked())
	d.report(ctx, outcome, err)
	return err
}

func (d *delivery) judge(op Op, err error) (_ Outcome, transient bool) {
	known := errors.Is(err, ErrRolledBack) || errors.Is(err, ErrTxEnded)
	switch {
	case errors.Is(err, ErrConflict) && op == OpClaim:
		return Conflict, false
	case (op == OpKey || op == OpClaim) && IsPermanent(err):
		return Permanent, false
	case op == OpKey:
		return Transient, true
	case op == OpClaim && errors.Is(err, ErrInFlight):
		return ClaimInFlight, true
	case op == OpClaim:
		return Transient, true
	case op == OpCommit && !known:
		return CommitUnknown, true
	case d.store.Classify(err) != FaultOther:
		return Transient, true
	case op == OpHandler && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)):
		return Transient, false // IsTransient sees it, and what the handler returned is handed on as it is
	}
	return HandlerFailed, false
}

// markedError is the error of an attempt that was marked for rollback; err is what the handler returned.
func markedError(mark, err error) error {
	if err == nil {
		return fmt.Errorf("%w: %w", ErrRolledBack, mark)
	}
	if errors.Is(err, mark) {
		return err
	}
	return fmt.Errorf("%w: %w; the handler returned: %w", ErrRolledBack, mark, err)
}

// errHandlerLeft stands for a panic value, which is not ours to catch, or runtime.Goexit.
var errHandlerLeft = errors.New("the handler panicked, or left by runtime.Goexit")

// report logs what nobody else tells, and tells the observers.
func (d *delivery) report(ctx context.Context, outcome Outcome, err error) {
	e := d.event
	e.Outcome, e.Key, e.Handler, e.Topic, e.Attempt, e.Err = outcome, d.claim.Key, d.handler, d.claim.Topic, d.attempts, err

	switch {
	case e.EarlyAck && err != nil && outcome != Retried:
		d.m.logger.Error("idempotency: the message was acked before its transaction committed, and is lost now that it failed: remove middleware.InstantAck, and let only the router ack", err, d.fields())
	case e.EarlyAck:
		d.m.logger.Error("idempotency: the message was acked before its transaction committed, and would be lost if it failed: remove middleware.InstantAck, and let only the router ack", nil, d.fields())
	case outcome == Duplicate:
		fields := d.fields()
		fields["claimed_at"], fields["produced"] = e.ClaimedAt, e.Produced
		d.m.logger.Debug("idempotency: duplicate, handler skipped", fields)
	case outcome == Retried:
		d.m.logger.Info("idempotency: trying again in a fresh transaction", d.fields().Add(watermill.LogFields{"err": err.Error()}))
	}

	for _, o := range d.m.observers {
		if err := guard(func() error { o.Observe(ctx, e); return nil }); err != nil {
			d.m.logger.Error("idempotency: observer failed; the message is not affected", err, d.fields())
		}
	}
}

func (d *delivery) fields() watermill.LogFields {
	return watermill.LogFields{
		"handler":    d.handler,
		"topic":      d.claim.Topic,
		"subscriber": d.claim.SubscriberID,
		"event_id":   d.claim.EventID,
		"attempt":    d.attempts,
	}
}

// guard turns a panic of fn into an error.
func guard(fn func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return fn()
}
