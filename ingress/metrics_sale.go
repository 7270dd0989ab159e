package ingress

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
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
	// otherSales is the label of all others together.
	otherSales = "other"
	// followInterval is how often an ingress looks for the sales to follow, so that their series exist before they open.
	followInterval = 5 * time.Second
	followTimeout  = 3 * time.Second
	// activeLooks is for how many of these looks a sale is active after a purchase: a minute.
	activeLooks = 12
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

type saleCounters struct {
	outcomes [saleOutcomes]prometheus.Counter
	// active is for how many looks more the sale is active.
	active atomic.Int64
}

// saleMetrics count the purchases of the sales that the catalog follows, each for itself. A request finds its counters
// without a lock.
type saleMetrics struct {
	purchases *prometheus.CounterVec
	others    *saleCounters

	// followed is replaced as a whole, under mu. missed has other sales with purchases since the last look.
	followed atomic.Pointer[map[uuid.UUID]*saleCounters]
	missed   map[uuid.UUID]bool
	mu       sync.Mutex
}

func newSaleMetrics() *saleMetrics {
	m := &saleMetrics{missed: map[uuid.UUID]bool{}, purchases: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_sale_purchases_total",
		Help: "Purchases by sale and outcome: accepted, refused, shed (overloaded or rate-limited) or failed (unavailable or " +
			"unknown). 50 sales, those where something happens first, have series of their own; the label of all others is " +
			"other.",
	}, []string{"sale", "outcome"})}
	m.others = m.counters(otherSales)
	m.followed.Store(&map[uuid.UUID]*saleCounters{})
	return m
}

func (m *saleMetrics) counters(label string) *saleCounters {
	counters := new(saleCounters)
	for outcome, name := range saleOutcomeLabels {
		counters.outcomes[outcome] = m.purchases.WithLabelValues(label, name)
	}
	return counters
}

// count counts a purchase. Only a sale that exists gets series: a client may ask for any.
func (m *saleMetrics) count(sale uuid.UUID, outcome saleOutcome, exists bool) {
	counters := (*m.followed.Load())[sale]
	if counters == nil && exists {
		m.add(sale)
		counters = (*m.followed.Load())[sale]
	}
	if counters == nil {
		counters = m.others
	}
	if counters.active.Load() < activeLooks {
		counters.active.Store(activeLooks)
	}
	counters.outcomes[outcome].Inc()
}

// add gives series to a sale, while there are few. Otherwise it is active at the next look, if nobody holds the lock.
func (m *saleMetrics) add(sale uuid.UUID) {
	if len(*m.followed.Load()) < saleSeriesMax {
		m.follow(sale)
	} else if m.mu.TryLock() {
		defer m.mu.Unlock()
		if len(m.missed) < saleSeriesMax {
			m.missed[sale] = true
		}
	}
}

// active returns the sales that have had purchases lately. Each look calls it once.
func (m *saleMetrics) active() []uuid.UUID {
	m.mu.Lock()
	defer m.mu.Unlock()
	sales := slices.Collect(maps.Keys(m.missed))
	clear(m.missed)
	for id, counters := range *m.followed.Load() {
		if counters.active.Load() > 0 {
			counters.active.Add(-1)
			sales = append(sales, id)
		}
	}
	return sales
}

// follow gives series to these sales. Others keep theirs while there are few: a sale may be newer than the list.
func (m *saleMetrics) follow(sales ...uuid.UUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before, after := *m.followed.Load(), make(map[uuid.UUID]*saleCounters, saleSeriesMax)
	for _, id := range slices.AppendSeq(slices.Clip(sales), maps.Keys(before)) {
		switch counters := before[id]; {
		case len(after) == saleSeriesMax:
		case counters != nil:
			after[id] = counters
		case after[id] == nil:
			after[id] = m.counters(id.String())
		}
	}
	m.followed.Store(&after)
	for id := range before {
		if after[id] == nil {
			// A purchase that has just found these counters is not counted any more.
			m.purchases.DeletePartialMatch(prometheus.Labels{"sale": id.String()})
		}
	}
}

// run follows the sales that find returns, until ctx is done.
func (m *saleMetrics) run(
	ctx context.Context, find func(context.Context, []uuid.UUID, int) ([]uuid.UUID, error), log *slog.Logger,
) {
	for {
		limited, cancel := context.WithTimeout(ctx, followTimeout)
		sales, err := find(limited, m.active(), saleSeriesMax)
		cancel()
		if err == nil {
			m.follow(sales...)
		} else if ctx.Err() == nil { // the requests report the outage
			log.DebugContext(ctx, "cannot look for the sales to follow", "error", err)
		}
		if !retry.Pause(retry.Delay(1, followInterval, followInterval), ctx.Done()) {
			return
		}
	}
}

// Who reports money.
const (
	reportByShop   = "shop"
	reportByStripe = "stripe"
)

// What becomes of a report. anonymous ones have no token and no signature: a shop that is set up wrongly sends one.
const (
	reportKept         = "kept"
	reportAnonymous    = "anonymous"
	reportUnauthorized = "unauthorized"
	reportForbidden    = "forbidden"
	reportInvalid      = "invalid"
	reportUnavailable  = "unavailable"
)

// reportKey has the labels of a report of money.
type reportKey struct{ by, outcome string }

func (m *metrics) newReports() prometheus.Collector {
	counted := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_payment_reports_total",
		Help: "Reports of money, of the shop or of Stripe, by what became of them: kept, unauthorized (401, or a signature that " +
			"fits no secret), forbidden (403), invalid (other 4xx), unavailable (5xx), and anonymous without a token or a " +
			"signature, as those of strangers are. stampede_payments_total has what became of the money.",
	}, []string{"by", "outcome"})
	for _, by := range []string{reportByShop, reportByStripe} {
		for _, outcome := range []string{
			reportKept, reportAnonymous, reportUnauthorized, reportForbidden, reportInvalid, reportUnavailable,
		} {
			m.reports[reportKey{by, outcome}] = counted.WithLabelValues(by, outcome)
		}
	}
	return counted
}

// countReport counts a report of money that was answered with err. proof is the token or the signature of one that was
// not admitted.
func (m *metrics) countReport(by string, err error, proof string) {
	outcome := reportKept
	if err != nil {
		outcome = refusedReport(err, proof)
	}
	m.reports[reportKey{by, outcome}].Inc()
}

func refusedReport(err error, proof string) string {
	unsigned := errors.Is(err, problemStripeHeader) || errors.Is(err, problemStripeTime) ||
		errors.Is(err, problemStripeSecret)
	switch status := problemFor(err).Status; {
	case status >= http.StatusInternalServerError:
		return reportUnavailable
	case (unsigned || status == http.StatusUnauthorized || status == http.StatusForbidden) && proof == "":
		return reportAnonymous
	case unsigned || status == http.StatusUnauthorized:
		return reportUnauthorized
	case status == http.StatusForbidden:
		return reportForbidden
	}
	return reportInvalid
}
