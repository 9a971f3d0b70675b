package chaos_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/postgres"
)

// patience is how long the tests wait for what must happen.
const patience = 2 * time.Minute

// publicationMetadata numbers what is published: not events, but messages about them.
const publicationMetadata = "publication"

// world is a schema, and topics on one transport. A test has one for each transport.
type world struct {
	*testing.T
	consumerSpec
	broker transport
	pool   *pgxpool.Pool

	mu        sync.Mutex // guards what follows
	published map[string]order
	events    map[string]bool
}

func newWorld(t *testing.T, transportName string) *world {
	t.Helper()
	servers.start(t)
	id := strings.ToLower(rand.Text())
	w := &world{T: t, published: make(map[string]order), events: make(map[string]bool), consumerSpec: consumerSpec{
		Transport: transportName, Schema: "chaos_" + id, Orders: "orders_" + id, Labels: "labels_" + id, Dead: "dead_" + id,
		Direct: servers.direct, Via: servers.proxied, PoolOfSize: 8,
	}}
	w.broker = newTransport(transportName, servers.direct, servers.direct)
	config, err := pgxpool.ParseConfig(servers.direct.Postgres)
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["search_path"] = w.Schema
	w.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(w.pool.Close)
	_, err = w.pool.Exec(t.Context(), "create schema "+w.Schema)
	require.NoError(t, err)
	require.NoError(t, postgres.Migrate(t.Context(), w.pool))
	_, err = w.pool.Exec(t.Context(), `
		create table effect (subscriber_id text not null, event_id text not null, content text not null, uuid text not null);
		create table arrival (transport text not null, uuid text not null, event_id text not null);`) // of labels, each delivery
	require.NoError(t, err)
	for _, topic := range []string{w.Orders, w.Labels, w.Dead} {
		require.NoError(t, w.broker.create(topic))
	}
	return w
}

// publish publishes orders, and again as long as the broker does not say that it has them.
func (w *world) publish(ctx context.Context, orders ...order) error {
	messages := make([]*message.Message, len(orders))
	w.mu.Lock()
	for i, o := range orders {
		payload, err := json.Marshal(o)
		if err != nil {
			return err
		}
		publication := fmt.Sprint(len(w.published))
		w.published[publication], w.events[o.Event] = o, true
		messages[i] = message.NewMessage(watermill.NewUUID(), payload)
		messages[i].Metadata.Set(idempotency.EventIDMetadata, o.Event)
		messages[i].Metadata.Set(publicationMetadata, publication)
	}
	w.mu.Unlock()
	var err error
	if !within(patience, func() bool {
		err = w.broker.send(w.Orders, messages...)
		return err == nil || ctx.Err() != nil
	}) || err != nil {
		return fmt.Errorf("publish to %s: %w", w.Transport, err)
	}
	return nil
}

// contents returns what has been published about each event.
func (w *world) contents() map[string][]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	contents := make(map[string][]string)
	for _, o := range w.published {
		if !slices.Contains(contents[o.Event], o.Content) {
			contents[o.Event] = append(contents[o.Event], o.Content)
		}
	}
	return contents
}

func (w *world) isPublished() (messages, events int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.published), len(w.events)
}

// query reads rows of strings. It fails while the server restarts.
func (w *world) query(ctx context.Context, sql string, args ...any) ([][]string, error) {
	rows, err := w.pool.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) ([]string, error) {
		values := make([]string, len(row.FieldDescriptions()))
		into := make([]any, len(values))
		for i := range values {
			into[i] = &values[i]
		}
		return values, row.Scan(into...)
	})
}

func (w *world) mustQuery(sql string, args ...any) [][]string {
	w.Helper()
	rows, err := w.query(w.Context(), sql, args...)
	require.NoError(w, err)
	return rows
}

func (w *world) count(sql string, args ...any) int {
	w.Helper()
	return len(w.mustQuery(sql, args...))
}

// effects returns how many events have had their effect, or what is known of it while the server restarts.
func (w *world) effects(ctx context.Context) (n int) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_ = w.pool.QueryRow(ctx, "select count(*) from effect where subscriber_id = $1", w.Transport+".create").Scan(&n)
	return n
}
