package integration_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"

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

// run does what the process is for, until it is killed or -test.timeout ends it.
func (c child) run(t *testing.T) {
	t.Helper()
	w := openWorld(t, c.place)
	stop := func() error {
		fmt.Println(ready)
		select {}
	}
	switch c.StopAt {
	case inHandler:
		w.start(t, faults{handle: func(context.Context, pgx.Tx, int) error { return stop() }})
	case beforePublish:
		w.start(t, faults{publish: func(int, func() error) error { return stop() }})
	case beforeAck:
		w.start(t, faults{publish: func(_ int, publish func() error) error {
			if err := publish(); err != nil {
				return err
			}
			return stop()
		}})
	case nowhere:
		w.startConsumer(t, &outcomes{}, nil)
		fmt.Println(ready)
	}
	select {}
}

// The process is killed, and this one takes its place.
func TestKilledProcess(t *testing.T) {
	if spec := os.Getenv(childVariable); spec != "" {
		var c child
		require.NoError(t, json.Unmarshal([]byte(spec), &c))
		c.run(t)
	}
	t.Parallel()
	for stopAt, committed := range map[string]int{inHandler: 0, beforePublish: 1, beforeAck: 1} {
		t.Run(stopAt, func(t *testing.T) {
			t.Parallel()
			overTransports(t, func(t *testing.T, w *world) {
				w.publish(t, "1", "2")
				kill := startProcess(t, child{w.place, stopAt})
				kill()
				require.Eventually(t, func() bool { return w.hasNoOtherConnection(t) }, patience, patience/1000)
				require.Len(t, w.effects(t, "create-label"), committed)
				require.Equal(t, committed, w.count(t, "select count(*) from idempotency_produced_message"))
				w.start(t, faults{}).finish(t, "1", "2")
			}, "kafka", "rabbitmq", "rabbitmq-quorum", "watermill-sql")
		})
	}
}

// startProcess starts a process and waits until it is ready. What it returns kills it.
func startProcess(t *testing.T, c child) (kill func()) {
	t.Helper()
	spec, err := json.Marshal(c)
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledProcess$", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), childVariable+"="+string(spec))
	cmd.Stderr = os.Stderr
	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var printed []string
	lines := bufio.NewScanner(output)
	for lines.Scan() && lines.Text() != ready {
		printed = append(printed, lines.Text())
	}
	require.Equal(t, ready, lines.Text(), "the process printed %q", printed)
	return func() {
		require.NoError(t, cmd.Process.Kill())
		require.Error(t, cmd.Wait())
	}
}

// hasNoOtherConnection tells whether the database has seen the end of a process that was killed.
func (w *world) hasNoOtherConnection(t *testing.T) bool {
	t.Helper()
	return w.count(t, "select count(*) from pg_stat_activity where query ilike '%' || $1 || '%' and pid <> pg_backend_pid()", w.Schema) == 0
}
