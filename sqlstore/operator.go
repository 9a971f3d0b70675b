package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/retention"
)

// Lookup returns the record of an event, with its stored produced messages, or nil if there is no committed claim of it.
func (s *Store) Lookup(ctx context.Context, key idempotency.Key) (record *idempotency.Record, err error) {
	err = s.withConn(ctx, func(conn *sql.Conn) (err error) {
		record, err = s.record(ctx, conn, key)
		return err
	})
	switch {
	case errors.Is(err, errVanished):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("sqlstore: Lookup: %w", because(ctx, err))
	}
	return record, nil
}

// Forget removes the claim of an event and its stored produced messages, and tells whether there was a claim. The event is
// then new: its next delivery, or one that has met the claim and has not returned yet, runs the handler once more. So
// undo by hand what the handler did, or know that it may happen twice. Messages that were stored and not published are
// lost. An instance that keeps records in memory (package dupcache) takes the event for a duplicate for as long as it does.
// On PostgreSQL a delivery that has not committed yet is not affected; on SQLite it is waited for, until ctx ends.
//
// On PostgreSQL the role needs select and delete on both tables.
func (s *Store) Forget(ctx context.Context, key idempotency.Key) (existed bool, err error) {
	err = s.dialect.write(ctx, s.db, &s.config, func(tx *sql.Tx) error {
		for _, text := range s.sql.Forget {
			result, err := tx.ExecContext(ctx, text, key.SubscriberID, key.EventID)
			if err != nil {
				return err
			}
			n, err := result.RowsAffected()
			if err != nil {
				return err
			}
			existed = n > 0
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("sqlstore: Forget: %w", because(ctx, pgschema.ForgetError(err)))
	}
	return existed, nil
}

// Unacked returns events that were claimed at least age ago and have stored produced messages that no ack has confirmed,
// oldest first, at most limit of them. A handler that was removed before it had published leaves such events behind, and
// so does one whose publisher fails for long. [Store.Lookup] shows the messages. Once they are published in another way, or
// are not wanted any more, [Store.Acked] removes them; the claims stay.
func (s *Store) Unacked(ctx context.Context, age time.Duration, limit int) (events []idempotency.UnackedEvent, err error) {
	if limit <= 0 {
		return nil, fmt.Errorf("sqlstore: Unacked: the limit, %d, is not positive", limit)
	}
	err = s.query(ctx, s.sql.Unacked, []any{age.Seconds(), limit}, func(rows *sql.Rows) error {
		var e idempotency.UnackedEvent
		err := rows.Scan(&e.SubscriberID, &e.EventID, &e.Topic, timestamp{&e.ClaimedAt}, &e.Messages)
		events = append(events, e)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("sqlstore: Unacked: %w", because(ctx, err))
	}
	return events, nil
}

// Stats describes what is stored of each subscriber, in the order of their IDs.
//
// On PostgreSQL it takes no longer than it takes to read 40 MB, and the keys of all stored produced messages. Of a larger
// table of claims it reads a random part, and the numbers of claims are estimates ([idempotency.SubscriberStats]); a
// subscriber with few claims may then be missing, but none with unacked events is. On SQLite the numbers are exact and
// both tables are read, which no writer waits for.
func (s *Store) Stats(ctx context.Context) (stats []idempotency.SubscriberStats, err error) {
	percent := 100.0
	var args []any
	if s.sql.Pages != "" {
		var pages int64
		err := s.query(ctx, s.sql.Pages, nil, func(rows *sql.Rows) error { return rows.Scan(&pages) })
		if err != nil {
			return nil, fmt.Errorf("sqlstore: Stats: %w", because(ctx, err))
		}
		percent = retention.Sample(pages)
		args = append(args, percent)
	}
	err = s.query(ctx, s.sql.Stats, args, func(rows *sql.Rows) error {
		e := idempotency.SubscriberStats{Estimated: percent < 100}
		err := rows.Scan(&e.SubscriberID, &e.Claims, timestamp{&e.Oldest}, timestamp{&e.Newest}, &e.Unacked, timestamp{&e.OldestUnacked})
		e.Claims = int64(math.Round(float64(e.Claims) * 100 / percent))
		stats = append(stats, e)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("sqlstore: Stats: %w", because(ctx, err))
	}
	return stats, nil
}

// query calls each for every row.
func (s *Store) query(ctx context.Context, text string, args []any, each func(rows *sql.Rows) error) error {
	return s.withConn(ctx, func(conn *sql.Conn) error {
		rows, err := conn.QueryContext(ctx, text, args...)
		if err != nil {
			return err
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			if err := each(rows); err != nil {
				return err
			}
		}
		return rows.Err()
	})
}
