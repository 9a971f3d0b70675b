package outbox_test

import (
	"context"
	"database/sql"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/outbox"
	"github.com/watermill-idempotency/idempotency/postgres"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

func TestMain(m *testing.M) {
	if os.Getenv(childSchema) != "" {
		childMain()
		return
	}
	goleak.VerifyTestMain(m)
}

// patience is for what must come; a failing test waits that long. Other transactions of the server delay forwarding.
const (
	patience    = 30 * time.Second
	millisecond = time.Millisecond // between two looks
)

// bundle is an outbox in a schema of its own, and a middleware whose store is there too.
type bundle struct {
	pool   *pgxpool.Pool
	db     *sql.DB
	schema string
	store  idempotency.Store
	pub    message.Publisher
	table  string
}

// stores are the two kinds of transactions that handlers get.
var stores = map[string]func(t *testing.T, b *bundle) (idempotency.Store, error){
	"pgx": func(t *testing.T, b *bundle) (idempotency.Store, error) {
		t.Helper()
		require.NoError(t, postgres.Migrate(t.Context(), b.pool, postgres.WithSchema(b.schema)))
		return postgres.New(t.Context(), b.pool, postgres.WithSchema(b.schema))
	},
	"database/sql": func(t *testing.T, b *bundle) (idempotency.Store, error) {
		t.Helper()
		require.NoError(t, sqlstore.Migrate(t.Context(), b.db, sqlstore.PostgreSQL(), sqlstore.WithSchema(b.schema)))
		return sqlstore.New(t.Context(), b.db, sqlstore.PostgreSQL(), sqlstore.WithSchema(b.schema))
	},
}

// forEachStore runs a test with both.
func forEachStore(t *testing.T, test func(t *testing.T, b *bundle)) {
	t.Helper()
	for name := range stores {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, setup(t, name))
		})
	}
}

func setup(t *testing.T, store string) *bundle {
	t.Helper()
	return setupWith(t, store, pgtest.Config(t, 8))
}

func setupWith(t *testing.T, store string, config *pgxpool.Config) *bundle {
	t.Helper()
	b := &bundle{schema: pgtest.SchemaAt(t, config.ConnString()), pool: pgtest.Open(t, config)}
	b.db = stdlib.OpenDBFromPool(b.pool)
	t.Cleanup(func() { require.NoError(t, b.db.Close()) })
	b.table = b.schema + ".watermill_outbox"
	require.NoError(t, outbox.Migrate(t.Context(), b.db, outbox.WithSchema(b.schema)))
	b.pub = b.publisher(t)
	var err error
	b.store, err = stores[store](t, b)
	require.NoError(t, err)
	return b
}

func (b *bundle) publisher(t *testing.T, opts ...outbox.PublisherOption) message.Publisher {
	t.Helper()
	pub, err := outbox.New(t.Context(), b.db, append(opts, outbox.WithSchema(b.schema))...)
	require.NoError(t, err)
	return pub
}

// handle runs a handler once under the middleware.
func (b *bundle) handle(t *testing.T, eventID string, handler func(ctx context.Context) error) error {
	t.Helper()
	idem, err := idempotency.New(b.store, idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(watermill.NopLogger{}))
	require.NoError(t, err)
	msg := message.NewMessageWithContext(t.Context(), "uuid", nil)
	msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
	_, err = idem.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		return nil, handler(msg.Context())
	})(msg)
	return err
}

// rows is the number of messages that are committed to the outbox.
func (b *bundle) rows(t *testing.T) int {
	t.Helper()
	var n int
	require.NoError(t, b.db.QueryRowContext(t.Context(), "select count(*) from "+b.table).Scan(&n))
	return n
}

// newMessage is a message with the context, as cqrs.EventBus makes them.
func newMessage(ctx context.Context, payload string) *message.Message {
	return message.NewMessageWithContext(ctx, watermill.NewUUID(), message.Payload(payload))
}

// broker is a publisher that keeps what it is given.
type broker struct {
	mu       sync.Mutex
	received []received
	publish  func(received) error // before it is kept
}

type received struct {
	topic, uuid, eventID, payload string
	metadata                      message.Metadata
	ctx                           context.Context
}

func (b *broker) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		r := received{topic, msg.UUID, msg.Metadata.Get(idempotency.EventIDMetadata), string(msg.Payload), msg.Metadata, msg.Context()}
		if b.publish != nil {
			if err := b.publish(r); err != nil {
				return err
			}
		}
		b.mu.Lock()
		b.received = append(b.received, r)
		b.mu.Unlock()
	}
	return nil
}

func (b *broker) Close() error { return nil }

func (b *broker) all() []received {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]received(nil), b.received...)
}

// texts are the topics and payloads, in order.
func texts(messages []received) []string {
	var texts []string
	for _, r := range messages {
		texts = append(texts, r.topic+": "+r.payload)
	}
	return texts
}

func (b *broker) has(text string) bool { return slices.Contains(texts(b.all()), text) }

// forward runs a forwarder until stop is called, at the latest to the end of the test.
func (b *bundle) forward(t *testing.T, to message.Publisher, opts ...outbox.ForwarderOption) (stop func()) {
	t.Helper()
	opts = append([]outbox.ForwarderOption{
		outbox.WithSchema(b.schema), outbox.WithLogger(watermill.NopLogger{}), outbox.WithPollInterval(10 * time.Millisecond),
	}, opts...)
	f, err := outbox.NewForwarder(t.Context(), b.db, to, opts...)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(patience):
			require.Fail(t, "the forwarder does not end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// forwarded forwards everything that is in the outbox, and a last message, so that nothing more is to come.
func (b *bundle) forwarded(t *testing.T) []received {
	t.Helper()
	last := newMessage(t.Context(), "last")
	require.NoError(t, b.publisher(t, outbox.WithOwnTransaction()).Publish("last", last))
	var to broker
	stop := b.forward(t, &to)
	require.Eventually(t, func() bool { return to.has("last: last") }, patience, time.Millisecond)
	stop()
	all := to.all()
	require.Equal(t, last.UUID, all[len(all)-1].uuid)
	return all[:len(all)-1]
}

func (b *bundle) forwardedTexts(t *testing.T) []string {
	t.Helper()
	return texts(b.forwarded(t))
}

// exec executes a statement in which {s} stands for the schema.
func (b *bundle) exec(t *testing.T, statement string) {
	t.Helper()
	_, err := b.db.ExecContext(t.Context(), strings.ReplaceAll(statement, "{s}", b.schema))
	require.NoError(t, err)
}
