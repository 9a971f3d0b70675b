package bench

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/outbox"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

// BenchmarkNew is a new event whose handler runs one statement.
func BenchmarkNew(b *testing.B) {
	for _, place := range []struct {
		conns    int
		distance time.Duration
	}{{1, 0}, {8, 0}, {32, 0}, {1, time.Millisecond}} {
		name := fmt.Sprintf("conns=%d/added=%v/impl=", place.conns, place.distance)
		b.Run(name+"plain", func(b *testing.B) {
			f := setupAt(b, at(b, place.conns, place.distance))
			run(b, place.conns, func(eventID string) error { return f.plain(b.Context(), eventID) })
		})
		b.Run(name+"handwritten", func(b *testing.B) {
			f := setupAt(b, at(b, place.conns, place.distance))
			run(b, place.conns, func(eventID string) error { return f.byHand(b.Context(), eventID) })
		})
		b.Run(name+"middleware", func(b *testing.B) {
			f := setupAt(b, at(b, place.conns, place.distance))
			run(b, place.conns, deliver(newMiddleware(b, f.store).Middleware(f.handler())))
		})
		b.Run(name+"databasesql", func(b *testing.B) {
			f := setupAt(b, at(b, place.conns, place.distance))
			db := stdlib.OpenDBFromPool(f.pool)
			b.Cleanup(func() { require.NoError(b, db.Close()) })
			store, err := sqlstore.New(b.Context(), db, sqlstore.PostgreSQL(), sqlstore.WithSchema(f.schema))
			require.NoError(b, err)
			run(b, place.conns, deliver(newMiddleware(b, store).Middleware(
				idempotency.Handler(func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
					_, err := tx.ExecContext(ctx, f.insert, msg.UUID)
					return nil, err
				}))))
		})
		if place.distance == 0 {
			b.Run(name+"pgbench", func(b *testing.B) { runPgbench(b, setup(b, place.conns), place.conns) })
		}
	}
}

// BenchmarkRatio compares new events within one run: the implementations take turns of a few messages each, so that what
// else happens on the machine meets all of them, and the medians of their turns are compared. ns/op is the middleware's.
func BenchmarkRatio(b *testing.B) {
	for _, place := range []struct {
		conns    int
		distance time.Duration
	}{{1, 0}, {8, 0}, {32, 0}, {1, time.Millisecond}} {
		b.Run(fmt.Sprintf("conns=%d/added=%v", place.conns, place.distance), func(b *testing.B) {
			turn := 4 * place.conns
			names := []string{"plain", "handwritten", "middleware"}
			var ways []func(eventID string) error
			for _, name := range names {
				f := setupAt(b, at(b, place.conns, place.distance))
				way := map[string]func(eventID string) error{
					"plain":       func(eventID string) error { return f.plain(b.Context(), eventID) },
					"handwritten": func(eventID string) error { return f.byHand(b.Context(), eventID) },
					"middleware":  deliver(newMiddleware(b, f.store).Middleware(f.handler())),
				}[name]
				require.NoError(b, each(place.conns, 2*turn, func(i int) error { return way(fmt.Sprintf("warm-%d", i)) }))
				ways = append(ways, way)
			}
			times := make([][]time.Duration, len(ways))
			b.ResetTimer()
			for done := 0; done < b.N; done += turn {
				for w := range ways {
					w = (w + done/turn) % len(ways) // nobody is always the first
					began := time.Now()
					require.NoError(b, each(place.conns, turn, func(i int) error { return ways[w](fmt.Sprintf("event-%012d", done+i)) }))
					times[w] = append(times[w], time.Since(began)/time.Duration(turn))
				}
			}
			b.StopTimer()
			median := func(w int) float64 {
				slices.Sort(times[w])
				return float64(times[w][len(times[w])/2])
			}
			b.ReportMetric(median(2), "ns/op")
			b.ReportMetric(median(2)/median(0), "middleware/plain")
			b.ReportMetric(median(2)/median(1), "middleware/handwritten")
		})
	}
}

// runPgbench runs the statements of the middleware, as a connection has prepared them, and of the handler: what the server
// and a client in C can do.
func runPgbench(b *testing.B, f *fixture, conns int) {
	b.Helper()
	if _, err := exec.LookPath("pgbench"); err != nil {
		b.Skip("pgbench is missing: install the package postgresql")
	}
	conn, err := f.pool.Acquire(b.Context())
	require.NoError(b, err)
	conn.Release() // the one connection that is used next
	require.NoError(b, deliver(newMiddleware(b, f.store).Middleware(f.handler()))("first"))
	rows, err := f.pool.Query(b.Context(), "select statement from pg_prepared_statements order by prepare_time, statement")
	require.NoError(b, err)
	statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(b, err)
	find := func(prefix string) string {
		for _, statement := range statements {
			if strings.HasPrefix(statement, prefix) {
				return statement
			}
		}
		require.FailNow(b, "the middleware has not prepared "+prefix, "%q", statements)
		return ""
	}
	event := "'event-' || :client_id || '-' || :n"
	script := strings.Join([]string{
		`\set n random(1, 1000000000000)`,
		`\startpipeline`,
		"begin;",
		strings.NewReplacer("$1", "'shipping'", "$2", event, "$3", "'orders'", "$4", `'\x`+strings.Repeat("00", 48)+`'`).
			Replace(find("insert into \""+f.schema+`"."idempotency_claim"`)) + ";",
		`\endpipeline`,
		strings.Replace(f.insert, "$1", event, 1) + ";",
		`\startpipeline`,
		strings.Replace(find("select 1 / "), "$1", "pg_catalog.pg_current_xact_id_if_assigned()", 1) + ";",
		"commit;",
		`\endpipeline`,
	}, "\n")
	file := filepath.Join(b.TempDir(), "claim.sql")
	require.NoError(b, os.WriteFile(file, []byte(script), 0o600))

	each := max(1, b.N/conns)
	b.ResetTimer()
	out, err := exec.CommandContext(b.Context(), "pgbench", "--no-vacuum", "--protocol=prepared", "--file="+file,
		fmt.Sprintf("--client=%d", conns), fmt.Sprintf("--transactions=%d", each), pgtest.URL(b, pgtest.URLVariable)).CombinedOutput()
	b.StopTimer()
	require.NoError(b, err, "%s", out)
	tps := regexp.MustCompile(`tps = ([0-9.]+) \(without initial connection time\)`).FindSubmatch(out)
	require.NotNil(b, tps, "%s", out)
	rate, err := strconv.ParseFloat(string(tps[1]), 64)
	require.NoError(b, err)
	b.ReportMetric(rate, "msg/s")
	b.ReportMetric(float64(time.Second)/rate, "ns/op") // without the time of the start
}

// BenchmarkProduced is a new event whose handler runs one statement and returns one message of 1 KiB, or none.
func BenchmarkProduced(b *testing.B) {
	const conns = 8
	payload := bytes.Repeat([]byte("x"), 1024)
	for _, impl := range []string{"none", "replay", "outbox"} {
		b.Run("impl="+impl, func(b *testing.B) {
			f := setup(b, conns)
			var pub *outbox.Publisher
			if impl == "outbox" {
				db := stdlib.OpenDBFromPool(f.pool)
				b.Cleanup(func() { require.NoError(b, db.Close()) })
				schema := outbox.WithSchema(f.schema)
				require.NoError(b, outbox.Migrate(b.Context(), db, schema))
				var err error
				pub, err = outbox.New(b.Context(), db, schema)
				require.NoError(b, err)
			}
			m := newMiddleware(b, f.store)
			handle := m.Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
				if err := f.createLabel(ctx, tx, msg.UUID); err != nil || impl == "none" {
					return nil, err
				}
				produced := message.NewMessage(msg.UUID, payload)
				if pub == nil {
					return []*message.Message{produced}, nil
				}
				produced.SetContext(ctx)                    // as idempotency.Outbox does, under a router
				return nil, pub.Publish("labels", produced) //nolint:contextcheck // it is in the message
			}))
			run(b, conns, func(eventID string) error {
				msg := newMessage(eventID)
				_, err := handle(msg)
				msg.Ack() // so that the removal of what was stored is part of the cost
				return err
			})
			require.NoError(b, m.Flush(b.Context()))
		})
	}
}
