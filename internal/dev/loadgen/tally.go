package loadgen

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/google/uuid"

	"stampede/internal/format"
	"stampede/reservation/order"
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
	winners, losers, late               *hdrhistogram.Histogram
	cpuMost                             float64
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
		late:     hdrhistogram.New(1, maxLatencyUs, latencyFigures),
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

// sentAfter records how long after a buyer was due the first request was made.
func (t *tally) sentAfter(late time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.late.RecordValue(min(max(0, late.Microseconds()), maxLatencyUs)) // cannot fail: the value is in range
}

// watchCPU records how much of its cores this process uses in the busiest second, until stop is closed.
func (t *tally) watchCPU(stop <-chan struct{}) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	at, used := time.Now(), cpuTime()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		now, usedNow := time.Now(), cpuTime()
		share := float64(usedNow-used) / float64(now.Sub(at)) / float64(runtime.GOMAXPROCS(0))
		at, used = now, usedNow
		t.mu.Lock()
		t.cpuMost = max(t.cpuMost, share)
		t.mu.Unlock()
	}
}

// cpuTime is that of this process.
func cpuTime() time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
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
		Began:         t.start,
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
		Late:          latencies(t.late),
		CPUMost:       t.cpuMost,
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

// Durable counts the accepted orders that reached Postgres, and how fast they did.
type Durable struct {
	Orders int
	// Rate is Orders divided by the time from the first acceptance to the arrival of the last order.
	Rate float64
	// LastAt is when the last of them was seen, within durablePoll.
	LastAt time.Time
}

// durableAfter is how long after the start of the crowd the last order was durable; ok is false unless all are.
func (r Report) durableAfter() (took time.Duration, ok bool) {
	if r.Durable == nil || r.Durable.Orders < r.Accepted || r.Accepted == 0 {
		return 0, false
	}
	return r.Durable.LastAt.Sub(r.Began), true
}

func (d Durable) remark(r Report) string {
	if missing := r.Accepted - d.Orders; missing > 0 {
		return fmt.Sprintf("%s accepted orders have not arrived", format.Count(missing))
	}
	if r.Accepted == 0 {
		return ""
	}
	return fmt.Sprintf("the last %d ms after the last acceptance", max(0, d.LastAt.Sub(r.LastAccepted).Milliseconds()))
}

// durablePoll is the interval between reads of Sold, and so the precision of LastAt.
const durablePoll = 10 * time.Millisecond

// WatchDurable runs beside Run. It returns when all accepted orders are stored, or when none has arrived for patience
// after the end of the crowd. Failed reads are retried.
func (c *Crowd) WatchDurable(ctx context.Context, verifier Verifier, patience time.Duration) (Durable, error) {
	tick := time.NewTicker(durablePoll)
	defer tick.Stop()
	var sold int64
	var lastErr error
	lastAt := time.Now()
	done := c.done
	ended := time.Time{}
	for {
		now, err := verifier.Sold(ctx)
		switch {
		case errors.Is(err, ErrPaymentWindow):
			return Durable{}, err
		case err != nil:
			lastErr = err
		case now != sold:
			sold, lastAt = now, time.Now()
		}
		if !ended.IsZero() {
			r := c.Report()
			all := sold >= int64(r.Accepted)*r.Quantity
			if all || time.Since(latest(lastAt, ended)) > patience {
				if !all && sold == 0 && lastErr != nil {
					return Durable{}, fmt.Errorf("watch the orders arrive: %w", lastErr)
				}
				orders := int(sold / r.Quantity)
				return Durable{Orders: orders, Rate: rate(orders, lastAt.Sub(r.FirstAccepted)), LastAt: lastAt}, nil
			}
		}
		select {
		case <-tick.C:
		case <-done:
			done, ended = nil, time.Now()
		case <-ctx.Done():
			return Durable{}, ctx.Err()
		}
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// clickOutcome is the final outcome of a click.
type clickOutcome uint8

// The outcomes of a click. Zero means that the click was not sent.
const (
	// accepted: 202 or 201.
	accepted clickOutcome = iota + 1
	// replayed: as accepted, with the header Idempotency-Replayed.
	replayed
	// alreadyPurchased: the buyer holds an order in this sale with another key.
	alreadyPurchased
	// soldOut: no unit is left.
	soldOut
	// notOnSale: the sale is not open, paused or ended.
	notOnSale
	// failed: an answer that a correct request must not get.
	failed
	// unknown: the buyer's patience ended before a definite answer.
	unknown
)

// clickRecord is the final answer to one click.
type clickRecord struct {
	order   uuid.UUID // from the answer, if it has one
	outcome clickOutcome
}

// Ledger holds the final answer to each click. Users and keys are not stored: they are derived from
// the run's name and the buyer's number.
type Ledger struct {
	run      string
	quantity int64         // units per order
	items    []string      // codes of the sale's items
	entries  []clickRecord // two per buyer: the first and the second click
	receipts map[uuid.UUID]string
}

// newLedger gives the run a random name, so that two crowds in one sale have different users.
func newLedger(buyers int, quantity int64, items ...string) *Ledger {
	return &Ledger{
		run: uuid.NewString()[:8], quantity: quantity, items: items,
		entries: make([]clickRecord, 2*buyers), receipts: make(map[uuid.UUID]string),
	}
}

func (l *Ledger) user(buyer int) string { return "buyer-" + l.run + "-" + strconv.Itoa(buyer) }

// basket is what the buyer buys in a sale with items.
func (l *Ledger) basket(buyer int) order.Items {
	n := len(l.items)
	units := make([]int64, n)
	for i := range n {
		units[(buyer+i)%n] = (l.quantity + int64(n-1-i)) / int64(n)
	}
	return order.MakeLines(units).Named(l.items)
}

// body is the body of the buyer's purchase.
func (l *Ledger) body(buyer int) string {
	if len(l.items) > 0 {
		return `{"items":` + string(l.basket(buyer)) + "}"
	}
	return `{"quantity":` + strconv.FormatInt(l.quantity, 10) + "}"
}

// bought is what an accepted order of the user holds, as verifiers read it.
func (l *Ledger) bought(user string) (quantity int64, items order.Items) {
	buyer, _ := strconv.Atoi(user[strings.LastIndexByte(user, '-')+1:])
	return l.quantity, l.basket(buyer)
}

func (l *Ledger) key(k click) string {
	suffix := "-1"
	if k.second && !k.sameKey {
		suffix = "-2"
	}
	return l.run + "-" + strconv.Itoa(k.buyer) + suffix
}

func (l *Ledger) at(k click) *clickRecord { return &l.entries[2*k.buyer+k.number()] }

// other is the entry of the buyer's other click.
func (l *Ledger) other(k click) *clickRecord { return &l.entries[2*k.buyer+1-k.number()] }

// orders returns every order in the answers, with its buyer. Contradictions counts answers with the order of another
// buyer; it must be 0.
func (l *Ledger) orders() (orders map[uuid.UUID]string, contradictions int) {
	orders = make(map[uuid.UUID]string)
	for i, e := range l.entries {
		if e.order == uuid.Nil {
			continue
		}
		user := l.user(i / 2)
		if other, taken := orders[e.order]; taken && other != user {
			contradictions++
		}
		orders[e.order] = user
	}
	return orders, contradictions
}

// pairs returns both orders of every buyer who got two. At least one of them must have ended without units.
func (l *Ledger) pairs() [][2]uuid.UUID {
	var pairs [][2]uuid.UUID
	for buyer := range len(l.entries) / 2 {
		first, second := l.entries[2*buyer].order, l.entries[2*buyer+1].order
		if first != uuid.Nil && second != uuid.Nil && first != second {
			pairs = append(pairs, [2]uuid.UUID{first, second})
		}
	}
	return pairs
}

// undecided returns the buyers with a click of unknown outcome: they may or may not hold an order.
func (l *Ledger) undecided() map[string]bool {
	users := make(map[string]bool)
	for i, e := range l.entries {
		if e.outcome == unknown {
			users[l.user(i/2)] = true
		}
	}
	return users
}
