// Package e2e tries an example against its real broker and PostgreSQL.
package e2e

import (
	"context"
	"crypto/rand"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/examples/shipping"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
)

// Setting returns an address of a server. Without one the test fails; under -short it is skipped.
func Setting(t *testing.T, variable string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a broker: not run with -short")
	}
	value := os.Getenv(variable)
	if value == "" {
		t.Fatalf("%s is not set: run integration/services/start.sh and then: . .services/env", variable)
	}
	return value
}

// Topic returns a name that nobody has used.
func Topic() string { return "orders-" + strings.ToLower(rand.Text()) }

// Counts is what the observer was told.
type Counts struct {
	mu       sync.Mutex
	outcomes map[idempotency.Outcome]int
}

// Observe implements [idempotency.Observer].
func (c *Counts) Observe(_ context.Context, e idempotency.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.outcomes == nil {
		c.outcomes = make(map[idempotency.Outcome]int)
	}
	c.outcomes[e.Outcome]++
}

// Of returns how often an outcome was observed.
func (c *Counts) Of(o idempotency.Outcome) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.outcomes[o]
}

// Service is the running example.
type Service struct {
	*Counts
	Pool      *pgxpool.Pool
	Publisher message.Publisher
}

// Start runs the service in a schema of its own, until the test ends.
func Start(t *testing.T, b shipping.Broker, topic string) *Service {
	t.Helper()
	config := pgtest.Config(t, 16)
	config.ConnConfig.RuntimeParams["search_path"] = pgtest.Schema(t)
	s := &Service{Counts: &Counts{}, Pool: pgtest.Open(t, config)}
	require.NoError(t, shipping.Migrate(t.Context(), s.Pool))
	var err error
	s.Publisher, err = b.NewPublisher(watermill.NopLogger{})
	require.NoError(t, err)
	subscriber, err := b.NewSubscriber(watermill.NopLogger{})
	require.NoError(t, err)
	router, err := shipping.NewRouter(t.Context(), s.Pool, topic, subscriber, s.Publisher, s)
	require.NoError(t, err)
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(context.WithoutCancel(t.Context())) }()
	<-router.Running()
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-stopped)
		_ = s.Publisher.Close()
	})
	return s
}

// RequireLabels waits until so many deliveries have ended well, and tells that each order has one label.
func (s *Service) RequireLabels(t *testing.T, orders, deliveries int) {
	t.Helper()
	require.Eventually(t, func() bool { return s.Of(idempotency.Processed)+s.Of(idempotency.Duplicate) == deliveries }, time.Minute, 20*time.Millisecond,
		"%d processed and %d duplicates of %d deliveries", s.Of(idempotency.Processed), s.Of(idempotency.Duplicate), deliveries)
	require.Equal(t, orders, s.Of(idempotency.Processed))
	var labels, distinct int
	require.NoError(t, s.Pool.QueryRow(t.Context(), "select count(*), count(distinct order_id) from shipping_label").Scan(&labels, &distinct))
	require.Equal(t, orders, labels)
	require.Equal(t, orders, distinct)
}
