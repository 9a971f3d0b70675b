package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/components/requeuer"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// Watermill's forwarder is on the router of the middleware: from an outbox in PostgreSQL to the broker.
func TestTrap21_ForwarderOnTheRouter(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		const topic = "outbox"
		outbox := newSQL(t, w.Schema)
		outbox.create(t, topic, 1)
		s := w.prepare(t, faults{})
		_, err := forwarder.NewForwarder(outbox.subscriber(t, topic), w.publisher(t), watermill.NopLogger{},
			forwarder.Config{ForwarderTopic: topic, Router: s.router})
		require.NoError(t, err)
		s.run(t)
		publisher := forwarder.NewPublisher(outbox.publisher(t), forwarder.PublisherConfig{ForwarderTopic: topic})
		require.NoError(t, publisher.Publish(w.Orders, newOrder("1"), newOrder("2"), newOrder("1")))
		require.Eventually(t, func() bool { return outbox.unacked(t, topic) == 0 }, patience, 20*time.Millisecond)
		s.finish(t, "1", "2")
	}, "kafka", "rabbitmq")
}

// Watermill's requeuer is on the router of the middleware. It sees the same event twice, and must not take the second time
// for a duplicate.
func TestTrap21_RequeuerOnTheRouter(t *testing.T) {
	t.Parallel()
	overTransports(t, func(t *testing.T, w *world) {
		s := w.prepare(t, faults{
			outer: []message.HandlerMiddleware{w.poison(t)},
			handle: func(_ context.Context, _ pgx.Tx, call int) error {
				if call <= 3 {
					return errFault
				}
				return nil
			},
		})
		_, err := requeuer.NewRequeuer(requeuer.Config{
			Subscriber: w.subscriber(t, w.Dead), SubscribeTopic: w.Dead, Publisher: w.publisher(t), Router: s.router,
			GeneratePublishTopic: func(requeuer.GeneratePublishTopicParams) (string, error) { return w.Orders, nil },
		}, watermill.NopLogger{})
		require.NoError(t, err)
		s.run(t)
		w.publish(t, "1")
		s.finish(t, "1")
		require.Zero(t, w.unacked(t, w.Dead))
	}, "kafka", "rabbitmq")
}

// poison puts what fails into the dead-letter topic.
func (w *world) poison(t *testing.T) message.HandlerMiddleware {
	t.Helper()
	publisher := w.publisher(t)
	t.Cleanup(func() { _ = publisher.Close() })
	poison, err := middleware.PoisonQueue(publisher, w.Dead)
	require.NoError(t, err)
	return onCreateLabel(poison)
}

// produceAndFail makes the handler return its messages together with an error, as no handler should.
func produceAndFail(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := next(msg)
		if err == nil {
			err = errFault
		}
		return produced, err
	}
}

// The right order: what turns an error into an ack is outside. Nothing is written or published, and a replay is new.
func TestTrap22_MiddlewareOutsideOfTheTransaction(t *testing.T) {
	t.Parallel()
	retry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, ResetContextOnRetry: true}.Middleware
	for name, test := range map[string]struct {
		outer func(t *testing.T, w *world) []message.HandlerMiddleware
		dead  int
	}{
		"poison queue": {func(t *testing.T, w *world) []message.HandlerMiddleware {
			t.Helper()
			return []message.HandlerMiddleware{w.poison(t)}
		}, 1},
		"poison queue and retry": {func(t *testing.T, w *world) []message.HandlerMiddleware {
			t.Helper()
			return []message.HandlerMiddleware{w.poison(t), retry}
		}, 1},
		"ignore errors": {func(*testing.T, *world) []message.HandlerMiddleware {
			return []message.HandlerMiddleware{middleware.NewIgnoreErrors([]error{errFault}).Middleware}
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, "kafka", 1)
			s := w.start(t, faults{outer: test.outer(t, w), inner: []message.HandlerMiddleware{onCreateLabel(produceAndFail)}})
			w.publish(t, "1")
			s.drain(t)
			require.Empty(t, w.effects(t, "create-label"))
			require.Zero(t, w.count(t, "select count(*) from idempotency_claim"))
			require.Equal(t, test.dead, w.unacked(t, w.Dead))
			require.Zero(t, w.unacked(t, w.Labels)+w.count(t, "select count(*) from arrival"), "labels of a failed attempt")
			w.publish(t, "1")
			w.start(t, faults{}).finish(t, "1")
		})
	}
}

// The wrong order, as the documentation says: inside of the transaction, they make it commit what has failed.
func TestTrap22_MiddlewareInsideOfTheTransactionCommitsFailures(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		inner func(t *testing.T, w *world) message.HandlerMiddleware
		dead  int
	}{
		"poison queue": {func(t *testing.T, w *world) message.HandlerMiddleware { t.Helper(); return w.poison(t) }, 1},
		"ignore errors": {func(*testing.T, *world) message.HandlerMiddleware {
			return middleware.NewIgnoreErrors([]error{errFault}).Middleware
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, "kafka", 1)
			s := w.start(t, faults{inner: []message.HandlerMiddleware{test.inner(t, w), onCreateLabel(produceAndFail)}})
			w.publish(t, "1")
			s.drain(t)
			require.Equal(t, map[string]int{"1": 1}, w.effects(t, "create-label"))
			require.Equal(t, test.dead, w.unacked(t, w.Dead))
		})
	}
}

// Retry inside of the transaction cannot mend an error of PostgreSQL, and must not hide it either: the delivery fails, and
// the next one succeeds.
func TestTrap22_RetryInsideOfAnAbortedTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "kafka", 1)
	s := w.start(t, faults{
		inner: []message.HandlerMiddleware{middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware},
		handle: onFirst(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select 1/0")
			return err
		}),
	})
	w.publish(t, "1")
	s.finish(t, "1")
}
