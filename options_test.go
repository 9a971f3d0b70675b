package idempotency_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
)

func TestNewTellsAllMistakesAtOnce(t *testing.T) {
	t.Parallel()
	_, err := idempotency.New(idempotencytest.NewMemStore(),
		idempotency.WithSubscriberID(strings.Repeat("x", 256)),
		idempotency.WithSubscriberPrefix("\xff"),
		idempotency.WithKey(nil),
		idempotency.WithoutFingerprint(),
		idempotency.WithCanonicalPayload(nil),
		idempotency.WithReplayHorizon(-time.Hour, nil),
		idempotency.WithInFlight(idempotency.WaitAtMost(0)),
		idempotency.WithProduced(idempotency.Outbox(nil)),
		idempotency.WithRetries(-1),
		idempotency.WithCommitTimeout(0),
		idempotency.WithLogger(nil),
		idempotency.WithObserver(nil),
	)
	require.EqualError(t, err, strings.Join([]string{
		"idempotency: WithSubscriberID: it has 256 bytes, 255 are allowed",
		"WithSubscriberPrefix: it is not valid UTF-8",
		"WithSubscriberPrefix: it excludes WithSubscriberID: take one",
		"WithKey: the function is nil",
		"WithCanonicalPayload: the function is nil",
		"WithCanonicalPayload: it is for the fingerprint, which WithoutFingerprint switches off: take one",
		"WithReplayHorizon: the function is nil",
		"WithReplayHorizon: -1h0m0s is not positive",
		"WithInFlight: WaitAtMost needs a positive duration, not 0s",
		"WithProduced: Outbox: the publisher is nil",
		"WithRetries: -1 is negative",
		"WithCommitTimeout: 0s is not positive",
		"WithLogger: the logger is nil: give watermill.NopLogger{} for silence",
		"WithObserver: the observer is nil",
	}, "\n"))
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewMemStore()
	for name, test := range map[string]struct {
		store idempotency.Store
		opts  []idempotency.Option
		want  string
	}{
		"no store":                {nil, nil, "the store is nil"},
		"store by value":          {uncomparable{MemStore: store}, nil, "use a pointer to it"},
		"nil option":              {store, []idempotency.Option{nil}, "an option is nil"},
		"nil policy":              {store, []idempotency.Option{idempotency.WithProduced(nil)}, "WithProduced: the policy is nil"},
		"empty subscriber":        {store, []idempotency.Option{idempotency.WithSubscriberID("")}, "WithSubscriberID: it is empty"},
		"empty prefix":            {store, []idempotency.Option{idempotency.WithSubscriberPrefix("")}, "WithSubscriberPrefix: it is empty"},
		"NUL in subscriber":       {store, []idempotency.Option{idempotency.WithSubscriberID("a\x00")}, "NUL"},
		"negative bound of waits": {store, []idempotency.Option{idempotency.WithInFlight(idempotency.WaitAtMost(-time.Second))}, "not -1s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := idempotency.New(test.store, test.opts...)
			require.ErrorContains(t, err, test.want)
		})
	}
	_, err := idempotency.NewRouting(nil)
	require.ErrorContains(t, err, "the function is nil")
}

type uncomparable struct {
	*idempotencytest.MemStore
	_ []string
}

type tenantKey struct{}

func TestNewRoutingChoosesTheStoreByTheMessagesContext(t *testing.T) {
	t.Parallel()
	stores := map[string]*idempotencytest.MemStore{"a": idempotencytest.NewMemStore(), "b": idempotencytest.NewMemStore()}
	m, err := idempotency.NewRouting(func(ctx context.Context) (idempotency.Store, error) {
		tenant, _ := ctx.Value(tenantKey{}).(string)
		switch tenant {
		case "":
			return nil, errors.New("message of no tenant")
		case "none":
			return nil, nil
		}
		return stores[tenant], nil
	}, idempotency.WithSubscriberID("shipping"))
	require.NoError(t, err)
	handle := m.Middleware(writeThen(func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{order("produced")}, nil
	}))
	of := func(tenant string) *message.Message {
		msg := order("1")
		msg.SetContext(context.WithValue(t.Context(), tenantKey{}, tenant))
		return msg
	}
	var acked []*message.Message
	for _, tenant := range []string{"a", "b", "a"} {
		msg := of(tenant)
		produced, err := handle(msg)
		require.NoError(t, err)
		require.Len(t, produced, 1)
		acked = append(acked, msg)
	}
	for tenant, store := range stores {
		require.Equal(t, []string{"label for 1"}, store.Effects(), tenant)
	}
	for _, msg := range acked {
		msg.Ack()
	}
	require.NoError(t, m.Flush(t.Context()))
	for tenant := range stores {
		produced, err := handle(of(tenant))
		require.NoError(t, err)
		require.Empty(t, produced, "each store is told of its acks")
	}

	_, err = handle(of(""))
	require.ErrorContains(t, err, "message of no tenant")
	require.True(t, idempotency.IsTransient(err))
	_, err = handle(of("none"))
	require.ErrorContains(t, err, "the store is nil")
}
