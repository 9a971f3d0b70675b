package chaos_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// A consumer kills itself at an exact point, and another one takes its place: once, or CHAOS_ROUNDS times, ten at most.
func TestKillPoints(t *testing.T) {
	t.Parallel()
	servers.start(t)
	for _, name := range transportNames {
		for _, at := range points {
			t.Run(name+" "+string(at), func(t *testing.T) {
				t.Parallel()
				counts := &tally{}
				w := newWorld(t, name)
				for run := range min(10, rounds(t, 1)) {
					w.dieAt(at, fmt.Sprint(run), counts)
					w.settle(counts, func() ([]*process, error) {
						p, err := w.startProcess(w.consumerSpec, counts)
						return []*process{p}, err
					})
				}
				w.judge(counts)
				requireNoRaces(t)
			})
		}
	}
}

// dieAt lets a consumer die while it processes an event, and judges what it has left behind.
func (w *world) dieAt(at point, eventID string, counts *tally) {
	w.Helper()
	spec := w.consumerSpec
	spec.DieAt, spec.DieOnCall = at, 1
	p, err := w.startProcess(spec, counts)
	require.NoError(w, err)
	require.NoError(w, w.publish(w.Context(), order{eventID, "first"}))
	require.NoError(w, p.awaitKilled())
	w.requireNoConnections()

	committed := 0
	if slices.Contains([]point{commitSent, afterCommit, afterPublish, beforeAck}, at) {
		committed = 1
	}
	require.Equal(w, committed, w.count("select '' from effect where subscriber_id = $1 and event_id = $2", w.Transport+".create", eventID), "effects")
	require.Equal(w, committed, w.count("select '' from idempotency_claim where subscriber_id = $1 and event_id = $2", w.Transport+".create", eventID), "claims")
	require.Len(w, w.stored(), committed, "stored messages")
}
