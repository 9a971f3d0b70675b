-- One row for each event that a subscriber has processed. It is inserted in the handler's transaction and never updated.
-- The "C" collation compares bytes: it is cheap, and an upgrade of the C library or ICU cannot reorder the index.
create table if not exists {claim} (
	subscriber_id text collate "C" not null,
	event_id      text collate "C" not null,
	claimed_at    timestamptz not null default now(),
	topic         text not null,
	fingerprint   bytea,
	primary key (subscriber_id, event_id)
);

-- What the handler returned, until the router has published and acked it.
create table if not exists {produced_message} (
	subscriber_id text collate "C" not null,
	event_id      text collate "C" not null,
	position      integer not null,
	uuid          text not null,
	metadata      bytea not null, -- JSON; entries that are no UTF-8 in base64
	payload       bytea not null,
	primary key (subscriber_id, event_id, position)
);
