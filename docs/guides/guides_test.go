// Package guides_test holds the code of the guides, and tests what they say.
package guides_test

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	codeBlock      = regexp.MustCompile("(?ms)^[ \t]*```(?:go|sql)\n(.*?)^[ \t]*```$")
	leadingTabs    = regexp.MustCompile(`(?m)^\t+`)
	blankLine      = regexp.MustCompile(`\n{2,}`)
	anyCode        = regexp.MustCompile("(?ms)^[ \t]*```.*?^[ \t]*```$|`[^`\n]+`")
	markdownTarget = regexp.MustCompile(`\]\(([^)#]*)#?([^)]*)\)`)
	heading        = regexp.MustCompile(`(?m)^#+ (.+)$`)
	noAnchor       = regexp.MustCompile(`[^a-z0-9 -]`)
)

// guides returns the Markdown files whose code is held to be run, by their path from the root.
func guides(t *testing.T) map[string]string {
	t.Helper()
	names, err := filepath.Glob("*.md")
	require.NoError(t, err)
	require.NotEmpty(t, names)
	files := make(map[string]string)
	for _, name := range append(names, "../README.md", "../../README.md") {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		files[name] = string(text)
	}
	return files
}

// Every paragraph of every block of Go and SQL stands in a Go file of the repository, word by word, and so compiles and,
// in a test, runs.
func TestCodeOfTheGuidesIsRun(t *testing.T) {
	t.Parallel()
	var code strings.Builder
	require.NoError(t, filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && path != "../.." { // servers' data and the like
			return fs.SkipDir
		}
		if err != nil || !strings.HasSuffix(path, ".go") {
			return err
		}
		text, err := os.ReadFile(path)
		code.WriteString("\n" + leadingTabs.ReplaceAllString(string(text), "") + "\n")
		return err
	}))
	all, blocks := code.String(), 0
	for name, text := range guides(t) {
		for _, block := range codeBlock.FindAllStringSubmatch(text, -1) {
			blocks++
			for _, paragraph := range blankLine.Split(strings.TrimSpace(block[1]), -1) {
				paragraph = leadingTabs.ReplaceAllString(paragraph, "")
				if !strings.Contains(all, "\n"+paragraph+"\n") {
					t.Errorf("%s: no Go file has this code:\n%s", name, paragraph)
				}
			}
		}
	}
	require.Greater(t, blocks, 10)
}

func TestLinksOfTheGuidesLead(t *testing.T) {
	t.Parallel()
	for name, text := range guides(t) {
		for _, link := range markdownTarget.FindAllStringSubmatch(anyCode.ReplaceAllString(text, ""), -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			target := filepath.Join(filepath.Dir(name), link[1])
			if link[1] == "" {
				target = name
			}
			_, err := os.Stat(target)
			require.NoError(t, err, "%s links to %s", name, link[1])
			if link[2] == "" {
				continue
			}
			linked, err := os.ReadFile(target)
			require.NoError(t, err)
			var anchors []string
			for _, h := range heading.FindAllStringSubmatch(string(linked), -1) {
				anchors = append(anchors, strings.ReplaceAll(noAnchor.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-"))
			}
			require.Contains(t, anchors, link[2], "%s links to %s#%s", name, link[1], link[2])
		}
	}
}

// The first lines of the README leave the handling of errors out.
//
//nolint:ineffassign,staticcheck // as above
func TestFirstLinesOfTheREADME(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, _ := database(t, "create table shipping_label (order_id text primary key)")

	err := postgres.Migrate(ctx, pool) // pool is a *pgxpool.Pool
	store, err := postgres.New(ctx, pool)
	idem, err := idempotency.New(store, idempotency.WithSubscriberID("shipping.create-label.v1"))

	require.NoError(t, err)
	for range 2 {
		require.NoError(t, deliver(idem, idempotency.ConsumerHandler(createLabel), event("E-1", "O-104")))
	}
	require.Equal(t, 1, value[int](t, pool, labels))
}

func createLabel(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	_, err := tx.Exec(ctx, `insert into shipping_label (order_id) values ($1)`, string(msg.Payload))
	return err
}

// database returns a pool whose search path leads to a schema of its own, with the tables of a service, and a store there.
func database(t *testing.T, tables string) (*pgxpool.Pool, *postgres.Store) {
	t.Helper()
	config := pgtest.Config(t, 8)
	config.ConnConfig.RuntimeParams["search_path"] = pgtest.Schema(t)
	pool := pgtest.Open(t, config)
	require.NoError(t, postgres.Migrate(t.Context(), pool))
	store, err := postgres.New(t.Context(), pool)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), tables)
	require.NoError(t, err)
	return pool, store
}

// value is the result of a query for one value.
func value[T any](t *testing.T, pool *pgxpool.Pool, query string, args ...any) T {
	t.Helper()
	var v T
	require.NoError(t, pool.QueryRow(t.Context(), query, args...).Scan(&v))
	return v
}

// newMiddleware returns a middleware that logs nothing, and what it observes.
func newMiddleware(t *testing.T, store idempotency.Store, opts ...idempotency.Option) (*idempotency.Middleware, *recorder) {
	t.Helper()
	observed := &recorder{}
	opts = append([]idempotency.Option{idempotency.WithLogger(watermill.NopLogger{}), idempotency.WithObserver(observed)}, opts...)
	idem, err := idempotency.New(store, opts...)
	require.NoError(t, err)
	return idem, observed
}

// deliver hands a message to a handler under the middleware, as a router does.
func deliver(idem *idempotency.Middleware, handler message.NoPublishHandlerFunc, msg *message.Message) error {
	_, err := idem.Middleware(func(msg *message.Message) ([]*message.Message, error) { return nil, handler(msg) })(msg)
	return err
}

func event(id, payload string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	msg.Metadata.Set(idempotency.EventIDMetadata, id)
	return msg
}

type recorder struct {
	mu     sync.Mutex
	events []idempotency.Event
}

func (r *recorder) Observe(_ context.Context, e idempotency.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) outcomes() []idempotency.Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	var outcomes []idempotency.Outcome
	for _, e := range r.events {
		outcomes = append(outcomes, e.Outcome)
	}
	return outcomes
}

// claimed counts the outcomes of each subscriber.
func (r *recorder) claimed() map[string]map[idempotency.Outcome]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	claimed := make(map[string]map[idempotency.Outcome]int)
	for _, e := range r.events {
		if claimed[e.Key.SubscriberID] == nil {
			claimed[e.Key.SubscriberID] = make(map[idempotency.Outcome]int)
		}
		claimed[e.Key.SubscriberID][e.Outcome]++
	}
	return claimed
}

// publisher keeps what is published, by topic.
type publisher struct {
	mu   sync.Mutex
	sent map[string][]*message.Message
}

func (p *publisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sent == nil {
		p.sent = make(map[string][]*message.Message)
	}
	for _, msg := range messages {
		p.sent[topic] = append(p.sent[topic], msg.Copy())
	}
	return nil
}

func (p *publisher) Close() error { return nil }

func (p *publisher) to(topic string) []*message.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sent[topic]
}

// service is a router on a channel whose Publish returns once the message is acked, and which delivers a nacked message
// again. What is no trouble of the database goes to the topic "dead".
type service struct {
	t       *testing.T
	router  *message.Router
	channel *gochannel.GoChannel
	dead    publisher
}

func newService(t *testing.T) *service {
	t.Helper()
	s := &service{t: t, channel: gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})}
	var err error
	s.router, err = message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	require.NoError(t, err)
	return s
}

func (s *service) deadLetters() message.HandlerMiddleware {
	s.t.Helper()
	poison, err := middleware.PoisonQueueWithFilter(&s.dead, "dead", func(err error) bool { return !idempotency.IsTransient(err) })
	require.NoError(s.t, err)
	return poison
}

func (s *service) run() {
	s.t.Helper()
	done := make(chan error, 1)
	go func() { done <- s.router.Run(context.WithoutCancel(s.t.Context())) }()
	<-s.router.Running()
	s.t.Cleanup(func() {
		require.NoError(s.t, s.router.Close())
		require.NoError(s.t, <-done)
		require.NoError(s.t, s.channel.Close())
	})
}
