package postgres

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/retention"
)

// keeper is what retention and the operator's methods need.
type keeper struct {
	retention *time.Duration
	sql       retention.Statements
}

// Retention returns how long claims are kept, and whether [WithRetention] says so. The middleware compares it with
// [idempotency.WithReplayHorizon].
func (s *Store) Retention() (d time.Duration, ok bool) {
	if s.keeper.retention == nil {
		return 0, false
	}
	return *s.keeper.retention, true
}

// Purge removes the claims that are older than [WithRetention] says, oldest first, 1,000 in a transaction, with a pause
// after each that is as long as it took. It goes on until none is left, ctx ends or a batch fails, and tells what is
// surely done also then. It may run at any time, beside claims and in many instances: one batch runs at a time, and it waits for no
// lock and lets no claim of a younger event wait.
//
// Age is counted back from the newest claim that is an hour old, or as old as the retention if that is shorter, and not
// from now. While no claims are made, nothing grows old, and after a downtime of the consumers, the broker or the database
// it takes an hour until that counts: so an event that was processed and not acked before the downtime is found to be a
// duplicate when it is delivered again after it, however long it was. The rule sees the whole table: where one subscriber
// stands still and others do not, its claims grow old, and the retention must be longer than that lasts.
//
// Claims with stored produced messages are kept, however old, and counted in [idempotency.Purged]: nobody has confirmed
// that the messages are published, and the next duplicate would publish them. [Store.Unacked] lists them, and
// [Store.Acked] removes the messages.
//
// Space that is freed is used for new claims. The role needs select, delete and update on the table of claims, the last
// one to skip what is locked, and select on that of produced messages.
func (s *Store) Purge(ctx context.Context) (idempotency.Purged, error) {
	purged, err := retention.Purge(ctx, engine{s}, s.keeper.retention)
	if err != nil {
		return purged, fmt.Errorf("postgres: Purge: %w", pgschema.PurgeError(err))
	}
	return purged, nil
}

// Clean calls [Store.Purge] again and again until ctx ends, and then returns nil. It blocks: run it in a goroutine, in
// every instance or in some. The first purge comes after a random part of the interval, the others after the interval and
// up to a quarter more; after failures in a row the interval is doubled each time, up to 16 times of it. A minute or more
// fits most services.
//
// The logger is told once when purging begins to fail (Error) and when it succeeds again (Info), of what is removed
// (Debug), and of events older than the retention whose produced messages no ack has confirmed, when their number has
// grown (Error).
//
// An error is returned at once, and is about the arguments or a missing [WithRetention].
func (s *Store) Clean(ctx context.Context, interval time.Duration, logger watermill.LoggerAdapter) error {
	err := retention.ErrUnlimited
	if s.keeper.retention != nil {
		err = retention.Clean(ctx, interval, logger, s.Purge)
	}
	if err != nil {
		return fmt.Errorf("postgres: Clean: %w", err)
	}
	return nil
}

// engine makes a [retention.Engine] of a store.
type engine struct{ *Store }

// Newest implements [retention.Engine].
func (e engine) Newest(ctx context.Context, age time.Duration) (time.Time, error) {
	var newest *time.Time
	err := e.withConn(ctx, func(conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, e.keeper.sql.Newest, age.Seconds()).Scan(&newest)
	})
	return orZero(newest), err
}

// Remove implements [retention.Engine].
func (e engine) Remove(ctx context.Context, from, before time.Time, limit int) (removed int64, last time.Time, err error) {
	var youngest *time.Time
	err = e.write(ctx, func(tx pgx.Tx) error {
		var locked bool
		if err := tx.QueryRow(ctx, e.keeper.sql.Lock).Scan(&locked); err != nil {
			return err
		}
		if !locked {
			return retention.ErrElsewhere
		}
		return tx.QueryRow(ctx, e.keeper.sql.Remove, from, before, limit).Scan(&removed, &youngest)
	})
	if err != nil {
		return 0, time.Time{}, err
	}
	return removed, orZero(youngest), nil
}

// CountUnacked implements [retention.Engine].
func (e engine) CountUnacked(ctx context.Context, before time.Time) (n int64, err error) {
	err = e.withConn(ctx, func(conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, e.keeper.sql.CountUnacked, before).Scan(&n)
	})
	return n, err
}

func (s *Store) withConn(ctx context.Context, do func(conn *pgxpool.Conn) error) error {
	conn, err := s.acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	return do(conn)
}

// write runs do in a transaction with an isolation level and an access mode of its own: those that a handler has left in the
// session may make it fail for no reason.
func (s *Store) write(ctx context.Context, do func(tx pgx.Tx) error) error {
	return s.withConn(ctx, func(conn *pgxpool.Conn) error {
		return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, do)
	})
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}
