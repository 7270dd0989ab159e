package batch

import (
	"time"
)

// What is waited for at most between two batches, and how many orders have to be expected in that
// time for it to be worth waiting: ten thousand in a second.
const (
	lingerMax  = 10 * time.Millisecond
	lingerFrom = 100
)

// pace is how fast orders come, as far as the last batch tells: the one thing for which a batch waits. Below it a batch
// starts with the first message, as soon as the last one is over. Above it a transaction takes so
// little longer for twice as many orders that a batch that waits a moment leaves more of both cores
// to those who make the orders. Nobody waits where nobody else is to be expected.
type pace struct {
	started, Ended time.Time
	PerSecond      float64
}

// Start notes that a batch of n has started.
func (p *pace) Start(n int, now time.Time) {
	p.PerSecond = 0
	if !p.started.IsZero() {
		p.PerSecond = float64(n) / max(now.Sub(p.started), time.Microsecond).Seconds()
	}
	p.started = now
}

// End notes that a batch is over.
func (p *pace) End(now time.Time) { p.Ended = now }

// Wait is for how long the next batch may wait for more messages.
func (p *pace) Wait(now time.Time) time.Duration {
	if p.PerSecond*lingerMax.Seconds() < lingerFrom {
		return 0
	}
	return lingerMax - now.Sub(p.Ended)
}
