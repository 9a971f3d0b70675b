// Package retention removes old claims, for the stores.
package retention

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/watermill-idempotency/idempotency"
)

const (
	// batchSize is the number of claims that one transaction removes.
	batchSize = 1000
	// batchTimeout bounds a transaction: one that a broken network swallows must not hold the loop for hours.
	batchTimeout = time.Minute
	// minPause is the least pause between two batches. Otherwise it is as long as the batch took: a backlog takes half of
	// what one connection can do, and on SQLite claims get their turn at the write lock.
	minPause = 20 * time.Millisecond

	// grace is how long claims go on before those are removed that grew old while there were none. After a downtime,
	// brokers first deliver again what was not acked before it, and those events must be judged by their claims, however
	// long the downtime was. It also bounds itself by the retention, for a retention that is shorter.
	grace = time.Hour

	// maxBackoff is the largest multiple of the interval that a loop waits after failures.
	maxBackoff = 16
)

// ErrElsewhere is what [Engine.Remove] returns when another instance is at it.
var ErrElsewhere = errors.New("another instance is purging")

// ErrUnlimited means that a store was told to purge and not how long to keep claims.
var ErrUnlimited = errors.New("claims are kept for ever: give WithRetention to New")

// Engine is a store's database. Its clock is the one that counts.
type Engine interface {
	// Newest returns when the newest claim was made of those that are at least age old; zero if there is none.
	Newest(ctx context.Context, age time.Duration) (time.Time, error)
	// Remove removes the oldest claims that were made from one time on and before another, in one transaction, without
	// waiting for a lock: at most limit, and none with stored produced messages. It returns when the youngest of the
	// removed was made.
	Remove(ctx context.Context, from, before time.Time, limit int) (removed int64, last time.Time, err error)
	// CountUnacked counts the events with stored produced messages that were claimed before a time.
	CountUnacked(ctx context.Context, before time.Time) (int64, error)
}

// Validate checks what a store was given; nil is no retention.
func Validate(d *time.Duration) error {
	if d != nil && *d <= 0 {
		return fmt.Errorf("WithRetention: %v is not positive", *d)
	}
	return nil
}

// Purge removes the claims that are older than keep, counted back from the newest claim that is at least the grace old,
// and not from now. While claims are made, the two are an hour apart. In a downtime, whether of the consumers, the broker
// or the database, there is no newer claim, so nothing grows old; and for an hour after it, that claim is still the one
// from before. What was claimed shortly before a downtime is thus there when its event is delivered again after it.
func Purge(ctx context.Context, e Engine, keep *time.Duration) (p idempotency.Purged, err error) {
	if keep == nil {
		return p, ErrUnlimited
	}
	newest, err := e.Newest(ctx, min(*keep, grace))
	if err != nil || newest.IsZero() {
		return p, err
	}
	before := newest.Add(-*keep)
	// Each batch begins where the last one ended: what is left behind, and the index entries of what is removed, are read
	// once and not by every batch.
	for from := (time.Time{}); ; {
		began := time.Now()
		removed, last, err := remove(ctx, e, from, before)
		if errors.Is(err, ErrElsewhere) {
			p.Elsewhere = true
			return p, nil
		}
		if err != nil {
			return p, err
		}
		p.Claims += removed
		if removed < batchSize {
			break
		}
		from = last
		if err := pause(ctx, max(time.Since(began), minPause)); err != nil {
			return p, err
		}
	}
	p.Unacked, err = e.CountUnacked(ctx, before)
	return p, err
}

func remove(ctx context.Context, e Engine, from, before time.Time) (removed int64, last time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	return e.Remove(ctx, from, before, batchSize)
}

// Clean purges until ctx ends.
func Clean(ctx context.Context, interval time.Duration, logger watermill.LoggerAdapter, purge func(context.Context) (idempotency.Purged, error)) error {
	switch {
	case interval <= 0:
		return fmt.Errorf("the interval, %v, is not positive", interval)
	case logger == nil:
		return errors.New("the logger is nil: give watermill.NopLogger{} for silence")
	}
	c := cleaner{logger: logger}
	wait := rand.N(interval) //nolint:gosec // jitter: instances that start together do not purge together
	for pause(ctx, wait) == nil {
		p, err := purge(ctx)
		if ctx.Err() == nil {
			c.report(p, err)
		}
		wait = interval * time.Duration(min(1<<min(c.failures, 30), maxBackoff))
		wait += rand.N(wait/4 + 1) //nolint:gosec // jitter
	}
	return nil
}

// cleaner logs what changes, and not each time what stays.
type cleaner struct {
	logger   watermill.LoggerAdapter
	failures int // in a row
	unacked  int64
}

func (c *cleaner) report(p idempotency.Purged, err error) {
	if err != nil {
		c.failures++
		if c.failures == 1 {
			c.logger.Error("idempotency: old claims were not purged, trying again later and later", err, nil)
		} else {
			c.logger.Debug("idempotency: old claims were not purged", watermill.LogFields{"err": err.Error(), "failures": c.failures})
		}
		return
	}
	if c.failures > 0 {
		c.logger.Info("idempotency: old claims are purged again", watermill.LogFields{"failures": c.failures})
		c.failures = 0
	}
	if p.Claims > 0 {
		c.logger.Debug("idempotency: purged old claims", watermill.LogFields{"claims": p.Claims})
	}
	if p.Elsewhere {
		return // and the other one knows the number
	}
	if p.Unacked > c.unacked {
		c.logger.Error("idempotency: events older than the retention have produced messages that no ack has confirmed: they are kept; see Unacked and Stats of the store", nil,
			watermill.LogFields{"events": p.Unacked})
	}
	c.unacked = p.Unacked
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
