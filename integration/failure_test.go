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
	overTransports(t, func(t *testing.T, w *world) {
		s := w.start(t, faults{handle: onFirst(func(context.Context, pgx.Tx) error { return errFault })})
		w.publish(t, "1", "2")
		s.finish(t, "1", "2")
	})
}

func TestPanicBeforeCommit(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		s := w.start(t, faults{handle: onFirst(func(context.Context, pgx.Tx) error { panic(errFault) })})
		w.publish(t, "1", "2")
		s.finish(t, "1", "2")
	})
}

func TestDatabaseConnectionLostBeforeCommit(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		s := w.start(t, faults{handle: func(ctx context.Context, tx pgx.Tx, call int) error {
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
		w.publish(t, "1", "2")
		s.finish(t, "1", "2")
	})
}

func TestTrap11_RouterClosedBeforeCommit(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		entered := make(chan struct{})
		s := w.start(t, faults{handle: onFirst(func(ctx context.Context, _ pgx.Tx) error {
			close(entered)
			<-ctx.Done()
			return ctx.Err()
		})})
		w.publish(t, "1")
		<-entered
		s.close(t)
		require.Empty(t, w.effects(t, "create-label"), "a handler that has not succeeded is rolled back")
		w.publish(t, "2")
		w.start(t, faults{}).finish(t, "1", "2")
	})
}

func TestTrap03_AnswerToCommitLost(t *testing.T) {
	t.Parallel()
	for name, applied := range map[string]bool{"applied": true, "not applied": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			overTransports(t, func(t *testing.T, w *world) {
				s := w.start(t, faults{handle: onFirst(func(context.Context, pgx.Tx) error {
					w.wire.CutCommit(applied)
					return nil
				})})
				w.publish(t, "1", "2")
				s.finish(t, "1", "2")
			})
		})
	}
}

func TestTrap01_PublishFailsAfterCommit(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		s := w.start(t, faults{publish: func(call int, publish func() error) error {
			if call <= 3 {
				return errFault
			}
			return publish()
		}})
		w.publish(t, "1", "2")
		s.finish(t, "1", "2")
	})
}

// The router closes the publisher while the handler runs, which then succeeds.
func TestTrap01_RouterClosesPublisherBeforePublish(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		entered, closed := make(chan struct{}), make(chan struct{})
		s := w.start(t, faults{publisherClosed: closed, handle: onFirst(func(context.Context, pgx.Tx) error {
			close(entered)
			<-closed
			return nil
		})})
		w.publish(t, "1")
		<-entered
		s.close(t)
		require.Equal(t, map[string]int{"1": 1}, w.effects(t, "create-label"), "a handler that has succeeded is committed")
		require.Equal(t, 1, w.count(t, "select count(*) from idempotency_produced_message"))
		require.Zero(t, w.unacked(t, w.Labels))
		w.publish(t, "2")
		w.start(t, faults{}).finish(t, "1", "2")
	})
}

// The broker has the produced message, and the publisher says that it has not.
func TestPublishedAndNacked(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		s := w.start(t, faults{publish: func(call int, publish func() error) error {
			if err := publish(); err != nil {
				return err
			}
			if call <= 2 {
				return errFault
			}
			return nil
		}})
		w.publish(t, "1", "2")
		s.finish(t, "1", "2")
	})
}

// The consumer is gone when the router acks.
func TestPublishedAndAckLost(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		published, closed := make(chan struct{}), make(chan struct{})
		s := w.start(t, faults{publisherClosed: closed, publish: func(call int, publish func() error) error {
			if err := publish(); err != nil {
				return err
			}
			if call == 1 {
				close(published)
				<-closed
			}
			return nil
		}})
		w.publish(t, "1")
		<-published
		s.close(t)
		require.Eventually(t, func() bool { return w.unacked(t, w.Orders) == 1 }, patience, 20*time.Millisecond, "%v", w.state(t))
		w.publish(t, "2")
		w.start(t, faults{}).finish(t, "1", "2")
	})
}

func TestDuplicateAfterSuccess(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		s := w.start(t, faults{})
		w.publish(t, "1", "2", "1", "1")
		require.Eventually(t, func() bool { return len(w.effects(t, "note-label")) == 2 }, patience, 20*time.Millisecond, "%v", w.state(t))
		w.publish(t, "2", "3", "1")
		s.finish(t, "1", "2", "3")
	})
}

func TestNoUsableIDGoesToTheDeadLetterQueue(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		dead := w.publisher(t)
		t.Cleanup(func() { _ = dead.Close() })
		poison, err := middleware.PoisonQueueWithFilter(dead, w.Dead, idempotency.IsPermanent)
		require.NoError(t, err)
		s := w.start(t, faults{outer: []message.HandlerMiddleware{poison}})

		without := newOrder("")
		delete(without.Metadata, idempotency.EventIDMetadata)
		unusable := []*message.Message{without, newOrder(""), newOrder(strings.Repeat("x", idempotency.MaxEventIDLength+1))}
		if w.Transport != "watermill-sql" { // its metadata is JSON, which cannot hold them
			unusable = append(unusable, newOrder("\x00"), newOrder("\xff"))
		}
		w.send(t, w.Orders, unusable...)
		w.publish(t, "1")
		s.finish(t, "1")
		require.Equal(t, len(unusable), w.unacked(t, w.Dead))
	})
}

func TestNoUsableIDStaysWithTheBroker(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
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
		s := w.start(t, faults{outer: []message.HandlerMiddleware{tell}})
		msg := newOrder("")
		delete(msg.Metadata, idempotency.EventIDMetadata)
		w.send(t, w.Orders, msg)
		for range 2 {
			require.ErrorIs(t, <-refused, idempotency.ErrMissingKey)
		}
		s.close(t)
		require.Empty(t, w.effects(t, "create-label"))
		require.Zero(t, w.count(t, "select count(*) from idempotency_claim"))
		require.Eventually(t, func() bool { return w.unacked(t, w.Orders) == 1 }, patience, 20*time.Millisecond, "it is not dropped")
	})
}
