package idempotency_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// content is a message of event 1.
func content(payload string, metadata ...string) *message.Message {
	msg := message.NewMessage("", []byte(payload))
	msg.Metadata.Set(idempotency.EventIDMetadata, "1")
	for i := 0; i < len(metadata); i += 2 {
		msg.Metadata.Set(metadata[i], metadata[i+1])
	}
	return msg
}

// sorted is no RFC 8785, but brings the members of objects into one order.
func sorted(payload []byte) ([]byte, error) {
	var value any
	if err := json.Unmarshal(payload, &value); err != nil {
		return nil, err
	}
	return json.Marshal(value)
}

func TestOtherContentUnderAKnownIDIsAConflict(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		opts          []idempotency.Option
		first, second *message.Message
		differs       []string // none: a duplicate
	}{
		"same":                  {nil, content("a", "ce_type", "placed"), content("a", "ce_type", "placed"), nil},
		"payload":               {nil, content("a"), content("b"), []string{"payload"}},
		"empty payload":         {nil, content("a"), content(""), []string{"payload"}},
		"type":                  {nil, content("a", "ce_type", "placed"), content("a", "ce_type", "paid"), []string{"type"}},
		"type of CQRS":          {nil, content("a", "name", "placed"), content("a", "name", "paid"), []string{"type"}},
		"source":                {nil, content("a", "ce_source", "/eu"), content("a", "ce_source", "/us"), []string{"source"}},
		"type goes to source":   {nil, content("a", "ce_type", "xy", "ce_source", "z"), content("a", "ce_type", "x", "ce_source", "yz"), []string{"type", "source"}},
		"all":                   {nil, content("a", "ce_type", "placed", "ce_source", "/eu"), content("b"), []string{"type", "source", "payload"}},
		"another binding":       {nil, content("a", "ce_type", "placed"), content("a", "cloudEvents:type", "placed"), nil},
		"metadata of a replay":  {nil, content("a"), content("a", middleware.ReasonForPoisonedKey, "x", middleware.CorrelationIDMetadataKey, "y", "_retries", "1"), nil},
		"another UUID":          {nil, order("1"), func() *message.Message { m := order("1"); m.UUID = "another"; return m }(), nil},
		"reordered, byte-wise":  {nil, content(`{"a":1,"b":2}`), content(`{"b":2,"a":1}`), []string{"payload"}},
		"reordered, canonical":  {[]idempotency.Option{idempotency.WithCanonicalPayload(sorted)}, content(`{"a":1,"b":2}`), content(`{"b":2, "a":1}`), nil},
		"changed, canonical":    {[]idempotency.Option{idempotency.WithCanonicalPayload(sorted)}, content(`{"a":1,"b":2}`), content(`{"b":2, "a":2}`), []string{"payload"}},
		"no payload, canonical": {[]idempotency.Option{idempotency.WithCanonicalPayload(sorted)}, content(""), content(""), nil},
		"own type":              {[]idempotency.Option{idempotency.WithTypeMetadata("kind")}, content("a", "kind", "1", "ce_type", "x"), content("a", "kind", "1", "ce_type", "y"), nil},
		"own type differs":      {[]idempotency.Option{idempotency.WithTypeMetadata("kind")}, content("a", "kind", "1"), content("a", "kind", "2"), []string{"type"}},
		"own source differs":    {[]idempotency.Option{idempotency.WithSourceMetadata("from")}, content("a", "from", "1"), content("a", "from", "2"), []string{"source"}},
		"no type":               {[]idempotency.Option{idempotency.WithTypeMetadata()}, content("a", "ce_type", "1"), content("a", "ce_type", "2"), nil},
		"off":                   {[]idempotency.Option{idempotency.WithoutFingerprint()}, content("a"), content("b"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, test.opts...)
			handle := b.Middleware.Middleware(writeThen(returnOne))
			before := time.Now()
			_, err := handle(test.first)
			require.NoError(t, err)
			produced, err := handle(test.second)
			require.Len(t, b.store.Effects(), 1)
			second := b.observed.all()[1]
			require.False(t, second.ClaimedAt.Before(before))
			require.GreaterOrEqual(t, time.Since(before), second.Age)
			if test.differs == nil {
				require.NoError(t, err)
				require.Len(t, produced, 1)
				require.Equal(t, idempotency.Duplicate, second.Outcome)
				return
			}
			require.Nil(t, produced)
			require.ErrorIs(t, err, idempotency.ErrConflict)
			require.True(t, idempotency.IsPermanent(err))
			require.False(t, idempotency.IsTransient(err))
			var conflict *idempotency.ConflictError
			require.ErrorAs(t, err, &conflict)
			require.Equal(t, test.differs, conflict.Differs)
			require.Equal(t, idempotency.Key{SubscriberID: "shipping", EventID: "1"}, conflict.Key)
			require.Equal(t, second.ClaimedAt, conflict.ClaimedAt)
			require.NotEqual(t, conflict.Processed, conflict.Received)
			require.Equal(t, idempotency.Conflict, second.Outcome)

			// The first content is what it was.
			_, err = handle(test.first)
			require.NoError(t, err)
		})
	}
}

// Records are stored with them.
func TestFingerprintsStayAsTheyAreStored(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		msg    *message.Message
		stored string
	}{
		"all":        {content(`{"a":1}`, "ce_type", "placed", "ce_source", "/eu"), "7534ec827d7ce992f4b5c29e561bacafa70b53c73b8d0e6d6c532eb9377f5dba4bc127f8b2c45cf3c619e9974d931eb7"},
		"no type":    {content(`{"a":1}`), "7534ec820000000000000000561bacafc5961791f82c7a925cef5b9fb7af1e2b205b05ab33c26b1ddabac8b2ff90930d"},
		"no payload": {content("", "name", "placed"), "7534ec827d7ce9920000000000000000d5af7986da914b37d7cdb79e4a214df0455e952305596266d37aaecb8b7378f1"},
		"long":       {content(strings.Repeat("x", 1000), "ce_type", strings.Repeat("t", 200)), "7534ec826ca7216e000000003b41c9e6b7095b720e5bebcd1f8d6547a6344acebdc1a42924d42951261c5b088d9e116a"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			var stored []byte
			b.store.claim = func(_ context.Context, c idempotency.Claim) error {
				stored = c.Fingerprint
				return nil
			}
			_, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(test.msg)
			require.NoError(t, err)
			require.Equal(t, test.stored, hex.EncodeToString(stored))
		})
	}
}

func returnOne(*message.Message) ([]*message.Message, error) {
	return []*message.Message{message.NewMessage("", []byte("label created"))}, nil
}

func TestConflictIsFoundWhileTheFirstIsInFlight(t *testing.T) {
	t.Parallel()
	b := setup(t)
	started, finish, done := make(chan struct{}), make(chan struct{}), make(chan error)
	handle := b.Middleware.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
		close(started)
		<-finish
		return nil, nil
	}))
	for _, payload := range []string{"a", "b"} {
		go func() {
			_, err := handle(content(payload))
			done <- err
		}()
		<-started
	}
	close(finish)
	first, second := <-done, <-done
	if first != nil {
		first, second = second, first
	}
	require.NoError(t, first)
	require.ErrorIs(t, second, idempotency.ErrConflict)
	require.Equal(t, []string{"label for 1"}, b.store.Effects())
}

// Records of another scheme, or without a fingerprint, are known by their event ID alone: a change of options makes no
// conflicts of all that comes again.
func TestFingerprintsOfAnotherSchemeAreNotCompared(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]idempotency.Option{
		"off":       idempotency.WithoutFingerprint(),
		"canonical": idempotency.WithCanonicalPayload(sorted),
		"type":      idempotency.WithTypeMetadata("kind"),
		"source":    idempotency.WithSourceMetadata("kind"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, before)
			_, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(content(`{"a":1}`))
			require.NoError(t, err)
			now, err := idempotency.New(b.store, idempotency.WithSubscriberID("shipping"))
			require.NoError(t, err)
			_, err = now.Middleware(idempotency.Handler(createLabel))(content(`{ "a":1}`))
			require.NoError(t, err)
			require.Len(t, b.store.Effects(), 1)
		})
	}
}

func TestPayloadWithoutACanonicalFormIsPermanent(t *testing.T) {
	t.Parallel()
	for name, canonical := range map[string]func([]byte) ([]byte, error){
		"error": sorted,
		"panic": func([]byte) ([]byte, error) { panic("no JSON") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, idempotency.WithCanonicalPayload(canonical))
			_, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(content("no JSON"))
			require.ErrorIs(t, err, idempotency.ErrNotCanonical)
			require.True(t, idempotency.IsPermanent(err))
			require.Equal(t, []idempotency.Outcome{idempotency.Permanent}, b.observed.outcomes())
			require.Empty(t, b.store.Effects())
		})
	}
}

// Equal contents are no conflict, and others are one.
func FuzzFingerprint(f *testing.F) {
	f.Add("placed", "/eu", []byte("a"), "placed", "/eu", []byte("a"))
	f.Add("ab", "c", []byte(""), "a", "bc", []byte(""))
	f.Add("", "", []byte("abc"), "a", "b", []byte("c"))
	f.Fuzz(func(t *testing.T, type1, source1 string, payload1 []byte, type2, source2 string, payload2 []byte) {
		handle := setup(t).Middleware.Middleware(idempotency.Handler(createLabel))
		_, err := handle(content(string(payload1), "ce_type", type1, "ce_source", source1))
		require.NoError(t, err)
		_, err = handle(content(string(payload2), "ce_type", type2, "ce_source", source2))
		if type1 == type2 && source1 == source2 && string(payload1) == string(payload2) {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, idempotency.ErrConflict)
		}
	})
}
