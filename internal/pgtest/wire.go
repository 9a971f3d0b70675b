package pgtest

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Wire is the network between a pool and its server: it counts round trips, and loses the answer to a COMMIT.
type Wire struct {
	trips atomic.Int64
	cut   atomic.Pointer[bool]

	commit atomic.Pointer[string] // the name of a prepared COMMIT
}

// Config returns a pool configuration for the main server whose connections go over the wire.
func (w *Wire) Config(tb testing.TB, n int32) *pgxpool.Config {
	tb.Helper()
	config := Config(tb, n)
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return &wireConn{Conn: conn, wire: w}, err
	}
	return config
}

// Count returns the number of round trips that fn takes: a write that follows a read begins one.
func (w *Wire) Count(fn func()) int {
	before := w.trips.Load()
	fn()
	return int(w.trips.Load() - before)
}

// CutCommit breaks the connection at the next COMMIT: when the server has answered it, or in the middle of the request.
func (w *Wire) CutCommit(applied bool) { w.cut.Store(&applied) }

type wireConn struct {
	net.Conn
	wire *Wire
	sent atomic.Bool // and nothing read since; pgx reads in the background while a write is slow
}

func (c *wireConn) Write(data []byte) (int, error) {
	if c.wire.commits(data) {
		if applied := c.wire.cut.Swap(nil); applied != nil {
			return c.lose(data, *applied)
		}
	}
	if !c.sent.Swap(true) {
		c.wire.trips.Add(1)
	}
	return c.Conn.Write(data)
}

// commits tells whether data executes the COMMIT that was prepared before.
func (w *Wire) commits(data []byte) bool {
	if before, _, prepares := bytes.Cut(data, []byte("\x00commit;\x00")); prepares {
		name := string(before[bytes.LastIndexByte(before, 0)+2:]) // what precedes it is the last byte of the message's length
		w.commit.Store(&name)
		return false
	}
	name := w.commit.Load()
	return name != nil && bytes.Contains(data, []byte(*name))
}

// lose says that it has sent everything, as a network does.
func (c *wireConn) lose(data []byte, applied bool) (int, error) {
	defer func() { _ = c.Close() }()
	if !applied {
		_, err := c.Conn.Write(data[:len(data)/2])
		return len(data), err
	}
	if _, err := c.Conn.Write(data); err != nil {
		return 0, err
	}
	_, err := c.Conn.Read(make([]byte, 1024)) // the server has committed once it answers
	return len(data), err
}

func (c *wireConn) Read(data []byte) (int, error) {
	n, err := c.Conn.Read(data)
	if n > 0 {
		c.sent.Store(false)
	}
	return n, err
}
