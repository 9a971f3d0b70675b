package integration_test

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// faults are what a service is made to suffer. The zero value is none.
type faults struct {
	// handle runs in the handler of orders, after it has written, with the number of its call, from 1.
	handle func(ctx context.Context, tx pgx.Tx, call int) error
	// publish runs instead of publishing what that handler returned, and may publish by itself.
	publish func(call int, publish func() error) error
	// publisherClosed is closed once the router has closed the publisher: its subscriber has ended then.
	publisherClosed chan struct{}
	// outer is middleware outside of the idempotency middleware, and inner inside of it.
	outer, inner []message.HandlerMiddleware
	// options of the middleware.
	options []idempotency.Option
}

// service creates a label for each order and, downstream, notes each label.
type service struct {
	*world
	router      *message.Router
	createLabel *message.Handler
	idem        *idempotency.Middleware
	done        chan error
	once        sync.Once
}

func (w *world) start(f faults) *service {
	w.Helper()
	s := w.prepare(f)
	s.run()
	return s
}

// prepare makes the service; more handlers can be added before it runs.
func (w *world) prepare(f faults) *service {
	w.Helper()
	s := w.newService(f)
	s.createLabel = s.router.AddHandler("create-label", w.Orders, w.subscriber(w.Orders),
		w.Labels, w.faultyPublisher(f), createLabel(f))
	s.router.AddConsumerHandler("note-label", w.Labels, w.subscriber(w.Labels), idempotency.ConsumerHandler(noteLabel))
	return s
}

// newService makes a service without handlers.
func (w *world) newService(f faults) *service {
	w.Helper()
	s := &service{world: w, done: make(chan error, 1)}
	var err error
	options := []idempotency.Option{idempotency.WithLogger(watermill.NopLogger{})}
	s.idem, err = idempotency.New(w.store, append(options, f.options...)...)
	require.NoError(w, err)
	s.router, err = message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, watermill.NopLogger{})
	require.NoError(w, err)
	s.router.AddMiddleware(on("note-label", w.recordArrival))
	s.router.AddMiddleware(f.outer...)
	s.router.AddMiddleware(s.idem.Middleware)
	s.router.AddMiddleware(f.inner...)
	s.router.AddMiddleware(middleware.Recoverer)
	return s
}

func (s *service) run() {
	s.Helper()
	go func() { s.done <- s.router.Run(context.WithoutCancel(s.Context())) }()
	select {
	case <-s.router.Running():
	case err := <-s.done:
		require.FailNow(s, "the router did not start", "%v", err)
	}
	s.Cleanup(func() { s.close() })
}

// close closes the router, as a service does that is asked to stop.
func (s *service) close() {
	s.Helper()
	s.once.Do(func() {
		require.NoError(s, s.router.Close())
		require.NoError(s, <-s.done)
		require.NoError(s, s.idem.Flush(context.WithoutCancel(s.Context())))
	})
}

func createLabel(f faults) message.HandlerFunc {
	calls := counter()
	return idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
		id := msg.Metadata.Get(idempotency.EventIDMetadata)
		if err := write(ctx, tx, "create-label", id); err != nil {
			return nil, err
		}
		if f.handle != nil {
			if err := f.handle(ctx, tx, calls()); err != nil {
				return nil, err
			}
		}
		payload, err := json.Marshal(id)
		return []*message.Message{message.NewMessage(watermill.NewUUID(), payload)}, err
	})
}

func noteLabel(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	var id string
	if err := json.Unmarshal(msg.Payload, &id); err != nil {
		return err
	}
	return write(ctx, tx, "note-label", id)
}

func write(ctx context.Context, tx pgx.Tx, handler, eventID string) error {
	_, err := tx.Exec(ctx, "insert into effect values ($1, $2)", handler, eventID)
	return err
}

// on is middleware for one handler.
func on(handler string, m message.HandlerMiddleware) message.HandlerMiddleware {
	return func(next message.HandlerFunc) message.HandlerFunc {
		wrapped := m(next)
		return func(msg *message.Message) ([]*message.Message, error) {
			if message.HandlerNameFromCtx(msg.Context()) != handler {
				return next(msg)
			}
			return wrapped(msg)
		}
	}
}

// recordArrival commits that a label has arrived, whatever becomes of it.
func (w *world) recordArrival(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if msg.UUID != "" { // a phantom
			var id string
			if err := json.Unmarshal(msg.Payload, &id); err != nil {
				return nil, err
			}
			if _, err := w.pool.Exec(msg.Context(), "insert into arrival values ($1, $2)", msg.UUID, id); err != nil {
				return nil, err
			}
		}
		return next(msg)
	}
}

func counter() func() int {
	var mu sync.Mutex
	n := 0
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		n++
		return n
	}
}

// publisherFunc publishes by a function, and tells when it is closed.
type publisherFunc struct {
	message.Publisher
	publish func(topic string, messages ...*message.Message) error
	closed  chan struct{}
}

func (p *publisherFunc) Publish(topic string, messages ...*message.Message) error {
	return p.publish(topic, messages...)
}

func (p *publisherFunc) Close() error {
	err := p.Publisher.Close()
	if p.closed != nil {
		close(p.closed)
	}
	return err
}

// guardedPublisher keeps Publish and Close apart, as the router does not: in the adapters of Kafka, RabbitMQ and SQL, the
// two at once are a data race.
type guardedPublisher struct {
	message.Publisher
	mu sync.RWMutex
}

func (p *guardedPublisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.Publisher.Publish(topic, messages...)
}

func (p *guardedPublisher) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.Publisher.Close()
}

func (w *world) faultyPublisher(f faults) message.Publisher {
	w.Helper()
	publisher := &guardedPublisher{Publisher: w.publisher()}
	calls := counter()
	return &publisherFunc{publisher, func(topic string, messages ...*message.Message) error {
		if f.publish == nil {
			return publisher.Publish(topic, messages...)
		}
		return f.publish(calls(), func() error { return publisher.Publish(topic, messages...) })
	}, f.publisherClosed}
}
