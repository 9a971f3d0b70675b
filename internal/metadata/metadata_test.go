package metadata_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/internal/metadata"
)

func FuzzRoundTrip(f *testing.F) {
	f.Add("event_id", "a", "type", "b")
	f.Add("", "", "\xff", "\x00")
	f.Add("<&>", "\u2028", "x", "\xc3\x28")
	f.Fuzz(func(t *testing.T, name1, value1, name2, value2 string) {
		want := message.Metadata{name1: value1, name2: value2}
		data, err := metadata.Encode(want)
		require.NoError(t, err)
		got, err := metadata.Decode(data)
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

func TestNilBecomesEmpty(t *testing.T) {
	t.Parallel()
	data, err := metadata.Encode(nil)
	require.NoError(t, err)
	got, err := metadata.Decode(data)
	require.NoError(t, err)
	require.Equal(t, message.Metadata{}, got)
}

func TestDecodeNamesWhatItReads(t *testing.T) {
	t.Parallel()
	_, err := metadata.Decode([]byte("{"))
	require.ErrorContains(t, err, "stored metadata")
}
