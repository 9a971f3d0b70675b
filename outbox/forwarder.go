package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/sqlstate"
)

// Forwarder publishes what is in an outbox, each message to its topic, one after the other and at least once. Any number
// may run on one outbox: they take turns. It is safe for concurrent use.
type Forwarder struct{ forwarder *forwarder.Forwarder }

// NewForwarder returns a forwarder from the outbox to pub, after it has checked the tables as [New] does. It starts no
// goroutine, see [Forwarder.Run]. db and pub stay the caller's to close; the forwarder holds one connection of db.
//
// pub must return nil only for what its broker has stored, or messages are lost between the outbox and the broker:
//
//   - AMQP: publisher confirms (PublishConfig.ConfirmDelivery of watermill-amqp), not Transactional, which hides errors; and
//     a queue that exists, because RabbitMQ drops what leads to no queue, and confirms it
//   - Kafka: acks from all replicas (Producer.RequiredAcks = sarama.WaitForAll, where the default is one), and topics with a
//     min.insync.replicas of two
//
// The example outbox of this repository does so.
func NewForwarder(ctx context.Context, db *sql.DB, pub message.Publisher, opts ...ForwarderOption) (*Forwarder, error) {
	c, err := newConfig(opts)
	if pub == nil {
		err = errors.Join(err, errors.New("the publisher is nil"))
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: NewForwarder: %w", err)
	}
	t, err := c.resolve(ctx, db)
	if err != nil {
		return nil, fmt.Errorf("outbox: NewForwarder: %w", err)
	}
	if err := t.checkForwarder(ctx, db); err != nil {
		return nil, fmt.Errorf("outbox: NewForwarder: %w", err)
	}
	f, err := c.forwarder(db, t, pub)
	if err != nil {
		return nil, fmt.Errorf("outbox: NewForwarder: %w", err)
	}
	return &Forwarder{f}, nil
}

func (c *config) forwarder(db *sql.DB, t tables, pub message.Publisher) (*forwarder.Forwarder, error) {
	sub, err := watermillsql.NewSubscriber(db, watermillsql.SubscriberConfig{
		AckDeadline:    &c.publishTimeout,
		PollInterval:   c.pollInterval,
		BackoffManager: backoff{poll: c.pollInterval, retry: time.Second},
		SchemaAdapter:  t.messagesAdapter(c.batchSize),
		OffsetsAdapter: t.offsetsAdapter(),
	}, c.logger)
	if err != nil {
		return nil, err
	}
	return forwarder.NewForwarder(&subscriber{Subscriber: sub, timeout: c.publishTimeout}, pub, c.logger, forwarder.Config{
		ForwarderTopic: c.topic,
		Middlewares:    c.middleware,
		CloseTimeout:   c.publishTimeout,
	})
}

// Run forwards until ctx ends or [Forwarder.Close] is called, and then returns nil. While the broker or the database
// cannot be reached it tries again, once a second. It may be called once.
func (f *Forwarder) Run(ctx context.Context) error {
	if err := f.forwarder.Run(ctx); err != nil {
		return fmt.Errorf("outbox: Forwarder: %w", err)
	}
	return nil
}

// Running returns a channel that is closed once Run forwards.
func (f *Forwarder) Running() <-chan struct{} { return f.forwarder.Running() }

// Close ends Run, after the message that is being forwarded.
func (f *Forwarder) Close() error {
	if err := f.forwarder.Close(); err != nil {
		return fmt.Errorf("outbox: Forwarder: %w", err)
	}
	return nil
}

// subscriber closes watermill-sql's gently. A router that closes cancels the context of its subscriptions first, which would
// roll the batch back, and all of it would be forwarded again.
type subscriber struct {
	*watermillsql.Subscriber
	timeout time.Duration
	closing sync.Once
	cancel  context.CancelFunc
}

// Subscribe implements message.Subscriber. It is called once, before Close.
func (s *subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	detached, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	messages, err := s.Subscriber.Subscribe(detached, topic)
	if err != nil {
		cancel()
		return nil, err
	}
	context.AfterFunc(ctx, func() { _ = s.Close() })
	return messages, nil
}

// Close implements message.Subscriber.
func (s *subscriber) Close() (err error) {
	s.closing.Do(func() {
		if s.cancel == nil {
			return
		}
		defer s.cancel()
		defer time.AfterFunc(s.timeout, s.cancel).Stop() // a database that does not answer
		err = s.Subscriber.Close()
	})
	return err
}

// backoff decides by code, where Watermill's default looks for English words in the error.
type backoff struct{ poll, retry time.Duration }

// HandleError implements watermill-sql's BackoffManager.
func (b backoff) HandleError(logger watermill.LoggerAdapter, noMsg bool, err error) time.Duration {
	switch {
	case err == nil && noMsg:
		return b.poll
	case err == nil:
		return 0
	case errors.Is(err, context.Canceled): // closing, or a message took longer than it may
		return b.poll
	case sqlstate.Classify(sqlstate.Of(err)) == idempotency.FaultConflict:
		logger.Debug("outbox: another forwarder was at work", watermill.LogFields{"err": err.Error()})
		return 0
	}
	logger.Error("outbox: reading messages failed, trying again", err, watermill.LogFields{"wait_time": b.retry})
	return b.retry
}
