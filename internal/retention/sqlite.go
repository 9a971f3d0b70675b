package retention

// SQLite returns the statements for tables of SQLite, whose names are quoted.
func SQLite(claim, produced string) Statements {
	unacked := "(select p.subscriber_id, p.event_id, c.topic, c.claimed_at, p.messages" +
		" from (select subscriber_id, event_id, count(*) as messages from " + produced + " group by subscriber_id, event_id) p" +
		" left join " + claim + " c on c.subscriber_id = p.subscriber_id and c.event_id = p.event_id)"
	const ago = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (-?1) || ' seconds')"
	return Statements{
		Newest: "select max(claimed_at) from " + claim + " where claimed_at <= " + ago,
		Remove: "delete from " + claim + " where (subscriber_id, event_id) in (select c.subscriber_id, c.event_id from " + claim + " c" +
			" where c.claimed_at >= ?1 and c.claimed_at < ?2" +
			" and not exists (select 1 from " + produced + " p where p.subscriber_id = c.subscriber_id and p.event_id = c.event_id)" +
			" order by c.claimed_at limit ?3) returning claimed_at",
		CountUnacked: "select count(*) from " + unacked + " where claimed_at < ?1",
		Forget: []string{
			"delete from " + produced + " where subscriber_id = ?1 and event_id = ?2",
			"delete from " + claim + " where subscriber_id = ?1 and event_id = ?2",
		},
		Unacked: "select subscriber_id, event_id, coalesce(topic, ''), claimed_at, messages from " + unacked +
			" where claimed_at is null or claimed_at <= " + ago + " order by claimed_at limit ?2", // nulls come first
		Stats: "select subscriber_id, max(claims), max(oldest), max(newest), max(unacked), max(oldest_unacked) from (" +
			"select subscriber_id, count(*) as claims, min(claimed_at) as oldest, max(claimed_at) as newest, 0 as unacked, null as oldest_unacked" +
			" from " + claim + " group by subscriber_id" +
			" union all select subscriber_id, 0, null, null, count(*), min(claimed_at) from " + unacked + " group by subscriber_id)" +
			" group by subscriber_id order by subscriber_id",
	}
}
