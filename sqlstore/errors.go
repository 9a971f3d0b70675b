package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/watermill-idempotency/idempotency"
)

var (
	// ErrPoolExhausted means that the pool had no connection to give for as long as [WithAcquireTimeout] says.
	ErrPoolExhausted = errors.New("no connection of the pool became free")
	// ErrSettings means that the connections of the pool are not set up as the store needs them.
	ErrSettings = errors.New("the settings of the connections do not fit")
)

var (
	// errVanished is a claim that was there for the insert and gone for the select: it has been purged in between.
	errVanished = errors.New("the claim that was met is gone: it has been purged")
	errUnmarked = errors.New("the handler executed COMMIT or ROLLBACK, or swallowed the error of a statement that rolls back")
	errAborted  = errors.New("a statement failed, and the handler went on: return its error, or run it in a savepoint")
	errBusy     = errors.New("rows are still open: close what Query returned before the handler returns")
	errNotKept  = errors.New("what it returned could not be stored, and is lost if the handler has committed")
	errHandler  = errors.New("it is the middleware's to end: return an error to roll back, nil to commit; a savepoint is yours to end")
)

// Classify implements [idempotency.Store]. It decides by the engine's code and by the errors of database/sql, so it works
// in every language of the server.
func (s *Store) Classify(err error) idempotency.Fault {
	if err == nil {
		return idempotency.FaultOther
	}
	if errors.Is(err, errVanished) {
		return idempotency.FaultConflict
	}
	if errors.Is(err, ErrPoolExhausted) {
		return idempotency.FaultUnavailable
	}
	if fault, known := s.dialect.classify(err); known {
		return fault
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return idempotency.FaultOther // not the database's; IsTransient knows it
	}
	var netErr net.Error
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) || errors.As(err, &netErr) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return idempotency.FaultUnavailable
	}
	return idempotency.FaultOther
}

// because adds why ctx ended to an error that does not say that it did: drivers have words of their own for it.
func because(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil || errors.Is(err, ctx.Err()) {
		return err
	}
	return fmt.Errorf("%w: %w", ctx.Err(), err)
}
