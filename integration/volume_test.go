package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

const (
	volumeEvents     = 10_000
	volumeDuplicates = 2_000
	volumePartitions = 12 // of Kafka: handlers at once in a group
	volumePrefetch   = 6  // of RabbitMQ: handlers at once in a consumer
)

// Two consumers share the work, one of them a process of its own. While handlers run, a third one joins, the first one is
// closed and the process is killed.
func TestVolume(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"kafka", "rabbitmq", "rabbitmq-quorum"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, name, volumePartitions)
			begun := time.Now()
			w.publishVolume()
			published := time.Now()
			outcomes := &outcomes{}

			entered := make(chan struct{})
			var hold atomic.Bool
			first := w.startConsumer(outcomes, func(ctx context.Context) error {
				if hold.CompareAndSwap(true, false) {
					close(entered)
					<-ctx.Done() // and it succeeds: the commit stands, and the broker delivers again
				}
				return nil
			})
			kill := w.startProcess(nowhere)
			w.awaitEffects(volumeEvents / 5)
			second := w.startConsumer(outcomes, nil)
			w.awaitEffects(2 * volumeEvents / 5)
			hold.Store(true)
			receive(t, entered)
			first.close()
			w.awaitEffects(3 * volumeEvents / 5)
			kill()
			w.awaitEffects(volumeEvents)
			require.Eventually(t, func() bool { return w.unacked(w.Orders) == 0 }, patience, 100*time.Millisecond)
			second.close()
			for w.unacked(w.Orders) > 0 { // its closing was faster than an ack
				last := w.startConsumer(outcomes, nil)
				require.Eventually(t, func() bool { return w.unacked(w.Orders) == 0 }, patience, 100*time.Millisecond)
				last.close()
			}

			effects, events := w.count("select count(*) from effect"), w.count("select count(distinct event_id) from effect")
			t.Logf("%d messages about %d events published in %v; %d effects of %d events in %v; outcomes, without those of the killed process: %v",
				volumeEvents+volumeDuplicates, volumeEvents, published.Sub(begun).Round(time.Millisecond),
				effects, events, time.Since(published).Round(time.Millisecond), outcomes)
			require.Equal(t, volumeEvents, effects)
			require.Equal(t, volumeEvents, events)
			require.Equal(t, volumeEvents, w.count("select count(*) from idempotency_claim"))
		})
	}
}

func (w *world) publishVolume() {
	w.Helper()
	messages := make([]*message.Message, 0, volumeEvents+volumeDuplicates)
	for i := range volumeEvents {
		messages = append(messages, newOrder(fmt.Sprint(i)))
	}
	for range volumeDuplicates {
		messages = append(messages, newOrder(fmt.Sprint(rand.N(volumeEvents))))
	}
	rand.Shuffle(len(messages), func(i, j int) { messages[i], messages[j] = messages[j], messages[i] })
	publisher := w.publisher()
	const workers = 8
	errs := make(chan error, workers)
	for i := range workers {
		go func() {
			errs <- publisher.Publish(w.Orders, messages[i*len(messages)/workers:(i+1)*len(messages)/workers]...)
		}()
	}
	for range workers {
		require.NoError(w, <-errs)
	}
	require.NoError(w, publisher.Close())
}

// startConsumer starts a service whose only handler produces nothing.
func (w *world) startConsumer(o *outcomes, handle func(ctx context.Context) error) *service {
	w.Helper()
	s := w.newService(faults{options: []idempotency.Option{idempotency.WithObserver(o)}})
	subscriber := w.subscriber(w.Orders)
	if w.Transport != "kafka" {
		var err error
		subscriber, err = amqpmessage.Parallel(subscriber, volumePrefetch)
		require.NoError(w, err)
	}
	s.router.AddConsumerHandler("create-label", w.Orders, subscriber, idempotency.ConsumerHandler(
		func(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
			if err := write(ctx, tx, "create-label", msg.Metadata.Get(idempotency.EventIDMetadata)); err != nil || handle == nil {
				return err
			}
			return handle(ctx)
		}))
	s.run()
	return s
}

// awaitEffects waits until there are n effects, as long as they become more.
func (w *world) awaitEffects(n int) {
	w.Helper()
	for effects := w.count("select count(*) from effect"); effects < n; {
		before := effects
		require.Eventually(w, func() bool {
			effects = w.count("select count(*) from effect")
			return effects > before
		}, patience, 50*time.Millisecond, "%d effects, and no more", before)
	}
}

// outcomes counts what became of deliveries.
type outcomes struct {
	mu     sync.Mutex
	counts map[string]int
}

func (o *outcomes) Observe(_ context.Context, e idempotency.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.counts == nil {
		o.counts = make(map[string]int)
	}
	o.counts[e.Outcome.String()]++
}

func (o *outcomes) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return fmt.Sprint(o.counts)
}
