package sqlstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/internal/retentiontest"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

const day = 24 * time.Hour

func openKeeping(t *testing.T, config *pgx.ConnConfig, conns int) (backend, retentiontest.Backend) {
	t.Helper()
	b := open(t, config, conns, sqlstore.WithRetention(retentiontest.Keep))
	return b, retentiontest.Backend{
		Store: b.store,
		Insert: func(ctx context.Context, subscriberID, prefix string, n int, age time.Duration) error {
			_, err := b.db.ExecContext(ctx, "insert into "+b.schema+".idempotency_claim (subscriber_id, event_id, claimed_at, topic)"+
				" select $1, $2::text || i, now() - make_interval(secs => $3), 'orders' from generate_series(1, $4) i", subscriberID, prefix, age.Seconds(), n)
			return err
		},
		Count: func(ctx context.Context, subscriberID, prefix string) (n int, err error) {
			err = b.db.QueryRowContext(ctx, "select count(*) from "+b.schema+".idempotency_claim where subscriber_id = $1 and starts_with(event_id, $2)", subscriberID, prefix).Scan(&n)
			return n, err
		},
		Age: func(ctx context.Context, key idempotency.Key, age time.Duration) error {
			_, err := b.db.ExecContext(ctx, "update "+b.schema+".idempotency_claim set claimed_at = now() - make_interval(secs => $3)"+
				" where subscriber_id = $1 and event_id = $2", key.SubscriberID, key.EventID, age.Seconds())
			return err
		},
	}
}

func TestTrap31_Retention(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*pgx.ConnConfig){
		"default":         func(*pgx.ConnConfig) {},
		"simple protocol": func(c *pgx.ConnConfig) { c.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol },
		"repeatable read": func(c *pgx.ConnConfig) { c.RuntimeParams["default_transaction_isolation"] = "repeatable read" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			retentiontest.Run(t, func(t *testing.T) retentiontest.Backend {
				t.Helper()
				config := parse(t, pgtest.URLVariable)
				change(config)
				_, b := openKeeping(t, config, 8)
				return b
			})
		})
	}
}

func TestWithRetentionMustBePositive(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 1)
	_, err := sqlstore.New(t.Context(), b.db, sqlstore.PostgreSQL(), sqlstore.WithSchema(b.schema), sqlstore.WithRetention(-time.Second))
	require.ErrorContains(t, err, "WithRetention: -1s is not positive")
	_, ok := b.store.Retention()
	require.False(t, ok)
	_, err = b.store.Purge(t.Context())
	require.ErrorContains(t, err, "claims are kept for ever: give WithRetention to New")
	require.ErrorContains(t, b.store.Clean(t.Context(), time.Second, watermill.NopLogger{}), "claims are kept for ever")
}

// A purge waits neither for claims in flight nor for rows that somebody has locked.
func TestTrap31_PurgeDoesNotWait(t *testing.T) {
	t.Parallel()
	b, keeping := openKeeping(t, parse(t, pgtest.URLVariable), 4)
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "old", 1500, 30*day))
	inFlight, _ := b.claim(t, claimOf("in flight"))
	locks, err := b.db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	_, err = locks.ExecContext(t.Context(), "delete from "+b.schema+".idempotency_claim where event_id = 'old7'")
	require.NoError(t, err)
	for _, want := range []int64{1499, 1} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		purged, err := b.store.Purge(ctx)
		cancel()
		require.NoError(t, err)
		require.Equal(t, idempotency.Purged{Claims: want}, purged)
		_ = locks.Rollback()
	}
	require.NoError(t, inFlight.Rollback(t.Context()))
}

func TestTrap31_KilledInTheMiddle(t *testing.T) {
	t.Parallel()
	b, keeping := openKeeping(t, parse(t, pgtest.URLVariable), 2)
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "old", 2500, 30*day))
	b.exec(t, `create function {schema}.kill() returns trigger language plpgsql as $$ begin
			if (select count(*) from {schema}.idempotency_claim) < 1000 then perform pg_terminate_backend(pg_backend_pid()); end if; return null; end $$;
		create trigger kill after delete on {schema}.idempotency_claim for each statement execute function {schema}.kill()`)
	purged, err := b.store.Purge(t.Context())
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(err), "%v", err)
	require.Equal(t, int64(1000), purged.Claims)
	b.exec(t, "drop trigger kill on {schema}.idempotency_claim")
	purged, err = b.store.Purge(t.Context())
	require.NoError(t, err)
	require.Equal(t, idempotency.Purged{Claims: 1500}, purged)
}

func TestTrap35_PurgeInASessionThatAHandlerHasChanged(t *testing.T) {
	t.Parallel()
	b, keeping := openKeeping(t, parse(t, pgtest.URLVariable), 1)
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "old", 2, 30*day))
	b.exec(t, "set session characteristics as transaction read only, isolation level serializable; set search_path to elsewhere")
	existed, err := b.store.Forget(t.Context(), idempotency.Key{SubscriberID: "shipping", EventID: "old1"})
	require.NoError(t, err)
	require.True(t, existed)
	purged, err := b.store.Purge(t.Context())
	require.NoError(t, err)
	require.Equal(t, idempotency.Purged{Claims: 1}, purged)
}
