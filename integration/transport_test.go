package integration_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5/stdlib"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/internal/pgtest"
)

// transport is what carries the messages of a test, which fails with it.
type transport interface {
	// create makes a topic, where a broker wants that.
	create(topic string, partitions int32)
	publisher() message.Publisher
	// subscriber returns a consumer of the topic's one group.
	subscriber(topic string) message.Subscriber
	// unacked returns how many messages of the topic the broker would deliver (again) if all consumers were gone.
	unacked(topic string) int
}

// transports are the kinds of brokers; each test opens its own.
var transports = map[string]func(t *testing.T, p place) transport{
	"gochannel": func(t *testing.T, _ place) transport { t.Helper(); return newChannel(t) },
	"kafka":     func(t *testing.T, _ place) transport { t.Helper(); return newKafka(t) },
	"rabbitmq":  func(t *testing.T, _ place) transport { t.Helper(); return newRabbit(t, nil) },
	"rabbitmq-quorum": func(t *testing.T, _ place) transport {
		t.Helper()
		return newRabbit(t, amqp091.Table{"x-queue-type": "quorum"})
	},
	"watermill-sql": func(t *testing.T, p place) transport { t.Helper(); return newSQL(t, p.Schema) },
}

// setting returns the address of a broker. Without one the test fails; under -short it is skipped.
func setting(t *testing.T, variable string) string {
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

// channelTransport is a persistent GoChannel: a new subscriber is sent everything, also what has been acked.
type channelTransport struct {
	channel *gochannel.GoChannel

	mu      sync.Mutex
	pending map[string]map[string]bool // UUIDs by topic: published, and not acked since
}

func newChannel(t *testing.T) *channelTransport {
	t.Helper()
	c := &channelTransport{
		channel: gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{}),
		pending: make(map[string]map[string]bool),
	}
	t.Cleanup(func() { require.NoError(t, c.channel.Close()) })
	return c
}

func (c *channelTransport) create(topic string, _ int32) {
	c.pending[topic] = make(map[string]bool)
}

func (c *channelTransport) unacked(topic string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending[topic])
}

func (c *channelTransport) publisher() message.Publisher {
	return &channelPublisher{transport: c}
}

func (c *channelTransport) subscriber(string) message.Subscriber {
	return channelSubscriber{c}
}

// channelPublisher can be closed alone, as those of other brokers can.
type channelPublisher struct {
	transport *channelTransport
	closed    atomic.Bool
}

func (p *channelPublisher) Publish(topic string, messages ...*message.Message) error {
	if p.closed.Load() {
		return errors.New("the publisher is closed")
	}
	p.transport.mu.Lock()
	for _, msg := range messages {
		p.transport.pending[topic][msg.UUID] = true
	}
	p.transport.mu.Unlock()
	return p.transport.channel.Publish(topic, messages...)
}

func (p *channelPublisher) Close() error {
	p.closed.Store(true)
	return nil
}

// channelSubscriber ends with its context; its Close does not close the channel for all.
type channelSubscriber struct{ transport *channelTransport }

func (channelSubscriber) Close() error { return nil }

func (s channelSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := s.transport.channel.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for msg := range in {
			out <- msg
			go s.transport.awaitAck(ctx, topic, msg)
		}
	}()
	return out, nil
}

func (c *channelTransport) awaitAck(ctx context.Context, topic string, msg *message.Message) {
	select {
	case <-msg.Acked():
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.pending[topic], msg.UUID)
	case <-msg.Nacked():
	case <-ctx.Done(): // GoChannel does not hear an ack any more, either
	}
}

// sqlTransport is watermill-sql/v3 on PostgreSQL.
type sqlTransport struct {
	*testing.T
	db *sql.DB
}

func newSQL(t *testing.T, schema string) *sqlTransport {
	t.Helper()
	config := pgtest.Config(t, 1).ConnConfig
	config.RuntimeParams["search_path"] = schema
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { _ = db.Close() })
	return &sqlTransport{t, db}
}

const sqlGroup = "group"

func (s *sqlTransport) create(topic string, _ int32) {
	s.Helper()
	queries := wsql.DefaultPostgreSQLSchema{}.SchemaInitializingQueries(topic)
	for _, query := range append(queries, wsql.DefaultPostgreSQLOffsetsAdapter{}.SchemaInitializingQueries(topic)...) {
		_, err := s.db.ExecContext(s.Context(), query.Query, query.Args...)
		require.NoError(s, err)
	}
}

func (s *sqlTransport) publisher() message.Publisher {
	s.Helper()
	publisher, err := wsql.NewPublisher(s.db, wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}}, watermill.NopLogger{})
	require.NoError(s, err)
	return publisher
}

func (s *sqlTransport) subscriber(_ string) message.Subscriber {
	s.Helper()
	subscriber, err := wsql.NewSubscriber(s.db, wsql.SubscriberConfig{
		ConsumerGroup: sqlGroup,
		PollInterval:  20 * time.Millisecond, ResendInterval: 10 * time.Millisecond, RetryInterval: 20 * time.Millisecond,
		SchemaAdapter: wsql.DefaultPostgreSQLSchema{SubscribeBatchSize: 1}, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
	}, watermill.NopLogger{})
	require.NoError(s, err)
	return subscriber
}

func (s *sqlTransport) unacked(topic string) (n int) {
	s.Helper()
	require.NoError(s, s.db.QueryRowContext(s.Context(), `select count(*) from "watermill_`+topic+`" m where not exists (
		select from "watermill_offsets_`+topic+`" where consumer_group = $1
		and (last_processed_transaction_id, offset_acked) >= (m.transaction_id, m."offset"))`, sqlGroup).Scan(&n))
	return n
}
