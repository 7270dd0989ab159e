package batch

import (
	"time"
)

// The longest wait between two batches, and how many orders have to be expected in that time: ten
// thousand a second.
const (
	lingerMax  = 10 * time.Millisecond
	lingerFrom = 100
)

// pace estimates the rate of orders from the last batch. Below the bound, a batch starts with the
// first message once the last batch is done. Above it, a larger batch takes little longer than a
// small one, so a short wait leaves more CPU to the ingress.
type pace struct {
	started, Ended time.Time
	PerSecond      float64
}

// Start records that a batch of n has started.
func (p *pace) Start(n int, now time.Time) {
	p.PerSecond = 0
	if !p.started.IsZero() {
		p.PerSecond = float64(n) / max(now.Sub(p.started), time.Microsecond).Seconds()
	}
	p.started = now
}

// End records that a batch is done.
func (p *pace) End(now time.Time) { p.Ended = now }

// Wait is how long the next batch may wait for more messages.
func (p *pace) Wait(now time.Time) time.Duration {
	if p.PerSecond*lingerMax.Seconds() < lingerFrom {
		return 0
	}
	return lingerMax - now.Sub(p.Ended)
}
