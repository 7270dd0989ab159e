package batch

import "time"

// lingerMax is the longest wait between two batches. A batch waits if at least lingerFrom orders are
// expected in that time: 10,000 a second.
const (
	lingerMax  = 10 * time.Millisecond
	lingerFrom = 100
)

// pace estimates the rate of orders from the last batch. At low rates, a batch starts with the
// first message after the last batch is done. At high rates, a short wait makes fewer and larger
// batches, which leaves more CPU to the ingress.
type pace struct {
	started, ended time.Time
	perSecond      float64
}

// start records that a batch of n has started.
func (p *pace) start(n int, now time.Time) {
	p.perSecond = 0
	if !p.started.IsZero() {
		p.perSecond = float64(n) / max(now.Sub(p.started), time.Microsecond).Seconds()
	}
	p.started = now
}

// end records that a batch is done.
func (p *pace) end(now time.Time) { p.ended = now }

// wait returns how long the next batch may wait for more messages.
func (p *pace) wait(now time.Time) time.Duration {
	if p.perSecond*lingerMax.Seconds() < lingerFrom {
		return 0
	}
	return lingerMax - now.Sub(p.ended)
}
