package shipping

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Broker is what differs from example to example.
type Broker struct {
	NewPublisher  func(logger watermill.LoggerAdapter) (message.Publisher, error)
	NewSubscriber func(logger watermill.LoggerAdapter) (message.Subscriber, error)
}

// Setting returns an environment variable, or the address in docker-compose.yml.
func Setting(variable, fallback string) string { return cmp.Or(os.Getenv(variable), fallback) }

// Main runs an example:
//
//	<example> consume [-topic orders]
//	<example> produce [-topic orders] [-orders 10] [-repeat 2]
func Main(b Broker) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := b.run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:gocritic // nothing is left to stop
	}
}

func (b Broker) run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("say what to do: consume or produce")
	}
	flags := flag.NewFlagSet(args[0], flag.ExitOnError)
	topic := flags.String("topic", "orders", "topic or queue")
	orders := flags.Int("orders", 10, "produce: number of orders")
	repeat := flags.Int("repeat", 2, "produce: how often each event is published")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	publisher, err := b.NewPublisher(watermill.NewSlogLogger(nil))
	if err != nil {
		return err
	}
	defer func() { _ = publisher.Close() }()
	switch args[0] {
	case "produce":
		return Produce(publisher, *topic, *orders, *repeat)
	case "consume":
		return b.consume(ctx, publisher, *topic)
	}
	return fmt.Errorf("unknown command %q: use consume or produce", args[0])
}

func (b Broker) consume(ctx context.Context, deadLetters message.Publisher, topic string) error {
	pool, err := pgxpool.New(ctx, Setting("IDEMPOTENCY_POSTGRES_URL", "postgres://idempotency:idempotency@127.0.0.1:5432/idempotency"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := Migrate(ctx, pool); err != nil {
		return err
	}
	subscriber, err := b.NewSubscriber(watermill.NewSlogLogger(nil))
	if err != nil {
		return err
	}
	router, err := NewRouter(ctx, pool, topic, subscriber, deadLetters, Print(os.Stdout))
	if err != nil {
		return err
	}
	return router.Run(ctx)
}
