package integration_test

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

// feed is a subscriber that delivers what it is given, all at once.
type feed chan *message.Message

func (f feed) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for {
			select {
			case msg := <-f:
				select {
				case out <- msg:
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func (f feed) Close() error { return nil }

// deliver delivers an order until it is acked.
func (f feed) deliver(eventID string) error {
	timeout := time.After(patience)
	for {
		msg := newOrder(eventID)
		select {
		case f <- msg:
		case <-timeout:
			return errors.New("event " + eventID + " is not received")
		}
		select {
		case <-msg.Acked():
			return nil
		case <-msg.Nacked():
		case <-timeout:
			return errors.New("event " + eventID + " is not acked")
		}
	}
}

// heldAcks lets no stored message be removed before release is closed.
type heldAcks struct {
	idempotency.Store
	release chan struct{}
}

func (h *heldAcks) Acked(ctx context.Context, keys []idempotency.Key) error {
	select {
	case <-h.release:
		return h.Store.Acked(ctx, keys)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A thousand duplicates of acked events come at once: nothing is sent again, whether the background has removed what is
// stored, or not yet.
func TestStormOfDuplicatesPublishesNothing(t *testing.T) {
	t.Parallel()
	const events = 10
	for name, swept := range map[string]bool{"right after the ack": false, "after the sweep": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			overDatabases(t, func(d database) {
				held := &heldAcks{d.store, make(chan struct{})}
				d.store = held
				duplicates := 1000
				if strings.HasSuffix(d.Name(), "SQLite") { // which processes one after the other
					duplicates = 100
				}
				s := newShop(d)
				orders := make(feed)
				s.orders = orders
				var published atomic.Int64
				shut := s.open(shopFaults{publish: func(_ string, _ int, publish func() error) error {
					published.Add(1)
					return publish()
				}})
				deliver := func(n int) {
					errs := make(chan error, n)
					for i := range n {
						go func() { errs <- orders.deliver(fmt.Sprint(i % events)) }()
					}
					for range n {
						require.NoError(d, <-errs)
					}
				}
				deliver(events)
				if swept {
					close(held.release)
					s.awaitIdle()
				}
				deliver(duplicates)
				require.EqualValues(d, events, published.Load(), "published labels")
				if !swept {
					require.Equal(d, events, d.stored(), "the storm was over before the sweep")
					close(held.release)
				}
				s.finish(shut, events)
				deliveries, _ := s.delivered()
				require.Equal(d, events, deliveries)
			})
		})
	}
}

// shards is a GoChannel with several messages of a topic in flight, as a broker has them.
type shards struct{ *channelTransport }

const shardCount = 6

func shard(topic string, n uint32) string { return fmt.Sprintf("%s-%d", topic, n%shardCount) }

func newShards(t *testing.T, topics ...string) shards {
	t.Helper()
	s := shards{newChannel(t)}
	for _, topic := range topics {
		for n := range uint32(shardCount) {
			s.create(shard(topic, n), 1)
		}
	}
	return s
}

func (s shards) publisher() message.Publisher {
	publisher := s.channelTransport.publisher()
	return &publisherFunc{Publisher: publisher, publish: func(topic string, messages ...*message.Message) error {
		for _, msg := range messages {
			if err := publisher.Publish(shard(topic, crc32.ChecksumIEEE([]byte(msg.UUID))), msg); err != nil {
				return err
			}
		}
		return nil
	}}
}

func (s shards) Close() error { return nil }

func (s shards) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	var n atomic.Uint32
	each := subscribeFunc(func(ctx context.Context, topic string) (<-chan *message.Message, error) {
		return s.channelTransport.subscriber("").Subscribe(ctx, shard(topic, n.Add(1)))
	})
	all, err := amqpmessage.Parallel(each, shardCount)
	if err != nil {
		return nil, err
	}
	return all.Subscribe(ctx, topic)
}

type subscribeFunc func(ctx context.Context, topic string) (<-chan *message.Message, error)

func (f subscribeFunc) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	return f(ctx, topic)
}
func (subscribeFunc) Close() error { return nil }

func (s shards) unacked(topics ...string) (n int) {
	for _, topic := range topics {
		for i := range uint32(shardCount) {
			n += s.channelTransport.unacked(shard(topic, i))
		}
	}
	return n
}

// Ten thousand messages, and a publisher that fails one time in ten before the broker has the message, and one time in ten
// after.
func TestTenThousandProducedMessages(t *testing.T) {
	t.Parallel()
	const (
		events   = 10_000
		inFlight = 500
	)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	d := databases["postgres"](t)
	c := newShards(t, "orders", "labels")
	s := newShop(d)
	s.orders, s.labels, s.publisher = c, c, c.publisher
	s.unacked = func() int { return c.unacked("orders", "labels") }
	var before, after atomic.Int64
	shut := s.open(shopFaults{publish: func(eventID string, try int, publish func() error) error {
		event, err := strconv.ParseUint(eventID, 10, 32)
		if err != nil {
			return err
		}
		switch rand.New(rand.NewPCG(seed, event<<32|uint64(try))).IntN(10) {
		case 0:
			before.Add(1)
			return errFault
		case 1:
			after.Add(1)
			return errors.Join(publish(), errFault)
		}
		return publish()
	}})
	begun := time.Now()
	for i := range events {
		s.order(fmt.Sprint(i))
		if i%50 == 0 {
			require.Eventually(t, func() bool { return s.unacked() < inFlight }, patience, time.Millisecond)
		}
	}
	s.finish(shut, events)
	deliveries, _ := s.delivered()
	t.Logf("%d messages in %v; publishing failed %d times before the broker had the message, and %d times after: %d repeats, none lost",
		events, time.Since(begun).Round(time.Millisecond), before.Load(), after.Load(), deliveries-events)
	require.EqualValues(t, after.Load(), deliveries-events, "a message is repeated only if publishing has failed")
}
