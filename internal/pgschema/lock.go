package pgschema

import (
	"strconv"
	"time"
)

// failFast is how long a claim waits for a lock under idempotency.FailFast. A lock timeout of zero would be none, and a
// shorter one would mistake the short locks that every insert meets for a claim in flight.
const failFast = 10 * time.Millisecond

// LockTimeout returns the setting lock_timeout, in milliseconds, of a claim that waits for at most limit.
func LockTimeout(limit time.Duration) string {
	limit = max(limit, failFast)
	return strconv.FormatInt((limit + time.Millisecond - 1).Milliseconds(), 10)
}
