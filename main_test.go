package idempotency_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	errBusiness = errors.New("the label printer is out of paper")
	errConflict = errors.New("serialization failure")
	errDown     = errors.New("the database is down")
)

// testStore is a MemStore whose steps can be made to fail, and which knows errConflict and errDown.
type testStore struct {
	*idempotencytest.MemStore
	claim  func(ctx context.Context, c idempotency.Claim) error
	read   func()                          // after a claim, before it returns
	commit func(ctx context.Context) error // before the commit: nothing is committed
	acked  func(keys []idempotency.Key) error
}

func (s *testStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	if s.claim != nil {
		if err := s.claim(ctx, c); err != nil {
			return nil, nil, err
		}
	}
	tx, record, err := s.MemStore.Claim(ctx, c)
	if s.read != nil {
		s.read()
	}
	if tx != nil {
		tx = testTx{tx, s}
	}
	return tx, record, err
}

func (s *testStore) Acked(ctx context.Context, keys []idempotency.Key) error {
	if s.acked != nil {
		if err := s.acked(keys); err != nil {
			return err
		}
	}
	return s.MemStore.Acked(ctx, keys)
}

func (s *testStore) Classify(err error) idempotency.Fault {
	switch {
	case errors.Is(err, errConflict):
		return idempotency.FaultConflict
	case errors.Is(err, errDown):
		return idempotency.FaultUnavailable
	}
	return idempotency.FaultOther
}

type testTx struct {
	idempotency.Tx
	store *testStore
}

func (tx testTx) Commit(ctx context.Context, produced []*message.Message) error {
	if tx.store.commit != nil {
		if err := tx.store.commit(ctx); err != nil {
			_ = tx.Rollback(ctx)
			return err
		}
	}
	return tx.Tx.Commit(ctx, produced)
}

// bundle is a middleware on a store, with all that it reports.
type bundle struct {
	*idempotency.Middleware
	store    *testStore
	observed *recorder
	logs     *watermill.CaptureLoggerAdapter
}

func setup(t *testing.T, opts ...idempotency.Option) *bundle {
	t.Helper()
	b := &bundle{
		store:    &testStore{MemStore: idempotencytest.NewMemStore()},
		observed: &recorder{},
		logs:     watermill.NewCaptureLogger(),
	}
	opts = append([]idempotency.Option{
		idempotency.WithSubscriberID("shipping"),
		idempotency.WithObserver(b.observed),
		idempotency.WithLogger(b.logs),
	}, opts...)
	var err error
	b.Middleware, err = idempotency.New(b.store, opts...)
	require.NoError(t, err)
	return b
}

type recorder struct {
	mu     sync.Mutex
	events []idempotency.Event
}

func (r *recorder) Observe(_ context.Context, e idempotency.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) all() []idempotency.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]idempotency.Event(nil), r.events...)
}

func (r *recorder) outcomes() []idempotency.Outcome {
	var outcomes []idempotency.Outcome
	for _, e := range r.all() {
		outcomes = append(outcomes, e.Outcome)
	}
	return outcomes
}

// order is a message with an event ID.
func order(eventID string) *message.Message {
	msg := message.NewMessage("uuid of "+eventID, message.Payload(`{"order":1}`))
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return msg
}

// createLabel writes an effect in the transaction.
func createLabel(_ context.Context, tx *idempotencytest.MemTx, msg *message.Message) ([]*message.Message, error) {
	return nil, tx.Write("label for " + msg.Metadata.Get(idempotency.EventIDMetadata))
}

// writeThen writes an effect and goes on with fn.
func writeThen(fn func(msg *message.Message) ([]*message.Message, error)) message.HandlerFunc {
	return idempotency.Handler(func(ctx context.Context, tx *idempotencytest.MemTx, msg *message.Message) ([]*message.Message, error) {
		if _, err := createLabel(ctx, tx, msg); err != nil {
			return nil, err
		}
		return fn(msg)
	})
}
