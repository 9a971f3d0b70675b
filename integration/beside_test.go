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
	overTransports(t, func(w *world) {
		const topic = "outbox"
		outbox := newSQL(t, w.Schema)
		outbox.create(topic, 1)
		s := w.prepare(faults{})
		_, err := forwarder.NewForwarder(outbox.subscriber(topic), w.ownPublisher(), watermill.NopLogger{},
			forwarder.Config{ForwarderTopic: topic, Router: s.router})
		require.NoError(w, err)
		s.run()
		publisher := forwarder.NewPublisher(outbox.publisher(), forwarder.PublisherConfig{ForwarderTopic: topic})
		require.NoError(w, publisher.Publish(w.Orders, newOrder("1"), newOrder("2"), newOrder("1")))
		require.Eventually(w, func() bool { return outbox.unacked(topic) == 0 }, patience, 20*time.Millisecond)
		s.finish("1", "2")
	}, "kafka", "rabbitmq")
}

// Watermill's requeuer is on the router of the middleware. It sees the same event twice, and must not take the second time
// for a duplicate.
func TestTrap21_RequeuerOnTheRouter(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		s := w.prepare(faults{
			outer: []message.HandlerMiddleware{w.poison()},
			handle: func(_ context.Context, _ pgx.Tx, call int) error {
				if call <= 3 {
					return errFault
				}
				return nil
			},
		})
		_, err := requeuer.NewRequeuer(requeuer.Config{
			Subscriber: w.subscriber(w.Dead), SubscribeTopic: w.Dead, Publisher: w.ownPublisher(), Router: s.router,
			GeneratePublishTopic: func(requeuer.GeneratePublishTopicParams) (string, error) { return w.Orders, nil },
		}, watermill.NopLogger{})
		require.NoError(w, err)
		s.run()
		w.publish("1")
		s.finish("1")
		require.Zero(w, w.unacked(w.Dead))
	}, "kafka", "rabbitmq")
}

// poison puts what fails into the dead-letter topic.
func (w *world) poison() message.HandlerMiddleware {
	w.Helper()
	poison, err := middleware.PoisonQueue(w.ownPublisher(), w.Dead)
	require.NoError(w, err)
	return on("create-label", poison)
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
	ignore := middleware.NewIgnoreErrors([]error{errFault}).Middleware
	for name, test := range map[string]struct {
		outer func(w *world) []message.HandlerMiddleware
		dead  int
	}{
		"poison queue":           {func(w *world) []message.HandlerMiddleware { return []message.HandlerMiddleware{w.poison()} }, 1},
		"poison queue and retry": {func(w *world) []message.HandlerMiddleware { return []message.HandlerMiddleware{w.poison(), retry} }, 1},
		"ignore errors":          {func(*world) []message.HandlerMiddleware { return []message.HandlerMiddleware{ignore} }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, "kafka", 1)
			s := w.start(faults{outer: test.outer(w), inner: []message.HandlerMiddleware{on("create-label", produceAndFail)}})
			w.publish("1")
			s.drain()
			require.Empty(t, w.effects("create-label"))
			require.Zero(t, w.count("select count(*) from idempotency_claim"))
			require.Equal(t, test.dead, w.unacked(w.Dead))
			require.Zero(t, w.unacked(w.Labels)+w.count("select count(*) from arrival"), "labels of a failed attempt")
			w.publish("1")
			w.start(faults{}).finish("1")
		})
	}
}

// The wrong order, as the documentation says: inside of the transaction, they make it commit what has failed.
func TestTrap22_MiddlewareInsideOfTheTransactionCommitsFailures(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		inner func(w *world) message.HandlerMiddleware
		dead  int
	}{
		"poison queue": {func(w *world) message.HandlerMiddleware { return w.poison() }, 1},
		"ignore errors": {func(*world) message.HandlerMiddleware {
			return middleware.NewIgnoreErrors([]error{errFault}).Middleware
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, "kafka", 1)
			s := w.start(faults{inner: []message.HandlerMiddleware{test.inner(w), on("create-label", produceAndFail)}})
			w.publish("1")
			s.drain()
			require.Equal(t, map[string]int{"1": 1}, w.effects("create-label"))
			require.Equal(t, test.dead, w.unacked(w.Dead))
		})
	}
}

// A statement has failed, and the middleware inside hides it: nothing can be committed, so the delivery fails, too. The
// dead-letter topic has a message that is processed all the same.
func TestTrap22_MiddlewareInsideOfAnAbortedTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "kafka", 1)
	s := w.start(faults{
		inner: []message.HandlerMiddleware{w.poison()},
		handle: onFirst(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select 1/0")
			return err
		}),
	})
	w.publish("1")
	s.finish("1")
	require.Equal(t, 1, w.unacked(w.Dead))
}
