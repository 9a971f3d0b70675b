package dupcache_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/dupcache"
	"github.com/watermill-idempotency/idempotency/idempotencytest"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
	"github.com/watermill-idempotency/idempotency/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// backing counts the claims that come through.
type backing struct {
	*idempotencytest.MemStore
	claims atomic.Int64
}

func (s *backing) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Tx, *idempotency.Record, error) {
	s.claims.Add(1)
	return s.MemStore.Claim(ctx, c)
}

func (s *backing) Retention() (time.Duration, bool) { return time.Hour, true }

func open(t *testing.T, size int) (*backing, *dupcache.Store) {
	t.Helper()
	b := &backing{MemStore: idempotencytest.NewMemStore()}
	store, err := dupcache.New(b, size, time.Minute)
	require.NoError(t, err)
	return b, store
}

func claimOf(eventID string) idempotency.Claim {
	return idempotency.Claim{Key: idempotency.Key{SubscriberID: "shipping", EventID: eventID}, Topic: "orders", Fingerprint: []byte("content")}
}

func process(t *testing.T, store idempotency.Store, eventID string, produced ...*message.Message) {
	t.Helper()
	tx, record, err := store.Claim(t.Context(), claimOf(eventID))
	require.NoError(t, err)
	require.Nil(t, record)
	require.NoError(t, tx.Commit(t.Context(), produced))
}

func mustBeDuplicate(t *testing.T, store idempotency.Store, eventID string) *idempotency.Record {
	t.Helper()
	tx, record, err := store.Claim(t.Context(), claimOf(eventID))
	require.NoError(t, err)
	require.Nil(t, tx)
	require.NotNil(t, record)
	require.Equal(t, claimOf(eventID).Key, record.Key)
	require.Equal(t, "orders", record.Topic)
	require.Equal(t, []byte("content"), record.Fingerprint)
	return record
}

func TestStoreKeepsTheContract(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 10_000} {
		t.Run(fmt.Sprintf("memory, size %d", size), func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) storetest.Backend {
				b, store := open(t, size)
				return storetest.Backend{
					Store: store,
					Write: func(_ context.Context, tx any, effect string) error { return tx.(*idempotencytest.MemTx).Write(effect) },
					Effects: func(context.Context) (map[string]int, error) {
						effects := make(map[string]int)
						for _, effect := range b.Effects() {
							effects[effect]++
						}
						return effects, nil
					},
					Abort: func(_ context.Context, tx any) error {
						tx.(*idempotencytest.MemTx).Abort(errors.New("aborted"))
						return nil
					},
				}
			})
		})
	}
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) storetest.Backend {
			ctx := t.Context()
			pool, schema := pgtest.Pool(t, 16), pgtest.Schema(t)
			require.NoError(t, postgres.Migrate(ctx, pool, postgres.WithSchema(schema)))
			behind, err := postgres.New(ctx, pool, postgres.WithSchema(schema))
			require.NoError(t, err)
			store, err := dupcache.New(behind, 1000, time.Minute)
			require.NoError(t, err)
			_, err = pool.Exec(ctx, "create table "+schema+".effect (name text not null)")
			require.NoError(t, err)
			return storetest.Backend{
				Store: store,
				Write: func(ctx context.Context, tx any, name string) error {
					_, err := tx.(pgx.Tx).Exec(ctx, "insert into "+schema+".effect values ($1)", name)
					return err
				},
				Effects: func(ctx context.Context) (map[string]int, error) {
					rows, err := pool.Query(ctx, "select name from "+schema+".effect")
					if err != nil {
						return nil, err
					}
					names, err := pgx.CollectRows(rows, pgx.RowTo[string])
					effects := make(map[string]int)
					for _, name := range names {
						effects[name]++
					}
					return effects, err
				},
				Abort: func(ctx context.Context, tx any) error {
					_, err := tx.(pgx.Tx).Exec(ctx, "select 1/0")
					require.Error(t, err)
					return nil
				},
			}
		})
	})
}

func TestDuplicatesAreAnsweredFromMemory(t *testing.T) {
	t.Parallel()
	b, store := open(t, 10)
	process(t, store, "own commit")
	process(t, b, "another process")
	require.EqualValues(t, 2, b.claims.Swap(0))
	for range 3 {
		mustBeDuplicate(t, store, "own commit").Fingerprint[0] = 'x' // the caller's to change
	}
	require.Zero(t, b.claims.Load())
	for range 3 {
		mustBeDuplicate(t, store, "another process").Fingerprint[0] = 'x'
	}
	require.EqualValues(t, 1, b.claims.Load(), "the first reads the record")
	retention, ok := store.Retention()
	require.True(t, ok)
	require.Equal(t, time.Hour, retention)
}

// As long as the produced messages are stored, a duplicate must get them, from this process or from another one.
func TestProducedMessagesComeFromTheStoreUntilTheyAreAcked(t *testing.T) {
	t.Parallel()
	b, store := open(t, 10)
	process(t, store, "1", message.NewMessage("produced", nil))
	process(t, b, "2", message.NewMessage("produced", nil))
	for _, eventID := range []string{"1", "2", "1", "2"} {
		require.Len(t, mustBeDuplicate(t, store, eventID).Produced, 1)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	keys := []idempotency.Key{claimOf("1").Key, claimOf("2").Key}
	require.Error(t, store.Acked(cancelled, keys))
	require.Len(t, mustBeDuplicate(t, store, "1").Produced, 1, "the store has not removed them")
	require.NoError(t, store.Acked(t.Context(), keys))
	b.claims.Store(0)
	for range 3 {
		require.Empty(t, mustBeDuplicate(t, store, "1").Produced)
		require.Empty(t, mustBeDuplicate(t, store, "2").Produced)
	}
	require.EqualValues(t, 1, b.claims.Load(), "only event 2, whose record had produced messages before")
}

func TestOnlyKnownCommitsAreRemembered(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]error{"rolled back": idempotency.ErrRolledBack, "answer lost": errors.New("connection reset")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, store := open(t, 10)
			b.FailCommit(fault)
			tx, _, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.ErrorIs(t, tx.Commit(t.Context(), nil), fault)
			tx, record, err := store.Claim(t.Context(), claimOf("1"))
			require.NoError(t, err)
			require.EqualValues(t, 2, b.claims.Load(), "the store decides")
			require.Equal(t, errors.Is(fault, idempotency.ErrRolledBack), record == nil)
			if tx != nil {
				require.NoError(t, tx.Rollback(t.Context()))
			}
		})
	}
	b, store := open(t, 10)
	for range 2 {
		tx, record, err := store.Claim(t.Context(), claimOf("1"))
		require.NoError(t, err)
		require.Nil(t, record)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	require.EqualValues(t, 2, b.claims.Load())
}

func TestItIsBoundedAndExpires(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, store := open(t, 2)
		for i := range 3 {
			process(t, store, fmt.Sprint(i))
		}
		b.claims.Store(0)
		mustBeDuplicate(t, store, "1")
		mustBeDuplicate(t, store, "2")
		require.Zero(t, b.claims.Load())
		mustBeDuplicate(t, store, "0")
		require.EqualValues(t, 1, b.claims.Load(), "the oldest had to go")

		<-time.After(time.Minute - time.Nanosecond)
		mustBeDuplicate(t, store, "2")
		require.EqualValues(t, 1, b.claims.Load())
		<-time.After(time.Nanosecond)
		mustBeDuplicate(t, store, "2")
		require.EqualValues(t, 2, b.claims.Load(), "being read prolongs nothing")
	})
}

func TestRecordsAreTheCallers(t *testing.T) {
	t.Parallel()
	_, store := open(t, 10)
	process(t, store, "1")
	clear(mustBeDuplicate(t, store, "1").Fingerprint)
	mustBeDuplicate(t, store, "1")
}

func TestConflictsAreFound(t *testing.T) {
	t.Parallel()
	b, store := open(t, 10)
	m, err := idempotency.New(store, idempotency.WithSubscriberID("shipping"), idempotency.WithLogger(watermill.NopLogger{}))
	require.NoError(t, err)
	handle := m.Middleware(func(*message.Message) ([]*message.Message, error) { return nil, nil })
	deliver := func(payload string) error {
		msg := message.NewMessage("1", []byte(payload))
		msg.Metadata.Set(idempotency.EventIDMetadata, "1")
		_, err := handle(msg)
		return err
	}
	require.NoError(t, deliver("content"))
	require.NoError(t, deliver("content"))
	require.ErrorIs(t, deliver("other content"), idempotency.ErrConflict)
	require.EqualValues(t, 1, b.claims.Load())
}

func TestManyProcessOneEvent(t *testing.T) {
	t.Parallel()
	b, store := open(t, 8) // less than there are events, so that some go while others come
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for i := range 400 {
				c := claimOf(fmt.Sprint(i / 4 % 20))
				tx, record, err := store.Claim(t.Context(), c)
				if err != nil || record != nil {
					if err != nil {
						t.Error(err)
					}
					continue
				}
				if err := tx.Raw().(*idempotencytest.MemTx).Write(c.EventID); err != nil {
					t.Error(err)
				}
				if err := tx.Commit(t.Context(), []*message.Message{message.NewMessage(c.EventID, nil)}); err != nil {
					t.Error(err)
				}
				if err := store.Acked(t.Context(), []idempotency.Key{c.Key}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	require.Len(t, b.Effects(), 20)
}

func TestNewNamesAllMistakes(t *testing.T) {
	t.Parallel()
	_, err := dupcache.New(nil, 0, -time.Second)
	require.EqualError(t, err, "dupcache: New: the store is nil\nthe size, 0, is not positive\nthe time to live, -1s, is not positive")
}
