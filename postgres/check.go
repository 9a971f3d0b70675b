package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// What is found when a store opens. Each would lose or double messages later, or fail each of them.
var (
	// ErrSchema means that the tables are missing, or not what this version needs.
	ErrSchema = errors.New("the tables are not as they must be")
	// ErrNotDurable means that a commit does not survive a crash of the server: synchronous_commit is off, or a table is
	// unlogged. The message would be acked and its effect lost.
	ErrNotDurable = errors.New("commits are not durable")
	// ErrReadOnly means that the server or the session cannot write.
	ErrReadOnly = errors.New("the database is read-only")
	// ErrPrivilege means that the role lacks a privilege on the tables.
	ErrPrivilege = errors.New("a privilege is missing")
)

// check looks at what a session of the pool meets: settings of the database and the role count.
func check(ctx context.Context, pool *pgxpool.Pool, t tables) error {
	var synchronousCommit, readOnly string
	var recovery bool
	err := pool.QueryRow(ctx, `select pg_catalog.current_setting('synchronous_commit'),
		pg_catalog.current_setting('transaction_read_only'), pg_catalog.pg_is_in_recovery()`).
		Scan(&synchronousCommit, &readOnly, &recovery)
	if err != nil {
		return err
	}
	switch {
	case recovery:
		return fmt.Errorf("%w: the server is a standby: connect to the primary (target_session_attrs=read-write)", ErrReadOnly)
	case readOnly == "on":
		return fmt.Errorf("%w: transactions are read-only by default: set default_transaction_read_only=off for this role or connection", ErrReadOnly)
	case synchronousCommit == "off":
		return fmt.Errorf("%w: synchronous_commit is off, so that a crash loses commits whose messages are acked: set it to on for this role or connection", ErrNotDurable)
	}
	if err := checkTable(ctx, pool, t.claim, []string{"subscriber_id", "event_id"}, "claimed_at", "topic", "fingerprint"); err != nil {
		return err
	}
	return checkTable(ctx, pool, t.produced, []string{"subscriber_id", "event_id", "position"}, "uuid", "metadata", "payload")
}

func checkTable(ctx context.Context, pool *pgxpool.Pool, table string, key []string, others ...string) error {
	var (
		oid         *uint32
		persistence string
		columns     []string
		primaryKey  []string
		collations  []string
		privileged  bool
	)
	err := pool.QueryRow(ctx, `select c.oid, c.relpersistence::text,
		array(select a.attname::text from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
		array(select a.attname::text from pg_catalog.pg_index i, pg_catalog.unnest(i.indkey) with ordinality k (attnum, n), pg_catalog.pg_attribute a
			where i.indrelid = c.oid and i.indisprimary and i.indisvalid and a.attrelid = c.oid and a.attnum = k.attnum order by k.n),
		array(select l.collname::text from pg_catalog.pg_attribute a join pg_catalog.pg_collation l on l.oid = a.attcollation
			where a.attrelid = c.oid and a.attname in ('subscriber_id', 'event_id')),
		pg_catalog.has_table_privilege(c.oid, 'insert') and pg_catalog.has_table_privilege(c.oid, 'select')
		from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass($1)`, table).
		Scan(&oid, &persistence, &columns, &primaryKey, &collations, &privileged)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("%w: %s does not exist: call postgres.Migrate with the same options, or run its statements", ErrSchema, table)
	case err != nil:
		return err
	case !slices.Equal(primaryKey, key):
		return fmt.Errorf("%w: the primary key of %s is %v, not %v: without it duplicates are processed", ErrSchema, table, primaryKey, key)
	case !slices.Equal(collations, []string{"C", "C"}):
		return fmt.Errorf(`%w: subscriber_id and event_id of %s have the collations %v, not "C"`, ErrSchema, table, collations)
	case persistence != "p":
		return fmt.Errorf("%w: %s is not a permanent table (relpersistence %q): alter table %s set logged", ErrNotDurable, table, persistence, table)
	case !privileged:
		return fmt.Errorf("%w: the role needs select and insert on %s", ErrPrivilege, table)
	}
	for _, column := range others {
		if !slices.Contains(columns, column) {
			return fmt.Errorf("%w: %s has no column %q: call postgres.Migrate of this version", ErrSchema, table, column)
		}
	}
	return nil
}
