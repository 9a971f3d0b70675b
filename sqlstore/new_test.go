package sqlstore_test

import (
	"database/sql"
	"database/sql/driver"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
	"github.com/watermill-idempotency/idempotency/sqlstore"
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
		"no primary key":     {change: "alter table {schema}.idempotency_claim drop constraint idempotency_claim_pkey", want: idempotency.ErrSchema, says: "primary key"},
		"deferrable key":     {change: "alter table {schema}.idempotency_claim drop constraint idempotency_claim_pkey, add primary key (subscriber_id, event_id) deferrable", want: idempotency.ErrSchema, says: "is deferrable"},
		"synchronous_commit": {settings: map[string]string{"synchronous_commit": "off"}, want: idempotency.ErrNotDurable, says: "synchronous_commit is off"},
		"read-only":          {settings: map[string]string{"default_transaction_read_only": "on"}, want: idempotency.ErrReadOnly, says: "default_transaction_read_only"},
		"no usage":           {settings: map[string]string{"role": "pg_monitor"}, want: idempotency.ErrPrivilege, says: "needs usage on the schema"},
		"no privilege":       {settings: map[string]string{"role": "pg_monitor"}, change: "grant usage on schema {schema} to pg_monitor", want: idempotency.ErrPrivilege, says: "needs insert, select on"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, parse(t, pgtest.URLVariable), 1)
			if test.change != "" {
				b.exec(t, test.change)
			}
			config := parse(t, pgtest.URLVariable)
			for setting, value := range test.settings {
				config.RuntimeParams[setting] = value
			}
			_, err := sqlstore.New(t.Context(), openDB(t, config, 1), sqlstore.PostgreSQL(), sqlstore.WithSchema(b.schema))
			require.ErrorIs(t, err, test.want)
			require.ErrorContains(t, err, test.says)
		})
	}
}

// The privileges that the documentation asks for are enough.
func TestPrivilegesAreEnough(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 1)
	b.exec(t, `grant usage on schema {schema} to pg_monitor; grant insert, select on {schema}.idempotency_claim to pg_monitor;
		grant insert, select, delete on {schema}.idempotency_produced_message to pg_monitor`)
	config := parse(t, pgtest.URLVariable)
	config.RuntimeParams["role"] = "pg_monitor"
	store, err := sqlstore.New(t.Context(), openDB(t, config, 1), sqlstore.PostgreSQL(), sqlstore.WithSchema(b.schema))
	require.NoError(t, err)
	tx, _, err := store.Claim(t.Context(), claimOf("1"))
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))
	b.requireCommitted(t, 0, 1, 1)
	require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
	b.requireCommitted(t, 0, 1, 0)
}

func TestTrap33_NamesAreQuoted(t *testing.T) {
	t.Parallel()
	for _, name := range []string{`Upper Case`, `quo"te`, `'; drop table x; --`, `select`, `ünïcödé`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := openDB(t, parse(t, pgtest.URLVariable), 1)
			opts := []sqlstore.Option{sqlstore.WithSchema(pgtest.Schema(t)), sqlstore.WithTablePrefix(name)}
			require.NoError(t, sqlstore.Migrate(t.Context(), db, sqlstore.PostgreSQL(), opts...))
			store, err := sqlstore.New(t.Context(), db, sqlstore.PostgreSQL(), opts...)
			require.NoError(t, err)
			tx, _, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))
			_, record, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.Len(t, record.Produced, 1)
			require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
		})
	}
}

func TestMistakesAreToldAtOnce(t *testing.T) {
	t.Parallel()
	config, err := pgx.ParseConfig("postgres://localhost")
	require.NoError(t, err)
	db := stdlib.OpenDB(*config) // connects to nothing
	defer func() { require.NoError(t, db.Close()) }()
	_, err = sqlstore.New(t.Context(), db, sqlstore.PostgreSQL(), sqlstore.WithSchema(""), sqlstore.WithTablePrefix(strings.Repeat("x", 48)),
		sqlstore.WithIsolation(sql.LevelSnapshot), sqlstore.WithAcquireTimeout(0))
	require.EqualError(t, err, "sqlstore: New: WithSchema: it is empty\n"+
		`WithTablePrefix: "`+strings.Repeat("x", 48)+`" has 48 bytes, 47 are allowed`+"\n"+
		`WithIsolation: PostgreSQL has no level "Snapshot"`+"\n"+
		"WithAcquireTimeout: 0s is not positive")
	_, err = sqlstore.New(t.Context(), db, sqlstore.SQLite(), sqlstore.WithSchema("a"), sqlstore.WithTablePrefix("sqlite_"), sqlstore.WithIsolation(99))
	require.EqualError(t, err, "sqlstore: New: WithSchema: SQLite has no schemas: use WithTablePrefix, or another file\n"+
		`WithTablePrefix: "sqlite_": SQLite keeps names that begin with sqlite_ for itself`+"\n"+
		`WithIsolation: SQLite has no level "IsolationLevel(99)": it is always serializable`)
	for _, err := range []error{
		sqlstore.Migrate(t.Context(), nil, sqlstore.SQLite()),
		sqlstore.Migrate(t.Context(), db, nil),
		sqlstore.Migrate(t.Context(), db, sqlstore.SQLite(), nil),
	} {
		require.ErrorContains(t, err, "is nil")
	}
}

func TestMigrateByManyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	db := openDB(t, parse(t, pgtest.URLVariable), 8)
	name := pgtest.Schema(t)
	_, err := db.ExecContext(t.Context(), "drop schema "+name) // Migrate makes it
	require.NoError(t, err)
	schema := sqlstore.WithSchema(name)
	errs := make(chan error, 8)
	for range cap(errs) {
		go func() { errs <- sqlstore.Migrate(t.Context(), db, sqlstore.PostgreSQL(), schema) }()
	}
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
	_, err = sqlstore.New(t.Context(), db, sqlstore.PostgreSQL(), schema)
	require.NoError(t, err)
}

// A service can go from package postgres to this one and back.
func TestTablesAreThoseOfPackagePostgres(t *testing.T) {
	t.Parallel()
	schema := pgtest.Schema(t)
	pool, db := pgtest.Pool(t, 2), openDB(t, parse(t, pgtest.URLVariable), 2)
	require.NoError(t, postgres.Migrate(t.Context(), pool, postgres.WithSchema(schema)))
	there, err := postgres.New(t.Context(), pool, postgres.WithSchema(schema))
	require.NoError(t, err)
	here, err := sqlstore.New(t.Context(), db, sqlstore.PostgreSQL(), sqlstore.WithSchema(schema))
	require.NoError(t, err)

	produced := func() []*message.Message {
		msg := message.NewMessage("produced", []byte{0, 1})
		msg.Metadata.Set("binary", "\xff")
		return []*message.Message{msg, message.NewMessage("another", nil)}
	}
	for eventID, stores := range map[string][2]idempotency.Store{"there": {there, here}, "here": {here, there}} {
		c := claimOf(eventID)
		c.Fingerprint = []byte{0, 255}
		tx, _, err := stores[0].Claim(t.Context(), c)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context(), produced()))
		var records [2]*idempotency.Record
		for i, store := range stores {
			_, records[i], err = store.Claim(t.Context(), c)
			require.NoError(t, err)
			require.Len(t, records[i].Produced, 2)
			for j, msg := range produced() {
				require.True(t, msg.Equals(records[i].Produced[j]))
			}
			records[i].Produced = nil
			records[i].ClaimedAt = records[i].ClaimedAt.UTC()
		}
		require.Equal(t, records[0], records[1])
	}
	for i, store := range []idempotency.Store{there, here} {
		require.NoError(t, store.Acked(t.Context(), []idempotency.Key{claimOf([]string{"here", "there"}[i]).Key}))
	}
	for _, eventID := range []string{"here", "there"} {
		_, record, err := here.Claim(t.Context(), claimOf(eventID))
		require.NoError(t, err)
		require.Empty(t, record.Produced)
	}
}

// pqError has the shape of lib/pq's.
type pqError struct{ code string }

func (e *pqError) Error() string    { return "pq" }
func (e *pqError) SQLState() string { return e.code }

func TestClassifyByCode(t *testing.T) {
	t.Parallel()
	b := open(t, parse(t, pgtest.URLVariable), 1)
	for code, want := range map[string]idempotency.Fault{
		"40001": idempotency.FaultConflict, "40P01": idempotency.FaultConflict,
		"08006": idempotency.FaultUnavailable, "53300": idempotency.FaultUnavailable, "57P01": idempotency.FaultUnavailable,
		"55P03": idempotency.FaultUnavailable, "25006": idempotency.FaultUnavailable,
		"23505": idempotency.FaultOther, "42P01": idempotency.FaultOther, "25P02": idempotency.FaultOther,
	} {
		require.Equal(t, want, b.store.Classify(fmt.Errorf("handler: %w", &pgconn.PgError{Code: code})), code)
		require.Equal(t, want, b.store.Classify(fmt.Errorf("handler: %w", &pqError{code})), code)
	}
	for _, err := range []error{driver.ErrBadConn, sql.ErrConnDone, io.EOF, io.ErrUnexpectedEOF, &net.OpError{Op: "read", Err: io.ErrClosedPipe}} {
		require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(fmt.Errorf("handler: %w", err)), "%v", err)
	}
	for _, err := range []error{sql.ErrNoRows, sql.ErrTxDone} {
		require.Equal(t, idempotency.FaultOther, b.store.Classify(err), "%v", err)
	}
	config := parse(t, pgtest.URLVariable)
	config.Port = 1
	err := openDB(t, config, 1).PingContext(t.Context())
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(err), "a server that refuses connections: %v", err)
}
