package sqlstore

import (
	"context"
	"database/sql"
	"time"

	"github.com/watermill-idempotency/idempotency/internal/retention"
)

// write waits as a claim does. The first statement of do must be one that writes, so that it waits for the lock before the
// transaction has read anything.
func (d sqlite) write(ctx context.Context, db *sql.DB, c *config, do func(tx *sql.Tx) error) error {
	conn, err := acquire(ctx, db, c.acquireTimeout)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	restore, err := withoutBusyTimeout(ctx, conn)
	if err != nil {
		return err
	}
	err = whileBusy(ctx, func() error { return inTx(ctx, conn, sql.LevelDefault, do) })
	if restoreErr := restore(); err == nil {
		err = restoreErr
	}
	return err
}

func (sqlite) purge(ctx context.Context, tx *sql.Tx, s *retention.Statements, from, before time.Time, limit int) (removed int64, last time.Time, err error) {
	rows, err := tx.QueryContext(ctx, s.Remove, sqlite{}.time(from), sqlite{}.time(before), limit)
	if err != nil {
		return 0, last, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var claimedAt time.Time
		if err := rows.Scan(timestamp{&claimedAt}); err != nil {
			return 0, last, err
		}
		removed++
		if claimedAt.After(last) {
			last = claimedAt
		}
	}
	return removed, last, rows.Err()
}

// time is the form of the column's default, which is compared as text.
func (sqlite) time(t time.Time) any { return t.UTC().Format("2006-01-02T15:04:05.000Z") }
