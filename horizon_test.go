package idempotency_test

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/oklog/ulid"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

func placedAt(id string, at time.Time) *message.Message {
	msg := order(id)
	msg.Metadata.Set("placed_at", at.Format(time.RFC3339Nano))
	return msg
}

func TestEventBeyondTheHorizonIsNotTakenForNew(t *testing.T) {
	t.Parallel()
	b := setup(t, idempotency.WithReplayHorizon(time.Hour, idempotency.MetadataTime("placed_at")))
	handle := b.Middleware.Middleware(idempotency.Handler(createLabel))
	now := time.Now()

	_, err := handle(placedAt("young", now.Add(-59*time.Minute)))
	require.NoError(t, err)
	_, err = handle(placedAt("from a clock that is ahead", now.Add(time.Minute)))
	require.NoError(t, err)
	effects := b.store.Effects()

	for name, test := range map[string]struct {
		msg  *message.Message
		want error
	}{
		"old":       {placedAt("old", now.Add(-61*time.Minute)), idempotency.ErrBeyondHorizon},
		"no time":   {order("no time"), idempotency.ErrMissingTime},
		"no moment": {func() *message.Message { m := order("x"); m.Metadata.Set("placed_at", "soon"); return m }(), idempotency.ErrInvalidTime},
	} {
		_, err = handle(test.msg)
		require.ErrorIs(t, err, test.want, name)
		require.True(t, idempotency.IsPermanent(err), name)
		require.False(t, idempotency.IsTransient(err), name)
		require.Equal(t, effects, b.store.Effects(), name)
	}
	require.Equal(t, []idempotency.Outcome{
		idempotency.Processed, idempotency.Processed, idempotency.Permanent, idempotency.Permanent, idempotency.Permanent,
	}, b.observed.outcomes())
}

// What has a record is no news, however old it is: its produced messages may still wait to be published.
func TestDuplicateBeyondTheHorizonIsADuplicate(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.Middleware.Middleware(writeThen(returnOne))(placedAt("1", time.Now().Add(-2*time.Hour)))
	require.NoError(t, err)

	later, err := idempotency.New(b.store, idempotency.WithSubscriberID("shipping"),
		idempotency.WithReplayHorizon(time.Hour, idempotency.MetadataTime("placed_at")))
	require.NoError(t, err)
	produced, err := later.Middleware(writeThen(returnOne))(placedAt("1", time.Now().Add(-2*time.Hour)))
	require.NoError(t, err)
	require.Len(t, produced, 1)
	require.Len(t, b.store.Effects(), 1)
}

func TestTimeFuncThatPanicsIsAPermanentError(t *testing.T) {
	t.Parallel()
	b := setup(t, idempotency.WithReplayHorizon(time.Hour, func(*message.Message, string) (time.Time, error) { panic("no time") }))
	_, err := b.Middleware.Middleware(idempotency.Handler(createLabel))(order("1"))
	require.ErrorIs(t, err, idempotency.ErrInvalidTime)
	require.Equal(t, []idempotency.Outcome{idempotency.Permanent}, b.observed.outcomes())
}

func TestTimesOfEvents(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 2, 3, 4, 5, 6, 789e6, time.UTC)
	v7 := uuid.UUID{6: 0x70, 8: 0x80}
	for i, ms := 5, at.UnixMilli(); i >= 0; i, ms = i-1, ms>>8 {
		v7[i] = byte(ms)
	}
	v1, err := uuid.NewUUID()
	require.NoError(t, err)
	for name, test := range map[string]struct {
		fn      idempotency.TimeFunc
		msg     *message.Message
		eventID string
		want    time.Time
		wantErr error
	}{
		"UUIDv7":                 {fn: idempotency.EventIDTime(), eventID: v7.String(), want: at},
		"UUIDv7 of a CloudEvent": {fn: idempotency.EventIDTime(), eventID: `my\ shop ` + v7.String(), want: at},
		"UUIDv1":                 {fn: idempotency.EventIDTime(), eventID: v1.String(), want: time.Unix(v1.Time().UnixTime()).UTC()},
		"ULID":                   {fn: idempotency.EventIDTime(), eventID: ulid.MustNew(ulid.Timestamp(at), zeros{}).String(), want: at},
		"UUIDv4":                 {fn: idempotency.EventIDTime(), eventID: uuid.NewString(), wantErr: idempotency.ErrMissingTime},
		"no ID with a time":      {fn: idempotency.EventIDTime(), eventID: "order-7", wantErr: idempotency.ErrMissingTime},
		"CloudEvent":             {fn: idempotency.CloudEventTime(), msg: withMetadata("", "ce_time", "2026-02-03T05:05:06.789+01:00"), want: at},
		"quoted CloudEvent":      {fn: idempotency.CloudEventTime(idempotency.UnquoteCloudEvents()), msg: withMetadata("", "ce_time", `"2026-02-03T04:05:06.789Z"`), want: at},
		"structured CloudEvent":  {fn: idempotency.CloudEventTime(), msg: withMetadata(`{"time":"2026-02-03T04:05:06.789Z"}`, "content-type", structured), want: at},
		"CloudEvent without":     {fn: idempotency.CloudEventTime(), msg: withMetadata("", "ce_id", "1"), wantErr: idempotency.ErrMissingTime},
		"first":                  {fn: idempotency.FirstTime(idempotency.CloudEventTime(), idempotency.MetadataTime("at"), idempotency.EventIDTime()), msg: withMetadata("", "at", "2026-02-03T04:05:06.789Z"), want: at},
		"none":                   {fn: idempotency.FirstTime(idempotency.CloudEventTime(), idempotency.MetadataTime("at")), msg: withMetadata(""), wantErr: idempotency.ErrMissingTime},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := test.fn(test.msg, test.eventID)
			require.ErrorIs(t, err, test.wantErr)
			require.Equal(t, test.want, got.UTC())
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// retainingStore knows how long it keeps records.
type retainingStore struct {
	*testStore
	retention time.Duration
}

func (s *retainingStore) Retention() (time.Duration, bool) { return s.retention, s.retention > 0 }

func TestRetentionShorterThanTheHorizonIsToldOnce(t *testing.T) {
	t.Parallel()
	for retention, want := range map[time.Duration]int{0: 0, time.Minute: 1, time.Hour: 0} {
		b := setup(t)
		m, err := idempotency.New(&retainingStore{b.store, retention}, idempotency.WithSubscriberID("shipping"),
			idempotency.WithLogger(b.logs), idempotency.WithReplayHorizon(time.Hour, idempotency.MetadataTime("placed_at")))
		require.NoError(t, err)
		for _, id := range []string{"1", "2"} {
			_, err = m.Middleware(idempotency.Handler(createLabel))(placedAt(id, time.Now()))
			require.NoError(t, err)
		}
		require.Len(t, b.logs.Captured()[watermill.ErrorLogLevel], want, "retention %v", retention)
	}
}
