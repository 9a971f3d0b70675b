package guides_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
	"github.com/watermill-idempotency/idempotency/postgres"
)

// orderVersion is the event ID of producers that stamp none: an order has each version once.
func orderVersion(msg *message.Message) (string, error) {
	var event struct {
		OrderID string `json:"orderId"`
		Version int    `json:"version"`
	}
	if err := json.Unmarshal(msg.Payload, &event); err != nil {
		return "", err
	}
	if event.OrderID == "" || event.Version == 0 {
		return "", fmt.Errorf("%w: the payload has no orderId or no version", idempotency.ErrMissingKey)
	}
	return fmt.Sprintf("order/%s/%d", event.OrderID, event.Version), nil
}

// oldestDuplicate is an observer: the retention of the store must exceed what it has seen.
type oldestDuplicate struct {
	mu  sync.Mutex
	age time.Duration
}

func (o *oldestDuplicate) Observe(_ context.Context, e idempotency.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.age = max(o.age, e.Age) // 0 for what is no duplicate and no conflict
}

func payloadHash(msg *message.Message) (string, error) {
	sum := sha256.Sum256(msg.Payload)
	return hex.EncodeToString(sum[:]), nil
}

// producers make a message of one event each time they are called; what they return publishes it each time that is called.
// The payload is serialised differently each time.
var producers = map[string]struct {
	key  idempotency.KeyFunc
	make func(pub message.Publisher, serialisation int) func() error
}{
	"event ID, made with the event": {idempotency.MetadataKey("event_id"), func(pub message.Publisher, n int) func() error {
		return sendWith(pub, n, message.Metadata{"event_id": "018f30b5-4df1-7baf-9bdb-9f8b89f7b91d"})
	}},
	"event ID, stamped at publish": {idempotency.MetadataKey("event_id"), func(pub message.Publisher, n int) func() error {
		stamping, err := idempotency.StampEventID(pub)
		if err != nil {
			return func() error { return err }
		}
		return sendWith(stamping, n, nil)
	}},
	"CloudEvents, source and id": {idempotency.CloudEventKey(), func(pub message.Publisher, n int) func() error {
		return sendWith(pub, n, message.Metadata{"ce_source": "urn:acme:orders", "ce_id": "1"})
	}},
	"business key, such as order and version": {orderVersion, func(pub message.Publisher, n int) func() error {
		return sendWith(pub, n, nil)
	}},
	"Watermill's UUID": {idempotency.MessageUUID(), func(pub message.Publisher, n int) func() error {
		return sendWith(pub, n, nil)
	}},
	"UUID of a CQRS bus": {idempotency.MessageUUID(), func(pub message.Publisher, _ int) func() error {
		bus, err := cqrs.NewEventBusWithConfig(pub, cqrs.EventBusConfig{
			GeneratePublishTopic: func(cqrs.GenerateEventPublishTopicParams) (string, error) { return "orders", nil },
			Marshaler:            cqrs.JSONMarshaler{},
		})
		if err != nil {
			return func() error { return err }
		}
		return func() error { return bus.Publish(context.Background(), &OrderPaid{OrderID: "O-104"}) }
	}},
	"hash of the payload": {payloadHash, func(pub message.Publisher, n int) func() error {
		return sendWith(pub, n, nil)
	}},
}

func sendWith(pub message.Publisher, serialisation int, metadata message.Metadata) func() error {
	payload := [...]string{`{"orderId":"O-104","version":1}`, `{"version":1,"orderId":"O-104"}`}[serialisation]
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	for name, value := range metadata {
		msg.Metadata.Set(name, value)
	}
	return func() error { return pub.Publish("orders", msg) }
}

// The columns of the table in keys.md are tried, for the identifiers that need no broker.
func TestTableOfIdentifiers(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("keys.md")
	require.NoError(t, err)
	for name, producer := range producers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stable := func(sent []*message.Message) string {
				require.Len(t, sent, 2)
				first, err := producer.key(sent[0])
				require.NoError(t, err)
				second, err := producer.key(sent[1])
				require.NoError(t, err)
				require.NotEmpty(t, first)
				if first == second {
					return "yes"
				}
				return "no"
			}

			var retried publisher
			publish := producer.make(&retried, 0)
			require.NoError(t, publish())
			require.NoError(t, publish())

			// A forwarder, and a router that moves messages to another topic.
			var passed publisher
			s := newService(t)
			_, err := forwarder.NewForwarder(s.channel, &passed, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: "outbox", Router: s.router})
			require.NoError(t, err)
			s.router.AddHandler("move", "orders", s.channel, "orders", &passed, message.PassthroughHandler)
			s.run()
			require.NoError(t, producer.make(tee{&passed, forwarder.NewPublisher(s.channel, forwarder.PublisherConfig{ForwarderTopic: "outbox"})}, 0)())
			forwarded := passed.to("orders")
			passed = publisher{}
			require.NoError(t, producer.make(tee{&passed, s.channel}, 0)())
			moved := passed.to("orders")

			var original, dead publisher
			require.NoError(t, producer.make(&original, 0)())
			poison, err := middleware.PoisonQueue(&dead, "orders")
			require.NoError(t, err)
			_, err = poison(func(*message.Message) ([]*message.Message, error) { return nil, errors.New("out of paper") })(original.to("orders")[0].Copy())
			require.NoError(t, err)

			var serialised publisher
			require.NoError(t, producer.make(&serialised, 0)())
			require.NoError(t, producer.make(&serialised, 1)())

			require.Contains(t, string(guide), "| "+strings.Join([]string{
				name, stable(retried.to("orders")), stable(forwarded), stable(append(original.to("orders"), dead.to("orders")...)),
				stable(moved), stable(serialised.to("orders")),
			}, " | ")+" |")
		})
	}
}

// tee publishes to both.
type tee [2]message.Publisher

func (p tee) Publish(topic string, messages ...*message.Message) error {
	return errors.Join(p[0].Publish(topic, messages...), p[1].Publish(topic, messages...))
}

func (p tee) Close() error { return errors.Join(p[0].Close(), p[1].Close()) }

func TestKeyOfOneOrTheOther(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewMemStore()
	idem, err := idempotency.New(store,
		idempotency.WithSubscriberID("shipping.create-label.v1"),
		idempotency.WithKey(idempotency.FirstOf(
			idempotency.CloudEventKey(),         // "urn:acme:orders 1"
			idempotency.MetadataKey("event_id"), // "018f30b5-4df1-7baf-9bdb-9f8b89f7b91d"
			orderVersion,                        // "order/O-104/1"
		)))
	require.NoError(t, err)

	var processed []string
	handler := func(msg *message.Message) error {
		claim, _ := idempotency.ClaimFromContext(msg.Context())
		processed = append(processed, claim.EventID)
		return nil
	}
	msg := message.NewMessage("", []byte(`{"orderId":"O-104","version":1}`))
	require.NoError(t, deliver(idem, handler, msg.Copy()))
	msg.Metadata.Set("event_id", "018f30b5-4df1-7baf-9bdb-9f8b89f7b91d")
	require.NoError(t, deliver(idem, handler, msg.Copy()))
	msg.Metadata.Set("ce_source", "urn:acme:orders")
	msg.Metadata.Set("ce_id", "1")
	require.NoError(t, deliver(idem, handler, msg.Copy()))
	require.Equal(t, []string{"order/O-104/1", "018f30b5-4df1-7baf-9bdb-9f8b89f7b91d", "urn:acme:orders 1"}, processed,
		"an ID that goes before another makes old events new")
	require.ErrorIs(t, deliver(idem, handler, message.NewMessage("", []byte(`{}`))), idempotency.ErrMissingKey)
}

func TestQuotedAndStructuredCloudEvents(t *testing.T) {
	t.Parallel()
	quoted := message.NewMessage("", nil)
	quoted.Metadata = message.Metadata{"ce_source": `"urn:acme:orders"`, "ce_id": `"1"`}
	structured := message.NewMessage("", []byte(`{"specversion":"1.0","id":"1","source":"urn:acme:orders","type":"order.placed"}`))
	for _, try := range []struct {
		key idempotency.KeyFunc
		msg *message.Message
	}{
		{idempotency.CloudEventKey(idempotency.UnquoteCloudEvents()), quoted},
		{idempotency.StructuredCloudEventKey(), structured},
	} {
		id, err := try.key(try.msg)
		require.NoError(t, err)
		require.Equal(t, "urn:acme:orders 1", id)
	}
}

func succeed(*message.Message) error { return nil }

func TestStampingAtTheProducer(t *testing.T) {
	t.Parallel()
	var sent publisher
	brokerPublisher := &sent
	pub, err := idempotency.StampEventID(brokerPublisher)
	require.NoError(t, err)
	require.NoError(t, pub.Publish("orders", message.NewMessage("uuid", nil)))
	id, err := uuid.Parse(sent.to("orders")[0].Metadata.Get("event_id"))
	require.NoError(t, err)
	require.EqualValues(t, 7, id.Version())

	passedOn := message.NewMessage("uuid", nil) // delivered twice to a router that stamps
	require.NoError(t, pub.Publish("other", passedOn.Copy(), passedOn.Copy()))
	require.NotEqual(t, sent.to("other")[0].Metadata.Get("event_id"), sent.to("other")[1].Metadata.Get("event_id"))

	order := struct{ EventID, JSON string }{"018f30b5-4df1-7baf-9bdb-9f8b89f7b91d", `{"orderId":"O-104"}`}
	msg := message.NewMessage(order.EventID, []byte(order.JSON))
	msg.Metadata.Set(idempotency.EventIDMetadata, order.EventID) // order.EventID was stored with the order
	require.NoError(t, pub.Publish("orders", msg))
	require.Equal(t, order.EventID, sent.to("orders")[1].Metadata.Get("event_id"))
}

// An event without an ID goes to the dead-letter topic, and those behind it go on.
func TestEventsWithoutAKeyGoToTheDeadLetterTopic(t *testing.T) {
	t.Parallel()
	s := newService(t)
	store := idempotencytest.NewMemStore()
	idem, _ := newMiddleware(t, store)
	s.router.AddMiddleware(s.deadLetters(), idem.Middleware)
	s.router.AddConsumerHandler("create-label", "orders", s.channel, idempotency.ConsumerHandler(
		func(_ context.Context, tx *idempotencytest.MemTx, msg *message.Message) error {
			return tx.Write(string(msg.Payload))
		}))
	s.run()
	require.NoError(t, s.channel.Publish("orders", message.NewMessage("uuid", []byte("no key")), event("1", "key")))
	require.Equal(t, []string{"key"}, store.Effects())
	require.Len(t, s.dead.to("dead"), 1)
	require.Contains(t, s.dead.to("dead")[0].Metadata.Get(middleware.ReasonForPoisonedKey), "event ID is missing")
}

func TestContentsUnderOneID(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewMemStore()
	idem, err := idempotency.New(store,
		idempotency.WithSubscriberID("shipping.create-label.v1"),
		idempotency.WithTypeMetadata("event_type"))
	require.NoError(t, err)

	placed := func(eventType, payload string) *message.Message {
		msg := event("1", payload)
		msg.Metadata.Set("event_type", eventType)
		return msg
	}
	require.NoError(t, deliver(idem, succeed, placed("placed", `{"a":1,"b":2}`)))
	require.NoError(t, deliver(idem, succeed, placed("placed", `{"a":1,"b":2}`)))

	err = deliver(idem, succeed, placed("paid", `{"a":1,"b":3}`))
	var conflict *idempotency.ConflictError
	require.ErrorAs(t, err, &conflict)
	require.Equal(t, []string{"type", "payload"}, conflict.Differs)
	require.True(t, idempotency.IsPermanent(err))
}

func TestRetentionShorterThanTheHorizonIsLogged(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, _ := database(t, "select 1")
	store, err := postgres.New(ctx, pool, postgres.WithRetention(45*24*time.Hour))
	require.NoError(t, err)
	for horizon, logged := range map[time.Duration]int{44 * 24 * time.Hour: 0, 46 * 24 * time.Hour: 1} {
		logs := watermill.NewCaptureLogger()
		idem, _ := newMiddleware(t, store, idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(logs),
			idempotency.WithReplayHorizon(horizon, idempotency.EventIDTime()))
		require.NoError(t, deliver(idem, succeed, event(uuid.Must(uuid.NewV7()).String(), "")))
		require.Len(t, logs.Captured()[watermill.ErrorLogLevel], logged)
	}
}

func TestReplayHorizon(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewMemStore()
	oldest := &oldestDuplicate{}
	idem, err := idempotency.New(store,
		idempotency.WithSubscriberID("shipping.create-label.v1"),
		idempotency.WithObserver(oldest),
		idempotency.WithReplayHorizon(30*24*time.Hour, idempotency.FirstTime(
			idempotency.CloudEventTime(),            // "time", where producers set it
			idempotency.MetadataTime("occurred_at"), // RFC 3339
			idempotency.EventIDTime(),               // UUIDv7 and ULID have the time in them
		)))
	require.NoError(t, err)

	at := func(id, name string, days int) *message.Message {
		msg := event(id, "")
		if name != "" {
			msg.Metadata.Set(name, time.Now().AddDate(0, 0, -days).Format(time.RFC3339))
		}
		return msg
	}
	require.NoError(t, deliver(idem, succeed, at("1", "ce_time", 29)))
	require.NoError(t, deliver(idem, succeed, at("1", "ce_time", 29)))
	require.ErrorIs(t, deliver(idem, succeed, at("2", "occurred_at", 31)), idempotency.ErrBeyondHorizon)
	require.ErrorIs(t, deliver(idem, succeed, at("018f30b5-4df1-7baf-9bdb-9f8b89f7b91d", "", 0)), idempotency.ErrBeyondHorizon)
	require.ErrorIs(t, deliver(idem, succeed, at("3", "", 0)), idempotency.ErrMissingTime)
	require.NoError(t, deliver(idem, succeed, at(uuid.Must(uuid.NewV7()).String(), "", 0)))
	require.Positive(t, oldest.age)
	require.Less(t, oldest.age, time.Hour)
}
