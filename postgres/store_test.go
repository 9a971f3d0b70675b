package postgres_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
	"github.com/watermill-idempotency/idempotency/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// backend is a store in a schema of its own, with a table of effects.
type backend struct {
	storetest.Backend
	pool   *pgxpool.Pool
	schema string
	store  *postgres.Store
}

func open(t *testing.T, config *pgxpool.Config, opts ...postgres.Option) backend {
	t.Helper()
	ctx := t.Context()
	schema := pgtest.SchemaAt(t, config.ConnString())
	opts = append([]postgres.Option{postgres.WithSchema(schema)}, opts...)
	pool := pgtest.Open(t, config)
	require.NoError(t, postgres.Migrate(ctx, pool, opts...))
	store, err := postgres.New(ctx, pool, opts...)
	require.NoError(t, err)
	effect := schema + ".effect"
	_, err = pool.Exec(ctx, "create table "+effect+" (name text not null)")
	require.NoError(t, err)
	return backend{
		pool: pool, schema: schema, store: store,
		Backend: storetest.Backend{
			Store: store,
			Write: func(ctx context.Context, tx any, name string) error {
				_, err := tx.(pgx.Tx).Exec(ctx, "insert into "+effect+" values ($1)", name)
				return err
			},
			Effects: func(ctx context.Context) (map[string]int, error) {
				rows, err := pool.Query(ctx, "select name from "+effect)
				if err != nil {
					return nil, err
				}
				names, err := pgx.CollectRows(rows, pgx.RowTo[string])
				effects := make(map[string]int)
				for _, name := range names {
					effects[name]++
				}
				return effects, err
			},
			Abort: func(ctx context.Context, tx any) error {
				if _, err := tx.(pgx.Tx).Exec(ctx, "select 1/0"); err == nil {
					return fmt.Errorf("1/0 did not fail")
				}
				return nil
			},
			EndByHand: map[string]func(ctx context.Context, tx any) error{
				"rollback":            execute("rollback"),
				"commit":              execute("commit"),
				"rollback and chain":  execute("rollback and chain"),
				"commit and chain":    execute("commit and chain"),
				"rollback, and begin": execute("rollback; begin"),
				"commit, and begin":   execute("commit; begin"),
			},
			Disconnect: func(ctx context.Context, tx any) error {
				pid := tx.(pgx.Tx).Conn().PgConn().PID()
				_, err := pool.Exec(ctx, "select pg_terminate_backend($1, 10000)", int64(pid))
				return err
			},
		},
	}
}

func execute(sql string) func(ctx context.Context, tx any) error {
	return func(ctx context.Context, tx any) error {
		_, err := tx.(pgx.Tx).Exec(ctx, sql)
		return err
	}
}

func TestStoreKeepsTheContract(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{"", pgx.RepeatableRead, pgx.Serializable} {
		t.Run("isolation "+string(level), func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) storetest.Backend {
				return open(t, pgtest.Config(t, 16), postgres.WithIsolation(level)).Backend
			})
		})
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeCacheDescribe} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) storetest.Backend {
				config := pgtest.Config(t, 16)
				config.ConnConfig.DefaultQueryExecMode = mode
				return open(t, config).Backend
			})
		})
	}
	t.Run("newest server", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) storetest.Backend {
			config, err := pgxpool.ParseConfig(pgtest.URL(t, pgtest.URL18Variable))
			require.NoError(t, err)
			config.MaxConns = 16
			return open(t, config).Backend
		})
	})
}
