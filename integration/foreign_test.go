package integration_test

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

// foreign is a message of a producer that is not Watermill, on one kind of broker, and what becomes of it.
type foreign struct {
	rabbit amqp091.Publishing
	kafka  sarama.ProducerMessage

	key string
	err error
}

const structured = `{"specversion":"1.0","type":"order.placed","source":"/shop","id":"structured","data":{"id":"not this one"}}`

// onRabbit are messages by amqp091-go.
var onRabbit = map[string]foreign{
	"message ID": {rabbit: amqp091.Publishing{MessageId: "property"}, key: "property"},
	"message ID beside headers of all kinds": {key: "beside", rabbit: amqp091.Publishing{MessageId: "beside", Headers: amqp091.Table{
		"retries": int32(3), "share": 0.5, "sampled": true, "at": time.Unix(1, 0), "nothing": nil, "raw": []byte{0xff},
		"price": amqp091.Decimal{Scale: 2, Value: 199}, "tags": []any{"a", int64(1)}, "trace": amqp091.Table{"span": int64(7)},
	}}},
	"header of bytes":   {rabbit: amqp091.Publishing{Headers: amqp091.Table{"event_id": []byte("bytes")}}, key: "bytes"},
	"header of integer": {rabbit: amqp091.Publishing{Headers: amqp091.Table{"event_id": int64(42)}}, key: "42"},
	"CloudEvents, colon": {key: "/shop colon", rabbit: amqp091.Publishing{ContentType: "application/json", Headers: amqp091.Table{
		"cloudEvents:specversion": "1.0", "cloudEvents:type": "order.placed", "cloudEvents:source": "/shop", "cloudEvents:id": "colon",
	}}},
	"CloudEvents, underscore": {key: "/shop underscore", rabbit: amqp091.Publishing{MessageId: "not this one", Headers: amqp091.Table{
		"cloudEvents_source": "/shop", "cloudEvents_id": "underscore",
	}}},
	"CloudEvents, as in HTTP": {key: "/shop http", rabbit: amqp091.Publishing{Headers: amqp091.Table{"ce-source": "/shop", "ce-id": "http"}}},
	"CloudEvents, structured": {key: "/shop structured", rabbit: amqp091.Publishing{
		ContentType: "application/cloudevents+json; charset=utf-8", Body: []byte(structured),
	}},
	"CloudEvents, batch": {err: idempotency.ErrInvalidKey, rabbit: amqp091.Publishing{
		ContentType: "application/cloudevents-batch+json", Body: []byte("[" + structured + "]"),
	}},
	"CloudEvents, two IDs": {err: idempotency.ErrKeyAmbiguous, rabbit: amqp091.Publishing{Headers: amqp091.Table{
		"cloudEvents:source": "/shop", "cloudEvents:id": "one", "ce-id": "two",
	}}},
	"CloudEvents, no source":  {rabbit: amqp091.Publishing{Headers: amqp091.Table{"cloudEvents:id": "alone"}}, err: idempotency.ErrInvalidKey},
	"empty ID":                {rabbit: amqp091.Publishing{MessageId: "not this one", Headers: amqp091.Table{"event_id": ""}}, err: idempotency.ErrKeyEmpty},
	"ID without a value":      {rabbit: amqp091.Publishing{Headers: amqp091.Table{"event_id": nil}}, err: idempotency.ErrKeyEmpty},
	"ID that is no UTF-8":     {rabbit: amqp091.Publishing{MessageId: "\xff"}, err: idempotency.ErrKeyNotUTF8},
	"ID with a NUL":           {rabbit: amqp091.Publishing{Headers: amqp091.Table{"event_id": "a\x00"}}, err: idempotency.ErrKeyHasNUL},
	"nothing that identifies": {rabbit: amqp091.Publishing{Body: []byte("a body")}, err: idempotency.ErrMissingKey},
	"nothing":                 {err: idempotency.ErrMissingKey},
}

// onKafka are messages by sarama.
var onKafka = map[string]foreign{
	"header":                    {kafka: record(`{}`, "event_id", "header"), key: "header"},
	"header, in a tombstone":    {kafka: sarama.ProducerMessage{Headers: record("", "event_id", "tombstone").Headers}, key: "tombstone"},
	"header, twice: the last":   {kafka: record(`{}`, "event_id", "first", "event_id", "last"), key: "last"},
	"CloudEvents":               {kafka: record(`{}`, "content-type", "application/json", "ce_specversion", "1.0", "ce_type", "order.placed", "ce_source", "/shop", "ce_id", "1"), key: "/shop 1"},
	"CloudEvents, other source": {kafka: record(`{}`, "ce_source", "/a b", "ce_id", "1"), key: `/a\ b 1`},
	"CloudEvents, in quotes":    {kafka: record(`{}`, "ce_source", `"/shop"`, "ce_id", `"quoted"`), key: "/shop quoted"},
	"CloudEvents, structured":   {kafka: record(structured, "content-type", "application/cloudevents+json"), key: "/shop structured"},
	"CloudEvents, Avro":         {kafka: record("\x00", "content-type", "application/cloudevents+avro"), err: idempotency.ErrInvalidKey},
	"CloudEvents, two IDs":      {kafka: record(`{}`, "ce_source", "/shop", "ce_id", "one", "ce-id", "two"), err: idempotency.ErrKeyAmbiguous},
	"CloudEvents, two modes": {
		kafka: record(structured, "content-type", "application/cloudevents+json", "ce_id", "binary"), err: idempotency.ErrKeyAmbiguous,
	},
	"CloudEvents, no JSON":    {kafka: record("{", "content-type", "application/cloudevents+json"), err: idempotency.ErrInvalidKey},
	"ID without a value":      {kafka: record(`{}`, "event_id", ""), err: idempotency.ErrKeyEmpty},
	"ID that is no UTF-8":     {kafka: record(`{}`, "ce_source", "/shop", "ce_id", "\xff"), err: idempotency.ErrKeyNotUTF8},
	"ID with a NUL":           {kafka: record(`{}`, "event_id", "a\x00"), err: idempotency.ErrKeyHasNUL},
	"nothing that identifies": {kafka: record(`{}`), err: idempotency.ErrMissingKey},
}

func record(value string, headers ...string) sarama.ProducerMessage {
	msg := sarama.ProducerMessage{Value: sarama.StringEncoder(value)}
	for pair := range slices.Chunk(headers, 2) {
		msg.Headers = append(msg.Headers, sarama.RecordHeader{Key: []byte(pair[0]), Value: []byte(pair[1])})
	}
	return msg
}

// foreignKey is for producers of all these kinds.
var foreignKey = idempotency.FirstOf(idempotency.CloudEventKey(idempotency.UnquoteCloudEvents()),
	idempotency.MetadataKey(idempotency.EventIDMetadata), idempotency.MetadataKey(amqpmessage.MessageID))

// overForeign runs a test over the brokers that producers other than Watermill send to.
func overForeign(t *testing.T, run func(w *world), only ...string) {
	t.Helper()
	if len(only) == 0 {
		only = []string{"kafka", "rabbitmq", "rabbitmq-quorum"}
	}
	overTransports(t, func(w *world) {
		if rabbit, ok := w.transport.(*rabbitTransport); ok {
			rabbit.config.Marshaler = amqpmessage.Marshaler{}
		}
		run(w)
	}, only...)
}

// sendForeign sends a message to a topic or queue, past Watermill.
func (w *world) sendForeign(topic string, f foreign) {
	w.Helper()
	switch transport := w.transport.(type) {
	case *rabbitTransport:
		transport.withChannel(func(c *amqp091.Channel) {
			require.NoError(w, c.Confirm(false))
			confirmed, err := c.PublishWithDeferredConfirmWithContext(w.Context(), "", topic, true, false, f.rabbit)
			require.NoError(w, err)
			require.True(w, confirmed.Wait())
		})
	case *kafkaTransport:
		producer, err := sarama.NewSyncProducerFromClient(transport.client)
		require.NoError(w, err)
		msg := f.kafka
		msg.Topic = topic
		_, _, err = producer.SendMessage(&msg)
		require.NoError(w, err)
		require.NoError(w, producer.Close())
	default:
		require.FailNow(w, "no foreign client", "%T", transport)
	}
}

// foreignService is a service with one handler, and what it was told of each delivery.
type foreignService struct {
	*service
	mu       sync.Mutex
	received []message.Metadata
	events   []idempotency.Event
}

// startForeign starts a service that writes down the event IDs and puts messages that are permanently at fault aside.
func (w *world) startForeign(handle func(call int) error, options ...idempotency.Option) *foreignService {
	w.Helper()
	s := &foreignService{}
	poison, err := middleware.PoisonQueueWithFilter(w.ownPublisher(), w.Dead, idempotency.IsPermanent)
	require.NoError(w, err)
	s.service = w.newService(faults{
		outer: []message.HandlerMiddleware{s.receive, poison},
		options: append([]idempotency.Option{
			idempotency.WithKey(foreignKey),
			idempotency.WithObserver(idempotency.ObserverFunc(func(_ context.Context, e idempotency.Event) {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.events = append(s.events, e)
			})),
		}, options...),
	})
	calls := counter()
	s.router.AddConsumerHandler("foreign", w.Orders, w.subscriber(w.Orders),
		idempotency.ConsumerHandler(func(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
			claim, _ := idempotency.ClaimFromContext(ctx)
			if err := write(ctx, tx, string(msg.Payload), claim.EventID); err != nil {
				return err
			}
			return handle(calls())
		}))
	s.run()
	return s
}

func succeed(int) error { return nil }

func (s *foreignService) receive(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		s.mu.Lock()
		s.received = append(s.received, maps.Clone(msg.Metadata))
		s.mu.Unlock()
		return next(msg)
	}
}

// await waits for exactly these outcomes, in any order, since the last call, and returns the errors among them.
func (s *foreignService) await(want map[idempotency.Outcome]int) (errs []error) {
	s.Helper()
	require.Eventually(s, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		got := make(map[idempotency.Outcome]int)
		errs = nil
		for _, e := range s.events {
			got[e.Outcome]++
			if e.Err != nil {
				errs = append(errs, e.Err)
			}
		}
		if !maps.Equal(want, got) {
			return false
		}
		s.events = nil
		return true
	}, patience, 5*time.Millisecond, "%v", lazy(s.outcomes))
	return errs
}

func (s *foreignService) outcomes() (text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.events {
		text += e.Outcome.String() + " " + e.Key.String() + "\n"
	}
	return text
}

// leave closes the service once all messages have been acked: one more is handed over only then.
func (s *foreignService) leave() {
	s.Helper()
	last := foreign{rabbit: amqp091.Publishing{MessageId: "the end"}, kafka: record("", "event_id", "the end")}
	s.sendForeign(s.Orders, last)
	s.await(map[idempotency.Outcome]int{idempotency.Processed: 1})
	s.close()
}

// processed returns how often each event has had its effect.
func (w *world) processed() map[string]int {
	w.Helper()
	return w.counts("select event_id, count(*) from effect where event_id <> 'the end' group by 1")
}

// Every kind of message is sent twice, as a producer does that has not heard the answer: one effect, or none and both put
// aside.
func TestForeignProducers(t *testing.T) {
	t.Parallel()
	overForeign(t, func(w *world) {
		kinds := onRabbit
		if w.Transport == "kafka" {
			kinds = onKafka
		}
		s := w.startForeign(succeed)
		want, refused := make(map[string]int), 0
		for name, kind := range kinds {
			w.sendForeign(w.Orders, kind)
			w.sendForeign(w.Orders, kind)
			if kind.err == nil {
				want[kind.key] = 1
				s.await(map[idempotency.Outcome]int{idempotency.Processed: 1, idempotency.Duplicate: 1})
			} else {
				refused += 2
				for _, err := range s.await(map[idempotency.Outcome]int{idempotency.Permanent: 2}) {
					require.ErrorIs(w, err, kind.err, name)
				}
			}
			require.Equal(w, want, w.processed(), name)
		}
		s.leave()
		require.Equal(w, refused, w.unacked(w.Dead), "put aside")
	})
}
