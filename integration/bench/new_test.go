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

// BenchmarkNew compares new events whose handler runs one statement.
func BenchmarkNew(b *testing.B) {
	for _, place := range []struct {
		conns    int
		distance time.Duration
	}{{1, 0}, {8, 0}, {32, 0}, {1, time.Millisecond}} {
		b.Run(fmt.Sprintf("conns=%d/added=%v", place.conns, place.distance), func(b *testing.B) {
			turn := 4 * place.conns
			var contenders []contender
			for _, name := range []string{"middleware", "plain", "handwritten", "databasesql"} {
				process := setupAt(b, at(b, place.conns, place.distance)).implementation(b, name)
				contenders = append(contenders, contend(b, name, place.conns, turn, process))
			}
			compare(b, turn, contenders, "middleware/plain", "middleware/handwritten", "databasesql/plain")
		})
	}
}

// BenchmarkAllocations is a new event on one connection.
func BenchmarkAllocations(b *testing.B) {
	for _, name := range []string{"middleware", "plain", "handwritten", "databasesql"} {
		b.Run("impl="+name, func(b *testing.B) {
			process := setup(b, 1).implementation(b, name)
			require.NoError(b, process("warm"))
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				require.NoError(b, process(fmt.Sprintf("event-%012d", i)))
			}
		})
	}
}

// implementation returns what processes a new event.
func (f *fixture) implementation(b *testing.B, name string) func(eventID string) error {
	b.Helper()
	switch name {
	case "plain":
		return func(eventID string) error { return f.plain(b.Context(), eventID) }
	case "handwritten":
		return func(eventID string) error { return f.byHand(b.Context(), eventID) }
	case "databasesql":
		db := stdlib.OpenDBFromPool(f.pool)
		b.Cleanup(func() { require.NoError(b, db.Close()) })
		store, err := sqlstore.New(b.Context(), db, sqlstore.PostgreSQL(), sqlstore.WithSchema(f.schema))
		require.NoError(b, err)
		return deliver(newMiddleware(b, store).Middleware(
			idempotency.Handler(func(ctx context.Context, tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
				_, err := tx.ExecContext(ctx, f.insert, msg.UUID)
				return nil, err
			})))
	default:
		return deliver(newMiddleware(b, f.store).Middleware(f.handler()))
	}
}

// BenchmarkPgbench compares new events with what the server and a client in C can do.
func BenchmarkPgbench(b *testing.B) {
	if _, err := exec.LookPath("pgbench"); err != nil {
		b.Skip("pgbench is missing: install the package postgresql")
	}
	for _, conns := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("conns=%d", conns), func(b *testing.B) {
			turn := 100 * conns // pgbench prepares its statements in each turn
			f := setup(b, conns)
			process := f.implementation(b, "middleware")
			compare(b, turn, []contender{contend(b, "middleware", conns, turn, process), f.pgbench(b, conns, turn)}, "middleware/pgbench")
		})
	}
}

// pgbench returns a contender that runs the statements of the middleware, as a connection has prepared them, and of the
// handler.
func (f *fixture) pgbench(b *testing.B, conns, turn int) contender {
	b.Helper()
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

	return contender{"pgbench", func(int) time.Duration {
		out, err := exec.CommandContext(b.Context(), "pgbench", "--no-vacuum", "--protocol=prepared", "--file="+file,
			fmt.Sprintf("--client=%d", conns), fmt.Sprintf("--transactions=%d", turn/conns), pgtest.URL(b, pgtest.URLVariable)).CombinedOutput()
		require.NoError(b, err, "%s", out)
		tps := regexp.MustCompile(`tps = ([0-9.]+) \(without initial connection time\)`).FindSubmatch(out)
		require.NotNil(b, tps, "%s", out)
		rate, err := strconv.ParseFloat(string(tps[1]), 64)
		require.NoError(b, err)
		return time.Duration(float64(time.Second) / rate)
	}}
}

// BenchmarkProduced compares new events whose handler runs one statement and returns one message of 1 KiB, or none.
func BenchmarkProduced(b *testing.B) {
	const conns, turn = 8, 64
	payload := bytes.Repeat([]byte("x"), 1024)
	var contenders []contender
	for _, name := range []string{"none", "replay", "outbox"} {
		f := setup(b, conns)
		var pub *outbox.Publisher
		if name == "outbox" {
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
			if err := f.createLabel(ctx, tx, msg.UUID); err != nil || name == "none" {
				return nil, err
			}
			produced := message.NewMessage(msg.UUID, payload)
			if pub == nil {
				return []*message.Message{produced}, nil
			}
			produced.SetContext(ctx)                    // as idempotency.Outbox does, under a router
			return nil, pub.Publish("labels", produced) //nolint:contextcheck // it is in the message
		}))
		contenders = append(contenders, contend(b, name, conns, turn, func(eventID string) error {
			msg := newMessage(eventID)
			_, err := handle(msg)
			msg.Ack() // so that the removal of what was stored is part of the cost
			return err
		}))
		b.Cleanup(func() { require.NoError(b, m.Flush(context.WithoutCancel(b.Context()))) })
	}
	compare(b, turn, contenders, "replay/none", "outbox/none")
}
