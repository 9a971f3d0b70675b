package guides_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

const identityTables = `
create table shipping_label (
	order_id text not null,
	kind     text not null
);

create unique index shipping_label_initial on shipping_label (order_id) where kind = 'initial';

create table order_projection (
	order_id text primary key,
	status   text not null,
	version  bigint not null
);`

// Order is the payload of all events about an order.
type Order struct {
	OrderID string `json:"orderId"`
	Status  string `json:"status"`
	Version int64  `json:"version"`
}

func createInitialLabel(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	var order Order
	if err := json.Unmarshal(msg.Payload, &order); err != nil {
		return err
	}
	tag, err := tx.Exec(ctx, `
		insert into shipping_label (order_id, kind) values ($1, 'initial')
		on conflict (order_id) where kind = 'initial' do nothing`, order.OrderID)
	if err != nil {
		return err
	}
	if tag.RowsAffected() == 0 { // another event has made the label: tell, and ack
		slog.WarnContext(ctx, "order has its label already", "order", order.OrderID, "event", msg.Metadata.Get("event_id"))
	}
	return nil
}

var errHasLabel = errors.New("the order has its label already")

// createInitialLabelOrRefuse sends the second event to the dead-letter topic instead.
func createInitialLabelOrRefuse(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	var order Order
	if err := json.Unmarshal(msg.Payload, &order); err != nil {
		return err
	}
	tag, err := tx.Exec(ctx, `
		insert into shipping_label (order_id, kind) values ($1, 'initial')
		on conflict (order_id) where kind = 'initial' do nothing`, order.OrderID)
	if err != nil {
		return err
	}
	if tag.RowsAffected() == 0 {
		return fmt.Errorf("order %q: %w", order.OrderID, errHasLabel)
	}
	return nil
}

func project(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	var order Order
	if err := json.Unmarshal(msg.Payload, &order); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `
		insert into order_projection (order_id, status, version) values ($1, $2, $3)
		on conflict (order_id) do update set status = excluded.status, version = excluded.version
		where order_projection.version < excluded.version`, order.OrderID, order.Status, order.Version)
	return err // no row is changed by an event that is older than what is known: that is no error
}

// updateProjection is for rows that exist.
const updateProjection = `
update order_projection set status = $2, version = $3 where order_id = $1 and version < $3
`

const labels = "select count(*) from shipping_label"

func TestTwoEventsForOneOrderMakeOneLabel(t *testing.T) {
	t.Parallel()
	pool, store := database(t, identityTables)
	idem, observed := newMiddleware(t, store, idempotency.WithSubscriberID("shipping.create-label.v1"))
	events := []string{"E-1", "E-1", "E-2", "E-2"} // of two producers, at the same time
	errs := make(chan error, len(events))
	for _, id := range events {
		go func() {
			errs <- deliver(idem, idempotency.ConsumerHandler(createInitialLabel), event(id, `{"orderId":"O-104"}`))
		}()
	}
	for range events {
		require.NoError(t, <-errs)
	}
	require.Equal(t, 1, value[int](t, pool, labels))
	require.Equal(t, map[idempotency.Outcome]int{idempotency.Processed: 2, idempotency.Duplicate: 2}, observed.claimed()["shipping.create-label.v1"])
}

func TestSecondEventIsRefused(t *testing.T) {
	t.Parallel()
	pool, store := database(t, identityTables)
	idem, observed := newMiddleware(t, store, idempotency.WithSubscriberID("shipping.create-label.v1"))
	handler := idempotency.ConsumerHandler(createInitialLabelOrRefuse)
	require.NoError(t, deliver(idem, handler, event("E-1", `{"orderId":"O-104"}`)))
	require.NoError(t, deliver(idem, handler, event("E-1", `{"orderId":"O-104"}`)), "a duplicate is not the second event")
	err := deliver(idem, handler, event("E-2", `{"orderId":"O-104"}`))
	require.ErrorIs(t, err, errHasLabel)
	require.False(t, idempotency.IsTransient(err), "the filter of the dead-letter topic takes it")
	require.Equal(t, []idempotency.Outcome{idempotency.Processed, idempotency.Duplicate, idempotency.HandlerFailed}, observed.outcomes())
	require.Equal(t, 1, value[int](t, pool, labels))
	require.Equal(t, 1, value[int](t, pool, "select count(*) from idempotency_claim"), "the second event is not claimed")
}

// In PostgreSQL, a handler that swallows a unique violation commits nothing; without a claim, the event would come for ever.
func TestCaughtUniqueViolationIsRolledBack(t *testing.T) {
	t.Parallel()
	pool, store := database(t, identityTables)
	idem, _ := newMiddleware(t, store, idempotency.WithSubscriberID("shipping.create-label.v1"))
	handler := idempotency.ConsumerHandler(func(ctx context.Context, tx pgx.Tx, _ *message.Message) error {
		_, err := tx.Exec(ctx, "insert into shipping_label values ('O-104', 'initial')")
		var violation *pgconn.PgError
		if errors.As(err, &violation) && violation.Code == "23505" {
			return nil
		}
		return err
	})
	require.NoError(t, deliver(idem, handler, event("E-1", "")))
	require.ErrorIs(t, deliver(idem, handler, event("E-2", "")), idempotency.ErrRolledBack)
	require.Equal(t, 1, value[int](t, pool, "select count(*) from idempotency_claim"))
}

func TestLateEventDoesNotOverwriteNewerState(t *testing.T) {
	t.Parallel()
	pool, store := database(t, identityTables)
	idem, observed := newMiddleware(t, store, idempotency.WithSubscriberID("orders.projection.v1"))
	for _, e := range []*message.Message{
		event("E-1", `{"orderId":"O-104","status":"placed","version":1}`),
		event("E-3", `{"orderId":"O-104","status":"cancelled","version":3}`),
		event("E-2", `{"orderId":"O-104","status":"paid","version":2}`), // late
		event("E-3", `{"orderId":"O-104","status":"cancelled","version":3}`),
	} {
		require.NoError(t, deliver(idem, idempotency.ConsumerHandler(project), e))
	}
	require.Equal(t, "cancelled", value[string](t, pool, "select status from order_projection"))
	require.Equal(t, []idempotency.Outcome{idempotency.Processed, idempotency.Processed, idempotency.Processed, idempotency.Duplicate}, observed.outcomes())
}

func TestUpdateOfAnOlderVersionChangesNothing(t *testing.T) {
	t.Parallel()
	pool, _ := database(t, identityTables)
	_, err := pool.Exec(t.Context(), "insert into order_projection values ('O-104', 'cancelled', 3)")
	require.NoError(t, err)
	var changes []int64
	for _, version := range []int{2, 3, 4} {
		tag, err := pool.Exec(t.Context(), updateProjection, "O-104", "refunded", version)
		require.NoError(t, err)
		changes = append(changes, tag.RowsAffected())
	}
	require.Equal(t, []int64{0, 0, 1}, changes)
}
