package idempotency_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
)

// testRouter is a router on a GoChannel whose Publish returns once the message is acked, and which delivers a nacked
// message again.
type testRouter struct {
	*message.Router
	t       *testing.T
	channel *gochannel.GoChannel
	pub     message.Publisher // of handlers

	mu   sync.Mutex
	sent map[string][]*message.Message
}

func startRouter(t *testing.T) *testRouter {
	t.Helper()
	r := &testRouter{t: t, sent: make(map[string][]*message.Message)}
	r.channel = gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	r.pub = publisherFunc(func(topic string, messages ...*message.Message) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.sent[topic] = append(r.sent[topic], messages...)
		return nil
	})
	var err error
	r.Router, err = message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	require.NoError(t, err)
	return r
}

// add adds a handler with the middleware on it; middleware of the router is for the caller to add.
func (r *testRouter) add(name, topic, publishTopic string, m message.HandlerMiddleware, h message.HandlerFunc) {
	handler := r.AddHandler(name, topic, r.channel, publishTopic, r.pub, h)
	if m != nil {
		handler.AddMiddleware(m)
	}
}

func (r *testRouter) run() {
	r.t.Helper()
	done := make(chan error, 1)
	go func() { done <- r.Run(context.WithoutCancel(r.t.Context())) }()
	<-r.Running()
	r.t.Cleanup(func() {
		require.NoError(r.t, r.Close())
		require.NoError(r.t, <-done)
		require.NoError(r.t, r.channel.Close())
	})
}

// publish returns once all handlers of the topic have acked.
func (r *testRouter) publish(topic string, messages ...*message.Message) {
	r.t.Helper()
	require.NoError(r.t, r.channel.Publish(topic, messages...))
}

// published returns what handlers have published to the topic "labels".
func (r *testRouter) published() []*message.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sent["labels"]
}

func TestTrap06_SubscriberIDSharedByTwoHandlersIsRefused(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// A middleware for each handler, as it happens when lines are copied.
	other, err := idempotency.New(b.store, idempotency.WithSubscriberID("shipping"))
	require.NoError(t, err)
	errs := make(chan error, 1)
	tell := func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			_, err := next(msg)
			errs <- err
			return nil, nil
		}
	}
	r := startRouter(t)
	r.AddMiddleware(tell)
	r.add("create-label", "orders", "", b.Middleware.Middleware, idempotency.Handler(createLabel))
	r.add("notify", "payments", "", other.Middleware, idempotency.Handler(createLabel))
	r.run()

	r.publish("orders", order("1"))
	require.NoError(t, <-errs)
	r.publish("payments", order("1"))
	err = <-errs
	require.ErrorIs(t, err, idempotency.ErrSharedSubscriber)
	require.EqualError(t, err, `idempotency: key in handler "notify" on topic "payments" for subscriber "shipping": subscriber ID is used by two handlers: "shipping" is used by handler "create-label" already: give handler "notify" one of its own by WithSubscriberID`)
	require.True(t, idempotency.IsTransient(err), "the program is at fault, not the message")
}

func TestTrap20_SubscriberIDIsTheHandlerName(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"", "shipping."} {
		store := idempotencytest.NewMemStore()
		observed := &recorder{}
		opts := []idempotency.Option{idempotency.WithObserver(observed)}
		if prefix != "" {
			opts = append(opts, idempotency.WithSubscriberPrefix(prefix))
		}
		m, err := idempotency.New(store, opts...)
		require.NoError(t, err)

		r := startRouter(t)
		r.AddMiddleware(m.Middleware)
		r.add("create-label", "orders", "", nil, idempotency.Handler(createLabel))
		r.add("notify", "orders", "", nil, idempotency.Handler(createLabel))
		r.run()
		r.publish("orders", order("1"), order("1"))

		require.Len(t, store.Effects(), 2, "each handler processes the event")
		keys := make(map[idempotency.Key]int)
		for _, e := range observed.all() {
			keys[e.Key]++
			require.Equal(t, prefix+e.Handler, e.Key.SubscriberID)
			require.Equal(t, "orders", e.Topic)
		}
		require.Equal(t, map[idempotency.Key]int{
			{SubscriberID: prefix + "create-label", EventID: "1"}: 2,
			{SubscriberID: prefix + "notify", EventID: "1"}:       2,
		}, keys)
	}
}

func TestTrap21_ForwarderHandlerIsLeftAlone(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewMemStore()
	m, err := idempotency.New(store, idempotency.WithIgnoredHandlers("audit"))
	require.NoError(t, err)
	r := startRouter(t)
	r.AddMiddleware(m.Middleware)
	var audited atomic.Int32
	r.add("audit", "audit", "", nil, func(*message.Message) ([]*message.Message, error) { audited.Add(1); return nil, nil })

	target := r.pub
	_, err = forwarder.NewForwarder(r.channel, target, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: "outbox", Router: r.Router})
	require.NoError(t, err)
	r.run()

	pub := forwarder.NewPublisher(r.channel, forwarder.PublisherConfig{ForwarderTopic: "outbox"})
	require.NoError(t, pub.Publish("labels", order("1"))) // returns once the forwarder has acked
	require.Len(t, r.published(), 1)

	r.publish("audit", message.NewMessage("no event ID", nil), message.NewMessage("no event ID", nil))
	require.EqualValues(t, 2, audited.Load())
}

func TestTrap22_OuterMiddlewareNeverPublishesForAFailedAttempt(t *testing.T) {
	t.Parallel()
	dead := make(chan *message.Message, 10)
	poison, err := middleware.PoisonQueueWithFilter(
		publisherFunc(func(_ string, messages ...*message.Message) error {
			for _, msg := range messages {
				dead <- msg
			}
			return nil
		}), "dead", func(err error) bool { return !idempotency.IsTransient(err) })
	require.NoError(t, err)
	for name, outer := range map[string]message.HandlerMiddleware{
		"retry":         middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, ResetContextOnRetry: true}.Middleware,
		"poison queue":  poison,
		"ignore errors": middleware.NewIgnoreErrors([]error{errBusiness}).Middleware,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			calls := 0
			r := startRouter(t)
			r.AddMiddleware(outer)
			r.add("create-label", "orders", "labels", b.Middleware.Middleware, writeThen(func(*message.Message) ([]*message.Message, error) {
				calls++
				if name == "retry" && calls == 3 {
					return []*message.Message{order("of the last attempt")}, nil
				}
				return []*message.Message{order("of a failed attempt")}, errBusiness
			}))
			r.run()
			r.publish("orders", order("1"))
			if name == "retry" {
				require.Len(t, r.published(), 1)
				require.Equal(t, "of the last attempt", r.published()[0].Metadata.Get(idempotency.EventIDMetadata))
				require.Equal(t, []string{"label for 1"}, b.store.Effects())
				return
			}
			require.Empty(t, r.published())
			require.Empty(t, b.store.Effects())
		})
	}
	t.Cleanup(func() { require.Len(t, dead, 1) })
}

// Inside of the transaction, these two turn a failure into a success, which is then committed: the order is the user's to
// get right, and the documentation says so. Nothing is lost in the first case: the dead-letter queue has the message.
func TestTrap22_InnerMiddlewareThatSwallowsErrorsCommits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	inner := middleware.NewIgnoreErrors([]error{errBusiness}).Middleware
	_, err := b.Middleware.Middleware(inner(writeThen(func(*message.Message) ([]*message.Message, error) { return nil, errBusiness })))(order("1"))
	require.NoError(t, err)
	require.Equal(t, []string{"label for 1"}, b.store.Effects())

	// Retry inside runs the handler again in the same transaction: what the failed run wrote is committed with the rest.
	b = setup(t)
	calls := 0
	retry := middleware.Retry{MaxRetries: 1, InitialInterval: time.Millisecond}.Middleware
	_, err = b.Middleware.Middleware(retry(writeThen(func(*message.Message) ([]*message.Message, error) {
		if calls++; calls == 1 {
			return nil, errBusiness
		}
		return nil, nil
	})))(order("1"))
	require.NoError(t, err)
	require.Equal(t, []string{"label for 1", "label for 1"}, b.store.Effects())
}

func TestTrap01_FailedPublishIsRepeatedWithTheRedelivery(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := startRouter(t)
	failures := 3
	target := r.pub
	var attempts []string
	r.pub = publisherFunc(func(topic string, messages ...*message.Message) error {
		attempts = append(attempts, messages[0].UUID)
		if failures > 0 {
			failures--
			return errDown
		}
		return target.Publish(topic, messages...)
	})
	r.add("create-label", "orders", "labels", b.Middleware.Middleware, writeThen(func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("", []byte("label"))}, nil
	}))
	r.run()
	r.publish("orders", order("1"))
	require.Len(t, r.published(), 1)
	require.Equal(t, []string{"label for 1"}, b.store.Effects())
	require.Len(t, attempts, 4)
	for _, uuid := range attempts {
		require.Equal(t, r.published()[0].UUID, uuid)
	}

	r.publish("orders", order("1")) // a late duplicate
	require.Len(t, r.published(), 1)
}
