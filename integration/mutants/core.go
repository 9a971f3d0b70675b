package main

// core are the safeties of the root package.
var core = []mutant{
	{
		"produced messages are stored", "middleware.go",
		"tx.Commit(d.m.commits.detached(ctx, clock), stored)", "tx.Commit(d.m.commits.detached(ctx, clock), nil)",
		".", "TestReplayGivesADuplicateTheSameMessages",
	},
	{
		"a duplicate returns what is stored", "delivery.go",
		"produced := record.Produced", "var produced []*message.Message",
		".", "TestReplayGivesADuplicateTheSameMessages",
	},
	{
		"an error of a claim is no duplicate", "middleware.go",
		"return nil, d.fail(ctx, OpClaim, err)\n\t}\n\tif record", "return nil, nil\n\t}\n\tif record",
		".", "TestTrap04_ClaimErrorIsNeverADuplicate",
	},
	{
		"an error rolls back", "middleware.go",
		"d.rollback(ctx, tx)", "_ = d.rollback",
		".", "TestHandlerErrorRollsBackAndIsReturnedAsItIs",
	},
	{
		"a panic rolls back", "middleware.go",
		"d.rollback(ctx, tx)", "if returned {\n\t\t\td.rollback(ctx, tx)\n\t\t}",
		".", "TestTrap10_PanicAndGoexitRollBack",
	},
	{
		"the commit is detached from cancellation", "middleware.go",
		"tx.Commit(d.m.commits.detached(ctx, clock), stored)", "tx.Commit(ctx, stored)",
		".", "TestTrap11_HandlerThatSucceededIsCommittedThoughItsContextIsCancelled",
	},
	{
		"the commit is bounded", "deadline.go",
		"context.WithDeadline(context.Background(), now.Add(d.timeout))", "context.WithCancel(context.Background())",
		".", "TestCommitIsBoundedByATimerThatCommitsShare",
	},
	{
		"a commit has most of its timeout", "deadline.go",
		"end == nil || now.After(end.fresh)", "end == nil",
		".", "TestCommitIsBoundedByATimerThatCommitsShare",
	},
	{
		"the end of a commit is waited for without a goroutine", "deadline.go",
		"if value := d.deadline.Value(key); value != nil {", "if value := d.deadline.Value(key); false {",
		".", "TestCommitIsBoundedByATimerThatCommitsShare",
	},
	{
		"a copy that a failed attempt gave away is not used again", "middleware.go",
		"original.restore(d.msg)", "original.restore(d.msg)\n\t\toriginal.release()",
		".", "TestTrap14_CopyOfAFailedMessageIsItsOwn",
	},
	{
		"what a message did not have it has not after a failed attempt", "original.go",
		"if !o.noPayload {", "if true {",
		".", "TestTrap14_CopyOfAFailedMessageIsItsOwn",
	},
	{
		"fingerprints stay as they are stored", "fingerprint.go",
		"crc32.ChecksumIEEE(part)", "crc32.ChecksumIEEE(part)+1",
		".", "TestFingerprintsStayAsTheyAreStored",
	},
	{
		"what is produced is stored detached from cancellation", "delivery.go",
		"context.WithTimeout(context.WithoutCancel(ctx), d.m.commitTimeout)", "context.WithTimeout(ctx, d.m.commitTimeout)",
		".", "TestTrap11_OutboxPublishesThoughTheContextHasEnded",
	},
	{
		"the message gets its context back", "middleware.go",
		"d.msg.SetContext(ctx)\n\t\tif committed", "if committed",
		".", "TestTrap14_ContextIsRestoredOnEveryExit",
	},
	{
		"the context of a handler that has returned leads to no transaction", "context.go",
		"a.ended = true", "",
		".", "TestTrap09_NothingReachesAnEndedTransaction",
	},
	{
		"a retry in place meets the message as it came", "middleware.go",
		"original.restore(d.msg)", "_ = original",
		".", "TestTrap13_ConflictsAreRetriedInPlace",
	},
	{
		"a redelivery of the same message value meets it as it came", "middleware.go",
		"original.restore(d.msg)", "_ = original",
		".", "TestTrap14_NothingOfAFailedAttemptReachesTheNext",
	},
	{
		"a second installation lets pass", "middleware.go",
		"if d.isInside(ctx) {", "if false && d.isInside(ctx) {",
		".", "TestTrap05_SecondInstallationLetsPass",
	},
	{
		"a message that a handler sends on is claimed", "delivery.go",
		" || outer.msg != d.msg && outer.claim.Key != d.claim.Key", "",
		".", "TestMessageOfItsOwnInsideAHandlerIsClaimed",
	},
	{
		"a subscriber ID that two handlers share is refused", "subscribers.go",
		"if ok && first != handler {", "if false && ok && first != handler {",
		".", "TestTrap06_SubscriberIDSharedByTwoHandlersIsRefused",
	},
	{
		"MarkRollback wins over nil", "middleware.go",
		"if mark != nil {", "if mark != nil && err != nil {",
		".", "TestTrap08_MarkRollbackWinsOverASwallowedError",
	},
	{
		"produced messages have a UUID", "stamp.go",
		`if msg.UUID == "" {`, "if false {",
		".", "TestReplayGivesADuplicateTheSameMessages",
	},
	{
		"produced messages have an event ID", "stamp.go",
		`if msg.Metadata[EventIDMetadata] == "" {`, "if false {",
		".", "TestReplayGivesADuplicateTheSameMessages",
	},
	{
		"a producer's event ID is kept", "stamp.go",
		`msg == nil || msg.Metadata[EventIDMetadata] != ""`, "msg == nil",
		".", "TestStampEventIDStampsOnce",
	},
	{
		"an early ack is told", "middleware.go",
		"d.event.EarlyAck = isClosed(d.msg.Acked())", "",
		".", "TestTrap07_EarlyAckIsToldAndItsProducedMessagesAreKept",
	},
	{
		"an early ack does not remove produced messages", "delivery.go",
		"if stored && !d.event.EarlyAck {", "if stored {",
		".", "TestTrap07_EarlyAckIsToldAndItsProducedMessagesAreKept",
	},
	{
		"a phantom message is not permanent", "delivery.go",
		"if !d.m.phantomsPass && isPhantom(d.msg) {", "if false {",
		".", "TestTrap16_PhantomMessageIsNotPermanent",
	},
	{
		"an empty event ID is refused", "key.go",
		"case id == \"\":\n\t\treturn ErrKeyEmpty", "case false:",
		".", "TestTrap15_UnusableKeysArePermanentAndTold",
	},
	{
		"an event ID with NUL is refused", "key.go",
		"case containsNUL(id):\n\t\treturn ErrKeyHasNUL", "case false:",
		".", "TestTrap15_UnusableKeysArePermanentAndTold",
	},
	{
		"an event ID that is too long is refused", "key.go",
		"case len(id) > MaxEventIDLength:", "case false:",
		".", "TestTrap15_UnusableKeysArePermanentAndTold",
	},
	{
		"an event ID that is no UTF-8 is refused", "key.go",
		"case !utf8.ValidString(id):\n\t\treturn ErrKeyNotUTF8", "case false:",
		".", "TestTrap15_UnusableKeysArePermanentAndTold",
	},
	{
		"a key that is there and invalid ends FirstOf", "key.go",
		"if !errors.Is(err, ErrMissingKey) {", "if err == nil {",
		".", "TestFirstOfTakesTheFirstThatIsThere",
	},
	{
		"ignored handlers are left alone", "middleware.go",
		"if slices.Contains(m.ignoredHandlers, handler) {", "if false && slices.Contains(m.ignoredHandlers, handler) {",
		".", "TestTrap21_ForwarderHandlerIsLeftAlone",
	},
	{
		"produced messages stay until the ack", "acks.go",
		"if isClosed(p.acked) {\n\t\t\tacked[p.store]", "if true {\n\t\t\tacked[p.store]",
		".", "TestReplayForgetsAfterTheAck",
	},
	{
		"a nack is no ack", "acks.go",
		"q.pending = slices.DeleteFunc(q.pending, func(p pendingAck) bool { return isClosed(p.nacked) })\n\tfor _, p := range q.pending {\n\t\tif isClosed(p.acked) {",
		"for _, p := range q.pending {\n\t\tif isClosed(p.acked) || isClosed(p.nacked) {",
		".", "TestReplayForgetsAfterTheAck",
	},
	{
		"what this process has acked is not published again", "delivery.go",
		"case d.m.acks.acked(d.store, d.claim.Key):", "case false:",
		".", "TestReplayForgetsAfterTheAck",
	},
	{
		"a record that was read during a removal is read again", "delivery.go",
		"case !again && removals != d.m.acks.removals.Load():", "case false && !again && removals != 0:",
		".", "TestReplayForgetsAfterTheAck",
	},
	{
		"produced messages carry no ended transaction", "delivery.go",
		"if attemptFromContext(msg.Context()) != attemptFromContext(ctx) {", "if false {",
		".", "TestProducedMessagesCarryNoTransaction",
	},
	{
		"Replay refuses what cannot be stored", "produced.go",
		"len(msg.UUID) > MaxProducedUUIDLength || ", "",
		".", "TestReplayRefusesWhatItCannotStore",
	},
	{
		"Refuse refuses", "produced.go",
		"if len(produced) > 0 {", "if false {",
		".", "TestRefuse",
	},
	{
		"functions of AfterCommit run after the commit", "middleware.go",
		"err = tx.Commit(d.m.commits", "_ = d.runHooks(ctx, hooks)\n\terr = tx.Commit(d.m.commits",
		".", "TestAfterCommitDoesNotRunAfterAFailedCommit",
	},
	{
		"a panic after the commit does not make a message fail", "delivery.go",
		"guard(func() error { return hook(ctx) })", "hook(ctx)",
		".", "TestTrap38_NothingTurnsACommittedMessageIntoAFailure",
	},
	{
		"a commit of unknown outcome is not tried again in place", "delivery.go",
		"d.store != nil && outcome != CommitUnknown &&", "d.store != nil &&",
		".", "TestTrap03_CommitOfUnknownOutcomeIsNotTriedAgainInPlace",
	},
	{
		"no retry when the context has ended", "delivery.go",
		" && d.attempts <= d.m.retries && ctx.Err() == nil", " && d.attempts <= d.m.retries",
		".", "TestNoRetryWhenTheContextHasEnded",
	},
	{
		"retries are bounded", "delivery.go",
		" && d.attempts <= d.m.retries && ctx.Err() == nil", " && d.attempts <= 20 && ctx.Err() == nil",
		".", "TestTrap13_RetriesAreBounded",
	},
	{
		"contents are compared", "fingerprint.go",
		"if f.off || len(processed)", "if true || len(processed)",
		".", "TestOtherContentUnderAKnownIDIsAConflict",
	},
	{
		"a type does not go over into a source", "fingerprint.go",
		"\thead = binary.BigEndian.AppendUint64(head, uint64(len(eventType)))\n\thead = binary.BigEndian.AppendUint64(head, uint64(len(source)))\n", "",
		".", "TestOtherContentUnderAKnownIDIsAConflict|FuzzFingerprint",
	},
	{
		"type and source are in the fingerprint", "fingerprint.go",
		"hash.Write(head)", "",
		".", "TestOtherContentUnderAKnownIDIsAConflict",
	},
	{
		"fingerprints of two schemes are not compared", "fingerprint.go",
		"!bytes.Equal(processed[:4], received[:4]) ||", "",
		".", "TestFingerprintsOfAnotherSchemeAreNotCompared",
	},
	{
		"a new event beyond the horizon is refused", "horizon.go",
		"if !h.isSet {", "if true {",
		".", "TestEventBeyondTheHorizonIsNotTakenForNew",
	},
	{
		"a duplicate beyond the horizon is a duplicate", "delivery.go",
		"d.claim.Fingerprint, err = d.m.fingerprint.of(d.msg)\n",
		"if err = d.m.horizon.check(d.msg, d.claim.EventID, time.Now()); err != nil {\n\t\treturn err\n\t}\n\td.claim.Fingerprint, err = d.m.fingerprint.of(d.msg)\n",
		".", "TestDuplicateBeyondTheHorizonIsADuplicate",
	},
	{
		"the source is in the event ID of a CloudEvent", "cloudevents.go",
		`escapeSource.Replace(attributes["source"]) + " " + attributes["id"]`, `attributes["id"]`,
		".", "TestTrap17_CloudEventsAreIdentifiedBySourceAndID",
	},
	{
		"a CloudEvent's source does not go over into its id", "cloudevents.go",
		`escapeSource.Replace(attributes["source"])`, `attributes["source"]`,
		".", "TestTrap17_CloudEventsAreIdentifiedBySourceAndID|FuzzCloudEventKey",
	},
	{
		"spellings that contradict each other are refused", "cloudevents.go",
		"if before, ok := attributes[name]; ok && before != value {", "if before, ok := attributes[name]; false && ok {",
		".", "TestTrap17_CloudEventsAreIdentifiedBySourceAndID",
	},
}
