package sqlstore

import (
	"context"
	"database/sql"
	"time"

	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/retention"
)

func postgreSQLOperator(t pgschema.Tables) operatorStatements {
	o := t.Operator()
	return operatorStatements{
		newest: o.Newest, lock: o.Lock, remove: o.Remove, countUnacked: o.CountUnacked,
		forget: []string{o.Forget}, unacked: o.Unacked, pages: o.Pages, stats: o.Stats,
	}
}

// write has an isolation level of its own: the session's default may be one that makes it fail for no reason.
func (postgreSQL) write(ctx context.Context, db *sql.DB, c *config, do func(tx *sql.Tx) error) error {
	conn, err := acquire(ctx, db, c.acquireTimeout)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return inTx(ctx, conn, sql.LevelReadCommitted, do)
}

func (postgreSQL) purge(ctx context.Context, tx *sql.Tx, s *operatorStatements, from, before time.Time, limit int) (removed int64, last time.Time, err error) {
	var locked bool
	if err := tx.QueryRowContext(ctx, s.lock).Scan(&locked); err != nil {
		return 0, last, err
	}
	if !locked {
		return 0, last, retention.ErrElsewhere
	}
	err = tx.QueryRowContext(ctx, s.remove, from, before, limit).Scan(&removed, timestamp{&last})
	return removed, last, err
}

func (postgreSQL) time(t time.Time) any { return t }
