package integration_test

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
)

// patience is how long the tests wait for what must happen, and glance how long for what must not.
const (
	patience = time.Minute
	glance   = 300 * time.Millisecond
)

var errFault = errors.New("a fault of the test")

// place names what the services of a test share, so that a process of its own finds it, too.
type place struct {
	Transport, Schema, Orders, Labels, Dead string
}

// world is a place of a test, with a transport and a database.
type world struct {
	*testing.T
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
	w := &world{T: t, place: p}
	w.openPool()
	require.NoError(t, postgres.Migrate(t.Context(), w.pool))
	_, err := w.pool.Exec(t.Context(), `
		create table effect (handler text not null, event_id text not null);
		create table arrival (uuid text not null, event_id text not null);`) // of labels, each delivery
	require.NoError(t, err)
	w.open()
	for _, topic := range []string{p.Orders, p.Labels, p.Dead} {
		w.create(topic, partitions)
	}
	return w
}

// openWorld opens a place that another process has made.
func openWorld(t *testing.T, p place) *world {
	t.Helper()
	w := &world{T: t, place: p}
	w.openPool()
	w.open()
	return w
}

func (w *world) openPool() {
	w.Helper()
	w.wire = &pgtest.Wire{}
	config := w.wire.Config(w.T, 24)
	config.ConnConfig.RuntimeParams["search_path"] = w.Schema
	w.pool = pgtest.Open(w.T, config)
}

func (w *world) open() {
	w.Helper()
	var err error
	w.store, err = postgres.New(w.Context(), w.pool)
	require.NoError(w, err)
	w.transport = transports[w.Transport](w.T, w.place)
}

// overTransports runs a test over each of them, or over those that are named.
func overTransports(t *testing.T, run func(w *world), only ...string) {
	t.Helper()
	if len(only) == 0 {
		for name := range transports {
			only = append(only, name)
		}
	}
	for _, name := range only {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(newWorld(t, name, 1))
		})
	}
}

// publish publishes orders with these event IDs.
func (w *world) publish(eventIDs ...string) {
	w.Helper()
	messages := make([]*message.Message, len(eventIDs))
	for i, id := range eventIDs {
		messages[i] = newOrder(id)
	}
	w.send(w.Orders, messages...)
}

// ownPublisher returns a publisher that no router closes.
func (w *world) ownPublisher() message.Publisher {
	w.Helper()
	publisher := w.publisher()
	w.Cleanup(func() { require.NoError(w, publisher.Close()) })
	return publisher
}

func (w *world) send(topic string, messages ...*message.Message) {
	w.Helper()
	publisher := w.publisher()
	require.NoError(w, publisher.Publish(topic, messages...))
	require.NoError(w, publisher.Close())
}

func newOrder(eventID string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(`{"order":1}`))
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return msg
}

// effects returns how often each event has had its effect in the handler.
func (w *world) effects(handler string) map[string]int {
	w.Helper()
	return w.counts("select event_id, count(*) from effect where handler = $1 group by 1", handler)
}

func (w *world) counts(sql string, args ...any) map[string]int {
	w.Helper()
	rows, err := w.pool.Query(w.Context(), sql, args...)
	require.NoError(w, err)
	counts := make(map[string]int)
	var (
		id string
		n  int
	)
	_, err = pgx.ForEachRow(rows, []any{&id, &n}, func() error {
		counts[id] = n
		return nil
	})
	require.NoError(w, err)
	return counts
}

func (w *world) count(sql string, args ...any) (n int) {
	w.Helper()
	require.NoError(w, w.pool.QueryRow(w.Context(), sql, args...).Scan(&n))
	return n
}

// receive waits for what must come.
func receive[T any](t require.TestingT, from <-chan T) (value T) {
	select {
	case value = <-from:
	case <-time.After(patience):
		require.FailNow(t, "nothing came")
	}
	return value
}

// lazy is looked at when it is printed.
type lazy func() string

func (l lazy) String() string { return l() }

func (w *world) state() lazy {
	w.Helper()
	return func() string {
		return fmt.Sprintf("effects %v, downstream %v, arrivals %v, unacked orders %d, unacked labels %d",
			w.effects("create-label"), w.effects("note-label"), w.counts("select event_id, count(*) from arrival group by 1"),
			w.unacked(w.Orders), w.unacked(w.Labels))
	}
}

// finish waits until each event has had its effects and the broker has nothing left, closes the service and judges.
func (s *service) finish(eventIDs ...string) {
	s.Helper()
	w, begun := s.world, time.Now()
	require.Eventually(s, func() bool {
		return len(w.effects("create-label")) >= len(eventIDs) && len(w.effects("note-label")) >= len(eventIDs)
	}, patience, 20*time.Millisecond, "%v", w.state())
	for {
		require.Eventually(s, func() bool { return w.isIdle() }, patience, 20*time.Millisecond, "%v", w.state())
		s.close()
		if w.unacked(w.Orders)+w.unacked(w.Labels) == 0 {
			break
		}
		// Its closing was faster than an ack.
		require.Less(s, time.Since(begun), patience, "%v", w.state())
		s = w.start(faults{})
	}
	w.requireOnce(eventIDs...)
}

// isIdle tells whether all that is published has been acked, and the store knows it.
func (w *world) isIdle() bool {
	w.Helper()
	return w.count("select count(*) from idempotency_produced_message") == 0 && w.unacked(w.Orders)+w.unacked(w.Labels) == 0
}

// requireOnce tells, after all services have closed, that each event has had one effect here and one downstream, by a
// message with one UUID, and that nothing is left to deliver again.
func (w *world) requireOnce(eventIDs ...string) {
	w.Helper()
	want := make(map[string]int)
	for _, id := range eventIDs {
		want[id] = 1
	}
	require.Equal(w, want, w.effects("create-label"), "effects")
	require.Equal(w, want, w.effects("note-label"), "effects downstream")
	require.Equal(w, want, w.counts("select event_id, count(distinct uuid) from arrival group by 1"), "UUIDs of produced messages")
	require.Equal(w, 2*len(want), w.count("select count(*) from idempotency_claim"), "claims")
	require.Zero(w, w.count("select count(*) from idempotency_produced_message"), "stored messages that were published and acked")
	require.Zero(w, w.unacked(w.Orders), "orders that the broker would deliver again")
	require.Zero(w, w.unacked(w.Labels), "labels that the broker would deliver again")
}
