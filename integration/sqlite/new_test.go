package sqlite_test

import (
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/sqlstore"
)

func TestTrap28_NewFindsWhatWouldLoseMessages(t *testing.T) {
	t.Parallel()
	const claimColumns = "claimed_at text default current_timestamp, topic text, fingerprint blob"
	for name, test := range map[string]struct {
		change string
		dsn    string // instead of the settings
		want   error
		says   string
	}{
		"no table":          {change: "drop table idempotency_claim", want: idempotency.ErrSchema, says: "call Migrate"},
		"no produced table": {change: "drop table idempotency_produced_message", want: idempotency.ErrSchema, says: "call Migrate"},
		"no primary key":    {change: "drop table idempotency_claim; create table idempotency_claim (subscriber_id text, event_id text, " + claimColumns + ")", want: idempotency.ErrSchema, says: "primary key"},
		"other primary key": {change: "drop table idempotency_claim; create table idempotency_claim (subscriber_id text, event_id text, " + claimColumns + ", primary key (event_id, subscriber_id))", want: idempotency.ErrSchema, says: "primary key"},
		"other collation":   {change: "drop table idempotency_claim; create table idempotency_claim (subscriber_id text, event_id text collate nocase, " + claimColumns + ", primary key (subscriber_id, event_id))", want: idempotency.ErrSchema, says: "event_id of idempotency_claim must be text"},
		"other affinity":    {change: "drop table idempotency_claim; create table idempotency_claim (subscriber_id text, event_id numeric, " + claimColumns + ", primary key (subscriber_id, event_id))", want: idempotency.ErrSchema, says: "event_id of idempotency_claim must be text"},
		"column missing":    {change: "alter table idempotency_claim drop column fingerprint", want: idempotency.ErrSchema, says: `no column "fingerprint"`},
		"journal":           {change: "pragma journal_mode = delete", dsn: "_pragma=busy_timeout(1)", want: sqlstore.ErrSettings, says: "journal_mode is delete"},
		"synchronous":       {dsn: settings + "&_pragma=synchronous(NORMAL)", want: idempotency.ErrNotDurable, says: "synchronous is 1"},
		"no busy timeout":   {dsn: "_pragma=journal_mode(WAL)", want: sqlstore.ErrSettings, says: "busy_timeout is 0"},
		"query_only":        {dsn: settings + "&_pragma=query_only(1)", want: idempotency.ErrReadOnly, says: "query_only"},
		"mode=ro":           {dsn: "_pragma=busy_timeout(1)&mode=ro", want: idempotency.ErrReadOnly, says: "not writable"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t, newFile(t)+"?"+settings, 1)
			if test.change != "" {
				b.exec(t, test.change)
			}
			if test.dsn == "" {
				test.dsn = settings
			}
			_, err := sqlstore.New(t.Context(), openDB(t, "file:"+fileOf(t, b.db)+"?"+test.dsn, 2), sqlstore.SQLite())
			require.ErrorIs(t, err, test.want)
			require.ErrorContains(t, err, test.says)
		})
	}
	t.Run("setting of one connection", func(t *testing.T) {
		t.Parallel()
		b := open(t, newFile(t)+"?"+settings, 1)
		db := openDB(t, "file:"+fileOf(t, b.db), 2)
		_, err := db.ExecContext(t.Context(), "pragma busy_timeout = 5000")
		require.NoError(t, err)
		_, err = sqlstore.New(t.Context(), db, sqlstore.SQLite())
		require.ErrorIs(t, err, sqlstore.ErrSettings)
		require.ErrorContains(t, err, "for every connection")
	})
}

// A database in memory is for tests: of one connection, or shared by the connections of the process.
func TestInMemory(t *testing.T) {
	t.Parallel()
	const own = "file::memory:?_pragma=busy_timeout(1000)"
	b := open(t, own, 1)
	tx, _ := b.claim(t, claimOf("1"))
	require.NoError(t, tx.Commit(t.Context(), nil))
	_, record, err := b.store.Claim(t.Context(), claimOf("1"))
	require.NoError(t, err)
	require.NotNil(t, record)

	db := openDB(t, own, 2)
	require.NoError(t, sqlstore.Migrate(t.Context(), db, sqlstore.SQLite()))
	_, err = sqlstore.New(t.Context(), db, sqlstore.SQLite())
	require.ErrorIs(t, err, sqlstore.ErrSettings)
	require.ErrorContains(t, err, "call db.SetMaxOpenConns(1)")

	open(t, sharedMemory(), 2)
}

func TestTrap33_NamesAreQuoted(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", `Upper Case `, `quo"te`, `'; drop table x; --`, `select`, `ünïcödé`} {
		t.Run("prefix "+name, func(t *testing.T) {
			t.Parallel()
			b := open(t, newFile(t)+"?"+settings, 1, sqlstore.WithTablePrefix(name))
			tx, _ := b.claim(t, claimOf("1"))
			require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))
			_, record, err := b.store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.Len(t, record.Produced, 1)
			require.NoError(t, b.store.Acked(t.Context(), []idempotency.Key{claimOf("1").Key}))
		})
	}
}

// Many processes start with a file that does not exist yet.
func TestMigrateByManyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	dsn := newFile(t) + "?" + settings
	errs := make(chan error, 8)
	for range cap(errs) {
		db := openDB(t, dsn, 1)
		go func() {
			err := sqlstore.Migrate(t.Context(), db, sqlstore.SQLite())
			if err == nil {
				_, err = sqlstore.New(t.Context(), db, sqlstore.SQLite())
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
}

// fieldError has the shape of mattn/go-sqlite3's, and methodError that of ncruces/go-sqlite3's.
type (
	fieldError  struct{ Code, ExtendedCode int }
	methodError struct{ code uint16 }
)

func (fieldError) Error() string            { return "of a field" }
func (*methodError) Error() string          { return "of a method" }
func (e *methodError) ExtendedCode() uint16 { return e.code }
func (*methodError) Temporary() bool        { return false } // which makes it a net.Error
func (*methodError) Timeout() bool          { return false }

func TestClassifyByCode(t *testing.T) {
	t.Parallel()
	b := open(t, newFile(t)+"?"+settings, 1)
	_, err := b.db.ExecContext(t.Context(), "insert into effect values (null)")
	require.Error(t, err)
	require.Equal(t, idempotency.FaultOther, b.store.Classify(err))
	for code, want := range map[uint16]idempotency.Fault{
		517: idempotency.FaultConflict, 5: idempotency.FaultUnavailable, 261: idempotency.FaultUnavailable, 6: idempotency.FaultUnavailable,
		262: idempotency.FaultUnavailable, 8: idempotency.FaultUnavailable, 778: idempotency.FaultUnavailable, 13: idempotency.FaultUnavailable,
		14: idempotency.FaultUnavailable, 1: idempotency.FaultOther, 19: idempotency.FaultOther, 2067: idempotency.FaultOther,
	} {
		for _, err := range []error{fieldError{int(code & 0xff), int(code)}, &fieldError{ExtendedCode: int(code)}, &methodError{code}} {
			require.Equal(t, want, b.store.Classify(fmt.Errorf("%w: handler: %w", sql.ErrNoRows, err)), "%v: %d", err, code)
		}
	}
	missing := openDB(t, "file:"+filepath.Join(t.TempDir(), "no", "folder.db"), 1)
	require.Equal(t, idempotency.FaultUnavailable, b.store.Classify(missing.PingContext(t.Context())))

	garbage := filepath.Join(t.TempDir(), "garbage.db")
	require.NoError(t, os.WriteFile(garbage, []byte("this is no database, and long enough to be seen as such"), 0o600))
	_, err = openDB(t, "file:"+garbage, 1).ExecContext(t.Context(), "create table x (y)")
	require.Error(t, err)
	require.Equal(t, idempotency.FaultOther, b.store.Classify(err), "%v", err)
}
