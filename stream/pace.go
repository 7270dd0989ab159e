package stream

import "time"

const (
	// readInterval is the shortest time between two reads of a stream to which orders come often. An
	// order waits for half of it, on average.
	readInterval = 10 * time.Millisecond
	// pacedFrom is how many orders must be expected in a readInterval: 500 a second.
	pacedFrom = 5
)

// pace spaces the reads of a stream. Without it nearly every entry would be a page and a batch of
// its own, and wake Redis, the worker and Postgres. At low rates an entry is read immediately.
type pace struct{ last time.Time }

// pause returns how long to wait after a read at this time that found so many orders.
func (p *pace) pause(orders int, now time.Time) time.Duration {
	since := now.Sub(p.last)
	p.last = now
	if since > time.Duration(orders)*readInterval/pacedFrom {
		return 0
	}
	return readInterval
}
