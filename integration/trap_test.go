package integration_test

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// drain waits until the orders are acked and closes the service. Only Kafka tells while a consumer runs.
func (s *service) drain() {
	s.Helper()
	require.Eventually(s, func() bool { return s.unacked(s.Orders) == 0 }, patience, 20*time.Millisecond, "%v", s.state())
	s.close()
	require.Zero(s, s.unacked(s.Orders))
}

// The middleware is on the router, and by another name on the handler. A failure between the two must undo the inner one.
func TestTrap05_TwoInstallations(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]idempotency.Option{
		"same key":    nil,
		"another key": {idempotency.WithSubscriberPrefix("inner.")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, "kafka", 1)
			inner, err := idempotency.New(w.store, append(options, idempotency.WithLogger(watermill.NopLogger{}))...)
			require.NoError(t, err)
			s := w.prepare(faults{})
			calls := counter()
			s.createLabel.AddMiddleware(func(next message.HandlerFunc) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					produced, err := next(msg)
					if err == nil && calls() == 1 {
						return nil, errFault
					}
					return produced, err
				}
			}, inner.Middleware)
			s.run()
			w.publish("1", "2", "1")
			s.finish("1", "2")
		})
	}
}

// Nothing can save the message, but it is told. The handler need not even fail: with the ack, the subscriber cancels the
// message's context.
func TestTrap07_InstantAckLosesAndIsTold(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		logs := watermill.NewCaptureLogger()
		events := make(chan idempotency.Event, 1)
		s := w.start(faults{
			outer:  []message.HandlerMiddleware{middleware.InstantAck},
			handle: func(context.Context, pgx.Tx, int) error { return errFault },
			options: []idempotency.Option{
				idempotency.WithLogger(logs),
				idempotency.WithObserver(idempotency.ObserverFunc(func(_ context.Context, e idempotency.Event) { events <- e })),
			},
		})
		w.publish("1")
		e := receive(w, events)
		require.True(w, e.EarlyAck)
		require.NotEqual(w, idempotency.Processed, e.Outcome)
		require.True(w, logs.HasError(e.Err), "the loss is logged")
		require.Eventually(w, func() bool { return w.unacked(w.Orders) == 0 }, patience, 20*time.Millisecond)
		s.close()
		require.Zero(w, w.unacked(w.Orders))
		require.Empty(w, w.effects("create-label"))
	}, "kafka", "rabbitmq")
}

type createLabelCommand struct{ Order string }

// A processor that acks what fails turns the failure into nil inside the transaction.
func TestTrap08_CommandProcessorThatAcksErrors(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "kafka", 1)
	s := w.newService(faults{})
	processor, err := cqrs.NewCommandProcessorWithConfig(s.router, cqrs.CommandProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.CommandProcessorGenerateSubscribeTopicParams) (string, error) { return w.Orders, nil },
		SubscriberConstructor: func(cqrs.CommandProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return w.subscriber(w.Orders), nil
		},
		OnHandle: func(params cqrs.CommandProcessorOnHandleParams) error {
			ctx := params.Message.Context()
			err := params.Handler.Handle(ctx, params.Command)
			if err != nil {
				if markErr := idempotency.MarkRollback(ctx, err); markErr != nil {
					return markErr
				}
			}
			return err
		},
		Marshaler:                cqrs.JSONMarshaler{},
		AckCommandHandlingErrors: true,
	})
	require.NoError(t, err)
	calls := counter()
	handler := cqrs.NewCommandHandler("create-label", func(ctx context.Context, c *createLabelCommand) error {
		tx, err := idempotency.TxFromContext[pgx.Tx](ctx)
		if err != nil {
			return err
		}
		if err := write(ctx, tx, "half", c.Order); err != nil {
			return err
		}
		if calls() == 1 {
			return errFault
		}
		return write(ctx, tx, "whole", c.Order)
	})
	require.NoError(t, processor.AddHandlers(handler))
	s.run()
	msg, err := cqrs.JSONMarshaler{}.Marshal(createLabelCommand{"1"})
	require.NoError(t, err)
	msg.Metadata.Set(idempotency.EventIDMetadata, "1")
	w.send(w.Orders, msg, msg.Copy())
	s.drain()
	require.Equal(t, map[string]int{"1": 1}, w.effects("half"))
	require.Equal(t, map[string]int{"1": 1}, w.effects("whole"))
}

// Timeout leaves a cancelled context in the message. The second attempt of Retry, which does not reset it, finds a live
// one, and a transaction of its own.
func TestTrap14_RetryAfterTimeout(t *testing.T) {
	t.Parallel()
	timeout := on("create-label", middleware.Timeout(200*time.Millisecond))
	once := middleware.Retry{MaxRetries: 1, InitialInterval: time.Millisecond}
	onceWithReset := once
	onceWithReset.ResetContextOnRetry = true
	for name, f := range map[string]faults{
		"timeout inside":  {outer: []message.HandlerMiddleware{once.Middleware}, inner: []message.HandlerMiddleware{timeout}},
		"timeout outside": {outer: []message.HandlerMiddleware{onceWithReset.Middleware, timeout}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			overTransports(t, func(w *world) {
				var attempts atomic.Int32
				f := f
				f.outer = append([]message.HandlerMiddleware{reset(&attempts)}, f.outer...)
				f.handle = func(ctx context.Context, _ pgx.Tx, _ int) error {
					if attempts.Add(1) > 1 {
						return nil
					}
					<-ctx.Done() // the first attempt of every delivery
					return ctx.Err()
				}
				s := w.start(f)
				w.publish("1")
				s.finish("1")
			}, "kafka", "rabbitmq")
		})
	}
}

// reset begins to count anew with each delivery.
func reset(attempts *atomic.Int32) message.HandlerMiddleware {
	return on("create-label", func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			attempts.Store(0)
			return next(msg)
		}
	})
}

// watermill-amqp hands over an empty message when its channel closes, here because the queue is deleted.
func TestTrap16_PhantomMessageIsNotPoisoned(t *testing.T) {
	t.Parallel()
	overTransports(t, func(w *world) {
		poison, err := middleware.PoisonQueueWithFilter(w.ownPublisher(), w.Dead, func(err error) bool { return !idempotency.IsTransient(err) })
		require.NoError(w, err)
		phantom := make(chan struct{})
		var once sync.Once
		tell := func(next message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				empty := msg.UUID == "" && len(msg.Metadata) == 0 && len(msg.Payload) == 0
				produced, err := next(msg)
				if empty {
					once.Do(func() { close(phantom) })
				}
				return produced, err
			}
		}
		s := w.start(faults{outer: []message.HandlerMiddleware{tell, poison}})
		rabbit, ok := w.transport.(*rabbitTransport)
		require.True(w, ok)
		rabbit.delete(w.Orders)
		receive(w, phantom)
		rabbit.declare(w.Orders)
		w.publish("1")
		s.finish("1")
		require.Zero(w, w.unacked(w.Dead), "dead letters that nobody has sent")
	}, "rabbitmq", "rabbitmq-quorum")
}

type orderPaid struct{ Order string }

// A group of event handlers has one name in the router, and so one claim: all of it is done, or nothing.
func TestTrap20_EventGroupHasOneClaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "kafka", 1)
	s := w.newService(faults{})
	processor, err := cqrs.NewEventGroupProcessorWithConfig(s.router, cqrs.EventGroupProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventGroupProcessorGenerateSubscribeTopicParams) (string, error) { return w.Orders, nil },
		SubscriberConstructor: func(cqrs.EventGroupProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return w.subscriber(w.Orders), nil
		},
		Marshaler: cqrs.JSONMarshaler{},
	})
	require.NoError(t, err)
	calls := counter()
	handler := func(name string, fails bool) cqrs.GroupEventHandler {
		return cqrs.NewGroupEventHandler(func(ctx context.Context, e *orderPaid) error {
			tx, err := idempotency.TxFromContext[pgx.Tx](ctx)
			if err != nil {
				return err
			}
			if fails && calls() == 1 {
				return errFault
			}
			return write(ctx, tx, name, e.Order)
		})
	}
	require.NoError(t, processor.AddHandlersGroup("shipping", handler("first", false), handler("second", true)))
	s.run()
	msg, err := cqrs.JSONMarshaler{}.Marshal(orderPaid{"1"})
	require.NoError(t, err)
	msg.Metadata.Set(idempotency.EventIDMetadata, "1")
	w.send(w.Orders, msg, msg.Copy())
	s.drain()
	require.Equal(t, map[string]int{"1": 1}, w.effects("first"))
	require.Equal(t, map[string]int{"1": 1}, w.effects("second"))
	require.Equal(t, map[string]int{"shipping": 1}, w.claims())
}

// claims counts them by subscriber.
func (w *world) claims() map[string]int {
	w.Helper()
	return w.counts("select subscriber_id, count(*) from idempotency_claim group by 1")
}

// Two handlers have one topic: each processes each event, under its own name.
func TestTrap20_EachHandlerHasItsClaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "kafka", 1)
	s := w.newService(faults{options: []idempotency.Option{idempotency.WithSubscriberPrefix("shop.")}})
	for i, name := range []string{"create-label", "notify"} {
		subscriber := w.subscriber(w.Orders + strings.Repeat("x", i)) // another group
		s.router.AddConsumerHandler(name, w.Orders, subscriber, idempotency.ConsumerHandler(
			func(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
				return write(ctx, tx, name, msg.Metadata.Get(idempotency.EventIDMetadata))
			}))
	}
	s.run()
	w.publish("1", "1")
	require.Eventually(t, func() bool { return len(w.effects("notify")) == 1 }, patience, 20*time.Millisecond)
	s.drain()
	require.Equal(t, map[string]int{"1": 1}, w.effects("create-label"))
	require.Equal(t, map[string]int{"1": 1}, w.effects("notify"))
	require.Equal(t, map[string]int{"shop.create-label": 1, "shop.notify": 1}, w.claims())
}

// After the commit nothing turns success into failure: an order is delivered once, whatever observers and hooks do.
func TestTrap38_ObserversAndHooksThatFail(t *testing.T) {
	t.Parallel()
	observer := idempotency.ObserverFunc(func(context.Context, idempotency.Event) { panic(errFault) })
	overTransports(t, func(w *world) {
		s := w.start(faults{
			handle: func(ctx context.Context, _ pgx.Tx, _ int) error {
				if err := idempotency.AfterCommit(ctx, func(context.Context) error { panic(errFault) }); err != nil {
					return err
				}
				return idempotency.AfterCommit(ctx, func(context.Context) error { return errFault })
			},
			options: []idempotency.Option{idempotency.WithObserver(observer)},
		})
		w.publish("1", "2")
		s.finish("1", "2")
		require.Equal(w, map[string]int{"1": 1, "2": 1}, w.counts("select event_id, count(*) from arrival group by 1"))
	}, "kafka", "rabbitmq")
}
