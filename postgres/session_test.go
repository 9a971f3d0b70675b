package postgres_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
)

func TestTrap28_NewFindsWhatWouldLoseMessages(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change   string
		settings map[string]string
		want     error
		says     string
	}{
		"no table":           {change: "drop table {schema}.idempotency_claim", want: idempotency.ErrSchema, says: "call Migrate"},
		"no produced table":  {change: "drop table {schema}.idempotency_produced_message", want: idempotency.ErrSchema, says: "call Migrate"},
		"no primary key":     {change: "alter table {schema}.idempotency_claim drop constraint idempotency_claim_pkey", want: idempotency.ErrSchema, says: "primary key"},
		"other primary key":  {change: "alter table {schema}.idempotency_claim drop constraint idempotency_claim_pkey, add primary key (subscriber_id, event_id, topic)", want: idempotency.ErrSchema, says: "primary key"},
		"deferrable key":     {change: "alter table {schema}.idempotency_claim drop constraint idempotency_claim_pkey, add primary key (subscriber_id, event_id) deferrable", want: idempotency.ErrSchema, says: "is deferrable"},
		"other collation":    {change: `alter table {schema}.idempotency_claim alter event_id type text collate "und-x-icu"`, want: idempotency.ErrSchema, says: "collations"},
		"column missing":     {change: "alter table {schema}.idempotency_claim drop column fingerprint", want: idempotency.ErrSchema, says: `no column "fingerprint"`},
		"unlogged":           {change: "alter table {schema}.idempotency_claim set unlogged", want: idempotency.ErrNotDurable, says: "set logged"},
		"synchronous_commit": {settings: map[string]string{"synchronous_commit": "off"}, want: idempotency.ErrNotDurable, says: "synchronous_commit is off"},
		"read-only":          {settings: map[string]string{"default_transaction_read_only": "on"}, want: idempotency.ErrReadOnly, says: "default_transaction_read_only"},
		"no usage":           {settings: map[string]string{"role": "pg_monitor"}, want: idempotency.ErrPrivilege, says: "needs usage on the schema"},
		"no privilege":       {settings: map[string]string{"role": "pg_monitor"}, change: "grant usage on schema {schema} to pg_monitor", want: idempotency.ErrPrivilege, says: "needs insert, select on"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, pgtest.Config(t, 2))
			if test.change != "" {
				b.exec(t, test.change)
			}
			config := pgtest.Config(t, 2)
			for setting, value := range test.settings {
				config.ConnConfig.RuntimeParams[setting] = value
			}
			_, err := postgres.New(t.Context(), pgtest.Open(t, config), postgres.WithSchema(b.schema))
			require.ErrorIs(t, err, test.want)
			require.ErrorContains(t, err, test.says)
		})
	}
}

// An index that folds or reorders keys is not the claim's: IDs that differ in any byte are different events.
func TestTrap34_KeysAreComparedAsBytes(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	ids := []string{"A1", "a1", "\u00e11", "a\u03011", "a1 ", " a1", "a1\t", "a1\u00a0", strings.Repeat("x", idempotency.MaxEventIDLength)}
	for _, id := range ids {
		tx, _ := b.claim(t, claimOf(id))
		require.NoError(t, tx.Commit(t.Context(), nil))
	}
	for _, id := range ids {
		_, record, err := claim(t, b.store, claimOf(id))
		require.NoError(t, err)
		require.NotNil(t, record, "%q", id)
		require.Equal(t, id, record.EventID)
	}
	var collations []string
	require.NoError(t, b.pool.QueryRow(t.Context(), `select array_agg(distinct c.collname::text) from pg_index i, unnest(i.indcollation) o join pg_collation c on c.oid = o
		where i.indrelid = $1::regclass`, b.schema+".idempotency_claim").Scan(&collations))
	require.Equal(t, []string{"C"}, collations)
}

func TestTrap33_NamesAreQuoted(t *testing.T) {
	t.Parallel()
	for _, name := range []string{`Upper Case`, `quo"te`, `semi;colon`, `'; drop table x; --`, `select`, `ünïcödé`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t, 2)
			schema := pgtest.Schema(t) + name
			t.Cleanup(func() {
				_, err := pgtest.Pool(t, 1).Exec(context.WithoutCancel(t.Context()), "drop schema "+pgx.Identifier{schema}.Sanitize()+" cascade")
				require.NoError(t, err)
			})
			opts := []postgres.Option{postgres.WithSchema(schema), postgres.WithTablePrefix(name)}
			require.NoError(t, postgres.Migrate(t.Context(), pool, opts...))
			store, err := postgres.New(t.Context(), pool, opts...)
			require.NoError(t, err)
			tx, _, err := claim(t, store, claimOf("1"))
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))
			_, record, err := claim(t, store, claimOf("1"))
			require.NoError(t, err)
			require.Len(t, record.Produced, 1)
			require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
		})
	}
	_, err := postgres.New(t.Context(), pgtest.Pool(t, 1), postgres.WithSchema(""), postgres.WithTablePrefix(strings.Repeat("x", 48)), postgres.WithIsolation("chaos"), postgres.WithAcquireTimeout(0))
	require.EqualError(t, err, "postgres: New: WithSchema: it is empty\n"+
		`WithTablePrefix: "`+strings.Repeat("x", 48)+`" has 48 bytes, 47 are allowed`+"\n"+
		`WithIsolation: "chaos" is not an isolation level: use a constant of package pgx`+"\n"+
		"WithAcquireTimeout: 0s is not positive")
}

// What handlers leave on a pooled connection leads no later claim astray.
func TestTrap35_SessionStateOfAHandler(t *testing.T) {
	t.Parallel()
	for name, left := range map[string]string{
		"search_path":     "set search_path to elsewhere",
		"temporary table": "create temporary table idempotency_claim (subscriber_id text, event_id text, topic text, fingerprint bytea, primary key (subscriber_id, event_id))",
		"functions":       "create function pg_temp.set_config(text, text, bool) returns text language sql as 'select null::text'; set search_path to pg_temp, pg_catalog",
		"advisory lock":   "select pg_advisory_lock(hashtextextended(current_schema(), 0))",
		"lock timeout":    "set lock_timeout to 1",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := pgtest.Config(t, 1) // the same session each time
			schema := pgtest.Schema(t)
			config.ConnConfig.RuntimeParams["search_path"] = schema
			pool := pgtest.Open(t, config)
			require.NoError(t, postgres.Migrate(t.Context(), pool)) // into the schema of the search path
			store, err := postgres.New(t.Context(), pool)
			require.NoError(t, err)

			tx, _, err := claim(t, store, claimOf("1"))
			require.NoError(t, err)
			_, err = tx.Raw().(pgx.Tx).Exec(t.Context(), left)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))

			_, record, err := claim(t, store, claimOf("1"))
			require.NoError(t, err)
			require.NotNil(t, record, "claimed again, in another table")
			require.Len(t, record.Produced, 1)
			require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
			tx, record, err = claim(t, store, claimOf("2"))
			require.NoError(t, err)
			require.Nil(t, record)
			require.NoError(t, tx.Commit(t.Context(), nil))
		})
	}
	for name, left := range map[string]string{
		"read only": "set session characteristics as transaction read only",
		"role":      "set role pg_monitor",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, pgtest.Config(t, 1))
			tx, raw := b.claim(t, claimOf("1"))
			_, err := raw.Exec(t.Context(), left)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context(), nil))
			_, _, err = claim(t, b.store, claimOf("1"))
			require.Error(t, err, "an error, and not a duplicate that was not looked for")
			_, record, err := claim(t, b.store, claimOf("1"))
			require.NoError(t, err, "the connection is not used again")
			require.NotNil(t, record)
		})
	}
	t.Run("no statements", func(t *testing.T) {
		t.Parallel()
		b := open(t, pgtest.Config(t, 1))
		tx, raw := b.claim(t, claimOf("1"))
		_, err := raw.Exec(t.Context(), "deallocate all")
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context(), nil), "the first on the connection: its statements are prepared now")
		_, _, err = claim(t, b.store, claimOf("1"))
		require.Error(t, err, "an error, and not a duplicate that was not looked for")
		_, record, err := claim(t, b.store, claimOf("1"))
		require.NoError(t, err, "the connection is not used again")
		require.NotNil(t, record)

		tx, _ = b.claim(t, claimOf("2"))
		require.NoError(t, tx.Commit(t.Context(), nil))
		tx, raw = b.claim(t, claimOf("3"))
		_, err = raw.Exec(t.Context(), "deallocate all")
		require.NoError(t, err)
		require.ErrorIs(t, tx.Commit(t.Context(), nil), idempotency.ErrRolledBack)
		require.NoError(t, pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error { return b.Write(t.Context(), tx, "label") }), "what pgx sends itself needs none")
	})
	t.Run("altered table", func(t *testing.T) {
		t.Parallel()
		b := open(t, pgtest.Config(t, 1))
		tx, _ := b.claim(t, claimOf("1"))
		require.NoError(t, tx.Commit(t.Context(), nil))
		_, record, err := claim(t, b.store, claimOf("1"))
		require.NoError(t, err)
		require.NotNil(t, record)
		b.exec(t, "alter table {schema}.idempotency_claim alter topic type varchar")
		_, _, err = claim(t, b.store, claimOf("1"))
		require.Error(t, err, "its statement was prepared for the other type")
		_, record, err = claim(t, b.store, claimOf("1"))
		require.NoError(t, err, "the connection is not used again")
		require.NotNil(t, record)
	})
}

// watching is a tracer that notes the statements of batches.
type watching struct{ statements []string }

func (*watching) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (*watching) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (*watching) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (w *watching) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	w.statements = append(w.statements, data.SQL)
}

func (*watching) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func TestTracersSeeTheStatements(t *testing.T) {
	t.Parallel()
	w := &watching{}
	config := pgtest.Config(t, 1)
	config.ConnConfig.Tracer = w
	b := open(t, config)
	tx, _ := b.claim(t, claimOf("1"))
	require.NoError(t, tx.Commit(t.Context(), nil))
	require.Len(t, w.statements, 4)
	require.Equal(t, "begin;", w.statements[0])
	require.Contains(t, w.statements[1], "idempotency_claim")
	require.Equal(t, "commit;", w.statements[3])
}

// A handler that gives up durability for itself, or leaves a session that has given it up, has its messages acked all the
// same. A deferred trigger sees what is in force at COMMIT.
func TestTrap35_SynchronousCommitIsOnAgain(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 1)) // the same session each time
	b.exec(t, `create table {schema}.seen (setting text);
		create function {schema}.look() returns trigger language plpgsql as $$
			begin insert into {schema}.seen values (current_setting('synchronous_commit')); return null; end $$;
		create constraint trigger look after insert on {schema}.effect deferrable initially deferred for each row execute function {schema}.look()`)
	for i, statement := range []string{"set local synchronous_commit = off", "set synchronous_commit = off", "select 1", "set synchronous_commit = local"} {
		tx, raw := b.claim(t, claimOf(fmt.Sprint(i)))
		_, err := raw.Exec(t.Context(), statement)
		require.NoError(t, err)
		require.NoError(t, b.Write(t.Context(), raw, "label"))
		require.NoError(t, tx.Commit(t.Context(), nil))
	}
	rows, err := b.pool.Query(t.Context(), "select setting from "+b.schema+".seen")
	require.NoError(t, err)
	seen, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"on", "on", "on", "local"}, seen, "local survives a crash of the server")
}

func TestMigrateByManyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, 8)
	schema := pgtest.Schema(t)
	errs := make(chan error, 8)
	for range cap(errs) {
		go func() { errs <- postgres.Migrate(t.Context(), pool, postgres.WithSchema(schema)) }()
	}
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
	_, err := postgres.New(t.Context(), pool, postgres.WithSchema(schema))
	require.NoError(t, err)
	_, err = postgres.New(t.Context(), nil)
	require.ErrorContains(t, err, "the pool is nil")
}

// A role with the privileges of the package comment, and no more, can do all that a service does.
func TestPrivilegesAreEnough(t *testing.T) {
	t.Parallel()
	b := open(t, pgtest.Config(t, 2))
	b.exec(t, `grant usage on schema {schema} to pg_monitor; grant select, insert on {schema}.idempotency_claim to pg_monitor;
		grant select, insert, delete on {schema}.idempotency_produced_message to pg_monitor`)
	config := pgtest.Config(t, 2)
	config.ConnConfig.RuntimeParams["role"] = "pg_monitor"
	store, err := postgres.New(t.Context(), pgtest.Open(t, config), postgres.WithSchema(b.schema))
	require.NoError(t, err)
	tx, _, err := claim(t, store, claimOf("1"))
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))
	require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
	_, record, err := claim(t, store, claimOf("1"))
	require.NoError(t, err)
	require.Empty(t, record.Produced)
}
