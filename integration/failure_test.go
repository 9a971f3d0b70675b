package integration_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// onFirst runs fn in the first call of the handler only.
func onFirst(fn func(ctx context.Context, tx pgx.Tx) error) func(context.Context, pgx.Tx, int) error {
	return func(ctx context.Context, tx pgx.Tx, call int) error {
		if call > 1 {
			return nil
		}
		return fn(ctx, tx)
	}
}

func TestErrorBeforeCommit(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		s := w.start(faults{handle: onFirst(func(context.Context, pgx.Tx) error { return errFault })})
		w.publish("1", "2")
		s.finish("1", "2")
	})
}

func TestPanicBeforeCommit(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		s := w.start(faults{handle: onFirst(func(context.Context, pgx.Tx) error { panic(errFault) })})
		w.publish("1", "2")
		s.finish("1", "2")
	})
}

func TestDatabaseConnectionLostBeforeCommit(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		s := w.start(faults{handle: func(ctx context.Context, tx pgx.Tx, call int) error {
			if call > 2 {
				return nil
			}
			if _, err := w.pool.Exec(ctx, "select pg_terminate_backend($1, 10000)", int64(tx.Conn().PgConn().PID())); err != nil {
				return err
			}
			if call == 1 {
				return nil // it does not even notice
			}
			return write(ctx, tx, "create-label", "on a dead connection")
		}})
		w.publish("1", "2")
		s.finish("1", "2")
	})
}

func TestTrap11_RouterClosedBeforeCommit(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		handler   func(ctx context.Context) error // once its context has ended
		committed map[string]int
	}{
		"handler has not succeeded": {context.Context.Err, map[string]int{}},
		"handler succeeds":          {func(context.Context) error { return nil }, map[string]int{"1": 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			overTransports(t, func(w *world) {
				entered := make(chan struct{})
				s := w.start(faults{handle: onFirst(func(ctx context.Context, _ pgx.Tx) error {
					close(entered)
					<-ctx.Done()
					return test.handler(ctx)
				})})
				w.publish("1")
				receive(w, entered)
				s.close()
				require.Equal(w, test.committed, w.effects("create-label"))
				w.publish("2")
				w.start(faults{}).finish("1", "2")
			})
		})
	}
}

func TestTrap03_AnswerToCommitLost(t *testing.T) {
	t.Parallel()
	for name, applied := range map[string]bool{"applied": true, "not applied": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			overTransports(t, func(w *world) {
				s := w.start(faults{handle: onFirst(func(context.Context, pgx.Tx) error {
					w.wire.CutCommit(applied)
					return nil
				})})
				w.publish("1", "2")
				s.finish("1", "2")
			})
		})
	}
}

func TestTrap01_PublishFailsAfterCommit(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		s := w.start(faults{publish: func(call int, publish func() error) error {
			if call == 1 {
				<-time.After(glance) // a background that removes what is acked has had its time
			}
			if call <= 3 {
				return errFault
			}
			return publish()
		}})
		w.publish("1", "2")
		s.finish("1", "2")
	})
}

// The router closes the publisher while the handler runs, which then succeeds.
func TestTrap01_RouterClosesPublisherBeforePublish(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		entered, closed := make(chan struct{}), make(chan struct{})
		s := w.start(faults{publisherClosed: closed, handle: onFirst(func(context.Context, pgx.Tx) error {
			close(entered)
			<-closed
			return nil
		})})
		w.publish("1")
		receive(w, entered)
		s.close()
		require.Equal(w, map[string]int{"1": 1}, w.effects("create-label"), "a handler that has succeeded is committed")
		require.Equal(w, 1, w.count("select count(*) from idempotency_produced_message"))
		require.Zero(w, w.unacked(w.Labels))
		w.publish("2")
		w.start(faults{}).finish("1", "2")
	})
}

// The broker has the produced message, and the publisher says that it has not.
func TestPublishedAndNacked(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		s := w.start(faults{publish: func(call int, publish func() error) error {
			if err := publish(); err != nil {
				return err
			}
			if call <= 2 {
				return errFault
			}
			return nil
		}})
		w.publish("1", "2")
		s.finish("1", "2")
	})
}

// The consumer is gone when the router acks.
func TestPublishedAndAckLost(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		published, closed := make(chan struct{}), make(chan struct{})
		s := w.start(faults{publisherClosed: closed, publish: func(call int, publish func() error) error {
			if err := publish(); err != nil {
				return err
			}
			if call == 1 {
				close(published)
				<-closed
			}
			return nil
		}})
		w.publish("1")
		receive(w, published)
		s.close()
		require.Eventually(w, func() bool { return w.unacked(w.Orders) == 1 }, patience, 20*time.Millisecond, "%v", w.state())
		w.publish("2")
		w.start(faults{}).finish("1", "2")
	})
}

func TestDuplicateAfterSuccess(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		s := w.start(faults{})
		w.publish("1", "2", "1", "1")
		require.Eventually(w, func() bool { return len(w.effects("note-label")) == 2 }, patience, 20*time.Millisecond, "%v", w.state())
		w.publish("2", "3", "1")
		s.finish("1", "2", "3")
	})
}

func TestOtherContentUnderAKnownID(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		poison, err := middleware.PoisonQueueWithFilter(w.ownPublisher(), w.Dead, idempotency.IsPermanent)
		require.NoError(w, err)
		s := w.start(faults{outer: []message.HandlerMiddleware{poison}})
		w.publish("1")
		require.Eventually(w, func() bool { return len(w.effects("create-label")) == 1 }, patience, 20*time.Millisecond, "%v", w.state())
		other := newOrder("1")
		other.Payload = []byte(`{"order":2}`)
		w.send(w.Orders, other)
		w.publish("1", "2")
		s.finish("1", "2")
		require.Equal(w, 1, w.unacked(w.Dead))
	})
}

// A new event that is older than the horizon may have been processed, and its claim purged.
func TestBeyondTheReplayHorizon(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		poison, err := middleware.PoisonQueueWithFilter(w.ownPublisher(), w.Dead, idempotency.IsPermanent)
		require.NoError(w, err)
		s := w.start(faults{
			outer: []message.HandlerMiddleware{on("create-label", poison)},
			options: []idempotency.Option{idempotency.WithReplayHorizon(time.Hour,
				idempotency.FirstTime(idempotency.MetadataTime("placed_at"), func(*message.Message, string) (time.Time, error) { return time.Now(), nil }))},
		})
		old := newOrder("old")
		old.Metadata.Set("placed_at", time.Now().Add(-2*time.Hour).Format(time.RFC3339))
		w.send(w.Orders, old)
		w.publish("1")
		s.finish("1")
		require.Equal(w, 1, w.unacked(w.Dead))
	})
}

func TestNoUsableIDGoesToTheDeadLetterQueue(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		poison, err := middleware.PoisonQueueWithFilter(w.ownPublisher(), w.Dead, idempotency.IsPermanent)
		require.NoError(w, err)
		s := w.start(faults{outer: []message.HandlerMiddleware{poison}})

		without := newOrder("")
		delete(without.Metadata, idempotency.EventIDMetadata)
		unusable := []*message.Message{without, newOrder(""), newOrder(strings.Repeat("x", idempotency.MaxEventIDLength+1))}
		if w.Transport != "watermill-sql" { // its metadata is JSON, which cannot hold them
			unusable = append(unusable, newOrder("\x00"), newOrder("\xff"))
		}
		w.send(w.Orders, unusable...)
		w.publish("1")
		s.finish("1")
		require.Equal(w, len(unusable), w.unacked(w.Dead))
	})
}

func TestNoUsableIDStaysWithTheBroker(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		refused := make(chan error)
		tell := func(next message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				ctx := msg.Context()
				_, err := next(msg)
				select {
				case refused <- err:
				case <-ctx.Done():
				}
				return nil, err
			}
		}
		s := w.start(faults{outer: []message.HandlerMiddleware{tell}})
		msg := newOrder("")
		delete(msg.Metadata, idempotency.EventIDMetadata)
		w.send(w.Orders, msg)
		for range 2 {
			require.ErrorIs(w, receive(w, refused), idempotency.ErrMissingKey)
		}
		s.close()
		require.Empty(w, w.effects("create-label"))
		require.Zero(w, w.count("select count(*) from idempotency_claim"))
		require.Eventually(w, func() bool { return w.unacked(w.Orders) == 1 }, patience, 20*time.Millisecond, "it is not dropped")
	})
}
