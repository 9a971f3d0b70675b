package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/metadata"
	"github.com/watermill-idempotency/idempotency/internal/sqlstate"
)

// tx is a transaction that holds a claim. It owns the connection until it ends.
type tx struct {
	store *Store
	conn  *pgxpool.Conn // nil once it has ended
	begun pgx.BatchResults
	claim idempotency.Key
	mark  string // tells the transaction from others of the session
}

var _ idempotency.Tx = (*tx)(nil)

// handlerTx is what handlers get. It is closed when tx ends, because it is the same transaction; only what Conn returns is
// out of reach, as with any transaction of pgx.
type handlerTx struct{ pgx.Tx }

// Commit is refused.
func (handlerTx) Commit(context.Context) error {
	return fmt.Errorf("postgres: Commit by a handler: %w: %w", idempotency.ErrTxEnded, errHandler)
}

// Rollback is refused.
func (handlerTx) Rollback(context.Context) error {
	return fmt.Errorf("postgres: Rollback by a handler: %w: %w", idempotency.ErrTxEnded, errHandler)
}

// Raw implements [idempotency.Tx].
func (t *tx) Raw() any { return handlerTx{t.begun.Tx()} }

// Commit implements [idempotency.Tx].
func (t *tx) Commit(ctx context.Context, produced []*message.Message) error {
	if t.conn == nil {
		return fmt.Errorf("postgres: commit: %w", idempotency.ErrTxEnded)
	}
	defer func() { _ = t.end(ctx) }()
	if err := t.check(); err != nil {
		return fmt.Errorf("postgres: commit: %w", t.keep(ctx, produced, err))
	}
	if err := t.commit(ctx, produced); err != nil {
		return fmt.Errorf("postgres: commit: %w", t.keep(ctx, produced, t.commitError(err)))
	}
	return nil
}

func (t *tx) send(ctx context.Context, statements ...statement) (pgconn.CommandTag, error) {
	return t.store.send(ctx, t.conn.Conn(), statements...)
}

// commit takes one round trip.
func (t *tx) commit(ctx context.Context, produced []*message.Message) error {
	statements := make([]statement, 0, 3)
	statements = append(statements, statement{sql: check, args: []any{t.mark}})
	if len(produced) > 0 {
		insert, err := t.produce(produced)
		if err != nil {
			return fmt.Errorf("store produced messages: %w", err)
		}
		statements = append(statements, insert)
	}
	last, err := t.send(ctx, append(statements, statement{sql: commits})...)
	if err != nil {
		return err
	}
	if last.String() != "COMMIT" {
		return pgx.ErrTxCommitRollback
	}
	return nil
}

// check finds, without asking the server, what would make COMMIT fail or do nothing.
func (t *tx) check() error {
	conn := t.conn.Conn()
	switch {
	case conn.IsClosed():
		return fmt.Errorf("%w: %w", idempotency.ErrRolledBack, errClosed)
	case conn.PgConn().IsBusy():
		return fmt.Errorf("%w: %w", idempotency.ErrRolledBack, errBusy)
	case conn.PgConn().TxStatus() == 'E':
		return fmt.Errorf("%w: %w", idempotency.ErrRolledBack, errAborted)
	case conn.PgConn().TxStatus() == 'I':
		return fmt.Errorf("%w: the handler executed COMMIT or ROLLBACK: %w", idempotency.ErrTxEnded, errHandler)
	}
	return nil
}

// produce stores messages.
func (t *tx) produce(produced []*message.Message) (statement, error) {
	uuids := make([]string, len(produced))
	encoded := make([][]byte, len(produced))
	payloads := make([][]byte, len(produced))
	for i, msg := range produced {
		var err error
		if encoded[i], err = metadata.Encode(msg.Metadata); err != nil {
			return statement{}, err
		}
		uuids[i] = msg.UUID
		payloads[i] = msg.Payload
		if msg.Payload == nil {
			payloads[i] = []byte{} // not null
		}
	}
	return statement{sql: t.store.sql.produce, args: []any{t.claim.SubscriberID, t.claim.EventID, uuids, encoded, payloads}}, nil
}

func (t *tx) commitError(err error) error {
	conn := t.conn.Conn()
	open := !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' // so the COMMIT was not executed
	switch {
	case sqlstate.Of(err) == sqlstate.DivisionByZero && open:
		// It was the check; a deferred trigger that divides by zero ends the transaction.
		return fmt.Errorf("%w: the handler executed COMMIT or ROLLBACK and began another one: %w", idempotency.ErrTxEnded, errHandler)
	case open, isKnownRollback(err), errors.Is(err, pgx.ErrTxCommitRollback):
		return fmt.Errorf("%w: %w", idempotency.ErrRolledBack, err)
	}
	return err
}

// keep looks whether a handler that has ended the transaction has committed the claim. Then the redelivery is a duplicate,
// and finds what the handler returned only if it is stored now.
func (t *tx) keep(ctx context.Context, produced []*message.Message, ended error) error {
	if len(produced) == 0 || !errors.Is(ended, idempotency.ErrTxEnded) {
		return ended
	}
	_ = t.end(ctx)
	err := pgx.BeginFunc(ctx, t.store.pool, func(own pgx.Tx) error {
		var held bool
		if err := own.QueryRow(ctx, t.store.sql.held, t.claim.SubscriberID, t.claim.EventID, t.mark).Scan(&held); err != nil || !held {
			return err
		}
		insert, err := t.produce(produced)
		if err != nil {
			return err
		}
		_, err = own.Exec(ctx, insert.sql, insert.args...)
		return err
	})
	if err != nil {
		return fmt.Errorf("%w; %w: %w", ended, errNotKept, err)
	}
	return ended
}

// Rollback implements [idempotency.Tx].
func (t *tx) Rollback(ctx context.Context) error {
	if err := t.end(ctx); err != nil {
		return fmt.Errorf("postgres: rollback: %w", err)
	}
	return nil
}

// end rolls back what is not committed, and gives the connection back; the pool closes one that is broken or busy.
func (t *tx) end(ctx context.Context) error {
	if t.conn == nil {
		return nil
	}
	conn := t.conn
	t.conn = nil
	defer conn.Release()
	if conn.Conn().PgConn().TxStatus() == 'I' {
		// The transaction that the handler may have kept is closed, without a statement: pgx does so when a batch is closed
		// that has begun one, and the connection is outside of a transaction.
		return t.begun.Close()
	}
	return t.begun.Tx().Rollback(ctx)
}
