package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/metadata"
	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/sqlstate"
)

// Store is an [idempotency.Store] on PostgreSQL. Handlers get a [pgx.Tx]. It is safe for concurrent use.
type Store struct {
	pool           *pgxpool.Pool
	acquireTimeout time.Duration
	sql            statements
	nothing        *pgx.Batch // begins a transaction of pgx, and sends nothing
	prepares       bool       // see send
	keeper         keeper
}

var _ idempotency.Store = (*Store)(nil)

type statements struct {
	begin, claim, record, produce, held, acked string
}

const (
	// A bounded claim sets the lock timeout for itself, and puts back what the session had, for the handler.
	boundWait   = "select pg_catalog.set_config('idempotency.lock_timeout', pg_catalog.current_setting('lock_timeout'), true), pg_catalog.set_config('lock_timeout', $1, true)"
	unboundWait = "select pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('idempotency.lock_timeout'), true)"

	// The number of the transaction is the mark that the commit looks for, in its own round trip: a handler that executes
	// ROLLBACK (or COMMIT) AND CHAIN as text, or begins another transaction, would have its message acked with nothing done.
	// A savepoint that the commit releases would do as well, and use up two transaction IDs for each message.
	//
	// A handler that switches synchronous_commit off, for itself or for what comes after it on the connection, would have
	// messages acked that a crash of the server takes back. It is on again for the commit.
	//
	// The check is a statement of its own, because one with a plan that is kept takes the server a fifth of the time.
	mark  = "pg_catalog.pg_current_xact_id()::pg_catalog.text"
	check = "select 1 / (pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text is not distinct from $1::pg_catalog.text)::int," +
		" case when pg_catalog.current_setting('synchronous_commit') = 'off' then pg_catalog.set_config('synchronous_commit', 'on', true) end"

	// With a semicolon, they are not the texts that pgx uses: those stay unprepared on the connection, and work on one
	// without its prepared statements.
	commits         = "commit;"
	endsUncommitted = "rollback;"
)

// New returns a store on the pool, after it has checked what would lose messages later: [idempotency.ErrSchema],
// [idempotency.ErrNotDurable], [idempotency.ErrReadOnly] and [idempotency.ErrPrivilege]. It creates no tables, see
// [Migrate]. The pool stays the caller's to close; it needs a connection for each message in flight.
func New(ctx context.Context, pool *pgxpool.Pool, opts ...Option) (*Store, error) {
	if pool == nil {
		return nil, errors.New("postgres: New: the pool is nil")
	}
	c, err := newConfig(opts)
	if err != nil {
		return nil, fmt.Errorf("postgres: New: %w", err)
	}
	t, err := c.names.Resolve(ctx, db{pool})
	if err != nil {
		return nil, fmt.Errorf("postgres: New: %w", err)
	}
	if err := pgschema.Check(ctx, db{pool}, t); err != nil {
		return nil, fmt.Errorf("postgres: New: %w", err)
	}
	prepares, err := preparesStatements(ctx, pool)
	if err != nil {
		return nil, fmt.Errorf("postgres: New: %w", err)
	}
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: c.isolation})
	begin := batch.QueuedQueries[0].SQL + ";"
	batch.QueuedQueries = nil
	return &Store{
		pool:           pool,
		acquireTimeout: c.acquireTimeout,
		nothing:        batch,
		prepares:       prepares,
		keeper:         keeper{retention: c.retention, sql: t.Operator()},
		sql: statements{
			begin: begin,
			claim: "insert into " + t.Claim + " (subscriber_id, event_id, topic, fingerprint) values ($1, $2, $3, $4)" +
				" on conflict (subscriber_id, event_id) do nothing returning " + mark,
			// One statement, so that the record and its messages are seen at one time, and for the price of one.
			record: "select c.claimed_at, c.topic, c.fingerprint, p.uuid, p.metadata, p.payload from " + t.Claim + " c" +
				" left join " + t.Produced + " p on p.subscriber_id = c.subscriber_id and p.event_id = c.event_id" +
				" where c.subscriber_id = $1 and c.event_id = $2 order by p.position",
			produce: "insert into " + t.Produced + " (subscriber_id, event_id, position, uuid, metadata, payload)" +
				" select $1, $2, m.position, m.uuid, m.metadata, m.payload" +
				" from rows from (pg_catalog.unnest($3::text[]), pg_catalog.unnest($4::bytea[]), pg_catalog.unnest($5::bytea[])) with ordinality m (uuid, metadata, payload, position)",
			held: "select exists (select from " + t.Claim + " where subscriber_id = $1 and event_id = $2 and xmin = $3::pg_catalog.text::pg_catalog.xid8::pg_catalog.xid)",
			// Without "for update", which would need the privilege to update. The rows are met in physical order, so that
			// two instances do not wait for each other.
			acked: "delete from " + t.Produced + " where ctid = any (array(select p.ctid from " + t.Produced + " p" +
				" join (select distinct subscriber_id, event_id from rows from (pg_catalog.unnest($1::text[]), pg_catalog.unnest($2::text[])) k (subscriber_id, event_id)) k" +
				" on p.subscriber_id = k.subscriber_id and p.event_id = k.event_id))",
		},
	}, nil
}

// Claim implements [idempotency.Store]: BEGIN and the insert take one round trip, a duplicate one more.
func (s *Store) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	conn, err := s.acquire(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("postgres: claim: %w", err)
	}
	t := &tx{store: s, conn: conn, claim: c.Key, begun: conn.SendBatch(ctx, s.nothing)}
	claimed, err := t.begin(ctx, c)
	if claimed {
		return t, nil, nil
	}
	var record *idempotency.Record
	if err == nil {
		record, err = t.duplicate(ctx)
	}
	if sqlstate.IsOfSession(err) {
		_ = conn.Conn().Close(ctx) // the next claim gets a session that nobody has changed
	}
	_ = t.end(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("postgres: claim: %w", err)
	}
	return nil, record, nil
}

func (s *Store) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, s.acquireTimeout)
	defer cancel()
	conn, err := s.pool.Acquire(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("%w within %v: all %d are in use: raise pool_max_conns to the number of messages in flight, and let handlers take no second connection of this pool",
			ErrPoolExhausted, s.acquireTimeout, s.pool.Config().MaxConns)
	}
	return conn, err
}

// begin begins the transaction and inserts the claim. It returns false for a duplicate.
func (t *tx) begin(ctx context.Context, c idempotency.Claim) (claimed bool, err error) {
	sql := &t.store.sql
	begin := statement{sql: sql.begin}
	claim := statement{sql.claim, []any{c.SubscriberID, c.EventID, c.Topic, c.Fingerprint}, func(rows pgx.Rows) error {
		if claimed = rows.Next(); claimed {
			t.mark = string(rows.RawValues()[0])
		}
		return nil
	}}
	if limit, bounded := c.InFlight.Limit(); bounded {
		bound := statement{sql: boundWait, args: []any{pgschema.LockTimeout(limit)}}
		_, err = t.send(ctx, begin, bound, claim, statement{sql: unboundWait})
	} else {
		_, err = t.send(ctx, begin, claim)
	}
	if err != nil {
		return false, claimError(err, c.InFlight)
	}
	return claimed, nil
}

// duplicate reads the record and ends the transaction, in one round trip.
func (t *tx) duplicate(ctx context.Context) (*idempotency.Record, error) {
	var record *idempotency.Record
	if _, err := t.send(ctx, t.store.sql.readRecord(t.claim, &record), statement{sql: endsUncommitted}); err != nil {
		return nil, fmt.Errorf("read the record of a duplicate: %w", err)
	}
	if record == nil {
		return nil, errVanished
	}
	return record, nil
}

// readRecord reads a record, with its messages; it stays nil if there is none.
func (s *statements) readRecord(key idempotency.Key, record **idempotency.Record) statement {
	return statement{s.record, []any{key.SubscriberID, key.EventID}, func(rows pgx.Rows) error {
		for rows.Next() {
			r := &idempotency.Record{Key: key}
			var uuid *string // null if nothing is stored
			var encoded, payload []byte
			if err := rows.Scan(&r.ClaimedAt, &r.Topic, &r.Fingerprint, &uuid, &encoded, &payload); err != nil {
				return err
			}
			if *record == nil {
				*record = r
			}
			if uuid == nil {
				continue
			}
			decoded, err := metadata.Decode(encoded)
			if err != nil {
				return err
			}
			msg := message.NewMessage(*uuid, payload)
			msg.Metadata = decoded
			(*record).Produced = append((*record).Produced, msg)
		}
		return rows.Err()
	}}
}

// Acked implements [idempotency.Store], with one statement.
func (s *Store) Acked(ctx context.Context, keys []idempotency.Key) error {
	subscriberIDs := make([]string, len(keys))
	eventIDs := make([]string, len(keys))
	for i, key := range keys {
		subscriberIDs[i], eventIDs[i] = key.SubscriberID, key.EventID
	}
	if _, err := s.pool.Exec(ctx, s.sql.acked, subscriberIDs, eventIDs); err != nil {
		return fmt.Errorf("postgres: remove the produced messages of %d acked messages: %w", len(keys), err)
	}
	return nil
}
