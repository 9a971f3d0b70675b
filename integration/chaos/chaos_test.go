package chaos_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	seedVariable   = "CHAOS_SEED"
	roundsVariable = "CHAOS_ROUNDS"
	leastConsumers = 2
	mostConsumers  = 4
)

// TestChaos runs one round, or CHAOS_ROUNDS. A round ends when its faults have happened; then everything must settle, and is
// judged. CHAOS_SEED repeats the faults of a round, and what was published; what they hit is up to the machine.
func TestChaos(t *testing.T) {
	servers.start(t)
	seed := rand.Uint64()
	if text := os.Getenv(seedVariable); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	for i := range uint64(rounds(t, 1)) {
		t.Run(fmt.Sprintf("%s=%d", seedVariable, seed+i), func(t *testing.T) { runRound(t, seed+i) })
		if t.Failed() {
			break
		}
	}
}

func rounds(t *testing.T, otherwise int) int {
	t.Helper()
	text := os.Getenv(roundsVariable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

func runRound(t *testing.T, seed uint64) {
	t.Helper()
	begun := time.Now()
	counts := &tally{}
	report("chaos: %s=%d", seedVariable, seed)
	ctx, cancel := context.WithTimeoutCause(t.Context(), 15*time.Minute, errors.New("the round takes too long"))
	defer cancel()
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)

	var crews []*crew
	for _, name := range transportNames {
		crews = append(crews, &crew{world: newWorld(t, name), tally: counts, dice: stream(seed, name)})
	}
	t.Cleanup(func() {
		for _, c := range crews {
			c.killAll()
		}
	})

	// RabbitMQ (3.10) that is killed within a moment of the declaration of a quorum queue forgets where the queue's log is:
	// the queue then has lost what was confirmed, and confirms nothing for ever.
	<-time.After(2 * time.Second) // there is nothing to wait for that tells it

	// The faults of each crew, and of the servers, and the load, all at once.
	disturbed := make(chan struct{})
	var faults, load sync.WaitGroup
	do := func(err error) {
		if err != nil {
			abort(err) // the first one counts
		}
	}
	for _, c := range crews {
		load.Go(func() { do(c.load(ctx, disturbed, stream(seed, "load on "+c.Transport))) })
		faults.Go(func() { do(c.suffer(ctx)) })
	}
	faults.Go(func() { do(sufferServers(ctx, stream(seed, "servers"), crews, counts)) })
	faults.Wait()
	close(disturbed)
	load.Wait()
	require.NoError(t, context.Cause(ctx))
	lasted := time.Since(begun)

	t.Run("settle", func(t *testing.T) {
		for _, c := range crews {
			t.Run(c.Transport, func(t *testing.T) {
				t.Parallel()
				c.T = t
				c.settle(counts, c.survivors)
				c.judge(counts)
			})
		}
	})
	requireNoRaces(t)
	if !t.Failed() {
		report("%s", counts.table(seed, lasted, time.Since(begun)))
	}
}

// crew are the consumers of one transport.
type crew struct {
	*world
	*tally
	dice      *rand.Rand
	processes []*process
}

// startOne starts a consumer, again if it does not come up: the servers may be down.
func (c *crew) startOne(ctx context.Context, seed uint64) (*process, error) {
	spec := c.consumerSpec
	spec.Seed, spec.Failures, spec.Panics = seed, 0.1, 0.01
	for range 10 {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		p, err := c.startProcess(spec, c.tally)
		if err != nil {
			return nil, err
		}
		if err = p.awaitReady(); err == nil {
			return p, nil
		}
		_ = p.kill()
		c.add("consumers that did not come up", 1)
	}
	return nil, errors.New("consumers do not come up")
}

func (c *crew) fresh(ctx context.Context) (started []*process, err error) {
	for range leastConsumers {
		p, err := c.startOne(ctx, c.dice.Uint64())
		if err != nil {
			return started, err
		}
		started = append(started, p)
	}
	return started, nil
}

// survivors returns the consumers that run, or starts new ones.
func (c *crew) survivors() ([]*process, error) {
	if running := c.processes; running != nil {
		c.processes = nil
		return running, nil
	}
	return c.fresh(c.Context())
}

func (c *crew) killAll() {
	for _, p := range c.processes {
		_ = p.kill()
	}
}

// suffer lets the faults of the plan happen to the consumers, one after the other.
func (c *crew) suffer(ctx context.Context) error {
	steps := plan(c.dice, consumerFaults)
	var err error
	if c.processes, err = c.fresh(ctx); err != nil {
		return err
	}
	for _, s := range steps {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		begun := time.Now()
		if err := c.apply(ctx, s); err != nil {
			return fmt.Errorf("%s: %s: %w", c.Transport, s.fault, err)
		}
		c.Logf("%v %s: %s", time.Since(begun).Round(time.Millisecond), c.Transport, s)
	}
	return nil
}

func (c *crew) apply(ctx context.Context, s step) error {
	i := s.which % len(c.processes)
	victim := c.processes[i]
	// Let it work, but not wait for work for long.
	awaitDeliveries := func(n int) {
		until := victim.deliveries.Load() + int32(n)
		within(2*time.Second, func() bool { return victim.deliveries.Load() >= until })
	}
	var err error
	switch s.fault {
	case joined, left:
		if s.fault == left && len(c.processes) > leastConsumers || len(c.processes) == mostConsumers {
			c.add(left, 1)
			c.processes = slices.Delete(c.processes, i, i+1)
			return victim.terminate()
		}
		c.add(joined, 1)
		p, err := c.startOne(ctx, s.seed)
		if err == nil {
			c.processes = append(c.processes, p)
		}
		return err
	case exhausted:
		c.add(s.fault, 1)
		victim.command(commandExhaust)
		awaitDeliveries(1 + s.after)
		return nil
	case killed:
		awaitDeliveries(s.after)
		err = victim.kill()
	case killedAtPoint:
		victim.command(commandDie, string(s.at), strconv.Itoa(1+s.after))
		select {
		case <-victim.ended:
			err = victim.awaitKilled()
		case <-time.After(3 * time.Second): // it did not come there
			s.fault = killed
			err = victim.kill()
		}
	case terminated:
		awaitDeliveries(s.after)
		err = victim.terminate()
	}
	if err != nil {
		return err
	}
	c.add(s.fault, 1)
	p, err := c.startOne(ctx, s.seed)
	if err == nil {
		c.processes[i] = p
	}
	return err
}

// load publishes until the faults are over, never much more than is processed.
func (c *crew) load(ctx context.Context, over <-chan struct{}, dice *rand.Rand) error {
	var known []order
	for {
		_, events := c.isPublished()
		isOver := false
		within(patience, func() bool {
			select {
			case <-over:
				isOver = true
			case <-ctx.Done():
				isOver = true
			default:
			}
			return isOver || events < c.effects(ctx)+15
		})
		if isOver {
			return context.Cause(ctx)
		}
		batch := nextOrders(dice, known, 5, func(i int) string { return strconv.Itoa(events + i) })
		if err := c.publish(ctx, batch...); err != nil {
			return err
		}
		known = append(known, batch...)
	}
}

// sufferServers lets the faults of the plan happen to the servers and to the connections, one after the other.
func sufferServers(ctx context.Context, dice *rand.Rand, crews []*crew, counts *tally) error {
	for _, s := range plan(dice, serverFaults) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		begun := time.Now()
		if err := applyToServer(ctx, s, crews); err != nil {
			return fmt.Errorf("%s: %w", s.fault, err)
		}
		counts.add(s.fault, 1)
		crews[0].Logf("%v servers: %s", time.Since(begun).Round(time.Millisecond), s)
		crews[s.which%len(crews)].awaitProgress(ctx, 1+s.after, 2*time.Second)
	}
	return nil
}

func applyToServer(ctx context.Context, s step, crews []*crew) error {
	server := serverNames[s.which%len(serverNames)]
	switch s.fault {
	case stopped:
		return errors.Join(servers.stopImmediately(ctx), servers.restart(ctx, postgresql))
	case crashed:
		return errors.Join(servers.crash(ctx, postgresql), servers.restart(ctx, postgresql))
	case rabbit:
		return errors.Join(servers.shut(ctx, rabbitmq), servers.restart(ctx, rabbitmq))
	case felled:
		return errors.Join(servers.crash(ctx, rabbitmq), servers.restart(ctx, rabbitmq))
	case broker:
		return errors.Join(servers.crash(ctx, kafkaName), servers.restart(ctx, kafkaName))
	case backend:
		c := crews[s.which%len(crews)]
		var schemas []string
		for _, other := range crews {
			schemas = append(schemas, other.Schema)
		}
		// One of this crew, or of another one: all of them may wait for their broker.
		if !within(patience, func() bool {
			rows, err := c.query(ctx, `select pg_terminate_backend(pid)::text from pg_stat_activity
				where application_name = any($1) and xact_start is not null order by (application_name = $2) desc limit 1`, schemas, c.Schema)
			return err == nil && len(rows) == 1
		}) {
			return fmt.Errorf("no transaction is running: %s", c.state()) //nolint:contextcheck // it bounds itself
		}
		return nil
	case cut:
		servers.proxies[server].Stop()
		return servers.proxies[server].Start()
	case delayed:
		return whilePoisoned(ctx, server, "latency", `{"latency": 100, "jitter": 80}`, crews[0])
	case halfOpen:
		return whilePoisoned(ctx, server, "timeout", `{"timeout": 0}`, crews[0])
	case limited:
		return whilePoisoned(ctx, server, "limit_data", fmt.Sprintf(`{"bytes": %d}`, s.bytes), crews[0])
	}
	return errors.New("no such fault")
}

// whilePoisoned lets the crews work, as far as they can, over connections that have the toxic.
func whilePoisoned(ctx context.Context, server, kind, attributes string, c *crew) error {
	if err := servers.poison(server, kind, attributes); err != nil {
		return err
	}
	c.awaitProgress(ctx, 3, time.Second)
	return servers.heal(ctx, server)
}

// table is the report of a round.
func (t *tally) table(seed uint64, lasted, all time.Duration) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, value any) { fmt.Fprintf(w, "%s\t%v\t\n", name, value) }
	sum := func(faults []string) (n int) {
		for _, fault := range faults {
			n += t.counts[fault]
		}
		return n
	}
	row(seedVariable, seed)
	for _, a := range slices.Concat(consumerFaults, serverFaults) {
		row(a.fault, t.counts[a.fault])
	}
	row("kills", sum(kills))
	row("server faults", sum(serverKills))
	for _, name := range []string{"events", "messages", "effects", "labels", "arrivals", "conflicting messages", "dead letters", "late duplicates for copies left stored"} {
		row(name, t.counts[name])
	}
	deliveries := 0
	for _, name := range slices.Sorted(maps.Keys(t.counts)) {
		if strings.HasPrefix(name, outcome) && name != outcome+"retried" {
			row(name, t.counts[name])
			deliveries += t.counts[name]
		}
	}
	row("deliveries", deliveries)
	row("lost", t.counts["lost"])
	row("doubled", t.counts["doubled"])
	row("faults lasted", lasted.Round(100*time.Millisecond))
	row("all took", all.Round(100*time.Millisecond))
	_ = w.Flush()
	return b.String()
}
