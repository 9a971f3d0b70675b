package main

// Tests that more than one mutant must fail.
const (
	endedByHand  = "TestStoreKeepsTheContract/^isolation_$/^fault$/^ended_by_hand$"
	settings     = "TestTrap28_NewFindsWhatWouldLoseMessages"
	retentions   = "TestTrap31_Retention"
	lockTimeout  = "TestTrap12_BoundedClaimRestoresTheLockTimeout"
	sessionState = "TestTrap35_SessionStateOfAHandler"
	commitsLast  = "TestTrap35_SynchronousCommitIsOnAgain"
	otherIndex   = "TestTrap04_AnotherUniqueIndexMakesNoDuplicate"
)

// stores are the safeties of the packages postgres and sqlstore.
var stores = []mutant{
	{
		"the transaction that is committed is the one with the claim", "postgres/store.go",
		"pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text is not distinct from $1::pg_catalog.text", "$1::pg_catalog.text is not null",
		"postgres", endedByHand,
	},
	{
		"the transaction that is committed is the one with the claim", "sqlstore/postgresql.go",
		"case err == nil && mark.String == t.mark:", "case err == nil:",
		"sqlstore", "TestTrap09_HandlerThatEndsTheTransactionIsNotAcked",
	},
	{
		"the transaction that is committed is the one with the claim (SQLite)", "sqlstore/sqlite.go",
		"if primaryCode(err) == codeError {", "if primaryCode(err) == codeError {\n\t\treturn nil\n\t}\n\tif primaryCode(err) == codeError {",
		"integration/sqlite", "TestTrap09_HandlerThatEndsTheTransactionIsNotAcked",
	},
	{
		"a handler that has ended the transaction is told so", "postgres/tx.go",
		"case conn.PgConn().TxStatus() == 'I':", "case false:",
		"postgres", endedByHand,
	},
	{
		"what a handler returns after its own commit is stored", "postgres/tx.go",
		"if len(produced) == 0 || !errors.Is(ended", "if true || !errors.Is(ended",
		"postgres", endedByHand,
	},
	{
		"what a handler returns after its own commit is stored", "sqlstore/tx.go",
		"if len(produced) == 0 {", "if true {",
		"sqlstore", "TestTrap09_HandlerThatEndsTheTransactionIsNotAcked",
	},
	{
		"Commit and Rollback of a handler are refused", "postgres/tx.go",
		"return handlerTx{t.begun.Tx()}", "return t.begun.Tx()",
		"postgres", "TestTrap09_CommitAndRollbackAreRefused",
	},
	{
		"synchronous_commit is on for the commit", "postgres/store.go",
		"case when pg_catalog.current_setting('synchronous_commit') = 'off' then", "case when false then",
		"postgres", commitsLast,
	},
	{
		"synchronous_commit is on for the commit", "sqlstore/postgresql.go",
		"case when pg_catalog.current_setting('synchronous_commit') = 'off' then", "case when false then",
		"sqlstore", commitsLast,
	},
	{
		"names of tables are qualified", "internal/pgschema/pgschema.go",
		`return quote(*schema) + "." + quote(n.Prefix+name)`, `return quote(n.Prefix + name)`,
		"postgres", sessionState,
	},
	{
		"names of tables are qualified", "internal/pgschema/pgschema.go",
		`return quote(*schema) + "." + quote(n.Prefix+name)`, `return quote(n.Prefix + name)`,
		"sqlstore", sessionState,
	},
	{
		"names of tables are qualified (SQLite)", "sqlstore/sqlite.go",
		"return `main.\"` +", "return `\"` +",
		"integration/sqlite", sessionState,
	},
	{
		"a session that a handler has spoilt is closed", "postgres/store.go",
		"if sqlstate.IsOfSession(err) {", "if false && sqlstate.IsOfSession(err) {",
		"postgres", sessionState,
	},
	{
		"a session whose prepared statements are gone or outdated is closed", "internal/sqlstate/sqlstate.go",
		"case ReadOnly, InsufficientPrivilege, NoSuchStatement, FeatureNotSupported:", "case ReadOnly, InsufficientPrivilege:",
		"postgres", sessionState,
	},
	{
		"nothing is prepared where the pool is configured not to", "postgres/send.go",
		"config.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement", "true",
		"postgres", "TestTrap29_PgBouncerInTransactionMode",
	},
	{
		"a session that a handler has spoilt is closed", "sqlstore/postgresql.go",
		"case sqlstate.IsOfSession(err):", "case false:",
		"sqlstore", sessionState,
	},
	{
		"a bounded claim restores the lock timeout", "postgres/store.go",
		"begin, bound, claim, statement{sql: unboundWait})", "begin, bound, claim)",
		"postgres", lockTimeout,
	},
	{
		"a bounded claim restores the lock timeout", "sqlstore/postgresql.go",
		"pg_catalog.set_config('lock_timeout', (select unbound from bound), true)", "pg_catalog.current_setting('lock_timeout')",
		"sqlstore", lockTimeout,
	},
	{
		"a claim restores the busy timeout (SQLite)", "sqlstore/sqlite.go",
		"return func() error { return set(context.WithoutCancel(ctx), timeout) }, set(ctx, 0)", "return func() error { return nil }, set(ctx, 0)",
		"integration/sqlite", "TestTrap12_ClaimRestoresTheBusyTimeout",
	},
	{
		"another unique index makes no duplicate", "postgres/store.go",
		"on conflict (subscriber_id, event_id) do nothing", "on conflict do nothing",
		"postgres", otherIndex,
	},
	{
		"another unique index makes no duplicate", "sqlstore/postgresql.go",
		"on conflict (subscriber_id, event_id) do nothing", "on conflict do nothing",
		"sqlstore", otherIndex,
	},
	{
		"the transaction outlives the message's context", "sqlstore/tx.go",
		"stop := context.AfterFunc(ctx, cancel)\n\tbegun", "stop := func() bool { return true }\n\tcontext.AfterFunc(ctx, cancel)\n\tbegun",
		"sqlstore", "TestTrap11_CancelledAfterTheClaimCommits",
	},
	{
		"open rows are told", "postgres/tx.go",
		"case conn.PgConn().IsBusy():", "case false:",
		"postgres", "TestTrap36_OpenRowsAreTold",
	},
	{
		"New refuses synchronous_commit=off", "internal/pgschema/pgschema.go",
		`case synchronousCommit == "off":`, "case false:",
		"postgres", settings,
	},
	{
		"New refuses a read-only session", "internal/pgschema/pgschema.go",
		`case readOnly == "on":`, "case false:",
		"postgres", settings,
	},
	{
		"New refuses a table without the primary key", "internal/pgschema/pgschema.go",
		"case primaryKey != key:", "case false:",
		"postgres", settings,
	},
	{
		"New refuses a collation that folds keys", "internal/pgschema/pgschema.go",
		`case collations != "C":`, "case false:",
		"postgres", settings,
	},
	{
		"New refuses an unlogged table", "internal/pgschema/pgschema.go",
		`case persistence != "p":`, "case false:",
		"postgres", settings,
	},
	{
		"a purge keeps claims that no ack has confirmed", "internal/pgschema/operator.go",
		`" and not exists (select from " + t.Produced + " p where p.subscriber_id = c.subscriber_id and p.event_id = c.event_id)" +`, "",
		"postgres", retentions,
	},
	{
		"a purge keeps claims that no ack has confirmed (SQLite)", "internal/retention/sqlite.go",
		`" and not exists (select 1 from " + produced + " p where p.subscriber_id = c.subscriber_id and p.event_id = c.event_id)" +`, "",
		"integration/sqlite", retentions,
	},
	{
		"a purge counts back from a claim that is an hour old", "internal/retention/retention.go",
		"e.Newest(ctx, min(*keep, grace))", "e.Newest(ctx, 0)",
		"postgres", retentions,
	},
	{
		"a purge counts back from a claim, not from now", "internal/retention/retention.go",
		"before := newest.Add(-*keep)", "before := time.Now().Add(-*keep)",
		"postgres", retentions,
	},
	{
		"a purge waits for no lock", "internal/pgschema/operator.go",
		" for update of c skip locked", "",
		"postgres", "TestTrap31_PurgeDoesNotWait",
	},
}
