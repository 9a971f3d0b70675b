package bench

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/dupcache"
)

// BenchmarkDuplicate compares a storm of events that have been processed before with new events. wal-B/op is what the
// server has written during the storm, for others too.
func BenchmarkDuplicate(b *testing.B) {
	const conns, turn, known = 8, 256, 1000
	f := setup(b, conns)
	handle := f.implementation(b, "middleware")
	require.NoError(b, each(conns, known, func(i int) error { return handle(fmt.Sprintf("known-%d", i)) }))
	var next atomic.Int64
	again := func() string { return fmt.Sprintf("known-%d", next.Add(1)%known) }
	storm := contend(b, "middleware", conns, turn, func(string) error { return handle(again()) })
	byHand := contend(b, "handwritten", conns, turn, func(string) error {
		return pgx.BeginFunc(b.Context(), f.pool, func(tx pgx.Tx) error {
			tag, err := tx.Exec(b.Context(), f.claim, "shipping", again())
			if err == nil && tag.RowsAffected() != 0 {
				return errors.New("claimed again")
			}
			return err
		})
	})
	fresh := contend(b, "new", conns, turn, setup(b, conns).implementation(b, "middleware"))
	var wal float64
	watched := contender{storm.name, func(first int) time.Duration {
		before := f.walPosition(b)
		defer func() { wal += f.walPosition(b) - before }()
		return storm.take(first)
	}}
	compare(b, turn, []contender{watched, byHand, fresh}, "new/middleware", "new/handwritten")
	b.ReportMetric(wal/float64(turnsOf(b, turn)*turn), "wal-B/op")
	f.requireLabels(b, known)
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
