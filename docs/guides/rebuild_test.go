package guides_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

const rebuildTables = `
create table order_total_v1 (
	customer text primary key,
	total    bigint not null
);

create table order_total_v2 (
	customer text primary key,
	total    bigint not null
);`

// addTotal is not idempotent by itself: a second time, it would add the amount again.
func addTotal(table string) func(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	return func(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
		var order struct {
			Customer string `json:"customer"`
			Amount   int64  `json:"amount"`
		}
		if err := json.Unmarshal(msg.Payload, &order); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, fmt.Sprintf(`
			insert into %[1]s values ($1, $2)
			on conflict (customer) do update set total = %[1]s.total + excluded.total`, table), order.Customer, order.Amount)
		return err
	}
}

// forget deletes the claims of a subscriber that is gone for good, a batch in each transaction.
func forget(ctx context.Context, pool *pgxpool.Pool, subscriberID string) error {
	for {
		tag, err := pool.Exec(ctx, `
			delete from idempotency_claim
			where subscriber_id = $1 and event_id in (
				select event_id from idempotency_claim where subscriber_id = $1 limit 10000)`, subscriberID)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
	}
}

// log is a topic that is kept: what a new consumer group of Kafka reads from the oldest offset.
func log() []*message.Message {
	var kept []*message.Message
	for i, amount := range []int{10, 20, 12} {
		msg := event(fmt.Sprintf("E-%d", i), fmt.Sprintf(`{"customer":"acme","amount":%d}`, amount))
		msg.Metadata.Set("ce_time", time.Now().AddDate(-2, 0, 0).Format(time.RFC3339))
		kept = append(kept, msg)
	}
	return kept
}

func TestRebuildUnderANewSubscriberID(t *testing.T) {
	t.Parallel()
	pool, store := database(t, rebuildTables)
	first, _ := newMiddleware(t, store, idempotency.WithSubscriberID("orders.total.v1"))
	second, err := idempotency.New(store,
		idempotency.WithSubscriberID("orders.total.v2"), // no claim is of this subscriber
		idempotency.WithProduced(idempotency.Refuse()))  // what was published before is not published again
	require.NoError(t, err)
	total := func(table string) int { return value[int](t, pool, "select coalesce(sum(total), 0) from "+table) }

	replay := func(idem *idempotency.Middleware, table string) {
		for _, msg := range log() {
			require.NoError(t, deliver(idem, idempotency.ConsumerHandler(addTotal(table)), msg.Copy()))
		}
	}
	replay(first, "order_total_v1")
	require.Equal(t, 42, total("order_total_v1"))
	replay(first, "order_total_v2")
	require.Zero(t, total("order_total_v2"), "under the old ID all events are duplicates")
	replay(second, "order_total_v2")
	replay(second, "order_total_v2") // a rebuild that starts over
	require.Equal(t, 42, total("order_total_v2"))
	replay(first, "order_total_v1")
	require.Equal(t, 42, total("order_total_v1"), "the old projection lives on")

	require.NoError(t, forget(t.Context(), pool, "orders.total.v1"))
	require.Equal(t, "orders.total.v2 3", value[string](t, pool, "select string_agg(distinct subscriber_id, ',') || ' ' || count(*) from idempotency_claim"))
}

func TestRebuildBeyondTheHorizon(t *testing.T) {
	t.Parallel()
	pool, store := database(t, rebuildTables)
	idem, _ := newMiddleware(t, store, idempotency.WithSubscriberID("orders.total.v2"),
		idempotency.WithReplayHorizon(30*24*time.Hour, idempotency.CloudEventTime()))
	for _, msg := range log() {
		require.ErrorIs(t, deliver(idem, idempotency.ConsumerHandler(addTotal("order_total_v2")), msg), idempotency.ErrBeyondHorizon)
	}
	require.Zero(t, value[int](t, pool, "select count(*) from order_total_v2"))
}

// What handlers return is made anew by a rebuild, and no consumer downstream can tell it from new.
func TestRebuildAndProducedMessages(t *testing.T) {
	t.Parallel()
	pool, store := database(t, rebuildTables)
	add := addTotal("order_total_v2")
	handler := idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("", []byte("total changed"))}, add(ctx, tx, msg)
	})
	produce := func(subscriber string, policy idempotency.Produced) (*message.Message, error) {
		idem, _ := newMiddleware(t, store, idempotency.WithSubscriberID(subscriber), idempotency.WithProduced(policy))
		produced, err := idem.Middleware(handler)(log()[0])
		if err != nil {
			require.Empty(t, produced)
			return nil, err
		}
		require.NoError(t, idem.Flush(t.Context()))
		return produced[0], nil
	}
	one, err := produce("orders.total.v1", idempotency.Replay())
	require.NoError(t, err)
	other, err := produce("orders.total.v2", idempotency.Replay())
	require.NoError(t, err)
	require.NotEqual(t, one.UUID, other.UUID)
	require.NotEqual(t, one.Metadata.Get("event_id"), other.Metadata.Get("event_id"))

	before := value[int](t, pool, "select total from order_total_v2")
	_, err = produce("orders.total.v3", idempotency.Refuse())
	require.ErrorIs(t, err, idempotency.ErrProducedRefused)
	require.Equal(t, before, value[int](t, pool, "select total from order_total_v2"), "it fails before the commit")

	// Derived IDs are the same each time.
	derive := func(msg *message.Message) *message.Message {
		changed := message.NewMessage("", []byte("total changed"))
		changed.Metadata.Set(idempotency.EventIDMetadata, "total-changed/"+msg.Metadata.Get("event_id"))
		return changed
	}
	var ids []string
	for _, subscriber := range []string{"orders.total.v4", "orders.total.v5"} {
		idem, _ := newMiddleware(t, store, idempotency.WithSubscriberID(subscriber))
		produced, err := idem.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			return []*message.Message{derive(msg)}, nil
		})(log()[0])
		require.NoError(t, err)
		ids = append(ids, produced[0].Metadata.Get("event_id"))
	}
	require.Equal(t, []string{"total-changed/E-0", "total-changed/E-0"}, ids)
}
