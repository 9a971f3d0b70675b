package bench

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/postgres"
)

// recordsVariable lists the numbers of records to measure at, rising, instead of the default.
const recordsVariable = "IDEMPOTENCY_BENCH_RECORDS"

func recordSteps(b *testing.B) []int {
	b.Helper()
	var steps []int
	for field := range strings.FieldsSeq(strings.ReplaceAll(cmp.Or(os.Getenv(recordsVariable), "0,1000000,10000000,50000000"), ",", " ")) {
		n, err := strconv.Atoi(field)
		require.NoError(b, err, recordsVariable)
		steps = append(steps, n)
	}
	require.True(b, slices.IsSorted(steps), "%s must rise", recordsVariable)
	return steps
}

// The IDs of events that are loaded: random, or beginning with a time as producers make them now.
var idKinds = map[string]struct {
	sql string
	new func() (uuid.UUID, error)
}{
	"uuidv4": {"gen_random_uuid()::text", uuid.NewRandom},
	"uuidv7": {`overlay(overlay(gen_random_uuid()::text placing '7' from 15)
		placing substr(t, 1, 8) || '-' || substr(t, 9, 4) from 1)`, uuid.NewV7},
}

// load inserts n records whose events are spread over the given time, in the order in which they came, as a service does.
func (f *fixture) load(b *testing.B, n int, ids string, from, to time.Time) {
	b.Helper()
	const batch = 250_000
	for done := 0; done < n; done += batch {
		count := min(batch, n-done)
		at := func(i int) time.Time { return from.Add(time.Duration(float64(to.Sub(from)) * float64(i) / float64(n))) }
		_, err := f.pool.Exec(b.Context(), "insert into "+f.schema+`.idempotency_claim (subscriber_id, event_id, claimed_at, topic, fingerprint)
			select 'shipping.create-label.v1', `+ids+`, at, 'orders', decode(repeat(md5(i::text), 3), 'hex')
			from generate_series(1, $1::int) i,
			lateral (select $2::timestamptz + ($3::timestamptz - $2::timestamptz) * i / $1::int as at) x,
			lateral (select lpad(to_hex((extract(epoch from at) * 1000)::bigint), 12, '0') as t) y order by i`,
			count, at(done), at(done+count))
		require.NoError(b, err)
	}
}

// settle lets nothing of the loading run on while the clock runs.
func (f *fixture) settle(b *testing.B) {
	b.Helper()
	for _, statement := range []string{"vacuum analyze " + f.schema + ".idempotency_claim", "checkpoint"} {
		_, err := f.pool.Exec(b.Context(), statement)
		if statement != "checkpoint" { // which needs a privilege
			require.NoError(b, err)
		}
	}
}

// BenchmarkLargeGrowth claims new events beside many records. index-B/record is the primary key's.
func BenchmarkLargeGrowth(b *testing.B) {
	const conns = 8
	for _, kind := range []string{"uuidv4", "uuidv7"} {
		b.Run("ids="+kind, func(b *testing.B) {
			f := setup(b, conns)
			handle := deliver(newMiddleware(b, f.store).Middleware(f.handler()))
			start := time.Now().Add(-30 * 24 * time.Hour)
			loaded := 0
			for _, records := range recordSteps(b) {
				f.load(b, records-loaded, idKinds[kind].sql, start, start.Add(24*time.Hour))
				start, loaded = start.Add(24*time.Hour), records
				f.settle(b)
				b.Run(fmt.Sprintf("records=%d", records), func(b *testing.B) {
					times := make([]time.Duration, b.N)
					claim := func(i int) error {
						id, err := idKinds[kind].new()
						if err != nil {
							return err
						}
						began := time.Now()
						err = handle(id.String())
						times[i] = time.Since(began)
						return err
					}
					b.ResetTimer()
					require.NoError(b, each(conns, b.N, claim))
					b.StopTimer()
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
					b.ReportMetric(float64(p99(times)), "p99-ns/op")
					var bytes, rows float64
					require.NoError(b, f.pool.QueryRow(b.Context(), `select pg_relation_size(indexrelid), (select count(*) from `+f.schema+`.idempotency_claim)
						from pg_index where indisprimary and indrelid = $1::regclass`, f.schema+".idempotency_claim").Scan(&bytes, &rows))
					b.ReportMetric(bytes/rows, "index-B/record")
				})
			}
		})
	}
}

func p99(times []time.Duration) time.Duration {
	slices.Sort(times)
	return times[len(times)*99/100]
}

// BenchmarkLargePurge purges a million old records while new events are claimed, and compares their 99th percentile with
// that of the time before.
func BenchmarkLargePurge(b *testing.B) {
	const conns, records = 4, 1_000_000
	for b.Loop() {
		f := setup(b, conns+1, postgres.WithRetention(7*24*time.Hour))
		handle := deliver(newMiddleware(b, f.store).Middleware(f.handler()))
		now := time.Now()
		f.load(b, records, idKinds["uuidv7"].sql, now.Add(-30*24*time.Hour), now.Add(-8*24*time.Hour))
		f.load(b, 10_000, idKinds["uuidv7"].sql, now.Add(-3*time.Hour), now.Add(-2*time.Hour)) // age is counted from there
		f.settle(b)
		idle := f.claimUntil(b, conns, "idle", handle, func(ctx context.Context) error {
			return wait(ctx, 10*time.Second)
		})
		var removed int64
		began := time.Now()
		during := f.claimUntil(b, conns, "purge", handle, func(ctx context.Context) error {
			purged, err := f.store.Purge(ctx)
			removed = purged.Claims
			return err
		})
		require.EqualValues(b, records, removed)
		b.ReportMetric(records/time.Since(began).Seconds(), "purged/s")
		b.ReportMetric(float64(p99(idle)), "p99-idle-ns")
		b.ReportMetric(float64(p99(during)), "p99-purge-ns")
		b.ReportMetric(float64(p99(during))/float64(p99(idle)), "p99-ratio")
	}
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// claimUntil claims on n goroutines until do has returned, and returns how long each claim took.
func (f *fixture) claimUntil(b *testing.B, n int, prefix string, handle func(eventID string) error, do func(ctx context.Context) error) []time.Duration {
	b.Helper()
	over := make(chan struct{})
	times := make([][]time.Duration, n)
	var workers sync.WaitGroup
	for w := range n {
		workers.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-over:
					return
				default:
				}
				began := time.Now()
				if err := handle(fmt.Sprintf("%s-%d-%d", prefix, w, i)); err != nil {
					b.Error(err)
					return
				}
				times[w] = append(times[w], time.Since(began))
			}
		})
	}
	err := do(b.Context())
	close(over)
	workers.Wait()
	require.NoError(b, err)
	return slices.Concat(times...)
}
