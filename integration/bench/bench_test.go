// Package bench measures what the middleware costs, against the same handler in a plain transaction and with a claim
// written by hand. Figures of one run only are compared: make bench prints the ratios.
package bench

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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

// TestMain prints the machine and the settings that the figures depend on, as benchstat reads them.
func TestMain(m *testing.M) {
	fmt.Printf("cores: %d\n", runtime.NumCPU())
	if url := os.Getenv(pgtest.URLVariable); url != "" {
		if err := printSettings(url); err != nil {
			fmt.Fprintln(os.Stderr, "bench: read the settings of the server:", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

func printSettings(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	for _, name := range []string{"server_version", "fsync", "synchronous_commit", "shared_buffers", "max_wal_size"} {
		var value string
		if err := conn.QueryRow(ctx, "select current_setting($1)", name).Scan(&value); err != nil {
			return err
		}
		fmt.Printf("postgresql-%s: %s\n", name, value)
	}
	return nil
}

// fixture is a schema with the store's tables and the table that the handler writes to.
type fixture struct {
	pool   *pgxpool.Pool
	store  *postgres.Store
	schema string
	insert string
	claim  string
}

func setup(b *testing.B, conns int) *fixture {
	b.Helper()
	return setupAt(b, pgtest.Config(b, int32(conns)))
}

func setupAt(b *testing.B, config *pgxpool.Config) *fixture {
	b.Helper()
	ctx := b.Context()
	schema := pgtest.Schema(b)
	f := &fixture{schema: schema, pool: pgtest.Open(b, config)}
	require.NoError(b, postgres.Migrate(ctx, f.pool, postgres.WithSchema(schema)))
	var err error
	f.store, err = postgres.New(ctx, f.pool, postgres.WithSchema(schema))
	require.NoError(b, err)
	_, err = f.pool.Exec(ctx, "create table "+schema+".shipping_label (order_id text primary key)")
	require.NoError(b, err)
	f.insert = "insert into " + schema + ".shipping_label (order_id) values ($1)"
	f.claim = "insert into " + schema + ".idempotency_claim (subscriber_id, event_id, topic) values ($1, $2, '') on conflict do nothing"
	return f
}

// createLabel is the handler: one statement.
func (f *fixture) createLabel(ctx context.Context, tx pgx.Tx, eventID string) error {
	_, err := tx.Exec(ctx, f.insert, eventID)
	return err
}

// plain is the handler in a transaction, as it is without any claim.
func (f *fixture) plain(ctx context.Context, eventID string) error {
	return pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error { return f.createLabel(ctx, tx, eventID) })
}

// byHand is what one writes without the middleware.
func (f *fixture) byHand(ctx context.Context, eventID string) error {
	return pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, f.claim, "shipping", eventID)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		return f.createLabel(ctx, tx, eventID)
	})
}

// requireLabels checks that n events were processed, and each of them once.
func (f *fixture) requireLabels(b *testing.B, n int) {
	b.Helper()
	var labels int
	require.NoError(b, f.pool.QueryRow(b.Context(), "select count(*) from "+f.schema+".shipping_label").Scan(&labels))
	require.Equal(b, n, labels)
}

func (f *fixture) handler() message.HandlerFunc {
	return idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
		return nil, f.createLabel(ctx, tx, msg.UUID)
	})
}

func newMiddleware(b *testing.B, store idempotency.Store, opts ...idempotency.Option) *idempotency.Middleware {
	b.Helper()
	opts = append([]idempotency.Option{idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(watermill.NopLogger{})}, opts...)
	m, err := idempotency.New(store, opts...)
	require.NoError(b, err)
	return m
}

func newMessage(eventID string) *message.Message {
	msg := message.NewMessage(eventID, []byte(`{"order":1}`))
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return msg
}

// deliver makes a message of an event, as a subscriber does, and gives it to the handler.
func deliver(handle message.HandlerFunc) func(eventID string) error {
	return func(eventID string) error {
		_, err := handle(newMessage(eventID))
		return err
	}
}

// A contender is one of the implementations that are compared. It takes a turn of messages, of which the first has that
// number, and returns how long a message took.
type contender struct {
	name string
	take func(first int) time.Duration
}

// turnTimes are, by contender, how long a message took in each of its turns.
type turnTimes map[string][]time.Duration

// take lets contenders take a number of turns each, one after the other, so that what else happens on the machine meets all
// of them.
func (t turnTimes) take(turns, turn int, contenders []contender) {
	for done := range turns {
		for i := range contenders {
			c := contenders[(i+done)%len(contenders)] // nobody is always the first
			t[c.name] = append(t[c.name], c.take(done*turn))
		}
	}
}

func (t turnTimes) median(name string) time.Duration { return percentile(t[name], 50) }

// ratio is one of medians: of "middleware/plain", for example.
func (t turnTimes) ratio(names string) float64 {
	one, other, _ := strings.Cut(names, "/")
	return float64(t.median(one)) / float64(t.median(other))
}

// turnsOf returns how many turns b.N messages take.
func turnsOf(b *testing.B, turn int) int {
	b.Helper()
	return (b.N + turn - 1) / turn
}

// compare compares contenders within one run, by the medians of their turns of a few messages each. ns/op is of the first
// one.
func compare(b *testing.B, turn int, contenders []contender, ratios ...string) {
	b.Helper()
	times := make(turnTimes)
	b.ResetTimer()
	times.take(turnsOf(b, turn), turn, contenders)
	b.StopTimer()
	b.ReportMetric(float64(times.median(contenders[0].name)), "ns/op")
	for _, ratio := range ratios {
		b.ReportMetric(times.ratio(ratio), ratio)
	}
}

// contend returns a contender that processes events on n goroutines, after each connection has prepared its statements.
func contend(b *testing.B, name string, n, turn int, process func(eventID string) error) contender {
	b.Helper()
	require.NoError(b, each(n, 2*n, func(i int) error { return process(fmt.Sprintf("warm-%d", i)) }))
	return contender{name, func(first int) time.Duration {
		began := time.Now()
		require.NoError(b, each(n, turn, func(i int) error { return process(fmt.Sprintf("event-%012d", first+i)) }))
		return time.Since(began) / time.Duration(turn)
	}}
}

// each calls do for 0 to count-1 on n goroutines, and returns an error of the first that fails.
func each(n, count int, do func(i int) error) error {
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var workers sync.WaitGroup
	for range n {
		workers.Go(func() {
			for failed.Load() == nil {
				i := int(next.Add(1)) - 1
				if i >= count {
					return
				}
				if err := do(i); err != nil {
					failed.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	workers.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// distant makes each round trip of a connection longer: the server hears later what the client has written.
type distant struct {
	net.Conn
	by      time.Duration
	hasRead bool
}

func (c *distant) Write(data []byte) (int, error) {
	if c.hasRead { // a round trip begins with the first write after a read
		c.hasRead = false
		<-time.After(c.by)
	}
	return c.Conn.Write(data)
}

func (c *distant) Read(data []byte) (int, error) {
	n, err := c.Conn.Read(data)
	c.hasRead = c.hasRead || n > 0
	return n, err
}

// at returns a configuration for connections to a server that is further away.
func at(b *testing.B, conns int, distance time.Duration) *pgxpool.Config {
	b.Helper()
	config := pgtest.Config(b, int32(conns))
	if distance > 0 {
		config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			return &distant{Conn: conn, by: distance}, err
		}
	}
	return config
}

func percentile(times []time.Duration, p int) time.Duration {
	slices.Sort(times)
	return times[len(times)*p/100]
}
