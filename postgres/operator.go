package postgres

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/retention"
)

// Lookup returns the record of an event, with its stored produced messages, or nil if there is no committed claim of it.
func (s *Store) Lookup(ctx context.Context, key idempotency.Key) (record *idempotency.Record, err error) {
	read := s.sql.readRecord(key, &record)
	err = s.withConn(ctx, func(conn *pgxpool.Conn) error {
		_, err := s.send(ctx, conn.Conn(), read)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("postgres: Lookup: %w", err)
	}
	return record, nil
}

// Forget removes the claim of an event and its stored produced messages, and tells whether there was a claim. The event is
// then new: its next delivery, or one that has met the claim and has not returned yet, runs the handler once more. So
// undo by hand what the handler did, or know that it may happen twice. Messages that were stored and not published are
// lost. An instance that keeps records in memory (package dupcache) takes the event for a duplicate for as long as it does.
// A delivery that has not committed yet is not affected.
//
// The role needs select and delete on both tables.
func (s *Store) Forget(ctx context.Context, key idempotency.Key) (existed bool, err error) {
	err = s.write(ctx, func(tx pgx.Tx) error {
		for _, text := range s.keeper.sql.Forget {
			tag, err := tx.Exec(ctx, text, key.SubscriberID, key.EventID)
			if err != nil {
				return err
			}
			existed = tag.RowsAffected() > 0
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("postgres: Forget: %w", pgschema.ForgetError(err))
	}
	return existed, nil
}

// Unacked returns events that were claimed at least age ago and have stored produced messages that no ack has confirmed,
// oldest first, at most limit of them. A handler that was removed before it had published leaves such events behind, and
// so does one whose publisher fails for long. [Store.Lookup] shows the messages. Once they are published in another way, or
// are not wanted any more, [Store.Acked] removes them; the claims stay.
func (s *Store) Unacked(ctx context.Context, age time.Duration, limit int) (events []idempotency.UnackedEvent, err error) {
	if limit <= 0 {
		return nil, fmt.Errorf("postgres: Unacked: the limit, %d, is not positive", limit)
	}
	err = s.withConn(ctx, func(conn *pgxpool.Conn) error {
		rows, err := conn.Query(ctx, s.keeper.sql.Unacked, age.Seconds(), limit)
		if err != nil {
			return err
		}
		events, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e idempotency.UnackedEvent, err error) {
			var claimedAt *time.Time
			err = row.Scan(&e.SubscriberID, &e.EventID, &e.Topic, &claimedAt, &e.Messages)
			e.ClaimedAt = orZero(claimedAt)
			return e, err
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("postgres: Unacked: %w", err)
	}
	return events, nil
}

// Stats describes what is stored of each subscriber, in the order of their IDs. It takes no longer than it takes to read
// 40 MB, and the keys of all stored produced messages. Of a larger table of claims it reads a random part, and the numbers
// of claims are estimates ([idempotency.SubscriberStats]); a subscriber with few claims may then be missing, but none with
// unacked events is.
func (s *Store) Stats(ctx context.Context) (stats []idempotency.SubscriberStats, err error) {
	err = s.withConn(ctx, func(conn *pgxpool.Conn) error {
		var pages int64
		if err := conn.QueryRow(ctx, s.keeper.sql.Pages).Scan(&pages); err != nil {
			return err
		}
		percent := retention.Sample(pages)
		rows, err := conn.Query(ctx, s.keeper.sql.Stats, percent)
		if err != nil {
			return err
		}
		stats, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (idempotency.SubscriberStats, error) {
			e := idempotency.SubscriberStats{Estimated: percent < 100}
			var oldest, newest, oldestUnacked *time.Time
			err := row.Scan(&e.SubscriberID, &e.Claims, &oldest, &newest, &e.Unacked, &oldestUnacked)
			e.Claims = int64(math.Round(float64(e.Claims) * 100 / percent))
			e.Oldest, e.Newest, e.OldestUnacked = orZero(oldest), orZero(newest), orZero(oldestUnacked)
			return e, err
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("postgres: Stats: %w", err)
	}
	return stats, nil
}
