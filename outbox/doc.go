// Package outbox stores messages in the transaction of the handler that publishes them, and forwards them to a broker once
// that has committed. So a message is published if and only if the handler's work is done.
//
//	err := outbox.Migrate(ctx, db)              // db is a *sql.DB, or stdlib.OpenDBFromPool(pool) of pgx
//	pub, err := outbox.New(ctx, db)             // a message.Publisher
//	bus, err := cqrs.NewEventBusWithConfig(pub, busConfig)
//
//	func createLabel(ctx context.Context, event *OrderPaid) error { // a CQRS handler, under the middleware
//		tx, err := idempotency.TxFromContext[pgx.Tx](ctx)
//		// ... insert the label by tx ...
//		return bus.Publish(ctx, &LabelCreated{Order: event.Order}) // in the same transaction
//	}
//
// Somewhere, in one process or in many, a [Forwarder] runs:
//
//	f, err := outbox.NewForwarder(ctx, db, amqpPublisher) // with publisher confirms, see NewForwarder
//	err = f.Run(ctx)
//
// Messages that a handler returns go the same way with idempotency.WithProduced(idempotency.Outbox(pub)). In contrast to
// idempotency.Replay, which the router publishes after the commit, nothing depends on the redelivery of the consumed
// message then, and the price is the forwarder.
//
// # Format
//
// The outbox is a topic of watermill-sql/v3 on PostgreSQL 13 or newer, with the envelopes of Watermill's forwarder
// component: Watermill's own forwarder reads it too. It works in transactions of package postgres and of package sqlstore
// with its PostgreSQL dialect. watermill-sql/v3 has no SQLite, so neither has this package.
//
// # What holds
//
// Messages are forwarded at least once, with the UUID and metadata that they were stored with: after a crash of a
// forwarder up to a batch of them again. Each carries an event ID ([idempotency.EventIDMetadata]), so that the middleware
// of a consumer downstream drops the repetition.
//
// Messages of one transaction are forwarded in the order of publishing. Two transactions are forwarded one after the other,
// in the order in which they began to write, which under the middleware is that of their claims; not in that of their
// commits. A repetition after a crash comes out of order.
//
// A handler that executes COMMIT or ROLLBACK as text, and publishes after that, publishes outside of its transaction: its
// message is not acked ([idempotency.ErrTxEnded]), and what it published so is forwarded all the same.
//
// # Long transactions delay forwarding
//
// To miss nothing that commits late, a forwarder reads only what is older than every transaction that has written and is
// still running, anywhere in the database cluster: a backup's or a report's, which only read, do not count. One slow handler
// therefore delays all messages of all outboxes until it ends. Measured: a message was forwarded 6 ms after its commit, and
// 2.004 s after it with an unrelated transaction open for 2 s. Keep handlers short, call nothing slow inside of them, and set
// idle_in_transaction_session_timeout. A forwarder whose broker is slow is such a transaction to other forwarders, for as
// long as its batch takes: see [WithBatchSize].
//
// # Operation
//
// [ReadBacklog] tells how many messages wait, and since when: watch the age. Forwarded messages stay until [Purge] deletes
// them. A message that the broker refuses for good holds up those behind it:
// see [WithMiddleware]. After a dump and restore into another cluster, call [Migrate]; [NewForwarder] refuses to run before.
// On a router of your own with a router-level idempotency middleware, Watermill's forwarder is left alone by default (see
// idempotency.WithIgnoredHandlers).
package outbox
