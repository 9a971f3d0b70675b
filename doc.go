// Package idempotency makes an at-least-once consumer produce the result of exactly one successful attempt.
//
// Kafka and RabbitMQ deliver at least once: a consumer can commit to its database and die before the ack, and the message
// comes again. The [Middleware] of this package goes into a Watermill router. It takes the event ID from a message's
// metadata, begins a transaction, claims (subscriber ID, event ID) in it with a unique insert, gives that transaction to
// the handler, commits, and only then lets Watermill ack. A message that comes again finds the claim: its handler is
// skipped, and it is acked.
//
//	store, err := postgres.New(ctx, pool) // or sqlstore.New(ctx, db, sqlstore.SQLite())
//	idem, err := idempotency.New(store)
//
//	router.AddConsumerHandler("create-label", "orders", subscriber, idempotency.ConsumerHandler(createLabel)).
//		AddMiddleware(idem.Middleware)
//
//	func createLabel(ctx context.Context, tx pgx.Tx, msg *message.Message) error {
//		_, err := tx.Exec(ctx, `insert into shipping_label (order_id) values ($1)`, orderID(msg))
//		return err
//	}
//
// # What holds, and when
//
// For one handler, whatever fails and whenever it fails, no business effect is doubled, and no message and no produced
// message is lost:
//
//   - before the commit (error, panic, kill, lost connection): claim and writes roll back; a later delivery claims again
//   - the answer to COMMIT is lost: [ErrCommitUnknown], no ack; the redelivery finds the claim, or claims
//   - after the commit, before what the handler returned is published: the redelivery is a duplicate, and publishes the
//     stored messages, with the same UUIDs (see [Replay])
//   - after the publish, before the ack: as above; a consumer downstream drops the repetition by its event ID
//   - a duplicate after success: skipped and acked
//
// What a handler does outside of the transaction, such as a call to a payment provider, is at least once, as ever.
//
// # The transaction
//
// A handler that takes its transaction as a parameter cannot forget it: [Handler] and [ConsumerHandler]. Others, such as
// those of Watermill's CQRS component, get it by [TxFromContext] from the context they are given. The transaction is the
// middleware's to end; savepoints are free to use. [MarkRollback] makes sure of a rollback whatever is returned, and
// [AfterCommit] runs a function once the commit has succeeded.
//
// # The key
//
// The event ID must be stamped once, by the producer ([StampEventID]), and survive retries and replay. [MetadataKey],
// [MessageUUID], [CloudEventKey] and [FirstOf] take it from where it is. The subscriber ID names the logical subscriber: by default the router's handler
// name, or see [WithSubscriberID] and [WithSubscriberPrefix].
//
// # Content
//
// A fingerprint of an event's type, source and payload is kept with its claim. A message with a known event ID and another
// fingerprint is a [*ConflictError]: it is never processed, and never acked as a duplicate. [WithReplayHorizon] refuses
// events that are too old to be known as new, where claims are purged.
//
// # Errors
//
// [IsPermanent] tells errors for which the message is at fault, [IsTransient] those for which it is not. Both fit
// Watermill's PoisonQueueWithFilter, so that a database that is down does not empty a topic into a dead-letter queue.
//
// # Order of middleware
//
// Outermost first: metrics, PoisonQueue with a filter, DelayOnError, Retry with ResetContextOnRetry, CircuitBreaker,
// Throttle, Timeout, this one, CorrelationID, Recoverer. What turns an error into success belongs outside: inside, the
// failed attempt would be committed.
//
// # Stores
//
// Package postgres is the main store, on pgx. Package sqlstore is on database/sql, for PostgreSQL and SQLite. Package
// storetest tells whether a [Store] of one's own keeps the contract; package idempotencytest has one in memory. Package outbox publishes in the
// handler's transaction.
package idempotency
