package integration_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

// database is a store with tables of its own.
type database struct {
	*testing.T
	store idempotency.Store
	// write inserts an effect in the transaction of a handler.
	write func(ctx context.Context, handler, eventID string) error
	// outside is a look at what is committed.
	outside *sql.DB
}

const databaseConns = 16

// databases are the stores and the engines; each test opens its own.
var databases = map[string]func(t *testing.T) database{
	"postgres": func(t *testing.T) database {
		t.Helper()
		config := pgtest.Config(t, databaseConns)
		config.ConnConfig.RuntimeParams["search_path"] = pgtest.Schema(t)
		pool := pgtest.Open(t, config)
		require.NoError(t, postgres.Migrate(t.Context(), pool))
		store, err := postgres.New(t.Context(), pool)
		require.NoError(t, err)
		return newDatabase(t, store, stdlib.OpenDBFromPool(pool), func(ctx context.Context, handler, eventID string) error {
			tx, err := idempotency.TxFromContext[pgx.Tx](ctx)
			if err != nil {
				return err
			}
			return write(ctx, tx, handler, eventID)
		})
	},
	"sqlstore, PostgreSQL": func(t *testing.T) database {
		t.Helper()
		config := pgtest.Config(t, 1).ConnConfig
		config.RuntimeParams["search_path"] = pgtest.Schema(t)
		return newSQLDatabase(t, stdlib.OpenDB(*config), sqlstore.PostgreSQL(), "insert into effect values ($1, $2)")
	},
	"sqlstore, SQLite": func(t *testing.T) database {
		t.Helper()
		db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "test.db")+"?_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)")
		require.NoError(t, err)
		return newSQLDatabase(t, db, sqlstore.SQLite(), "insert into effect values (?, ?)")
	},
}

func newSQLDatabase(t *testing.T, db *sql.DB, dialect sqlstore.Dialect, insert string) database {
	t.Helper()
	db.SetMaxOpenConns(databaseConns)
	db.SetMaxIdleConns(databaseConns)
	require.NoError(t, sqlstore.Migrate(t.Context(), db, dialect))
	store, err := sqlstore.New(t.Context(), db, dialect)
	require.NoError(t, err)
	return newDatabase(t, store, db, func(ctx context.Context, handler, eventID string) error {
		tx, err := idempotency.TxFromContext[*sql.Tx](ctx)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, insert, handler, eventID)
		return err
	})
}

func newDatabase(t *testing.T, store idempotency.Store, db *sql.DB, write func(ctx context.Context, handler, eventID string) error) database {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	_, err := db.ExecContext(t.Context(), "create table effect (handler text not null, event_id text not null)")
	require.NoError(t, err)
	return database{T: t, store: store, write: write, outside: db}
}

// overDatabases runs a test over each of them.
func overDatabases(t *testing.T, run func(d database)) {
	t.Helper()
	for name, open := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(open(t))
		})
	}
}

func (d database) count(query string) (n int) {
	d.Helper()
	require.NoError(d, d.outside.QueryRowContext(d.Context(), query).Scan(&n))
	return n
}

// requireOnce tells that so many events have had one effect each, here and downstream, and that nothing is left to replay.
func (d database) requireOnce(events int) {
	d.Helper()
	for _, handler := range []string{"create-label", "note-label"} {
		require.Equal(d, events, d.count("select count(*) from effect where handler = '"+handler+"'"), "effects of %s", handler)
		require.Equal(d, events, d.count("select count(distinct event_id) from effect where handler = '"+handler+"'"), "events of %s", handler)
	}
	require.Equal(d, 2*events, d.count("select count(*) from idempotency_claim"), "claims")
	require.Zero(d, d.stored(), "stored messages that were published and acked")
}

// stored counts the messages that a duplicate would be given.
func (d database) stored() int {
	d.Helper()
	return d.count("select count(*) from idempotency_produced_message")
}
