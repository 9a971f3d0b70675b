package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/watermill-idempotency/idempotency"
)

// MaxMessageSize is the largest sum of a message's payload and metadata in bytes: 64 MiB.
const MaxMessageSize = 64 << 20

// ErrInvalidMessage means that a message cannot be stored as it is. It is found before the database sees the message, so
// the handler's transaction can go on.
var ErrInvalidMessage = errors.New("the message cannot be stored in the outbox")

// Bounds of one statement. PostgreSQL takes 65,535 parameters; the number of different statements is kept small for the
// caches of prepared ones.
const (
	statementRows  = 100
	statementBytes = 1 << 20
)

// Publisher is a message.Publisher that stores messages in the transaction of the handler that publishes them. It is safe
// for concurrent use.
type Publisher struct {
	db             *sql.DB
	insert         string
	ownTransaction bool
}

var _ message.Publisher = (*Publisher)(nil)

// New returns a publisher, after it has checked what would abort the transactions of handlers later:
// [idempotency.ErrSchema], [idempotency.ErrNotDurable], [idempotency.ErrReadOnly] and [idempotency.ErrPrivilege]. It
// creates no tables, see [Migrate]. db stays the caller's to close; stdlib.OpenDBFromPool of pgx makes one from a pool. It
// is used for the checks, and for transactions of [WithOwnTransaction].
func New(ctx context.Context, db *sql.DB, opts ...PublisherOption) (*Publisher, error) {
	c, err := newConfig(opts)
	if err != nil {
		return nil, fmt.Errorf("outbox: New: %w", err)
	}
	t, err := c.resolve(ctx, db)
	if err != nil {
		return nil, fmt.Errorf("outbox: New: %w", err)
	}
	if err := t.checkPublisher(ctx, db); err != nil {
		return nil, fmt.Errorf("outbox: New: %w", err)
	}
	return &Publisher{
		db:             db,
		insert:         "insert into " + t.messages + " (uuid, payload, metadata, created_at, transaction_id) values ",
		ownTransaction: c.ownTransaction,
	}, nil
}

// Publish stores the messages for topic, in order, in the transaction that their context belongs to: nothing is published
// if that rolls back. The context is what msg.Context() gives a handler; cqrs.EventBus and cqrs.CommandBus pass on the one
// that they are given, and other code calls SetContext. Without a transaction, the error is one for which
// errors.Is(err, idempotency.ErrNoTx) is true; see [WithOwnTransaction].
//
// A message without a UUID gets one, and one without [idempotency.EventIDMetadata] is stamped with its UUID, so that a
// consumer downstream recognises it when it is forwarded twice.
//
// [ErrInvalidMessage] leaves the transaction as it was. After any other error of a statement PostgreSQL has aborted it:
// return the error.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	err := prepare(topic, messages)
	if err == nil {
		err = p.publish(messages[0].Context(), topic, messages)
	}
	if err != nil {
		return fmt.Errorf("outbox: publish to topic %q: %w", topic, err)
	}
	return nil
}

//nolint:contextcheck // ctx is the messages'
func (p *Publisher) publish(ctx context.Context, topic string, messages []*message.Message) error {
	claim, inside := idempotency.ClaimFromContext(ctx)
	for i, msg := range messages {
		if other, in := idempotency.ClaimFromContext(msg.Context()); in != inside || other.Key != claim.Key {
			return fmt.Errorf("%w: message %d belongs to another transaction than message 0: call SetContext on each, or publish them one by one", idempotency.ErrNoTx, i)
		}
	}
	rows, err := envelop(topic, messages)
	if err != nil {
		return err
	}
	if inside {
		raw, err := idempotency.TxFromContext[any](ctx)
		if err != nil {
			return err
		}
		exec, err := executor(raw)
		if err != nil {
			return err
		}
		return p.store(ctx, exec, rows)
	}
	if !p.ownTransaction {
		return fmt.Errorf("%w: give each message the handler's context by SetContext, put the middleware on the handler, or allow WithOwnTransaction", idempotency.ErrNoTx)
	}
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := p.store(ctx, onSQL(tx), rows); err != nil {
		return err
	}
	return tx.Commit()
}

// Close does nothing: the publisher holds nothing. A router that closes it while handlers run does not make them fail.
func (p *Publisher) Close() error { return nil }

// prepare checks the messages and gives each what makes it recognisable.
func prepare(topic string, messages []*message.Message) error {
	if topic == "" || !utf8.ValidString(topic) {
		return fmt.Errorf("%w: the topic is not UTF-8 of at least one byte", ErrInvalidMessage)
	}
	for i, msg := range messages {
		if err := check(msg); err != nil {
			return fmt.Errorf("%w: message %d %w", ErrInvalidMessage, i, err)
		}
	}
	for _, msg := range messages {
		if msg.UUID == "" {
			msg.UUID = watermill.NewUUID()
		}
		if msg.Metadata == nil {
			msg.Metadata = make(message.Metadata)
		}
		if msg.Metadata[idempotency.EventIDMetadata] == "" {
			msg.Metadata[idempotency.EventIDMetadata] = msg.UUID
		}
	}
	return nil
}

// check finds what the envelope, which is JSON, would change without an error, and what is too large.
func check(msg *message.Message) error {
	if msg == nil {
		return errors.New("is nil")
	}
	if len(msg.UUID) > idempotency.MaxProducedUUIDLength || !utf8.ValidString(msg.UUID) {
		return fmt.Errorf("has a UUID that is not at most %d bytes of UTF-8", idempotency.MaxProducedUUIDLength)
	}
	size := len(msg.Payload)
	for name, value := range msg.Metadata {
		if !utf8.ValidString(name) || !utf8.ValidString(value) {
			return fmt.Errorf("has metadata %q that is not UTF-8: encode it, or put it into the payload", name)
		}
		size += len(name) + len(value)
	}
	if size > MaxMessageSize {
		return fmt.Errorf("has %d bytes of payload and metadata, %d are allowed", size, MaxMessageSize)
	}
	return nil
}

// collector is the publisher inside of Watermill's, which makes the envelopes.
type collector struct{ envelopes []*message.Message }

// Publish implements message.Publisher.
func (c *collector) Publish(_ string, envelopes ...*message.Message) error {
	c.envelopes = envelopes
	return nil
}

// Close implements message.Publisher.
func (c *collector) Close() error { return nil }

// envelop wraps the messages as Watermill's forwarder unwraps them. An envelope has a UUID of its own, of the 36 characters
// that the table takes, and no metadata.
func envelop(topic string, messages []*message.Message) ([]*message.Message, error) {
	var c collector
	err := forwarder.NewPublisher(&c, forwarder.PublisherConfig{}).Publish(topic, messages...)
	return c.envelopes, err
}

// store inserts rows, in order.
func (p *Publisher) store(ctx context.Context, exec execFunc, rows []*message.Message) error {
	var values strings.Builder
	var args []any
	size := 0
	for i, row := range rows {
		args = append(args, row.UUID, []byte(row.Payload))
		size += len(row.Payload)
		// The types are named because not every mode of pgx asks the server for them.
		values.WriteString("($" + strconv.Itoa(len(args)-1) + "::pg_catalog.text, $" + strconv.Itoa(len(args)) +
			"::pg_catalog.bytea, '{}', " + utcNow + ", pg_catalog.pg_current_xact_id())")
		if i < len(rows)-1 && len(args) < 2*statementRows && size < statementBytes {
			values.WriteString(", ")
			continue
		}
		if err := exec(ctx, p.insert+values.String(), args...); err != nil {
			return err
		}
		values.Reset()
		args, size = nil, 0
	}
	return nil
}

// execFunc executes one statement in a transaction.
type execFunc func(ctx context.Context, query string, args ...any) error

// executor makes one of what the middleware's store hands out.
func executor(raw any) (execFunc, error) {
	switch tx := raw.(type) {
	case pgx.Tx:
		return func(ctx context.Context, query string, args ...any) error {
			_, err := tx.Exec(ctx, query, args...)
			return err
		}, nil
	case sqlExecutor:
		return onSQL(tx), nil
	}
	return nil, fmt.Errorf("%w: want a pgx.Tx or a *sql.Tx on PostgreSQL, but the middleware's store hands out %T", idempotency.ErrNoTx, raw)
}

type sqlExecutor interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

func onSQL(tx sqlExecutor) execFunc {
	return func(ctx context.Context, query string, args ...any) error {
		_, err := tx.ExecContext(ctx, query, args...)
		return err
	}
}
