package outbox

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Option names the tables. Give the same ones to [Migrate], [New], [NewForwarder], [ReadBacklog] and [Purge]. Where an option
// is given twice, the last one wins, unless it says that it adds.
type Option interface {
	PublisherOption
	ForwarderOption
	forTables()
}

// PublisherOption configures a [Publisher].
type PublisherOption interface {
	apply(*config)
	forPublisher()
}

// ForwarderOption configures a [Forwarder].
type ForwarderOption interface {
	apply(*config)
	forForwarder()
}

type publisherOption func(*config)

func (f publisherOption) apply(c *config) { f(c) }
func (publisherOption) forPublisher()     {}

type forwarderOption func(*config)

func (f forwarderOption) apply(c *config) { f(c) }
func (forwarderOption) forForwarder()     {}

type option func(*config)

func (f option) apply(c *config) { f(c) }
func (option) forPublisher()     {}
func (option) forForwarder()     {}
func (option) forTables()        {}

type config struct {
	schema         *string
	topic          string
	ownTransaction bool
	batchSize      int
	pollInterval   time.Duration
	publishTimeout time.Duration
	middleware     []message.HandlerMiddleware
	logger         watermill.LoggerAdapter
}

func newConfig[O interface{ apply(*config) }](opts []O) (config, error) {
	c := config{
		topic:          "outbox",
		batchSize:      100,
		pollInterval:   200 * time.Millisecond,
		publishTimeout: 30 * time.Second,
		logger:         watermill.NewSlogLogger(nil),
	}
	for _, opt := range opts {
		if any(opt) == nil {
			return c, errors.New("an option is nil")
		}
		opt.apply(&c)
	}
	return c, c.validate()
}

// WithSchema names the schema of the tables. The default is the first schema of the search path, looked up once: what a
// handler does to the search path of its connection later changes nothing. The claim's schema need not be the same.
func WithSchema(name string) Option {
	return option(func(c *config) { c.schema = &name })
}

// WithTopic names the outbox: "x" is the watermill-sql topic x, whose tables are watermill_x and watermill_offsets_x. It
// is not the topic that messages are published to, which travels with each message. At most 45 letters, digits and
// characters of "-$:._". The default is "outbox". Services that share a schema need one each.
func WithTopic(topic string) Option {
	return option(func(c *config) { c.topic = topic })
}

// WithOwnTransaction lets a message that is published outside of a handler be stored in a transaction of its own, instead
// of an error: for producers that are no consumers. Inside of a handler nothing changes. If the answer to the commit is
// lost, Publish returns an error although the messages may be stored: publish the same values again, they keep the UUIDs
// and event IDs that they got.
func WithOwnTransaction() PublisherOption {
	return publisherOption(func(c *config) { c.ownTransaction = true })
}

// WithBatchSize sets how many messages a forwarder reads at once, and so how many it may forward again after a crash. The
// default is 100; it must be positive.
func WithBatchSize(n int) ForwarderOption {
	return forwarderOption(func(c *config) { c.batchSize = n })
}

// WithPollInterval sets how long a forwarder that has found nothing waits before it looks again. Each look is a small
// transaction that locks a row. The default is 200 ms; it must be positive.
func WithPollInterval(d time.Duration) ForwarderOption {
	return forwarderOption(func(c *config) { c.pollInterval = d })
}

// WithPublishTimeout bounds the forwarding of one message, tries after failures included. Past it, the forwarder gives the
// database's transaction up, keeps what was forwarded before, and begins again with that message. It is also how long
// closing waits. The default is 30 s; it must be positive.
func WithPublishTimeout(d time.Duration) ForwarderOption {
	return forwarderOption(func(c *config) { c.publishTimeout = d })
}

// WithMiddleware adds Watermill middleware around the forwarding of each message, for example a PoisonQueue for messages
// that the broker refuses for good, which would otherwise block those behind them. It sees the message as it is stored,
// in its envelope. It may be given more than once.
func WithMiddleware(m ...message.HandlerMiddleware) ForwarderOption {
	return forwarderOption(func(c *config) { c.middleware = append(c.middleware, m...) })
}

// WithLogger sets the forwarder's logger. The default is Watermill's adapter of slog.Default().
func WithLogger(l watermill.LoggerAdapter) ForwarderOption {
	return forwarderOption(func(c *config) { c.logger = l })
}

// maxName is the longest identifier that PostgreSQL keeps whole; longer ones are cut without an error.
const maxName = 63

// topicPattern is what watermill-sql allows.
var topicPattern = regexp.MustCompile(`^[A-Za-z0-9\-$:._]+$`)

// validate reports all mistakes at once.
func (c *config) validate() error {
	var errs []error
	mistake := func(option, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", option, fmt.Sprintf(format, args...)))
	}
	if s := c.schema; s != nil && (*s == "" || len(*s) > maxName || strings.IndexByte(*s, 0) >= 0 || !utf8.ValidString(*s)) {
		mistake("WithSchema", "%q is not 1 to %d bytes of UTF-8 without NUL", *s, maxName)
	}
	if limit := maxName - len(offsetsPrefix); len(c.topic) > limit || !topicPattern.MatchString(c.topic) {
		mistake("WithTopic", "%q is not 1 to %d letters, digits and characters of \"-$:._\"", c.topic, limit)
	}
	if c.batchSize <= 0 {
		mistake("WithBatchSize", "%d is not positive", c.batchSize)
	}
	if c.pollInterval <= 0 {
		mistake("WithPollInterval", "%v is not positive", c.pollInterval)
	}
	if c.publishTimeout <= 0 {
		mistake("WithPublishTimeout", "%v is not positive", c.publishTimeout)
	}
	for _, m := range c.middleware {
		if m == nil {
			mistake("WithMiddleware", "the middleware is nil")
		}
	}
	if c.logger == nil {
		mistake("WithLogger", "the logger is nil: give watermill.NopLogger{} for silence")
	}
	return errors.Join(errs...)
}
