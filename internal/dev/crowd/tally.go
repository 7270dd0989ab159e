package crowd

import (
	"maps"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/google/uuid"
)

// Latencies are recorded in microseconds, up to ten minutes, with three significant figures.
const (
	maxLatencyUs   = int64(10 * time.Minute / time.Microsecond)
	latencyFigures = 3
)

// Progress is the state of a running crowd.
type Progress struct {
	Elapsed time.Duration
	Buyers  int // total
	Due     int // buyers who are due by now
	// Accepted counts orders: replays and second clicks do not add to it.
	Accepted int
	// Rejected counts refusals.
	Rejected int
	// Failed counts clicks without a valid final answer. Retries counts repeated tries.
	Failed, Retries int
}

// tally counts answers and writes them into the ledger.
type tally struct {
	mu     sync.Mutex
	ledger *Ledger

	accepted, clicks, secondClicks      int
	outcomes                            [unknown + 1]int
	retries                             map[string]int // by problem
	failures                            map[string]int // by problem
	winners, losers                     *hdrhistogram.Histogram
	start                               time.Time
	firstAccepted, lastAccepted         time.Time
	firstRejected, lastRejected, lastAt time.Time
}

func newTally(l *Ledger) *tally {
	return &tally{
		ledger:   l,
		retries:  make(map[string]int),
		failures: make(map[string]int),
		winners:  hdrhistogram.New(1, maxLatencyUs, latencyFigures),
		losers:   hdrhistogram.New(1, maxLatencyUs, latencyFigures),
	}
}

// record counts and stores the final answer to a click.
func (t *tally) record(k click, a answer, due, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	*t.ledger.at(k) = clickRecord{order: a.order, outcome: a.outcome}
	if a.receipt != "" {
		t.ledger.receipts[a.order] = a.receipt
	}
	t.outcomes[a.outcome]++
	t.clicks++
	if k.second {
		t.secondClicks++
	}
	if a.order != uuid.Nil && t.ledger.other(k).order != a.order {
		t.accepted++
	}
	latencyUs := min(now.Sub(due).Microseconds(), maxLatencyUs)
	switch a.outcome {
	case accepted, replayed:
		_ = t.winners.RecordValue(latencyUs) // cannot fail: the value is in range
		if t.firstAccepted.IsZero() {
			t.firstAccepted = now
		}
		t.lastAccepted = now
	case alreadyPurchased, soldOut, notOnSale:
		_ = t.losers.RecordValue(latencyUs)
		if t.firstRejected.IsZero() {
			t.firstRejected = now
		}
		t.lastRejected = now
	default:
		t.failures[a.problem]++
	}
	t.lastAt = now
}

// retried counts a try of unknown outcome that is repeated.
func (t *tally) retried(problem string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.retries[problem]++
}

// begin sets the start of the crowd's duration.
func (t *tally) begin(start time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.start = start
}

func (t *tally) rejected() int {
	return t.outcomes[alreadyPurchased] + t.outcomes[soldOut] + t.outcomes[notOnSale]
}

func (t *tally) progress() Progress {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Progress{
		Accepted: t.accepted,
		Rejected: t.rejected(),
		Failed:   t.outcomes[failed] + t.outcomes[unknown],
		Retries:  total(t.retries),
	}
}

func (t *tally) report() Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Report{
		Took:          t.lastAt.Sub(t.start),
		Clicks:        t.clicks,
		SecondClicks:  t.secondClicks,
		Accepted:      t.accepted,
		FirstAccepted: t.firstAccepted,
		LastAccepted:  t.lastAccepted,
		AcceptedRate:  rate(t.accepted, t.lastAccepted.Sub(t.firstAccepted)),
		Replayed:      t.outcomes[replayed],
		Rejected:      t.rejected(),
		RejectedRate:  rate(t.rejected(), t.lastRejected.Sub(t.firstRejected)),
		SoldOut:       t.outcomes[soldOut],
		Already:       t.outcomes[alreadyPurchased],
		NotOnSale:     t.outcomes[notOnSale],
		Failures:      maps.Clone(t.failures),
		Retries:       maps.Clone(t.retries),
		Winners:       latencies(t.winners),
		Losers:        latencies(t.losers),
	}
}

func latencies(h *hdrhistogram.Histogram) Latencies {
	at := func(quantile float64) time.Duration {
		return time.Duration(h.ValueAtQuantile(quantile)) * time.Microsecond
	}
	return Latencies{
		Count: h.TotalCount(), P50: at(50), P99: at(99), P999: at(99.9),
		Max: time.Duration(h.Max()) * time.Microsecond,
	}
}

// rate is 0 if over is not positive.
func rate(n int, over time.Duration) float64 {
	if over <= 0 {
		return 0
	}
	return float64(n) / over.Seconds()
}

func total(counts map[string]int) int {
	sum := 0
	for _, n := range counts {
		sum += n
	}
	return sum
}
