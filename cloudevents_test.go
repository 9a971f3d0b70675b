package idempotency_test

import (
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

func withMetadata(payload string, metadata ...string) *message.Message {
	msg := message.NewMessage("", []byte(payload))
	for i := 0; i < len(metadata); i += 2 {
		msg.Metadata.Set(metadata[i], metadata[i+1])
	}
	return msg
}

const structured = "application/cloudevents+json; charset=utf-8"

func TestTrap17_CloudEventsAreIdentifiedBySourceAndID(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		msg     *message.Message
		opts    []idempotency.CloudEventOption
		want    string
		wantErr error
	}{
		"Kafka":                 {msg: withMetadata("", "ce_id", "42", "ce_source", "/orders"), want: "/orders 42"},
		"AMQP":                  {msg: withMetadata("", "cloudEvents:id", "42", "cloudEvents:source", "/orders"), want: "/orders 42"},
		"AMQP, underscore":      {msg: withMetadata("", "cloudEvents_id", "42", "cloudEvents_source", "/orders"), want: "/orders 42"},
		"HTTP":                  {msg: withMetadata("", "ce-id", "42", "ce-source", "/orders"), want: "/orders 42"},
		"HTTP of Go":            {msg: withMetadata("", "Ce-Id", "42", "Ce-Source", "/orders"), want: "/orders 42"},
		"two spellings, same":   {msg: withMetadata("", "ce_id", "42", "ce-id", "42", "ce_source", "/orders"), want: "/orders 42"},
		"two spellings, two":    {msg: withMetadata("", "ce_id", "42", "ce-id", "43", "ce_source", "/orders"), wantErr: idempotency.ErrKeyAmbiguous},
		"two sources":           {msg: withMetadata("", "ce_id", "42", "ce_source", "/a", "cloudEvents_source", "/b"), wantErr: idempotency.ErrKeyAmbiguous},
		"no ID":                 {msg: withMetadata("", "ce_source", "/orders"), wantErr: idempotency.ErrInvalidKey},
		"no source":             {msg: withMetadata("", "ce_id", "42"), wantErr: idempotency.ErrInvalidKey},
		"neither":               {msg: withMetadata("x"), wantErr: idempotency.ErrMissingKey},
		"empty ID":              {msg: withMetadata("", "ce_id", "", "ce_source", "/orders"), wantErr: idempotency.ErrKeyEmpty},
		"empty source":          {msg: withMetadata("", "ce_id", "42", "ce_source", ""), wantErr: idempotency.ErrKeyEmpty},
		"space in source":       {msg: withMetadata("", "ce_id", "b c", "ce_source", `a \`), want: `a\ \\ b c`},
		"quoted, as it is":      {msg: withMetadata("", "ce_id", `"42"`, "ce_source", `"/orders"`), want: `"/orders" "42"`},
		"quoted, unquoted":      {msg: withMetadata("", "ce_id", `"4\u0032"`, "ce_source", `"/orders"`), opts: []idempotency.CloudEventOption{idempotency.UnquoteCloudEvents()}, want: "/orders 42"},
		"half quoted":           {msg: withMetadata("", "ce_id", `"42`, "ce_source", "/orders"), opts: []idempotency.CloudEventOption{idempotency.UnquoteCloudEvents()}, wantErr: idempotency.ErrInvalidKey},
		"not quoted":            {msg: withMetadata("", "ce_id", "42", "ce_source", "/orders"), opts: []idempotency.CloudEventOption{idempotency.UnquoteCloudEvents(), nil}, want: "/orders 42"},
		"structured":            {msg: withMetadata(`{"specversion":"1.0","id":"42","source":"/orders","data":{"id":"43"}}`, "content-type", structured), want: "/orders 42"},
		"structured, AMQP":      {msg: withMetadata(`{"id":"42","source":"/orders"}`, "content_type", "Application/CloudEvents+JSON"), want: "/orders 42"},
		"structured, both same": {msg: withMetadata(`{"id":"42","source":"/orders"}`, "content-type", structured, "ce_id", "42"), want: "/orders 42"},
		"structured, both two":  {msg: withMetadata(`{"id":"42","source":"/orders"}`, "content-type", structured, "ce_id", "43"), wantErr: idempotency.ErrKeyAmbiguous},
		"structured, ID twice":  {msg: withMetadata(`{"id":"42","id":"43","source":"/orders"}`, "content-type", structured), wantErr: idempotency.ErrInvalidKey},
		"structured, upper":     {msg: withMetadata(`{"id":"42","ID":"43","source":"/orders"}`, "content-type", structured), want: "/orders 42"},
		"structured, no source": {msg: withMetadata(`{"id":"42","source":null}`, "content-type", structured), wantErr: idempotency.ErrInvalidKey},
		"structured, neither":   {msg: withMetadata(`{"data":42}`, "content-type", structured), wantErr: idempotency.ErrMissingKey},
		"structured, 2nd type":  {msg: withMetadata(`{"id":"42","source":"/orders"}`, "content-type", "application/json", "content_type", structured), want: "/orders 42"},
		"structured, quoted":    {msg: withMetadata(`{"id":"42","source":"/orders"}`, "content-type", `"application/cloudevents+json"`), opts: []idempotency.CloudEventOption{idempotency.UnquoteCloudEvents()}, want: "/orders 42"},
		"half quoted type":      {msg: withMetadata(`{"id":"42","source":"/orders"}`, "content-type", `"x`), opts: []idempotency.CloudEventOption{idempotency.UnquoteCloudEvents()}, wantErr: idempotency.ErrInvalidKey},
		"structured, number":    {msg: withMetadata(`{"id":42,"source":"/orders"}`, "content-type", structured), wantErr: idempotency.ErrInvalidKey},
		"structured, no JSON":   {msg: withMetadata(`id=42`, "content-type", structured), wantErr: idempotency.ErrInvalidKey},
		"structured, array":     {msg: withMetadata(`[{"id":"42"}]`, "content-type", structured), wantErr: idempotency.ErrInvalidKey},
		"structured, cut off":   {msg: withMetadata(`{"id":"42","source":"/orders"`, "content-type", structured), wantErr: idempotency.ErrInvalidKey},
		"structured, not UTF-8": {msg: withMetadata("{\"id\":\"4\xff\",\"source\":\"/orders\"}", "content-type", structured), wantErr: idempotency.ErrKeyNotUTF8},
		"structured, surrogate": {msg: withMetadata(`{"id":"\ud800","source":"/orders"}`, "content-type", structured), wantErr: idempotency.ErrInvalidKey},
		"batch":                 {msg: withMetadata(`[]`, "content-type", "application/cloudevents-batch+json"), wantErr: idempotency.ErrInvalidKey},
		"avro":                  {msg: withMetadata("x", "content-type", "application/cloudevents+avro"), wantErr: idempotency.ErrInvalidKey},
		"binary, other content": {msg: withMetadata(`{"id":"43"}`, "content-type", "application/json", "ce_id", "42", "ce_source", "/orders"), want: "/orders 42"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			id, err := idempotency.CloudEventKey(test.opts...)(test.msg)
			require.Equal(t, test.want, id)
			if test.wantErr == nil {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, test.wantErr)
			require.True(t, idempotency.IsPermanent(err))
		})
	}
}

func TestStructuredCloudEventKeyNeedsNoContentType(t *testing.T) {
	t.Parallel()
	key := idempotency.FirstOf(idempotency.CloudEventKey(), idempotency.StructuredCloudEventKey())
	id, err := key(withMetadata(`{"source":"/orders","id":"42"}`))
	require.NoError(t, err)
	require.Equal(t, "/orders 42", id)

	_, err = key(withMetadata(`{"order":42}`))
	require.ErrorIs(t, err, idempotency.ErrMissingKey)
	_, err = key(withMetadata(`<order/>`))
	require.ErrorIs(t, err, idempotency.ErrInvalidKey)
}

// Two events never get one ID, and no message makes a key function panic.
func FuzzCloudEventKey(f *testing.F) {
	f.Add("/orders", "42", "/order", "s 42", `{"id":"42","source":"/orders"}`)
	f.Add("a b", "c", "a", "b c", `{"id":"\ud800"`)
	f.Add(`a\`, " b", "a", `\  b`, `{"id":"1","id":"2"}`)
	f.Fuzz(func(t *testing.T, source1, id1, source2, id2, payload string) {
		key := idempotency.CloudEventKey()
		first, err1 := key(withMetadata("", "ce_source", source1, "ce_id", id1))
		second, err2 := key(withMetadata("", "ce_source", source2, "ce_id", id2))
		require.Equal(t, source1 != "" && id1 != "", err1 == nil)
		if err1 == nil && err2 == nil {
			require.Equal(t, source1 == source2 && id1 == id2, first == second)
			require.True(t, strings.HasSuffix(first, " "+id1))
		}

		for _, key := range []idempotency.KeyFunc{key, idempotency.StructuredCloudEventKey(), idempotency.CloudEventKey(idempotency.UnquoteCloudEvents())} {
			id, err := key(withMetadata(payload, "content-type", structured, "ce_id", id1, "ce_source", source1))
			if err != nil {
				require.True(t, idempotency.IsPermanent(err))
				require.Empty(t, id)
			}
		}
	})
}
