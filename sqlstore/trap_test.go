package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

func claimOf(eventID string) idempotency.Claim {
	return idempotency.Claim{Key: idempotency.Key{SubscriberID: "shipping", EventID: eventID}, Topic: "orders"}
}

func newMessage(eventID string) *message.Message {
	msg := message.NewMessage(eventID, nil)
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	return msg
}

// claim claims a new event.
func (b backend) claim(t *testing.T, c idempotency.Claim) (idempotency.Tx, *sql.Tx) {
	t.Helper()
	tx, record, err := b.store.Claim(t.Context(), c)
	require.NoError(t, err)
	require.Nil(t, record)
	raw, ok := tx.Raw().(*sql.Tx)
	require.True(t, ok)
	return tx, raw
}

// middleware is around a handler that returns one message.
func (b backend) middleware(t *testing.T, handler func(ctx context.Context, tx *sql.Tx) error) message.HandlerFunc {
	t.Helper()
	m, err := idempotency.New(b.store, idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(watermill.NopLogger{}))
	require.NoError(t, err)
	return m.Middleware(idempotency.Handler(func(ctx context.Context, tx *sql.Tx, _ *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("produced", nil)}, handler(ctx, tx)
	}))
}

func (b backend) exec(t *testing.T, text string) {
	t.Helper()
	_, err := b.db.ExecContext(t.Context(), strings.ReplaceAll(text, "{schema}", b.schema))
	require.NoError(t, err)
}

// requireCommitted compares what is committed: effects, claims and produced messages.
func (b backend) requireCommitted(t *testing.T, effects, claims, produced int) {
	t.Helper()
	var got [3]int
	for i, table := range []string{"effect", "idempotency_claim", "idempotency_produced_message"} {
		require.NoError(t, b.db.QueryRowContext(t.Context(), "select count(*) from "+b.schema+"."+table).Scan(&got[i]))
	}
	require.Equal(t, [3]int{effects, claims, produced}, got, "effects, claims and produced messages")
}

func TestTrap02_SwallowedSQLErrorIsNotAcked(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 2)
	handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		require.NoError(t, b.Write(ctx, tx, "label"))
		require.Error(t, execute("insert into "+b.schema+".no_such_table values (1)")(ctx, tx))
		return nil
	})
	_, err := handle(newMessage("1"))
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
	require.ErrorContains(t, err, "run it in a savepoint")
	require.False(t, idempotency.IsTransient(err), "it is the handler's failure")
	b.requireCommitted(t, 0, 0, 0)
}

func TestTrap04_ErrorsAreToldByCodeInEveryLanguage(t *testing.T) {
	t.Parallel()
	config := parse(t, pgtest.URLVariable)
	config.RuntimeParams["lc_messages"] = "de_DE.UTF-8"
	b := open(t, config, 4)
	_, err := b.db.ExecContext(t.Context(), "select 1/0")
	require.ErrorContains(t, err, "Division durch Null", "the server does not speak German: is the locale de_DE.UTF-8 installed?")

	c := claimOf("1")
	c.InFlight = idempotency.FailFast()
	tx, raw := b.claim(t, c)
	_, _, err = b.store.Claim(t.Context(), c)
	require.ErrorIs(t, err, idempotency.ErrInFlight)
	require.Error(t, execute("select 1/0")(t.Context(), raw))
	require.ErrorIs(t, tx.Commit(t.Context(), nil), idempotency.ErrRolledBack)

	b.exec(t, "drop table {schema}.idempotency_claim")
	_, record, err := b.store.Claim(t.Context(), c)
	require.Error(t, err)
	require.Nil(t, record, "an error is no duplicate")
}

// The text goes past database/sql, and the method cannot be taken away from a *sql.Tx.
func TestTrap09_HandlerThatEndsTheTransactionIsNotAcked(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		end     func(ctx context.Context, tx any) error
		effects int // committed by the handler, together with the claim
	}{
		"rollback":           {end: execute("rollback")},
		"rollback and chain": {end: execute("rollback and chain")},
		"another begin":      {end: execute("rollback; begin; select pg_current_xact_id()")},
		"mark by hand":       {end: execute("rollback; begin; set local idempotency.claim = 'held'")},
		"Rollback":           {end: callRollback},
		"commit":             {end: execute("commit"), effects: 1},
		"commit and chain":   {end: execute("commit and chain"), effects: 1},
		"Commit":             {end: callCommit, effects: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, parse(t, pgtest.URLVariable), 1) // a leak would block
			handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
				require.NoError(t, b.Write(ctx, tx, "label"))
				return test.end(ctx, tx)
			})
			for range 2 {
				produced, err := handle(newMessage("1"))
				if err == nil { // what the handler committed is a duplicate the second time
					require.Equal(t, 1, test.effects)
					require.Len(t, produced, 1)
					break
				}
				require.ErrorIs(t, err, idempotency.ErrTxEnded)
				require.ErrorContains(t, err, "return an error to roll back, nil to commit")
			}
			b.requireCommitted(t, test.effects, test.effects, test.effects)
		})
	}
}

func TestTrap10_PanicAndGoexitRollBack(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(){"panic": func() { panic("left") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, parse(t, pgtest.URLVariable), 1) // a leak would block
			handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
				require.NoError(t, b.Write(ctx, tx, "label"))
				leave()
				return nil
			})
			for range 2 {
				left := make(chan any, 1)
				go func() {
					defer func() { left <- recover() }()
					_, _ = handle(newMessage("1"))
				}()
				if value := <-left; name == "panic" {
					require.Equal(t, "left", value)
				}
				b.requireCommitted(t, 0, 0, 0)
			}
		})
	}
}

// The server ends a session whose handler takes too long.
func TestTrap10_RollbackOnADeadConnection(t *testing.T) {
	t.Parallel()
	config := parse(t, pgtest.URLVariable)
	config.RuntimeParams["idle_in_transaction_session_timeout"] = "500"
	b := open(t, config, 1)
	for range 2 { // with one connection, a leak would block
		tx, raw := b.claim(t, claimOf("1"))
		require.Eventually(t, func() bool { return b.Write(t.Context(), raw, "late") != nil }, 10*time.Second, 700*time.Millisecond)
		require.NotPanics(t, func() { _ = tx.Rollback(t.Context()) })
	}
	b.requireCommitted(t, 0, 0, 0)
}

// database/sql rolls back when the context of BeginTx ends: a router that closes would undo what a handler has finished.
func TestTrap11_CancelledAfterTheClaimCommits(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 2)
	ctx, cancel := context.WithCancel(t.Context())
	handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		require.NoError(t, b.Write(ctx, tx, "label"))
		cancel()
		return nil
	})
	msg := newMessage("1")
	msg.SetContext(ctx)
	_, err := handle(msg)
	require.NoError(t, err)
	b.requireCommitted(t, 1, 1, 1)

	// One that uses its context once more has not finished, and is rolled back.
	ctx, cancel = context.WithCancel(t.Context())
	handle = b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		cancel()
		return b.Write(ctx, tx, "label")
	})
	msg = newMessage("2")
	msg.SetContext(ctx)
	_, err = handle(msg)
	require.ErrorIs(t, err, context.Canceled)
	b.requireCommitted(t, 1, 1, 1)
}

// What the session had as lock timeout is in force again after a bounded claim, for the handler and for the next claim.
func TestTrap12_BoundedClaimRestoresTheLockTimeout(t *testing.T) {
	t.Parallel()
	config := parse(t, pgtest.URLVariable)
	config.RuntimeParams["lock_timeout"] = "4321"
	b := open(t, config, 1)
	for _, policy := range []idempotency.InFlight{idempotency.Wait(), idempotency.FailFast(), idempotency.WaitAtMost(time.Second)} {
		c := claimOf(fmt.Sprint(policy))
		c.InFlight = policy
		tx, raw := b.claim(t, c)
		var timeout string
		require.NoError(t, raw.QueryRowContext(t.Context(), "show lock_timeout").Scan(&timeout))
		require.Equal(t, "4321ms", timeout)
		require.NoError(t, tx.Commit(t.Context(), nil))
		_, record, err := b.store.Claim(t.Context(), c)
		require.NoError(t, err)
		require.NotNil(t, record)
	}
}

func TestTrap13_ConflictsAreTold(t *testing.T) {
	t.Parallel()
	t.Run("deadlock", func(t *testing.T) {
		t.Parallel()
		b := open(t, parse(t, pgtest.URLVariable), 4)
		b.exec(t, "insert into {schema}.effect values ('a'), ('b')")
		lock := func(tx *sql.Tx, name string) error {
			_, err := tx.ExecContext(t.Context(), "update "+b.schema+".effect set name = name where name = $1", name)
			return err
		}
		first, rawFirst := b.claim(t, claimOf("1"))
		second, rawSecond := b.claim(t, claimOf("2"))
		require.NoError(t, lock(rawFirst, "a"))
		require.NoError(t, lock(rawSecond, "b"))
		crossed := make(chan error, 1)
		go func() { crossed <- lock(rawFirst, "b") }()
		err := lock(rawSecond, "a")
		require.NoError(t, second.Rollback(t.Context()))
		err = errors.Join(err, <-crossed) // the server chooses which of the two fails
		require.Equal(t, idempotency.FaultConflict, b.store.Classify(err), "%v", err)
		require.NoError(t, first.Rollback(t.Context()))
	})
	t.Run("serialization", func(t *testing.T) {
		t.Parallel()
		b := open(t, parse(t, pgtest.URLVariable), 4, sqlstore.WithIsolation(sql.LevelSerializable))
		holder, _ := b.claim(t, claimOf("1"))
		waiting := make(chan error, 1)
		go func() {
			_, _, err := b.store.Claim(t.Context(), claimOf("1"))
			waiting <- err
		}()
		require.Eventually(t, func() bool {
			var waits bool
			err := b.db.QueryRowContext(t.Context(), "select exists (select from pg_stat_activity where wait_event_type = 'Lock'"+
				" and query like '%' || $1 || '%' and pid <> pg_backend_pid())", b.schema).Scan(&waits)
			return err == nil && waits
		}, 10*time.Second, 10*time.Millisecond)
		require.NoError(t, holder.Commit(t.Context(), nil))
		err := <-waiting
		require.Equal(t, idempotency.FaultConflict, b.store.Classify(err), "the snapshot is older than the claim, so the record cannot be seen: %v", err)
		_, record, err := b.store.Claim(t.Context(), claimOf("1"))
		require.NoError(t, err)
		require.NotNil(t, record)
	})
}

func TestTrap30_PoolThatIsTooSmallIsABoundedWait(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 1, sqlstore.WithAcquireTimeout(500*time.Millisecond))
	tx, _ := b.claim(t, claimOf("1"))
	_, _, err := b.store.Claim(t.Context(), claimOf("2"))
	require.ErrorIs(t, err, sqlstore.ErrPoolExhausted)
	require.ErrorContains(t, err, "all 1 are in use: raise SetMaxOpenConns")
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(err))
	require.NoError(t, tx.Rollback(t.Context()))
	tx, _ = b.claim(t, claimOf("2"))
	require.NoError(t, tx.Rollback(t.Context()))
}

// What handlers leave on a pooled connection leads no later claim astray.
func TestTrap35_SessionStateOfAHandler(t *testing.T) {
	t.Parallel()
	for name, left := range map[string]string{
		"search_path":     "set search_path to elsewhere",
		"temporary table": "create temporary table idempotency_claim (subscriber_id text, event_id text, topic text, fingerprint bytea, primary key (subscriber_id, event_id))",
		"functions":       "create function pg_temp.set_config(text, text, bool) returns text language sql as 'select null::text'; set search_path to pg_temp, pg_catalog",
		"types":           "create domain pg_temp.text as pg_catalog.text check (value is null)",
		"advisory lock":   "select pg_advisory_lock(hashtextextended(current_schema(), 0))",
		"lock timeout":    "set lock_timeout to 1",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := parse(t, pgtest.URLVariable)
			schema := pgtest.Schema(t)
			config.RuntimeParams["search_path"] = schema
			db := openDB(t, config, 1)                                                   // the same session each time
			require.NoError(t, sqlstore.Migrate(t.Context(), db, sqlstore.PostgreSQL())) // into the schema of the search path
			store, err := sqlstore.New(t.Context(), db, sqlstore.PostgreSQL())
			require.NoError(t, err)

			tx, _, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.NoError(t, execute(left)(t.Context(), tx.Raw()))
			require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))

			for _, policy := range []idempotency.InFlight{idempotency.Wait(), idempotency.WaitAtMost(time.Second)} {
				c := claimOf("1")
				c.InFlight = policy
				_, record, err := store.Claim(t.Context(), c)
				require.NoError(t, err)
				require.NotNil(t, record, "claimed again, in another table")
				require.Len(t, record.Produced, 1)
				c = claimOf(fmt.Sprint(policy))
				c.InFlight = policy
				tx, record, err = store.Claim(t.Context(), c)
				require.NoError(t, err)
				require.Nil(t, record)
				require.NoError(t, tx.Commit(t.Context(), nil))
			}
			require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
		})
	}
	for name, left := range map[string]string{
		"read only": "set session characteristics as transaction read only",
		"role":      "set role pg_monitor",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, parse(t, pgtest.URLVariable), 1)
			tx, raw := b.claim(t, claimOf("1"))
			require.NoError(t, execute(left)(t.Context(), raw))
			require.NoError(t, tx.Commit(t.Context(), nil))
			_, _, err := b.store.Claim(t.Context(), claimOf("1"))
			require.Error(t, err, "an error, and not a duplicate that was not looked for")
			_, record, err := b.store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err, "the connection is not used again")
			require.NotNil(t, record)
		})
	}
}

// A handler that gives up durability for itself, or leaves a session that has given it up, has its messages acked all the
// same. A deferred trigger sees what is in force at COMMIT.
func TestTrap35_SynchronousCommitIsOnAgain(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 1) // the same session each time
	b.exec(t, `create table {schema}.seen (setting text);
		create function {schema}.look() returns trigger language plpgsql as $$
			begin insert into {schema}.seen values (current_setting('synchronous_commit')); return null; end $$;
		create constraint trigger look after insert on {schema}.effect deferrable initially deferred for each row execute function {schema}.look()`)
	for i, statement := range []string{"set local synchronous_commit = off", "set synchronous_commit = off", "select 1", "set synchronous_commit = local"} {
		tx, raw := b.claim(t, claimOf(fmt.Sprint(i)))
		require.NoError(t, execute(statement)(t.Context(), raw))
		require.NoError(t, b.Write(t.Context(), raw, "label"))
		require.NoError(t, tx.Commit(t.Context(), nil))
	}
	var seen string
	require.NoError(t, b.db.QueryRowContext(t.Context(), "select string_agg(setting, ' ') from "+b.schema+".seen").Scan(&seen))
	require.Equal(t, "on on on local", seen, "local survives a crash of the server")
}

// A unique index that somebody added says nothing about the event: an error, and no duplicate.
func TestTrap04_AnotherUniqueIndexMakesNoDuplicate(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 1)
	b.exec(t, "create unique index on {schema}.idempotency_claim (topic)")
	tx, _ := b.claim(t, claimOf("1"))
	require.NoError(t, tx.Commit(t.Context(), nil))
	for _, policy := range []idempotency.InFlight{idempotency.Wait(), idempotency.WaitAtMost(time.Second)} {
		c := claimOf("2")
		c.InFlight = policy
		_, record, err := b.store.Claim(t.Context(), c)
		require.Nil(t, record)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, "23505", pgErr.Code)
	}
}

func TestTrap36_DeferredConstraintIsAKnownRollback(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 2)
	b.exec(t, "create table {schema}.parent (id int primary key); create table {schema}.child (id int references {schema}.parent deferrable initially deferred)")
	handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		return execute("insert into "+b.schema+".child values (1)")(ctx, tx)
	})
	_, err := handle(newMessage("1"))
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
	require.NotErrorIs(t, err, idempotency.ErrCommitUnknown)
	require.False(t, idempotency.IsTransient(err), "it is the handler's failure")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "23503", pgErr.Code)
	b.requireCommitted(t, 0, 0, 0)
}

func TestTrap36_OpenRowsAreTold(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 1)
	handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, "select * from generate_series(1, 1000)") //nolint:sqlclosecheck,rowserrcheck // the mistake
		require.NoError(t, err)
		require.True(t, rows.Next())
		return nil
	})
	for range 2 {
		_, err := handle(newMessage("1"))
		require.ErrorIs(t, err, idempotency.ErrRolledBack)
		require.ErrorContains(t, err, "rows are still open")
		require.False(t, idempotency.IsTransient(err), "it is the handler's failure")
	}
	b.requireCommitted(t, 0, 0, 0)
}
