package postgres_test

import (
	"context"
	"log"
	"os"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/postgres"
)

func createLabel(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
	_, err := tx.Exec(ctx, `insert into shipping_label (order_id) values ($1)`, string(msg.Payload))
	return err
}

func Example() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := postgres.Migrate(ctx, pool); err != nil {
		log.Print(err)
		return
	}
	store, err := postgres.New(ctx, pool)
	if err != nil {
		log.Print(err)
		return
	}
	idem, err := idempotency.New(store, idempotency.WithSubscriberID("shipping.create-label.v1"))
	if err != nil {
		log.Print(err)
		return
	}

	subscriber := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{}) // or Kafka, or RabbitMQ
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		log.Print(err)
		return
	}
	router.AddConsumerHandler("create-label", "orders", subscriber, idempotency.ConsumerHandler(createLabel)).
		AddMiddleware(idem.Middleware)
	if err := router.Run(ctx); err != nil {
		log.Print(err)
	}
}
