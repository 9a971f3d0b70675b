-- For the purge, which removes the oldest claims first. It takes 22 bytes a claim. BRIN takes almost none, but new claims
-- fill the space that a purge frees, so that each range of pages comes to hold old and new ones: after one turn of half a
-- million, finding 2,133 claims read the whole table.
create index if not exists {claim_claimed_at} on {claim} (claimed_at);
