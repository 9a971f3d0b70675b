// Command outbox is a shipping service that tells others what it did, on RabbitMQ or Kafka: an event is published if and only
// if the label that it tells of is in the database. It runs in one process: a producer of orders, the service, the forwarder
// from the service's outbox to the broker, and a consumer downstream.
//
//	go run ./outbox [-broker rabbitmq|kafka] [-orders 10]
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency/examples/shipping"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:gocritic // nothing is left to stop
	}
}

func run(ctx context.Context) error {
	name := flag.String("broker", "rabbitmq", "rabbitmq or kafka")
	orders := flag.Int("orders", 10, "number of orders")
	flag.Parse()
	var b broker
	switch *name {
	case "rabbitmq":
		b = rabbitMQ{amqpConfig(shipping.Setting("IDEMPOTENCY_AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/"))}
	case "kafka":
		b = apacheKafka{strings.Split(shipping.Setting("IDEMPOTENCY_KAFKA_BROKERS", "127.0.0.1:9092"), ",")}
	default:
		return fmt.Errorf("unknown broker %q: use rabbitmq or kafka", *name)
	}
	pool, err := pgxpool.New(ctx, shipping.Setting("IDEMPOTENCY_POSTGRES_URL", "postgres://idempotency:idempotency@127.0.0.1:5432/idempotency"))
	if err != nil {
		return err
	}
	defer pool.Close()
	s := service{pool: pool, broker: b, received: func(event string) { fmt.Println(event) }}
	return s.run(ctx, *orders)
}
