package idempotency

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	// ackInterval is the time from a message's first sight to the removal of its stored produced messages, if it is acked
	// by then. It bounds the number of extra transactions per second.
	ackInterval = 100 * time.Millisecond
	// ackBatch is how many keys go to the store at once.
	ackBatch = 500
	// ackBacklog is how many acked keys are kept while the database cannot be reached. What is dropped stays stored, and
	// a late duplicate would publish it again; the stores have a method Unacked that finds it.
	ackBacklog = 100_000
)

// ackQueue removes stored produced messages once the router has acked the messages they belong to. It looks at the ack
// channels from a timer that runs only while there is something to wait for: no goroutine outlives the messages in flight.
type ackQueue struct {
	logger  watermill.LoggerAdapter
	timeout time.Duration

	sweeping sync.Mutex // held by the one sweep that runs
	removals atomic.Int64

	mu        sync.Mutex // guards what follows
	pending   []pendingAck
	scheduled bool
}

type pendingAck struct {
	store         Store
	key           Key
	acked, nacked <-chan struct{}
}

// watch waits for the ack of a message whose produced messages are stored under key.
func (q *ackQueue) watch(store Store, key Key, msg *message.Message) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pending = append(q.pending, pendingAck{store, key, msg.Acked(), msg.Nacked()})
	q.schedule()
}

// acked tells whether a delivery of the key has been acked by this process, though the store may not know yet.
func (q *ackQueue) acked(store Store, key Key) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.ContainsFunc(q.pending, func(p pendingAck) bool { return p.store == store && p.key == key && isClosed(p.acked) })
}

// schedule is called with q.mu held.
func (q *ackQueue) schedule() {
	if q.scheduled || len(q.pending) == 0 {
		return
	}
	q.scheduled = true
	time.AfterFunc(ackInterval, func() {
		ctx, cancel := context.WithTimeout(context.Background(), q.timeout)
		defer cancel()
		if err := q.sweep(ctx); err != nil {
			q.logger.Error("idempotency: stored produced messages of acked messages were not removed, trying again", err, nil)
		}
		q.mu.Lock()
		defer q.mu.Unlock()
		q.scheduled = false
		q.schedule()
	})
}

// sweep tells the stores what has been acked, and forgets it.
func (q *ackQueue) sweep(ctx context.Context) error {
	q.sweeping.Lock()
	defer q.sweeping.Unlock()

	acked := make(map[Store][]Key)
	q.mu.Lock()
	q.pending = slices.DeleteFunc(q.pending, func(p pendingAck) bool { return isClosed(p.nacked) })
	for _, p := range q.pending {
		if isClosed(p.acked) {
			acked[p.store] = append(acked[p.store], p.key)
		}
	}
	q.mu.Unlock()

	var errs []error
	for store, keys := range acked {
		for batch := range slices.Chunk(keys, ackBatch) {
			if err := store.Acked(ctx, batch); err != nil {
				errs = append(errs, err)
				break
			}
			q.removals.Add(1) // before it is forgotten, see claimEvent
			q.forget(store, batch)
		}
	}
	q.trim()
	return errors.Join(errs...)
}

func (q *ackQueue) forget(store Store, keys []Key) {
	done := make(map[Key]bool, len(keys))
	for _, key := range keys {
		done[key] = true
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pending = slices.DeleteFunc(q.pending, func(p pendingAck) bool { return p.store == store && done[p.key] && isClosed(p.acked) })
}

func (q *ackQueue) trim() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if excess := len(q.pending) - ackBacklog; excess > 0 {
		q.logger.Error("idempotency: too many acks wait for the database: the oldest produced messages stay stored, see Unacked of the store", nil,
			watermill.LogFields{"dropped": excess})
		q.pending = slices.Delete(q.pending, 0, excess)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
