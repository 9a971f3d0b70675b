package sqlstore

import (
	"context"
	"database/sql"
	"time"
)

func sqliteOperator(claim, produced string) operatorStatements {
	unacked := "(select p.subscriber_id, p.event_id, c.topic, c.claimed_at, p.messages" +
		" from (select subscriber_id, event_id, count(*) as messages from " + produced + " group by subscriber_id, event_id) p" +
		" left join " + claim + " c on c.subscriber_id = p.subscriber_id and c.event_id = p.event_id)"
	const ago = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (-?1) || ' seconds')"
	return operatorStatements{
		newest: "select max(claimed_at) from " + claim + " where claimed_at <= " + ago,
		remove: "delete from " + claim + " where (subscriber_id, event_id) in (select c.subscriber_id, c.event_id from " + claim + " c" +
			" where c.claimed_at >= ?1 and c.claimed_at < ?2" +
			" and not exists (select 1 from " + produced + " p where p.subscriber_id = c.subscriber_id and p.event_id = c.event_id)" +
			" order by c.claimed_at limit ?3) returning claimed_at",
		countUnacked: "select count(*) from " + unacked + " where claimed_at < ?1",
		forget: []string{
			"delete from " + produced + " where subscriber_id = ?1 and event_id = ?2",
			"delete from " + claim + " where subscriber_id = ?1 and event_id = ?2",
		},
		unacked: "select subscriber_id, event_id, coalesce(topic, ''), claimed_at, messages from " + unacked +
			" where claimed_at is null or claimed_at <= " + ago + " order by claimed_at limit ?2", // nulls come first
		stats: "select subscriber_id, max(claims), max(oldest), max(newest), max(unacked), max(oldest_unacked) from (" +
			"select subscriber_id, count(*) as claims, min(claimed_at) as oldest, max(claimed_at) as newest, 0 as unacked, null as oldest_unacked" +
			" from " + claim + " group by subscriber_id" +
			" union all select subscriber_id, 0, null, null, count(*), min(claimed_at) from " + unacked + " group by subscriber_id)" +
			" group by subscriber_id order by subscriber_id",
	}
}

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

func (sqlite) purge(ctx context.Context, tx *sql.Tx, s *operatorStatements, from, before time.Time, limit int) (removed int64, last time.Time, err error) {
	rows, err := tx.QueryContext(ctx, s.remove, sqlite{}.time(from), sqlite{}.time(before), limit)
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
