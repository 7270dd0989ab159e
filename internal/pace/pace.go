// Package pace spaces what is done in batches, so that under load a batch has more than a few items. Without it nearly
// every item would be a batch of its own, and wake each process on its way. At low rates nothing waits.
package pace

import "time"

// Pace is for one line of batches. It is not safe for concurrent use.
type Pace struct {
	// Interval is the shortest time between two batches under load. An item waits for half of it, on average.
	Interval time.Duration
	// From is the load: an item in this time, or more often.
	From time.Duration

	last time.Time
}

// Pause returns how long to wait after a batch at this time that had so many items.
func (p *Pace) Pause(items int, now time.Time) time.Duration {
	since := now.Sub(p.last)
	p.last = now
	if since > time.Duration(items)*p.From {
		return 0
	}
	return p.Interval
}
