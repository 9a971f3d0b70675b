package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/examples/shipping"
	"github.com/watermill-idempotency/idempotency/outbox"
	"github.com/watermill-idempotency/idempotency/postgres"
)

type (
	// OrderPlaced is what the service consumes.
	OrderPlaced struct{ Order string }
	// LabelCreated and PickupRequested are what it publishes.
	LabelCreated    struct{ Order string }
	PickupRequested struct{ Order string }
)

type service struct {
	pool     *pgxpool.Pool
	broker   broker
	prefix   string             // of all topics
	received func(event string) // downstream
	logger   watermill.LoggerAdapter
}

var marshaler = cqrs.JSONMarshaler{GenerateName: cqrs.StructName}

func (s *service) topic(event string) string { return s.prefix + "shipping." + event }

// run places orders, and runs all that follows from them until ctx ends.
func (s *service) run(ctx context.Context, orders int) (err error) {
	if s.logger == nil {
		s.logger = watermill.NewSlogLogger(nil)
	}
	db := stdlib.OpenDBFromPool(s.pool)
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := s.migrate(ctx, db); err != nil {
		return err
	}
	publisher, err := s.broker.publisher(s.logger)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, publisher.Close()) }()

	router, err := s.router(ctx, db)
	if err != nil {
		return err
	}
	forwarder, err := outbox.NewForwarder(ctx, db, publisher, outbox.WithLogger(s.logger))
	if err != nil {
		return err
	}
	if err := s.place(publisher, orders); err != nil {
		return err
	}

	// They end together.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 2)
	go func() { defer cancel(); ended <- router.Run(ctx) }()
	go func() { defer cancel(); ended <- forwarder.Run(ctx) }()
	return errors.Join(<-ended, <-ended)
}

func (s *service) migrate(ctx context.Context, db *sql.DB) error {
	if err := shipping.Migrate(ctx, s.pool); err != nil {
		return err
	}
	return outbox.Migrate(ctx, db)
}

// router has the service's handler and two downstream, all under the middleware: what the forwarder repeats after a crash,
// and what the producer repeats, is dropped.
func (s *service) router(ctx context.Context, db *sql.DB) (*message.Router, error) {
	store, err := postgres.New(ctx, s.pool)
	if err != nil {
		return nil, err
	}
	idem, err := idempotency.New(store, idempotency.WithLogger(s.logger))
	if err != nil {
		return nil, err
	}
	toOutbox, err := outbox.New(ctx, db)
	if err != nil {
		return nil, err
	}
	events, err := cqrs.NewEventBusWithConfig(toOutbox, cqrs.EventBusConfig{
		GeneratePublishTopic: func(p cqrs.GenerateEventPublishTopicParams) (string, error) { return s.topic(p.EventName), nil },
		Marshaler:            marshaler,
		Logger:               s.logger,
	})
	if err != nil {
		return nil, err
	}

	router, err := message.NewRouter(message.RouterConfig{}, s.logger)
	if err != nil {
		return nil, err
	}
	router.AddMiddleware(idem.Middleware)
	processor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(p cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) {
			return s.topic(p.EventName), nil
		},
		SubscriberConstructor: func(p cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return s.broker.subscriber(s.prefix+p.HandlerName, s.logger)
		},
		Marshaler: marshaler,
		Logger:    s.logger,
	})
	if err != nil {
		return nil, err
	}
	return router, processor.AddHandlers(
		cqrs.NewEventHandler("create-label", createLabel(events)),
		cqrs.NewEventHandler("print-label", func(_ context.Context, e *LabelCreated) error {
			s.received("label for order " + e.Order)
			return nil
		}),
		cqrs.NewEventHandler("order-pickup", func(_ context.Context, e *PickupRequested) error {
			s.received("pickup for order " + e.Order)
			return nil
		}),
	)
}

// createLabel writes the label and both events, or none of them. It knows the event bus, and nothing of an outbox.
func createLabel(events *cqrs.EventBus) func(ctx context.Context, e *OrderPlaced) error {
	return func(ctx context.Context, e *OrderPlaced) error {
		tx, err := idempotency.TxFromContext[pgx.Tx](ctx)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "insert into shipping_label (order_id, kind) values ($1, 'initial')", e.Order); err != nil {
			return err
		}
		if err := events.Publish(ctx, &LabelCreated{e.Order}); err != nil {
			return err
		}
		return events.Publish(ctx, &PickupRequested{e.Order})
	}
}

// place publishes each order twice, as a broker or a producer does that has not heard an ack.
func (s *service) place(publisher message.Publisher, orders int) error {
	for i := range orders {
		order := fmt.Sprint(i + 1)
		msg, err := marshaler.Marshal(&OrderPlaced{order})
		if err != nil {
			return err
		}
		msg.Metadata.Set(idempotency.EventIDMetadata, "order-"+order+"-placed")
		if err := publisher.Publish(s.topic("OrderPlaced"), msg, msg.Copy()); err != nil {
			return err
		}
	}
	return nil
}
