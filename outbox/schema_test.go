package outbox_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/outbox"
)

func TestTrap26_WhatWouldAbortHandlersIsFoundWhenItOpens(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		statement string
		publisher error
		forwarder error
		text      string
	}{
		"no messages table": {"drop table {s}.watermill_outbox", idempotency.ErrSchema, idempotency.ErrSchema, "Migrate"},
		"no offsets table":  {"drop table {s}.watermill_offsets_outbox", nil, idempotency.ErrSchema, "Migrate"},
		"a json payload": {
			"alter table {s}.watermill_outbox alter payload type json using null", idempotency.ErrSchema, idempotency.ErrSchema, "json",
		},
		"a missing column": {
			"alter table {s}.watermill_outbox rename metadata to meta", idempotency.ErrSchema, idempotency.ErrSchema, "metadata",
		},
		"an unlogged table": {
			"alter table {s}.watermill_outbox set unlogged", idempotency.ErrNotDurable, idempotency.ErrNotDurable, "set logged",
		},
		"another cluster's messages": {
			"insert into {s}.watermill_outbox (uuid, transaction_id) values ('', '4611686018427387904')", nil, idempotency.ErrSchema, "Migrate",
		},
		"another cluster's offsets": {
			"insert into {s}.watermill_offsets_outbox values ('', 1, '4611686018427387904')", nil, idempotency.ErrSchema, "Migrate",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, "pgx")
			b.exec(t, test.statement)
			_, err := outbox.New(t.Context(), b.db, outbox.WithSchema(b.schema))
			requireIs(t, err, test.publisher, test.text)
			_, err = outbox.NewForwarder(t.Context(), b.db, &broker{}, outbox.WithSchema(b.schema))
			requireIs(t, err, test.forwarder, test.text)
		})
	}
}

func requireIs(t *testing.T, err, want error, text string) {
	t.Helper()
	require.ErrorIs(t, err, want)
	if want != nil {
		require.ErrorContains(t, err, text)
	}
}

// The role may use the table, but not the sequence of its key, which each insert needs.
func TestTrap26_MissingPrivilegesAreFoundWhenItOpens(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	role := b.schema + "_role"
	b.exec(t, "create role "+role)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, err := b.db.ExecContext(ctx, "drop owned by "+role+"; drop role "+role)
		require.NoError(t, err)
	})
	b.exec(t, "grant "+role+" to current_user")
	config := pgtest.Config(t, 2)
	config.ConnConfig.RuntimeParams["role"] = role
	db := stdlib.OpenDBFromPool(pgtest.Open(t, config))
	t.Cleanup(func() { require.NoError(t, db.Close()) })

	open := func() error {
		_, err := outbox.New(t.Context(), db, outbox.WithSchema(b.schema))
		return err
	}
	require.ErrorIs(t, open(), idempotency.ErrPrivilege)
	b.exec(t, "grant usage on schema {s} to "+role)
	require.ErrorIs(t, open(), idempotency.ErrPrivilege)
	b.exec(t, "grant insert on {s}.watermill_outbox to "+role)
	require.ErrorIs(t, open(), idempotency.ErrPrivilege)
	b.exec(t, "grant usage on sequence {s}.watermill_outbox_offset_seq to "+role)
	require.NoError(t, open())
}

func TestSessionSettingsAreChecked(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	for setting, want := range map[[2]string]error{
		{"synchronous_commit", "off"}:           idempotency.ErrNotDurable,
		{"default_transaction_read_only", "on"}: idempotency.ErrReadOnly,
	} {
		config := pgtest.Config(t, 2)
		config.ConnConfig.RuntimeParams[setting[0]] = setting[1]
		db := stdlib.OpenDBFromPool(pgtest.Open(t, config))
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		_, err := outbox.New(t.Context(), db, outbox.WithSchema(b.schema))
		require.ErrorIs(t, err, want)
	}
}

// Many instances start at once, on nothing.
func TestMigrateAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	schema := b.schema + "_new"
	t.Cleanup(func() {
		_, err := b.db.ExecContext(context.WithoutCancel(t.Context()), "drop schema "+schema+" cascade")
		require.NoError(t, err)
	})
	errs := make(chan error)
	for range 8 {
		go func() {
			errs <- outbox.Migrate(t.Context(), b.db, outbox.WithSchema(schema), outbox.WithTopic("a.b-C$:_"))
		}()
	}
	for range 8 {
		require.NoError(t, <-errs)
	}
	_, err := outbox.New(t.Context(), b.db, outbox.WithSchema(schema), outbox.WithTopic("a.b-C$:_"))
	require.NoError(t, err)
	_, err = outbox.New(t.Context(), b.db, outbox.WithSchema(schema))
	require.ErrorIs(t, err, idempotency.ErrSchema)
}

// After a dump and restore into a cluster that has given out fewer numbers, nothing new would be forwarded.
func TestMigrateHealsARestoredOutbox(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	want := b.store10(t)
	b.exec(t, `update {s}.watermill_outbox set transaction_id = '4611686018427387904'`)
	b.exec(t, `insert into {s}.watermill_offsets_outbox values ('', (select min("offset") + 3 from {s}.watermill_outbox), '4611686018427387904')`)

	require.NoError(t, outbox.Migrate(t.Context(), b.db, outbox.WithSchema(b.schema)))
	require.Equal(t, want[4:], uuids(b.forwarded(t)))
	require.Equal(t, b.store10(t), uuids(b.forwarded(t)))
}

func TestPurge(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	purge := func(limit int) int {
		n, err := outbox.Purge(t.Context(), b.db, limit, outbox.WithSchema(b.schema))
		require.NoError(t, err)
		return int(n)
	}
	b.store10(t)
	require.Zero(t, purge(100), "nothing was forwarded")
	b.forwarded(t)
	later := b.store10(t)
	require.Equal(t, 4, purge(4))
	require.Equal(t, 7, purge(100))
	require.Zero(t, purge(100))
	require.Equal(t, later, uuids(b.forwarded(t)))

	b.exec(t, "insert into {s}.watermill_offsets_outbox values ('another group', 0, '0')")
	require.Zero(t, purge(100), "the other group has not seen them")
}

func TestMistakesAreReportedTogether(t *testing.T) {
	t.Parallel()
	var none *sql.DB
	_, err := outbox.New(t.Context(), none)
	require.ErrorContains(t, err, "*sql.DB is nil")
	require.ErrorContains(t, outbox.Migrate(t.Context(), none), "*sql.DB is nil")
	_, err = outbox.Purge(t.Context(), none, 0)
	require.ErrorContains(t, err, "not positive")
	_, err = outbox.Purge(t.Context(), none, 1)
	require.ErrorContains(t, err, "*sql.DB is nil")
	_, err = outbox.New(t.Context(), none, nil)
	require.ErrorContains(t, err, "an option is nil")

	_, err = outbox.NewForwarder(t.Context(), none, nil,
		outbox.WithSchema(""), outbox.WithTopic("orders paid"), outbox.WithBatchSize(0), outbox.WithPollInterval(0),
		outbox.WithPublishTimeout(-time.Second), outbox.WithMiddleware(nil), outbox.WithLogger(nil))
	for _, text := range []string{
		"WithSchema: \"\"", "WithTopic: \"orders paid\"", "WithBatchSize: 0", "WithPollInterval: 0s", "WithPublishTimeout: -1s",
		"WithMiddleware", "WithLogger", "the publisher is nil",
	} {
		require.ErrorContains(t, err, text)
	}
}
