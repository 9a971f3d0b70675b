package postgres_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/internal/retentiontest"
	"github.com/watermill-idempotency/idempotency/postgres"
)

const day = 24 * time.Hour

func openKeeping(t *testing.T, config *pgxpool.Config) backend {
	t.Helper()
	return open(t, config, postgres.WithRetention(retentiontest.Keep))
}

// insert inserts n claims, made age ago.
func (b backend) insert(ctx context.Context, subscriberID, prefix string, n int, age time.Duration) error {
	_, err := b.pool.Exec(ctx, "insert into "+b.schema+".idempotency_claim (subscriber_id, event_id, claimed_at, topic)"+
		" select $1, $2::text || i, now() - make_interval(secs => $3), 'orders' from generate_series(1, $4) i", subscriberID, prefix, age.Seconds(), n)
	return err
}

func (b backend) count(ctx context.Context, subscriberID, prefix string) (n int, err error) {
	err = b.pool.QueryRow(ctx, "select count(*) from "+b.schema+".idempotency_claim where subscriber_id = $1 and starts_with(event_id, $2)", subscriberID, prefix).Scan(&n)
	return n, err
}

func (b backend) requireCount(t *testing.T, prefix string, want int) {
	t.Helper()
	n, err := b.count(t.Context(), "shipping", prefix)
	require.NoError(t, err)
	require.Equal(t, want, n)
}

func TestTrap31_Retention(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		server string
		change func(*pgxpool.Config)
	}{
		"default": {pgtest.URLVariable, func(*pgxpool.Config) {}},
		"simple protocol": {pgtest.URLVariable, func(c *pgxpool.Config) {
			c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		}},
		"repeatable read, newest server": {pgtest.URL18Variable, func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "repeatable read"
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			retentiontest.Run(t, func(t *testing.T) retentiontest.Backend {
				t.Helper()
				config, err := pgxpool.ParseConfig(pgtest.URL(t, test.server))
				require.NoError(t, err)
				config.MaxConns = 8
				test.change(config)
				b := openKeeping(t, config)
				return retentiontest.Backend{
					Store: b.store, Insert: b.insert, Count: b.count,
					Age: func(ctx context.Context, key idempotency.Key, age time.Duration) error {
						_, err := b.pool.Exec(ctx, "update "+b.schema+".idempotency_claim set claimed_at = now() - make_interval(secs => $3)"+
							" where subscriber_id = $1 and event_id = $2", key.SubscriberID, key.EventID, age.Seconds())
						return err
					},
				}
			})
		})
	}
}

func TestWithRetentionMustBePositive(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, 1)
	_, err := postgres.New(t.Context(), pool, postgres.WithRetention(0))
	require.ErrorContains(t, err, "WithRetention: 0s is not positive")

	b := open(t, pgtest.Config(t, 1))
	_, ok := b.store.Retention()
	require.False(t, ok)
	_, err = b.store.Purge(t.Context())
	require.ErrorContains(t, err, "claims are kept for ever: give WithRetention to New")
	require.ErrorContains(t, b.store.Clean(t.Context(), time.Second, watermill.NopLogger{}), "claims are kept for ever")
}

// A purge waits for nobody: claims in flight, rows that somebody has locked, and another purge.
func TestTrap31_PurgeDoesNotWait(t *testing.T) {
	t.Parallel()
	b := openKeeping(t, pgtest.Config(t, 4))
	require.NoError(t, b.insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, b.insert(t.Context(), "shipping", "old", 1500, 30*day))
	purge := func() idempotency.Purged {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		purged, err := b.store.Purge(ctx)
		require.NoError(t, err)
		return purged
	}
	b.claim(t, claimOf("in flight")) // until the test ends

	begin := func(sql string) pgx.Tx {
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
		_, err = tx.Exec(t.Context(), strings.ReplaceAll(sql, "{schema}", b.schema))
		require.NoError(t, err)
		return tx
	}
	tables := pgschema.Tables{Claim: `"` + b.schema + `"."idempotency_claim"`, Produced: `"` + b.schema + `"."idempotency_produced_message"`}
	other := begin(tables.Operator().Lock)
	require.Equal(t, idempotency.Purged{Elsewhere: true}, purge())
	require.NoError(t, other.Rollback(t.Context()))

	deleted := begin("delete from {schema}.idempotency_claim where event_id = 'old7'")
	require.Equal(t, idempotency.Purged{Claims: 1499}, purge())
	require.NoError(t, deleted.Rollback(t.Context()))
	require.Equal(t, idempotency.Purged{Claims: 1}, purge())
}

// Claims wait for a purge only if it is removing their own: a batch that is not committed holds nothing else.
func TestTrap31_ClaimsDoNotWaitForAPurge(t *testing.T) {
	t.Parallel()
	b := openKeeping(t, pgtest.Config(t, 4))
	require.NoError(t, b.insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, b.insert(t.Context(), "shipping", "old", 10, 30*day))
	b.exec(t, `create function {schema}.wait() returns trigger language plpgsql as $$ begin
			perform pg_advisory_lock(hashtext('{schema}')); perform pg_advisory_unlock(hashtext('{schema}')); return null; end $$;
		create trigger wait after delete on {schema}.idempotency_claim for each statement execute function {schema}.wait()`)
	gate, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = gate.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = gate.Exec(t.Context(), "select pg_advisory_xact_lock(hashtext($1))", b.schema)
	require.NoError(t, err)

	type result struct {
		purged idempotency.Purged
		err    error
	}
	done := make(chan result, 1)
	go func() {
		purged, err := b.store.Purge(t.Context())
		done <- result{purged, err}
	}()
	require.Eventually(t, func() bool {
		var waits bool
		err := gate.QueryRow(t.Context(), "select exists (select from pg_locks where locktype = 'advisory' and not granted and objid = hashtext($1)::bigint & 4294967295)", b.schema).Scan(&waits)
		return err == nil && waits
	}, 10*time.Second, 10*time.Millisecond, "the batch has removed the claims and is not committed")

	bounded := func(eventID string) idempotency.Claim {
		c := claimOf(eventID)
		c.InFlight = idempotency.WaitAtMost(time.Second)
		return c
	}
	tx, _ := b.claim(t, bounded("new"))
	require.NoError(t, tx.Commit(t.Context(), nil))
	_, record, err := claim(t, b.store, bounded("reference1"))
	require.NoError(t, err)
	require.NotNil(t, record)

	require.NoError(t, gate.Rollback(t.Context()))
	r := <-done
	require.NoError(t, r.err)
	require.Equal(t, idempotency.Purged{Claims: 10}, r.purged)
}

// Each batch is a transaction of its own, and takes few round trips.
func TestTrap31_BatchesAreShort(t *testing.T) {
	t.Parallel()
	w := &pgtest.Wire{}
	b := openKeeping(t, w.Config(t, 1))
	require.NoError(t, b.insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, b.insert(t.Context(), "shipping", "old", 2500, 30*day))
	b.exec(t, `create table {schema}.batch (transaction text primary key, claims int, isolation text);
		create function {schema}.record() returns trigger language plpgsql as $$ begin
			insert into {schema}.batch select pg_current_xact_id()::text, count(*), current_setting('transaction_isolation') from gone; return null; end $$;
		create trigger record after delete on {schema}.idempotency_claim referencing old table as gone for each statement execute function {schema}.record();
		set session characteristics as transaction read only, isolation level serializable`) // as a handler may leave it
	require.Equal(t, 2+3*4, w.Count(func() {
		purged, err := b.store.Purge(t.Context())
		require.NoError(t, err)
		require.Equal(t, int64(2500), purged.Claims)
	})-4, "the horizon and the count of unacked; each batch BEGIN, lock, delete, COMMIT; four statements are prepared")
	rows, err := b.pool.Query(t.Context(), "select claims || ' ' || isolation from "+b.schema+".batch order by claims desc")
	require.NoError(t, err)
	batches, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"1000 read committed", "1000 read committed", "500 read committed"}, batches)
}

// The session of a purge is killed in the middle of its second batch: the first one stays, the second one is undone, and
// nothing is left that keeps the next purge out.
func TestTrap31_KilledInTheMiddle(t *testing.T) {
	t.Parallel()
	b := openKeeping(t, pgtest.Config(t, 2))
	require.NoError(t, b.insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, b.insert(t.Context(), "shipping", "old", 2500, 30*day))
	b.exec(t, `create function {schema}.kill() returns trigger language plpgsql as $$ begin
			if (select count(*) from {schema}.idempotency_claim) < 1000 then perform pg_terminate_backend(pg_backend_pid()); end if; return null; end $$;
		create trigger kill after delete on {schema}.idempotency_claim for each statement execute function {schema}.kill()`)
	purged, err := b.store.Purge(t.Context())
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(err), "%v", err)
	require.Equal(t, int64(1000), purged.Claims, "what is done is told")
	b.requireCount(t, "old", 1500)

	b.exec(t, "drop trigger kill on {schema}.idempotency_claim")
	purged, err = b.store.Purge(t.Context())
	require.NoError(t, err)
	require.Equal(t, idempotency.Purged{Claims: 1500}, purged)
}

// countingLogger can be read while it is written to.
type countingLogger struct {
	watermill.NopLogger
	errors, infos, failures atomic.Int64
}

func (l *countingLogger) Error(string, error, watermill.LogFields) { l.errors.Add(1) }
func (l *countingLogger) Info(string, watermill.LogFields)         { l.infos.Add(1) }
func (l *countingLogger) Debug(_ string, fields watermill.LogFields) {
	if fields["err"] != nil {
		l.failures.Add(1)
	}
}

// The database is down for a while: the cleaner says so once, and goes on when it is back.
func TestTrap31_CleanOutlivesTheDatabase(t *testing.T) {
	t.Parallel()
	var down atomic.Bool
	config := pgtest.Config(t, 1)
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if down.Load() {
			return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	name := strings.ToLower(rand.Text())
	config.ConnConfig.RuntimeParams["application_name"] = name
	b := openKeeping(t, config)
	beside := pgtest.Pool(t, 1)
	insert := func(eventID string, age time.Duration) {
		_, err := beside.Exec(t.Context(), "insert into "+b.schema+".idempotency_claim (subscriber_id, event_id, claimed_at, topic)"+
			" values ('shipping', $1, now() - make_interval(secs => $2), 'orders')", eventID, age.Seconds())
		require.NoError(t, err)
	}
	requireGone := func(eventID string) {
		t.Helper()
		require.Eventually(t, func() bool {
			var there bool
			err := beside.QueryRow(t.Context(), "select exists (select from "+b.schema+".idempotency_claim where event_id = $1)", eventID).Scan(&there)
			return err == nil && !there
		}, 20*time.Second, 5*time.Millisecond)
	}
	logger := &countingLogger{}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	insert("reference", time.Hour)
	insert("old", 30*day)
	go func() { done <- b.store.Clean(ctx, 10*time.Millisecond, logger) }()
	requireGone("old")

	down.Store(true)
	_, err := beside.Exec(t.Context(), "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = $1", name)
	require.NoError(t, err)
	insert("meanwhile", 30*day)
	require.Eventually(t, func() bool { return logger.failures.Load() > 3 }, 20*time.Second, 5*time.Millisecond, "it tries again")
	require.Equal(t, int64(1), logger.errors.Load(), "and tells it once")
	require.Zero(t, logger.infos.Load())

	down.Store(false)
	requireGone("meanwhile")
	require.Eventually(t, func() bool { return logger.infos.Load() == 1 }, 20*time.Second, 5*time.Millisecond)
	require.Equal(t, int64(1), logger.errors.Load())
	cancel()
	require.NoError(t, <-done)
}

// The least privileges.
func TestTrap31_Privileges(t *testing.T) {
	t.Parallel()
	owner := open(t, pgtest.Config(t, 1))
	owner.exec(t, `grant usage on schema {schema} to pg_monitor; grant select, insert on {schema}.idempotency_claim to pg_monitor;
		grant select, insert, delete on {schema}.idempotency_produced_message to pg_monitor`)
	require.NoError(t, owner.insert(t.Context(), "shipping", "reference", 1, time.Hour))
	require.NoError(t, owner.insert(t.Context(), "shipping", "old", 3, 30*day))
	config := pgtest.Config(t, 1)
	config.ConnConfig.RuntimeParams["role"] = "pg_monitor"
	store, err := postgres.New(t.Context(), pgtest.Open(t, config), postgres.WithSchema(owner.schema), postgres.WithRetention(retentiontest.Keep))
	require.NoError(t, err)

	key := idempotency.Key{SubscriberID: "shipping", EventID: "old1"}
	_, err = store.Stats(t.Context())
	require.NoError(t, err)
	_, err = store.Unacked(t.Context(), 0, 1)
	require.NoError(t, err)
	_, err = store.Forget(t.Context(), key)
	require.ErrorIs(t, err, idempotency.ErrPrivilege)
	require.ErrorContains(t, err, "select and delete on both tables")
	owner.exec(t, "grant delete on {schema}.idempotency_claim to pg_monitor")
	existed, err := store.Forget(t.Context(), key)
	require.NoError(t, err)
	require.True(t, existed)

	_, err = store.Purge(t.Context())
	require.ErrorIs(t, err, idempotency.ErrPrivilege)
	require.ErrorContains(t, err, "select, delete and update on the table of claims")
	owner.exec(t, "grant update on {schema}.idempotency_claim to pg_monitor")
	purged, err := store.Purge(t.Context())
	require.NoError(t, err)
	require.Equal(t, idempotency.Purged{Claims: 2}, purged)
}

// 200,000 claims, of which a third is old, and the statistics of an empty table or those of the full one: no statement of a
// purge reads the table, and none of them more than the batch and what is stored.
func TestTrap31_IndexesAreUsed(t *testing.T) {
	t.Parallel()
	b := openKeeping(t, pgtest.Config(t, 2))
	b.exec(t, "alter table {schema}.idempotency_claim set (autovacuum_enabled = off); alter table {schema}.idempotency_produced_message set (autovacuum_enabled = off)")
	for _, age := range []time.Duration{day, 2 * day, 30 * day, 31 * day} {
		require.NoError(t, b.insert(t.Context(), "shipping", "age "+age.String()+" ", 50_000, age))
	}
	b.exec(t, `insert into {schema}.idempotency_produced_message select subscriber_id, event_id, 1, '', '', '' from {schema}.idempotency_claim where event_id like '%00'`)
	sql := pgschema.Tables{Claim: b.schema + ".idempotency_claim", Produced: b.schema + ".idempotency_produced_message"}.Operator()
	before := time.Now().Add(-8 * day)
	for _, analyzed := range []string{"select", "analyze"} {
		b.exec(t, analyzed)
		for name, query := range map[string]struct {
			sql  string
			args []any
		}{
			"newest":  {sql.Newest, []any{3600.0}},
			"remove":  {sql.Remove, []any{time.Time{}, before, 1000}},
			"unacked": {sql.CountUnacked, []any{before}},
			"list":    {sql.Unacked, []any{3600.0, 10}},
			"forget":  {sql.Forget[1], []any{"shipping", "age 24h0m0s 1"}},
		} {
			tx, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), sql.Lock) // as in a purge
			require.NoError(t, err)
			rows, err := tx.Query(t.Context(), "explain (analyze, buffers, timing off) "+query.sql, append([]any{pgx.QueryExecModeExec}, query.args...)...)
			require.NoError(t, err)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.NoError(t, tx.Rollback(t.Context()))
			plan := strings.Join(lines, "\n")
			require.NotContains(t, plan, "Seq Scan on idempotency_claim", "%s, %s", name, analyzed)
			require.Contains(t, plan, "idempotency_claim", name)
			if limit, ok := map[string]int{"newest": 1, "remove": 1020}[name]; ok { // one in a hundred stays
				scan := regexp.MustCompile(`using idempotency_claim_claimed_at on idempotency_claim .*actual rows=(\d+)`).FindStringSubmatch(plan)
				require.NotEmpty(t, scan, plan)
				read, err := strconv.Atoi(scan[1])
				require.NoError(t, err)
				require.LessOrEqual(t, read, limit, plan)
			}
		}
	}
}

// Of a table that is larger than what Stats reads, the numbers are estimates.
func TestStatsOfALargeTableAreEstimates(t *testing.T) {
	t.Parallel()
	b := openKeeping(t, pgtest.Config(t, 2))
	b.exec(t, "alter table {schema}.idempotency_claim set (fillfactor = 10)") // a few claims a page
	for i := range 10 {
		require.NoError(t, b.insert(t.Context(), "shipping", fmt.Sprint("a", i, " "), 6000, time.Duration(10-i)*day))
		require.NoError(t, b.insert(t.Context(), "billing", fmt.Sprint("b", i, " "), 3000, time.Duration(10-i)*day))
	}
	b.exec(t, `insert into {schema}.idempotency_produced_message values ('removed', '1', 1, '', '', '')`)
	var pages int
	require.NoError(t, b.pool.QueryRow(t.Context(), "select pg_relation_size($1) / 8192", b.schema+".idempotency_claim").Scan(&pages))
	require.Greater(t, pages, 5000)

	stats, err := b.store.Stats(t.Context())
	require.NoError(t, err)
	require.Len(t, stats, 3)
	for i, want := range []idempotency.SubscriberStats{{SubscriberID: "billing", Claims: 30_000}, {SubscriberID: "removed", Unacked: 1}, {SubscriberID: "shipping", Claims: 60_000}} {
		require.Equal(t, want.SubscriberID, stats[i].SubscriberID)
		require.True(t, stats[i].Estimated)
		require.InDelta(t, want.Claims, stats[i].Claims, float64(want.Claims)/4)
		require.Equal(t, want.Unacked, stats[i].Unacked)
		if want.Claims > 0 {
			require.WithinDuration(t, time.Now().Add(-10*day), stats[i].Oldest, time.Hour)
			require.WithinDuration(t, time.Now().Add(-day), stats[i].Newest, time.Hour)
		}
	}
	events, err := b.store.Unacked(t.Context(), 0, 10)
	require.NoError(t, err)
	require.Equal(t, []idempotency.UnackedEvent{{Key: idempotency.Key{SubscriberID: "removed", EventID: "1"}, Messages: 1}}, events, "its claim was deleted by hand")
}
