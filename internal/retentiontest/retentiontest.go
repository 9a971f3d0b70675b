// Package retentiontest is the suite for retention and the operator's methods, which the stores of this module share.
package retentiontest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// Store is what the stores of this module have in common.
type Store interface {
	idempotency.Store
	Retention() (time.Duration, bool)
	Purge(ctx context.Context) (idempotency.Purged, error)
	Clean(ctx context.Context, interval time.Duration, logger watermill.LoggerAdapter) error
	Lookup(ctx context.Context, key idempotency.Key) (*idempotency.Record, error)
	Forget(ctx context.Context, key idempotency.Key) (bool, error)
	Unacked(ctx context.Context, age time.Duration, limit int) ([]idempotency.UnackedEvent, error)
	Stats(ctx context.Context) ([]idempotency.SubscriberStats, error)
}

// Backend is an empty store with a retention of [Keep].
type Backend struct {
	Store Store
	// Insert inserts n claims of a subscriber, whose event IDs are the prefix and a number from 1, made age ago.
	Insert func(ctx context.Context, subscriberID, prefix string, n int, age time.Duration) error
	// Count counts the claims of a subscriber whose event IDs begin with the prefix.
	Count func(ctx context.Context, subscriberID, prefix string) (int, error)
	// Age makes a claim as old as age.
	Age func(ctx context.Context, key idempotency.Key, age time.Duration) error
}

// Keep is the retention.
const Keep = 7 * day

const day = 24 * time.Hour

// Run runs the suite. open is called once for each test.
func Run(t *testing.T, open func(t *testing.T) Backend) {
	t.Helper()
	for _, test := range []struct {
		name string
		run  func(t *testing.T, s *suite)
	}{
		{"purge/old claims only", testPurge},
		{"purge/nothing", testPurgeNothing},
		{"purge/after a downtime", testPurgeAfterDowntime},
		{"purge/unacked stay", testPurgeKeepsUnacked},
		{"purge/while claiming", testPurgeWhileClaiming},
		{"purge/two at once", testPurgeTwice},
		{"purge/ends with its context", testPurgeEnds},
		{"purge/and the replay horizon", testHorizon},
		{"clean", testClean},
		{"operator/lookup", testLookup},
		{"operator/forget", testForget},
		{"operator/a removed handler is found", testRemovedHandler},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(t, &suite{open(t)})
		})
	}
}

type suite struct{ Backend }

const subscriber = "shipping"

func keyOf(eventID string) idempotency.Key {
	return idempotency.Key{SubscriberID: subscriber, EventID: eventID}
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // SQLite in Go is slow under the race detector
	t.Cleanup(cancel)
	return ctx
}

func (s *suite) insert(t *testing.T, prefix string, n int, age time.Duration) {
	t.Helper()
	require.NoError(t, s.Insert(bounded(t), subscriber, prefix, n, age))
}

func (s *suite) requireCount(t *testing.T, prefix string, want int) {
	t.Helper()
	n, err := s.Count(bounded(t), subscriber, prefix)
	require.NoError(t, err)
	require.Equal(t, want, n, "claims %s*", prefix)
}

func (s *suite) purge(t *testing.T) idempotency.Purged {
	t.Helper()
	purged, err := s.Store.Purge(bounded(t))
	require.NoError(t, err)
	return purged
}

// process claims an event and commits it with n produced messages, age ago.
func (s *suite) process(t *testing.T, key idempotency.Key, n int, age time.Duration) {
	t.Helper()
	ctx := bounded(t)
	tx, record, err := s.Store.Claim(ctx, idempotency.Claim{Key: key, Topic: "orders", Fingerprint: []byte{1, 2}})
	require.NoError(t, err)
	require.Nil(t, record)
	produced := make([]*message.Message, n)
	for i := range produced {
		produced[i] = message.NewMessage(fmt.Sprint(i), []byte("payload"))
		produced[i].Metadata.Set("name", "value")
	}
	require.NoError(t, tx.Commit(ctx, produced))
	require.NoError(t, s.Age(ctx, key, age))
}

func testPurge(t *testing.T, s *suite) {
	keep, ok := s.Store.Retention()
	require.True(t, ok)
	require.Equal(t, Keep, keep)

	// The newest claim that is an hour old is 90 minutes old: it is what age is counted back from.
	const newest = 90 * time.Minute
	s.insert(t, "new", 3, 0)
	s.insert(t, "reference", 1, newest)
	s.insert(t, "younger", 3, newest+Keep-time.Minute)
	s.insert(t, "older", 3, newest+Keep+time.Minute)
	s.insert(t, "oldest", 1200, 30*day)
	require.Equal(t, idempotency.Purged{Claims: 1203}, s.purge(t))
	for prefix, want := range map[string]int{"new": 3, "reference": 1, "younger": 3, "old": 0} {
		s.requireCount(t, prefix, want)
	}
	require.Zero(t, s.purge(t), "a second one finds nothing")
}

func testPurgeNothing(t *testing.T, s *suite) {
	require.Zero(t, s.purge(t), "an empty table")
	s.insert(t, "new", 3, time.Minute)
	require.Zero(t, s.purge(t), "no claim is an hour old")
	s.insert(t, "newest", 1, 100*day)
	require.Zero(t, s.purge(t), "the newest claim is never removed")
}

// The service stood still for a month, longer than claims are kept. The broker has kept the last events before that, and
// delivers them again when the service is back.
func testPurgeAfterDowntime(t *testing.T, s *suite) {
	const downtime = 30 * day
	s.insert(t, "in time", 5, downtime)
	s.insert(t, "before", 5, downtime+Keep-time.Hour)
	s.insert(t, "old", 5, downtime+Keep+time.Hour)
	require.Equal(t, int64(5), s.purge(t).Claims, "before the first claim")
	s.requireCount(t, "old", 0)

	s.insert(t, "back", 5, 59*time.Minute)
	require.Zero(t, s.purge(t), "the service is back for less than an hour")
	_, record, err := s.Store.Claim(bounded(t), idempotency.Claim{Key: keyOf("in time1")})
	require.NoError(t, err)
	require.NotNil(t, record, "what is delivered again is a duplicate")

	s.insert(t, "an hour ago", 1, 61*time.Minute)
	require.Equal(t, int64(10), s.purge(t).Claims)
}

func testPurgeKeepsUnacked(t *testing.T, s *suite) {
	s.process(t, keyOf("1"), 2, 30*day)
	s.process(t, keyOf("2"), 0, 30*day)
	s.process(t, keyOf("3"), 1, day)
	s.process(t, idempotency.Key{SubscriberID: "other", EventID: "2"}, 1, 30*day)
	require.Equal(t, idempotency.Purged{Claims: 1, Unacked: 2}, s.purge(t))
	_, record, err := s.Store.Claim(bounded(t), idempotency.Claim{Key: keyOf("1")})
	require.NoError(t, err)
	require.NotNil(t, record)
	require.Len(t, record.Produced, 2, "and a duplicate publishes them")

	require.NoError(t, s.Store.Acked(bounded(t), []idempotency.Key{keyOf("1")}))
	require.Equal(t, idempotency.Purged{Claims: 1, Unacked: 1}, s.purge(t))
	s.requireCount(t, "1", 0)
}

// Claims of new events, duplicates and purges at once: no claim is lost, none fails, and none of a young event is purged.
func testPurgeWhileClaiming(t *testing.T, s *suite) {
	const workers, events = 4, 15
	s.insert(t, "reference", 1, time.Hour)
	s.insert(t, "young", events, Keep)
	s.insert(t, "old", 2200, 30*day)
	ctx := bounded(t)
	errs := make(chan error, workers)
	for worker := range workers {
		go func() { errs <- s.claimBeside(ctx, worker, events) }()
	}
	removed := int64(0)
	for done := 0; done < workers; {
		removed += s.purge(t).Claims
		select {
		case err := <-errs:
			require.NoError(t, err)
			done++
		default:
		}
	}
	removed += s.purge(t).Claims
	require.Equal(t, int64(2200), removed)
	s.requireCount(t, "new", workers*events)
	s.requireCount(t, "young", events)
	s.requireCount(t, "old", 0)
}

func (s *suite) claimBeside(ctx context.Context, worker, events int) error {
	for i := range events {
		eventID := fmt.Sprintf("new %d %d", worker, i)
		tx, record, err := s.Store.Claim(ctx, idempotency.Claim{Key: keyOf(eventID)})
		if err != nil || record != nil {
			return fmt.Errorf("claim of the new %s: record %v, error %w", eventID, record, err)
		}
		if err := tx.Commit(ctx, []*message.Message{message.NewMessage("1", nil)}); err != nil {
			return err
		}
		if err := s.Store.Acked(ctx, []idempotency.Key{keyOf(eventID)}); err != nil {
			return err
		}
		for _, eventID := range []string{eventID, fmt.Sprintf("young%d", i+1)} {
			tx, record, err := s.Store.Claim(ctx, idempotency.Claim{Key: keyOf(eventID)})
			if tx != nil {
				_ = tx.Rollback(ctx)
			}
			if err != nil || record == nil {
				return fmt.Errorf("%s is no duplicate: error %w", eventID, err)
			}
		}
	}
	return nil
}

func testPurgeTwice(t *testing.T, s *suite) {
	s.insert(t, "reference", 1, time.Hour)
	s.insert(t, "old", 2200, 30*day)
	ctx := bounded(t)
	type result struct {
		purged idempotency.Purged
		err    error
	}
	results := make(chan result, 2)
	for range cap(results) {
		go func() {
			purged, err := s.Store.Purge(ctx)
			results <- result{purged, err}
		}()
	}
	removed := int64(0)
	for range cap(results) {
		r := <-results
		require.NoError(t, r.err)
		removed += r.purged.Claims
	}
	removed += s.purge(t).Claims // one may have left the rest to the other, at its last batch
	require.Equal(t, int64(2200), removed, "no claim is removed twice, and none is left")
	s.requireCount(t, "old", 0)
}

func testPurgeEnds(t *testing.T, s *suite) {
	s.insert(t, "reference", 1, time.Hour)
	s.insert(t, "old", 2200, 30*day)
	ctx, cancel := context.WithCancel(bounded(t))
	cancel()
	purged, err := s.Store.Purge(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, purged)

	ctx, cancel = context.WithCancel(bounded(t))
	defer cancel()
	done := make(chan error, 1)
	go func() {
		var err error
		purged, err = s.Store.Purge(ctx)
		done <- err
	}()
	require.Eventually(t, func() bool {
		n, err := s.Count(t.Context(), subscriber, "old")
		return err == nil && n < 2200
	}, 20*time.Second, time.Millisecond)
	cancel()
	if err := <-done; err != nil { // it may have been quicker
		require.ErrorIs(t, err, context.Canceled)
	}
	left, err := s.Count(bounded(t), subscriber, "old")
	require.NoError(t, err)
	require.Contains(t, []int{2200, 1200, 200, 0}, left, "a batch is removed or not")
	require.LessOrEqual(t, purged.Claims, int64(2200-left), "the answer to a commit may have come too late")
	require.Equal(t, int64(left), s.purge(t).Claims, "the next one goes on, and meets no lock")
}

func testClean(t *testing.T, s *suite) {
	s.process(t, keyOf("unacked"), 1, 30*day)
	s.insert(t, "reference", 1, time.Hour)
	s.insert(t, "old", 1, 30*day)
	logger := watermill.NewCaptureLogger()
	require.ErrorContains(t, s.Store.Clean(t.Context(), 0, logger), "the interval, 0s, is not positive")
	require.ErrorContains(t, s.Store.Clean(t.Context(), time.Second, nil), "the logger is nil")

	ctx, cancel := context.WithCancel(bounded(t))
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Store.Clean(ctx, time.Millisecond, logger) }()
	for _, prefix := range []string{"old", "again"} {
		require.Eventually(t, func() bool {
			n, err := s.Count(t.Context(), subscriber, prefix)
			return err == nil && n == 0
		}, 20*time.Second, time.Millisecond)
		s.insert(t, "again", 1, 30*day)
	}
	cancel()
	require.NoError(t, <-done)
	errs := logger.Captured()[watermill.ErrorLogLevel]
	require.Len(t, errs, 1, "of unacked events, once")
	require.Equal(t, int64(1), errs[0].Fields["events"])
}

func testLookup(t *testing.T, s *suite) {
	record, err := s.Store.Lookup(bounded(t), keyOf("1"))
	require.NoError(t, err)
	require.Nil(t, record)

	begun := time.Now()
	s.process(t, keyOf("1"), 3, 0)
	record, err = s.Store.Lookup(bounded(t), keyOf("1"))
	require.NoError(t, err)
	require.Equal(t, keyOf("1"), record.Key)
	require.Equal(t, "orders", record.Topic)
	require.Equal(t, []byte{1, 2}, record.Fingerprint)
	require.WithinDuration(t, begun, record.ClaimedAt, time.Minute)
	require.Len(t, record.Produced, 3)
	for i, msg := range record.Produced {
		require.Equal(t, fmt.Sprint(i), msg.UUID)
		require.Equal(t, message.Metadata{"name": "value"}, msg.Metadata)
		require.Equal(t, message.Payload("payload"), msg.Payload)
	}
}

func testForget(t *testing.T, s *suite) {
	s.process(t, keyOf("1"), 3, 0)
	s.process(t, keyOf("2"), 3, 0)
	for _, want := range []bool{true, false} {
		existed, err := s.Store.Forget(bounded(t), keyOf("1"))
		require.NoError(t, err)
		require.Equal(t, want, existed)
	}
	s.process(t, keyOf("1"), 3, 0) // it is new, and there is room for its messages
	record, err := s.Store.Lookup(bounded(t), keyOf("2"))
	require.NoError(t, err)
	require.Len(t, record.Produced, 3, "another event keeps what it has")
}

func testRemovedHandler(t *testing.T, s *suite) {
	ctx := bounded(t)
	events, err := s.Store.Unacked(ctx, 0, 10)
	require.NoError(t, err)
	require.Empty(t, events)
	stats, err := s.Store.Stats(ctx)
	require.NoError(t, err)
	require.Empty(t, stats)

	removed := func(eventID string) idempotency.Key {
		return idempotency.Key{SubscriberID: "removed", EventID: eventID}
	}
	s.process(t, removed("1"), 3, 3*day)
	s.process(t, removed("2"), 1, 5*day)
	s.process(t, removed("3"), 0, 4*day)
	s.process(t, keyOf("1"), 1, time.Minute)
	s.insert(t, "acked", 10, 2*day)

	_, err = s.Store.Unacked(ctx, 0, 0)
	require.ErrorContains(t, err, "the limit, 0, is not positive")
	events, err = s.Store.Unacked(ctx, time.Hour, 10)
	require.NoError(t, err)
	require.Len(t, events, 2)
	for i, want := range []idempotency.UnackedEvent{
		{Key: removed("2"), Topic: "orders", ClaimedAt: time.Now().Add(-5 * day), Messages: 1},
		{Key: removed("1"), Topic: "orders", ClaimedAt: time.Now().Add(-3 * day), Messages: 3},
	} {
		require.WithinDuration(t, want.ClaimedAt, events[i].ClaimedAt, time.Minute)
		want.ClaimedAt = events[i].ClaimedAt
		require.Equal(t, want, events[i])
	}
	events, err = s.Store.Unacked(ctx, 0, 1)
	require.NoError(t, err)
	require.Len(t, events, 1)
	events, err = s.Store.Unacked(ctx, 0, 10)
	require.NoError(t, err)
	require.Len(t, events, 3)

	requireStats := func(want ...idempotency.SubscriberStats) {
		t.Helper()
		stats, err := s.Store.Stats(ctx)
		require.NoError(t, err)
		require.Len(t, stats, len(want))
		for i, got := range stats {
			for _, times := range [][2]*time.Time{{&want[i].Oldest, &got.Oldest}, {&want[i].Newest, &got.Newest}, {&want[i].OldestUnacked, &got.OldestUnacked}} {
				require.WithinDuration(t, *times[0], *times[1], time.Minute)
				*times[1] = *times[0]
			}
			require.Equal(t, want[i], got)
		}
	}
	ago := func(age time.Duration) time.Time { return time.Now().Add(-age) }
	present := idempotency.SubscriberStats{SubscriberID: subscriber, Claims: 11, Oldest: ago(2 * day), Newest: ago(time.Minute), Unacked: 1, OldestUnacked: ago(time.Minute)}
	requireStats(
		idempotency.SubscriberStats{SubscriberID: "removed", Claims: 3, Oldest: ago(5 * day), Newest: ago(3 * day), Unacked: 2, OldestUnacked: ago(5 * day)},
		present)

	require.NoError(t, s.Store.Acked(ctx, []idempotency.Key{removed("1"), removed("2")}))
	requireStats(
		idempotency.SubscriberStats{SubscriberID: "removed", Claims: 3, Oldest: ago(5 * day), Newest: ago(3 * day)},
		present)
}
