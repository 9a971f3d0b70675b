package bench

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/dupcache"
)

// BenchmarkDuplicate is a storm of events that have been processed before, beside new ones. wal-B/op is what the server has
// written meanwhile, for others too.
func BenchmarkDuplicate(b *testing.B) {
	const conns, known = 8, 1000
	for _, impl := range []string{"new", "handwritten", "middleware", "dupcache"} {
		b.Run("impl="+impl, func(b *testing.B) {
			f := setup(b, conns)
			handle := deliver(newMiddleware(b, f.store).Middleware(f.handler()))
			again := func(eventID string) string { // one of the known ones
				var i int
				if _, err := fmt.Sscanf(eventID, "event-%d", &i); err != nil {
					i = 0
				}
				return fmt.Sprintf("known-%d", i%known)
			}
			process := func(eventID string) error { return handle(again(eventID)) }
			switch impl {
			case "new":
				process = handle
			case "handwritten":
				process = func(eventID string) error {
					return pgx.BeginFunc(b.Context(), f.pool, func(tx pgx.Tx) error {
						tag, err := tx.Exec(b.Context(), f.claim, "shipping", again(eventID))
						if err == nil && tag.RowsAffected() != 0 {
							return errors.New("claimed again")
						}
						return err
					})
				}
			case "dupcache":
				store, err := dupcache.New(f.store, known, time.Hour)
				require.NoError(b, err)
				handle = deliver(newMiddleware(b, store).Middleware(f.handler()))
			}
			require.NoError(b, each(conns, known, func(i int) error { return handle(fmt.Sprintf("known-%d", i)) }))
			before := f.walPosition(b)
			run(b, conns, process)
			b.ReportMetric((f.walPosition(b)-before)/float64(b.N), "wal-B/op")
			var labels int
			require.NoError(b, f.pool.QueryRow(b.Context(), "select count(*) from "+f.schema+".shipping_label").Scan(&labels))
			if impl != "new" {
				require.Equal(b, known, labels)
			}
		})
	}
}

func (f *fixture) walPosition(b *testing.B) (bytes float64) {
	b.Helper()
	require.NoError(b, f.pool.QueryRow(b.Context(), "select pg_current_wal_insert_lsn() - '0/0'").Scan(&bytes))
	return bytes
}

// BenchmarkCachedDuplicate is a duplicate that is answered from memory, on one core.
func BenchmarkCachedDuplicate(b *testing.B) {
	store, err := dupcache.New(noStore{}, 1000, time.Hour)
	require.NoError(b, err)
	calls := 0
	handle := newMiddleware(b, store).Middleware(countCalls(&calls))
	msg := newMessage("same")
	_, err = handle(msg)
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := handle(msg); err != nil {
			b.Fatal(err)
		}
	}
	require.Equal(b, 1, calls)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
}
