package idempotency

import "time"

// What follows is what the stores tell an operator, and nothing that a [Store] must have.

// Purged is what a purge has done.
type Purged struct {
	// Claims is the number of claims that were removed.
	Claims int64
	// Unacked is the number of events that are older than the retention and stay, because they have stored produced
	// messages that no ack has confirmed.
	Unacked int64
	// Elsewhere tells that another instance was at it, and the rest was left to that one.
	Elsewhere bool
}

// UnackedEvent is an event that is processed and has stored produced messages, because no ack has confirmed that they are
// published.
type UnackedEvent struct {
	Key
	// Topic and ClaimedAt are those of the [Record]. They are zero if the claim was deleted by hand and the messages were
	// not.
	Topic     string
	ClaimedAt time.Time
	// Messages is the number of its stored produced messages.
	Messages int
}

// SubscriberStats describes what is stored of one subscriber.
type SubscriberStats struct {
	SubscriberID string
	// Claims is the number of claims. Estimated tells that it is an estimate, from a part of the table, and so are Oldest
	// and Newest: claims that are older and newer may exist.
	Claims    int64
	Estimated bool
	// Oldest and Newest are when the claims were made; zero if none was seen.
	Oldest, Newest time.Time
	// Unacked is the exact number of events with stored produced messages that no ack has confirmed. Some are between
	// their commit and their ack at any time. Many, or old ones, are those of a handler that fails to publish, or that has
	// been removed.
	Unacked int64
	// OldestUnacked is when the oldest of them was claimed; zero if there is none.
	OldestUnacked time.Time
}
