// Package sqlstore is the store on database/sql. It imports no driver: which one is used is the service's to say.
//
//	db, err := sql.Open("pgx", url)
//	err = sqlstore.Migrate(ctx, db, sqlstore.PostgreSQL())
//	store, err := sqlstore.New(ctx, db, sqlstore.PostgreSQL())
//	idem, err := idempotency.New(store)
//
// Handlers get a [*sql.Tx]. Commit and Rollback are the middleware's: a [*sql.Tx] cannot refuse them, so they are found
// at the commit, as is the text of COMMIT and ROLLBACK, and the message is not acked ([idempotency.ErrTxEnded]). What the
// handler committed by itself stays, together with the claim; the messages that it returned are stored then, and published
// with the redelivery. Savepoints are the handler's to use.
//
// # Pool size
//
// A message holds a connection from the claim to the commit, also while it waits for another delivery of its event. Give
// the pool as many connections as messages are in flight ([sql.DB.SetMaxOpenConns] and [sql.DB.SetMaxIdleConns]:
// partitions of a Kafka consumer, prefetch count of an AMQP one). Let a handler work on its transaction only: with a second
// connection from the same pool, messages can wait for each other, until [WithAcquireTimeout] ends it with
// [ErrPoolExhausted].
//
// # Contexts
//
// database/sql rolls a transaction back when the context that it began with ends. Transactions of this store begin
// detached: a router that closes does not undo what a handler has finished. BEGIN, COMMIT and ROLLBACK end with the
// context that they were called for as far as the driver watches the context of [sql.DB.BeginTx], as pgx does; they wait
// for a statement that a goroutine of the handler still runs, and for a file system that hangs.
//
// # Retention
//
// Claims are kept for ever, or for as long as [WithRetention] says, if somebody purges: [Store.Clean] in the service, or
// [Store.Purge] from a job. [Store.Stats], [Store.Unacked], [Store.Lookup] and [Store.Forget] are for operators.
//
// # PostgreSQL
//
// The tables and privileges are those of package postgres, and so are the checks of [New]: a service can go from one to
// the other. Package postgres takes fewer round trips. This one takes two more than a plain transaction: the claim, and
// one before the commit that looks whether the transaction is still the one that holds the claim. Messages that a handler
// returns take one more for each hundred, and a duplicate takes four. Bounded claims take no more: they set lock_timeout
// in the statement of the claim, and put it back for the handler;
// [idempotency.FailFast] is 10 ms, because shorter waits would mistake the short locks of any insert for a claim in flight.
//
// A statement that fails aborts the whole transaction, as ever in PostgreSQL: return its error, or run it in a savepoint.
// Rows that the handler leaves open are an error, which says so. A connection that a handler leaves read-only, or in a role
// without privileges, fails one claim with an error and is closed; synchronous_commit that it switches off is on again for
// the commit.
//
// # SQLite
//
// The DSN sets, for every connection, write-ahead logging, a busy timeout and full synchronisation; [New] looks for them:
//
//	// modernc.org/sqlite
//	sql.Open("sqlite", "file:orders.db?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
//	// mattn/go-sqlite3
//	sql.Open("sqlite3", "file:orders.db?_busy_timeout=5000&_journal_mode=WAL&_synchronous=FULL")
//
// SQLite lets one transaction write at a time. A claim takes the database's write lock and the commit gives it back, so
// messages are processed one after the other, whatever the number of connections and processes: let handlers be short, and
// call no other service. The in-flight policies are about that lock: [idempotency.Wait] waits until the context ends,
// and the bounded ones return [idempotency.ErrInFlight] also if another event, or another writer, has the database. The
// claim waits by itself, with a busy timeout of zero, and gives the connection's own back to the handler.
//
// A statement that fails undoes only itself. Those that roll everything back (INSERT OR ROLLBACK, a full disk) are found
// at the commit. A database in memory is for tests: it is gone with its last connection, and with one connection
// messages wait for that, which the in-flight policies do not bound.
package sqlstore
