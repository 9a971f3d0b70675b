package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// Backlog is what waits in an outbox.
type Backlog struct {
	// Messages is the number of committed messages that are not forwarded yet, those of the batch that is under way
	// included.
	Messages int64
	// Age is the time since the oldest of them was stored, by the database's clock; zero if there is none. A transaction
	// that stays open holds it up as a forwarder does that stands still.
	Age time.Duration
}

// ReadBacklog measures the outbox that [WithTopic] names: call it now and then, and raise an alarm if the age grows. It
// reads the messages that wait and no others, and needs select on both tables. db may be stdlib.OpenDBFromPool of pgx. It
// is safe for concurrent use.
func ReadBacklog(ctx context.Context, db *sql.DB, opts ...Option) (Backlog, error) {
	c, err := newConfig(opts)
	if err != nil {
		return Backlog{}, fmt.Errorf("outbox: ReadBacklog: %w", err)
	}
	t, err := c.resolve(ctx, db)
	if err != nil {
		return Backlog{}, fmt.Errorf("outbox: ReadBacklog: %w", err)
	}
	var b Backlog
	var microseconds int64
	err = db.QueryRowContext(ctx, t.backlog()).Scan(&b.Messages, &microseconds)
	if err != nil {
		return Backlog{}, fmt.Errorf("outbox: ReadBacklog: %w", err)
	}
	b.Age = time.Duration(microseconds) * time.Microsecond
	return b, nil
}

// backlog counts what is behind the slowest consumer group, in contrast to forwarded in a way that can use the index.
func (t tables) backlog() string {
	return `with acked as (select last_processed_transaction_id, offset_acked from ` + t.offsets + ` order by 1, 2 limit 1)
		select pg_catalog.count(*), coalesce(extract(epoch from ` + utcNow + ` - pg_catalog.min(m.created_at)) * 1000000, 0)::pg_catalog.int8
		from ` + t.messages + ` m where (m.transaction_id, m."offset") >
		(coalesce((select last_processed_transaction_id from acked), '0'), coalesce((select offset_acked from acked), 0))`
}

// utcNow is for created_at, which has no time zone: its default depends on the session's.
const utcNow = "pg_catalog.timezone('UTC', pg_catalog.statement_timestamp())"
