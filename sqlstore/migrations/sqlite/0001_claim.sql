-- One row for each event that a subscriber has processed. It is inserted in the handler's transaction and never updated.
-- The binary collation compares bytes.
create table if not exists {claim} (
	subscriber_id text collate binary not null,
	event_id      text collate binary not null,
	claimed_at    text not null default (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')), -- UTC
	topic         text not null,
	fingerprint   blob,
	primary key (subscriber_id, event_id)
) without rowid;

-- What the handler returned, until the router has published and acked it.
create table if not exists {produced_message} (
	subscriber_id text collate binary not null,
	event_id      text collate binary not null,
	position      integer not null,
	uuid          text not null,
	metadata      blob not null, -- JSON; entries that are no UTF-8 in base64
	payload       blob not null,
	primary key (subscriber_id, event_id, position)
);
