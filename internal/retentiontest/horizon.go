package retentiontest

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// An event comes again after a purge: either its claim is there, or it is beyond the horizon. Neither is processed.
func testHorizon(t *testing.T, s *suite) {
	const horizon = Keep - day
	idem, err := idempotency.New(s.Store,
		idempotency.WithSubscriberID(subscriber),
		idempotency.WithLogger(watermill.NopLogger{}),
		idempotency.WithReplayHorizon(horizon, idempotency.MetadataTime("placed_at")))
	require.NoError(t, err)
	processed := 0
	handle := idem.Middleware(func(*message.Message) ([]*message.Message, error) {
		processed++
		return nil, nil
	})
	deliver := func(eventID string, age time.Duration) error {
		msg := message.NewMessage("", nil)
		msg.Metadata.Set(idempotency.EventIDMetadata, eventID)
		msg.Metadata.Set("placed_at", time.Now().Add(-age).Format(time.RFC3339Nano))
		msg.SetContext(bounded(t))
		_, err := handle(msg)
		return err
	}
	for eventID, age := range map[string]time.Duration{"young": horizon - time.Hour, "old": 30 * day, "reference": 2 * time.Hour} {
		require.NoError(t, deliver(eventID, time.Minute)) // it was young when it came first
		require.NoError(t, s.Age(bounded(t), keyOf(eventID), age))
	}
	require.EqualValues(t, 1, s.purge(t).Claims)
	s.requireCount(t, "old", 0)

	require.NoError(t, deliver("young", horizon-time.Hour))
	require.ErrorIs(t, deliver("old", 30*day), idempotency.ErrBeyondHorizon)
	require.NoError(t, deliver("reference", 30*day), "it has a claim, so it is a duplicate, however old it is said to be")
	require.Equal(t, 3, processed, "nothing a second time")
	s.requireCount(t, "old", 0)

	require.NoError(t, deliver("new", time.Minute))
	require.Equal(t, 4, processed)
}
