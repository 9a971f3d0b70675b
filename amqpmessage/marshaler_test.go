package amqpmessage_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

var sent = time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 3600))

// headers are all types of AMQP, and the text that they become.
var headers = map[string]struct {
	value any
	text  string
}{
	"nothing":          {nil, ""},
	"string":           {"s", "s"},
	"bytes":            {[]byte("b\xff\x00"), "b\xff\x00"},
	"bool":             {true, "true"},
	"int8":             {int8(-8), "-8"},
	"uint8":            {uint8(200), "200"},
	"int16":            {int16(-16), "-16"},
	"uint16":           {uint16(16), "16"},
	"int32":            {int32(-32), "-32"},
	"uint32":           {uint32(math.MaxUint32), "4294967295"},
	"int64":            {int64(math.MinInt64), "-9223372036854775808"},
	"float32":          {float32(0.1), "0.1"},
	"float64":          {123456789012345678.0, "123456789012345680"},
	"not a number":     {math.NaN(), "NaN"},
	"infinity":         {math.Inf(-1), "-Inf"},
	"decimal":          {amqp091.Decimal{Scale: 2, Value: -5}, "-0.05"},
	"whole decimal":    {amqp091.Decimal{Value: 7}, "7"},
	"smallest decimal": {amqp091.Decimal{Scale: 255, Value: 1}, "0." + strings.Repeat("0", 254) + "1"},
	"time":             {sent, "2026-01-02T02:04:05Z"},
	"last time":        {time.Unix(math.MaxInt64, 0), time.Unix(math.MaxInt64, 0).UTC().Format(time.RFC3339)},
	"table":            {amqp091.Table{"b": int64(1), "a": amqp091.Table{"c": "<"}, "n": nil}, `{"a":{"c":"\u003c"},"b":1,"n":null}`},
	"array": {
		[]any{"x", []byte("y"), sent, 0.5, float32(0.1), amqp091.Decimal{Scale: 1, Value: 15}, false},
		`["x","y","2026-01-02T02:04:05Z",0.5,0.1,1.5,false]`,
	},
	"array of none": {[]any{math.NaN(), float32(math.Inf(1))}, `["NaN","+Inf"]`},
	"empty array":   {[]any{}, "[]"},
	"":              {"without a name", "without a name"},
}

func TestUnmarshalTurnsEveryTypeIntoText(t *testing.T) {
	t.Parallel()
	table, want := amqp091.Table{}, message.Metadata{}
	for name, header := range headers {
		table[name], want[name] = header.value, header.text
	}
	require.NoError(t, table.Validate(), "what AMQP does not have needs no test")
	msg, err := amqpmessage.Marshaler{}.Unmarshal(amqp091.Delivery{Headers: table, Body: []byte("body")})
	require.NoError(t, err)
	require.Equal(t, want, msg.Metadata)
	require.Equal(t, message.Payload("body"), msg.Payload)
	require.Empty(t, msg.UUID)
}

func TestProperties(t *testing.T) {
	t.Parallel()
	delivery := amqp091.Delivery{
		MessageId: "m", CorrelationId: "c", Type: "t", AppId: "a", ContentType: "text/plain", ContentEncoding: "gzip", ReplyTo: "r",
		Timestamp: sent, Priority: 9, Expiration: "1", UserId: "guest", DeliveryMode: amqp091.Transient,
	}
	msg, err := amqpmessage.Marshaler{}.Unmarshal(delivery)
	require.NoError(t, err)
	require.Equal(t, message.Metadata{
		"message_id": "m", "correlation_id": "c", "type": "t", "app_id": "a", "content_type": "text/plain", "content_encoding": "gzip",
		"reply_to": "r", "timestamp": "2026-01-02T02:04:05Z",
	}, msg.Metadata)
	require.Equal(t, "m", msg.UUID, "there is no other")

	publishing, err := amqpmessage.Marshaler{}.Marshal(msg)
	require.NoError(t, err)
	require.Equal(t, amqp091.Publishing{
		Headers: amqp091.Table{
			"message_id": "m", "correlation_id": "c", "type": "t", "app_id": "a", "content_type": "text/plain", "content_encoding": "gzip",
			"reply_to": "r", "timestamp": "2026-01-02T02:04:05Z", amqp.DefaultMessageUUIDHeaderKey: "m",
		},
		MessageId: "m", CorrelationId: "c", Type: "t", AppId: "a", ContentType: "text/plain", ContentEncoding: "gzip", ReplyTo: "r",
		Timestamp: sent.UTC(), DeliveryMode: amqp091.Persistent,
	}, publishing)
}

func TestPropertiesThatDoNotFitAreHeaders(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 256)
	for name, value := range map[string]string{
		"message_id": long, "type": long, "timestamp": "yesterday", "reply_to": "amq.rabbitmq.reply-to",
	} {
		publishing, err := amqpmessage.Marshaler{}.Marshal(withMetadata(name, value))
		require.NoError(t, err)
		require.Equal(t, amqp091.Publishing{Headers: amqp091.Table{name: value}, DeliveryMode: amqp091.Persistent}, publishing)
	}

	// A property has whole seconds, and its header is exact.
	exact := withMetadata("timestamp", "2026-01-02T03:04:05.678+01:00")
	require.Equal(t, exact.Metadata, roundTrip(t, exact).Metadata)
}

func TestHeaderWinsOverProperty(t *testing.T) {
	t.Parallel()
	msg, err := amqpmessage.Marshaler{}.Unmarshal(amqp091.Delivery{
		MessageId: "property", Timestamp: sent, Headers: amqp091.Table{"message_id": "header", "timestamp": int32(1)},
	})
	require.NoError(t, err)
	require.Equal(t, message.Metadata{"message_id": "header", "timestamp": "1"}, msg.Metadata)
}

func TestTrap23_WhatRabbitMQOwnsIsNotPublished(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"x-death", "x-first-death-queue", "x-first-death-reason", "x-first-death-exchange", "x-last-death-queue", "x-delivery-count",
		"x-acquired-count", "x-received-from", "x-shovelled", "x-shovelled-timestamp", "x-stream-offset", "CC", "BCC",
	} {
		publishing, err := amqpmessage.Marshaler{}.Marshal(withMetadata(name, "[]"))
		require.NoError(t, err)
		require.Empty(t, publishing.Headers, name)
	}
	for _, name := range []string{"x-deaths", "x-stream-filter-value", "cc", "x-retries"} {
		publishing, err := amqpmessage.Marshaler{}.Marshal(withMetadata(name, "1"))
		require.NoError(t, err)
		require.Equal(t, amqp091.Table{name: "1"}, publishing.Headers)
	}
}

func TestDefaultMarshalerOnTheOtherSide(t *testing.T) {
	t.Parallel()
	msg := message.NewMessage("uuid", []byte("body"))
	msg.Metadata = message.Metadata{"event_id": "e", "message_id": "m", "type": "t", "timestamp": "2026-01-02T03:04:05Z", "correlation_id": "c"}
	for name, key := range map[string]string{"default header": "", "another header": "id"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ours, theirs := amqpmessage.Marshaler{MessageUUIDHeaderKey: key}, amqp.DefaultMarshaler{MessageUUIDHeaderKey: key}
			for _, pair := range [][2]amqp.Marshaler{{ours, theirs}, {theirs, ours}, {ours, ours}} {
				publishing, err := pair[0].Marshal(msg)
				require.NoError(t, err)
				received, err := pair[1].Unmarshal(deliveryOf(publishing))
				require.NoError(t, err)
				require.True(t, msg.Equals(received), "%T to %T: %v", pair[0], pair[1], received)
			}
		})
	}

	// Theirs refuses every header that is not a string, so nothing else may be sent on.
	foreign := amqp091.Table{}
	for name, header := range headers {
		foreign[name] = header.value
	}
	received, err := amqpmessage.Marshaler{}.Unmarshal(amqp091.Delivery{MessageId: "m", Headers: foreign})
	require.NoError(t, err)
	publishing, err := amqpmessage.Marshaler{}.Marshal(received)
	require.NoError(t, err)
	again, err := amqp.DefaultMarshaler{}.Unmarshal(deliveryOf(publishing))
	require.NoError(t, err)
	require.True(t, received.Equals(again))
}

func TestFields(t *testing.T) {
	t.Parallel()
	marshaler := amqpmessage.Marshaler{
		NotPersistentDeliveryMode: true,
		PostprocessPublishing: func(p amqp091.Publishing) amqp091.Publishing {
			p.Priority = uint8(len(p.MessageId))
			return p
		},
	}
	publishing, err := marshaler.Marshal(withMetadata("message_id", "four"))
	require.NoError(t, err)
	require.Equal(t, uint8(4), publishing.Priority)
	require.NotEqual(t, amqp091.Persistent, publishing.DeliveryMode)
}

func TestMarshalRefusesNamesThatCloseTheConnection(t *testing.T) {
	t.Parallel()
	_, err := amqpmessage.Marshaler{}.Marshal(withMetadata(strings.Repeat("n", 255), "fits"))
	require.NoError(t, err)
	_, err = amqpmessage.Marshaler{}.Marshal(withMetadata(strings.Repeat("n", 256), "does not"))
	require.ErrorContains(t, err, "256 bytes")
}

// The idempotency middleware takes a message without UUID, metadata and payload for a phantom, and leaves it with the broker.
func TestTrap16_NoDeliveryIsNoMessage(t *testing.T) {
	t.Parallel()
	_, err := amqpmessage.Marshaler{}.Unmarshal(amqp091.Delivery{})
	require.Error(t, err)
	msg, err := amqpmessage.Marshaler{}.Unmarshal(amqp091.Delivery{DeliveryTag: 1})
	require.NoError(t, err, "an empty message that somebody has sent")
	require.Equal(t, message.Metadata{"content_type": "application/octet-stream"}, msg.Metadata)
}

func withMetadata(name, value string) *message.Message {
	msg := message.NewMessage("", nil)
	msg.Metadata.Set(name, value)
	return msg
}

func roundTrip(t *testing.T, msg *message.Message) *message.Message {
	t.Helper()
	publishing, err := amqpmessage.Marshaler{}.Marshal(msg)
	require.NoError(t, err)
	received, err := amqpmessage.Marshaler{}.Unmarshal(deliveryOf(publishing))
	require.NoError(t, err)
	return received
}

// deliveryOf is what a consumer receives of a publishing.
func deliveryOf(p amqp091.Publishing) amqp091.Delivery {
	return amqp091.Delivery{
		DeliveryTag: 1, Headers: p.Headers, Body: p.Body,
		MessageId: p.MessageId, CorrelationId: p.CorrelationId, Type: p.Type, AppId: p.AppId, ContentType: p.ContentType,
		ContentEncoding: p.ContentEncoding, ReplyTo: p.ReplyTo, Timestamp: p.Timestamp, DeliveryMode: p.DeliveryMode,
	}
}
