package amqpmessage

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
)

// The metadata that properties of AMQP become, and are made of. MessageID is what idempotency.MetadataKey takes for
// producers that set it once per event, Timestamp what idempotency.MetadataTime takes, and ContentType is where
// idempotency.CloudEventKey looks.
const (
	MessageID       = "message_id"
	CorrelationID   = "correlation_id" // Watermill's middleware.CorrelationID has the same name
	Type            = "type"
	AppID           = "app_id"
	ContentType     = "content_type"
	ContentEncoding = "content_encoding"
	ReplyTo         = "reply_to"
	Timestamp       = "timestamp" // RFC 3339, in UTC; AMQP has whole seconds
)

// Marshaler is a watermill-amqp Marshaler that reads everything that a producer or RabbitMQ may send, and writes nothing
// that RabbitMQ or a service with amqp.DefaultMarshaler refuses. It takes the place of DefaultMarshaler: the fields are
// the same, and the two understand each other's messages. The zero value is ready to use; it is safe for concurrent use.
//
// Unmarshal turns properties into metadata under the names above, and headers under their own. A header is there as text:
// numbers in decimal, times in RFC 3339 and UTC, bytes as they are, nothing as "", tables and arrays (x-death) as JSON. A
// header wins over a property of the same name. The UUID is Watermill's header, or else the message ID. Delivery mode,
// priority, expiration and user ID are not kept. A message with nothing in it gets the content type
// application/octet-stream, as the idempotency middleware would wait for ever for what looks like none.
//
// Marshal writes all metadata into headers, as strings, as DefaultMarshaler does, and the properties besides. What does not
// fit into a property (255 bytes, or no RFC 3339) is in the header alone. Headers that RabbitMQ owns are not written:
// x-death and other notes of a dead letter's or a delivery's past, notes of federation and shovels, the offset in a stream,
// and CC and BCC, which would send a replayed message to more queues. Expiration, priority and user ID are for
// PostprocessPublishing: RabbitMQ drops what has expired, also in a dead-letter queue, and refuses another's user ID.
type Marshaler struct {
	// PostprocessPublishing, if it is set, may change what Marshal returns, for example Priority.
	PostprocessPublishing func(amqp091.Publishing) amqp091.Publishing
	// NotPersistentDeliveryMode lets RabbitMQ keep messages in memory only. The default is persistent.
	NotPersistentDeliveryMode bool
	// MessageUUIDHeaderKey is the header of the UUID. The default is amqp.DefaultMessageUUIDHeaderKey.
	MessageUUIDHeaderKey string
}

var _ amqp.Marshaler = Marshaler{}

// maxShortString is the length of what AMQP calls a short string, in bytes: names of headers, and properties.
const maxShortString = 255

// Marshal implements amqp.Marshaler. It fails only on a metadata name that AMQP cannot carry: the client library would
// close the connection over it.
func (m Marshaler) Marshal(msg *message.Message) (amqp091.Publishing, error) {
	headers := make(amqp091.Table, len(msg.Metadata)+1)
	for name, value := range msg.Metadata {
		if len(name) > maxShortString {
			return amqp091.Publishing{}, fmt.Errorf("amqpmessage: the metadata name %.40q... has %d bytes, and AMQP allows %d: shorten or delete it before publishing",
				name, len(name), maxShortString)
		}
		if !isBrokers(name) {
			headers[name] = value
		}
	}
	delete(headers, m.uuidHeader())
	if msg.UUID != "" {
		headers[m.uuidHeader()] = msg.UUID
	}
	property := func(name string) string {
		if value := msg.Metadata[name]; len(value) <= maxShortString {
			return value
		}
		return ""
	}
	publishing := amqp091.Publishing{
		Headers:         headers,
		MessageId:       property(MessageID),
		CorrelationId:   property(CorrelationID),
		Type:            property(Type),
		AppId:           property(AppID),
		ContentType:     property(ContentType),
		ContentEncoding: property(ContentEncoding),
		ReplyTo:         property(ReplyTo),
		Body:            msg.Payload,
	}
	if publishing.ReplyTo == directReplyTo {
		publishing.ReplyTo = ""
	}
	if sent, err := time.Parse(time.RFC3339, msg.Metadata[Timestamp]); err == nil {
		publishing.Timestamp = sent
	}
	if !m.NotPersistentDeliveryMode {
		publishing.DeliveryMode = amqp091.Persistent
	}
	if m.PostprocessPublishing != nil {
		publishing = m.PostprocessPublishing(publishing)
	}
	return publishing, nil
}

// directReplyTo is an address that RabbitMQ takes from a channel only that consumes from it, which a publisher's does not.
const directReplyTo = "amq.rabbitmq.reply-to"

// isBrokers tells the headers that RabbitMQ sets or acts on. As strings, it closes the channel over CC and BCC, and takes
// a dead letter's first death for its last.
func isBrokers(name string) bool {
	switch name {
	case "x-death", "x-delivery-count", "x-acquired-count", "x-stream-offset", "x-received-from", "CC", "BCC":
		return true
	}
	for _, prefix := range []string{"x-first-death-", "x-last-death-", "x-shovelled"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// errNoDelivery keeps phantoms from handlers. watermill-amqp reads on from a channel that has closed, and unmarshals what
// is no delivery; after the error it reconnects.
var errNoDelivery = errors.New("amqpmessage: not a delivery: the channel has closed")

// Unmarshal implements amqp.Marshaler. It fails on no delivery, and on the zero value, which is none.
func (m Marshaler) Unmarshal(delivery amqp091.Delivery) (*message.Message, error) {
	if reflect.ValueOf(delivery).IsZero() {
		return nil, errNoDelivery
	}
	msg := message.NewMessage("", delivery.Body)
	for name, value := range map[string]string{
		MessageID:       delivery.MessageId,
		CorrelationID:   delivery.CorrelationId,
		Type:            delivery.Type,
		AppID:           delivery.AppId,
		ContentType:     delivery.ContentType,
		ContentEncoding: delivery.ContentEncoding,
		ReplyTo:         delivery.ReplyTo,
	} {
		if value != "" {
			msg.Metadata[name] = value
		}
	}
	if !delivery.Timestamp.IsZero() {
		msg.Metadata[Timestamp] = text(delivery.Timestamp)
	}
	for name, value := range delivery.Headers {
		msg.Metadata[name] = text(value)
	}
	msg.UUID = cmp.Or(msg.Metadata[m.uuidHeader()], msg.Metadata[MessageID])
	delete(msg.Metadata, m.uuidHeader())
	if msg.UUID == "" && len(msg.Metadata) == 0 && len(msg.Payload) == 0 {
		msg.Metadata[ContentType] = "application/octet-stream"
	}
	return msg, nil
}

func (m Marshaler) uuidHeader() string {
	return cmp.Or(m.MessageUUIDHeaderKey, amqp.DefaultMessageUUIDHeaderKey)
}

// text renders a header of any type that AMQP has. The same number is the same text, whichever type it was sent with.
func text(value any) string {
	switch value := value.(type) {
	case nil:
		return ""
	case string:
		return value
	case []byte:
		return string(value)
	case time.Time:
		return value.UTC().Format(time.RFC3339)
	case float32:
		return strconv.FormatFloat(float64(value), 'f', -1, 32)
	case float64:
		return strconv.FormatFloat(value, 'f', -1, 64)
	case amqp091.Decimal:
		scale := int64(value.Scale)
		denominator := new(big.Int).Exp(big.NewInt(10), big.NewInt(scale), nil)
		return new(big.Rat).SetFrac(big.NewInt(int64(value.Value)), denominator).FloatString(int(scale))
	case amqp091.Table, []any:
		encoded, _ := json.Marshal(jsonValue(value)) // nothing is left in it that could fail
		return string(encoded)
	}
	return fmt.Sprint(value) // bool, and the integers
}

// jsonValue returns what encoding/json renders without an error and as text does.
func jsonValue(value any) any {
	switch value := value.(type) {
	case amqp091.Table:
		object := make(map[string]any, len(value))
		for name, v := range value {
			object[name] = jsonValue(v)
		}
		return object
	case []any:
		array := make([]any, len(value))
		for i, v := range value {
			array[i] = jsonValue(v)
		}
		return array
	case float32, float64, amqp091.Decimal:
		if number := text(value); json.Valid([]byte(number)) { // NaN and the infinities are no JSON
			return json.Number(number)
		}
		return text(value)
	case string, []byte, time.Time:
		return text(value)
	}
	return value // nil, bool, and the integers
}
