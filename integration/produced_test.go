package integration_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// shopFaults are what a shop is made to suffer. The zero value is none.
type shopFaults struct {
	// handle runs in the handler of orders, after it has written, with the number of its call, from 1. The handler returns
	// its label also with an error, as no handler should.
	handle func(call int) error
	// publish runs instead of publishing a label, with the number of the try for this event, and may publish by itself.
	publish func(eventID string, try int, publish func() error) error
	// publisherClosed is closed once the router has closed the publisher.
	publisherClosed chan struct{}
	// outer is middleware outside of the idempotency middleware.
	outer []message.HandlerMiddleware
}

// shop creates a label for each order and, downstream, notes each label: [service] over any of the databases.
type shop struct {
	database
	orders, labels message.Subscriber
	publisher      func() message.Publisher
	unacked        func() int

	mu       sync.Mutex
	arrivals map[string]map[string]int // of labels, each delivery: event ID, and UUID with the handler's call
}

// newShop is a shop over a GoChannel.
func newShop(d database) *shop {
	d.Helper()
	c := newChannel(d.T)
	for _, topic := range []string{"orders", "labels", "dead"} {
		c.create(topic, 1)
	}
	return &shop{
		database: d, orders: c.subscriber("orders"), labels: c.subscriber("labels"), publisher: c.publisher,
		unacked:  func() int { return c.unacked("orders") + c.unacked("labels") },
		arrivals: make(map[string]map[string]int),
	}
}

func (s *shop) order(eventIDs ...string) {
	s.Helper()
	for _, id := range eventIDs {
		require.NoError(s, s.publisher().Publish("orders", newOrder(id)))
	}
}

// open starts an instance. Closing it is what a process does that is asked to stop.
func (s *shop) open(f shopFaults) (shut func()) {
	s.Helper()
	ctx := context.WithoutCancel(s.Context())
	idem, err := idempotency.New(s.store, idempotency.WithLogger(watermill.NopLogger{}))
	require.NoError(s, err)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, watermill.NopLogger{})
	require.NoError(s, err)
	router.AddMiddleware(on("note-label", s.recordArrival))
	router.AddMiddleware(f.outer...)
	router.AddMiddleware(idem.Middleware)
	router.AddHandler("create-label", "orders", s.orders, "labels", s.faultyPublisher(f), s.createLabel(f))
	router.AddConsumerHandler("note-label", "labels", s.labels, func(msg *message.Message) error {
		return s.write(msg.Context(), "note-label", string(msg.Payload))
	})
	done := make(chan error, 1)
	go func() { done <- router.Run(ctx) }()
	<-router.Running()
	shut = sync.OnceFunc(func() {
		require.NoError(s, router.Close())
		require.NoError(s, <-done)
		require.NoError(s, idem.Flush(ctx))
	})
	s.Cleanup(shut)
	return shut
}

func (s *shop) createLabel(f shopFaults) message.HandlerFunc {
	calls := counter()
	return func(msg *message.Message) ([]*message.Message, error) {
		id := msg.Metadata.Get(idempotency.EventIDMetadata)
		if err := s.write(msg.Context(), "create-label", id); err != nil {
			return nil, err
		}
		call := calls()
		label := message.NewMessage(watermill.NewUUID(), []byte(id))
		label.Metadata.Set("call", strconv.Itoa(call))
		if f.handle == nil {
			return []*message.Message{label}, nil
		}
		return []*message.Message{label}, f.handle(call)
	}
}

func (s *shop) faultyPublisher(f shopFaults) message.Publisher {
	publisher := s.publisher()
	var mu sync.Mutex
	tries := make(map[string]int)
	return &publisherFunc{publisher, func(topic string, messages ...*message.Message) error {
		if f.publish == nil {
			return publisher.Publish(topic, messages...)
		}
		id := string(messages[0].Payload)
		mu.Lock()
		tries[id]++
		try := tries[id]
		mu.Unlock()
		return f.publish(id, try, func() error { return publisher.Publish(topic, messages...) })
	}, f.publisherClosed}
}

func (s *shop) recordArrival(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		id := string(msg.Payload)
		s.mu.Lock()
		if s.arrivals[id] == nil {
			s.arrivals[id] = make(map[string]int)
		}
		s.arrivals[id][msg.UUID+" of call "+msg.Metadata.Get("call")]++
		s.mu.Unlock()
		return next(msg)
	}
}

// delivered counts the deliveries of labels, and the different labels among them.
func (s *shop) delivered() (deliveries, labels int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range s.arrivals {
		labels += len(of)
		for _, n := range of {
			deliveries += n
		}
	}
	return deliveries, labels
}

func (s *shop) awaitIdle() {
	s.Helper()
	require.Eventually(s, func() bool { return s.unacked() == 0 && s.stored() == 0 }, patience, 20*time.Millisecond,
		"%v", lazy(func() string { return fmt.Sprint(s.unacked(), " unacked, ", s.stored(), " stored") }))
}

// finish waits until all is acked and swept, closes and judges.
func (s *shop) finish(shut func(), events int) {
	s.Helper()
	s.awaitIdle()
	shut()
	s.requireOnce(events)
	_, labels := s.delivered()
	require.Equal(s, events, labels, "UUIDs of produced messages: %v", s.arrivals)
}

// failing lets the first n tries of each event fail, before or after the broker has the label.
func failing(n int, published bool) func(string, int, func() error) error {
	return func(_ string, try int, publish func() error) error {
		if try > n {
			return publish()
		}
		if try == 1 {
			<-time.After(glance) // a background that removes what is acked has had its time
		}
		if published {
			if err := publish(); err != nil {
				return err
			}
		}
		return errFault
	}
}

func TestProducedMessagesArriveThoughPublishingFails(t *testing.T) {
	t.Parallel()
	for _, failures := range []int{1, 2, 7} {
		for name, published := range map[string]bool{"not published": false, "published": true} {
			t.Run(fmt.Sprintf("%d failures, %s", failures, name), func(t *testing.T) {
				t.Parallel()
				overDatabases(t, func(d database) {
					s := newShop(d)
					shut := s.open(shopFaults{publish: failing(failures, published)})
					s.order("1", "2", "1")
					s.finish(shut, 2)
					deliveries, _ := s.delivered()
					if published {
						require.Equal(d, 2*(1+failures), deliveries)
					} else {
						require.Equal(d, 2, deliveries)
					}
				})
			})
		}
	}
}

// The router closes the publisher while the handler runs, which then succeeds. Another instance publishes its label.
func TestProducedMessagesArriveThoughTheirPublisherIsClosed(t *testing.T) {
	t.Parallel()
	overDatabases(t, func(d database) {
		s := newShop(d)
		entered, closed := make(chan struct{}), make(chan struct{})
		shut := s.open(shopFaults{publisherClosed: closed, handle: func(int) error {
			close(entered)
			<-closed
			return nil
		}})
		s.order("1")
		receive(d, entered)
		shut()
		require.Equal(d, 1, d.count("select count(*) from effect"), "a handler that has succeeded is committed")
		require.Equal(d, 1, d.stored())
		deliveries, _ := s.delivered()
		require.Zero(d, deliveries)

		shut = s.open(shopFaults{publish: failing(1, false)})
		s.order("2")
		s.finish(shut, 2)
	})
}

// What turns an error into an ack, or into another attempt, is outside. The publisher fails, too.
func TestNothingOfAFailedAttemptIsPublished(t *testing.T) {
	t.Parallel()
	for name, outer := range map[string]func(s *shop) message.HandlerMiddleware{
		"Retry": func(*shop) message.HandlerMiddleware {
			return middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, ResetContextOnRetry: true}.Middleware
		},
		"PoisonQueue": func(s *shop) message.HandlerMiddleware {
			poison, err := middleware.PoisonQueue(s.publisher(), "dead")
			require.NoError(s, err)
			return poison
		},
		"IgnoreErrors": func(*shop) message.HandlerMiddleware {
			return middleware.NewIgnoreErrors([]error{errFault}).Middleware
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			overDatabases(t, func(d database) {
				s := newShop(d)
				const failures = 2
				calls := 0
				shut := s.open(shopFaults{
					outer: []message.HandlerMiddleware{on("create-label", outer(s))},
					handle: func(call int) error {
						if calls = call; call <= failures {
							return errFault
						}
						return nil
					},
					publish: failing(3, true),
				})
				for s.order("1"); ; s.order("1") {
					s.awaitIdle()
					if calls > failures {
						break
					}
					require.Empty(d, s.arrivals, "labels of a failed attempt")
					require.Zero(d, d.count("select count(*) from idempotency_claim")+d.count("select count(*) from effect"))
				}
				s.finish(shut, 1)
				for label := range s.arrivals["1"] {
					require.Contains(d, label, fmt.Sprintf("of call %d", failures+1))
				}
			})
		})
	}
}

// After the ack and the sweep, neither this instance nor another one publishes anything again.
func TestLateDuplicatePublishesNothing(t *testing.T) {
	t.Parallel()
	overDatabases(t, func(d database) {
		s := newShop(d)
		var published atomic.Int64
		counted := shopFaults{publish: func(_ string, _ int, publish func() error) error {
			published.Add(1)
			return publish()
		}}
		shut := s.open(counted)
		s.order("1", "2")
		s.awaitIdle()
		s.order("1", "2", "1")
		s.awaitIdle()
		shut()
		shut = s.open(counted) // a GoChannel sends it all that there ever was
		s.order("2", "1")
		s.finish(shut, 2)
		require.Equal(d, 2, d.count("select count(*) from effect where handler = 'create-label'"))
		require.EqualValues(d, 2, published.Load(), "labels, each once")
	})
}
