// Package idempotencytest helps to test services that use package idempotency.
package idempotencytest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-idempotency/idempotency"
)

// MemStore is an [idempotency.Store] in memory: the reference of what a store does, and a store for tests that need no
// database. Handlers get a [*MemTx]. It is safe for concurrent use.
type MemStore struct {
	mu        sync.Mutex
	claims    map[idempotency.Key]*memClaim
	effects   []string
	commitErr error
}

var _ idempotency.Store = (*MemStore)(nil)

// memClaim is a claim that is held by tx, or committed once tx is nil.
type memClaim struct {
	record idempotency.Record
	tx     *MemTx
}

// MemTx is the transaction that handlers get. It is used by one goroutine at a time.
type MemTx struct {
	store   *MemStore
	key     idempotency.Key
	done    chan struct{} // closed when the transaction ends
	effects []string
	failed  error
	ended   bool
}

// NewMemStore returns an empty store.
func NewMemStore() *MemStore {
	return &MemStore{claims: make(map[idempotency.Key]*memClaim)}
}

// Effects returns what handlers have written by [MemTx.Write] and committed, in the order of the commits.
func (s *MemStore) Effects() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.effects)
}

// FailCommit makes the next commit return err. The commit happens all the same, unless errors.Is(err,
// idempotency.ErrRolledBack) is true: so any other error is a commit whose answer was lost.
func (s *MemStore) FailCommit(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.commitErr = err
}

// Claim implements [idempotency.Store].
func (s *MemStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	limit, bounded := c.InFlight.Limit()
	var timeout <-chan time.Time
	if bounded && limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		timeout = timer.C
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, nil, fmt.Errorf("idempotencytest: claim: %w", err)
		}
		tx, record, held := s.tryClaim(c)
		if held == nil {
			if record != nil {
				return nil, record, nil
			}
			return memTx{tx}, nil, nil
		}
		if bounded && limit == 0 {
			return nil, nil, fmt.Errorf("idempotencytest: claim: %w", idempotency.ErrInFlight)
		}
		select {
		case <-held:
		case <-timeout:
			return nil, nil, fmt.Errorf("idempotencytest: claim: %w after %v", idempotency.ErrInFlight, limit)
		case <-ctx.Done():
		}
	}
}

// tryClaim returns a transaction, or the record of a duplicate, or the end of the transaction that holds the claim.
func (s *MemStore) tryClaim(c idempotency.Claim) (*MemTx, *idempotency.Record, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if claim, ok := s.claims[c.Key]; ok {
		if claim.tx != nil {
			return nil, nil, claim.tx.done
		}
		record := claim.record
		record.Fingerprint = bytes.Clone(record.Fingerprint)
		record.Produced = copyMessages(record.Produced)
		return nil, &record, nil
	}
	tx := &MemTx{store: s, key: c.Key, done: make(chan struct{})}
	s.claims[c.Key] = &memClaim{
		record: idempotency.Record{Key: c.Key, Topic: c.Topic, Fingerprint: bytes.Clone(c.Fingerprint), ClaimedAt: time.Now()},
		tx:     tx,
	}
	return tx, nil, nil
}

// Acked implements [idempotency.Store].
func (s *MemStore) Acked(ctx context.Context, keys []idempotency.Key) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("idempotencytest: acked: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range keys {
		if claim, ok := s.claims[key]; ok && claim.tx == nil {
			claim.record.Produced = nil
		}
	}
	return nil
}

// Classify implements [idempotency.Store]. The store itself has no trouble; [idempotency.FaultOther] is its answer.
func (s *MemStore) Classify(error) idempotency.Fault { return idempotency.FaultOther }

// Write records an effect, which [MemStore.Effects] shows once the transaction has committed.
func (tx *MemTx) Write(effect string) error {
	tx.store.mu.Lock()
	defer tx.store.mu.Unlock()
	if tx.ended {
		return fmt.Errorf("idempotencytest: write %q: %w", effect, idempotency.ErrTxEnded)
	}
	if tx.failed != nil {
		return fmt.Errorf("idempotencytest: write %q: the transaction is aborted: %w", effect, tx.failed)
	}
	tx.effects = append(tx.effects, effect)
	return nil
}

// Abort puts the transaction into the state that a failed statement leaves a PostgreSQL transaction in: it can only be
// rolled back.
func (tx *MemTx) Abort(cause error) {
	tx.store.mu.Lock()
	defer tx.store.mu.Unlock()
	tx.failed = cause
}

// end closes the transaction; s.mu is held. It returns false if it had ended before.
func (tx *MemTx) end(commit bool, produced []*message.Message) bool {
	if tx.ended {
		return false
	}
	tx.ended = true
	s := tx.store
	if commit {
		s.claims[tx.key].tx = nil
		s.claims[tx.key].record.Produced = produced
		s.effects = append(s.effects, tx.effects...)
	} else {
		delete(s.claims, tx.key)
	}
	close(tx.done)
	return true
}

// memTx keeps Commit and Rollback out of the handler's reach.
type memTx struct{ tx *MemTx }

// Raw implements [idempotency.Tx].
func (t memTx) Raw() any { return t.tx }

// Commit implements [idempotency.Tx].
func (t memTx) Commit(ctx context.Context, produced []*message.Message) error {
	s := t.tx.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		t.tx.end(false, nil)
		return fmt.Errorf("idempotencytest: commit: %w: %w", idempotency.ErrRolledBack, err)
	}
	if t.tx.failed != nil {
		t.tx.end(false, nil)
		return fmt.Errorf("idempotencytest: commit: %w: a statement failed before: %w", idempotency.ErrRolledBack, t.tx.failed)
	}
	err := s.commitErr
	s.commitErr = nil
	if !t.tx.end(!errors.Is(err, idempotency.ErrRolledBack), copyMessages(produced)) {
		return fmt.Errorf("idempotencytest: commit: %w", idempotency.ErrTxEnded)
	}
	if err != nil {
		return fmt.Errorf("idempotencytest: commit: %w", err)
	}
	return nil
}

// Rollback implements [idempotency.Tx].
func (t memTx) Rollback(context.Context) error {
	t.tx.store.mu.Lock()
	defer t.tx.store.mu.Unlock()
	t.tx.end(false, nil)
	return nil
}

// copyMessages returns fresh messages: what a store holds and what it hands out is nobody else's.
func copyMessages(messages []*message.Message) []*message.Message {
	if len(messages) == 0 {
		return nil
	}
	copies := make([]*message.Message, len(messages))
	for i, msg := range messages {
		copies[i] = message.NewMessage(msg.UUID, bytes.Clone(msg.Payload))
		for name, value := range msg.Metadata {
			copies[i].Metadata.Set(name, value)
		}
	}
	return copies
}
