package sqlstore

import (
	"context"
	"database/sql"
	"fmt"
)

// Migrate creates the tables that are missing, and on PostgreSQL the schema if [WithSchema] names one that does not exist.
// It may run at every start, and in many instances at once: one waits for the other. It needs the privilege to create.
func Migrate(ctx context.Context, db *sql.DB, d Dialect, opts ...Option) error {
	c, err := newConfig(db, d, opts)
	if err != nil {
		return fmt.Errorf("sqlstore: Migrate: %w", err)
	}
	conn, err := acquire(ctx, db, c.acquireTimeout)
	if err != nil {
		return fmt.Errorf("sqlstore: Migrate: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if err := d.migrate(ctx, conn, &c); err != nil {
		return fmt.Errorf("sqlstore: Migrate: %w", because(ctx, err))
	}
	return nil
}
