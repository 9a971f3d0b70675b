package outbox_test

import (
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/outbox"
)

func (b *bundle) backlog(t *testing.T, db *sql.DB) outbox.Backlog {
	t.Helper()
	backlog, err := outbox.ReadBacklog(t.Context(), db, outbox.WithSchema(b.schema))
	require.NoError(t, err)
	return backlog
}

// The forwarder stands still at the fifth message.
func TestBacklogOfAForwarderThatStandsStill(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	require.Zero(t, b.backlog(t, b.db))
	want := b.store10(t)
	require.EqualValues(t, 10, b.backlog(t, b.db).Messages)

	to := broker{publish: func(r received) error {
		if r.uuid == want[4] {
			return errors.New("negative publisher confirm")
		}
		return nil
	}}
	stop := b.forward(t, &to, outbox.WithPublishTimeout(100*time.Millisecond))
	require.Eventually(t, func() bool { return b.backlog(t, b.db).Messages == 6 }, patience, millisecond)
	stop()
	b.exec(t, "update {s}.watermill_outbox set created_at = created_at - interval '1 hour' where uuid in (select uuid from {s}.watermill_outbox order by \"offset\" limit 4)")
	require.Less(t, b.backlog(t, b.db).Age, time.Minute, "what is forwarded has no age")
	b.exec(t, "update {s}.watermill_outbox set created_at = created_at - interval '1 hour'")
	backlog := b.backlog(t, b.db)
	require.EqualValues(t, 6, backlog.Messages)
	require.InDelta(t, time.Hour, backlog.Age, float64(time.Minute))

	b.forwarded(t)
	require.Zero(t, b.backlog(t, b.db), "all that is in the table is forwarded")

	// Before any forwarder has run, and with one that has not begun.
	b.exec(t, "delete from {s}.watermill_offsets_outbox")
	require.EqualValues(t, 11, b.backlog(t, b.db).Messages)
	b.exec(t, "insert into {s}.watermill_offsets_outbox values ('another group', 0, '0')")
	require.EqualValues(t, 11, b.backlog(t, b.db).Messages)
}

// Publishers and the one who measures have sessions in different time zones.
func TestBacklogKnowsNoTimeZones(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	var sessions []*sql.DB
	for _, zone := range []string{"Pacific/Kiritimati", "UTC", "Pacific/Niue"} {
		config := pgtest.Config(t, 1).ConnConfig
		config.RuntimeParams["timezone"] = zone
		db := stdlib.OpenDB(*config)
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		sessions = append(sessions, db)
	}
	for _, there := range sessions {
		b.exec(t, "truncate {s}.watermill_outbox")
		pub, err := outbox.New(t.Context(), there, outbox.WithSchema(b.schema), outbox.WithOwnTransaction())
		require.NoError(t, err)
		require.NoError(t, pub.Publish("labels", newMessage(t.Context(), "first")))
		for _, here := range sessions {
			age := b.backlog(t, here).Age
			require.Positive(t, age)
			require.Less(t, age, time.Minute)
		}
	}
}

// A large outbox that nobody has purged costs nothing.
func TestBacklogReadsOnlyWhatWaits(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	b.exec(t, `insert into {s}.watermill_outbox (uuid, transaction_id) select '', '1' from generate_series(1, 20000)`)
	b.exec(t, "insert into {s}.watermill_offsets_outbox values ('', 20000, '1')")
	b.store10(t)
	b.exec(t, "analyze {s}.watermill_outbox")
	scans := func() (rows, index int) {
		require.NoError(t, b.db.QueryRowContext(t.Context(), "select seq_tup_read, idx_scan from pg_stat_user_tables where relid = $1::regclass", b.table).
			Scan(&rows, &index))
		return rows, index
	}
	_, index := scans()

	db := stdlib.OpenDB(*pgtest.Config(t, 1).ConnConfig)
	require.EqualValues(t, 10, b.backlog(t, db).Messages)
	require.NoError(t, db.Close()) // a session reports at its end
	require.Eventually(t, func() bool {
		_, now := scans()
		return now > index
	}, patience, 10*millisecond, "the index was not used")
	rows, _ := scans()
	require.Less(t, rows, 20000, "the table was read")
}
