package bench

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/watermill-idempotency/idempotency/internal/pgtest"
)

// BenchmarkPgbench compares new events with what the server and a client in C can do.
func BenchmarkPgbench(b *testing.B) {
	requirePgbench(b)
	for _, conns := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("conns=%d", conns), func(b *testing.B) {
			turn := pgbenchTurn(conns)
			f := setup(b, conns)
			middleware := contend(b, "middleware", conns, turn, f.implementation(b, "middleware"))
			claim, check := f.statements(b)
			compare(b, turn, []contender{middleware, f.pgbench(b, "pgbench", conns, claim, check)}, "middleware/pgbench")
		})
	}
}

// BenchmarkServer tells what of a new event costs the server how much. pgbench runs the statements of a plain transaction,
// and more and more of the middleware's.
func BenchmarkServer(b *testing.B) {
	requirePgbench(b)
	const conns = 8
	var contenders []contender
	for _, name := range []string{"plain", "row", "index", "claim", "all"} {
		f := setup(b, conns)
		require.NoError(b, f.implementation(b, "middleware")("first"))
		claim, check := f.statements(b)
		if name != "all" {
			check = ""
		}
		switch name {
		case "plain":
			claim = ""
		case "row": // and its primary key
			f.dropTimeIndex(b)
			fallthrough
		case "index":
			claim, _, _ = strings.Cut(claim, " on conflict")
		}
		contenders = append(contenders, f.pgbench(b, name, conns, claim, check))
	}
	compare(b, pgbenchTurn(conns), contenders, "row/plain", "index/plain", "claim/plain", "all/plain")
}

func requirePgbench(b *testing.B) {
	b.Helper()
	if _, err := exec.LookPath("pgbench"); err != nil {
		b.Skip("pgbench is missing: install the package postgresql")
	}
}

// pgbenchTurn is long, because pgbench connects and prepares its statements in each turn.
func pgbenchTurn(conns int) int { return 200 * conns }

// statements returns the claim and the check of the middleware, as a connection has prepared them, for pgbench.
func (f *fixture) statements(b *testing.B) (claim, check string) {
	b.Helper()
	rows, err := f.pool.Query(b.Context(), "select statement from pg_prepared_statements order by prepare_time, statement")
	require.NoError(b, err)
	statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(b, err)
	find := func(prefix string) string {
		for _, statement := range statements {
			if strings.HasPrefix(statement, prefix) {
				return statement
			}
		}
		require.FailNow(b, "the middleware has not prepared "+prefix, "%q", statements)
		return ""
	}
	claim = strings.NewReplacer("$1", "'shipping'", "$2", pgbenchEvent, "$3", "'orders'", "$4", `'\x`+strings.Repeat("00", 48)+`'`).
		Replace(find("insert into \"" + f.schema + `"."idempotency_claim"`))
	return claim, strings.Replace(find("select 1 / "), "$1", "pg_catalog.pg_current_xact_id_if_assigned()", 1)
}

const pgbenchEvent = "'event-' || :client_id || '-' || :n"

// pgbench returns a contender that runs a transaction of the handler's statement, with the claim before and the check after
// it, each in the round trip of BEGIN and COMMIT.
func (f *fixture) pgbench(b *testing.B, name string, conns int, claim, check string) contender {
	b.Helper()
	file := filepath.Join(b.TempDir(), name+".sql")
	require.NoError(b, os.WriteFile(file, []byte(strings.Join([]string{
		`\set n random(1, 1000000000000)`,
		`\startpipeline`, "begin;", claim + ";", `\endpipeline`,
		strings.Replace(f.insert, "$1", pgbenchEvent, 1) + ";",
		`\startpipeline`, check + ";", "commit;", `\endpipeline`,
	}, "\n")), 0o600))
	return contender{name, func(int) time.Duration {
		out, err := exec.CommandContext(b.Context(), "pgbench", "--no-vacuum", "--protocol=prepared", "--file="+file,
			fmt.Sprintf("--client=%d", conns), fmt.Sprintf("--transactions=%d", pgbenchTurn(conns)/conns),
			pgtest.URL(b, pgtest.URLVariable)).CombinedOutput()
		require.NoError(b, err, "%s", out)
		tps := regexp.MustCompile(`tps = ([0-9.]+) \(without initial connection time\)`).FindSubmatch(out)
		require.NotNil(b, tps, "%s", out)
		rate, err := strconv.ParseFloat(string(tps[1]), 64)
		require.NoError(b, err)
		return time.Duration(float64(time.Second) / rate)
	}}
}

func (f *fixture) dropTimeIndex(b *testing.B) {
	b.Helper()
	var index string
	require.NoError(b, f.pool.QueryRow(b.Context(), "select indexrelid::regclass::text from pg_index where indrelid = $1::regclass and not indisprimary",
		f.schema+".idempotency_claim").Scan(&index))
	_, err := f.pool.Exec(b.Context(), "drop index "+index)
	require.NoError(b, err)
}
