package fleet

import (
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
	dto "github.com/prometheus/client_model/go"
)

// increase is what the counters of a process have gained between two samples, or those of all processes together.
type increase struct {
	seconds float64 // between the samples; 0 if there is only one

	cpu                        float64
	purchases                  outcomes
	overloaded                 float64
	sales                      map[uuid.UUID]outcomes
	recorded, rejected, voided float64
	lost, delivered            float64
	answers, durable           histogram
	money                      money
}

// perSecond returns a part of the increase per second.
func (i *increase) perSecond(gained float64) float64 {
	if i.seconds == 0 {
		return 0
	}
	return gained / i.seconds
}

// since returns what the process has gained since its sample before.
func (s *sample) since(before *sample, elapsed time.Duration) increase {
	i := increase{
		seconds:    elapsed.Seconds(),
		cpu:        gained(before.cpu, s.cpu),
		overloaded: gained(before.overloaded, s.overloaded),
		purchases:  s.purchases.since(before.purchases),
		recorded:   gained(before.recorded, s.recorded),
		rejected:   gained(before.rejected, s.rejected),
		voided:     gained(before.voided, s.voided),
		lost:       gained(before.lost, s.lost),
		delivered:  gained(before.delivered, s.delivered),
		answers:    s.answers.since(before.answers),
		durable:    s.durable.since(before.durable),
		money:      s.money.since(before.money),
	}
	for id, now := range s.sales {
		// All its series exist from its first purchase on, so the first value of a sale is an increase.
		if more := now.since(before.sales[id]); more.total() > 0 {
			if i.sales == nil {
				i.sales = make(map[uuid.UUID]outcomes)
			}
			i.sales[id] = more
		}
	}
	return i
}

// gained returns the increase of a counter. One that is lower than before was reset.
func gained(before, now float64) float64 {
	if now < before {
		return now
	}
	return now - before
}

func (o outcomes) since(before outcomes) outcomes {
	for i := range o {
		o[i] = gained(before[i], o[i])
	}
	return o
}

func (o outcomes) total() (sum float64) {
	for _, n := range o {
		sum += n
	}
	return sum
}

// add adds what a process has gained, per second.
func (i *increase) add(p *increase) {
	i.seconds = 1
	i.cpu += p.perSecond(p.cpu)
	i.overloaded += p.perSecond(p.overloaded)
	i.recorded += p.perSecond(p.recorded)
	i.delivered += p.perSecond(p.delivered)
	for key, n := range p.money {
		if i.money == nil {
			i.money = money{}
		}
		i.money[key] += p.perSecond(n)
	}
	for at := range p.purchases {
		i.purchases[at] += p.perSecond(p.purchases[at])
	}
	for id, more := range p.sales {
		if i.sales == nil {
			i.sales = make(map[uuid.UUID]outcomes)
		}
		sum := i.sales[id]
		for at := range more {
			sum[at] += p.perSecond(more[at])
		}
		i.sales[id] = sum
	}
}

func (o outcomes) rates() Rates {
	return Rates{Offered: o.total(), Accepted: o[accepted], Refused: o[refused], Shed: o[shed], Failed: o[failed]}
}

// bucketsMax bounds the buckets of a histogram.
const bucketsMax = 256

// histogram is a classic histogram: counts[i] observations were at most bounds[i]. The bounds rise, and the last one is
// +Inf. The zero value has no observation.
type histogram struct {
	bounds, counts []float64
}

// addHistograms adds up all series of a histogram.
func addHistograms(family *dto.MetricFamily) histogram {
	var total histogram
	for i, m := range family.GetMetric() {
		if i == seriesMax {
			break
		}
		buckets := m.GetHistogram().GetBucket()
		if len(buckets) == 0 || len(buckets) > bucketsMax {
			continue
		}
		var one histogram
		for _, b := range buckets {
			one.bounds = append(one.bounds, b.GetUpperBound())
			one.counts = append(one.counts, finite(float64(b.GetCumulativeCount())))
		}
		if one.valid() {
			total = total.plus(one)
		}
	}
	return total
}

// valid is false for a histogram that no Stampede writes.
func (h histogram) valid() bool {
	for i, bound := range h.bounds {
		if math.IsNaN(bound) || i > 0 && (bound <= h.bounds[i-1] || h.counts[i] < h.counts[i-1]) {
			return false
		}
	}
	return len(h.bounds) > 0 && math.IsInf(h.bounds[len(h.bounds)-1], 1)
}

func (h histogram) total() float64 {
	if len(h.counts) == 0 {
		return 0
	}
	return h.counts[len(h.counts)-1]
}

// at returns how many observations were at most bound, as if those of a bucket were spread evenly over it.
func (h histogram) at(bound float64) float64 {
	i, found := slices.BinarySearch(h.bounds, bound)
	if found {
		return h.counts[i]
	}
	if i == len(h.bounds) || math.IsInf(h.bounds[i], 1) {
		return h.total()
	}
	lower, below := 0.0, 0.0
	if i > 0 {
		lower, below = h.bounds[i-1], h.counts[i-1]
	}
	if bound <= lower {
		return below
	}
	return below + (h.counts[i]-below)*(bound-lower)/(h.bounds[i]-lower)
}

// plus adds two histograms. Their bounds differ while two versions run.
func (h histogram) plus(other histogram) histogram {
	switch {
	case h.total() == 0 && len(other.bounds) > 0:
		return other
	case other.total() == 0:
		return h
	}
	bounds := h.bounds
	if !slices.Equal(h.bounds, other.bounds) {
		bounds = slices.Concat(h.bounds, other.bounds)
		slices.Sort(bounds)
		bounds = slices.Compact(bounds)
	}
	added := histogram{bounds: bounds, counts: make([]float64, len(bounds))}
	for i, bound := range bounds {
		added.counts[i] = h.at(bound) + other.at(bound)
	}
	return added
}

// since returns the observations after those of before. If it has fewer than before, it was reset.
func (h histogram) since(before histogram) histogram {
	if !slices.Equal(h.bounds, before.bounds) {
		return h
	}
	fresh := histogram{bounds: h.bounds, counts: make([]float64, len(h.counts))}
	least := 0.0
	for i := range h.counts {
		if h.counts[i] < before.counts[i] {
			return h
		}
		// A scrape reads the buckets one after another while observations are made.
		least = max(least, h.counts[i]-before.counts[i])
		fresh.counts[i] = least
	}
	return fresh
}

// quantile returns an estimate as histogram_quantile of Prometheus does: observations are spread evenly over their
// bucket, and what is above the last finite bound counts as that bound. It is 0 without observations.
func (h histogram) quantile(q float64) time.Duration {
	rank := q * h.total()
	if rank == 0 {
		return 0
	}
	i := 0
	for h.counts[i] < rank {
		i++
	}
	lower, below := 0.0, 0.0
	if i > 0 {
		lower, below = h.bounds[i-1], h.counts[i-1]
	}
	upper := h.bounds[i]
	if math.IsInf(upper, 1) {
		return seconds(lower)
	}
	return seconds(lower + (upper-lower)*(rank-below)/(h.counts[i]-below))
}

func seconds(s float64) time.Duration { return time.Duration(min(s, 1e6) * float64(time.Second)) }
