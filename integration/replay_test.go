package integration_test

import (
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// failFirst fails in the first call.
func failFirst(call int) error {
	if call == 1 {
		return errFault
	}
	return nil
}

// The broker dead-letters what was nacked, and notes it in a header. An operator sends it to the original queue again, as
// it is, and sends it once too often.
func TestTrap23_DeadLetterIsReplayed(t *testing.T) {
	t.Parallel()
	overForeign(t, func(w *world) {
		rabbit, ok := w.transport.(*rabbitTransport)
		require.True(w, ok)
		rabbit.config.Consume.NoRequeueOnNack = true
		rabbit.config.Queue.Arguments = maps.Clone(rabbit.config.Queue.Arguments)
		if rabbit.config.Queue.Arguments == nil {
			rabbit.config.Queue.Arguments = make(amqp091.Table)
		}
		rabbit.config.Queue.Arguments["x-dead-letter-exchange"] = ""
		rabbit.config.Queue.Arguments["x-dead-letter-routing-key"] = w.Dead
		w.Orders += "_with_dead_letters"
		rabbit.create(w.Orders, 1)

		s := w.startForeign(failFirst)
		w.sendForeign(w.Orders, foreign{rabbit: amqp091.Publishing{MessageId: "1", Headers: amqp091.Table{"attempt": int32(1)}}})
		require.ErrorIs(w, s.await(map[idempotency.Outcome]int{idempotency.HandlerFailed: 1})[0], errFault)
		require.Empty(w, w.processed(), "rolled back")

		replay := foreign{rabbit: w.takeRabbit(w.Dead)}
		require.IsType(w, []any{}, replay.rabbit.Headers["x-death"])
		w.sendForeign(w.Orders, replay)
		s.await(map[idempotency.Outcome]int{idempotency.Processed: 1})
		w.sendForeign(w.Orders, replay)
		s.await(map[idempotency.Outcome]int{idempotency.Duplicate: 1})
		s.leave()
		require.Contains(w, s.received[1]["x-death"], `"reason":"rejected"`)
		require.Equal(w, map[string]int{"1": 1}, w.processed())
		require.Zero(w, w.unacked(w.Dead))
	}, "rabbitmq", "rabbitmq-quorum")
}

// A quorum queue counts in a header how often a message has come back.
func TestTrap23_NackOnAQuorumQueue(t *testing.T) {
	t.Parallel()
	overForeign(t, func(w *world) {
		s := w.startForeign(failFirst)
		w.sendForeign(w.Orders, foreign{rabbit: amqp091.Publishing{MessageId: "1"}})
		s.await(map[idempotency.Outcome]int{idempotency.HandlerFailed: 1, idempotency.Processed: 1})
		w.sendForeign(w.Orders, foreign{rabbit: amqp091.Publishing{MessageId: "1"}})
		s.await(map[idempotency.Outcome]int{idempotency.Duplicate: 1})
		s.leave()
		require.NotContains(w, s.received[0], "x-delivery-count")
		require.Equal(w, "1", s.received[1]["x-delivery-count"])
		require.Equal(w, map[string]int{"1": 1}, w.processed())
	}, "rabbitmq-quorum")
}

// Another content under a known ID is not processed, and not dropped: it waits in quarantine, as it came.
func TestConflictGoesToQuarantine(t *testing.T) {
	t.Parallel()
	overForeign(t, func(w *world) {
		s := w.startForeign(succeed)
		send := func(payload string) {
			w.Helper()
			w.sendForeign(w.Orders, foreign{
				rabbit: amqp091.Publishing{MessageId: "1", Body: []byte(payload)}, kafka: record(payload, "event_id", "1"),
			})
		}
		send(`{"order":1}`)
		s.await(map[idempotency.Outcome]int{idempotency.Processed: 1})
		send(`{"order":2}`)
		send(`{"order":2}`)
		errs := s.await(map[idempotency.Outcome]int{idempotency.Conflict: 2})
		send(`{"order":1}`)
		s.await(map[idempotency.Outcome]int{idempotency.Duplicate: 1})
		s.leave()

		for _, err := range errs {
			var conflict *idempotency.ConflictError
			require.ErrorAs(w, err, &conflict)
			require.Equal(w, []string{"payload"}, conflict.Differs)
			require.Equal(w, idempotency.Key{SubscriberID: "foreign", EventID: "1"}, conflict.Key)
		}
		require.Equal(w, map[string]int{"1": 1}, w.counts("select event_id, count(*) from effect where handler = $1 group by 1", `{"order":1}`))
		require.Equal(w, map[string]int{"1": 1}, w.processed())
		require.Equal(w, 2, w.unacked(w.Dead))

		payload, headers := w.firstForeign(w.Dead)
		require.Equal(w, `{"order":2}`, payload)
		require.Contains(w, headers[middleware.ReasonForPoisonedKey], idempotency.ErrConflict.Error())
		require.Equal(w, w.Orders, headers[middleware.PoisonedTopicKey])
		require.Equal(w, "foreign", headers[middleware.PoisonedHandlerKey])
	})
}

// The time of a record, which its producer has set, is in the message's context.
func TestReplayHorizonByTheTimeOfKafka(t *testing.T) {
	t.Parallel()
	recordTime := func(msg *message.Message, _ string) (time.Time, error) {
		at, ok := kafka.MessageTimestampFromCtx(msg.Context())
		if !ok {
			return at, idempotency.ErrMissingTime
		}
		return at, nil
	}
	overForeign(t, func(w *world) {
		s := w.startForeign(succeed, idempotency.WithReplayHorizon(time.Hour, recordTime))
		send := func(id string, age time.Duration) {
			w.Helper()
			msg := record(`{}`, "event_id", id)
			msg.Timestamp = time.Now().Add(-age)
			w.sendForeign(w.Orders, foreign{kafka: msg})
		}
		send("1", 30*time.Minute)
		s.await(map[idempotency.Outcome]int{idempotency.Processed: 1})
		send("1", 2*time.Hour)
		s.await(map[idempotency.Outcome]int{idempotency.Duplicate: 1}) // it has a record, however old it is
		send("2", 2*time.Hour)
		require.ErrorIs(w, s.await(map[idempotency.Outcome]int{idempotency.Permanent: 1})[0], idempotency.ErrBeyondHorizon)
		s.leave()
		require.Equal(w, map[string]int{"1": 1}, w.processed())
		require.Equal(w, 1, w.unacked(w.Dead))
	}, "kafka")
}

// takeRabbit takes the first message off a queue, as an operator's tool does that sends it on.
func (w *world) takeRabbit(queue string) (publishing amqp091.Publishing) {
	w.Helper()
	rabbit, ok := w.transport.(*rabbitTransport)
	require.True(w, ok)
	rabbit.withChannel(func(c *amqp091.Channel) {
		require.Eventually(w, func() bool {
			delivery, ok, err := c.Get(queue, true)
			require.NoError(w, err)
			publishing = amqp091.Publishing{MessageId: delivery.MessageId, Headers: delivery.Headers, Body: delivery.Body}
			return ok
		}, patience, 10*time.Millisecond)
	})
	return publishing
}

// firstForeign reads the first message of a topic, past Watermill.
func (w *world) firstForeign(topic string) (payload string, headers map[string]any) {
	w.Helper()
	transport, ok := w.transport.(*kafkaTransport)
	if !ok {
		publishing := w.takeRabbit(topic)
		return string(publishing.Body), publishing.Headers
	}
	consumer, err := sarama.NewConsumerFromClient(transport.client)
	require.NoError(w, err)
	partition, err := consumer.ConsumePartition(topic, 0, sarama.OffsetOldest)
	require.NoError(w, err)
	msg := receive(w, partition.Messages())
	headers = make(map[string]any)
	for _, header := range msg.Headers {
		headers[string(header.Key)] = string(header.Value)
	}
	require.NoError(w, errors.Join(partition.Close(), consumer.Close()))
	return string(msg.Value), headers
}
