package sqlite_test

import (
	"context"
	"database/sql"
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

// openDB returns a pool that is closed with the test.
func openDB(t testing.TB, dsn string, conns int) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", dsn)
	require.NoError(t, err)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
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
				_, err := tx.(*sql.Tx).ExecContext(ctx, "insert into effect values (?1)", name)
				return err
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
				"Rollback":                   func(_ context.Context, tx any) error { return tx.(*sql.Tx).Rollback() },
				"Commit":                     func(_ context.Context, tx any) error { return tx.(*sql.Tx).Commit() },
			},
			OneWriter: true,
		},
	}
}

func execute(text string) func(ctx context.Context, tx any) error {
	return func(ctx context.Context, tx any) error {
		_, err := tx.(*sql.Tx).ExecContext(ctx, text)
		return err
	}
}

func TestStoreKeepsTheContract(t *testing.T) {
	t.Parallel()
	for name, more := range map[string]string{
		"file": "", "begin immediate": "&_txlock=immediate", "begin exclusive": "&_txlock=exclusive", "synchronous extra": "&_pragma=synchronous(EXTRA)",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) storetest.Backend {
				return open(t, newFile(t)+"?"+settings+more, 16).Backend
			})
		})
	}
}

func claimOf(eventID string) idempotency.Claim {
	return idempotency.Claim{Key: idempotency.Key{SubscriberID: "shipping", EventID: eventID}, Topic: "orders"}
}
