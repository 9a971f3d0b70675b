package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// A second consumer gets the message while the handler of the first one runs: on Kafka because it has joined the group and
// the handler is slower than the rebalance, elsewhere because the first consumer is closing.
func TestTrap12_TwoConsumersHaveTheMessage(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy     idempotency.InFlight
		transports []string // nil: all
	}{
		"wait":         {policy: idempotency.Wait()},
		"wait at most": {policy: idempotency.WaitAtMost(50 * time.Millisecond), transports: []string{"kafka", "rabbitmq"}},
		"fail fast":    {policy: idempotency.FailFast(), transports: []string{"kafka", "rabbitmq"}},
	} {
		for outcome, result := range map[string]error{"first commits": nil, "first fails": errFault} {
			t.Run(name+", "+outcome, func(t *testing.T) {
				t.Parallel()
				overTransports(t, func(t *testing.T, w *world) { twoConsumers(t, w, test.policy, result) }, test.transports...)
			})
		}
	}
}

func twoConsumers(t *testing.T, w *world, policy idempotency.InFlight, result error) {
	t.Helper()
	if k, ok := w.transport.(*kafkaTransport); ok {
		k.rebalanceTimeout = time.Second
	}
	entered, release := make(chan struct{}), make(chan error)
	first := w.start(t, faults{
		options: []idempotency.Option{idempotency.WithInFlight(policy)},
		handle: onFirst(func(context.Context, pgx.Tx) error {
			close(entered)
			return <-release
		}),
	})
	w.publish(t, "1")
	<-entered

	closed := make(chan struct{})
	leave := func() {
		defer close(closed)
		first.close(t)
	}
	if w.Transport != "kafka" {
		go leave()
	}
	refused := make(chan struct{}, 1)
	second := w.start(t, faults{options: []idempotency.Option{
		idempotency.WithInFlight(policy),
		idempotency.WithObserver(idempotency.ObserverFunc(func(_ context.Context, e idempotency.Event) {
			if e.Outcome == idempotency.ClaimInFlight {
				select {
				case refused <- struct{}{}:
				default:
				}
			}
		})),
	}})
	if _, bounded := policy.Limit(); bounded {
		<-refused
	} else {
		require.Eventually(t, func() bool { return w.claimWaits(t) }, patience, 20*time.Millisecond, "the second claim waits for the first")
	}
	require.Empty(t, w.effects(t, "create-label"))

	release <- result
	require.Eventually(t, func() bool { return len(w.effects(t, "create-label")) == 1 }, patience, 20*time.Millisecond)
	if w.Transport == "kafka" {
		leave()
	}
	<-closed
	second.finish(t, "1")
}

// claimWaits tells whether a statement on the world's claims waits for a lock.
func (w *world) claimWaits(t *testing.T) bool {
	t.Helper()
	return w.count(t, `select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query ilike '%insert%' || $1 || '%claim%'`, w.Schema) > 0
}
