-- For the purge, which removes the oldest claims first.
create index if not exists {claim_claimed_at} on {claim_name} (claimed_at);
