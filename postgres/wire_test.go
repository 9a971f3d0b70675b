package postgres_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
)

// A new message costs the round trips of the plain transaction that its handler needs anyway, a duplicate two.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	w := &pgtest.Wire{}
	b := open(t, w.Config(t, 1))
	plain := func(name string) func() {
		return func() {
			require.NoError(t, pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error { return b.Write(t.Context(), tx, name) }))
		}
	}
	produced := 0
	handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
		out := make([]*message.Message, produced)
		for i := range out {
			out[i] = message.NewMessage("", nil)
		}
		return out, b.Write(ctx, tx, msg.UUID)
	}))
	deliver := func(eventID string) func() {
		return func() {
			_, err := handle(newMessage(eventID))
			require.NoError(t, err)
		}
	}
	bounded, err := idempotency.New(b.store, idempotency.WithSubscriberID("bounded"), idempotency.WithInFlight(idempotency.FailFast()))
	require.NoError(t, err)
	deliverBounded := func(eventID string) func() {
		return func() {
			_, err := bounded.Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
				return nil, b.Write(ctx, tx, msg.UUID)
			}))(newMessage(eventID))
			require.NoError(t, err)
		}
	}
	// The first of each prepares its statements on the connection.
	for _, warm := range []func(){plain("warm"), deliver("warm"), deliver("warm"), deliverBounded("warm"), func() { produced = 1; deliver("warm 2")(); deliver("warm 2")() }} {
		warm()
	}
	produced = 0
	require.Equal(t, 3, w.Count(plain("plain")), "BEGIN, the handler's statement, COMMIT")
	require.Equal(t, 3, w.Count(deliver("1")), "BEGIN and the claim, the handler's statement, COMMIT")
	require.Equal(t, 2, w.Count(deliver("1")), "a duplicate: BEGIN and the claim; the record and ROLLBACK")
	require.Equal(t, 3, w.Count(deliverBounded("1")), "a bounded wait costs none")
	produced = 3
	require.Equal(t, 3, w.Count(deliver("2")), "produced messages cost none, however many: they go along with the COMMIT")
	require.Equal(t, 2, w.Count(deliver("2")))
}

// A transaction ID is what a transaction that writes gets: a duplicate gets none, so it cannot have written WAL.
func TestDuplicateWritesNoWAL(t *testing.T) {
	t.Parallel()
	w := &pgtest.Wire{}
	b := open(t, w.Config(t, 1))
	tx, _ := b.claim(t, claimOf("1"))
	require.NoError(t, tx.Commit(t.Context(), []*message.Message{message.NewMessage("1", nil)}))

	// Another session may write to the server's WAL at any time, so the position is compared in the session's own
	// transactions: what it inserted, as the server counts it, is zero.
	var wal string
	lsn := func() (lsn string) {
		require.NoError(t, b.pool.QueryRow(t.Context(), "select pg_current_wal_lsn()::text").Scan(&lsn))
		return lsn
	}
	require.Eventually(t, func() bool { // until nobody else has written in between
		wal = lsn()
		for range 5 {
			_, record, err := claim(t, b.store, claimOf("1"))
			require.NoError(t, err)
			require.NotNil(t, record)
		}
		return lsn() == wal
	}, 30*time.Second, time.Millisecond, "every time, the WAL has grown over five duplicates")

	_, err := b.pool.Exec(t.Context(), "vacuum "+b.schema+".idempotency_claim")
	require.NoError(t, err)
	var dead int
	require.NoError(t, b.pool.QueryRow(t.Context(), "select count(*) from "+b.schema+".idempotency_claim where xmax <> 0").Scan(&dead))
	require.Zero(t, dead, "a duplicate locks no row")
}

// The answer to COMMIT is lost: the message is not acked, and the redelivery's claim tells.
func TestTrap03_LostCommitAnswer(t *testing.T) {
	t.Parallel()
	for _, applied := range []bool{true, false} {
		t.Run(fmt.Sprintf("applied=%v", applied), func(t *testing.T) {
			t.Parallel()
			w := &pgtest.Wire{}
			b := open(t, w.Config(t, 1))
			handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
				return []*message.Message{message.NewMessage("produced", nil)}, b.Write(ctx, tx, msg.UUID)
			}))
			w.CutCommit(applied)
			out, err := handle(newMessage("1"))
			require.ErrorIs(t, err, idempotency.ErrCommitUnknown)
			require.True(t, idempotency.IsTransient(err))
			require.Nil(t, out)
			effects, err := b.Effects(t.Context())
			require.NoError(t, err)
			require.Equal(t, applied, len(effects) == 1)

			out, err = handle(newMessage("1"))
			require.NoError(t, err)
			require.Len(t, out, 1)
			require.Equal(t, "produced", out[0].UUID)
			effects, err = b.Effects(t.Context())
			require.NoError(t, err)
			require.Equal(t, map[string]int{"1": 1}, effects)
		})
	}
}

// PgBouncer shares two server connections between many clients, transaction by transaction. The one of Debian 12 has no
// prepared statements there.
func TestTrap29_PgBouncerInTransactionMode(t *testing.T) {
	t.Parallel()
	direct := pgtest.Config(t, 1).ConnConfig
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		binary = "/usr/sbin/pgbouncer"
	}
	if _, err := os.Stat(binary); err != nil {
		t.Fatal("pgbouncer is missing: install the package pgbouncer, or skip this test by -skip TestTrap29")
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o777))
	for parent := filepath.Dir(dir); parent != os.TempDir() && parent != "/"; parent = filepath.Dir(parent) {
		require.NoError(t, os.Chmod(parent, 0o755))
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := listener.Addr().(*net.TCPAddr).Port
	require.NoError(t, listener.Close())
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	write("users.txt", fmt.Sprintf("%q %q\n", direct.User, direct.Password))
	write("pgbouncer.ini", fmt.Sprintf(`[databases]
* = host=%s port=%d
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = plain
auth_file = %s/users.txt
pool_mode = transaction
default_pool_size = 2
ignore_startup_parameters = extra_float_digits
`, direct.Host, direct.Port, port, dir))
	cmd := exec.Command(binary, "-q", filepath.Join(dir, "pgbouncer.ini"))
	if os.Geteuid() == 0 { // it refuses to run as root
		nobody, err := user.Lookup("nobody")
		require.NoError(t, err)
		uid, err := strconv.ParseUint(nobody.Uid, 10, 32)
		require.NoError(t, err)
		gid, err := strconv.ParseUint(nobody.Gid, 10, 32)
		require.NoError(t, err)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	}
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})

	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			config, err := pgxpool.ParseConfig(fmt.Sprintf("postgres://%s:%s@127.0.0.1:%d/%s?sslmode=disable", direct.User, direct.Password, port, direct.Database))
			require.NoError(t, err)
			config.MaxConns = 8
			config.ConnConfig.DefaultQueryExecMode = mode
			pool := pgtest.Open(t, config)
			require.Eventually(t, func() bool { return pool.Ping(t.Context()) == nil }, 10*time.Second, 20*time.Millisecond, "pgbouncer: %s", &log)
			b := open(t, config)
			handle := b.middleware(t).Middleware(idempotency.Handler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) ([]*message.Message, error) {
				return []*message.Message{message.NewMessage("produced", nil)}, b.Write(ctx, tx, msg.UUID)
			}))
			errs := make(chan error, 100)
			for i := range cap(errs) {
				go func() {
					_, err := handle(newMessage(fmt.Sprint(i % 25)))
					errs <- err
				}()
			}
			for range cap(errs) {
				require.NoError(t, <-errs)
			}
			effects, err := b.Effects(t.Context())
			require.NoError(t, err)
			require.Len(t, effects, 25)
			for eventID, n := range effects {
				require.Equal(t, 1, n, eventID)
			}
		})
	}
}
