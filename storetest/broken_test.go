package storetest_test

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
	"github.com/watermill-idempotency/idempotency/storetest"
)

// broken is a store with a bug in one of its steps.
type broken struct {
	*idempotencytest.MemStore
	bug string
}

type brokenTx struct {
	idempotency.Tx
	bug string
}

func (s broken) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	switch s.bug {
	case "trims IDs":
		c.EventID = strings.TrimSpace(c.EventID)
	case "ignores the subscriber":
		c.SubscriberID = ""
	case "waits although bounded":
		c.InFlight = idempotency.Wait()
	}
	tx, record, err := s.MemStore.Claim(ctx, c)
	switch {
	case s.bug == "takes an error for a duplicate" && err != nil:
		return nil, &idempotency.Record{Key: c.Key}, nil //nolint:nilerr // the bug
	case s.bug == "reverses produced" && record != nil:
		slices.Reverse(record.Produced)
	case tx != nil:
		tx = brokenTx{tx, s.bug}
	}
	return tx, record, err
}

func (s broken) Acked(ctx context.Context, keys []idempotency.Key) error {
	if s.bug == "forgets no acks" {
		return nil
	}
	return s.MemStore.Acked(ctx, keys)
}

func (tx brokenTx) Commit(ctx context.Context, produced []*message.Message) error {
	switch tx.bug {
	case "loses produced":
		produced = nil
	case "commits nothing":
		return tx.Tx.Rollback(ctx)
	case "acks an aborted transaction":
		_ = tx.Tx.Commit(ctx, produced)
		return nil
	}
	return tx.Tx.Commit(ctx, produced)
}

func (tx brokenTx) Rollback(ctx context.Context) error {
	if tx.bug == "commits on rollback" {
		_ = tx.Tx.Commit(ctx, nil)
		return nil
	}
	return tx.Tx.Rollback(ctx)
}

const bugVariable = "STORETEST_BUG"

// TestBrokenStore is run by TestSuiteFindsBugs, in a process of its own.
func TestBrokenStore(t *testing.T) {
	bug, ok := os.LookupEnv(bugVariable)
	if !ok {
		t.Skip("TestSuiteFindsBugs runs it")
	}
	storetest.Run(t, func(*testing.T) storetest.Backend {
		store := idempotencytest.NewMemStore()
		return storetest.Backend{
			Store: broken{store, bug},
			Write: func(_ context.Context, tx any, effect string) error { return tx.(*idempotencytest.MemTx).Write(effect) },
			Effects: func(context.Context) (map[string]int, error) {
				effects := make(map[string]int)
				for _, effect := range store.Effects() {
					effects[effect]++
				}
				return effects, nil
			},
			Abort: func(_ context.Context, tx any) error {
				tx.(*idempotencytest.MemTx).Abort(context.Canceled)
				return nil
			},
		}
	})
}

// A suite that passes everything proves nothing.
func TestSuiteFindsBugs(t *testing.T) {
	t.Parallel()
	for bug, test := range map[string]string{
		"":                               "",
		"trims IDs":                      "key/bytes",
		"ignores the subscriber":         "claim/independent_keys",
		"takes an error for a duplicate": "context/cancelled_before",
		"reverses produced":              "produced/order",
		"loses produced":                 "produced/round_trip",
		"forgets no acks":                "produced/acked",
		"commits nothing":                "claim/first_delivery",
		"commits on rollback":            "claim/rollback",
		"acks an aborted transaction":    "fault/aborted",
		"waits although bounded":         "race/fail_fast",
	} {
		t.Run(bug, func(t *testing.T) {
			t.Parallel()
			run := "^TestBrokenStore$"
			if test != "" {
				run += "/^" + strings.ReplaceAll(test, "/", "$/^") + "$"
			}
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run="+run)
			cmd.Env = append(os.Environ(), bugVariable+"="+bug)
			out, err := cmd.CombinedOutput()
			if test == "" {
				require.NoError(t, err, "the store without a bug fails: %s", out)
				return
			}
			require.Error(t, err, "the suite has not found the bug")
			require.Contains(t, string(out), "--- FAIL: TestBrokenStore/"+test)
		})
	}
}
