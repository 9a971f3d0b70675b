package guides_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

const orderingTables = `
create table order_state (
	order_id text primary key,
	status   text not null default '',
	version  bigint not null default 0
);`

var errTooEarly = errors.New("an event before this one has not come yet")

// applyInSequence takes the events of an order one by one: each is exactly one version.
func applyInSequence(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	var order Order
	if err := json.Unmarshal(msg.Payload, &order); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `insert into order_state (order_id) values ($1) on conflict do nothing`, order.OrderID); err != nil {
		return err
	}
	var version int64
	err := tx.QueryRow(ctx, `select version from order_state where order_id = $1 for update`, order.OrderID).Scan(&version)
	switch {
	case err != nil:
		return err
	case order.Version <= version: // stale
		return nil
	case order.Version > version+1: // no ack: it comes again, and its predecessor meanwhile
		return fmt.Errorf("order %q, version %d after %d: %w", order.OrderID, order.Version, version, errTooEarly)
	}
	_, err = tx.Exec(ctx, `update order_state set status = $2, version = $3 where order_id = $1`, order.OrderID, order.Status, order.Version)
	return err
}

// overwrite is what a handler without versions does.
func overwrite(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	var order Order
	if err := json.Unmarshal(msg.Payload, &order); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `
		insert into order_state (order_id, status) values ($1, $2)
		on conflict (order_id) do update set status = excluded.status`, order.OrderID, order.Status)
	return err
}

func state(version int64, status string) *message.Message {
	return event(fmt.Sprintf("E-%d", version), fmt.Sprintf(`{"orderId":"O-104","status":%q,"version":%d}`, status, version))
}

const status = "select status from order_state"

// A duplicate that comes late changes nothing; an event that comes late for the first time does, if the handler lets it.
func TestLateDuplicateAndLateEvent(t *testing.T) {
	t.Parallel()
	pool, store := database(t, orderingTables)
	idem, _ := newMiddleware(t, store, idempotency.WithSubscriberID("orders.state.v1"))
	handler := idempotency.ConsumerHandler(overwrite)
	for _, msg := range []*message.Message{state(1, "placed"), state(3, "cancelled"), state(1, "placed")} {
		require.NoError(t, deliver(idem, handler, msg))
	}
	require.Equal(t, "cancelled", value[string](t, pool, status))
	require.NoError(t, deliver(idem, handler, state(2, "paid")))
	require.Equal(t, "paid", value[string](t, pool, status), "the order of deliveries counts, not that of events")
}

func TestEventsAreTakenInSequence(t *testing.T) {
	t.Parallel()
	pool, store := database(t, orderingTables)
	idem, observed := newMiddleware(t, store, idempotency.WithSubscriberID("orders.state.v1"))
	handler := idempotency.ConsumerHandler(applyInSequence)
	require.NoError(t, deliver(idem, handler, state(1, "placed")))
	err := deliver(idem, handler, state(3, "cancelled"))
	require.ErrorIs(t, err, errTooEarly)
	require.Equal(t, "placed", value[string](t, pool, status))
	require.NoError(t, deliver(idem, handler, state(2, "paid")))
	require.NoError(t, deliver(idem, handler, state(3, "cancelled")), "the failed attempt has left no claim")
	require.NoError(t, deliver(idem, handler, event("E-4", `{"orderId":"O-104","status":"paid","version":2}`)))
	require.Equal(t, "cancelled", value[string](t, pool, status))
	require.Equal(t, []idempotency.Outcome{
		idempotency.Processed, idempotency.HandlerFailed, idempotency.Processed, idempotency.Processed, idempotency.Processed,
	}, observed.outcomes())
}
