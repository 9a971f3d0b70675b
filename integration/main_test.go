// Package integration tests the whole way of a message: broker, router, middleware, PostgreSQL, and back. It judges by
// what the database has committed and by what the broker would deliver again, never by what a handler has seen.
//
// The failure table of the design, row by row, is in failure_test.go, over every transport; what else can go wrong around
// the middleware in trap_test.go and beside_test.go; two deliveries at once in inflight_test.go; killed processes in
// kill_test.go; numbers in volume_test.go; what handlers return, over every store, in produced_test.go and storm_test.go;
// producers that are not Watermill in foreign_test.go, and what they and operators send again in replay_test.go.
package integration_test

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// The tests wait for brokers, not for processors.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	if os.Getenv(childVariable) != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m,
		// sarama counts with go-metrics, whose one ticker never ends.
		goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"),
	)
}
