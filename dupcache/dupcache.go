// Package dupcache answers duplicates from memory: a storm of redeliveries, or a consumer that was set back to an old
// offset, then costs the database nothing.
//
//	store, err := postgres.New(ctx, pool)
//	cached, err := dupcache.New(store, 100_000, 10*time.Minute)
//	idem, err := idempotency.New(cached)
//
// It remembers only what cannot become untrue by itself: events whose commit has succeeded in this process, or whose
// record was read from the store, and whose produced messages are acked or were none. Everything else, an event that is
// not remembered among it, goes to the store, so a cold or a small cache is slow and never wrong. Contents are compared as
// ever: the fingerprint is remembered along.
//
// # What is removed from the store
//
// A record that somebody removes, by retention or to let an event be processed again, is remembered for up to the time to
// live by each process that knows it: until then, its event is acked as a duplicate. Choose a time that is short against
// the retention, and let it pass before an event that was removed by hand is sent again.
package dupcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/watermill-idempotency/idempotency"
)

// Store is an [idempotency.Store] in front of another one. It is safe for concurrent use.
type Store struct {
	store   idempotency.Store
	ttl     time.Duration
	entries *lru.Cache[idempotency.Key, *entry]
}

var _ idempotency.Store = (*Store)(nil)

// entry is a committed claim. Its record never has produced messages: as long as they may be needed, it is not published.
type entry struct {
	record    idempotency.Record
	expires   time.Time
	published atomic.Bool
}

// New returns a store that remembers up to size events, the least recently met one going first, each for ttl from its
// commit or the reading of its record. An event takes about 300 bytes and its IDs. Both numbers must be positive.
//
// The [idempotency.Record] of an event that was committed through this store has a ClaimedAt by this process's clock, not
// by the database's.
func New(store idempotency.Store, size int, ttl time.Duration) (*Store, error) {
	var errs []error
	if store == nil {
		errs = append(errs, errors.New("the store is nil"))
	}
	if size <= 0 {
		errs = append(errs, fmt.Errorf("the size, %d, is not positive", size))
	}
	if ttl <= 0 {
		errs = append(errs, fmt.Errorf("the time to live, %v, is not positive", ttl))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("dupcache: New: %w", err)
	}
	entries, err := lru.New[idempotency.Key, *entry](size)
	if err != nil {
		return nil, fmt.Errorf("dupcache: New: %w", err)
	}
	return &Store{store: store, ttl: ttl, entries: entries}, nil
}

// Claim implements [idempotency.Store]. It asks the store behind unless the event is known as a duplicate.
func (s *Store) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("dupcache: claim: %w", err)
	}
	if e, ok := s.entries.Get(c.Key); ok && e.published.Load() && time.Until(e.expires) > 0 {
		record := e.record
		record.Fingerprint = bytes.Clone(record.Fingerprint)
		return nil, &record, nil
	}
	now := time.Now()
	claimed, record, err := s.store.Claim(ctx, c)
	switch {
	case err != nil:
		return nil, nil, err
	case record != nil:
		if len(record.Produced) == 0 {
			s.remember(*record, true, now)
		}
		return nil, record, nil
	}
	return &tx{Tx: claimed, store: s, claim: c, claimedAt: now}, nil, nil
}

func (s *Store) remember(record idempotency.Record, published bool, since time.Time) {
	record.Fingerprint = bytes.Clone(record.Fingerprint) // the caller's to change
	record.Produced = nil
	e := &entry{record: record, expires: since.Add(s.ttl)}
	e.published.Store(published)
	s.entries.Add(record.Key, e)
}

// Acked implements [idempotency.Store].
func (s *Store) Acked(ctx context.Context, keys []idempotency.Key) error {
	if err := s.store.Acked(ctx, keys); err != nil {
		return err
	}
	for _, key := range keys {
		if e, ok := s.entries.Peek(key); ok {
			e.published.Store(true)
		}
	}
	return nil
}

// Classify implements [idempotency.Store].
func (s *Store) Classify(err error) idempotency.Fault { return s.store.Classify(err) }

// Retention returns what the store behind says of how long it keeps its records; ok is false if it says nothing.
func (s *Store) Retention() (d time.Duration, ok bool) {
	if keeps, is := s.store.(interface {
		Retention() (time.Duration, bool)
	}); is {
		return keeps.Retention()
	}
	return 0, false
}

// tx remembers the event once it is committed.
type tx struct {
	idempotency.Tx
	store     *Store
	claim     idempotency.Claim
	claimedAt time.Time
}

// Commit implements [idempotency.Tx]. After an error nothing is remembered: the outcome may be unknown.
func (t *tx) Commit(ctx context.Context, produced []*message.Message) error {
	if err := t.Tx.Commit(ctx, produced); err != nil {
		return err
	}
	t.store.remember(idempotency.Record{
		Key: t.claim.Key, Topic: t.claim.Topic, Fingerprint: t.claim.Fingerprint, ClaimedAt: t.claimedAt,
	}, len(produced) == 0, t.claimedAt)
	return nil
}
