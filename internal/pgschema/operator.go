package pgschema

import (
	"fmt"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/retention"
	"github.com/watermill-idempotency/idempotency/internal/sqlstate"
)

// Operator returns the statements of retention and of the operator's methods.
func (t Tables) Operator() retention.Statements {
	// The subquery with an offset is executed for each event, by the primary key. A plain join may read all claims, when
	// statistics tell of many unacked events.
	unacked := "(select p.subscriber_id, p.event_id, c.topic, c.claimed_at, p.messages" +
		" from (select subscriber_id, event_id, pg_catalog.count(*) as messages from " + t.Produced + " group by subscriber_id, event_id) p" +
		" left join lateral (select c.topic, c.claimed_at from " + t.Claim + " c" +
		" where c.subscriber_id = p.subscriber_id and c.event_id = p.event_id offset 0) c on true) u"
	const ago = "pg_catalog.now() - pg_catalog.make_interval(secs => $1)"
	return retention.Statements{
		Newest: "select pg_catalog.max(claimed_at) from " + t.Claim + " where claimed_at <= " + ago,
		// Remove must read the index in its order and stop at the limit. With no statistics, or those from before a large
		// purge, the planner would rather read all that is old, and sort it, for each batch.
		Lock: "select pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(" + literal("purge "+t.Claim) + ", 0))" +
			" and pg_catalog.set_config('enable_sort', 'off', true) = 'off'",
		Remove: "with old as (select c.ctid from " + t.Claim + " c where c.claimed_at >= $1 and c.claimed_at < $2" +
			" and not exists (select from " + t.Produced + " p where p.subscriber_id = c.subscriber_id and p.event_id = c.event_id)" +
			" order by c.claimed_at limit $3 for update of c skip locked)," +
			" gone as (delete from " + t.Claim + " where ctid = any (array(select ctid from old)) returning claimed_at)" +
			" select pg_catalog.count(*), pg_catalog.max(claimed_at) from gone",
		CountUnacked: "select pg_catalog.count(*) from " + unacked + " where u.claimed_at < $1",
		// The rows are met in physical order, as in Acked, so that the two do not wait for each other.
		Forget: []string{
			"delete from " + t.Produced + " where ctid = any (array(select ctid from " + t.Produced + " where subscriber_id = $1 and event_id = $2))",
			"delete from " + t.Claim + " where subscriber_id = $1 and event_id = $2",
		},
		Unacked: "select u.subscriber_id, u.event_id, coalesce(u.topic, ''), u.claimed_at, u.messages from " + unacked +
			" where u.claimed_at is null or u.claimed_at <= " + ago + " order by u.claimed_at nulls first limit $2",
		Pages: "select pg_catalog.pg_relation_size(pg_catalog.to_regclass(" + literal(t.Claim) + ")) / pg_catalog.current_setting('block_size')::pg_catalog.int8",
		Stats: "select subscriber_id, pg_catalog.max(claims), pg_catalog.max(oldest), pg_catalog.max(newest), pg_catalog.max(unacked), pg_catalog.max(oldest_unacked) from (" +
			"select subscriber_id, pg_catalog.count(*) as claims, pg_catalog.min(claimed_at) as oldest, pg_catalog.max(claimed_at) as newest," +
			" 0::pg_catalog.int8 as unacked, null::pg_catalog.timestamptz as oldest_unacked from " + t.Claim + " tablesample system ($1) group by subscriber_id" +
			" union all select u.subscriber_id, 0, null, null, pg_catalog.count(*), pg_catalog.min(u.claimed_at) from " + unacked + " group by u.subscriber_id) s" +
			" group by subscriber_id order by subscriber_id",
	}
}

// PurgeError says which privileges a purge needs, if the role lacks one.
func PurgeError(err error) error {
	return privilege(err, "select, delete and update on the table of claims, and select on that of produced messages")
}

// ForgetError is the same for Forget.
func ForgetError(err error) error { return privilege(err, "select and delete on both tables") }

func privilege(err error, needed string) error {
	if sqlstate.Of(err) != sqlstate.InsufficientPrivilege {
		return err
	}
	return fmt.Errorf("%w: the role needs %s: %w", idempotency.ErrPrivilege, needed, err)
}
