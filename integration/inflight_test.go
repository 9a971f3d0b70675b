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
				overTransports(t, func(w *world) { w.twoConsumers(test.policy, result) }, test.transports...)
			})
		}
	}
}

func (w *world) twoConsumers(policy idempotency.InFlight, result error) {
	w.Helper()
	if k, ok := w.transport.(*kafkaTransport); ok {
		k.rebalanceTimeout = time.Second
	}
	entered, release := make(chan struct{}), make(chan error, 1)
	defer close(release)
	first := w.start(faults{
		options: []idempotency.Option{idempotency.WithInFlight(policy)},
		handle: onFirst(func(context.Context, pgx.Tx) error {
			close(entered)
			return <-release
		}),
	})
	w.publish("1")
	receive(w, entered)

	closed := make(chan struct{})
	leave := func() {
		defer close(closed)
		first.close()
	}
	if w.Transport != "kafka" {
		go leave()
	}
	refused := make(chan struct{}, 1)
	second := w.start(faults{options: []idempotency.Option{
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
		receive(w, refused)
	} else {
		require.Eventually(w, w.claimWaits, patience, 20*time.Millisecond, "the second claim waits for the first")
	}
	require.Empty(w, w.effects("create-label"))

	release <- result
	require.Eventually(w, func() bool { return len(w.effects("create-label")) == 1 }, patience, 20*time.Millisecond)
	if w.Transport == "kafka" {
		leave()
	}
	<-closed
	second.finish("1")
}

// claimWaits tells whether a statement on the world's claims waits for a lock.
func (w *world) claimWaits() bool {
	w.Helper()
	return w.count(`select count(*) from pg_stat_activity
		where wait_event_type = 'Lock' and query ilike '%insert%' || $1 || '%claim%'`, w.Schema) > 0
}
