package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/retention"
	"github.com/watermill-idempotency/idempotency/internal/sqlstate"
)

// PostgreSQL is the dialect of PostgreSQL 13 and newer. The tables are those of package postgres, so that a service can go
// from one to the other. It is tested with the driver pgx/v5/stdlib, and has passed the same suite with lib/pq 1.12.3.
// Others will do if their errors have a method SQLState() string.
func PostgreSQL() Dialect { return postgreSQL{} }

type postgreSQL struct{}

// String implements [fmt.Stringer].
func (postgreSQL) String() string { return "PostgreSQL" }

// claimMark is the number of the transaction: it tells, also after ROLLBACK AND CHAIN, whether the one that is committed
// is the one that holds the claim.
//
// A handler that switches synchronous_commit off, for itself or for what comes after it on the connection, would have
// messages acked that a crash of the server takes back. It is on again for the commit.
const (
	claimMark = "pg_catalog.pg_current_xact_id()::pg_catalog.text"
	findMark  = "select pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text," +
		" case when pg_catalog.current_setting('synchronous_commit') = 'off' then pg_catalog.set_config('synchronous_commit', 'on', true) end"
)

const onConflict = " on conflict (subscriber_id, event_id) do nothing returning " + claimMark

func (postgreSQL) validate(c *config) []error {
	errs := names(c).Validate()
	switch c.isolation {
	case sql.LevelDefault, sql.LevelReadUncommitted, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable:
	case sql.LevelWriteCommitted, sql.LevelSnapshot, sql.LevelLinearizable:
		errs = append(errs, fmt.Errorf("WithIsolation: PostgreSQL has no level %q", c.isolation))
	default:
		errs = append(errs, fmt.Errorf("WithIsolation: %q is not an isolation level", c.isolation))
	}
	return errs
}

func names(c *config) pgschema.Names { return pgschema.Names{Schema: c.schema, Prefix: c.prefix} }

func (postgreSQL) open(ctx context.Context, db *sql.DB, c *config) (statements, error) {
	conn, err := acquire(ctx, db, c.acquireTimeout)
	if err != nil {
		return statements{}, err
	}
	defer func() { _ = conn.Close() }()
	t, err := names(c).Resolve(ctx, pgschema.SQL(conn))
	if err != nil {
		return statements{}, err
	}
	if err := pgschema.Check(ctx, pgschema.SQL(conn), t); err != nil {
		return statements{}, err
	}
	placeholder := func(n int) string { return "$" + strconv.Itoa(n) }
	return statements{
		claim: "insert into " + t.Claim + " (subscriber_id, event_id, topic, fingerprint) values ($1, $2, $3, $4)" +
			onConflict,
		// The lock timeout is set before the row is inserted, and what the session had is put back for the handler.
		bounded: "with bound as materialized (select pg_catalog.current_setting('lock_timeout') as unbound," +
			" pg_catalog.set_config('lock_timeout', $5, true) as bound)" +
			" insert into " + t.Claim + " (subscriber_id, event_id, topic, fingerprint)" +
			" select $1::pg_catalog.text, $2::pg_catalog.text, $3::pg_catalog.text, $4::pg_catalog.bytea from bound" +
			onConflict + ", pg_catalog.set_config('lock_timeout', (select unbound from bound), true)",
		record: "select c.claimed_at, c.topic, c.fingerprint, p.uuid, p.metadata, p.payload from " + t.Claim + " c" +
			" left join " + t.Produced + " p on p.subscriber_id = c.subscriber_id and p.event_id = c.event_id" +
			" where c.subscriber_id = $1 and c.event_id = $2 order by p.position",
		held: "select exists (select from " + t.Claim + " where subscriber_id = $1 and event_id = $2 and xmin = $3::pg_catalog.text::pg_catalog.xid8::pg_catalog.xid)",
		produce: bulk{
			head:    "insert into " + t.Produced + " (subscriber_id, event_id, position, uuid, metadata, payload) values ",
			columns: 6, placeholder: placeholder,
		},
		// Rows are found by place, and so locked in the order of their places: two instances do not wait for each other.
		acked: bulk{
			head: "delete from " + t.Produced + " where ctid = any(array(select ctid from " + t.Produced + " where (subscriber_id, event_id) in (",
			tail: ")))", columns: 2, placeholder: placeholder,
		},
		Statements: t.Operator(),
	}, nil
}

func (postgreSQL) migrate(ctx context.Context, conn *sql.Conn, c *config) error {
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := names(c).Migrate(ctx, pgschema.SQL(tx)); err != nil {
		return err
	}
	return tx.Commit()
}

func (postgreSQL) claim(ctx context.Context, t *tx, c idempotency.Claim) (claimed bool, err error) {
	if err := t.begin(ctx); err != nil {
		return false, err
	}
	limit, bounded := c.InFlight.Limit()
	if bounded {
		var restored string
		err = t.tx.QueryRowContext(ctx, t.store.sql.bounded, c.SubscriberID, c.EventID, c.Topic, nullable(c.Fingerprint), pgschema.LockTimeout(limit)).
			Scan(&t.mark, &restored)
	} else {
		err = t.tx.QueryRowContext(ctx, t.store.sql.claim, c.SubscriberID, c.EventID, c.Topic, nullable(c.Fingerprint)).Scan(&t.mark)
	}
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, sql.ErrNoRows):
		return false, nil
	case sqlstate.IsOfSession(err):
		t.discard(ctx) // the next claim gets a session that nobody has changed
	case bounded && sqlstate.Of(err) == sqlstate.LockNotAvailable:
		return false, fmt.Errorf("%w after %v: %w", idempotency.ErrInFlight, limit, err)
	}
	return false, err
}

// nullable lets no driver mistake nil for empty.
func nullable(b []byte) any {
	if b == nil {
		return nil
	}
	return b
}

func (postgreSQL) guard(ctx context.Context, t *tx) error {
	var mark, on sql.NullString
	err := t.tx.QueryRowContext(ctx, findMark).Scan(&mark, &on)
	switch code := sqlstate.Of(err); {
	case err == nil && mark.String == t.mark:
		return nil
	case err == nil:
		return errUnmarked
	case errors.Is(err, sql.ErrTxDone):
		return err
	case code == sqlstate.InFailedTransaction:
		return fmt.Errorf("%w: %w", errAborted, err)
	case code == "" && ctx.Err() == nil && t.rollback(ctx) == nil && t.conn.PingContext(ctx) == nil:
		// The connection is well, once database/sql has closed the rows. Drivers say of it what would read as a lost one.
		return fmt.Errorf("%w: %v", errBusy, err) //nolint:errorlint // see above
	}
	return err
}

// uncommitted is true if the server has answered with an error and goes on. After the other ones the session is gone, and
// the commit may have come first.
func (postgreSQL) uncommitted(_ context.Context, _ *tx, err error) bool {
	code := sqlstate.Of(err)
	if code == "" {
		return false
	}
	for _, class := range []string{"08", "53", "57P", "58", "F0", "XX"} {
		if strings.HasPrefix(code, class) {
			return false
		}
	}
	return true
}

func (postgreSQL) classify(err error) (fault idempotency.Fault, known bool) {
	code := sqlstate.Of(err)
	return sqlstate.Classify(code), code != ""
}

// write has an isolation level and an access mode of its own: those that a handler has left in the session may make it fail
// for no reason.
func (postgreSQL) write(ctx context.Context, db *sql.DB, c *config, do func(tx *sql.Tx) error) error {
	conn, err := acquire(ctx, db, c.acquireTimeout)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return inTx(ctx, conn, sql.LevelReadCommitted, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "set transaction read write"); err != nil {
			return err
		}
		return do(tx)
	})
}

func (postgreSQL) purge(ctx context.Context, tx *sql.Tx, s *retention.Statements, from, before time.Time, limit int) (removed int64, last time.Time, err error) {
	var locked bool
	if err := tx.QueryRowContext(ctx, s.Lock).Scan(&locked); err != nil {
		return 0, last, err
	}
	if !locked {
		return 0, last, retention.ErrElsewhere
	}
	err = tx.QueryRowContext(ctx, s.Remove, from, before, limit).Scan(&removed, timestamp{&last})
	return removed, last, err
}

func (postgreSQL) time(t time.Time) any { return t }
