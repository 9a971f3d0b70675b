// Package postgres is the store on PostgreSQL, through pgx.
//
//	pool, err := pgxpool.New(ctx, url)
//	err = postgres.Migrate(ctx, pool)
//	store, err := postgres.New(ctx, pool)
//	idem, err := idempotency.New(store)
//
// Handlers get a [pgx.Tx]. It refuses Commit and Rollback, which are the middleware's; its Begin gives a savepoint that the
// handler may end. A statement that fails aborts the whole transaction, as ever in PostgreSQL: return its error, or run it
// in a savepoint.
//
// # Cost
//
// BEGIN and the claim go to the server together: a new event takes the round trips of a plain transaction. A duplicate
// takes two, and writes nothing. Messages that a handler returns are stored in the round trip of COMMIT.
//
// # Pool size
//
// A message holds a connection from the claim to the commit, also while it waits for another delivery of its event. Give
// the pool as many connections as messages are in flight: partitions of a Kafka consumer, subscriptions of an AMQP one
// (whatever its prefetch count). Let a handler work on its transaction only: with a second connection from the same pool,
// messages can wait for each other, until [WithAcquireTimeout] ends it with [ErrPoolExhausted].
//
// # Privileges
//
// The service's role needs usage on the schema, select and insert on the claim table, and select, insert and delete on the
// table of produced messages. [Migrate] needs to create. [Store.Purge] and [Store.Clean] need delete and update on the claim
// table as well, and [Store.Forget] delete.
//
// # Retention
//
// Claims are kept for ever, or for as long as [WithRetention] says, if somebody purges: [Store.Clean] in the service, or
// [Store.Purge] from a job. [Store.Stats], [Store.Unacked], [Store.Lookup] and [Store.Forget] are for operators.
//
// # PgBouncer
//
// Transaction pooling works: nothing outlives the transaction. PgBouncer before 1.21 has no prepared statements there: set
// default_query_exec_mode to exec or simple_protocol in the connection string, or pgx.QueryExecModeExec in the pool's
// configuration.
//
// # Waiting for another delivery
//
// [idempotency.Wait] waits in the insert, for as long as the message's context lives, or the session's lock_timeout if one
// is set. The bounded policies set lock_timeout for the claim only, in the same round trip; [idempotency.FailFast] is 10 ms,
// because shorter ones would mistake the short locks of any insert for a claim in flight. The bound holds for each delivery
// that is waited for: where one rolls back and another one takes its place, it begins anew.
//
// # What handlers leave on a connection
//
// Settings, temporary tables and the like that a handler leaves on its connection lead no later claim astray: all statements
// name the schema. A connection that is left read-only, in a role without privileges, or without its prepared statements
// (DEALLOCATE ALL), fails one claim with an error and is closed.
//
// # Durability
//
// A message is acked after its commit, so the commit must last. [New] refuses synchronous_commit=off, unlogged tables, a
// standby and a read-only session, and a handler that switches synchronous_commit off finds it on again for the commit. With asynchronous replication, the promotion of a standby loses the last commits, whose
// messages are acked: use synchronous replication where that is not acceptable.
package postgres
