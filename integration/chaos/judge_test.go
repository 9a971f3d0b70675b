package chaos_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
)

// settle waits, with consumers running again and no more faults, until all is processed and nothing is left to deliver. A
// process that was killed between its ack and the removal of what it had stored leaves that behind until retention, or
// until a late duplicate of the event, which is sent here.
func (w *world) settle(t *tally, consumers func() ([]*process, error)) {
	w.Helper()
	begun := time.Now()
	lap := func(what string) { w.Logf("%v: %s: %s", time.Since(begun).Round(time.Millisecond), what, w.state()) }
	for i := range 10 {
		running, err := consumers()
		require.NoError(w, err)
		lap("consumers run")
		if i > 0 {
			w.publishAgain(t, w.stored())
		}
		done := within(patience, func() bool { return w.isIdle() })
		lap("idle")
		for _, p := range running {
			if !done {
				w.Logf("a consumer's log ends with:\n%s", p.lastWords())
			}
			require.NoError(w, p.terminate())
		}
		require.True(w, done, "%s", w.state())
		if w.isIdle() && len(w.stored()) == 0 {
			return
		}
		// The closing was faster than an ack, or what was acked before the faults ended has left its copy.
	}
	require.Fail(w, "it does not settle", "%s", w.state())
}

// publishAgain sends late duplicates.
func (w *world) publishAgain(t *tally, eventIDs []string) {
	w.Helper()
	processed := w.processed()
	var late []order
	for _, id := range eventIDs {
		late = append(late, order{id, processed[id][1]})
	}
	t.add("late duplicates for copies left stored", len(late))
	require.NoError(w, w.publish(w.Context(), late...))
}

// stored returns the events whose produced messages are stored.
func (w *world) stored() (eventIDs []string) {
	w.Helper()
	for _, row := range w.mustQuery("select distinct event_id from idempotency_produced_message") {
		eventIDs = append(eventIDs, row[0])
	}
	return eventIDs
}

// isIdle tells whether each event has had its effects, and the broker has nothing left to deliver.
func (w *world) isIdle() bool {
	w.Helper()
	_, events := w.isPublished()
	if w.count("select '' from effect") < 2*events {
		return false
	}
	unacked, err := w.unacked()
	return err == nil && unacked == 0 // a broker that has just started may not tell
}

func (w *world) unacked() (int, error) {
	orders, failed := w.broker.unacked(w.Orders)
	labels, err := w.broker.unacked(w.Labels)
	return orders + labels, errors.Join(failed, err)
}

func (w *world) state() string {
	w.Helper()
	messages, events := w.isPublished()
	unacked, err := w.unacked()
	return fmt.Sprintf("%s published %d about %d events; effects %d of all %d; unacked %d (%v); stored %s",
		w.Transport, messages, events, w.effects(w.Context()), w.count("select '' from effect"), unacked, err, strings.Join(w.stored(), ","))
}

// processed returns, by event ID, the content that was processed and the UUID of its label. An event with two effects is an
// error.
func (w *world) processed() map[string][]string {
	w.Helper()
	processed := make(map[string][]string)
	for _, row := range w.mustQuery("select event_id, content, uuid from effect where subscriber_id = $1", w.Transport+".create") {
		require.NotContains(w, processed, row[0], "an event with two effects")
		processed[row[0]] = row
	}
	return processed
}

// judge tells, after all consumers have ended, whether every promise was kept, and counts.
func (w *world) judge(t *tally) {
	w.Helper()

	processed := w.processed()
	contents := w.contents()
	t.add("lost", len(contents)-len(processed))
	t.add("doubled", w.count("select '' from effect where subscriber_id = $1", w.Transport+".create")-len(processed))
	require.Len(w, processed, len(contents), "events that were lost, or made up")
	wantArrivals := make([][]string, 0, len(processed))
	wantNotes := make([][]string, 0, len(processed))
	for id, row := range processed {
		require.Contains(w, contents[id], row[1], "content that nobody published")
		wantArrivals = append(wantArrivals, []string{id, row[2]})
		wantNotes = append(wantNotes, []string{row[2], id})
	}
	require.ElementsMatch(w, wantArrivals, w.mustQuery("select distinct event_id, uuid from arrival"),
		"each event has one label, with the UUID that was committed")
	require.ElementsMatch(w, wantNotes, w.mustQuery("select event_id, content from effect where subscriber_id = $1", w.Transport+".note"),
		"each label has one effect downstream")

	require.Empty(w, w.mustQuery(`select coalesce(c.subscriber_id, e.subscriber_id), coalesce(c.event_id, e.event_id)
		from idempotency_claim c full join effect e on (c.subscriber_id, c.event_id) = (e.subscriber_id, e.event_id)
		where c.event_id is null or e.event_id is null`), "claims without effect, or effects without claim")
	require.Empty(w, w.stored(), "stored messages that were published and acked")
	require.True(w, w.isIdle(), "the broker would deliver again: %s", w.state())
	w.requireNoConnections()

	w.judgeConflicts(t, processed)
	messages, events := w.isPublished()
	t.add("events", events)
	t.add("messages", messages)
	t.add("effects", len(processed))
	t.add("labels", len(wantArrivals))
	t.add("arrivals", w.count("select '' from arrival"))
}

// requireNoConnections waits until the database has seen the end of processes.
func (w *world) requireNoConnections() {
	w.Helper()
	require.True(w, within(patience, func() bool {
		return w.count("select '' from pg_stat_activity where application_name = $1", w.Schema) == 0
	}), "connections to PostgreSQL are left")
}

// judgeConflicts tells whether exactly the messages with another content than the one that was processed are dead letters.
func (w *world) judgeConflicts(t *tally, processed map[string][]string) {
	w.Helper()
	letters, err := w.broker.drain(w.Dead)
	require.NoError(w, err)
	var dead, want []string
	for _, letter := range letters {
		dead = append(dead, letter.Metadata.Get(publicationMetadata))
	}
	slices.Sort(dead)
	t.add("dead letters", len(dead))
	dead = slices.Compact(dead)
	for publication, o := range w.published {
		if processed[o.Event][1] != o.Content {
			want = append(want, publication)
		}
	}
	require.ElementsMatch(w, want, dead, "conflicting contents that were dropped, or others that were refused")
	t.add("conflicting messages", len(want))
}

// access is the function of each of the two accesses in a report of the race detector.
var access = regexp.MustCompile(`(?m)^(?:Read|Write|Previous read|Previous write) at .*\n\s+(\S+)`)

// requireNoRaces looks through what the race detector had to say in consumers, also in those that were killed.
func requireNoRaces(t require.TestingT) {
	files, err := filepath.Glob(filepath.Join(servers.dir, "race.*"))
	require.NoError(t, err)
	for _, file := range files {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, match := range access.FindAllStringSubmatch(string(content), -1) {
			require.NotContains(t, match[1], "watermill-idempotency", "%s", content)
		}
	}
}

// awaitProgress waits until some more events have had their effect, but not for long: a fault may come at a bad time.
func (w *world) awaitProgress(ctx context.Context, n int, limit time.Duration) {
	before := w.effects(ctx)
	within(limit, func() bool { return ctx.Err() != nil || w.effects(ctx) >= before+n })
}
