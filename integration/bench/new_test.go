package bench

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
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
