package postgres

import (
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/retention"
)

// Option configures [New] and [Migrate]: give both the same. Where an option is given twice, the last one wins.
type Option interface{ apply(*config) }

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

type config struct {
	names          pgschema.Names
	isolation      pgx.TxIsoLevel
	acquireTimeout time.Duration
	retention      *time.Duration // nil: for ever
}

func newConfig(opts []Option) (config, error) {
	c := config{names: pgschema.Names{Prefix: pgschema.DefaultPrefix}, acquireTimeout: 30 * time.Second}
	for _, opt := range opts {
		if opt == nil {
			return config{}, errors.New("an option is nil")
		}
		opt.apply(&c)
	}
	return c, c.validate()
}

// WithSchema names the schema of the tables. The default is the first schema of the search path, looked up once, when the
// store opens: what a handler does to the search path of its connection later changes nothing.
func WithSchema(name string) Option {
	return optionFunc(func(c *config) { c.names.Schema = &name })
}

// WithTablePrefix sets what the names of the tables begin with. The default is "idempotency_"; "" is allowed.
func WithTablePrefix(prefix string) Option {
	return optionFunc(func(c *config) { c.names.Prefix = prefix })
}

// WithIsolation sets the isolation level of the transactions. The default is what the server, database or role has as
// default_transaction_isolation, which is read committed unless somebody changed it. Under repeatable read and
// serializable, a claim that waited for another one fails with SQLSTATE 40001, and the middleware tries again.
func WithIsolation(level pgx.TxIsoLevel) Option {
	return optionFunc(func(c *config) { c.isolation = level })
}

// WithAcquireTimeout bounds the wait for a connection of the pool. The default is 30 s; it must be positive. A pool that
// is smaller than the number of messages in flight makes messages wait; a handler that takes a second connection of the
// same pool can make them wait for each other, which this ends.
func WithAcquireTimeout(d time.Duration) Option {
	return optionFunc(func(c *config) { c.acquireTimeout = d })
}

// WithRetention sets how long claims are kept, at least; [Store.Purge] and [Store.Clean] remove those that are older, and
// nothing does if neither is called. It must be positive. The default is for ever.
//
// An event that comes again after its claim is gone is processed again. So let d be longer than an event can take to come
// again: the time that the broker keeps it (retention of a Kafka topic that is replayed, of a queue or stream), plus the
// longest outage of the consumer, plus the age at which somebody still replays a dead-letter queue. A week is a common
// choice, and costs PostgreSQL about 280 bytes for each event. [idempotency.WithReplayHorizon] refuses events that are older
// than what is kept.
func WithRetention(d time.Duration) Option {
	return optionFunc(func(c *config) { c.retention = &d })
}

// validate reports all mistakes at once.
func (c *config) validate() error {
	errs := c.names.Validate()
	switch c.isolation {
	case "", pgx.ReadUncommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		errs = append(errs, fmt.Errorf("WithIsolation: %q is not an isolation level: use a constant of package pgx", c.isolation))
	}
	if c.acquireTimeout <= 0 {
		errs = append(errs, fmt.Errorf("WithAcquireTimeout: %v is not positive", c.acquireTimeout))
	}
	if err := retention.Validate(c.retention); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
