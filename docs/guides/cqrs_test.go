package guides_test

import (
	"context"
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/components/requestreply"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
	"github.com/watermill-idempotency/idempotency/outbox"
)

// OrderPaid is an event with its own ID, which was made when the order was paid.
type OrderPaid struct {
	ID      string `json:"id"`
	OrderID string `json:"orderId"`
}

// EventID is what the bus stamps.
func (e OrderPaid) EventID() string { return e.ID }

// LabelCreated is an event without one.
type LabelCreated struct {
	OrderID string `json:"orderId"`
}

// CancelLabel is a command.
type CancelLabel struct {
	OrderID string `json:"orderId"`
}

var errPrinter = errors.New("the label printer is out of paper")

var marshaler = cqrs.JSONMarshaler{GenerateName: cqrs.StructName}

// newEventBus returns a bus that stamps the ID that an event has.
func newEventBus(pub message.Publisher) (*cqrs.EventBus, error) {
	return cqrs.NewEventBusWithConfig(pub, cqrs.EventBusConfig{
		GeneratePublishTopic: func(p cqrs.GenerateEventPublishTopicParams) (string, error) { return p.EventName, nil },
		OnPublish: func(p cqrs.OnEventSendParams) error {
			if event, ok := p.Event.(interface{ EventID() string }); ok {
				p.Message.Metadata.Set(idempotency.EventIDMetadata, event.EventID())
			}
			return nil
		},
		Marshaler: marshaler,
	})
}

// newEventProcessor subscribes each handler to all events of the topic "events".
func newEventProcessor(router *message.Router, subscriber message.Subscriber, ackUnknown bool) (*cqrs.EventProcessor, error) {
	return cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return "events", nil },
		SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return subscriber, nil
		},
		AckOnUnknownEvent: ackUnknown,
		Marshaler:         marshaler,
	})
}

func newEventGroupProcessor(router *message.Router, subscriber message.Subscriber) (*cqrs.EventGroupProcessor, error) {
	return cqrs.NewEventGroupProcessorWithConfig(router, cqrs.EventGroupProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventGroupProcessorGenerateSubscribeTopicParams) (string, error) { return "events", nil },
		SubscriberConstructor: func(cqrs.EventGroupProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return subscriber, nil
		},
		AckOnUnknownEvent: true,
		Marshaler:         marshaler,
	})
}

// onMarkRollback lets no failure of a command be committed that AckCommandHandlingErrors turns into success.
func onMarkRollback(p cqrs.CommandProcessorOnHandleParams) error {
	err := p.Handler.Handle(p.Message.Context(), p.Command)
	if err != nil {
		return errors.Join(err, idempotency.MarkRollback(p.Message.Context(), err))
	}
	return nil
}

func newCommandProcessor(router *message.Router, subscriber message.Subscriber, onHandle cqrs.CommandProcessorOnHandleFn) (*cqrs.CommandProcessor, error) {
	return cqrs.NewCommandProcessorWithConfig(router, cqrs.CommandProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.CommandProcessorGenerateSubscribeTopicParams) (string, error) { return "commands", nil },
		SubscriberConstructor: func(cqrs.CommandProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return subscriber, nil
		},
		OnHandle:                 onHandle,
		AckCommandHandlingErrors: true,
		Marshaler:                marshaler,
	})
}

// write writes an effect in the transaction of a handler that has its context only.
func write(ctx context.Context, effect string) error {
	tx, err := idempotency.TxFromContext[*idempotencytest.MemTx](ctx)
	if err != nil {
		return err
	}
	return tx.Write(effect)
}

func onPaid(effect string) func(ctx context.Context, event *OrderPaid) error {
	return func(ctx context.Context, event *OrderPaid) error {
		return write(ctx, effect+" "+event.OrderID)
	}
}

// marshal makes the message of an event or command, with an event ID.
func marshal(t *testing.T, id string, v any) *message.Message {
	t.Helper()
	msg, err := marshaler.Marshal(v)
	require.NoError(t, err)
	msg.Metadata.Set(idempotency.EventIDMetadata, id)
	return msg
}

func addEventHandlers(t *testing.T, s *service, idem *idempotency.Middleware, ackUnknown bool, handlers ...cqrs.EventHandler) {
	t.Helper()
	s.router.AddMiddleware(s.deadLetters())
	processor, err := newEventProcessor(s.router, s.channel, ackUnknown)
	require.NoError(t, err)
	for _, eventHandler := range handlers {
		handler, err := processor.AddHandler(eventHandler)
		require.NoError(t, err)
		handler.AddMiddleware(idem.Middleware)
	}
	s.run()
}

func TestEventHandlersHaveAClaimEach(t *testing.T) {
	t.Parallel()
	s, store := newService(t), idempotencytest.NewMemStore()
	idem, observed := newMiddleware(t, store, idempotency.WithSubscriberPrefix("shipping."))
	addEventHandlers(t, s, idem, true,
		cqrs.NewEventHandler("create-label", onPaid("label for")),
		cqrs.NewEventHandler("notify", onPaid("mail for")))
	msg := marshal(t, "E-1", OrderPaid{OrderID: "O-104"})
	require.NoError(t, s.channel.Publish("events", msg, msg))
	require.ElementsMatch(t, []string{"label for O-104", "mail for O-104"}, store.Effects())
	once := map[idempotency.Outcome]int{idempotency.Processed: 1, idempotency.Duplicate: 1}
	require.Equal(t, map[string]map[idempotency.Outcome]int{"shipping.create-label": once, "shipping.notify": once}, observed.claimed())
}

// An event that a handler does not know is claimed with AckOnUnknownEvent: the handler of the same name that knows it
// later takes it for a duplicate.
func TestIgnoredEventIsClaimed(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewMemStore()
	idem, observed := newMiddleware(t, store)
	msg := marshal(t, "E-1", OrderPaid{OrderID: "O-104"})

	before := newService(t)
	addEventHandlers(t, before, idem, true, cqrs.NewEventHandler("create-label", func(context.Context, *LabelCreated) error { return nil }))
	require.NoError(t, before.channel.Publish("events", msg))
	require.Equal(t, []idempotency.Outcome{idempotency.Processed}, observed.outcomes())

	after := newService(t)
	addEventHandlers(t, after, idem, true, cqrs.NewEventHandler("create-label", onPaid("label for")))
	require.NoError(t, after.channel.Publish("events", msg))
	require.Equal(t, []idempotency.Outcome{idempotency.Processed, idempotency.Duplicate}, observed.outcomes())
	require.Empty(t, store.Effects())

	renamed := newService(t)
	addEventHandlers(t, renamed, idem, true, cqrs.NewEventHandler("create-label-v2", onPaid("label for")))
	require.NoError(t, renamed.channel.Publish("events", msg))
	require.Equal(t, []string{"label for O-104"}, store.Effects())
}

func TestUnknownAndDamagedEventsAreErrorsWithoutAckOnUnknownEvent(t *testing.T) {
	t.Parallel()
	s, store := newService(t), idempotencytest.NewMemStore()
	idem, observed := newMiddleware(t, store)
	addEventHandlers(t, s, idem, false, cqrs.NewEventHandler("create-label", onPaid("label for")))
	require.NoError(t, s.channel.Publish("events", marshal(t, "E-1", LabelCreated{OrderID: "O-104"})))
	damaged := marshal(t, "E-2", OrderPaid{})
	damaged.Payload = []byte("{")
	require.NoError(t, s.channel.Publish("events", damaged))
	require.Equal(t, []idempotency.Outcome{idempotency.HandlerFailed, idempotency.HandlerFailed}, observed.outcomes())
	require.Len(t, s.dead.to("dead"), 2)
}

func TestGroupHasOneClaimAndOneTransaction(t *testing.T) {
	t.Parallel()
	s, store := newService(t), idempotencytest.NewMemStore()
	idem, observed := newMiddleware(t, store, idempotency.WithSubscriberPrefix("shipping."))
	s.router.AddMiddleware(idem.Middleware) // AddHandlersGroup returns no handler to put it on
	processor, err := newEventGroupProcessor(s.router, s.channel)
	require.NoError(t, err)
	failures := 1
	require.NoError(t, processor.AddHandlersGroup("order-events",
		cqrs.NewGroupEventHandler(onPaid("label for")),
		cqrs.NewGroupEventHandler(func(ctx context.Context, event *OrderPaid) error {
			if failures > 0 {
				failures--
				return errPrinter
			}
			return write(ctx, "mail for "+event.OrderID)
		})))
	s.run()
	msg := marshal(t, "E-1", OrderPaid{OrderID: "O-104"})
	require.NoError(t, s.channel.Publish("events", msg, msg, marshal(t, "E-2", LabelCreated{OrderID: "O-104"})))
	require.Equal(t, []string{"label for O-104", "mail for O-104"}, store.Effects(), "what the first handler wrote beside the failed one is rolled back")
	require.Equal(t, map[string]map[idempotency.Outcome]int{"shipping.order-events": {
		idempotency.HandlerFailed: 1, idempotency.Processed: 2, idempotency.Duplicate: 1,
	}}, observed.claimed(), "the ignored event is claimed, too")
}

func TestHandlerThatIsAddedToAGroupSeesNoOldEvents(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewMemStore()
	idem, _ := newMiddleware(t, store)
	msg := marshal(t, "E-1", OrderPaid{OrderID: "O-104"})
	replay := func(group string, handlers ...cqrs.GroupEventHandler) {
		s := newService(t)
		s.router.AddMiddleware(idem.Middleware)
		processor, err := newEventGroupProcessor(s.router, s.channel)
		require.NoError(t, err)
		require.NoError(t, processor.AddHandlersGroup(group, handlers...))
		s.run()
		require.NoError(t, s.channel.Publish("events", msg))
	}
	label, mail := cqrs.NewGroupEventHandler(onPaid("label for")), cqrs.NewGroupEventHandler(onPaid("mail for"))
	replay("order-events", label)
	replay("order-events", label, mail)
	require.Equal(t, []string{"label for O-104"}, store.Effects())
	replay("order-mails", mail)
	require.Equal(t, []string{"label for O-104", "mail for O-104"}, store.Effects())
}

// A command's handler that writes and fails.
func TestAckCommandHandlingErrors(t *testing.T) {
	t.Parallel()
	for name, try := range map[string]struct {
		onHandle cqrs.CommandProcessorOnHandleFn
		effects  []string
		outcome  idempotency.Outcome
		dead     int
	}{
		"commits what failed":      {nil, []string{"half of O-104"}, idempotency.Processed, 0},
		"rolls back with the mark": {onMarkRollback, nil, idempotency.HandlerFailed, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, store := newService(t), idempotencytest.NewMemStore()
			idem, observed := newMiddleware(t, store)
			s.router.AddMiddleware(s.deadLetters(), idem.Middleware)
			processor, err := newCommandProcessor(s.router, s.channel, try.onHandle)
			require.NoError(t, err)
			require.NoError(t, processor.AddHandlers(cqrs.NewCommandHandler("cancel-label", func(ctx context.Context, cmd *CancelLabel) error {
				if err := write(ctx, "half of "+cmd.OrderID); err != nil {
					return err
				}
				return errPrinter
			})))
			s.run()
			require.NoError(t, s.channel.Publish("commands", marshal(t, "C-1", CancelLabel{OrderID: "O-104"})))
			require.Equal(t, try.effects, store.Effects())
			require.Equal(t, []idempotency.Outcome{try.outcome}, observed.outcomes())
			require.Len(t, s.dead.to("dead"), try.dead)

			require.NoError(t, s.channel.Publish("commands", marshal(t, "C-2", OrderPaid{})))
			require.Equal(t, []idempotency.Outcome{try.outcome, idempotency.Processed}, observed.outcomes(), "an unknown command is acked, and so claimed, always")
		})
	}
}

// replies is a backend of requestreply that keeps what it replies.
type replies struct{ sent []error }

func (r *replies) ListenForNotifications(context.Context, requestreply.BackendListenForNotificationsParams) (<-chan requestreply.Reply[struct{}], error) {
	return nil, errors.ErrUnsupported
}

func (r *replies) OnCommandProcessed(_ context.Context, p requestreply.BackendOnCommandProcessedParams[struct{}]) error {
	r.sent = append(r.sent, p.HandleErr)
	return p.HandleErr
}

func TestRequestReplyRepliesBeforeTheCommit(t *testing.T) {
	t.Parallel()
	s, store := newService(t), idempotencytest.NewMemStore()
	idem, observed := newMiddleware(t, store)
	s.router.AddMiddleware(idem.Middleware)
	processor, err := newCommandProcessor(s.router, s.channel, nil)
	require.NoError(t, err)
	var backend replies
	require.NoError(t, processor.AddHandlers(requestreply.NewCommandHandler("cancel-label", &backend,
		func(ctx context.Context, cmd *CancelLabel) error { return write(ctx, "cancelled "+cmd.OrderID) })))
	s.run()
	store.FailCommit(idempotency.ErrRolledBack)
	msg := marshal(t, "C-1", CancelLabel{OrderID: "O-104"})
	require.NoError(t, s.channel.Publish("commands", msg, msg))
	require.Equal(t, []idempotency.Outcome{idempotency.HandlerFailed, idempotency.Processed, idempotency.Duplicate}, observed.outcomes())
	require.Equal(t, []error{nil, nil}, backend.sent, "one for the attempt that was rolled back, none for the duplicate")
}

const cqrsTables = `create table shipping_label (order_id text primary key);`

type labelHandlers struct{ bus *cqrs.EventBus }

func (h labelHandlers) createLabel(ctx context.Context, event *OrderPaid) error {
	tx, err := idempotency.TxFromContext[pgx.Tx](ctx)
	if err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `insert into shipping_label (order_id) values ($1)`, event.OrderID); err != nil {
		return err
	}
	return h.bus.Publish(ctx, &LabelCreated{OrderID: event.OrderID}) // the context leads the outbox to the transaction
}

func TestBusOnTheOutboxPublishesWithTheCommit(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, store := database(t, cqrsTables)
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, outbox.Migrate(ctx, db))
	idem, observed := newMiddleware(t, store, idempotency.WithSubscriberPrefix("shipping."))
	s := newService(t)
	router, subscriber := s.router, s.channel
	var service labelHandlers
	add := func() error {
		pub, err := outbox.New(ctx, db) // db is a *sql.DB, see stdlib.OpenDBFromPool of pgx
		if err != nil {
			return err
		}
		bus, err := newEventBus(pub)
		if err != nil {
			return err
		}
		service = labelHandlers{bus}
		processor, err := newEventProcessor(router, subscriber, true)
		if err != nil {
			return err
		}
		handler, err := processor.AddHandler(cqrs.NewEventHandler("create-label", service.createLabel))
		if err != nil {
			return err
		}
		handler.AddMiddleware(idem.Middleware) // idempotency.WithSubscriberPrefix("shipping."): "shipping.create-label"
		return nil
	}
	require.NoError(t, add())
	s.run()
	msg := marshal(t, "E-1", OrderPaid{OrderID: "O-104"})
	require.NoError(t, s.channel.Publish("events", msg, msg))
	require.Equal(t, map[string]map[idempotency.Outcome]int{"shipping.create-label": {idempotency.Processed: 1, idempotency.Duplicate: 1}}, observed.claimed())
	const state = "select (select count(*) from watermill_outbox) || ' ' || (select count(*) from shipping_label)"
	require.Equal(t, "1 1", value[string](t, pool, state))

	idem, _ = newMiddleware(t, store, idempotency.WithSubscriberID("failing"))
	require.ErrorIs(t, deliver(idem, func(msg *message.Message) error {
		if err := service.createLabel(msg.Context(), &OrderPaid{OrderID: "O-105"}); err != nil {
			return err
		}
		return errPrinter
	}, event("E-2", "")), errPrinter)
	require.Equal(t, "1 1", value[string](t, pool, state), "a rollback takes the event along")
}

func TestBusOnABrokerPublishesWhateverBecomesOfTheTransaction(t *testing.T) {
	t.Parallel()
	s, store := newService(t), idempotencytest.NewMemStore()
	idem, _ := newMiddleware(t, store)
	var broker publisher
	stamping, err := idempotency.StampEventID(&broker)
	require.NoError(t, err)
	bus, err := newEventBus(stamping)
	require.NoError(t, err)
	failures := 1
	eventHandler := cqrs.NewEventHandler("create-label", func(ctx context.Context, event *OrderPaid) error {
		if err := bus.Publish(ctx, &LabelCreated{OrderID: event.OrderID}); err != nil {
			return err
		}
		if failures > 0 {
			failures--
			return errPrinter
		}
		return write(ctx, "label for "+event.OrderID)
	})
	processor, err := newEventProcessor(s.router, s.channel, true)
	require.NoError(t, err)
	handler, err := processor.AddHandler(eventHandler)
	require.NoError(t, err)
	handler.AddMiddleware(idem.Middleware)
	s.run()
	require.NoError(t, s.channel.Publish("events", marshal(t, "E-1", OrderPaid{OrderID: "O-104"})))
	require.Equal(t, []string{"label for O-104"}, store.Effects())
	sent := broker.to("LabelCreated")
	require.Len(t, sent, 2)
	require.NotEqual(t, sent[0].UUID, sent[1].UUID)
	require.NotEqual(t, sent[0].Metadata.Get("event_id"), sent[1].Metadata.Get("event_id"), "no consumer can tell that they are one")
}

func TestBusStampsTheIDOfTheEvent(t *testing.T) {
	t.Parallel()
	var broker publisher
	bus, err := newEventBus(&broker)
	require.NoError(t, err)
	for range 2 { // a producer that tries again
		require.NoError(t, bus.Publish(t.Context(), &OrderPaid{ID: "E-1"}))
	}
	sent := broker.to("OrderPaid")
	require.NotEqual(t, sent[0].UUID, sent[1].UUID)
	require.Equal(t, "E-1", sent[0].Metadata.Get("event_id"))
	require.Equal(t, "E-1", sent[1].Metadata.Get("event_id"))
}
