package sqlstore

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/retention"
)

// Dialect is a database engine: [PostgreSQL] or [SQLite]. It is sealed, and safe for concurrent use.
type Dialect interface {
	// String returns the name of the engine.
	fmt.Stringer

	// validate reports what in the options does not fit the engine.
	validate(c *config) []error
	// open resolves the names of the tables and checks what would lose or double messages later.
	open(ctx context.Context, db *sql.DB, c *config) (statements, error)
	// migrate creates what is missing.
	migrate(ctx context.Context, conn *sql.Conn, c *config) error
	// claim begins t and inserts the claim, and leaves a mark in the transaction. It returns false for a duplicate; t
	// is begun then, too. After an error the caller rolls back.
	claim(ctx context.Context, t *tx, c idempotency.Claim) (claimed bool, err error)
	// guard looks for the mark: errUnmarked if it is gone, errAborted if the transaction can only be rolled back.
	guard(ctx context.Context, t *tx) error
	// uncommitted tells whether nothing is committed for sure, after COMMIT has returned err.
	uncommitted(ctx context.Context, t *tx, err error) bool
	// classify tells what the engine's code in an error means, and whether there is one.
	classify(err error) (fault idempotency.Fault, known bool)

	// write runs do in a transaction, again if the database is busy.
	write(ctx context.Context, db *sql.DB, c *config, do func(tx *sql.Tx) error) error
	// purge removes claims in tx, see [retention.Engine].
	purge(ctx context.Context, tx *sql.Tx, s *retention.Statements, from, before time.Time, limit int) (removed int64, last time.Time, err error)
	// time is a time as claimed_at is compared with.
	time(t time.Time) any
}

// statements are the texts for one pair of tables. They take subscriber ID and event ID first.
type statements struct {
	claim   string // and topic, fingerprint: one row if it is new
	bounded string // the same for a bounded claim, if that is another one
	record  string // one row for each produced message, one with nulls if there is none, none if there is no claim
	held    string // and the mark: whether the transaction that left it has committed the claim
	produce bulk   // and position, uuid, metadata, payload
	acked   bulk
	retention.Statements
}

// bulk is a statement over rows of values, whose number varies.
type bulk struct {
	head, tail  string
	columns     int
	placeholder func(n int) string
}

func (b bulk) text(rows int) string {
	var s strings.Builder
	s.WriteString(b.head)
	for n := range rows * b.columns {
		switch {
		case n == 0:
			s.WriteString("(")
		case n%b.columns == 0:
			s.WriteString("), (")
		default:
			s.WriteString(", ")
		}
		s.WriteString(b.placeholder(n + 1))
	}
	s.WriteString(")")
	s.WriteString(b.tail)
	return s.String()
}
