package chaos_test

import "math/rand/v2"

// The faults of a round, by the names that the report has.
const (
	killed        = "consumers killed (SIGKILL)"
	killedAtPoint = "consumers killed at a point"
	terminated    = "consumers terminated (SIGTERM)"
	joined        = "consumers that joined"
	left          = "consumers that left"
	exhausted     = "pools exhausted"

	stopped  = "PostgreSQL stopped (immediate)"
	crashed  = "PostgreSQL killed"
	backend  = "transactions terminated"
	rabbit   = "RabbitMQ restarted"
	felled   = "RabbitMQ killed"
	broker   = "Kafka killed"
	cut      = "connections cut"
	delayed  = "connections delayed"
	halfOpen = "connections whose answers are lost"
	limited  = "connections cut inside of an answer"
)

var (
	kills       = []string{killed, killedAtPoint}
	serverKills = []string{stopped, crashed, backend, rabbit, felled, broker}
)

// amount is how often a round has a fault.
type amount struct {
	fault string
	n     int
}

var (
	// consumerFaults happen to the consumers of each transport, at once with those of the others and of the servers.
	consumerFaults = []amount{{killed, 7}, {killedAtPoint, 7}, {terminated, 2}, {joined, 2}, {left, 2}, {exhausted, 2}}
	serverFaults   = []amount{
		{stopped, 5},
		{crashed, 2},
		{backend, 11},
		{rabbit, 1},
		{felled, 1},
		{broker, 1},
		{cut, 3},
		{delayed, 2},
		{halfOpen, 3},
		{limited, 3},
	}
)

// step is a fault, with all that chance has to say about it: the same seed makes the same steps.
type step struct {
	fault string
	seed  uint64 // of the consumer that is started, if one is
	which int    // consumer or server
	at    point
	after int // deliveries
	bytes int
}

func (s step) String() string {
	if s.fault == killedAtPoint {
		return s.fault + ", " + string(s.at)
	}
	return s.fault
}

// Each of what runs at once has a stream of chance of its own.
func stream(seed uint64, name string) *rand.Rand {
	var id uint64
	for _, c := range []byte(name) {
		id = id*31 + uint64(c)
	}
	return rand.New(rand.NewPCG(seed, id))
}

func plan(dice *rand.Rand, amounts []amount) (steps []step) {
	for _, a := range amounts {
		for range a.n {
			steps = append(steps, step{
				fault: a.fault, seed: dice.Uint64(), which: dice.IntN(12), at: points[dice.IntN(len(points))],
				after: dice.IntN(4), bytes: dice.IntN(2000),
			})
		}
	}
	dice.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	return steps
}

// nextOrders is what the producer sends next: 20 % duplicates, early or late, and 5 % another content for a known event.
func nextOrders(dice *rand.Rand, known []order, n int, name func(i int) string) (batch []order) {
	for i := range n {
		o := order{name(i), "first"}
		batch = append(batch, o)
		if dice.Float64() < 0.05 {
			batch = append(batch, order{o.Event, "second"})
		}
		if dice.Float64() < 0.1 {
			batch = append(batch, o)
		}
		if len(known) > 0 && dice.Float64() < 0.1 {
			batch = append(batch, known[dice.IntN(len(known))])
		}
	}
	dice.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
	return batch
}
