package outbox_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/outbox"
)

// store10 puts messages "0", "1" ... into the outbox, and returns their UUIDs.
func (b *bundle) store10(t *testing.T) []string {
	t.Helper()
	var uuids []string
	msgs := many(10)
	for i, msg := range msgs {
		msg.UUID = watermill.NewUUID()
		msg.Payload = []byte(strconv.Itoa(i))
		uuids = append(uuids, msg.UUID)
	}
	require.NoError(t, b.publisher(t, outbox.WithOwnTransaction()).Publish("labels", msgs...))
	return uuids
}

func uuids(messages []received) []string {
	var uuids []string
	for _, r := range messages {
		uuids = append(uuids, r.uuid)
	}
	return uuids
}

// polls counts a forwarder's looks at the outbox.
type polls struct {
	watermill.NopLogger
	n atomic.Int64
}

func (p *polls) Trace(msg string, _ watermill.LogFields) {
	if msg == "Querying message" {
		p.n.Add(1)
	}
}

func (p *polls) With(watermill.LogFields) watermill.LoggerAdapter { return p }

// wait waits until the forwarder has looked with all that is committed now in sight.
func (p *polls) wait(t *testing.T) {
	t.Helper()
	n := p.n.Load()
	require.Eventually(t, func() bool { return p.n.Load() >= n+3 }, patience, millisecond)
}

// The transaction that began first commits last: a forwarder that went by the numbers of rows alone would have passed it.
func TestTrap26_ReversedCommitsAreBothForwarded(t *testing.T) {
	t.Parallel()
	forEachStore(t, func(t *testing.T, b *bundle) {
		t.Helper()
		var looks polls
		var to broker
		stop := b.forward(t, &to, outbox.WithLogger(&looks))
		require.NoError(t, b.handle(t, "1", func(ctx context.Context) error {
			if err := b.pub.Publish("labels", newMessage(ctx, "began first")); err != nil {
				return err
			}
			//nolint:contextcheck // it is another message
			if err := b.handle(t, "2", func(ctx context.Context) error {
				return b.pub.Publish("labels", newMessage(ctx, "committed first"))
			}); err != nil {
				return err
			}
			looks.wait(t)
			return nil
		}))
		require.Eventually(t, func() bool { return len(to.all()) >= 2 }, patience, millisecond)
		stop()
		require.Equal(t, []string{"labels: began first", "labels: committed first"}, texts(to.all()))
	})
}

// A transaction that has written anything holds up all forwarding. The figures are in the package's documentation.
func TestTrap26_LongTransactionDelaysForwarding(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	var to broker
	b.forward(t, &to)
	publish := func(text string) time.Time {
		begin := time.Now()
		require.NoError(t, b.handle(t, text, func(ctx context.Context) error {
			return b.pub.Publish("labels", newMessage(ctx, text))
		}))
		t.Logf("handler %q: %v", text, time.Since(begin))
		return time.Now()
	}

	published := publish("free")
	require.Eventually(t, func() bool { return to.has("labels: free") }, patience, millisecond)
	t.Logf("without a long transaction: forwarded %v after the commit", time.Since(published))

	other, err := b.db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer func() { _ = other.Rollback() }()
	_, err = other.ExecContext(t.Context(), "select pg_current_xact_id()")
	require.NoError(t, err)
	published = publish("held up")
	const open = 2 * time.Second
	require.Never(t, func() bool { return to.has("labels: held up") }, open, 10*time.Millisecond)
	require.NoError(t, other.Commit())
	ended := time.Now()
	require.Eventually(t, func() bool { return to.has("labels: held up") }, patience, millisecond)
	t.Logf("with a transaction open for %v: forwarded %v after the commit, %v after its end", open, time.Since(published), time.Since(ended))
}

// While the broker does not take a message, it stays, and so does the order.
func TestMessagesStayUntilTheBrokerHasThem(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	want := b.store10(t)
	failures := 0
	to := broker{publish: func(r received) error {
		if r.uuid == want[4] && failures < 2 {
			failures++
			return errors.New("negative publisher confirm")
		}
		return nil
	}}
	b.forward(t, &to)
	require.Eventually(t, func() bool { return len(to.all()) == len(want) }, patience, millisecond)
	require.Equal(t, want, uuids(to.all()))
	require.Equal(t, 2, failures)
}

// Past the publish timeout, what was forwarded before is kept, and the message comes again.
func TestPublishTimeout(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	want := b.store10(t)
	hung := false
	to := broker{publish: func(r received) error {
		if r.uuid == want[4] && !hung {
			hung = true
			<-r.ctx.Done()
			return r.ctx.Err()
		}
		return nil
	}}
	b.forward(t, &to, outbox.WithPublishTimeout(100*time.Millisecond))
	require.Eventually(t, func() bool { return len(to.all()) >= len(want) }, patience, millisecond)
	require.Equal(t, want, uuids(to.all()))
}

// A forwarder that is closed in the middle of a batch keeps what it has done.
func TestClosingKeepsWhatWasForwarded(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	want := b.store10(t)
	reached := make(chan struct{})
	first := broker{publish: func(r received) error {
		if r.uuid == want[4] {
			close(reached)
			<-r.ctx.Done()
			return r.ctx.Err()
		}
		return nil
	}}
	stop := b.forward(t, &first)
	<-reached
	stop()
	require.Equal(t, want[:4], uuids(first.all()))
	require.Equal(t, want[4:], uuids(b.forwarded(t)))
}

// Any number may run: each message is forwarded once as long as none crashes.
func TestForwardersTakeTurns(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	var to broker
	for range 3 {
		b.forward(t, &to, outbox.WithBatchSize(2))
	}
	want := b.store10(t)
	require.Eventually(t, func() bool { return len(to.all()) >= len(want) }, patience, millisecond)
	require.Equal(t, want, uuids(to.all()))
}

func TestMiddlewareOfAForwarder(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	want := b.store10(t)
	to := broker{publish: func(r received) error {
		if r.uuid == want[0] {
			return errors.New("the message is too large, whenever it is sent")
		}
		return nil
	}}
	dropped := 0
	b.forward(t, &to, outbox.WithMiddleware(func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := next(msg)
			if err != nil {
				dropped++
			}
			return produced, nil
		}
	}))
	require.Eventually(t, func() bool { return len(to.all()) == len(want)-1 }, patience, millisecond)
	require.Equal(t, want[1:], uuids(to.all()))
	require.Equal(t, 1, dropped)
}

// The forwarder runs in a process of its own, which is killed in the middle of its batch.
func TestKilledForwarderRepeatsWithTheSameUUIDs(t *testing.T) {
	t.Parallel()
	b := setup(t, "pgx")
	want := b.store10(t)

	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), childSchema+"="+b.schema)
	child.Stderr = os.Stderr
	stdout, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	var published []string
	lines := bufio.NewScanner(stdout)
	for len(published) < childLimit && lines.Scan() {
		published = append(published, lines.Text())
	}
	require.NoError(t, child.Process.Kill())
	_ = child.Wait() // "signal: killed"
	require.Equal(t, want[:childLimit], published)

	require.Equal(t, want, uuids(b.forwarded(t)), "all again, with the same UUIDs")
}

const (
	childSchema = "OUTBOX_TEST_CHILD_SCHEMA"
	childLimit  = 7
)

// childMain is the forwarder that is killed: it prints the UUIDs of what it has forwarded, and hangs in mid-batch.
func childMain() {
	ctx := context.Background()
	err := func() error {
		db, err := sql.Open("pgx", os.Getenv(pgtest.URLVariable))
		if err != nil {
			return err
		}
		n := 0
		to := broker{publish: func(r received) error {
			if n == childLimit {
				<-ctx.Done()
			}
			n++
			_, err := fmt.Println(r.uuid)
			return err
		}}
		f, err := outbox.NewForwarder(ctx, db, &to, outbox.WithSchema(os.Getenv(childSchema)), outbox.WithLogger(watermill.NopLogger{}))
		if err != nil {
			return err
		}
		return f.Run(ctx)
	}()
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
