package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/sqlstate"
)

// ErrPoolExhausted means that the pool had no connection to give for as long as [WithAcquireTimeout] says.
var ErrPoolExhausted = errors.New("no connection of the pool became free")

var (
	// errVanished is a claim that was there for the insert and gone for the select: it has been purged in between.
	errVanished = errors.New("the claim that was met is gone: it has been purged")
	errClosed   = errors.New("the connection was lost, or closed by a context that ended during a statement of the handler")
	errBusy     = errors.New("rows or a batch are still open: close what Query, SendBatch or CopyFrom returned before the handler returns")
	errAborted  = errors.New("a statement failed, and the handler went on: return its error, or run it in a savepoint (tx.Begin)")
	errNotKept  = errors.New("what it returned could not be stored, and is lost if the handler has committed")
	errHandler  = errors.New("it is the middleware's to end: return an error to roll back, nil to commit; tx.Begin gives a savepoint that you may end")
)

// Classify implements [idempotency.Store]. It decides by SQLSTATE, so it works in every language of the server.
func (s *Store) Classify(err error) idempotency.Fault {
	var (
		pgErr      *pgconn.PgError
		connectErr *pgconn.ConnectError
		netErr     net.Error
	)
	switch {
	case err == nil:
		return idempotency.FaultOther
	case errors.Is(err, errVanished):
		return idempotency.FaultConflict
	case errors.Is(err, errClosed), errors.Is(err, ErrPoolExhausted):
		return idempotency.FaultUnavailable
	case errors.As(err, &pgErr):
		return sqlstate.Classify(pgErr.Code)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return idempotency.FaultOther // not the database's; IsTransient knows it
	case errors.As(err, &connectErr), errors.As(err, &netErr), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), pgconn.SafeToRetry(err):
		return idempotency.FaultUnavailable
	}
	return idempotency.FaultOther
}

// claimError tells a claim that was not willing to wait longer from other trouble.
func claimError(err error, inFlight idempotency.InFlight) error {
	if limit, bounded := inFlight.Limit(); bounded && sqlstate.Of(err) == sqlstate.LockNotAvailable {
		return fmt.Errorf("%w after %v: %w", idempotency.ErrInFlight, limit, err)
	}
	return err
}

// isKnownRollback tells whether an error of COMMIT says for sure that nothing is committed: the server has answered with an
// error and goes on, or nothing was sent. After FATAL the session is gone, and the commit may have come first.
func isKnownRollback(err error) bool {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.SeverityUnlocalized == "ERROR"
	}
	return pgconn.SafeToRetry(err)
}
