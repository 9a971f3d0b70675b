// Package chaos kills consumers and restarts servers while both are at work, and judges by what is committed and by what
// the brokers would deliver again.
//
// The consumers are processes: this test binary, run again. They stand between PostgreSQL, Kafka and RabbitMQ (classic and
// quorum queues), which are servers of this package's own, over proxies that cut, delay and starve connections.
// consumer_test.go is a consumer; killpoint_test.go kills it at exact points; chaos_test.go at random, from a seed, with
// the plan in plan_test.go; judge_test.go says what must hold in the end.
package chaos_test

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// roleVariable says what a process of this binary is, if it is not the test.
const roleVariable = "IDEMPOTENCY_CHAOS_ROLE"

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
	case roleGuardian:
		os.Exit(runGuardian())
	default:
		os.Exit(runConsumer(role))
	}
	flag.Parse()
	// The tests wait for processes and brokers, not for processors.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	code := m.Run()
	if err := servers.stop(); err != nil {
		report("%v", err)
		code = 1
	}
	if err := goleak.Find(
		// sarama counts with go-metrics, whose one ticker never ends.
		goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"),
		// toxiproxy forgets both ends of a link whose toxic has closed it.
		goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2/toxics.(*ToxicStub).Run"),
		goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2.(*ToxicLink).read"),
	); err != nil && code == 0 {
		report("%v", err)
		code = 1
	}
	os.Exit(code)
}
