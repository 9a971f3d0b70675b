package storetest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

func testFirstDelivery(t *testing.T, s *suite) {
	before := time.Now()
	tx := s.mustBeNew(t, claimOf("1"))
	require.NotNil(t, tx.Raw())
	s.write(t, tx, "label")
	if !s.OneWriter {
		s.requireEffects(t) // not before the commit
	}
	require.NoError(t, tx.Commit(bounded(t), nil))
	s.requireEffects(t, "label")

	for range 2 {
		record := s.mustBeDuplicate(t, claimOf("1"))
		require.Equal(t, "orders", record.Topic)
		require.Nil(t, record.Fingerprint)
		require.Empty(t, record.Produced)
		require.WithinRange(t, record.ClaimedAt, before.Add(-time.Minute), time.Now().Add(time.Minute), "ClaimedAt is a point in time")
	}
	other := claimOf("1")
	other.Topic = "orders.retry"
	require.Equal(t, "orders", s.mustBeDuplicate(t, other).Topic, "the topic is no part of the identity, and stays that of the first delivery")
	s.requireEffects(t, "label")
}

func testRollback(t *testing.T, s *suite) {
	for range 3 {
		tx := s.mustBeNew(t, claimOf("1"))
		s.write(t, tx, "label")
		require.NoError(t, tx.Rollback(bounded(t)))
		s.requireEffects(t)
	}
	s.process(t, claimOf("1"))
	s.requireEffects(t, "1")
}

func testEndTwice(t *testing.T, s *suite) {
	tx := s.mustBeNew(t, claimOf("committed"))
	s.write(t, tx, "committed")
	require.NoError(t, tx.Commit(bounded(t), nil))
	require.NoError(t, tx.Rollback(bounded(t)), "Rollback does nothing after Commit")
	require.Error(t, tx.Commit(bounded(t), nil), "a second Commit commits nothing, and must not say that it did")

	tx = s.mustBeNew(t, claimOf("rolled back"))
	s.write(t, tx, "rolled back")
	require.NoError(t, tx.Rollback(bounded(t)))
	require.NoError(t, tx.Rollback(bounded(t)), "Rollback does nothing after Rollback")
	require.ErrorIs(t, tx.Commit(bounded(t), nil), idempotency.ErrTxEnded, "nothing is committed after Rollback")
	s.requireEffects(t, "committed")
	require.NoError(t, s.mustBeNew(t, claimOf("rolled back")).Rollback(bounded(t)))
}

func testIndependentKeys(t *testing.T, s *suite) {
	keys := []idempotency.Key{{SubscriberID: "a", EventID: "1"}, {SubscriberID: "b", EventID: "1"}, {SubscriberID: "a", EventID: "2"}}
	var open []idempotency.Tx
	for i, key := range keys {
		tx := s.mustBeNew(t, idempotency.Claim{Key: key})
		s.write(t, tx, fmt.Sprint(i))
		if s.OneWriter {
			require.NoError(t, tx.Commit(bounded(t), nil))
			continue
		}
		open = append(open, tx) // all at once: they do not wait for each other
	}
	for _, tx := range open {
		require.NoError(t, tx.Commit(bounded(t), nil))
	}
	s.requireEffects(t, "0", "1", "2")
	for _, key := range keys {
		s.mustBeDuplicate(t, idempotency.Claim{Key: key})
	}
}

func testFingerprint(t *testing.T, s *suite) {
	for _, fingerprint := range [][]byte{{0}, []byte("\x00\xff'\\"), []byte(strings.Repeat("f", 64))} {
		c := claimOf(fmt.Sprintf("%x", fingerprint))
		c.Fingerprint = fingerprint
		s.process(t, c)
		c.Fingerprint = []byte("another")
		require.Equal(t, fingerprint, s.mustBeDuplicate(t, c).Fingerprint, "the record has the fingerprint of the first delivery")
	}
}

func testClassify(t *testing.T, s *suite) {
	require.Equal(t, idempotency.FaultOther, s.Store.Classify(nil))
	require.Equal(t, idempotency.FaultOther, s.Store.Classify(errPlain))
	require.Equal(t, idempotency.FaultOther, s.Store.Classify(fmt.Errorf("label: %w", errPlain)))
	require.Equal(t, idempotency.FaultOther, s.Store.Classify(fmt.Errorf("handler: %w", context.Canceled)),
		"a context that ended is not the database's fault: the middleware knows it")
}

// testKeysAreBytes uses IDs that some collation or trimming takes for the same.
func testKeysAreBytes(t *testing.T, s *suite) {
	ids := []string{
		"a1", "A1", "a1 ", " a1", "a1\t", "a1\n", "á1", "a\u03011", "ａ1", "01", "1", "1.0", "1e0", "+1", "ß", "ss", "ı", "i", "I",
		"'", "''", `"`, `\`, `\\`, "%", "_", "$1", "?", "--", "/*", "😀", "\u200b", "\ufeff", "\u0000a"[1:], "null", "NULL",
		strings.Repeat("x", idempotency.MaxEventIDLength), strings.Repeat("x", idempotency.MaxEventIDLength-1),
		strings.Repeat("é", idempotency.MaxEventIDLength/2),
	}
	subscriberIDs := []string{"s", "S", "s ", strings.Repeat("s", idempotency.MaxSubscriberIDLength)}
	seen := make(map[string]bool)
	for _, subscriberID := range subscriberIDs {
		for _, id := range ids {
			if subscriberID == "s" {
				require.False(t, seen[id] && id != "a", "the suite's own IDs must differ: %q", id)
				seen[id] = true
			}
			tx := s.mustBeNew(t, idempotency.Claim{Key: idempotency.Key{SubscriberID: subscriberID, EventID: id}})
			require.NoError(t, tx.Commit(bounded(t), nil), "key %q, %q", subscriberID, id)
		}
	}
	for _, subscriberID := range subscriberIDs {
		for _, id := range ids {
			s.mustBeDuplicate(t, idempotency.Claim{Key: idempotency.Key{SubscriberID: subscriberID, EventID: id}})
		}
	}
}
