package httpload

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// Answers is what came of a load.
type Answers struct {
	ByStatus map[int]int64
	// Wanted is how many answers had the wanted status, and InTime how many of them came before the load
	// was to end.
	Wanted, InTime int64
	// Broken is how many requests had no answer because their connection broke.
	Broken int64
	// Unsent is how many requests of an open loop were due and never sent, because all connections were
	// waiting for their answers. How long they had waited in the end is among the latencies.
	Unsent int64
	// Took is how long it was until the last answer, and Lasted how much of that belongs to the load:
	// all of it, where there were no more requests or nobody wanted more, but no longer than For.
	Took, Lasted time.Duration

	latencies []uint32 // in microseconds, sorted
}

// PerSecond is how many of the wanted answers came in a second, while the load lasted. What comes later does
// not count, and neither does the wait for it: a few who are answered very late would make everybody else
// look slow.
func (a Answers) PerSecond() float64 { return float64(a.InTime) / a.Lasted.Seconds() }

// Others is how many requests had another answer than the wanted one, or none.
func (a Answers) Others() int64 {
	others := a.Broken + a.Unsent - a.Wanted
	for _, n := range a.ByStatus {
		others += n
	}
	return others
}

// Percentile is the smallest latency that p of a hundred do not exceed; 0 if there is none.
func (a Answers) Percentile(p float64) time.Duration {
	n := len(a.latencies)
	if n == 0 {
		return 0
	}
	rank := int(math.Ceil(float64(n) * p / 100))
	return time.Duration(a.latencies[max(rank, 1)-1]) * time.Microsecond
}

// String tells how many answers had which status.
func (a Answers) String() string {
	var parts []string
	for _, status := range slices.Sorted(maps.Keys(a.ByStatus)) {
		parts = append(parts, fmt.Sprintf("%d × %d", a.ByStatus[status], status))
	}
	if a.Broken > 0 {
		parts = append(parts, fmt.Sprintf("%d × broken", a.Broken))
	}
	if a.Unsent > 0 {
		parts = append(parts, fmt.Sprintf("%d × not sent", a.Unsent))
	}
	return strings.Join(parts, ", ")
}

// tally is what one connection heard.
type tally struct {
	byStatus  map[int]int64
	wanted    int64
	inTime    int64
	broken    int64
	latencies []uint32
	err       error
}

func (t *tally) add(wanted, inTime bool, status int, took time.Duration) {
	if t.byStatus == nil {
		t.byStatus = make(map[int]int64)
	}
	t.byStatus[status]++
	if wanted {
		t.wanted++
		if inTime {
			t.inTime++
		}
		t.latencies = append(t.latencies, inMicros(took))
	}
}

// inMicros holds latencies of up to an hour in half the space.
func inMicros(d time.Duration) uint32 { return uint32(min(d.Microseconds(), math.MaxUint32)) }

// sum is called when all connections are through.
func (r *run) sum() (Answers, error) {
	end := time.Now()
	took := end.Sub(r.began)
	sum := Answers{ByStatus: make(map[int]int64), Took: took, Lasted: min(took, r.load.For)}
	var errs []error
	for _, t := range r.tallies {
		for status, n := range t.byStatus {
			sum.ByStatus[status] += n
		}
		sum.Wanted += t.wanted
		sum.InTime += t.inTime
		sum.Broken += t.broken
		sum.latencies = append(sum.latencies, t.latencies...)
		errs = append(errs, t.err)
	}
	if r.load.Rate > 0 && r.ctx.Err() == nil {
		for n := r.taken.Load() + 1; n <= r.scheduled(); n++ {
			sum.Unsent++
			sum.latencies = append(sum.latencies, inMicros(end.Sub(r.due(n))))
		}
	}
	slices.Sort(sum.latencies)
	return sum, errors.Join(errs...)
}
