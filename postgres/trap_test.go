package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
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

// claim claims, and lets go of the connection at the end of a test that has failed: the pool waits for it.
func claim(t *testing.T, store *postgres.Store, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	t.Helper()
	ctx := t.Context()
	tx, record, err := store.Claim(ctx, c)
	if tx != nil {
		t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(ctx)) })
	}
	return tx, record, err
}

func (b backend) claim(t *testing.T, c idempotency.Claim) (idempotency.Tx, pgx.Tx) {
	t.Helper()
	tx, record, err := claim(t, b.store, c)
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
	_, _, err = claim(t, b.store, c)
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
	config.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = "500"
	b := open(t, config)
	for range 2 { // with one connection, a leak would block
		tx, raw := b.claim(t, claimOf("1"))
		require.Eventually(t, func() bool { return b.Write(t.Context(), raw, "late") != nil || raw.Conn().IsClosed() }, 10*time.Second, 700*time.Millisecond)
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
			_, _, err := claim(t, b.store, claimOf("1"))
			waiting <- err
		}()
		requireLockWait(t, b)
		require.NoError(t, holder.Commit(t.Context(), nil))
		require.Equal(t, idempotency.FaultConflict, b.store.Classify(<-waiting), "the snapshot is older than the claim: a fresh transaction finds the duplicate")
		_, record, err := claim(t, b.store, claimOf("1"))
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

func TestTrap30_PoolThatIsTooSmallIsABoundedWait(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 1), postgres.WithAcquireTimeout(500*time.Millisecond))
	tx, _ := b.claim(t, claimOf("1"))
	_, _, err := claim(t, b.store, claimOf("2"))
	require.ErrorIs(t, err, postgres.ErrPoolExhausted)
	require.ErrorContains(t, err, "all 1 are in use: raise pool_max_conns")
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(err))
	require.NoError(t, tx.Rollback(t.Context()))
	tx, _ = b.claim(t, claimOf("2"))
	require.NoError(t, tx.Rollback(t.Context()))
}

// Two messages that each hold the only connections and want one more would wait for each other for ever.
func TestTrap30_HandlersThatTakeASecondConnection(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2), postgres.WithAcquireTimeout(time.Second))
	var nested, inside atomic.Int64
	taken := make(chan struct{})
	handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, _ pgx.Tx, msg *message.Message) ([]*message.Message, error) {
		if inside.Add(1) == 2 {
			close(taken)
		}
		select {
		case <-taken: // both connections
		case <-time.After(10 * time.Second):
			return nil, errors.New("the other message has no connection")
		}
		tx, _, err := b.store.Claim(ctx, claimOf("nested "+msg.UUID))
		if err == nil {
			nested.Add(1)
			err = tx.Rollback(ctx)
		}
		return nil, err
	}))
	errs := make(chan error, 2)
	for i := range cap(errs) {
		go func() {
			_, err := handle(newMessage(fmt.Sprint(i)))
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			require.ErrorIs(t, err, postgres.ErrPoolExhausted)
			require.True(t, idempotency.IsTransient(err), "the message is not at fault")
		}
	}
	require.Less(t, nested.Load(), int64(2))
	require.Zero(t, b.pool.Stat().AcquiredConns())
}

// A unique index that somebody added says nothing about the event: an error, and no duplicate.
func TestTrap04_AnotherUniqueIndexMakesNoDuplicate(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	b.exec(t, "create unique index on {schema}.idempotency_claim (topic)")
	tx, _ := b.claim(t, claimOf("1"))
	require.NoError(t, tx.Commit(t.Context(), nil))
	_, record, err := claim(t, b.store, claimOf("2"))
	require.Nil(t, record)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "23505", pgErr.Code)
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
