package amqpmessage_test

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/amqpmessage"
)

// FuzzMarshaler reads a delivery with two properties, a time and a header of any type. Nothing panics or fails, what is
// structured is JSON, and what is published and read again is the same, but for what RabbitMQ owns.
func FuzzMarshaler(f *testing.F) {
	f.Add("name", []byte("Sx"), "message ID", "type", int64(0), []byte("body"))
	f.Fuzz(func(t *testing.T, name string, header []byte, id, typ string, at int64, body []byte) {
		if len(name) > 255 || len(id) > 255 || len(typ) > 255 {
			t.Skip("AMQP carries no such thing")
		}
		value, _ := field(header, 0)
		table := amqp091.Table{name: value}
		require.NoError(t, table.Validate())
		delivery := amqp091.Delivery{AppId: "fuzz", MessageId: id, Type: typ, Timestamp: time.Unix(at, 0), Body: body, Headers: table}
		msg, err := amqpmessage.Marshaler{}.Unmarshal(delivery)
		require.NoError(t, err)
		switch value.(type) {
		case amqp091.Table, []any:
			if text, ok := msg.Metadata[name]; ok { // else it was the UUID
				require.True(t, json.Valid([]byte(text)), text)
			}
		}

		publishing, err := amqpmessage.Marshaler{}.Marshal(msg)
		require.NoError(t, err)
		require.NoError(t, publishing.Headers.Validate())
		for _, value := range publishing.Headers {
			require.IsType(t, "", value)
		}
		for _, property := range []string{publishing.MessageId, publishing.Type} {
			require.LessOrEqual(t, len(property), 255)
		}
		once := roundTrip(t, msg)
		if _, ok := once.Metadata[name]; !ok && name != amqp.DefaultMessageUUIDHeaderKey {
			require.NotContains(t, publishing.Headers, name)
			delete(msg.Metadata, name)
		}
		require.True(t, msg.Equals(once), "%v is %v", msg, once)
		require.True(t, once.Equals(roundTrip(t, once)))
	})
}

// field makes a header out of a byte for its type, as AMQP has them, and the bytes of its value.
func field(data []byte, depth int) (value any, rest []byte) {
	if len(data) == 0 {
		return nil, nil
	}
	kind, data := data[0], data[1:]
	number := func(size int) uint64 {
		var padded [8]byte
		n := copy(padded[8-min(size, len(data)):], data)
		data = data[n:]
		return binary.BigEndian.Uint64(padded[:])
	}
	switch kind {
	case 't':
		return number(1) != 0, data
	case 'b':
		return int8(number(1)), data
	case 'B':
		return uint8(number(1)), data
	case 's':
		return int16(number(2)), data
	case 'u':
		return uint16(number(2)), data
	case 'I':
		return int32(number(4)), data
	case 'i':
		return uint32(number(4)), data
	case 'l':
		return int64(number(8)), data
	case 'f':
		return math.Float32frombits(uint32(number(4))), data
	case 'd':
		return math.Float64frombits(number(8)), data
	case 'D':
		return amqp091.Decimal{Scale: uint8(number(1)), Value: int32(number(4))}, data
	case 'T':
		return time.Unix(int64(number(8)), 0), data
	case 'V':
		return nil, data
	case 'A', 'F':
		if depth > 50 {
			return nil, nil
		}
		array, table := []any{}, amqp091.Table{}
		for len(data) > 0 && data[0] != 0 {
			before := data
			value, data = field(data, depth+1)
			array = append(array, value)
			table[string(before[:min(len(before), 3)])] = value
		}
		if kind == 'A' {
			return array, data[min(1, len(data)):]
		}
		return table, data[min(1, len(data)):]
	case 'x':
		n := min(int(number(1)), len(data))
		return data[:n], data[n:]
	}
	n := min(int(number(1)), len(data))
	return string(data[:n]), data[n:]
}
