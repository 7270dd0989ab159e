package ingress

import (
	"bytes"
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
)

const (
	// saleSeriesMax bounds the sales with series of their own.
	saleSeriesMax = 50
	// otherSales is their label, together.
	otherSales = "other"
	// newestInterval is how often an ingress looks for new sales, so that their series exist before they open.
	newestInterval = 5 * time.Second
	newestTimeout  = 3 * time.Second
)

// saleOutcome is what became of a purchase, as the metrics of its sale tell it.
type saleOutcome int

const (
	saleAccepted saleOutcome = iota
	saleRefused
	saleShed   // overloaded or rate-limited
	saleFailed // unavailable or unknown
	saleOutcomes
)

var saleOutcomeLabels = [saleOutcomes]string{"accepted", "refused", "shed", "failed"}

type saleCounters [saleOutcomes]prometheus.Counter

// saleMetrics count the purchases of the newest sales, each for itself. A request finds its counters without a lock.
type saleMetrics struct {
	purchases *prometheus.CounterVec
	others    *saleCounters

	// newest is replaced as a whole, under mu.
	newest atomic.Pointer[newestSales]
	mu     sync.Mutex
}

// newestSales are the sales with series. Only sales that come after the id all would get series.
type newestSales struct {
	counters map[uuid.UUID]*saleCounters
	after    uuid.UUID
}

func newSaleMetrics() *saleMetrics {
	m := &saleMetrics{purchases: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_sale_purchases_total",
		Help: "Purchases by sale and outcome: accepted, refused, shed (overloaded or rate-limited) or failed (unavailable or " +
			"unknown). The newest 50 sales have series of their own; the label of all others is other.",
	}, []string{"sale", "outcome"})}
	m.others = m.counters(otherSales)
	m.newest.Store(new(newestSales))
	return m
}

func (m *saleMetrics) counters(label string) *saleCounters {
	counters := new(saleCounters)
	for outcome, name := range saleOutcomeLabels {
		counters[outcome] = m.purchases.WithLabelValues(label, name)
	}
	return counters
}

// count counts a purchase. Only a sale that exists gets series: a client may ask for any.
func (m *saleMetrics) count(sale uuid.UUID, outcome saleOutcome, exists bool) {
	newest := m.newest.Load()
	counters := newest.counters[sale]
	if counters == nil && exists && compareIDs(sale, newest.after) > 0 {
		m.add(sale)
		counters = m.newest.Load().counters[sale]
	}
	if counters == nil {
		counters = m.others
	}
	counters[outcome].Inc()
}

// compareIDs compares ids, which are in the order in which their sales were created.
func compareIDs(x, y uuid.UUID) int { return bytes.Compare(x[:], y[:]) }

// add gives sales series. Beyond saleSeriesMax, the oldest sales lose theirs.
func (m *saleMetrics) add(sales ...uuid.UUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.newest.Load().counters
	ids := slices.AppendSeq(slices.Clone(sales), maps.Keys(before))
	slices.SortFunc(ids, compareIDs)
	ids = slices.Compact(ids)
	after := newestSales{counters: make(map[uuid.UUID]*saleCounters, len(ids))}
	if excess := len(ids) - saleSeriesMax; excess > 0 {
		ids = ids[excess:]
	}
	if len(ids) == saleSeriesMax {
		after.after = ids[0]
	}
	for _, id := range ids {
		if after.counters[id] = before[id]; after.counters[id] == nil {
			after.counters[id] = m.counters(id.String())
		}
	}
	m.newest.Store(&after)
	for id := range before {
		if after.counters[id] == nil {
			// A purchase that has just found these counters is not counted any more.
			m.purchases.DeletePartialMatch(prometheus.Labels{"sale": id.String()})
		}
	}
}

// followNewest gives new sales their series, until ctx is done.
func (m *saleMetrics) followNewest(
	ctx context.Context, newest func(context.Context, int) ([]uuid.UUID, error), log *slog.Logger,
) {
	for {
		limited, cancel := context.WithTimeout(ctx, newestTimeout)
		sales, err := newest(limited, saleSeriesMax)
		cancel()
		if err == nil {
			m.add(sales...)
		} else if ctx.Err() == nil { // the requests report the outage
			log.DebugContext(ctx, "cannot look for new sales", "error", err)
		}
		if !retry.Pause(retry.Delay(1, newestInterval, newestInterval), ctx.Done()) {
			return
		}
	}
}
