package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/watermill-idempotency/idempotency"
)

// checkSQLite looks at two connections, if the pool may have two: a PRAGMA that was executed once is in force on one
// connection only, and so is an in-memory database.
func checkSQLite(ctx context.Context, db *sql.DB, c *config) error {
	n := 2
	if db.Stats().MaxOpenConnections == 1 {
		n = 1
	}
	names := sqliteNames(c)
	for i := range n {
		conn, err := acquire(ctx, db, c.acquireTimeout)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		inMemory, err := checkConn(ctx, conn)
		if err != nil {
			return err
		}
		err = errors.Join(
			checkSQLiteTable(ctx, conn, names.claim, "subscriber_id,event_id", "claimed_at", "topic", "fingerprint"),
			checkSQLiteTable(ctx, conn, names.produced, "subscriber_id,event_id,position", "uuid", "metadata", "payload"))
		if i > 0 && inMemory && errors.Is(err, idempotency.ErrSchema) {
			return fmt.Errorf("%w: each connection has an in-memory database of its own: call db.SetMaxOpenConns(1), or use a file", ErrSettings)
		}
		if err != nil {
			return err
		}
		if err := checkWritable(ctx, conn, names.produced); err != nil {
			return err
		}
	}
	return nil
}

// checkConn checks the settings of a connection, which its DSN has made.
func checkConn(ctx context.Context, conn *sql.Conn) (inMemory bool, err error) {
	var version, file, journalMode string
	var synchronous, busyTimeout, queryOnly int
	for _, query := range []struct {
		text string
		to   any
	}{
		{"select sqlite_version()", &version},
		{"select file from pragma_database_list where name = 'main'", &file},
		{"pragma main.journal_mode", &journalMode},
		{"pragma main.synchronous", &synchronous},
		{"pragma busy_timeout", &busyTimeout},
		{"pragma query_only", &queryOnly},
	} {
		if err := conn.QueryRowContext(ctx, query.text).Scan(query.to); err != nil {
			return false, fmt.Errorf("%s: %w", query.text, err)
		}
	}
	inMemory = file == ""
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil || major < 3 || major == 3 && minor < 35 {
		return false, fmt.Errorf("%w: SQLite %s: 3.35 or newer is needed", ErrSettings, version)
	}
	switch {
	case queryOnly != 0:
		return false, fmt.Errorf("%w: the connection says query_only: take it out of the DSN", idempotency.ErrReadOnly)
	case !inMemory && !strings.EqualFold(journalMode, "wal"):
		return false, fmt.Errorf("%w: journal_mode is %s, so that readers and the writer block each other: set it to WAL in the DSN (modernc.org/sqlite: _pragma=journal_mode(WAL); mattn/go-sqlite3: _journal_mode=WAL)", ErrSettings, journalMode)
	case !inMemory && synchronous < 2:
		return false, fmt.Errorf("%w: synchronous is %d, so that a power failure loses commits whose messages are acked: set it to FULL in the DSN (modernc.org/sqlite: _pragma=synchronous(FULL); mattn/go-sqlite3: _synchronous=FULL)", idempotency.ErrNotDurable, synchronous)
	case busyTimeout <= 0:
		return false, fmt.Errorf("%w: busy_timeout is 0, so that statements fail while a message is processed: set it in the DSN, for every connection (modernc.org/sqlite: _pragma=busy_timeout(5000); mattn/go-sqlite3: _busy_timeout=5000)", ErrSettings)
	}
	return inMemory, nil
}

func checkSQLiteTable(ctx context.Context, conn *sql.Conn, table, key string, others ...string) error {
	var columns, primaryKey, unfit sql.NullString
	err := conn.QueryRowContext(ctx, `select
		(select group_concat(name) from pragma_table_info(?1, 'main')),
		(select group_concat(name) from (select name from pragma_table_info(?1, 'main') where pk > 0 order by pk)),
		(select group_concat(x.name) from pragma_index_list(?1, 'main') l, pragma_index_xinfo(l.name, 'main') x, pragma_table_info(?1, 'main') c
			where l.origin = 'pk' and x.key and c.name = x.name and x.name in ('subscriber_id', 'event_id')
			and (upper(x.coll) <> 'BINARY' or upper(c.type) <> 'TEXT'))`, table).Scan(&columns, &primaryKey, &unfit)
	switch {
	case err != nil:
		return err
	case !columns.Valid:
		return fmt.Errorf("%w: %s does not exist: call Migrate with the same options, or run its statements", idempotency.ErrSchema, table)
	case primaryKey.String != key:
		return fmt.Errorf("%w: the primary key of %s is (%s), not (%s): without it duplicates are processed", idempotency.ErrSchema, table, primaryKey.String, key)
	case unfit.Valid:
		return fmt.Errorf("%w: %s of %s must be text collate binary: others take different IDs for the same", idempotency.ErrSchema, unfit.String, table)
	}
	present := strings.Split(columns.String, ",")
	for _, column := range others {
		if !slices.Contains(present, column) {
			return fmt.Errorf("%w: %s has no column %q: call Migrate of this version", idempotency.ErrSchema, table, column)
		}
	}
	return nil
}

// checkWritable takes the write lock, for nothing. If it is taken, somebody can write.
func checkWritable(ctx context.Context, conn *sql.Conn, table string) error {
	_, err := conn.ExecContext(ctx, "delete from "+mainTable(table)+" where false") //nolint:gosec // the name is quoted
	switch {
	case primaryCode(err) == codeReadOnly:
		return fmt.Errorf("%w: the file or its folder is not writable, or the DSN says so: %w", idempotency.ErrReadOnly, err)
	case isBusy(err):
		return nil
	}
	return err
}
