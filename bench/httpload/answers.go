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

// Answers is the result of a load.
type Answers struct {
	ByStatus map[int]int64
	// Wanted counts answers with the wanted status, and inTime those of them that came before the end
	// of the load.
	Wanted, inTime int64
	// Broken counts requests without an answer because their connection broke.
	Broken int64
	// unsent counts requests of an open loop that were due and never sent, because all connections were
	// waiting for answers. Their waiting times are among the latencies.
	unsent int64
	// Took is the time until the last answer. lasted is the part of it that belongs to the load: at
	// most For, and less if Most ended the load earlier.
	Took, lasted time.Duration

	latencies []uint32 // in microseconds, sorted
}

// PerSecond is the rate of wanted answers while the load lasted. Later answers do not count, and
// neither does the wait for them: a few very late answers would make all others look slow.
func (a Answers) PerSecond() float64 { return float64(a.inTime) / a.lasted.Seconds() }

// Others counts requests with another answer than the wanted one, or none.
func (a Answers) Others() int64 {
	others := a.Broken + a.unsent - a.Wanted
	for _, n := range a.ByStatus {
		others += n
	}
	return others
}

// Percentile is the smallest latency that at least p percent of the wanted answers do not exceed; 0
// without answers.
func (a Answers) Percentile(p float64) time.Duration {
	n := len(a.latencies)
	if n == 0 {
		return 0
	}
	rank := int(math.Ceil(float64(n) * p / 100))
	return time.Duration(a.latencies[max(rank, 1)-1]) * time.Microsecond
}

// String lists how many answers had which status.
func (a Answers) String() string {
	var parts []string
	for _, status := range slices.Sorted(maps.Keys(a.ByStatus)) {
		parts = append(parts, fmt.Sprintf("%d × %d", a.ByStatus[status], status))
	}
	if a.Broken > 0 {
		parts = append(parts, fmt.Sprintf("%d × broken", a.Broken))
	}
	if a.unsent > 0 {
		parts = append(parts, fmt.Sprintf("%d × not sent", a.unsent))
	}
	return strings.Join(parts, ", ")
}

// tally is the answers of one connection, and why it ended early.
type tally struct {
	Answers
	err error
}

func (t *tally) add(wanted, inTime bool, status int, took time.Duration) {
	if t.ByStatus == nil {
		t.ByStatus = make(map[int]int64)
	}
	t.ByStatus[status]++
	if wanted {
		t.Wanted++
		if inTime {
			t.inTime++
		}
		t.latencies = append(t.latencies, inMicros(took))
	}
}

// inMicros stores latencies of up to an hour in half the space.
func inMicros(d time.Duration) uint32 { return uint32(min(d.Microseconds(), math.MaxUint32)) }

// sum adds the tallies after all connections have finished.
func (r *run) sum() (Answers, error) {
	end := time.Now()
	took := end.Sub(r.began)
	sum := Answers{ByStatus: make(map[int]int64), Took: took, lasted: min(took, r.load.For)}
	var errs []error
	for _, t := range r.tallies {
		for status, n := range t.ByStatus {
			sum.ByStatus[status] += n
		}
		sum.Wanted += t.Wanted
		sum.inTime += t.inTime
		sum.Broken += t.Broken
		sum.latencies = append(sum.latencies, t.latencies...)
		errs = append(errs, t.err)
	}
	if r.load.Rate > 0 && r.ctx.Err() == nil {
		for n := r.taken.Load() + 1; n <= r.scheduled(); n++ {
			sum.unsent++
			sum.latencies = append(sum.latencies, inMicros(end.Sub(r.due(n))))
		}
	}
	slices.Sort(sum.latencies)
	return sum, errors.Join(errs...)
}
