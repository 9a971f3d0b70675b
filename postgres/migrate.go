package postgres

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	claimTable    = "claim"
	producedTable = "produced_message"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrationLock is the key of the advisory lock that lets one instance migrate at a time: the first bytes of "watermill
// idempotency".
const migrationLock = 0x7761746572696964

// tables are the quoted and qualified names.
type tables struct {
	schema          string
	claim, produced string
}

func (c *config) tables(ctx context.Context, q querier) (tables, error) {
	var schema string
	if c.schema != nil {
		schema = *c.schema
	} else {
		var current *string
		if err := q.QueryRow(ctx, "select pg_catalog.current_schema()").Scan(&current); err != nil {
			return tables{}, fmt.Errorf("look up the schema: %w", err)
		}
		if current == nil {
			return tables{}, fmt.Errorf("the search path leads to no schema: use WithSchema")
		}
		schema = *current
	}
	return tables{
		schema:   schema,
		claim:    pgx.Identifier{schema, c.prefix + claimTable}.Sanitize(),
		produced: pgx.Identifier{schema, c.prefix + producedTable}.Sanitize(),
	}, nil
}

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Migrate creates the tables that are missing, and the schema if [WithSchema] names one that does not exist. It may run
// at every start, and in many instances at once: an advisory lock lets them in one by one. It needs the privilege to
// create; whoever prefers to run the statements by other means finds them in the folder migrations, with the names in
// braces to be replaced.
func Migrate(ctx context.Context, pool *pgxpool.Pool, opts ...Option) error {
	c, err := newConfig(opts)
	if err != nil {
		return fmt.Errorf("postgres: Migrate: %w", err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return c.migrate(ctx, tx) })
	if err != nil {
		return fmt.Errorf("postgres: Migrate: %w", err)
	}
	return nil
}

func (c *config) migrate(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, "select pg_catalog.pg_advisory_xact_lock($1)", int64(migrationLock)); err != nil {
		return err
	}
	if c.schema != nil {
		var exists bool
		if err := tx.QueryRow(ctx, "select exists (select from pg_catalog.pg_namespace where nspname = $1)", *c.schema).Scan(&exists); err != nil {
			return err
		}
		if !exists {
			if _, err := tx.Exec(ctx, "create schema "+pgx.Identifier{*c.schema}.Sanitize()); err != nil {
				return err
			}
		}
	}
	t, err := c.tables(ctx, tx)
	if err != nil {
		return err
	}
	files, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := migrations.ReadFile(file)
		if err != nil {
			return err
		}
		statements := strings.NewReplacer("{claim}", t.claim, "{produced_message}", t.produced).Replace(string(text))
		if _, err := tx.Exec(ctx, statements); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}
