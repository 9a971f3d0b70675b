package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/metadata"
)

// Store is an [idempotency.Store] on database/sql. Handlers get a [*sql.Tx]. It is safe for concurrent use.
type Store struct {
	db      *sql.DB
	dialect Dialect
	config  config
	sql     statements
}

var _ idempotency.Store = (*Store)(nil)

const (
	// failFast is how long a claim waits for a lock under [idempotency.FailFast]: a shorter wait would mistake the short
	// locks that every insert meets for a claim in flight.
	failFast = 10 * time.Millisecond

	// rollbackTimeout bounds a rollback whose context has ended already.
	rollbackTimeout = 5 * time.Second

	// A bulk statement ends at so many rows, or bytes of payload.
	bulkRows  = 100
	bulkBytes = 1 << 20
)

// New returns a store on the pool, after it has checked what would lose messages later: [idempotency.ErrSchema],
// [idempotency.ErrNotDurable], [idempotency.ErrReadOnly], [idempotency.ErrPrivilege] and [ErrSettings]. It creates no
// tables, see [Migrate]. The pool stays the caller's to close; it needs a connection for each message in flight.
func New(ctx context.Context, db *sql.DB, d Dialect, opts ...Option) (*Store, error) {
	c, err := newConfig(db, d, opts)
	if err != nil {
		return nil, fmt.Errorf("sqlstore: New: %w", err)
	}
	s := &Store{db: db, dialect: d, config: c}
	if s.sql, err = d.open(ctx, db, &c); err != nil {
		return nil, fmt.Errorf("sqlstore: New: %w", because(ctx, err))
	}
	return s, nil
}

// Claim implements [idempotency.Store].
func (s *Store) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	conn, err := acquire(ctx, s.db, s.config.acquireTimeout)
	if err != nil {
		return nil, nil, fmt.Errorf("sqlstore: claim: %w", err)
	}
	t := &tx{conn: conn, store: s, claim: c.Key}
	claimed, err := s.dialect.claim(ctx, t, c)
	if err == nil && claimed {
		return t, nil, nil
	}
	defer func() { _ = t.end(ctx) }()
	if err != nil {
		return nil, nil, fmt.Errorf("sqlstore: claim: %w", because(ctx, err))
	}
	record, err := s.record(ctx, t.tx, c.Key)
	if err != nil {
		return nil, nil, fmt.Errorf("sqlstore: read the record of a duplicate: %w", because(ctx, err))
	}
	return nil, record, nil
}

// acquire takes a connection of its own for a transaction: that has to begin detached from the message's context, and a
// detached wait for the pool would never end.
func acquire(ctx context.Context, db *sql.DB, timeout time.Duration) (*sql.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var conn *sql.Conn
	err := whileBusy(bounded, func() (err error) { // the first connections to a new SQLite file may meet each other
		conn, err = db.Conn(bounded)
		return err
	})
	if err == nil || bounded.Err() == nil || ctx.Err() != nil {
		return conn, because(ctx, err)
	}
	if stats := db.Stats(); stats.MaxOpenConnections > 0 && stats.InUse >= stats.MaxOpenConnections {
		return nil, fmt.Errorf("%w within %v: all %d are in use: raise SetMaxOpenConns to the number of messages in flight, and let handlers take no second connection of this pool",
			ErrPoolExhausted, timeout, stats.MaxOpenConnections)
	}
	return nil, fmt.Errorf("%w within %v: a new one could not be opened: %w", ErrPoolExhausted, timeout, err)
}

// queryer is a transaction or a connection.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// record reads what a duplicate has met.
func (s *Store) record(ctx context.Context, from queryer, key idempotency.Key) (_ *idempotency.Record, err error) {
	rows, err := from.QueryContext(ctx, s.sql.record, key.SubscriberID, key.EventID)
	if err != nil {
		return nil, err
	}
	defer func() {
		if closeErr := rows.Close(); err == nil {
			err = closeErr
		}
	}()
	var record *idempotency.Record
	for rows.Next() {
		r := idempotency.Record{Key: key}
		var uuid sql.NullString
		var encoded, payload []byte
		if err := rows.Scan(timestamp{&r.ClaimedAt}, &r.Topic, &r.Fingerprint, &uuid, &encoded, &payload); err != nil {
			return nil, err
		}
		if record == nil {
			record = &r
		}
		if uuid.Valid {
			msg := message.NewMessage(uuid.String, payload)
			if msg.Metadata, err = metadata.Decode(encoded); err != nil {
				return nil, err
			}
			record.Produced = append(record.Produced, msg)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if record == nil {
		return nil, errVanished
	}
	return record, nil
}

// timestamp scans a time, or the text of one; null is zero.
type timestamp struct{ to *time.Time }

// Scan implements [sql.Scanner].
func (t timestamp) Scan(value any) (err error) {
	switch value := value.(type) {
	case nil:
		*t.to = time.Time{}
	case time.Time:
		*t.to = value
	case string:
		*t.to, err = time.Parse(time.RFC3339, value)
	case []byte:
		*t.to, err = time.Parse(time.RFC3339, string(value))
	default:
		err = fmt.Errorf("claimed_at is a %T", value)
	}
	return err
}

// Acked implements [idempotency.Store], with one statement for each hundred keys.
func (s *Store) Acked(ctx context.Context, keys []idempotency.Key) error {
	keys = slices.Clone(keys)
	slices.SortFunc(keys, func(a, b idempotency.Key) int {
		return cmp.Or(cmp.Compare(a.SubscriberID, b.SubscriberID), cmp.Compare(a.EventID, b.EventID))
	})
	for batch := range slices.Chunk(slices.Compact(keys), bulkRows) {
		args := make([]any, 0, 2*len(batch))
		for _, key := range batch {
			args = append(args, key.SubscriberID, key.EventID)
		}
		if _, err := s.db.ExecContext(ctx, s.sql.acked.text(len(batch)), args...); err != nil {
			return fmt.Errorf("sqlstore: remove the produced messages of %d acked messages: %w", len(keys), because(ctx, err))
		}
	}
	return nil
}
