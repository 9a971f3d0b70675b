package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
)

func claimOf(eventID string) idempotency.Claim {
	return idempotency.Claim{Key: idempotency.Key{SubscriberID: "shipping", EventID: eventID}, Topic: "orders"}
}

func (b backend) claim(t *testing.T, c idempotency.Claim) (idempotency.Tx, pgx.Tx) {
	t.Helper()
	tx, record, err := b.store.Claim(t.Context(), c)
	require.NoError(t, err)
	require.Nil(t, record)
	return tx, tx.Raw().(pgx.Tx)
}

func (b backend) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := b.pool.Exec(t.Context(), strings.ReplaceAll(sql, "{schema}", b.schema))
	require.NoError(t, err)
}

func (b backend) middleware(t *testing.T) *idempotency.Middleware {
	t.Helper()
	m, err := idempotency.New(b.store, idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(watermill.NopLogger{}))
	require.NoError(t, err)
	return m
}

func newMessage(eventID string) *message.Message {
	msg := message.NewMessage(eventID, nil)
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return msg
}

// A unique violation that the handler swallows aborts the transaction; in a server of another language, too.
func TestTrap02_SwallowedSQLErrorIsNotAcked(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, _ *message.Message) ([]*message.Message, error) {
		_, err := tx.Exec(ctx, "insert into "+b.schema+".no_such_table values (1)")
		require.Error(t, err)
		return nil, nil
	}))
	_, err := handle(newMessage("1"))
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
	require.ErrorContains(t, err, "run it in a savepoint")
}

// The same in a savepoint is the handler's right.
func TestSavepointsSurviveAFailedStatement(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, _ *message.Message) ([]*message.Message, error) {
		err := pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
			_, err := savepoint.Exec(ctx, "select 1/0")
			return err
		})
		require.Error(t, err)
		return nil, b.Write(ctx, tx, "after the savepoint")
	}))
	_, err := handle(newMessage("1"))
	require.NoError(t, err)
	effects, err := b.Effects(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]int{"after the savepoint": 1}, effects)
}

func TestTrap04_ErrorsAreToldByCodeInEveryLanguage(t *testing.T) {
	t.Parallel()
	config := pgtest.Config(t, 4)
	config.ConnConfig.RuntimeParams["lc_messages"] = "de_DE.UTF-8"
	b := open(t, config)
	var pgErr *pgconn.PgError
	_, err := b.pool.Exec(t.Context(), "select 1/0")
	require.ErrorAs(t, err, &pgErr)
	require.Contains(t, pgErr.Message, "Division durch Null", "the server does not speak German: is the locale de_DE.UTF-8 installed?")

	c := claimOf("1")
	c.InFlight = idempotency.FailFast()
	tx, raw := b.claim(t, c)
	_, _, err = b.store.Claim(t.Context(), c)
	require.ErrorIs(t, err, idempotency.ErrInFlight)
	_, err = raw.Exec(t.Context(), "select 1/0")
	require.Error(t, err)
	require.ErrorIs(t, tx.Commit(t.Context(), nil), idempotency.ErrRolledBack)
}

func TestTrap09_CommitAndRollbackAreRefused(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	var kept pgx.Tx
	handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, _ *message.Message) ([]*message.Message, error) {
		kept = tx
		require.ErrorIs(t, tx.Commit(ctx), idempotency.ErrTxEnded)
		require.ErrorIs(t, tx.Rollback(ctx), idempotency.ErrTxEnded)
		return nil, b.Write(ctx, tx, "label")
	}))
	_, err := handle(newMessage("1"))
	require.NoError(t, err)
	effects, err := b.Effects(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]int{"label": 1}, effects)
	_, err = kept.Exec(t.Context(), "select 1")
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	_, err = kept.Begin(t.Context())
	require.ErrorIs(t, err, pgx.ErrTxClosed)
}

// A deferred trigger that fails with the very SQLSTATE of the check before COMMIT is still a rollback, not a transaction
// that the handler ended.
func TestTrap09_CheckIsNotMistakenForADeferredTrigger(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	b.exec(t, `create function {schema}.fail() returns trigger language plpgsql as $$ begin return 1/0; end $$;
		create constraint trigger fail after insert on {schema}.effect deferrable initially deferred for each row execute function {schema}.fail()`)
	tx, raw := b.claim(t, claimOf("1"))
	require.NoError(t, b.Write(t.Context(), raw, "label"))
	err := tx.Commit(t.Context(), nil)
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
	require.NotErrorIs(t, err, idempotency.ErrTxEnded)
}

// The server ends a session whose handler takes too long.
func TestTrap10_RollbackOnADeadConnection(t *testing.T) {
	t.Parallel()
	config := pgtest.Config(t, 1)
	config.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = "50"
	b := open(t, config)
	for range 2 { // with one connection, a leak would block
		tx, raw := b.claim(t, claimOf("1"))
		require.Eventually(t, func() bool { return b.Write(t.Context(), raw, "late") != nil || raw.Conn().IsClosed() }, 10*time.Second, 100*time.Millisecond)
		require.NotPanics(t, func() { _ = tx.Rollback(t.Context()) })
	}
	tx, _ := b.claim(t, claimOf("1"))
	require.NoError(t, tx.Rollback(t.Context()))
}

// What the handler set as lock timeout, or the session had, is in force again after a bounded claim.
func TestTrap12_BoundedClaimRestoresTheLockTimeout(t *testing.T) {
	t.Parallel()
	config := pgtest.Config(t, 2)
	config.ConnConfig.RuntimeParams["lock_timeout"] = "4321"
	b := open(t, config)
	for _, policy := range []idempotency.InFlight{idempotency.Wait(), idempotency.FailFast(), idempotency.WaitAtMost(time.Second)} {
		c := claimOf(fmt.Sprint(policy))
		c.InFlight = policy
		tx, raw := b.claim(t, c)
		var timeout string
		require.NoError(t, raw.QueryRow(t.Context(), "show lock_timeout").Scan(&timeout))
		require.Equal(t, "4321ms", timeout)
		require.NoError(t, tx.Commit(t.Context(), nil))
	}
}

func TestTrap13_ConflictsAreTold(t *testing.T) {
	t.Parallel()
	t.Run("deadlock", func(t *testing.T) {
		t.Parallel()
		b := open(t, pgtest.Config(t, 4))
		b.exec(t, "insert into {schema}.effect values ('a'), ('b')")
		lock := func(tx pgx.Tx, name string) error {
			_, err := tx.Exec(t.Context(), "update "+b.schema+".effect set name = name where name = $1", name)
			return err
		}
		first, rawFirst := b.claim(t, claimOf("1"))
		second, rawSecond := b.claim(t, claimOf("2"))
		require.NoError(t, lock(rawFirst, "a"))
		require.NoError(t, lock(rawSecond, "b"))
		crossed := make(chan error, 1)
		go func() { crossed <- lock(rawFirst, "b") }()
		err := errors.Join(lock(rawSecond, "a"), ignoreNil(second.Rollback(t.Context())), <-crossed)
		require.Equal(t, idempotency.FaultConflict, b.store.Classify(err), "%v", err)
		require.NoError(t, first.Rollback(t.Context()))
	})
	t.Run("serialization", func(t *testing.T) {
		t.Parallel()
		b := open(t, pgtest.Config(t, 4), postgres.WithIsolation(pgx.Serializable))
		holder, _ := b.claim(t, claimOf("1"))
		waiting := make(chan error, 1)
		go func() {
			_, _, err := b.store.Claim(t.Context(), claimOf("1"))
			waiting <- err
		}()
		requireLockWait(t, b)
		require.NoError(t, holder.Commit(t.Context(), nil))
		require.Equal(t, idempotency.FaultConflict, b.store.Classify(<-waiting), "the snapshot is older than the claim: a fresh transaction finds the duplicate")
		_, record, err := b.store.Claim(t.Context(), claimOf("1"))
		require.NoError(t, err)
		require.NotNil(t, record)
	})
}

func ignoreNil(err error) error { return err }

// requireLockWait waits until a session waits for a transaction of this test's claims.
func requireLockWait(t *testing.T, b backend) {
	t.Helper()
	require.Eventually(t, func() bool {
		var waiting bool
		err := b.pool.QueryRow(t.Context(), "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and query like '%' || $1 || '%' and pid <> pg_backend_pid())", b.schema).Scan(&waiting)
		return err == nil && waiting
	}, 10*time.Second, 10*time.Millisecond)
}

func TestTrap28_NewFindsWhatWouldLoseMessages(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change   string
		settings map[string]string
		want     error
		says     string
	}{
		"no table":           {change: "drop table {schema}.idempotency_claim", want: idempotency.ErrSchema, says: "call Migrate"},
		"no produced table":  {change: "drop table {schema}.idempotency_produced_message", want: idempotency.ErrSchema, says: "call Migrate"},
		"no primary key":     {change: "alter table {schema}.idempotency_claim drop constraint idempotency_claim_pkey", want: idempotency.ErrSchema, says: "primary key"},
		"other primary key":  {change: "alter table {schema}.idempotency_claim drop constraint idempotency_claim_pkey, add primary key (subscriber_id, event_id, topic)", want: idempotency.ErrSchema, says: "primary key"},
		"other collation":    {change: `alter table {schema}.idempotency_claim alter event_id type text collate "und-x-icu"`, want: idempotency.ErrSchema, says: "collations"},
		"column missing":     {change: "alter table {schema}.idempotency_claim drop column fingerprint", want: idempotency.ErrSchema, says: `no column "fingerprint"`},
		"unlogged":           {change: "alter table {schema}.idempotency_claim set unlogged", want: idempotency.ErrNotDurable, says: "set logged"},
		"synchronous_commit": {settings: map[string]string{"synchronous_commit": "off"}, want: idempotency.ErrNotDurable, says: "synchronous_commit is off"},
		"read-only":          {settings: map[string]string{"default_transaction_read_only": "on"}, want: idempotency.ErrReadOnly, says: "default_transaction_read_only"},
		"no privilege":       {settings: map[string]string{"role": "pg_monitor"}, change: "grant usage on schema {schema} to pg_monitor", want: idempotency.ErrPrivilege, says: "needs insert, select on"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, pgtest.Config(t, 2))
			if test.change != "" {
				b.exec(t, test.change)
			}
			config := pgtest.Config(t, 2)
			for setting, value := range test.settings {
				config.ConnConfig.RuntimeParams[setting] = value
			}
			_, err := postgres.New(t.Context(), pgtest.Open(t, config), postgres.WithSchema(b.schema))
			require.ErrorIs(t, err, test.want)
			require.ErrorContains(t, err, test.says)
		})
	}
}

func TestTrap30_PoolThatIsTooSmallIsABoundedWait(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 1), postgres.WithAcquireTimeout(50*time.Millisecond))
	tx, _ := b.claim(t, claimOf("1"))
	_, _, err := b.store.Claim(t.Context(), claimOf("2"))
	require.ErrorIs(t, err, postgres.ErrPoolExhausted)
	require.ErrorContains(t, err, "all 1 are in use: raise pool_max_conns")
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(err))
	require.NoError(t, tx.Rollback(t.Context()))
	tx, _ = b.claim(t, claimOf("2"))
	require.NoError(t, tx.Rollback(t.Context()))
}

func TestTrap33_NamesAreQuoted(t *testing.T) {
	t.Parallel()
	for _, name := range []string{`Upper Case`, `quo"te`, `semi;colon`, `'; drop table x; --`, `select`, `ünïcödé`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t, 2)
			schema := pgtest.Schema(t) + name
			t.Cleanup(func() {
				_, err := pgtest.Pool(t, 1).Exec(context.WithoutCancel(t.Context()), "drop schema "+pgx.Identifier{schema}.Sanitize()+" cascade")
				require.NoError(t, err)
			})
			opts := []postgres.Option{postgres.WithSchema(schema), postgres.WithTablePrefix(name)}
			require.NoError(t, postgres.Migrate(t.Context(), pool, opts...))
			store, err := postgres.New(t.Context(), pool, opts...)
			require.NoError(t, err)
			tx, _, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))
			_, record, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.Len(t, record.Produced, 1)
			require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
		})
	}
	_, err := postgres.New(t.Context(), pgtest.Pool(t, 1), postgres.WithSchema(""), postgres.WithTablePrefix(strings.Repeat("x", 48)), postgres.WithIsolation("chaos"), postgres.WithAcquireTimeout(0))
	require.EqualError(t, err, "postgres: New: WithSchema: it is empty\n"+
		`WithTablePrefix: "`+strings.Repeat("x", 48)+`" has 48 bytes, 47 are allowed`+"\n"+
		`WithIsolation: "chaos" is not an isolation level: use a constant of package pgx`+"\n"+
		"WithAcquireTimeout: 0s is not positive")
}

// What handlers leave on a pooled connection leads no later claim astray.
func TestTrap35_SessionStateOfAHandler(t *testing.T) {
	t.Parallel()
	for name, left := range map[string]string{
		"search_path":     "set search_path to elsewhere",
		"temporary table": "create temporary table idempotency_claim (subscriber_id text, event_id text, topic text, fingerprint bytea, primary key (subscriber_id, event_id))",
		"functions":       "create function pg_temp.set_config(text, text, bool) returns text language sql as 'select null::text'; set search_path to pg_temp, pg_catalog",
		"advisory lock":   "select pg_advisory_lock(hashtextextended(current_schema(), 0))",
		"claim setting":   "set idempotency.claim to 'held'",
		"lock timeout":    "set lock_timeout to 1",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := pgtest.Config(t, 1) // the same session each time
			schema := pgtest.Schema(t)
			config.ConnConfig.RuntimeParams["search_path"] = schema
			pool := pgtest.Open(t, config)
			require.NoError(t, postgres.Migrate(t.Context(), pool)) // into the schema of the search path
			store, err := postgres.New(t.Context(), pool)
			require.NoError(t, err)

			tx, _, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			_, err = tx.Raw().(pgx.Tx).Exec(t.Context(), left)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))

			_, record, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.NotNil(t, record, "claimed again, in another table")
			require.Len(t, record.Produced, 1)
			require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
			tx, record, err = store.Claim(t.Context(), claimOf("2"))
			require.NoError(t, err)
			require.Nil(t, record)
			require.NoError(t, tx.Commit(t.Context(), nil))
		})
	}
	for name, left := range map[string]string{
		"read only": "set session characteristics as transaction read only",
		"role":      "set role pg_monitor",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, pgtest.Config(t, 1))
			tx, raw := b.claim(t, claimOf("1"))
			_, err := raw.Exec(t.Context(), left)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context(), nil))
			_, _, err = b.store.Claim(t.Context(), claimOf("1"))
			require.Error(t, err, "an error, and not a duplicate that was not looked for")
			_, _, err = b.store.Claim(t.Context(), claimOf("2"))
			require.Error(t, err)
		})
	}
}

func TestTrap36_DeferredConstraintIsAKnownRollback(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	b.exec(t, "create table {schema}.parent (id int primary key); create table {schema}.child (id int references {schema}.parent deferrable initially deferred)")
	handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, _ *message.Message) ([]*message.Message, error) {
		_, err := tx.Exec(ctx, "insert into "+b.schema+".child values (1)")
		return nil, err
	}))
	_, err := handle(newMessage("1"))
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
	require.NotErrorIs(t, err, idempotency.ErrCommitUnknown)
	require.False(t, idempotency.IsTransient(err), "it is the handler's failure")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "23503", pgErr.Code)
}

func TestTrap36_OpenRowsAreTold(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 1))
	handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, _ *message.Message) ([]*message.Message, error) {
		rows, err := tx.Query(ctx, "select * from generate_series(1, 1000)")
		require.NoError(t, err)
		require.True(t, rows.Next())
		return nil, nil
	}))
	for range 2 {
		_, err := handle(newMessage("1"))
		require.ErrorIs(t, err, idempotency.ErrRolledBack)
		require.ErrorContains(t, err, "rows or a batch are still open")
	}
}

func TestMigrateByManyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, 8)
	schema := pgtest.Schema(t)
	errs := make(chan error, 8)
	for range cap(errs) {
		go func() { errs <- postgres.Migrate(t.Context(), pool, postgres.WithSchema(schema)) }()
	}
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
	_, err := postgres.New(t.Context(), pool, postgres.WithSchema(schema))
	require.NoError(t, err)
	_, err = postgres.New(t.Context(), nil)
	require.ErrorContains(t, err, "the pool is nil")
}

func TestClassifyByState(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 1))
	for code, want := range map[string]idempotency.Fault{
		"40001": idempotency.FaultConflict, "40P01": idempotency.FaultConflict,
		"08006": idempotency.FaultUnavailable, "53300": idempotency.FaultUnavailable, "57P01": idempotency.FaultUnavailable,
		"55P03": idempotency.FaultUnavailable, "25006": idempotency.FaultUnavailable,
		"23505": idempotency.FaultOther, "42P01": idempotency.FaultOther, "25P02": idempotency.FaultOther, "22012": idempotency.FaultOther,
	} {
		require.Equal(t, want, b.store.Classify(fmt.Errorf("handler: %w", &pgconn.PgError{Code: code})), code)
	}
	config := pgtest.Config(t, 1)
	config.ConnConfig.Port = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(pool.Ping(t.Context())), "a server that refuses connections")
}

// A role with the privileges of the package comment, and no more, can do all that a service does.
func TestPrivilegesAreEnough(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	b.exec(t, `grant usage on schema {schema} to pg_monitor; grant select, insert on {schema}.idempotency_claim to pg_monitor;
		grant select, insert, delete on {schema}.idempotency_produced_message to pg_monitor`)
	config := pgtest.Config(t, 2)
	config.ConnConfig.RuntimeParams["role"] = "pg_monitor"
	store, err := postgres.New(t.Context(), pgtest.Open(t, config), postgres.WithSchema(b.schema))
	require.NoError(t, err)
	tx, _, err := store.Claim(t.Context(), claimOf("1"))
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))
	require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
	_, record, err := store.Claim(t.Context(), claimOf("1"))
	require.NoError(t, err)
	require.Empty(t, record.Produced)
}
