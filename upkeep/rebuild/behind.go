package rebuild

import "sync"

// behind is how many orders Postgres is behind Redis by the sequences of sales, as of the last check of the sales that
// are over (true) and of those that are not (false).
type behind struct {
	mu     sync.Mutex
	orders map[int]map[bool]int64 // by partition
}

// set replaces the counts of a partition. Sales that are over keep theirs unless withEnded.
func (b *behind) set(partition int, withEnded bool, counted map[bool]int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.orders == nil {
		b.orders = map[int]map[bool]int64{}
	}
	if !withEnded {
		counted[true] = b.orders[partition][true]
	}
	b.orders[partition] = counted
}

// Behind returns how many places Redis has assigned in the sales of a partition after the last one that Postgres has
// recorded, as of the last call of Heal. Its rejected and voided orders count until a later order is confirmed.
func (r *Rebuilder) Behind(partition int) (orders int64) {
	r.behind.mu.Lock()
	defer r.behind.mu.Unlock()
	return r.behind.orders[partition][false] + r.behind.orders[partition][true]
}
