package postgres_test

import (
	"context"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency"
	"github.com/watermill-idempotency/idempotency/internal/pgtest"
	"github.com/watermill-idempotency/idempotency/postgres"
)

func TestSmoke(t *testing.T) {
	pool := pgtest.Pool(t, 4)
	schema := pgtest.Schema(t)
	ctx := t.Context()
	require.NoError(t, postgres.Migrate(ctx, pool, postgres.WithSchema(schema)))
	require.NoError(t, postgres.Migrate(ctx, pool, postgres.WithSchema(schema)))
	s, err := postgres.New(ctx, pool, postgres.WithSchema(schema))
	require.NoError(t, err)
	k := idempotency.Claim{Key: idempotency.Key{SubscriberID: "s", EventID: "1"}, Topic: "t", InFlight: idempotency.FailFast()}
	tx, rec, err := s.Claim(ctx, k)
	require.NoError(t, err)
	require.Nil(t, rec)
	_, _, err = s.Claim(ctx, k)
	require.ErrorIs(t, err, idempotency.ErrInFlight)
	var lt string
	require.NoError(t, tx.Raw().(pgx.Tx).QueryRow(ctx, "show lock_timeout").Scan(&lt))
	require.Equal(t, "0", lt)
	require.NoError(t, tx.Commit(ctx, []*message.Message{message.NewMessage("u", nil), message.NewMessage("v", []byte("x"))}))
	tx, rec, err = s.Claim(ctx, k)
	require.NoError(t, err)
	require.Nil(t, tx)
	require.Len(t, rec.Produced, 2)
	require.NoError(t, s.Acked(ctx, []idempotency.Key{k.Key, k.Key}))
	_, rec, err = s.Claim(ctx, k)
	require.NoError(t, err)
	require.Empty(t, rec.Produced)

	for _, text := range []string{"rollback", "commit", "rollback and chain", "commit and chain", "rollback; begin"} {
		k.EventID = text
		tx, _, err = s.Claim(ctx, k)
		require.NoError(t, err)
		_, err = tx.Raw().(pgx.Tx).Exec(ctx, text)
		require.NoError(t, err)
		err = tx.Commit(ctx, nil)
		t.Log(text, err)
		require.ErrorIs(t, err, idempotency.ErrTxEnded)
	}
	k.EventID = "expired"
	tx, _, err = s.Claim(ctx, k)
	require.NoError(t, err)
	c, cancel := context.WithCancel(ctx)
	cancel()
	err = tx.Commit(c, nil)
	t.Log(err)
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
	k.EventID = "busy"
	tx, _, err = s.Claim(ctx, k)
	require.NoError(t, err)
	_, err = tx.Raw().(pgx.Tx).Query(ctx, "select generate_series(1,100000)")
	require.NoError(t, err)
	err = tx.Commit(ctx, nil)
	t.Log(err)
	require.ErrorIs(t, err, idempotency.ErrRolledBack)
}
