package sqlite_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/retention"
	"github.com/watermill-idempotency/idempotency/internal/retentiontest"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

func openKeeping(t *testing.T, dsn string, conns int, opts ...sqlstore.Option) (backend, retentiontest.Backend) {
	t.Helper()
	b := open(t, dsn, conns, append(opts, sqlstore.WithRetention(retentiontest.Keep))...)
	return b, retentiontest.Backend{
		Store: b.store,
		Insert: func(ctx context.Context, subscriberID, prefix string, n int, age time.Duration) error {
			_, err := b.db.ExecContext(ctx, "with recursive i (n) as (select 1 union all select n + 1 from i where n < ?4)"+
				" insert into idempotency_claim (subscriber_id, event_id, claimed_at, topic)"+
				" select ?1, ?2 || n, strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (-?3) || ' seconds'), 'orders' from i", subscriberID, prefix, age.Seconds(), n)
			return err
		},
		Count: func(ctx context.Context, subscriberID, prefix string) (n int, err error) {
			err = b.db.QueryRowContext(ctx, "select count(*) from idempotency_claim where subscriber_id = ?1 and substr(event_id, 1, length(?2)) = ?2", subscriberID, prefix).Scan(&n)
			return n, err
		},
		Age: func(ctx context.Context, key idempotency.Key, age time.Duration) error {
			_, err := b.db.ExecContext(ctx, "update idempotency_claim set claimed_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (-?3) || ' seconds')"+
				" where subscriber_id = ?1 and event_id = ?2", key.SubscriberID, key.EventID, age.Seconds())
			return err
		},
	}
}

func TestTrap31_Retention(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		dsn   func(t *testing.T) string
		conns int
	}{
		"file":            {func(t *testing.T) string { t.Helper(); return newFile(t) + "?" + settings }, 8},
		"begin immediate": {func(t *testing.T) string { t.Helper(); return newFile(t) + "?" + settings + "&_txlock=immediate" }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			retentiontest.Run(t, func(t *testing.T) retentiontest.Backend {
				t.Helper()
				_, b := openKeeping(t, test.dsn(t), test.conns)
				return b
			})
		})
	}
}

// A purge waits for the write lock, which a message holds while it is processed, until its context ends.
func TestTrap31_PurgeWaitsForTheWriteLock(t *testing.T) {
	t.Parallel()
	b, keeping := openKeeping(t, newFile(t)+"?"+settings, 4)
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "old", 10, 30*24*time.Hour))
	tx, _ := b.claim(t, claimOf("in flight"))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := b.store.Purge(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	done := make(chan error, 1)
	go func() {
		_, err := b.store.Purge(t.Context())
		done <- err
	}()
	require.NoError(t, tx.Commit(t.Context(), nil))
	require.NoError(t, <-done)
	n, err := keeping.Count(t.Context(), "shipping", "old")
	require.NoError(t, err)
	require.Zero(t, n)
}

// The plan of each statement of a purge, which SQLite makes without regard to the number of rows unless there are statistics.
func TestTrap31_IndexesAreUsed(t *testing.T) {
	t.Parallel()
	b, keeping := openKeeping(t, newFile(t)+"?"+settings, 1)
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "young", 2000, 24*time.Hour))
	require.NoError(t, keeping.Insert(t.Context(), "shipping", "old", 10, 30*24*time.Hour))
	operator := retention.SQLite("idempotency_claim", "idempotency_produced_message")
	for _, analyzed := range []string{"select 1", "analyze"} {
		b.exec(t, analyzed)
		for name, test := range map[string]struct{ statement, want string }{
			"newest":        {operator.Newest, "SEARCH idempotency_claim USING COVERING INDEX idempotency_claim_claimed_at (claimed_at<?)"},
			"remove":        {operator.Remove, "SEARCH c USING COVERING INDEX idempotency_claim_claimed_at (claimed_at>? AND claimed_at<?)"},
			"count unacked": {operator.CountUnacked, "CO-ROUTINE p"},
		} {
			plan := b.plan(t, test.statement)
			require.Contains(t, plan, test.want, name)
			require.NotContains(t, strings.Join(plan, "\n"), "SCAN c", name)
			require.NotContains(t, strings.Join(plan, "\n"), "SCAN idempotency_claim", name)
		}
	}
}

func (b backend) plan(t *testing.T, statement string) (plan []string) {
	t.Helper()
	rows, err := b.db.QueryContext(t.Context(), "explain query plan "+statement, "2026-01-01T00:00:00.000Z", "2026-01-02T00:00:00.000Z", 1000)
	require.NoError(t, err)
	defer func() { require.NoError(t, rows.Close()) }()
	for rows.Next() {
		var id, parent, unused int
		var detail string
		require.NoError(t, rows.Scan(&id, &parent, &unused, &detail))
		plan = append(plan, detail)
	}
	require.NoError(t, rows.Err())
	return plan
}
