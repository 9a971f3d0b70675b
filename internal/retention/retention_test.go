package retention_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/retention"
)

// run runs the loop with what purge returns at the n-th call, from 0, and returns the times between the calls.
func run(t *testing.T, calls int, logger watermill.LoggerAdapter, purge func(n int) (idempotency.Purged, error)) (waits []time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		last := time.Now()
		err := retention.Clean(ctx, time.Minute, logger, func(context.Context) (idempotency.Purged, error) {
			waits = append(waits, time.Since(last))
			last = time.Now()
			if len(waits) == calls {
				cancel()
			}
			return purge(len(waits) - 1)
		})
		require.NoError(t, err, "the end of its context is its end")
	})
	return waits
}

func requireBetween(t *testing.T, lowest, wait, highest time.Duration) {
	t.Helper()
	require.GreaterOrEqual(t, wait, lowest)
	require.LessOrEqual(t, wait, highest)
}

func TestCleanWaitsForTheInterval(t *testing.T) {
	t.Parallel()
	waits := run(t, 20, watermill.NopLogger{}, func(int) (idempotency.Purged, error) { return idempotency.Purged{}, nil })
	requireBetween(t, 0, waits[0], time.Minute)
	differ := false
	for _, wait := range waits[1:] {
		requireBetween(t, time.Minute, wait, 75*time.Second)
		differ = differ || wait != waits[1]
	}
	require.True(t, differ, "instances do not stay in step")
}

func TestCleanBacksOff(t *testing.T) {
	t.Parallel()
	down := errors.New("down")
	logger := watermill.NewCaptureLogger()
	waits := run(t, 10, logger, func(n int) (idempotency.Purged, error) {
		if n < 7 {
			return idempotency.Purged{}, down
		}
		return idempotency.Purged{}, nil
	})
	for i, times := range []time.Duration{2, 4, 8, 16, 16, 16, 16, 1, 1} {
		requireBetween(t, times*time.Minute, waits[i+1], times*75*time.Second)
	}
	require.Len(t, logger.Captured()[watermill.ErrorLogLevel], 1, "an outage is told once")
	require.Equal(t, down, logger.Captured()[watermill.ErrorLogLevel][0].Err)
	require.Len(t, logger.Captured()[watermill.DebugLogLevel], 6)
	require.Len(t, logger.Captured()[watermill.InfoLogLevel], 1, "and its end")
}

func TestCleanTellsOfMoreUnackedEvents(t *testing.T) {
	t.Parallel()
	logger := watermill.NewCaptureLogger()
	counts := []int64{0, 2, 2, 1, 1, 3, 0}
	run(t, len(counts)+1, logger, func(n int) (idempotency.Purged, error) {
		return idempotency.Purged{Unacked: counts[min(n, len(counts)-1)], Elsewhere: n == 3}, nil
	})
	var told []any
	for _, entry := range logger.Captured()[watermill.ErrorLogLevel] {
		told = append(told, entry.Fields["events"])
	}
	require.Equal(t, []any{int64(2), int64(3)}, told)
}

// neverAnswers is a network that swallows what is sent.
type neverAnswers struct{ retention.Engine }

func (neverAnswers) Newest(context.Context, time.Duration) (time.Time, error) {
	return time.Now(), nil
}

func (neverAnswers) Remove(ctx context.Context, _, _ time.Time, _ int) (int64, time.Time, error) {
	<-ctx.Done()
	return 0, time.Time{}, ctx.Err()
}

func TestABatchIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keep, begun := time.Hour, time.Now()
		_, err := retention.Purge(t.Context(), neverAnswers{}, &keep)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Minute, time.Since(begun))
	})
}
