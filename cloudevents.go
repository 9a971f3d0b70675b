package idempotency

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// CloudEventOption changes how [CloudEventKey] and [CloudEventTime] read a message.
type CloudEventOption func(*cloudEvents)

// UnquoteCloudEvents takes the JSON quotes off values in metadata that have them, as in "\"42\"": some producers (Spring
// Kafka before it mapped strings plainly) write header values as JSON. The default is to take values as they are.
func UnquoteCloudEvents() CloudEventOption {
	return func(c *cloudEvents) { c.unquote = true }
}

// CloudEventKey takes the event ID from a CloudEvent: its source and its id together, as only they identify it (CloudEvents
// 1.0, "REQUIRED Attributes"). The event ID is the source, a space, and the id; a space or backslash in the source has a
// backslash before it.
//
// In binary mode the attributes are in metadata, in the spelling of one of the bindings: ce_id (Kafka), cloudEvents:id and
// cloudEvents_id (AMQP), ce-id (HTTP). If metadata "content-type" (or content_type, contentType, Content-Type) says
// application/cloudevents+json, the event is in structured mode, in the payload. An attribute that is there twice, with
// different values, is [ErrKeyAmbiguous]. A message without id and source is [ErrMissingKey]; one with only one of them, in a
// format other than JSON, or with a batch of events, is [ErrInvalidKey]. Values are taken as they are: the percent-encoding
// of the HTTP binding is not decoded.
func CloudEventKey(opts ...CloudEventOption) KeyFunc {
	c := newCloudEvents(opts)
	return func(msg *message.Message) (string, error) {
		attributes, err := c.attributes(msg, "id", "source")
		if err != nil {
			return "", err
		}
		return cloudEventID(attributes)
	}
}

// StructuredCloudEventKey is [CloudEventKey] for events in structured mode, as JSON, whose content type does not arrive: it
// takes source and id from the payload, whatever the metadata says.
func StructuredCloudEventKey() KeyFunc {
	return func(msg *message.Message) (string, error) {
		attributes := make(map[string]string)
		if err := decodeCloudEvent(msg.Payload, attributes, "id", "source"); err != nil {
			return "", err
		}
		return cloudEventID(attributes)
	}
}

type cloudEvents struct{ unquote bool }

func newCloudEvents(opts []CloudEventOption) cloudEvents {
	var c cloudEvents
	for _, opt := range opts {
		if opt != nil {
			opt(&c)
		}
	}
	return c
}

// cloudEventSpellings returns the metadata names of an attribute in the bindings of CloudEvents: Kafka; AMQP, with the
// separator of its first version and the one for brokers that refuse that; HTTP, and as Go's net/http spells it.
func cloudEventSpellings(attribute string) []string {
	capitalised := strings.ToUpper(attribute[:1]) + attribute[1:]
	return []string{"ce_" + attribute, "cloudEvents:" + attribute, "cloudEvents_" + attribute, "ce-" + attribute, "Ce-" + capitalised}
}

var cloudEventMetadata = map[string][]string{
	"id":     cloudEventSpellings("id"),
	"source": cloudEventSpellings("source"),
	"time":   cloudEventSpellings("time"),
}

// attributes returns those of the named attributes that the message has.
func (c cloudEvents) attributes(msg *message.Message, names ...string) (map[string]string, error) {
	structured, err := c.isStructured(msg.Metadata)
	if err != nil {
		return nil, err
	}
	attributes := make(map[string]string, len(names))
	if structured {
		if err := decodeCloudEvent(msg.Payload, attributes, names...); err != nil {
			return nil, err
		}
	}
	for _, name := range names {
		for _, spelling := range cloudEventMetadata[name] {
			value, ok := msg.Metadata[spelling]
			if !ok {
				continue
			}
			if value, err = c.plain(spelling, value); err != nil {
				return nil, err
			}
			if err := setAttribute(attributes, name, value); err != nil {
				return nil, err
			}
		}
	}
	return attributes, nil
}

func setAttribute(attributes map[string]string, name, value string) error {
	if before, ok := attributes[name]; ok && before != value {
		return fmt.Errorf("%w: CloudEvents attribute %q is both %q and %q", ErrKeyAmbiguous, name, before, value)
	}
	attributes[name] = value
	return nil
}

// plain takes the quotes off a value.
func (c cloudEvents) plain(spelling, value string) (string, error) {
	if !c.unquote || !strings.HasPrefix(value, `"`) {
		return value, nil
	}
	var plain string
	if err := json.Unmarshal([]byte(value), &plain); err != nil {
		return "", fmt.Errorf("%w: metadata %q begins with a quote and is no JSON string: %w", ErrInvalidKey, spelling, err)
	}
	return plain, nil
}

// isStructured tells whether the payload is a CloudEvent, and not its data.
func (c cloudEvents) isStructured(metadata message.Metadata) (structured bool, err error) {
	for _, spelling := range [...]string{"content-type", "content_type", "contentType", "Content-Type"} {
		contentType, err := c.plain(spelling, metadata[spelling])
		if err != nil {
			return false, err
		}
		mediaType, _, _ := strings.Cut(contentType, ";")
		mediaType = strings.ToLower(strings.TrimSpace(mediaType))
		switch {
		case mediaType == "application/cloudevents+json":
			structured = true
		case strings.HasPrefix(mediaType, "application/cloudevents"):
			return false, fmt.Errorf("%w: content type %q: only single CloudEvents in JSON are read: choose another key by WithKey", ErrInvalidKey, contentType)
		}
	}
	return structured, nil
}

// decodeCloudEvent reads those of the named attributes that a CloudEvent in JSON has. It decodes nothing else, and takes
// names as they are, where encoding/json would take "ID" for "id" and the last of two.
func decodeCloudEvent(payload []byte, attributes map[string]string, names ...string) error {
	if !utf8.Valid(payload) {
		return fmt.Errorf("%w: the payload is no CloudEvent in JSON", ErrKeyNotUTF8)
	}
	if err := decodeObject(payload, attributes, names); err != nil {
		return fmt.Errorf("%w: the payload is no CloudEvent in JSON: %w", ErrInvalidKey, err)
	}
	return nil
}

func decodeObject(payload []byte, attributes map[string]string, names []string) error {
	decoder := json.NewDecoder(bytes.NewReader(payload))
	token, err := decoder.Token()
	if err != nil {
		return err
	}
	if token != json.Delim('{') {
		return errors.New("it is no object")
	}
	for decoder.More() {
		token, err := decoder.Token()
		if err != nil {
			return err
		}
		var raw json.RawMessage
		if err := decoder.Decode(&raw); err != nil {
			return err
		}
		name, _ := token.(string)
		if !slices.Contains(names, name) || string(raw) == "null" {
			continue
		}
		var value string
		if err := json.Unmarshal(raw, &value); err != nil {
			return fmt.Errorf("attribute %q: %w", name, err)
		}
		if strings.ContainsRune(value, utf8.RuneError) && bytes.Contains(raw, []byte(`\u`)) {
			// encoding/json makes one character of all halves of surrogate pairs.
			return fmt.Errorf("attribute %q has half of a surrogate pair", name)
		}
		if err := setAttribute(attributes, name, value); err != nil {
			return err
		}
	}
	_, err = decoder.Token()
	return err
}

// escapeSource lets the first space without a backslash before it be the end of the source.
var escapeSource = strings.NewReplacer(`\`, `\\`, ` `, `\ `)

func cloudEventID(attributes map[string]string) (string, error) {
	if len(attributes) == 0 {
		return "", fmt.Errorf("%w: the message has no CloudEvents attributes \"id\" and \"source\": is its producer one of CloudEvents, and does the subscriber's marshaler keep headers?", ErrMissingKey)
	}
	for _, name := range [...]string{"id", "source"} {
		if value, ok := attributes[name]; !ok {
			return "", fmt.Errorf("%w: the message has no CloudEvents attribute %q, but the other of \"id\" and \"source\"", ErrInvalidKey, name)
		} else if value == "" {
			return "", fmt.Errorf("%w: CloudEvents attribute %q", ErrKeyEmpty, name)
		}
	}
	return escapeSource.Replace(attributes["source"]) + " " + attributes["id"], nil
}
