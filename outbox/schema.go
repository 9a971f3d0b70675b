package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgschema"
	"github.com/watermill-idempotency/idempotency/internal/sqlstate"
)

const (
	messagesPrefix = "watermill_"
	offsetsPrefix  = "watermill_offsets_"

	// migrationLock is the key of the advisory lock that lets one instance migrate at a time.
	migrationLock = 0x6f7574626f78 // "outbox"
)

// tables are the quoted and qualified names of the tables of a watermill-sql topic.
type tables struct{ messages, offsets string }

type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// resolve looks the schema up, so that what a session's search path becomes later changes nothing.
func (c *config) resolve(ctx context.Context, db queryer) (tables, error) {
	if db, ok := db.(*sql.DB); ok && db == nil {
		return tables{}, errors.New("the *sql.DB is nil")
	}
	var schema sql.NullString
	if c.schema != nil {
		schema = sql.NullString{String: *c.schema, Valid: true}
	} else if err := db.QueryRowContext(ctx, "select pg_catalog.current_schema()").Scan(&schema); err != nil {
		return tables{}, fmt.Errorf("look up the schema: %w", err)
	}
	if !schema.Valid {
		return tables{}, errors.New("the search path leads to no schema: use WithSchema")
	}
	return tables{
		messages: quote(schema.String) + "." + quote(messagesPrefix+c.topic),
		offsets:  quote(schema.String) + "." + quote(offsetsPrefix+c.topic),
	}, nil
}

func quote(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

func (t tables) messagesAdapter(batchSize int) watermillsql.DefaultPostgreSQLSchema {
	return watermillsql.DefaultPostgreSQLSchema{
		GenerateMessagesTableName: func(string) string { return t.messages },
		// An envelope is JSON, but a json column would be parsed once more, and its errors would abort the handler's
		// transaction.
		GeneratePayloadType: func(string) string { return "BYTEA" },
		SubscribeBatchSize:  batchSize,
	}
}

func (t tables) offsetsAdapter() watermillsql.DefaultPostgreSQLOffsetsAdapter {
	return watermillsql.DefaultPostgreSQLOffsetsAdapter{
		GenerateMessagesOffsetsTableName: func(string) string { return t.offsets },
	}
}

// Migrate creates the tables that are missing, those of watermill-sql/v3 with a payload of bytes, and the schema if
// [WithSchema] names one that does not exist. It may run at every start, and in many instances at once: an advisory lock
// lets them in one by one. It needs the privilege to create.
//
// It also heals an outbox that was moved to another cluster by dump and restore, where the numbers of transactions start
// anew: the messages that were not forwarded yet are forwarded, in the order in which they were stored.
func Migrate(ctx context.Context, db *sql.DB, opts ...Option) error {
	c, err := newConfig(opts)
	if err != nil {
		return fmt.Errorf("outbox: Migrate: %w", err)
	}
	if db == nil {
		return errors.New("outbox: Migrate: the *sql.DB is nil")
	}
	if err := c.migrate(ctx, db); err != nil {
		return fmt.Errorf("outbox: Migrate: %w", err)
	}
	return nil
}

func (c *config) migrate(ctx context.Context, db *sql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, "select pg_catalog.pg_advisory_xact_lock($1)", int64(migrationLock)); err != nil {
		return err
	}
	if c.schema != nil {
		var exists bool
		if err := tx.QueryRowContext(ctx, "select exists (select from pg_catalog.pg_namespace where nspname = $1)", *c.schema).Scan(&exists); err != nil {
			return err
		}
		if !exists { // even "if not exists" needs the privilege to create
			if _, err := tx.ExecContext(ctx, "create schema "+quote(*c.schema)); err != nil {
				return err
			}
		}
	}
	t, err := c.resolve(ctx, tx)
	if err != nil {
		return err
	}
	queries := append(t.messagesAdapter(0).SchemaInitializingQueries(c.topic), t.offsetsAdapter().SchemaInitializingQueries(c.topic)...)
	for _, q := range queries {
		if _, err := tx.ExecContext(ctx, q.Query, q.Args...); err != nil {
			return err
		}
	}
	if foreign, err := t.foreign(ctx, tx); err != nil {
		return err
	} else if foreign {
		if err := t.renumber(ctx, tx); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// foreign tells whether there are numbers of transactions that this cluster has not given out yet: what it stores would
// come before them, and never be forwarded.
func (t tables) foreign(ctx context.Context, db queryer) (foreign bool, err error) {
	next := "pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())"
	err = db.QueryRowContext(ctx, "select exists (select from "+t.messages+" where transaction_id >= "+next+")"+
		" or exists (select from "+t.offsets+" where last_processed_transaction_id >= "+next+")").Scan(&foreign)
	return foreign, err
}

// renumber leaves what has not been forwarded, in the order of storing, before all that this cluster will store.
func (t tables) renumber(ctx context.Context, tx *sql.Tx) error {
	for _, query := range []string{
		"lock table " + t.offsets + ", " + t.messages + " in exclusive mode",
		"delete from " + t.messages + " m where " + t.forwarded(),
		"update " + t.messages + " set transaction_id = '0'",
		"update " + t.offsets + " set last_processed_transaction_id = '0', offset_acked = 0",
	} {
		if _, err := tx.ExecContext(ctx, query); err != nil {
			return err
		}
	}
	return nil
}

// forwarded is the condition for a message m that every consumer group has acked. Transactions become visible to
// forwarders in the order of their numbers, so nothing appears before an acked one.
func (t tables) forwarded() string {
	return `exists (select from ` + t.offsets + `) and (m.transaction_id, m."offset") <=` +
		` all (select last_processed_transaction_id, offset_acked from ` + t.offsets + `)`
}

// Purge deletes messages that have been forwarded, at most limit of them, the oldest first, and returns their number. The
// forwarder deletes nothing by itself: call Purge from time to time, until it returns less than limit. It takes short
// locks on those rows only, and many may run at once.
func Purge(ctx context.Context, db *sql.DB, limit int, opts ...Option) (int64, error) {
	c, err := newConfig(opts)
	if err == nil && limit <= 0 {
		err = fmt.Errorf("the limit %d is not positive", limit)
	}
	if err != nil {
		return 0, fmt.Errorf("outbox: Purge: %w", err)
	}
	t, err := c.resolve(ctx, db)
	if err != nil {
		return 0, fmt.Errorf("outbox: Purge: %w", err)
	}
	//nolint:gosec // the names are quoted
	result, err := db.ExecContext(ctx, `delete from `+t.messages+` where ctid = any(array(select m.ctid from `+t.messages+` m where `+
		t.forwarded()+` order by m.transaction_id, m."offset" limit $1 for update skip locked))`, limit)
	if err != nil {
		return 0, fmt.Errorf("outbox: Purge: %w", err)
	}
	return result.RowsAffected()
}

// checkPublisher looks for what would abort the transactions of handlers, or lose messages.
func (t tables) checkPublisher(ctx context.Context, db *sql.DB) error {
	if err := pgschema.CheckSession(ctx, pgschema.SQL(db)); err != nil {
		return err
	}
	return checkTable(ctx, db, t.messages, "insert", "uuid,created_at,payload,metadata,transaction_id,offset")
}

// checkForwarder looks for what would keep a forwarder from its work, or make it miss messages.
func (t tables) checkForwarder(ctx context.Context, db *sql.DB) error {
	if err := pgschema.CheckSession(ctx, pgschema.SQL(db)); err != nil {
		return err
	}
	if err := checkTable(ctx, db, t.messages, "select", "uuid,created_at,payload,metadata,transaction_id,offset"); err != nil {
		return err
	}
	if err := checkTable(ctx, db, t.offsets, "select,insert,update", "consumer_group,offset_acked,last_processed_transaction_id"); err != nil {
		return err
	}
	foreign, err := t.foreign(ctx, db)
	if err != nil {
		return err
	}
	if foreign {
		return fmt.Errorf("%w: %s comes from another cluster, by dump and restore, and has transaction numbers that lie ahead: nothing new would be forwarded: call Migrate, which renumbers",
			idempotency.ErrSchema, t.messages)
	}
	return nil
}

func checkTable(ctx context.Context, db *sql.DB, table, privileges, columns string) error {
	var persistence, missing, payload string
	var privileged bool
	err := db.QueryRowContext(ctx, `select c.relpersistence::text,
		pg_catalog.array_to_string(array(
			select w from pg_catalog.regexp_split_to_table($3, ',') w
			except select a.attname from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped), ', '),
		coalesce((select a.atttypid::pg_catalog.regtype::text from pg_catalog.pg_attribute a
			where a.attrelid = c.oid and a.attname = 'payload' and not a.attisdropped), 'bytea'),
		(select pg_catalog.bool_and(pg_catalog.has_table_privilege(c.oid, p)) from pg_catalog.regexp_split_to_table($2, ',') p)
		and ($2 <> 'insert' or not exists (select from pg_catalog.pg_depend d
			join pg_catalog.pg_class s on s.oid = d.objid
			where d.refobjid = c.oid and case s.relkind when 'S' then not pg_catalog.has_sequence_privilege(s.oid, 'usage') end))
		from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass($1)`, table, privileges, columns).
		Scan(&persistence, &missing, &payload, &privileged)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("%w: %s does not exist: call Migrate with the same options", idempotency.ErrSchema, table)
	case err != nil && sqlstate.Of(err) != sqlstate.InsufficientPrivilege:
		return err
	case err != nil || !privileged:
		return fmt.Errorf("%w: the role needs usage on the schema of %s, %s on the table, and to insert usage on its sequence", idempotency.ErrPrivilege, table, privileges)
	case missing != "":
		return fmt.Errorf("%w: %s lacks the columns %s: it is not a table of watermill-sql/v3: choose another topic by WithTopic", idempotency.ErrSchema, table, missing)
	case payload != "bytea":
		return fmt.Errorf("%w: the payload of %s is %s, not bytea: choose another topic by WithTopic, or alter the column", idempotency.ErrSchema, table, payload)
	case persistence != "p":
		return fmt.Errorf("%w: %s is not a permanent table (relpersistence %q): alter table %s set logged", idempotency.ErrNotDurable, table, persistence, table)
	}
	return nil
}
