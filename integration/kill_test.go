package integration_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// childVariable holds, in a process that is going to be killed, what it has to do.
const childVariable = "IDEMPOTENCY_TEST_CHILD"

// child is a process with a service that stops at a point, for ever.
type child struct {
	place
	StopAt string
}

const (
	inHandler     = "in the handler"
	beforePublish = "between commit and publish"
	beforeAck     = "between publish and ack"
	nowhere       = "nowhere" // the consumer of volume_test.go
)

// ready is what the process prints once it stops, or runs if it stops nowhere.
const ready = "ready"

// runChild does what the process is for, until it is killed or -test.timeout ends it.
func runChild(t *testing.T, spec string) {
	t.Helper()
	var c child
	require.NoError(t, json.Unmarshal([]byte(spec), &c))
	w := openWorld(t, c.place)
	stop := func() error {
		fmt.Println(ready)
		select {}
	}
	switch c.StopAt {
	case inHandler:
		w.start(faults{handle: func(context.Context, pgx.Tx, int) error { return stop() }})
	case beforePublish:
		w.start(faults{publish: func(int, func() error) error { return stop() }})
	case beforeAck:
		w.start(faults{publish: func(_ int, publish func() error) error {
			if err := publish(); err != nil {
				return err
			}
			return stop()
		}})
	case nowhere:
		w.startConsumer(&outcomes{}, nil)
		fmt.Println(ready)
	}
	select {}
}

// The process is killed, and this one takes its place.
func TestKilledProcess(t *testing.T) {
	t.Parallel()
	if spec := os.Getenv(childVariable); spec != "" {
		runChild(t, spec)
	}
	for stopAt, committed := range map[string]int{inHandler: 0, beforePublish: 1, beforeAck: 1} {
		t.Run(stopAt, func(t *testing.T) {
			t.Parallel()
			overTransports(t, func(w *world) {
				w.publish("1", "2")
				kill := w.startProcess(stopAt)
				kill()
				require.Eventually(w, w.hasNoOtherConnection, patience, 50*time.Millisecond)
				require.Len(w, w.effects("create-label"), committed)
				require.Equal(w, committed, w.count("select count(*) from idempotency_produced_message"))
				w.start(faults{}).finish("1", "2")
			}, "kafka", "rabbitmq", "rabbitmq-quorum", "watermill-sql")
		})
	}
}

// startProcess starts a process and waits until it is ready. What it returns kills it.
func (w *world) startProcess(stopAt string) (kill func()) {
	w.Helper()
	spec, err := json.Marshal(child{w.place, stopAt})
	require.NoError(w, err)
	cmd := exec.CommandContext(w.Context(), os.Args[0], "-test.run=^TestKilledProcess$", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), childVariable+"="+string(spec))
	cmd.Stderr = os.Stderr
	output, err := cmd.StdoutPipe()
	require.NoError(w, err)
	require.NoError(w, cmd.Start())
	var printed []string
	lines := bufio.NewScanner(output)
	for lines.Scan() && lines.Text() != ready {
		printed = append(printed, lines.Text())
	}
	require.Equal(w, ready, lines.Text(), "the process printed %q", printed)
	return func() {
		require.NoError(w, cmd.Process.Kill())
		require.Error(w, cmd.Wait())
	}
}

// hasNoOtherConnection tells whether the database has seen the end of a process that was killed.
func (w *world) hasNoOtherConnection() bool {
	w.Helper()
	return w.count(`select count(*) from pg_stat_activity
		where query ilike '%' || $1 || '%' and pid <> pg_backend_pid()`, w.Schema) == 0
}
