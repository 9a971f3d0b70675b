package idempotency_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

func TestTrap15_UnusableKeysArePermanentAndTold(t *testing.T) {
	t.Parallel()
	with := func(id string) *message.Message { return order(id) }
	without := message.NewMessage("uuid", nil)
	for name, test := range map[string]struct {
		key  idempotency.KeyFunc
		msg  *message.Message
		want error
	}{
		"missing":       {nil, without, idempotency.ErrMissingKey},
		"empty":         {nil, with(""), idempotency.ErrKeyEmpty},
		"too long":      {nil, with(strings.Repeat("x", idempotency.MaxEventIDLength+1)), idempotency.ErrKeyTooLong},
		"NUL":           {nil, with("a\x00b"), idempotency.ErrKeyHasNUL},
		"invalid UTF-8": {nil, with("a\xffb"), idempotency.ErrKeyNotUTF8},
		"no UUID":       {idempotency.MessageUUID(), message.NewMessage("", []byte("x")), idempotency.ErrMissingKey},
		"none of two":   {idempotency.FirstOf(idempotency.MetadataKey("a"), idempotency.MessageUUID()), message.NewMessage("", []byte("x")), idempotency.ErrMissingKey},
		"func fails":    {func(*message.Message) (string, error) { return "1", errBusiness }, with("1"), idempotency.ErrKeyFunc},
		"func panics":   {func(*message.Message) (string, error) { panic("no payload") }, with("1"), idempotency.ErrKeyFunc},
		"func is empty": {func(*message.Message) (string, error) { return "", nil }, with("1"), idempotency.ErrKeyEmpty},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var opts []idempotency.Option
			if test.key != nil {
				opts = append(opts, idempotency.WithKey(test.key))
			}
			b := setup(t, opts...)
			produced, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(test.msg)
			require.ErrorIs(t, err, test.want)
			require.Nil(t, produced)
			require.True(t, idempotency.IsPermanent(err))
			require.False(t, idempotency.IsTransient(err))
			require.Empty(t, b.store.Effects())
			require.Equal(t, []idempotency.Outcome{idempotency.Permanent}, b.observed.outcomes())
			if !errors.Is(test.want, idempotency.ErrMissingKey) {
				require.ErrorIs(t, err, idempotency.ErrInvalidKey)
			}
		})
	}
}

func TestKeysAreTakenAsTheyAre(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handle := b.Middleware.Middleware(idempotency.Handler(createLabel))
	ids := []string{"a", "A", "a ", " a", "á", "a\u0301", "01", "1", strings.Repeat("x", idempotency.MaxEventIDLength)}
	for _, id := range ids {
		_, err := handle(order(id))
		require.NoError(t, err)
	}
	require.Len(t, b.store.Effects(), len(ids))
}

func TestFirstOfTakesTheFirstThatIsThere(t *testing.T) {
	t.Parallel()
	key := idempotency.FirstOf(idempotency.MetadataKey("ce_id"), idempotency.MetadataKey("message_id"), idempotency.MessageUUID())
	msg := message.NewMessage("uuid", nil)
	id, err := key(msg)
	require.NoError(t, err)
	require.Equal(t, "uuid", id)

	msg.Metadata.Set("message_id", "second")
	id, err = key(msg)
	require.NoError(t, err)
	require.Equal(t, "second", id)

	msg.Metadata.Set("ce_id", "")
	id, err = key(msg)
	require.NoError(t, err)
	require.Empty(t, id, "an ID that is there and empty is no reason to look elsewhere: the middleware refuses it")

	half := message.NewMessage("uuid", nil)
	half.Metadata.Set("ce_id", "42")
	_, err = idempotency.FirstOf(idempotency.CloudEventKey(), idempotency.MessageUUID())(half)
	require.ErrorIs(t, err, idempotency.ErrInvalidKey, "nor is one that is invalid")
}

func TestTrap16_PhantomMessageIsNotPermanent(t *testing.T) {
	t.Parallel()
	b := setup(t, idempotency.WithKey(idempotency.MessageUUID()))
	_, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(message.NewMessage("", nil))
	require.ErrorIs(t, err, idempotency.ErrPhantomMessage)
	require.False(t, idempotency.IsPermanent(err), "no dead-letter queue fills up")
	require.True(t, idempotency.IsTransient(err))
	require.Equal(t, []idempotency.Outcome{idempotency.Transient}, b.observed.outcomes())
}

func TestEmptyMessageIsJudgedByTheKeyFunctionWithoutThePhantomCheck(t *testing.T) {
	t.Parallel()
	b := setup(t, idempotency.WithoutPhantomCheck())
	_, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(message.NewMessage("", nil))
	require.ErrorIs(t, err, idempotency.ErrMissingKey)
	require.True(t, idempotency.IsPermanent(err), "a tombstone holds up nothing")

	b = setup(t, idempotency.WithoutPhantomCheck(), idempotency.WithKey(func(*message.Message) (string, error) { return "by Kafka's key", nil }))
	_, err = b.Middleware.Middleware(idempotency.Handler(createLabel))(message.NewMessage("", nil))
	require.NoError(t, err)
}

func TestNoSubscriberID(t *testing.T) {
	t.Parallel()
	b := setup(t)
	m, err := idempotency.New(b.store)
	require.NoError(t, err)
	_, err = m.Middleware(idempotency.Handler(createLabel))(order("1"))
	require.ErrorIs(t, err, idempotency.ErrNoSubscriber)
	require.ErrorContains(t, err, "use WithSubscriberID")
	require.False(t, idempotency.IsPermanent(err))
	require.True(t, idempotency.IsTransient(err))
}

func FuzzEventID(f *testing.F) {
	for _, id := range []string{"", "a", "\x00", "\xff", "á", strings.Repeat("x", 1025)} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		b := setup(t)
		handle := b.Middleware.Middleware(idempotency.Handler(createLabel))
		_, err := handle(order(id))
		if err != nil {
			require.True(t, idempotency.IsPermanent(err))
			return
		}
		_, err = handle(order(id))
		require.NoError(t, err)
		require.Equal(t, []string{"label for " + id}, b.store.Effects())
	})
}
