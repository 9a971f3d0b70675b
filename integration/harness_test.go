package integration_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
)

// patience is how long the tests wait for what must happen.
const patience = time.Minute

var errFault = errors.New("a fault of the test")

// place names what the services of a test share, so that a process of its own finds it, too.
type place struct {
	Transport, Schema, Orders, Labels, Dead string
}

// world is a place, with a transport and a database.
type world struct {
	place
	transport
	wire  *pgtest.Wire
	pool  *pgxpool.Pool
	store *postgres.Store
}

// newWorld makes tables, and topics with so many partitions.
func newWorld(t *testing.T, transport string, partitions int32) *world {
	t.Helper()
	id := strings.ToLower(rand.Text())
	p := place{Transport: transport, Schema: pgtest.Schema(t), Orders: "orders_" + id, Labels: "labels_" + id, Dead: "dead_" + id}
	w := &world{place: p}
	w.openPool(t)
	require.NoError(t, postgres.Migrate(t.Context(), w.pool))
	_, err := w.pool.Exec(t.Context(), `
		create table effect (handler text not null, event_id text not null);
		create table arrival (uuid text not null, event_id text not null);`) // of labels, each delivery
	require.NoError(t, err)
	w.open(t)
	for _, topic := range []string{p.Orders, p.Labels, p.Dead} {
		w.create(t, topic, partitions)
	}
	return w
}

// openWorld opens a place that another process has made.
func openWorld(t *testing.T, p place) *world {
	t.Helper()
	w := &world{place: p}
	w.openPool(t)
	w.open(t)
	return w
}

func (w *world) openPool(t *testing.T) {
	t.Helper()
	w.wire = &pgtest.Wire{}
	config := w.wire.Config(t, 24)
	config.ConnConfig.RuntimeParams["search_path"] = w.Schema
	w.pool = pgtest.Open(t, config)
}

func (w *world) open(t *testing.T) {
	t.Helper()
	var err error
	w.store, err = postgres.New(t.Context(), w.pool)
	require.NoError(t, err)
	w.transport = transports[w.Transport](t, w.place)
}

// overTransports runs a test over each of them, or over those that are named.
func overTransports(t *testing.T, run func(t *testing.T, w *world), only ...string) {
	t.Helper()
	if len(only) == 0 {
		for name := range transports {
			only = append(only, name)
		}
	}
	for _, name := range only {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, newWorld(t, name, 1))
		})
	}
}

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

func (w *world) start(t *testing.T, f faults) *service {
	t.Helper()
	s := w.prepare(t, f)
	s.run(t)
	return s
}

// prepare makes the service; more handlers can be added before it runs.
func (w *world) prepare(t *testing.T, f faults) *service {
	t.Helper()
	s := w.newService(t, f)
	s.createLabel = s.router.AddHandler("create-label", w.Orders, w.subscriber(t, w.Orders), w.Labels, w.faultyPublisher(t, f), createLabel(f))
	s.router.AddConsumerHandler("note-label", w.Labels, w.subscriber(t, w.Labels), idempotency.ConsumerHandler(noteLabel)).
		AddMiddleware(w.recordArrival)
	return s
}

// newService makes a service without handlers.
func (w *world) newService(t *testing.T, f faults) *service {
	t.Helper()
	s := &service{world: w, done: make(chan error, 1)}
	var err error
	s.idem, err = idempotency.New(w.store, append([]idempotency.Option{idempotency.WithLogger(watermill.NopLogger{})}, f.options...)...)
	require.NoError(t, err)
	s.router, err = message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, watermill.NopLogger{})
	require.NoError(t, err)
	s.router.AddMiddleware(f.outer...)
	s.router.AddMiddleware(s.idem.Middleware)
	s.router.AddMiddleware(f.inner...)
	s.router.AddMiddleware(middleware.Recoverer)
	return s
}

func (s *service) run(t *testing.T) {
	t.Helper()
	go func() { s.done <- s.router.Run(context.WithoutCancel(t.Context())) }()
	select {
	case <-s.router.Running():
	case err := <-s.done:
		require.FailNow(t, "the router did not start", "%v", err)
	}
	t.Cleanup(func() { s.close(t) })
}

// close closes the router, as a service does that is asked to stop.
func (s *service) close(t *testing.T) {
	t.Helper()
	s.once.Do(func() {
		require.NoError(t, s.router.Close())
		require.NoError(t, <-s.done)
		require.NoError(t, s.idem.Flush(context.WithoutCancel(t.Context())))
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

func (w *world) faultyPublisher(t *testing.T, f faults) message.Publisher {
	t.Helper()
	publisher := w.publisher(t)
	calls := counter()
	return &publisherFunc{publisher, func(topic string, messages ...*message.Message) error {
		if f.publish == nil {
			return publisher.Publish(topic, messages...)
		}
		return f.publish(calls(), func() error { return publisher.Publish(topic, messages...) })
	}, f.publisherClosed}
}

// publish publishes orders with these event IDs.
func (w *world) publish(t *testing.T, eventIDs ...string) {
	t.Helper()
	messages := make([]*message.Message, len(eventIDs))
	for i, id := range eventIDs {
		messages[i] = newOrder(id)
	}
	w.send(t, w.Orders, messages...)
}

func (w *world) send(t *testing.T, topic string, messages ...*message.Message) {
	t.Helper()
	publisher := w.publisher(t)
	require.NoError(t, publisher.Publish(topic, messages...))
	require.NoError(t, publisher.Close())
}

func newOrder(eventID string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(`{"order":1}`))
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return msg
}

// effects returns how often each event has had its effect in the handler.
func (w *world) effects(t *testing.T, handler string) map[string]int {
	t.Helper()
	return w.counts(t, "select event_id, count(*) from effect where handler = $1 group by 1", handler)
}

func (w *world) counts(t *testing.T, sql string, args ...any) map[string]int {
	t.Helper()
	rows, err := w.pool.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	counts := make(map[string]int)
	var (
		id string
		n  int
	)
	_, err = pgx.ForEachRow(rows, []any{&id, &n}, func() error {
		counts[id] = n
		return nil
	})
	require.NoError(t, err)
	return counts
}

func (w *world) count(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, w.pool.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

// lazy is looked at when it is printed.
type lazy func() string

func (l lazy) String() string { return l() }

func (w *world) state(t *testing.T) lazy {
	t.Helper()
	return func() string {
		return fmt.Sprintf("effects %v, downstream %v, arrivals %v, unacked orders %d, unacked labels %d",
			w.effects(t, "create-label"), w.effects(t, "note-label"), w.counts(t, "select event_id, count(*) from arrival group by 1"),
			w.unacked(t, w.Orders), w.unacked(t, w.Labels))
	}
}

// finish waits until each event has had its effects and the broker has nothing left, closes the service and judges.
func (s *service) finish(t *testing.T, eventIDs ...string) {
	t.Helper()
	w, begun := s.world, time.Now()
	require.Eventually(t, func() bool {
		return len(w.effects(t, "create-label")) >= len(eventIDs) && len(w.effects(t, "note-label")) >= len(eventIDs)
	}, patience, 20*time.Millisecond, "%v", w.state(t))
	for {
		require.Eventually(t, func() bool { return w.isIdle(t) }, patience, 20*time.Millisecond, "%v", w.state(t))
		s.close(t)
		if w.unacked(t, w.Orders)+w.unacked(t, w.Labels) == 0 {
			break
		}
		// Its closing was faster than an ack.
		require.Less(t, time.Since(begun), patience, "%v", w.state(t))
		s = w.start(t, faults{})
	}
	w.requireOnce(t, eventIDs...)
}

// isIdle tells whether all that is published has been acked, and the store knows it.
func (w *world) isIdle(t *testing.T) bool {
	t.Helper()
	return w.count(t, "select count(*) from idempotency_produced_message") == 0 && w.unacked(t, w.Orders)+w.unacked(t, w.Labels) == 0
}

// requireOnce tells, after all services have closed, that each event has had one effect here and one downstream, by a
// message with one UUID, and that nothing is left to deliver again.
func (w *world) requireOnce(t *testing.T, eventIDs ...string) {
	t.Helper()
	want := make(map[string]int)
	for _, id := range eventIDs {
		want[id] = 1
	}
	require.Equal(t, want, w.effects(t, "create-label"), "effects")
	require.Equal(t, want, w.effects(t, "note-label"), "effects downstream")
	require.Equal(t, want, w.counts(t, "select event_id, count(distinct uuid) from arrival group by 1"), "UUIDs of produced messages")
	require.Equal(t, 2*len(want), w.count(t, "select count(*) from idempotency_claim"), "claims")
	require.Zero(t, w.count(t, "select count(*) from idempotency_produced_message"), "stored messages that were published and acked")
	require.Zero(t, w.unacked(t, w.Orders), "orders that the broker would deliver again")
	require.Zero(t, w.unacked(t, w.Labels), "labels that the broker would deliver again")
}
