package sqlite_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/sqlstore"
	"github.com/watermill-idempotency/idempotency/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Settings that New asks for.
const settings = "_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)"

// backend is a store on a file of its own, with a table of effects.
type backend struct {
	storetest.Backend
	db    *sql.DB
	dsn   string
	store *sqlstore.Store
}

func newFile(t *testing.T) string {
	t.Helper()
	return "file:" + filepath.Join(t.TempDir(), "test.db")
}

// sharedMemory is a database in memory that the connections of this process share.
func sharedMemory() string {
	return "file:" + rand.Text() + "?mode=memory&cache=shared&_pragma=busy_timeout(10000)"
}

// openDB returns a pool that is closed with the test.
func openDB(tb testing.TB, dsn string, conns int) *sql.DB {
	tb.Helper()
	db, err := sql.Open("sqlite", dsn)
	require.NoError(tb, err)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	tb.Cleanup(func() { require.NoError(tb, db.Close()) })
	return db
}

func open(t *testing.T, dsn string, conns int, opts ...sqlstore.Option) backend {
	t.Helper()
	ctx := t.Context()
	db := openDB(t, dsn, conns)
	require.NoError(t, sqlstore.Migrate(ctx, db, sqlstore.SQLite(), opts...))
	store, err := sqlstore.New(ctx, db, sqlstore.SQLite(), opts...)
	require.NoError(t, err)
	_, err = db.ExecContext(ctx, "create table effect (name text not null)")
	require.NoError(t, err)
	return backend{
		db: db, dsn: dsn, store: store,
		Backend: storetest.Backend{
			Store: store,
			Write: func(ctx context.Context, tx any, name string) error {
				return onTx(func(ctx context.Context, tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, "insert into effect values (?1)", name)
					return err
				})(ctx, tx)
			},
			Effects: func(ctx context.Context) (map[string]int, error) {
				rows, err := db.QueryContext(ctx, "select name, count(*) from effect group by name")
				if err != nil {
					return nil, err
				}
				defer func() { _ = rows.Close() }()
				effects := make(map[string]int)
				for rows.Next() {
					var name string
					var n int
					if err := rows.Scan(&name, &n); err != nil {
						return nil, err
					}
					effects[name] = n
				}
				return effects, rows.Err()
			},
			EndByHand: map[string]func(ctx context.Context, tx any) error{
				"rollback":                   execute("rollback"),
				"commit":                     execute("commit"),
				"rollback, and begin":        execute("rollback; begin"),
				"commit, and begin":          execute("commit; begin immediate"),
				"rollback to another's mark": execute("rollback; savepoint another"),
				"Rollback":                   callRollback,
				"Commit":                     callCommit,
			},
			OneWriter: true,
		},
	}
}

// onTx is what a handler does with the transaction that [idempotency.Tx.Raw] returns.
func onTx(do func(ctx context.Context, tx *sql.Tx) error) func(ctx context.Context, raw any) error {
	return func(ctx context.Context, raw any) error {
		tx, ok := raw.(*sql.Tx)
		if !ok {
			return fmt.Errorf("the transaction is a %T", raw)
		}
		return do(ctx, tx)
	}
}

func execute(text string) func(ctx context.Context, raw any) error {
	return onTx(func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, text)
		return err
	})
}

func callCommit(ctx context.Context, raw any) error {
	return onTx(func(_ context.Context, tx *sql.Tx) error { return tx.Commit() })(ctx, raw)
}

func callRollback(ctx context.Context, raw any) error {
	return onTx(func(_ context.Context, tx *sql.Tx) error { return tx.Rollback() })(ctx, raw)
}

func TestStoreKeepsTheContract(t *testing.T) {
	t.Parallel()
	for name, more := range map[string]string{"file": "", "begin immediate": "&_txlock=immediate", "begin exclusive": "&_txlock=exclusive"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) storetest.Backend {
				t.Helper()
				return open(t, newFile(t)+"?"+settings+more, 16).Backend
			})
		})
	}
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) storetest.Backend {
			t.Helper()
			return open(t, sharedMemory(), 16).Backend
		})
	})
}

func claimOf(eventID string) idempotency.Claim {
	return idempotency.Claim{Key: idempotency.Key{SubscriberID: "shipping", EventID: eventID}, Topic: "orders"}
}
