package idempotency

import (
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// original is a copy of a message as it came. Copies are pooled: nobody else sees one before restore gives it away, and
// then it does not go back.
type original struct {
	uuid       string
	metadata   []string // names and values by turns
	payload    message.Payload
	noMetadata bool // nil, and not empty
	noPayload  bool // a tombstone, on Kafka
}

// maxPooledPayload keeps the pool from holding what a few large messages needed, in bytes.
const maxPooledPayload = 1 << 20

var originals = sync.Pool{New: func() any { return &original{payload: message.Payload{}} }}

func snapshot(msg *message.Message) *original {
	o, _ := originals.Get().(*original)
	o.uuid, o.noMetadata, o.noPayload = msg.UUID, msg.Metadata == nil, msg.Payload == nil
	for name, value := range msg.Metadata {
		o.metadata = append(o.metadata, name, value)
	}
	o.payload = append(o.payload, msg.Payload...)
	return o
}

// restore undoes what a failed attempt changed: the next one, ours or that of middleware.Retry, must meet the same key and
// the same content.
func (o *original) restore(msg *message.Message) {
	msg.UUID, msg.Metadata, msg.Payload = o.uuid, nil, nil
	if !o.noMetadata {
		msg.Metadata = make(message.Metadata, len(o.metadata)/2)
		for pair := range slices.Chunk(o.metadata, 2) {
			msg.Metadata[pair[0]] = pair[1]
		}
	}
	if !o.noPayload {
		msg.Payload = o.payload
	}
}

// release puts the copy back, where restore was not called.
func (o *original) release() {
	if cap(o.payload) > maxPooledPayload {
		return
	}
	clear(o.metadata) // its strings
	o.metadata, o.payload = o.metadata[:0], o.payload[:0]
	originals.Put(o)
}
