package idempotency_test

import (
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// failingPublisher fails as often as it says, and keeps what it was given.
type failingPublisher struct {
	failures int
	ids      []string
	closed   bool
}

func (p *failingPublisher) Publish(_ string, messages ...*message.Message) error {
	for _, msg := range messages {
		p.ids = append(p.ids, msg.Metadata.Get(idempotency.EventIDMetadata))
	}
	p.failures--
	if p.failures >= 0 {
		return errors.New("the broker is down")
	}
	return nil
}

func (p *failingPublisher) Close() error {
	p.closed = true
	return nil
}

func TestStampEventIDStampsOnce(t *testing.T) {
	t.Parallel()
	inner := &failingPublisher{failures: 1}
	var decorate message.PublisherDecorator = idempotency.StampEventID
	pub, err := decorate(inner)
	require.NoError(t, err)

	stamped, bare := message.NewMessage("", nil), &message.Message{}
	stamped.Metadata.Set(idempotency.EventIDMetadata, "mine")
	require.Error(t, pub.Publish("orders", stamped, bare))
	require.NoError(t, pub.Publish("orders", stamped, bare), "the producer tries again")

	require.Equal(t, []string{"mine", inner.ids[1], "mine", inner.ids[1]}, inner.ids)
	id, err := uuid.Parse(inner.ids[1])
	require.NoError(t, err)
	require.Equal(t, uuid.Version(7), id.Version())

	require.NoError(t, pub.Close())
	require.True(t, inner.closed)
	_, err = idempotency.StampEventID(nil)
	require.ErrorContains(t, err, "nil")
}
