package idempotencytest_test

import (
	"context"
	"errors"
	"testing"

	"go.uber.org/goleak"

	"github.com/watermill-idempotency/idempotency/idempotencytest"
	"github.com/watermill-idempotency/idempotency/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemStoreKeepsTheContract(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(*testing.T) storetest.Backend {
		store := idempotencytest.NewMemStore()
		return storetest.Backend{
			Store: store,
			Write: func(_ context.Context, tx any, effect string) error { return tx.(*idempotencytest.MemTx).Write(effect) },
			Effects: func(context.Context) (map[string]int, error) {
				effects := make(map[string]int)
				for _, effect := range store.Effects() {
					effects[effect]++
				}
				return effects, nil
			},
			Abort: func(_ context.Context, tx any) error {
				tx.(*idempotencytest.MemTx).Abort(errors.New("a statement failed"))
				return nil
			},
		}
	})
}
