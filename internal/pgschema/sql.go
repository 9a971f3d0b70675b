package pgschema

import (
	"context"
	"database/sql"
	"errors"
)

// SQL makes a [DB] of a *sql.DB, a *sql.Conn or a *sql.Tx.
func SQL(db Queryer) DB { return sqlDB{db} }

// Queryer is what the three have in common.
type Queryer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

type sqlDB struct{ db Queryer }

// Exec implements [DB].
func (d sqlDB) Exec(ctx context.Context, text string, args ...any) error {
	_, err := d.db.ExecContext(ctx, text, args...)
	return err
}

// QueryRow implements [DB].
func (d sqlDB) QueryRow(ctx context.Context, text string, args []any, dest ...any) error {
	err := d.db.QueryRowContext(ctx, text, args...).Scan(dest...)
	if errors.Is(err, sql.ErrNoRows) {
		return ErrNoRows
	}
	return err
}
