// Package pgtest gives tests a PostgreSQL server, and each test a schema of its own.
package pgtest

import (
	"context"
	"crypto/rand"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// The variables that name the servers: the oldest and the newest version that is tested.
const (
	URLVariable   = "IDEMPOTENCY_POSTGRES_URL"
	URL18Variable = "IDEMPOTENCY_POSTGRES18_URL"
)

// URL returns the address of the server that the variable names. Without one the test fails; under -short it is skipped.
func URL(tb testing.TB, variable string) string {
	tb.Helper()
	if testing.Short() {
		tb.Skip("needs PostgreSQL: not run with -short")
	}
	url := os.Getenv(variable)
	if url == "" {
		tb.Fatalf("%s is not set: run integration/services/start.sh and then: . .services/env", variable)
	}
	return url
}

// Config returns a pool configuration for the main server, with at most n connections.
func Config(tb testing.TB, n int32) *pgxpool.Config {
	tb.Helper()
	config, err := pgxpool.ParseConfig(URL(tb, URLVariable))
	require.NoError(tb, err)
	config.MaxConns = n
	return config
}

// Open returns a pool that is closed with the test.
func Open(tb testing.TB, config *pgxpool.Config) *pgxpool.Pool {
	tb.Helper()
	pool, err := pgxpool.NewWithConfig(tb.Context(), config)
	require.NoError(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

// Pool is [Open] with [Config].
func Pool(tb testing.TB, n int32) *pgxpool.Pool {
	tb.Helper()
	return Open(tb, Config(tb, n))
}

// Schema makes an empty schema on the main server, drops it with the test, and returns its name. The search path does not
// lead to it.
func Schema(tb testing.TB) string {
	tb.Helper()
	return SchemaAt(tb, URL(tb, URLVariable))
}

// SchemaAt is [Schema] on another server.
func SchemaAt(tb testing.TB, url string) string {
	tb.Helper()
	name := "test_" + strings.ToLower(rand.Text())
	execute(tb, url, "create schema "+name)
	tb.Cleanup(func() { execute(tb, url, "drop schema if exists "+name+" cascade") })
	return name
}

func execute(tb testing.TB, url, sql string) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), 30*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	require.NoError(tb, err)
	defer func() { require.NoError(tb, conn.Close(ctx)) }()
	_, err = conn.Exec(ctx, sql)
	require.NoError(tb, err)
}
