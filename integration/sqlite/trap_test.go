package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

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
func (b backend) middleware(t *testing.T, handler func(ctx context.Context, tx *sql.Tx) error, opts ...idempotency.Option) message.HandlerFunc {
	t.Helper()
	opts = append(opts, idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(watermill.NopLogger{}))
	m, err := idempotency.New(b.store, opts...)
	require.NoError(t, err)
	return m.Middleware(idempotency.Handler(func(ctx context.Context, tx *sql.Tx, _ *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("produced", nil)}, handler(ctx, tx)
	}))
}

func (b backend) exec(t *testing.T, text string) {
	t.Helper()
	_, err := b.db.ExecContext(t.Context(), text)
	require.NoError(t, err)
}

// requireCommitted compares what is committed: effects, claims and produced messages.
func (b backend) requireCommitted(t *testing.T, effects, claims, produced int) {
	t.Helper()
	var got [3]int
	for i, table := range []string{"effect", "main.idempotency_claim", "main.idempotency_produced_message"} {
		require.NoError(t, b.db.QueryRowContext(t.Context(), "select count(*) from "+table).Scan(&got[i]))
	}
	require.Equal(t, [3]int{effects, claims, produced}, got, "effects, claims and produced messages")
}

func openFile(t *testing.T, conns int, opts ...sqlstore.Option) backend {
	t.Helper()
	return open(t, newFile(t)+"?"+settings, conns, opts...)
}

func TestTrap09_HandlerThatEndsTheTransactionIsNotAcked(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		end     func(ctx context.Context, tx any) error
		effects int // committed by the handler, together with the claim
	}{
		"rollback":      {end: execute("rollback")},
		"another begin": {end: execute("rollback; begin immediate")},
		"Rollback":      {end: callRollback},
		"swallowed error of a statement that rolls back": {end: func(ctx context.Context, tx any) error {
			if err := execute("insert or rollback into effect values (null)")(ctx, tx); err == nil {
				return fmt.Errorf("null was inserted")
			}
			return nil
		}},
		"commit":                 {end: execute("commit"), effects: 1},
		"commit, another begin":  {end: execute("commit; begin immediate"), effects: 1},
		"commit, another insert": {end: execute("commit; begin; savepoint other"), effects: 1},
		"Commit":                 {end: callCommit, effects: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := openFile(t, 1) // a leak would block
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

func TestSavepointsAreTheHandlers(t *testing.T) {
	t.Parallel()
	b := openFile(t, 1)
	handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		for _, text := range []string{
			"savepoint a", "insert into effect values ('undone')", "rollback to a", "insert into effect values ('done')", "release a",
			"savepoint b", "insert into effect values ('left open')",
		} {
			require.NoError(t, execute(text)(ctx, tx))
		}
		require.Error(t, execute("insert into effect values (null)")(ctx, tx), "a failed statement does not undo the others")
		return nil
	})
	_, err := handle(newMessage("1"))
	require.NoError(t, err)
	effects, err := b.Effects(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]int{"done": 1, "left open": 1}, effects)
}

func TestTrap10_PanicAndGoexitRollBack(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(){"panic": func() { panic("left") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := openFile(t, 1) // a leak would block
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

func TestTrap11_CancelledAfterTheClaimCommits(t *testing.T) {
	t.Parallel()
	b := openFile(t, 2)
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

// A claim does not wait in SQLite, whose busy timeout is for the handler's statements and for everything else.
func TestTrap12_ClaimRestoresTheBusyTimeout(t *testing.T) {
	t.Parallel()
	b := open(t, newFile(t)+"?_pragma=busy_timeout(4321)&_pragma=journal_mode(WAL)", 1)
	requireTimeout := func(query func(ctx context.Context, text string, args ...any) *sql.Row) {
		t.Helper()
		var timeout int
		require.NoError(t, query(t.Context(), "pragma busy_timeout").Scan(&timeout))
		require.Equal(t, 4321, timeout)
	}
	for _, policy := range []idempotency.InFlight{idempotency.Wait(), idempotency.WaitAtMost(time.Minute)} {
		c := claimOf(fmt.Sprint(policy))
		c.InFlight = policy
		tx, raw := b.claim(t, c)
		requireTimeout(raw.QueryRowContext)
		require.NoError(t, tx.Commit(t.Context(), nil))
		requireTimeout(b.db.QueryRowContext)
		_, record, err := b.store.Claim(t.Context(), c)
		require.NoError(t, err)
		require.NotNil(t, record)
		requireTimeout(b.db.QueryRowContext)
	}
	// Also after a claim that failed.
	holder, err := openDB(t, b.dsn, 1).BeginTx(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, b.Write(t.Context(), holder, "label"))
	c := claimOf("locked")
	c.InFlight = idempotency.FailFast()
	_, _, err = b.store.Claim(t.Context(), c)
	require.ErrorIs(t, err, idempotency.ErrInFlight)
	require.ErrorContains(t, err, "write lock is taken")
	requireTimeout(b.db.QueryRowContext)
	require.NoError(t, holder.Rollback())
}

// A transaction that has read cannot write once another one has: the snapshot is gone, and a fresh transaction succeeds.
func TestTrap13_OldSnapshotIsAConflict(t *testing.T) {
	t.Parallel()
	b := openFile(t, 2)
	reader, err := b.db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	var n int
	require.NoError(t, reader.QueryRowContext(t.Context(), "select count(*) from effect").Scan(&n))
	b.exec(t, "insert into effect values ('in between')")
	err = b.Write(t.Context(), reader, "label")
	require.Equal(t, idempotency.FaultConflict, b.store.Classify(fmt.Errorf("handler: %w", err)), "%v", err)
	require.NoError(t, reader.Rollback())

	// A lock that is taken is another thing.
	tx, _ := b.claim(t, claimOf("1"))
	impatient := openDB(t, "file:"+fileOf(t, b.db), 1)
	_, err = impatient.ExecContext(t.Context(), "insert into effect values ('label')")
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(err), "%v", err)
	require.NoError(t, tx.Rollback(t.Context()))
}

func fileOf(t *testing.T, db *sql.DB) (file string) {
	t.Helper()
	require.NoError(t, db.QueryRowContext(t.Context(), "select file from pragma_database_list where name = 'main'").Scan(&file))
	return file
}

func TestTrap30_PoolThatIsTooSmallIsABoundedWait(t *testing.T) {
	t.Parallel()
	b := openFile(t, 1, sqlstore.WithAcquireTimeout(500*time.Millisecond))
	tx, _ := b.claim(t, claimOf("1"))
	_, _, err := b.store.Claim(t.Context(), claimOf("2"))
	require.ErrorIs(t, err, sqlstore.ErrPoolExhausted)
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(err))
	require.NoError(t, tx.Rollback(t.Context()))
	tx, _ = b.claim(t, claimOf("2"))
	require.NoError(t, tx.Rollback(t.Context()))
}

// What handlers leave on a pooled connection leads no later claim astray.
func TestTrap35_SessionStateOfAHandler(t *testing.T) {
	t.Parallel()
	b := openFile(t, 1) // the same connection each time
	tx, raw := b.claim(t, claimOf("1"))
	require.NoError(t, execute("create temporary table idempotency_claim (subscriber_id, event_id, topic, fingerprint, primary key (subscriber_id, event_id));"+
		"create temporary table idempotency_produced_message (subscriber_id, event_id, position, uuid, metadata, payload)")(t.Context(), raw))
	require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))
	b.requireCommitted(t, 0, 1, 1)
	_, record, err := b.store.Claim(t.Context(), claimOf("1"))
	require.NoError(t, err)
	require.NotNil(t, record, "claimed again, in another table")
	require.Len(t, record.Produced, 1)

	tx, raw = b.claim(t, claimOf("2"))
	require.NoError(t, execute("pragma query_only = on")(t.Context(), raw))
	require.NoError(t, tx.Commit(t.Context(), nil))
	for _, eventID := range []string{"1", "3"} {
		_, _, err = b.store.Claim(t.Context(), claimOf(eventID))
		require.Error(t, err, "an error, and not a duplicate that was not looked for")
	}
}

func TestTrap36_DeferredConstraintIsAKnownRollback(t *testing.T) {
	t.Parallel()
	b := open(t, newFile(t)+"?_pragma=foreign_keys(1)&"+settings, 1) // a transaction that is left open would block
	b.exec(t, "create table parent (id integer primary key); create table child (id integer references parent deferrable initially deferred)")
	handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		return execute("insert into child values (1)")(ctx, tx)
	})
	for range 2 {
		_, err := handle(newMessage("1"))
		require.ErrorIs(t, err, idempotency.ErrRolledBack)
		require.NotErrorIs(t, err, idempotency.ErrCommitUnknown)
		require.False(t, idempotency.IsTransient(err), "it is the handler's failure")
		b.requireCommitted(t, 0, 0, 0)
	}
}

// SQLite has no trouble with rows that the handler leaves open.
func TestTrap36_OpenRowsAreClosed(t *testing.T) {
	t.Parallel()
	b := openFile(t, 1)
	handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		require.NoError(t, execute("insert into effect values ('a'), ('b'), ('c')")(ctx, tx))
		rows, err := tx.QueryContext(ctx, "select * from effect") //nolint:sqlclosecheck,rowserrcheck // the mistake
		require.NoError(t, err)
		require.True(t, rows.Next())
		return nil
	})
	_, err := handle(newMessage("1"))
	require.NoError(t, err)
	b.requireCommitted(t, 3, 1, 1)
}

// The wait for the write lock is longer than the busy timeout, and takes no luck: whoever begins, the claim's first
// statement writes.
func TestTrap37_ClaimWaitsForTheWriteLock(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"deferred", "immediate"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := open(t, newFile(t)+"?_txlock="+mode+"&_pragma=busy_timeout(1)&_pragma=journal_mode(WAL)", 2)
			holder, err := openDB(t, b.dsn, 1).BeginTx(t.Context(), nil) // another process
			require.NoError(t, err)
			require.NoError(t, b.Write(t.Context(), holder, "of another process"))

			claimed := make(chan error, 1)
			go func() {
				tx, _, err := b.store.Claim(t.Context(), claimOf("1"))
				if err == nil {
					err = tx.Commit(t.Context(), nil)
				}
				claimed <- err
			}()
			select {
			case err := <-claimed:
				require.FailNow(t, "the claim did not wait", "%v", err)
			case <-time.After(200 * time.Millisecond):
			}
			require.NoError(t, holder.Commit())
			require.NoError(t, <-claimed)
			b.requireCommitted(t, 1, 1, 0)
		})
	}
}

// Messages of many workers, and writers beside them, in one database: nobody meets SQLITE_BUSY.
func TestTrap37_ManyWriters(t *testing.T) {
	t.Parallel()
	b := openFile(t, 16)
	handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
		var n int // the handler reads before it writes
		if err := tx.QueryRowContext(ctx, "select count(*) from effect").Scan(&n); err != nil {
			return err
		}
		return b.Write(ctx, tx, "label")
	}, idempotency.WithRetries(0))
	const workers, events = 8, 25
	errs := make(chan error, workers)
	for w := range workers {
		go func() {
			errs <- func() error {
				for i := range events {
					if _, err := handle(newMessage(fmt.Sprint(w/2, i))); err != nil { // each event comes twice
						return err
					}
					if _, err := b.db.ExecContext(t.Context(), "delete from effect where name = 'no such'"); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range workers {
		require.NoError(t, <-errs)
	}
	b.requireCommitted(t, workers/2*events, workers/2*events, workers/2*events)
}
