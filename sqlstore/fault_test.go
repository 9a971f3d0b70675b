package sqlstore_test

import (
	"bytes"
	"context"
	"database/sql"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
)

type fault int32

const (
	noFault     fault = iota
	loseRequest       // the statement does not arrive, the connection ends
	loseAnswer        // the statement is executed, the connection ends before the answer comes
	hang              // the statement does not arrive, and nothing ends
)

// line is a network in which something happens to the next statement that contains a text.
type line struct {
	statement string
	fault     atomic.Int32
	sent      atomic.Int32 // how often something was sent
}

func (l *line) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	return &lineConn{Conn: conn, line: l}, err
}

type lineConn struct {
	net.Conn
	line *line
	cut  atomic.Bool
}

func (c *lineConn) Write(b []byte) (int, error) {
	c.line.sent.Add(1)
	if !bytes.Contains(b, []byte(c.line.statement)) {
		return c.Conn.Write(b)
	}
	switch fault(c.line.fault.Swap(int32(noFault))) {
	case loseRequest:
		return len(b), c.Close()
	case loseAnswer:
		c.cut.Store(true)
	case hang:
		return len(b), nil
	case noFault:
	}
	return c.Conn.Write(b)
}

func (c *lineConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.cut.Load() {
		_ = c.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

func openOnLine(t *testing.T, statement string) (backend, *line) {
	t.Helper()
	config := parse(t, pgtest.URLVariable)
	l := &line{statement: statement}
	config.DialFunc = l.dial
	return open(t, config, 1), l // with one connection, a leak would block
}

func TestTrap03_LostCommitIsDecidedByTheRedelivery(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault     fault
		committed int
	}{
		"request lost": {loseRequest, 0},
		"answer lost":  {loseAnswer, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, l := openOnLine(t, "commit\x00")
			calls := 0
			handle := b.middleware(t, func(ctx context.Context, tx *sql.Tx) error {
				calls++
				return b.Write(ctx, tx, "label")
			})
			l.fault.Store(int32(test.fault))
			produced, err := handle(newMessage("1"))
			require.ErrorIs(t, err, idempotency.ErrCommitUnknown)
			require.NotErrorIs(t, err, idempotency.ErrRolledBack)
			require.True(t, idempotency.IsTransient(err))
			require.Empty(t, produced)
			require.Eventually(t, func() bool { // the session of the lost connection may still be at its COMMIT
				effects, err := b.Effects(t.Context())
				return err == nil && effects["label"] == test.committed
			}, 10*time.Second, 10*time.Millisecond)

			produced, err = handle(newMessage("1"))
			require.NoError(t, err)
			require.Len(t, produced, 1)
			require.Equal(t, "produced", produced[0].UUID)
			require.Equal(t, 2-test.committed, calls)
			b.requireCommitted(t, 1, 1, 1)
		})
	}
}

// Neither BEGIN nor COMMIT take the message's context, and still they end.
func TestTrap11_ServerThatHangsIsNotWaitedForForEver(t *testing.T) {
	t.Parallel()
	t.Run("begin", func(t *testing.T) {
		t.Parallel()
		b, l := openOnLine(t, "begin")
		l.fault.Store(int32(hang))
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, _, err := b.store.Claim(ctx, claimOf("1"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		b.requireCommitted(t, 0, 0, 0)
	})
	t.Run("claim", func(t *testing.T) {
		t.Parallel()
		b, l := openOnLine(t, "idempotency_claim")
		l.fault.Store(int32(hang))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		_, _, err := b.store.Claim(ctx, claimOf("1"))
		require.ErrorIs(t, err, context.Canceled)
		b.requireCommitted(t, 0, 0, 0)
	})
	for _, statement := range []string{"pg_current_xact_id_if_assigned", "commit\x00", "rollback"} {
		t.Run(statement, func(t *testing.T) {
			t.Parallel()
			b, l := openOnLine(t, statement)
			tx, _ := b.claim(t, claimOf("1"))
			l.fault.Store(int32(hang))
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if statement == "rollback" {
				require.Error(t, tx.Rollback(ctx))
			} else {
				require.ErrorIs(t, tx.Commit(ctx, nil), context.DeadlineExceeded)
			}
			b.requireCommitted(t, 0, 0, 0)
		})
	}
}

// Each time that something is sent is a round trip; the documentation tells how many.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	b, l := openOnLine(t, "commit\x00")
	process := func(c idempotency.Claim, produced ...*message.Message) int32 {
		before := l.sent.Load()
		tx, record, err := b.store.Claim(t.Context(), c)
		require.NoError(t, err)
		if record == nil {
			require.NoError(t, tx.Commit(t.Context(), produced))
		}
		return l.sent.Load() - before
	}
	bounded := claimOf("bounded 1")
	bounded.InFlight = idempotency.FailFast()
	process(claimOf("1"), newMessage("1")) // statements are prepared
	process(claimOf("1"))
	process(bounded)
	bounded.EventID = "bounded 2"

	require.EqualValues(t, 4, process(claimOf("2")), "BEGIN, claim, guard, COMMIT")
	require.EqualValues(t, 4, process(bounded), "BEGIN, claim, guard, COMMIT")
	require.EqualValues(t, 5, process(claimOf("3"), newMessage("1")), "BEGIN, claim, guard, produced, COMMIT")
	require.EqualValues(t, 4, process(claimOf("2")), "BEGIN, claim, record, ROLLBACK")
}
