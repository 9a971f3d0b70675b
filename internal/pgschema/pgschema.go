// Package pgschema holds the tables on PostgreSQL, for the stores on pgx and on database/sql: a service can go from one to
// the other.
package pgschema

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/sqlstate"
)

// DefaultPrefix is what the names of the tables begin with.
const DefaultPrefix = "idempotency_"

const (
	claimTable    = "claim"
	producedTable = "produced_message"
	claimedAt     = "claim_claimed_at" // the index

	// maxName is the longest identifier that PostgreSQL keeps whole; longer ones are cut without an error.
	maxName = 63

	// migrationLock is the key of the advisory lock that lets one instance migrate at a time.
	migrationLock = 0x7761746572696964
)

//go:embed migrations/*.sql
var migrations embed.FS

// DB is a connection or a pool, of either kind. QueryRow returns an error for which errors.Is(err, ErrNoRows) is true if
// there is none.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) error
	QueryRow(ctx context.Context, sql string, args []any, dest ...any) error
}

// ErrNoRows is what [DB] returns for no row.
var ErrNoRows = errors.New("no rows")

// Names are the configured names; a nil Schema stands for the first one of the search path.
type Names struct {
	Schema *string
	Prefix string
}

// Tables are the quoted and qualified names.
type Tables struct{ Claim, Produced string }

// Validate reports all mistakes, by the names of the options.
func (n Names) Validate() []error {
	var errs []error
	if n.Schema != nil {
		if err := checkName(*n.Schema, maxName); err != nil {
			errs = append(errs, fmt.Errorf("WithSchema: %w", err))
		}
	}
	if n.Prefix != "" {
		if err := checkName(n.Prefix, maxName-max(len(producedTable), len(claimedAt))); err != nil {
			errs = append(errs, fmt.Errorf("WithTablePrefix: %w", err))
		}
	}
	return errs
}

func checkName(name string, limit int) error {
	switch {
	case name == "":
		return errors.New("it is empty")
	case len(name) > limit:
		return fmt.Errorf("%q has %d bytes, %d are allowed", name, len(name), limit)
	case strings.IndexByte(name, 0) >= 0 || !utf8.ValidString(name):
		return fmt.Errorf("%q is not UTF-8 without NUL", name)
	}
	return nil
}

// Resolve looks the schema up, so that what a session's search path becomes later changes nothing.
func (n Names) Resolve(ctx context.Context, db DB) (Tables, error) {
	var schema *string
	if schema = n.Schema; schema == nil {
		if err := db.QueryRow(ctx, "select pg_catalog.current_schema()", nil, &schema); err != nil {
			return Tables{}, fmt.Errorf("look up the schema: %w", err)
		}
		if schema == nil {
			return Tables{}, errors.New("the search path leads to no schema: use WithSchema")
		}
	}
	table := func(name string) string { return quote(*schema) + "." + quote(n.Prefix+name) }
	return Tables{Claim: table(claimTable), Produced: table(producedTable)}, nil
}

func quote(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

// literal is for names in quotes, with standard_conforming_strings on or off.
func literal(text string) string {
	return " E'" + strings.NewReplacer(`\`, `\\`, "'", "''").Replace(text) + "'"
}

// Migrate creates what is missing, on one connection inside of a transaction.
func (n Names) Migrate(ctx context.Context, tx DB) error {
	if err := tx.Exec(ctx, "select pg_catalog.pg_advisory_xact_lock($1)", int64(migrationLock)); err != nil {
		return err
	}
	if n.Schema != nil {
		var exists bool
		if err := tx.QueryRow(ctx, "select exists (select from pg_catalog.pg_namespace where nspname = $1)", []any{*n.Schema}, &exists); err != nil {
			return err
		}
		if !exists { // even "if not exists" needs the privilege to create
			if err := tx.Exec(ctx, "create schema "+quote(*n.Schema)); err != nil {
				return err
			}
		}
	}
	t, err := n.Resolve(ctx, tx)
	if err != nil {
		return err
	}
	// An index is in the schema of its table, and is created without naming it.
	names := strings.NewReplacer("{claim}", t.Claim, "{produced_message}", t.Produced, "{claim_claimed_at}", quote(n.Prefix+claimedAt))
	files, err := migrations.ReadDir("migrations")
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := migrations.ReadFile("migrations/" + file.Name())
		if err != nil {
			return err
		}
		if err := tx.Exec(ctx, names.Replace(string(text))); err != nil {
			return fmt.Errorf("%s: %w", file.Name(), err)
		}
	}
	return nil
}

// Check looks for what would lose or double messages later.
func Check(ctx context.Context, db DB, t Tables) error {
	if err := CheckSession(ctx, db); err != nil {
		return err
	}
	if err := checkTable(ctx, db, t.Claim, "subscriber_id,event_id", "insert, select", "claimed_at", "topic", "fingerprint"); err != nil {
		return err
	}
	return checkTable(ctx, db, t.Produced, "subscriber_id,event_id,position", "insert, select, delete", "uuid", "metadata", "payload")
}

// CheckSession tells whether the commits of a session last, as one of the pool meets it: settings of the database and of
// the role count.
func CheckSession(ctx context.Context, db DB) error {
	var synchronousCommit, readOnly string
	var recovery bool
	err := db.QueryRow(ctx, `select pg_catalog.current_setting('synchronous_commit'),
		pg_catalog.current_setting('transaction_read_only'), pg_catalog.pg_is_in_recovery()`, nil,
		&synchronousCommit, &readOnly, &recovery)
	switch {
	case err != nil:
		return err
	case recovery:
		return fmt.Errorf("%w: the server is a standby: connect to the primary (target_session_attrs=read-write)", idempotency.ErrReadOnly)
	case readOnly == "on":
		return fmt.Errorf("%w: transactions are read-only by default: set default_transaction_read_only=off for this role or connection", idempotency.ErrReadOnly)
	case synchronousCommit == "off":
		return fmt.Errorf("%w: synchronous_commit is off, so that a crash loses commits whose messages are acked: set it to on for this role or connection", idempotency.ErrNotDurable)
	}
	return nil
}

func checkTable(ctx context.Context, db DB, table, key, privileges string, others ...string) error {
	var persistence, columns, primaryKey, collations string
	var deferrable, privileged bool
	err := db.QueryRow(ctx, `select c.relpersistence::text,
		pg_catalog.array_to_string(array(select a.attname from pg_catalog.pg_attribute a
			where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped), ','),
		pg_catalog.array_to_string(array(select a.attname from pg_catalog.pg_index i
			cross join pg_catalog.unnest(i.indkey) with ordinality k (attnum, n)
			join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
			where i.indrelid = c.oid and i.indisprimary and i.indisvalid order by k.n), ','),
		exists (select from pg_catalog.pg_index i where i.indrelid = c.oid and i.indisprimary and not i.indimmediate),
		pg_catalog.array_to_string(array(select distinct l.collname from pg_catalog.pg_attribute a
			join pg_catalog.pg_collation l on l.oid = a.attcollation
			where a.attrelid = c.oid and a.attname in ('subscriber_id', 'event_id')), ','),
		(select pg_catalog.bool_and(pg_catalog.has_table_privilege(c.oid, p)) from pg_catalog.regexp_split_to_table($2, ', ') p)
		from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass($1)`, []any{table, privileges},
		&persistence, &columns, &primaryKey, &deferrable, &collations, &privileged)
	switch {
	case errors.Is(err, ErrNoRows):
		return fmt.Errorf("%w: %s does not exist: call Migrate with the same options, or run its statements", idempotency.ErrSchema, table)
	case sqlstate.Of(err) == sqlstate.InsufficientPrivilege:
		return fmt.Errorf("%w: the role needs usage on the schema of %s, and %s on the table: %w", idempotency.ErrPrivilege, table, privileges, err)
	case err != nil:
		return err
	case primaryKey != key:
		return fmt.Errorf("%w: the primary key of %s is (%s), not (%s): without it duplicates are processed", idempotency.ErrSchema, table, primaryKey, key)
	case deferrable:
		return fmt.Errorf("%w: the primary key of %s is deferrable, which the claim cannot use: drop the constraint, and add it without deferrable", idempotency.ErrSchema, table)
	case collations != "C":
		return fmt.Errorf(`%w: subscriber_id and event_id of %s have the collations %s, not "C"`, idempotency.ErrSchema, table, collations)
	case persistence != "p":
		return fmt.Errorf("%w: %s is not a permanent table (relpersistence %q): alter table %s set logged", idempotency.ErrNotDurable, table, persistence, table)
	case !privileged:
		return fmt.Errorf("%w: the role needs %s on %s", idempotency.ErrPrivilege, privileges, table)
	}
	present := strings.Split(columns, ",")
	for _, column := range others {
		if !slices.Contains(present, column) {
			return fmt.Errorf("%w: %s has no column %q: call Migrate of this version", idempotency.ErrSchema, table, column)
		}
	}
	return nil
}
