package fleet

import (
	"math"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
)

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
