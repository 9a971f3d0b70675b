package bench

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
)

// noStore claims everything and keeps nothing, so that what is left is the middleware itself.
type noStore struct{}

func (noStore) Claim(context.Context, idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	return noTx{}, nil, nil
}
func (noStore) Acked(context.Context, []idempotency.Key) error { return nil }
func (noStore) Classify(error) idempotency.Fault               { return idempotency.FaultOther }

type noTx struct{}

func (noTx) Raw() any                                         { return nil }
func (noTx) Commit(context.Context, []*message.Message) error { return nil }
func (noTx) Rollback(context.Context) error                   { return nil }

// BenchmarkMiddleware is the middleware without a database.
func BenchmarkMiddleware(b *testing.B) {
	for _, size := range []int{1 << 10, 100 << 10} {
		for _, impl := range []string{"plain", "nofingerprint", "fingerprint"} {
			b.Run(fmt.Sprintf("bytes=%d/impl=%s", size, impl), func(b *testing.B) {
				calls := 0
				handle := countCalls(&calls)
				switch impl {
				case "fingerprint":
					handle = newMiddleware(b, noStore{}).Middleware(handle)
				case "nofingerprint":
					handle = newMiddleware(b, noStore{}, idempotency.WithoutFingerprint()).Middleware(handle)
				}
				msg := message.NewMessage("event", bytes.Repeat([]byte("x"), size))
				msg.Metadata.Set(idempotency.EventIDMetadata, "event")
				b.ReportAllocs()
				for b.Loop() {
					if _, err := handle(msg); err != nil {
						b.Fatal(err)
					}
				}
				require.Equal(b, b.N, calls)
			})
		}
	}
}

// countCalls is a handler that does nothing.
func countCalls(calls *int) message.HandlerFunc {
	return func(*message.Message) ([]*message.Message, error) {
		*calls++
		return nil, nil
	}
}
