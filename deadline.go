package idempotency

import (
	"context"
	"sync/atomic"
	"time"
)

// deadlines bounds commits. A timer for each would cost as much as all else that the middleware does without a fingerprint, so
// those that begin within an eighth of the timeout share one.
type deadlines struct {
	timeout time.Duration
	shared  atomic.Pointer[deadline]
}

type deadline struct {
	context.Context           //nolint:containedctx // it is what is shared
	fresh           time.Time // until when commits may begin under it
}

// detached returns a context with the values of ctx that ends when the timeout has passed since now, or up to an eighth of it
// earlier, and not with ctx.
func (d *deadlines) detached(ctx context.Context, now time.Time) context.Context {
	end := d.shared.Load()
	if end == nil || now.After(end.fresh) {
		next, cancel := context.WithDeadline(context.Background(), now.Add(d.timeout)) //nolint:gosec // its timer ends it: nobody knows which commit is the last
		_ = cancel
		end = &deadline{next, now.Add(d.timeout / 8)}
		d.shared.Store(end)
	}
	return &detached{end, ctx}
}

// detached has the end of one context and the values of another.
type detached struct {
	*deadline
	values context.Context //nolint:containedctx // it is one itself
}

// Value asks the deadline first, for it has only what package context itself looks for: whoever waits for the end of this
// context is found to wait for the deadline's, and needs no goroutine.
func (d *detached) Value(key any) any {
	if value := d.deadline.Value(key); value != nil {
		return value
	}
	return d.values.Value(key)
}
