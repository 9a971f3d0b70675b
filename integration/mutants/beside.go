package main

// beside are the safeties of the packages dupcache and outbox.
var beside = []mutant{
	{
		"an event is remembered after its ack", "dupcache/dupcache.go",
		"}, len(produced) == 0, t.claimedAt)", "}, true, t.claimedAt)",
		"dupcache", "TestProducedMessagesComeFromTheStoreUntilTheyAreAcked",
	},
	{
		"a record with produced messages is not remembered", "dupcache/dupcache.go",
		"if len(record.Produced) == 0 {", "if true {",
		"dupcache", "TestProducedMessagesComeFromTheStoreUntilTheyAreAcked",
	},
	{
		"an event whose commit has failed is not remembered", "dupcache/dupcache.go",
		"if err := t.Tx.Commit(ctx, produced); err != nil {\n",
		"if err := t.Tx.Commit(ctx, produced); err != nil {\n\t\tt.store.remember(idempotency.Record{Key: t.claim.Key}, true, t.claimedAt)\n",
		"dupcache", "TestOnlyKnownCommitsAreRemembered",
	},
	{
		"an event is forgotten after its time", "dupcache/dupcache.go",
		" && time.Until(e.expires) > 0", "",
		"dupcache", "TestItIsBoundedAndExpires",
	},
	{
		"the fingerprint is remembered", "dupcache/dupcache.go",
		"Fingerprint: t.claim.Fingerprint, ", "",
		"dupcache", "TestConflictsAreFound",
	},
	{
		"a fingerprint that is handed out is the caller's", "dupcache/dupcache.go",
		"record.Fingerprint = bytes.Clone(record.Fingerprint)\n\t\treturn", "return",
		"dupcache", "TestRecordsAreTheCallers",
	},
	{
		"a UUID that the envelope cannot hold is refused", "outbox/publisher.go",
		"len(msg.UUID) > idempotency.MaxProducedUUIDLength || ", "",
		"outbox", "TestTrap26_WhatCannotBeStoredDoesNotReachTheDatabase/a_UUID",
	},
	{
		"metadata that JSON would change is refused", "outbox/publisher.go",
		"if !utf8.ValidString(name) || !utf8.ValidString(value) {", "if false {",
		"outbox", "TestTrap26_WhatCannotBeStoredDoesNotReachTheDatabase/UTF-8",
	},
	{
		"publishing nothing does nothing", "outbox/publisher.go",
		"if len(messages) == 0 {", "if false {",
		"outbox", "TestTrap26_WhatCannotBeStoredDoesNotReachTheDatabase/nothing",
	},
	{
		"messages in the outbox have an event ID", "outbox/publisher.go",
		`if msg.Metadata[idempotency.EventIDMetadata] == "" {`, "if false {",
		"outbox", "TestReturnedMessagesGoIntoTheOutbox|TestMessagesAreForwardedAsTheyWere|TestKilledForwarderRepeatsWithTheSameUUIDs|TestBusesPublishInTheHandlersTransaction",
	},
	{
		"nothing is published outside of a transaction by default", "outbox/publisher.go",
		"if !p.ownTransaction {", "if false {",
		"outbox", "TestOutsideOfATransaction",
	},
	{
		"messages of two transactions are not stored in one", "outbox/publisher.go",
		"in != inside || other.Key != claim.Key", "false && in && other.Key != claim.Key",
		"outbox", "TestOutsideOfATransaction",
	},
	{
		"New refuses a missing table", "outbox/schema.go",
		"case errors.Is(err, sql.ErrNoRows):", "case errors.Is(err, sql.ErrNoRows):\n\t\treturn nil\n\tcase false:",
		"outbox", "TestTrap26_WhatWouldAbortHandlersIsFoundWhenItOpens",
	},
	{
		"New refuses a payload of JSON", "outbox/schema.go",
		`case payload != "bytea":`, "case false:",
		"outbox", "TestTrap26_WhatWouldAbortHandlersIsFoundWhenItOpens",
	},
	{
		"New refuses an unlogged table", "outbox/schema.go",
		`case persistence != "p":`, "case false:",
		"outbox", "TestTrap26_WhatWouldAbortHandlersIsFoundWhenItOpens",
	},
	{
		"New refuses a role without privileges", "outbox/schema.go",
		"case err != nil || !privileged:", "case err != nil:",
		"outbox", "TestTrap26_MissingPrivilegesAreFoundWhenItOpens",
	},
	{
		"a forwarder refuses an outbox of another cluster", "outbox/schema.go",
		"if foreign {\n\t\treturn fmt.Errorf", "if false && foreign {\n\t\treturn fmt.Errorf",
		"outbox", "TestTrap26_WhatWouldAbortHandlersIsFoundWhenItOpens",
	},
	{
		"a purge keeps what is not forwarded", "outbox/schema.go",
		"t.forwarded()+` order by", "`true order by",
		"outbox", "TestPurge",
	},
	{
		"closing keeps what was forwarded", "outbox/forwarder.go",
		"context.WithCancel(context.WithoutCancel(ctx))", "context.WithCancel(ctx)",
		"outbox", "TestClosingKeepsWhatWasForwarded",
	},
}
