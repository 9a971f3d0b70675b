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
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/postgres"
)

// largeSubscriber is as long as subscriber IDs are.
const largeSubscriber = "shipping.create-label.v1"

// recordsVariable lists the numbers of records to measure at, instead of the default.
const recordsVariable = "IDEMPOTENCY_BENCH_RECORDS"

func recordSteps(b *testing.B) []int {
	b.Helper()
	var steps []int
	for field := range strings.FieldsSeq(strings.ReplaceAll(cmp.Or(os.Getenv(recordsVariable), "0,1000000,10000000,50000000"), ",", " ")) {
		n, err := strconv.Atoi(field)
		require.NoError(b, err, recordsVariable)
		steps = append(steps, n)
	}
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
			select '`+largeSubscriber+`', `+ids+`, at, 'orders', decode(repeat(md5(i::text), 3), 'hex')
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

// claimLarge returns what claims an event of the subscriber whose records are loaded, so that it meets them in the index.
func (f *fixture) claimLarge(b *testing.B) func(eventID string) error {
	b.Helper()
	return deliver(newMiddleware(b, f.store, idempotency.WithSubscriberID(largeSubscriber)).Middleware(f.handler()))
}

// BenchmarkLargeGrowth claims new events in an empty schema and beside many records: rate/empty is the ratio of the medians
// of their turns. The sizes are those of the two indexes.
func BenchmarkLargeGrowth(b *testing.B) {
	const conns, turn, turns, warm = 8, 32, 128, 8
	for _, kind := range []string{"uuidv4", "uuidv7"} {
		for _, records := range recordSteps(b) {
			b.Run(fmt.Sprintf("ids=%s/records=%d", kind, records), func(b *testing.B) {
				empty, loaded := setup(b, conns), setup(b, conns)
				loaded.load(b, records, idKinds[kind].sql, time.Now().Add(-24*time.Hour), time.Now())
				loaded.settle(b)
				claims := make(map[string][]time.Duration) // each of them
				contend := func(name string, f *fixture) contender {
					claim := f.claimLarge(b)
					return contender{name, func(int) time.Duration {
						times := make([]time.Duration, turn)
						began := time.Now()
						require.NoError(b, each(conns, turn, func(i int) error {
							id, err := idKinds[kind].new()
							if err != nil {
								return err
							}
							began := time.Now()
							err = claim(id.String())
							times[i] = time.Since(began)
							return err
						}))
						lasted := time.Since(began)
						claims[name] = append(claims[name], times...)
						return lasted / turn
					}}
				}
				contenders := []contender{contend("empty", empty), contend("loaded", loaded)}
				make(turnTimes).take(warm, turn, contenders)
				clear(claims)
				times := make(turnTimes)
				for b.Loop() {
					times.take(turns, turn, contenders)
				}
				b.ReportMetric(1/times.median("loaded").Seconds(), "msg/s")
				b.ReportMetric(times.ratio("empty/loaded"), "rate/empty")
				b.ReportMetric(float64(percentile(claims["empty"], 99)), "p99-empty-ns")
				b.ReportMetric(float64(percentile(claims["loaded"], 99)), "p99-ns")
				loaded.reportIndexes(b)
			})
		}
	}
}

func (f *fixture) reportIndexes(b *testing.B) {
	b.Helper()
	rows, err := f.pool.Query(b.Context(), `select case when indisprimary then 'key' else 'time' end || '-index-B/record',
		pg_relation_size(indexrelid) / (select greatest(count(*), 1)::float8 from `+f.schema+`.idempotency_claim)
		from pg_index where indrelid = $1::regclass`, f.schema+".idempotency_claim")
	require.NoError(b, err)
	var unit string
	var bytes float64
	_, err = pgx.ForEachRow(rows, []any{&unit, &bytes}, func() error {
		b.ReportMetric(bytes, unit)
		return nil
	})
	require.NoError(b, err)
}

// BenchmarkLargePurge purges a million old records, a day of them at a time, while new events are claimed, and compares the
// claims with those of the pauses between.
func BenchmarkLargePurge(b *testing.B) {
	const conns, records, days, keep, day = 4, 1_000_000, 20, 8, 24 * time.Hour
	for b.Loop() {
		f := setup(b, conns+1)
		newest := time.Now().Add(-2 * time.Hour) // age is counted from there
		f.load(b, records, idKinds["uuidv7"].sql, newest.Add(-(keep+days)*day), newest.Add(-keep*day))
		f.load(b, 10_000, idKinds["uuidv7"].sql, newest.Add(-time.Hour), newest)
		f.settle(b)
		handle := f.claimLarge(b)
		var idle, during []time.Duration
		var removed int64
		var purging time.Duration
		for d := range days {
			idle = append(idle, f.claimUntil(b, conns, fmt.Sprint("idle-", d), handle, func(ctx context.Context) error {
				return wait(ctx, 2*time.Second)
			})...)
			store, err := postgres.New(b.Context(), f.pool, postgres.WithSchema(f.schema), postgres.WithRetention(time.Duration(keep+days-1-d)*day-time.Minute))
			require.NoError(b, err)
			began := time.Now()
			during = append(during, f.claimUntil(b, conns, fmt.Sprint("purge-", d), handle, func(ctx context.Context) error {
				purged, err := store.Purge(ctx)
				removed += purged.Claims
				return err
			})...)
			purging += time.Since(began)
		}
		require.EqualValues(b, records, removed)
		b.ReportMetric(records/purging.Seconds(), "purged/s")
		b.ReportMetric(float64(percentile(idle, 99)), "p99-idle-ns")
		b.ReportMetric(float64(percentile(during, 99)), "p99-purge-ns")
		b.ReportMetric(float64(percentile(during, 99))/float64(percentile(idle, 99)), "p99-ratio")
		b.ReportMetric(float64(percentile(during, 50))/float64(percentile(idle, 50)), "p50-ratio")
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
