package sqlstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/retention"
)

//go:embed migrations/sqlite/*.sql
var sqliteMigrations embed.FS

// SQLite is the dialect of SQLite 3.35 and newer. It is tested with the driver modernc.org/sqlite, and has passed the same
// suite with mattn/go-sqlite3 1.14.53 and ncruces/go-sqlite3 0.37.0. Others will do if their errors tell SQLite's result
// code, as a method Code() int, or as a field or method ExtendedCode.
func SQLite() Dialect { return sqlite{} }

type sqlite struct{}

// String implements [fmt.Stringer].
func (sqlite) String() string { return "SQLite" }

// The savepoint ends with the transaction, so one that is there at commit says that the transaction is still the one that
// holds the claim.
const (
	setSavepoint     = "savepoint idempotency_claim"
	releaseSavepoint = "release idempotency_claim"
)

func (sqlite) validate(c *config) []error {
	var errs []error
	if c.schema != nil {
		errs = append(errs, errors.New("WithSchema: SQLite has no schemas: use WithTablePrefix, or another file"))
	}
	if strings.IndexByte(c.prefix, 0) >= 0 || !utf8.ValidString(c.prefix) {
		errs = append(errs, fmt.Errorf("WithTablePrefix: %q is not UTF-8 without NUL", c.prefix))
	}
	if strings.HasPrefix(strings.ToLower(c.prefix), "sqlite_") {
		errs = append(errs, fmt.Errorf("WithTablePrefix: %q: SQLite keeps names that begin with sqlite_ for itself", c.prefix))
	}
	if c.isolation != sql.LevelDefault && c.isolation != sql.LevelSerializable {
		errs = append(errs, fmt.Errorf("WithIsolation: SQLite has no level %q: it is always serializable", c.isolation))
	}
	c.isolation = sql.LevelDefault // which is that level, and which every driver takes
	return errs
}

// sqliteTables are the names of the tables. Statements qualify them: a temporary table of the same name would go before.
type sqliteTables struct{ claim, produced string }

func sqliteNames(c *config) sqliteTables {
	return sqliteTables{claim: c.prefix + "claim", produced: c.prefix + "produced_message"}
}

func mainTable(name string) string { return `main."` + strings.ReplaceAll(name, `"`, `""`) + `"` }

func (d sqlite) open(ctx context.Context, db *sql.DB, c *config) (statements, error) {
	if err := checkSQLite(ctx, db, c); err != nil {
		return statements{}, err
	}
	names := sqliteNames(c)
	claim, produced := mainTable(names.claim), mainTable(names.produced)
	placeholder := func(n int) string { return "?" + strconv.Itoa(n) }
	return statements{
		claim: "insert into " + claim + " (subscriber_id, event_id, topic, fingerprint) values (?1, ?2, ?3, ?4)" +
			" on conflict do nothing returning claimed_at",
		record: "select c.claimed_at, c.topic, c.fingerprint, p.uuid, p.metadata, p.payload from " + claim + " c" +
			" left join " + produced + " p on p.subscriber_id = c.subscriber_id and p.event_id = c.event_id" +
			" where c.subscriber_id = ?1 and c.event_id = ?2 order by p.position",
		// A claim of another delivery, after a ROLLBACK of the handler, has a later time.
		held: "select exists (select 1 from " + claim + " where subscriber_id = ?1 and event_id = ?2 and claimed_at = ?3)",
		produce: bulk{
			head:    "insert into " + produced + " (subscriber_id, event_id, position, uuid, metadata, payload) values ",
			columns: 6, placeholder: placeholder,
		},
		acked: bulk{
			head: "delete from " + produced + " where (subscriber_id, event_id) in (values ",
			tail: ")", columns: 2, placeholder: placeholder,
		},
		Statements: retention.SQLite(claim, produced),
	}, nil
}

func (sqlite) migrate(ctx context.Context, conn *sql.Conn, c *config) error {
	names := sqliteNames(c)
	replace := strings.NewReplacer("{claim}", mainTable(names.claim), "{produced_message}", mainTable(names.produced),
		// An index is qualified where its table must not be.
		"{claim_claimed_at}", mainTable(names.claim+"_claimed_at"), "{claim_name}", strings.TrimPrefix(mainTable(names.claim), "main."))
	files, err := sqliteMigrations.ReadDir("migrations/sqlite")
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := sqliteMigrations.ReadFile("migrations/sqlite/" + file.Name())
		if err != nil {
			return err
		}
		err = whileBusy(ctx, func() error {
			_, err := conn.ExecContext(ctx, replace.Replace(string(text)))
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", file.Name(), err)
		}
	}
	return nil
}

// claim waits for the database's write lock, whoever holds it. The insert is the first statement of its transaction, so it
// takes the lock, or fails, before it has read anything: a transaction that reads first cannot wait for the lock any more
// (SQLITE_BUSY_SNAPSHOT).
//
// It waits here and not in SQLite, whose busy timeout knows no context.
func (d sqlite) claim(ctx context.Context, t *tx, c idempotency.Claim) (claimed bool, err error) {
	waiting := ctx
	limit, bounded := c.InFlight.Limit()
	if bounded {
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeout(ctx, max(limit, failFast))
		defer cancel()
	}
	restore, err := withoutBusyTimeout(ctx, t.conn)
	if err != nil {
		return false, err
	}
	err = whileBusy(waiting, func() error {
		if err := t.rollback(ctx); err != nil {
			return err
		}
		claimed, err = d.insert(waiting, t, c)
		return err
	})
	if err != nil && waiting.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w after %v: the database's write lock is taken: %w", idempotency.ErrInFlight, limit, err)
	}
	if restoreErr := restore(); err == nil {
		err = restoreErr
	}
	return claimed, err
}

func (sqlite) insert(ctx context.Context, t *tx, c idempotency.Claim) (claimed bool, err error) {
	if err := t.begin(ctx); err != nil {
		return false, err
	}
	err = t.tx.QueryRowContext(ctx, t.store.sql.claim, c.SubscriberID, c.EventID, c.Topic, nullable(c.Fingerprint)).Scan(&t.mark)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	if err == nil {
		_, err = t.tx.ExecContext(ctx, setSavepoint)
	}
	return err == nil, err
}

// withoutBusyTimeout lets statements on the connection fail at once if the database is locked, until restore.
func withoutBusyTimeout(ctx context.Context, conn *sql.Conn) (restore func() error, err error) {
	var timeout int
	if err := conn.QueryRowContext(ctx, "pragma busy_timeout").Scan(&timeout); err != nil {
		return nil, err
	}
	set := func(ctx context.Context, timeout int) error {
		_, err := conn.ExecContext(ctx, "pragma busy_timeout = "+strconv.Itoa(timeout))
		return err
	}
	return func() error { return set(context.WithoutCancel(ctx), timeout) }, set(ctx, 0)
}

// whileBusy calls try until the database is not busy or ctx ends.
func whileBusy(ctx context.Context, try func() error) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 16*time.Millisecond) {
		err := try()
		if !isBusy(err) || ctx.Err() != nil {
			return err
		}
		timer := time.NewTimer(wait/2 + rand.N(wait)) //nolint:gosec // jitter
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return because(ctx, err)
		}
	}
}

func (sqlite) guard(ctx context.Context, t *tx) error {
	_, err := t.tx.ExecContext(ctx, releaseSavepoint)
	if primaryCode(err) == codeError {
		return fmt.Errorf("%w: %w", errUnmarked, err)
	}
	return err
}

// uncommitted is true if the transaction was still open after the COMMIT, or must have been: a deferred constraint that
// fails leaves it so.
func (sqlite) uncommitted(ctx context.Context, t *tx, err error) bool {
	_, rollbackErr := t.conn.ExecContext(context.WithoutCancel(ctx), "rollback")
	code := primaryCode(err)
	return rollbackErr == nil || code == codeBusy || code == codeLocked || code == codeConstraint
}

// Primary result codes of SQLite; the extended ones have more in the upper bits.
const (
	codeError      = 1
	codeBusy       = 5
	codeLocked     = 6
	codeReadOnly   = 8
	codeIOErr      = 10
	codeFull       = 13
	codeCantOpen   = 14
	codeConstraint = 19

	codeBusySnapshot = codeBusy | 2<<8
)

func (sqlite) classify(err error) (fault idempotency.Fault, known bool) {
	code := resultCode(err)
	if code == codeBusySnapshot {
		return idempotency.FaultConflict, true
	}
	switch code & 0xff {
	case codeBusy, codeLocked, codeReadOnly, codeIOErr, codeFull, codeCantOpen:
		return idempotency.FaultUnavailable, true
	}
	return idempotency.FaultOther, code != 0
}

func isBusy(err error) bool {
	code := primaryCode(err)
	return code == codeBusy || code == codeLocked
}

func primaryCode(err error) int { return resultCode(err) & 0xff }

// resultCode returns SQLite's code, extended if the driver has it, or 0.
func resultCode(err error) int {
	if err == nil {
		return 0
	}
	if coded, ok := err.(interface{ Code() int }); ok {
		return coded.Code()
	}
	if code, ok := extendedCode(reflect.ValueOf(err)); ok {
		return code
	}
	switch wrapper := err.(type) { //nolint:errorlint // errors.As cannot look for a field, so this looks through wrapping itself
	case interface{ Unwrap() error }:
		return resultCode(wrapper.Unwrap())
	case interface{ Unwrap() []error }:
		for _, wrapped := range wrapper.Unwrap() {
			if code := resultCode(wrapped); code != 0 {
				return code
			}
		}
	}
	return 0
}

// extendedCode reads an integer of that name, without knowing the driver.
func extendedCode(err reflect.Value) (int, bool) {
	var value reflect.Value
	method := err.MethodByName("ExtendedCode")
	switch {
	case method.IsValid() && method.Type().NumIn() == 0 && method.Type().NumOut() == 1:
		value = method.Call(nil)[0]
	case err.Kind() == reflect.Uint16 && err.MethodByName("Code").IsValid():
		value = err // ncruces/go-sqlite3 has errors that are nothing but a code
	case reflect.Indirect(err).Kind() == reflect.Struct:
		value = reflect.Indirect(err).FieldByName("ExtendedCode")
	}
	switch {
	case !value.IsValid():
		return 0, false
	case value.CanInt():
		return int(value.Int()), true
	case value.CanUint():
		return int(value.Uint()), true //nolint:gosec // a code has 32 bits at most
	}
	return 0, false
}
