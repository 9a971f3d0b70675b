package sqlite_test

import (
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/sqlstore"
)

// BenchmarkClaim compares a message's transaction with the same insert in a plain transaction.
func BenchmarkClaim(b *testing.B) {
	for _, workers := range []int{1, 8} {
		for _, kind := range []string{"plain", "store", "duplicate"} {
			b.Run(fmt.Sprintf("%s/workers=%d", kind, workers), func(b *testing.B) {
				benchmarkClaim(b, kind, workers)
			})
		}
	}
}

func benchmarkClaim(b *testing.B, kind string, workers int) {
	b.Helper()
	ctx := b.Context()
	db := openDB(b, "file:"+filepath.Join(b.TempDir(), "bench.db")+"?_txlock=immediate&"+settings, 16)
	require.NoError(b, sqlstore.Migrate(ctx, db, sqlstore.SQLite()))
	store, err := sqlstore.New(ctx, db, sqlstore.SQLite())
	require.NoError(b, err)
	_, err = db.ExecContext(ctx, "create table effect (name text not null)")
	require.NoError(b, err)
	if kind == "duplicate" {
		tx, _, err := store.Claim(ctx, claimOf("1"))
		require.NoError(b, err)
		require.NoError(b, tx.Commit(ctx, nil))
	}
	process := func(name string) error {
		if kind == "plain" {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			if err := execute("insert into effect values ('x')")(ctx, tx); err != nil {
				return err
			}
			return tx.Commit()
		}
		if kind == "duplicate" {
			_, record, err := store.Claim(ctx, claimOf("1"))
			if err == nil && record == nil {
				err = fmt.Errorf("not a duplicate")
			}
			return err
		}
		tx, _, err := store.Claim(ctx, claimOf(name))
		if err != nil {
			return err
		}
		if err := execute("insert into effect values ('x')")(ctx, tx.Raw()); err != nil {
			return err
		}
		return tx.Commit(ctx, nil)
	}
	var n atomic.Int64
	b.SetParallelism(workers)
	b.ResetTimer()
	if workers == 1 {
		for b.Loop() {
			require.NoError(b, process(fmt.Sprint(n.Add(1))))
		}
		return
	}
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := process(fmt.Sprint(n.Add(1))); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
