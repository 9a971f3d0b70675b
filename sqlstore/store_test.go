package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/sqlstore"
	"github.com/watermill-idempotency/idempotency/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// backend is a store in a schema of its own, with a table of effects.
type backend struct {
	storetest.Backend
	db     *sql.DB
	schema string
	store  *sqlstore.Store
}

func parse(t *testing.T, variable string) *pgx.ConnConfig {
	t.Helper()
	config, err := pgx.ParseConfig(pgtest.URL(t, variable))
	require.NoError(t, err)
	return config
}

// openDB returns a pool that is closed with the test.
func openDB(t *testing.T, config *pgx.ConnConfig, conns int) *sql.DB {
	t.Helper()
	db := stdlib.OpenDB(*config)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

func open(t *testing.T, config *pgx.ConnConfig, conns int, opts ...sqlstore.Option) backend {
	t.Helper()
	ctx := t.Context()
	schema := pgtest.SchemaAt(t, config.ConnString())
	opts = append([]sqlstore.Option{sqlstore.WithSchema(schema)}, opts...)
	db := openDB(t, config, conns)
	require.NoError(t, sqlstore.Migrate(ctx, db, sqlstore.PostgreSQL(), opts...))
	store, err := sqlstore.New(ctx, db, sqlstore.PostgreSQL(), opts...)
	require.NoError(t, err)
	effect := schema + ".effect"
	_, err = db.ExecContext(ctx, "create table "+effect+" (name text not null)")
	require.NoError(t, err)
	return backend{
		db: db, schema: schema, store: store,
		Backend: storetest.Backend{
			Store: store,
			Write: func(ctx context.Context, tx any, name string) error {
				return onTx(func(ctx context.Context, tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, "insert into "+effect+" values ($1)", name)
					return err
				})(ctx, tx)
			},
			Effects: func(ctx context.Context) (map[string]int, error) {
				rows, err := db.QueryContext(ctx, "select name, count(*) from "+effect+" group by name")
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
			Abort: func(ctx context.Context, tx any) error {
				if err := execute("select 1/0")(ctx, tx); err == nil {
					return fmt.Errorf("1/0 did not fail")
				}
				return nil
			},
			EndByHand: map[string]func(ctx context.Context, tx any) error{
				"rollback":            execute("rollback"),
				"commit":              execute("commit"),
				"rollback and chain":  execute("rollback and chain"),
				"commit and chain":    execute("commit and chain"),
				"rollback, and begin": execute("rollback; begin; create temporary table x ()"),
				"Rollback":            callRollback,
				"Commit":              callCommit,
			},
			Disconnect: func(ctx context.Context, tx any) error {
				var pid int
				err := onTx(func(ctx context.Context, tx *sql.Tx) error {
					return tx.QueryRowContext(ctx, "select pg_backend_pid()").Scan(&pid)
				})(ctx, tx)
				if err != nil {
					return err
				}
				_, err = db.ExecContext(ctx, "select pg_terminate_backend($1, 10000)", pid)
				return err
			},
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
	for _, level := range []sql.IsolationLevel{sql.LevelDefault, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run("isolation "+level.String(), func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) storetest.Backend {
				t.Helper()
				return open(t, parse(t, pgtest.URLVariable), 16, sqlstore.WithIsolation(level)).Backend
			})
		})
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) storetest.Backend {
				t.Helper()
				config := parse(t, pgtest.URLVariable)
				config.DefaultQueryExecMode = mode
				return open(t, config, 16).Backend
			})
		})
	}
	t.Run("newest server", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) storetest.Backend {
			t.Helper()
			return open(t, parse(t, pgtest.URL18Variable), 16).Backend
		})
	})
}
