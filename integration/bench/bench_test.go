// Package bench measures what the middleware costs, against the same handler in a plain transaction and with a claim
// written by hand. Figures of one run only are compared: make bench prints the ratios.
package bench

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/outbox"
	"github.com/watermill-idempotency/idempotency/postgres"
)

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
	ctx := b.Context()
	schema := pgtest.Schema(b)
	f := &fixture{schema: schema, pool: pgtest.Pool(b, int32(conns))}
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

func (f *fixture) middleware(b *testing.B) *idempotency.Middleware {
	b.Helper()
	m, err := idempotency.New(f.store, idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(watermill.NopLogger{}))
	require.NoError(b, err)
	return m
}

// run processes b.N events on n goroutines.
func run(b *testing.B, n int, process func(eventID string) error) {
	b.Helper()
	b.ReportAllocs()
	b.ResetTimer()
	var next atomic.Int64
	var workers sync.WaitGroup
	for range n {
		workers.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(b.N) {
					return
				}
				if err := process(fmt.Sprintf("event-%012d", i)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	workers.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
}

func newMessage(eventID string) *message.Message {
	msg := message.NewMessage(eventID, []byte(`{"order":1}`))
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return msg
}

// BenchmarkNew is a new event whose handler runs one statement.
func BenchmarkNew(b *testing.B) {
	for _, conns := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("conns=%d/impl=plain", conns), func(b *testing.B) {
			f := setup(b, conns)
			run(b, conns, func(eventID string) error {
				return pgx.BeginFunc(b.Context(), f.pool, func(tx pgx.Tx) error { return f.createLabel(b.Context(), tx, eventID) })
			})
		})
		b.Run(fmt.Sprintf("conns=%d/impl=handwritten", conns), func(b *testing.B) {
			f := setup(b, conns)
			run(b, conns, func(eventID string) error {
				return pgx.BeginFunc(b.Context(), f.pool, func(tx pgx.Tx) error {
					tag, err := tx.Exec(b.Context(), f.claim, "shipping", eventID)
					if err != nil || tag.RowsAffected() == 0 {
						return err
					}
					return f.createLabel(b.Context(), tx, eventID)
				})
			})
		})
		b.Run(fmt.Sprintf("conns=%d/impl=middleware", conns), func(b *testing.B) {
			f := setup(b, conns)
			handle := f.middleware(b).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
				return nil, f.createLabel(ctx, tx, msg.UUID)
			}))
			run(b, conns, func(eventID string) error {
				_, err := handle(newMessage(eventID))
				return err
			})
		})
	}
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
			m := f.middleware(b)
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

// BenchmarkDuplicate is an event that has been processed before.
func BenchmarkDuplicate(b *testing.B) {
	const conns = 8
	b.Run("impl=handwritten", func(b *testing.B) {
		f := setup(b, conns)
		_, err := f.pool.Exec(b.Context(), f.claim, "shipping", "same")
		require.NoError(b, err)
		run(b, conns, func(string) error {
			return pgx.BeginFunc(b.Context(), f.pool, func(tx pgx.Tx) error {
				tag, err := tx.Exec(b.Context(), f.claim, "shipping", "same")
				if err == nil && tag.RowsAffected() != 0 {
					return fmt.Errorf("claimed again")
				}
				return err
			})
		})
	})
	b.Run("impl=middleware", func(b *testing.B) {
		f := setup(b, conns)
		calls := 0
		handle := f.middleware(b).Middleware(func(*message.Message) ([]*message.Message, error) {
			calls++
			return nil, nil
		})
		_, err := handle(newMessage("same"))
		require.NoError(b, err)
		run(b, conns, func(string) error {
			_, err := handle(newMessage("same"))
			return err
		})
		require.Equal(b, 1, calls)
	})
}
