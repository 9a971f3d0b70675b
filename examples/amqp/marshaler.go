package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
)

// The properties of AMQP that are kept, by their names in the metadata.
const (
	messageID     = "message_id"
	correlationID = "correlation_id"
	messageType   = "type"
	contentType   = "content_type"
	appID         = "app_id"
	timestamp     = "timestamp"
)

// Marshaler is what amqp.DefaultMarshaler should be. That one drops all properties of AMQP, also the message ID, and
// refuses every message that has a header which is not a string: x-death after a dead-letter exchange, x-delivery-count
// after one Nack on a quorum queue. Such a message then comes again at once, for ever, before any middleware sees it.
//
// This one keeps the properties as metadata, and other headers as text: JSON for tables and arrays. It is compatible with
// DefaultMarshaler on the other side. Unmarshal fails on nothing.
type Marshaler struct{}

var _ amqp.Marshaler = Marshaler{}

// Marshal implements amqp.Marshaler. Headers that the broker owns are not sent again.
func (Marshaler) Marshal(msg *message.Message) (amqp091.Publishing, error) {
	metadata := maps.Clone(msg.Metadata)
	take := func(name string) string {
		value := metadata[name]
		delete(metadata, name)
		return value
	}
	publishing := amqp091.Publishing{
		DeliveryMode:  amqp091.Persistent,
		MessageId:     take(messageID),
		CorrelationId: take(correlationID),
		Type:          take(messageType),
		ContentType:   take(contentType),
		AppId:         take(appID),
		Body:          msg.Payload,
		Headers:       amqp091.Table{amqp.DefaultMessageUUIDHeaderKey: msg.UUID},
	}
	if sent, err := time.Parse(time.RFC3339, metadata[timestamp]); err == nil {
		publishing.Timestamp = sent
		delete(metadata, timestamp)
	}
	for name, value := range metadata {
		if !isBrokers(name) {
			publishing.Headers[name] = value
		}
	}
	return publishing, nil
}

// isBrokers tells the headers that RabbitMQ sets: sent as text, they would confuse it.
func isBrokers(name string) bool {
	switch name {
	case "x-death", "x-delivery-count", "x-acquired-count":
		return true
	}
	return strings.HasPrefix(name, "x-first-death-") || strings.HasPrefix(name, "x-last-death-")
}

// Unmarshal implements amqp.Marshaler. A header wins over a property of the same name.
func (Marshaler) Unmarshal(delivery amqp091.Delivery) (*message.Message, error) {
	msg := message.NewMessage("", delivery.Body)
	for name, value := range map[string]string{
		messageID:     delivery.MessageId,
		correlationID: delivery.CorrelationId,
		messageType:   delivery.Type,
		contentType:   delivery.ContentType,
		appID:         delivery.AppId,
	} {
		if value != "" {
			msg.Metadata[name] = value
		}
	}
	if !delivery.Timestamp.IsZero() {
		msg.Metadata[timestamp] = delivery.Timestamp.UTC().Format(time.RFC3339)
	}
	for name, value := range delivery.Headers {
		msg.Metadata[name] = text(value)
	}
	msg.UUID = msg.Metadata[amqp.DefaultMessageUUIDHeaderKey]
	delete(msg.Metadata, amqp.DefaultMessageUUIDHeaderKey)
	return msg, nil
}

// text renders a header of any type of AMQP.
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
		return strconv.FormatFloat(float64(value), 'g', -1, 32)
	case amqp091.Table, []any:
		if encoded, err := json.Marshal(value); err == nil {
			return string(encoded)
		}
	}
	return fmt.Sprint(value)
}
