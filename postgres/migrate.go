package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency/internal/pgschema"
)

// Migrate creates the tables that are missing, and the schema if [WithSchema] names one that does not exist. It may run
// at every start, and in many instances at once: an advisory lock lets them in one by one. It needs the privilege to
// create.
func Migrate(ctx context.Context, pool *pgxpool.Pool, opts ...Option) error {
	c, err := newConfig(opts)
	if err != nil {
		return fmt.Errorf("postgres: Migrate: %w", err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return c.names.Migrate(ctx, db{tx}) })
	if err != nil {
		return fmt.Errorf("postgres: Migrate: %w", err)
	}
	return nil
}

// db is a pool or a transaction as package pgschema wants it.
type db struct {
	pgx interface {
		Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
		QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	}
}

// Exec implements [pgschema.DB].
func (d db) Exec(ctx context.Context, sql string, args ...any) error {
	_, err := d.pgx.Exec(ctx, sql, args...)
	return err
}

// QueryRow implements [pgschema.DB].
func (d db) QueryRow(ctx context.Context, sql string, args []any, dest ...any) error {
	err := d.pgx.QueryRow(ctx, sql, args...).Scan(dest...)
	if errors.Is(err, pgx.ErrNoRows) {
		return pgschema.ErrNoRows
	}
	return err
}
