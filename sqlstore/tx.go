package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/metadata"
)

// tx is a transaction that holds a claim. It owns the connection until it ends.
type tx struct {
	conn   *sql.Conn // nil once it has ended
	tx     *sql.Tx   // nil before it has begun
	cancel context.CancelFunc
	store  *Store
	claim  idempotency.Key
	mark   string // the dialect's
}

var _ idempotency.Tx = (*tx)(nil)

// begin begins a transaction that outlives ctx, although ctx ends the wait for it: database/sql rolls a transaction back
// when the context that it began with ends.
func (t *tx) begin(ctx context.Context) error {
	detached, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	begun, err := t.conn.BeginTx(detached, &sql.TxOptions{Isolation: t.store.config.isolation})
	if err != nil {
		cancel()
		return err
	}
	t.tx, t.cancel = begun, cancel
	if !stop() {
		return ctx.Err()
	}
	return nil
}

// Raw implements [idempotency.Tx].
func (t *tx) Raw() any { return t.tx }

// Commit implements [idempotency.Tx].
func (t *tx) Commit(ctx context.Context, produced []*message.Message) error {
	if t.conn == nil {
		return fmt.Errorf("sqlstore: commit: %w", idempotency.ErrTxEnded)
	}
	defer func() { _ = t.end(ctx) }()
	// Before anything is written: after a ROLLBACK of the handler, it would be committed by itself.
	if err := t.store.dialect.guard(ctx, t); err != nil {
		if errors.Is(err, errUnmarked) || errors.Is(err, sql.ErrTxDone) {
			err = fmt.Errorf("sqlstore: commit: %w: %w: %w", idempotency.ErrTxEnded, err, errHandler)
			if keepErr := t.keep(ctx, produced); keepErr != nil {
				err = fmt.Errorf("%w; %w: %w", err, errNotKept, keepErr)
			}
			return err
		}
		return fmt.Errorf("sqlstore: commit: %w: %w", idempotency.ErrRolledBack, because(ctx, err))
	}
	if err := t.produce(ctx, t.tx, produced); err != nil {
		return fmt.Errorf("sqlstore: store produced messages: %w: %w", idempotency.ErrRolledBack, because(ctx, err))
	}
	// Commit takes no context, but drivers end it with the one of the beginning.
	stop := context.AfterFunc(ctx, t.cancel)
	err := t.tx.Commit()
	stop()
	if err == nil {
		return nil
	}
	if t.store.dialect.uncommitted(ctx, t, err) {
		return fmt.Errorf("sqlstore: commit: %w: %w", idempotency.ErrRolledBack, err)
	}
	return fmt.Errorf("sqlstore: commit: %w", because(ctx, err))
}

// keep looks whether a handler that has ended the transaction has committed the claim. Then the redelivery is a duplicate,
// and finds what the handler returned only if it is stored now.
func (t *tx) keep(ctx context.Context, produced []*message.Message) error {
	_ = t.end(ctx)
	if len(produced) == 0 {
		return nil
	}
	return whileBusy(ctx, func() error {
		own, err := t.store.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = own.Rollback() }()
		var held bool
		err = own.QueryRowContext(ctx, t.store.sql.held, t.claim.SubscriberID, t.claim.EventID, t.mark).Scan(&held)
		if err != nil || !held {
			return err
		}
		if err := t.produce(ctx, own, produced); err != nil {
			return err
		}
		return own.Commit()
	})
}

func (t *tx) produce(ctx context.Context, in *sql.Tx, produced []*message.Message) error {
	var args []any
	rows, size := 0, 0
	for i, msg := range produced {
		encoded, err := metadata.Encode(msg.Metadata)
		if err != nil {
			return err
		}
		payload := append([]byte{}, msg.Payload...) // not null
		args = append(args, t.claim.SubscriberID, t.claim.EventID, i+1, msg.UUID, encoded, payload)
		rows++
		size += len(encoded) + len(payload)
		if rows < bulkRows && size < bulkBytes && i < len(produced)-1 {
			continue
		}
		if _, err := in.ExecContext(ctx, t.store.sql.produce.text(rows), args...); err != nil {
			return err
		}
		args, rows, size = nil, 0, 0
	}
	return nil
}

// Rollback implements [idempotency.Tx].
func (t *tx) Rollback(ctx context.Context) error {
	if err := t.end(ctx); err != nil {
		return fmt.Errorf("sqlstore: rollback: %w", err)
	}
	return nil
}

// end rolls back what is not committed, and gives the connection back.
func (t *tx) end(ctx context.Context) error {
	if t.conn == nil {
		return nil
	}
	conn := t.conn
	t.conn = nil
	return errors.Join(t.rollback(ctx), conn.Close())
}

// discard rolls back, and lets the pool close the connection.
func (t *tx) discard(ctx context.Context) {
	_ = t.rollback(ctx)
	_ = t.conn.Raw(func(any) error { return driver.ErrBadConn })
}

// rollback leaves the connection ready for another begin.
func (t *tx) rollback(ctx context.Context) error {
	if t.tx == nil {
		return nil
	}
	defer t.cancel()
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
	}
	stop := context.AfterFunc(ctx, t.cancel)
	defer stop()
	if err := t.tx.Rollback(); err != nil && !errors.Is(err, sql.ErrTxDone) {
		return err
	}
	return nil
}
