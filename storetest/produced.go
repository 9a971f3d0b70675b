package storetest

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

func newMessage(uuid string, payload []byte, metadata message.Metadata) *message.Message {
	msg := message.NewMessage(uuid, payload)
	msg.Metadata = metadata
	return msg
}

func (s *suite) produce(t *testing.T, c idempotency.Claim, produced ...*message.Message) {
	t.Helper()
	tx := s.mustBeNew(t, c)
	require.NoError(t, tx.Commit(bounded(t), produced))
}

func requireSame(t *testing.T, want, got []*message.Message) {
	t.Helper()
	require.Len(t, got, len(want), "produced messages of the record")
	for i := range want {
		require.Equal(t, want[i].UUID, got[i].UUID, "UUID of produced message %d", i)
		require.True(t, bytes.Equal(want[i].Payload, got[i].Payload), "payload of produced message %d", i)
		require.Len(t, got[i].Metadata, len(want[i].Metadata), "metadata of produced message %d", i)
		for name, value := range want[i].Metadata {
			require.Equal(t, value, got[i].Metadata[name], "metadata %q of produced message %d", name, i)
		}
	}
}

func testProducedRoundTrip(t *testing.T, s *suite) {
	produced := []*message.Message{
		newMessage("1", []byte("payload"), message.Metadata{"event_id": "1", "type": "LabelCreated"}),
		newMessage("nothing", nil, nil),
		newMessage("empty", []byte{}, message.Metadata{}),
		newMessage("same", []byte("twice"), nil),
		newMessage("same", []byte("twice"), nil),
		newMessage("binary", []byte("\x00\xff\xfe'\\"), message.Metadata{"": "", "a": "\x00\xff", "\xff\x00": "b", "<&>": "\u2028", "quote\"": `\`}),
		newMessage("large", bytes.Repeat([]byte("0123456789abcdef"), 1<<16), nil), // 1 MiB
	}
	s.produce(t, claimOf("1"), produced...)
	requireSame(t, produced, s.mustBeDuplicate(t, claimOf("1")).Produced)
	s.produce(t, claimOf("2"))
	require.Empty(t, s.mustBeDuplicate(t, claimOf("2")).Produced)
}

func testProducedOrder(t *testing.T, s *suite) {
	var produced []*message.Message
	for i := range 1000 {
		produced = append(produced, newMessage(fmt.Sprint(i*7919%1000), []byte(fmt.Sprint(i)), nil))
	}
	s.produce(t, claimOf("1"), produced...)
	requireSame(t, produced, s.mustBeDuplicate(t, claimOf("1")).Produced)
}

func testProducedAreFresh(t *testing.T, s *suite) {
	original := newMessage("1", []byte("payload"), message.Metadata{"a": "b"})
	s.produce(t, claimOf("1"), original)
	want := []*message.Message{newMessage("1", []byte("payload"), message.Metadata{"a": "b"})}
	original.Payload[0], original.UUID = 'x', "x" // the caller's to change, once Commit has returned
	original.Metadata.Set("a", "x")

	first := s.mustBeDuplicate(t, claimOf("1")).Produced
	requireSame(t, want, first)
	first[0].Payload[0] = 'x'
	first[0].Metadata.Set("a", "x")
	first[0].Ack()
	second := s.mustBeDuplicate(t, claimOf("1")).Produced
	requireSame(t, want, second)
	select {
	case <-second[0].Acked():
		require.FailNow(t, "each record has messages of its own")
	default:
	}
}

func testProducedRollBack(t *testing.T, s *suite) {
	tx := s.mustBeNew(t, claimOf("1"))
	require.NoError(t, tx.Rollback(bounded(t)))
	if s.Abort != nil {
		tx = s.mustBeNew(t, claimOf("1"))
		require.NoError(t, s.Abort(bounded(t), tx.Raw()))
		require.Error(t, tx.Commit(bounded(t), []*message.Message{newMessage("lost", nil, nil)}))
	}
	s.produce(t, claimOf("1"))
	require.Empty(t, s.mustBeDuplicate(t, claimOf("1")).Produced)
}

func testAcked(t *testing.T, s *suite) {
	keys := []idempotency.Key{claimOf("never claimed").Key}
	for i := range 300 {
		c := claimOf(fmt.Sprint(i))
		keys = append(keys, c.Key, c.Key) // the same key may come twice
		s.produce(t, c, newMessage("a", nil, nil), newMessage("b", nil, nil))
	}
	s.produce(t, claimOf("kept"), newMessage("c", nil, nil))
	require.NoError(t, s.Store.Acked(bounded(t), nil))
	require.NoError(t, s.Store.Acked(bounded(t), keys))
	require.NoError(t, s.Store.Acked(bounded(t), keys), "what is gone may be acked again")
	for i := range 300 {
		require.Empty(t, s.mustBeDuplicate(t, claimOf(fmt.Sprint(i))).Produced, "the claim stays, its produced messages go")
	}
	require.Len(t, s.mustBeDuplicate(t, claimOf("kept")).Produced, 1)
}

// testAckedConcurrently acks the same keys in different orders while more are claimed.
func testAckedConcurrently(t *testing.T, s *suite) {
	const n = 50
	var keys, reversed []idempotency.Key
	for i := range n {
		keys = append(keys, claimOf(fmt.Sprint(i)).Key)
		reversed = append([]idempotency.Key{keys[i]}, reversed...)
		s.produce(t, claimOf(fmt.Sprint(i)), newMessage("a", nil, nil))
	}
	ctx := bounded(t)
	var workers sync.WaitGroup
	errs := make([]error, 8)
	for w := range errs {
		workers.Go(func() {
			order := keys
			if w%2 == 1 {
				order = reversed
			}
			errs[w] = s.Store.Acked(ctx, order)
		})
	}
	for i := range n {
		s.produce(t, claimOf(fmt.Sprintf("more %d", i)), newMessage("a", nil, nil))
	}
	workers.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	for i := range n {
		require.Empty(t, s.mustBeDuplicate(t, claimOf(fmt.Sprint(i))).Produced)
		require.Len(t, s.mustBeDuplicate(t, claimOf(fmt.Sprintf("more %d", i))).Produced, 1)
	}
}
