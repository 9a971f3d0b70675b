package retention

// Statements are those of retention and of the operator's methods, for one pair of tables. Ages are in seconds.
type Statements struct {
	Newest       string   // age: a time, or null
	Lock         string   // whether this transaction is the one that purges the table, if the engine needs to ask
	Remove       string   // from, before, limit
	CountUnacked string   // before
	Forget       []string // subscriber ID, event ID; the last one affects the claim's row
	Unacked      string   // age, limit: key, topic, claimed_at, number of messages
	Pages        string   // the size of the table of claims, if Stats reads a part of it
	Stats        string   // percentage of the pages, if there are pages: subscriber ID, claims, oldest, newest, unacked, oldest unacked
}

// maxPages is how much of the table of claims Stats reads: 40 MB, or a quarter of a million claims.
const maxPages = 5000

// Sample returns the percentage of a table that Stats reads.
func Sample(pages int64) float64 {
	if pages <= maxPages {
		return 100
	}
	return 100 * maxPages / float64(pages)
}
