package ingress

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"stampede/internal/accept"
	"stampede/reservation"
)

// metrics holds every counter with its labels resolved, so that a request looks none up.
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	verdicts map[reservation.Verdict]verdictMetrics

	outcomeMessages, outcomeLookups prometheus.Counter
}

// What the metrics call purchases on which the script gave no verdict.
const (
	verdictOverloaded  reservation.Verdict = "overloaded"  // too many at once: nothing was reserved
	verdictUnavailable reservation.Verdict = "unavailable" // Redis could not be asked: nothing was reserved
	verdictUnknown     reservation.Verdict = "unknown"     // no answer came back: units may have been taken
	verdictRateLimited reservation.Verdict = "rate-limited"
)

// The values of the label outcome of stampede_purchase_duration_seconds.
const (
	outcomeAccepted = "accepted"
	outcomeRefused  = "refused"
	outcomeFailed   = "failed"
)

// outcomeOf has all verdicts that the metrics know.
var outcomeByVerdict = map[reservation.Verdict]string{
	reservation.Reserved:         outcomeAccepted,
	reservation.Replayed:         outcomeAccepted,
	reservation.OrderEnded:       outcomeRefused,
	reservation.KeyReused:        outcomeRefused,
	reservation.AlreadyPurchased: outcomeRefused,
	reservation.Paused:           outcomeRefused,
	reservation.Ended:            outcomeRefused,
	reservation.NotOpen:          outcomeRefused,
	reservation.OverLimit:        outcomeRefused,
	reservation.SoldOut:          outcomeRefused,
	reservation.UnknownSale:      outcomeRefused,
	verdictRateLimited:           outcomeRefused,
	verdictOverloaded:            outcomeFailed,
	verdictUnavailable:           outcomeFailed,
	verdictUnknown:               outcomeFailed,
}

// bounds are those of a server that its metrics show.
type gaugeSources struct {
	inFlight                           *inFlightSlots
	waiting, orderStreams, saleStreams *slots

	connections    func() *accept.Listener // nil until Run listens
	maxConnections int
}

type verdictMetrics struct {
	count   prometheus.Counter
	seconds prometheus.Observer
}

// routeCounters counts a route's requests by the class of their status: [2] is 2xx.
type routeCounters [6]prometheus.Counter

func newMetrics(registry *prometheus.Registry, r gaugeSources) (*metrics, error) {
	m := &metrics{
		registry: registry,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stampede_http_requests_total", Help: "Requests answered, by route and class of status.",
		}, []string{"route", "status"}),
		verdicts: make(map[reservation.Verdict]verdictMetrics),
	}
	count := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_purchases_total", Help: "Purchases by verdict. On overloaded, unavailable and unknown ones the script gave none; of the unknown ones alone units may have been taken.",
	}, []string{"verdict"})
	seconds := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "stampede_purchase_duration_seconds", Help: "From the head of the request to its answer, for winners, losers and failures apart.",
		Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5},
	}, []string{"outcome"})
	held := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stampede_http_requests_in_flight", Help: "Requests that are being worked on.",
	}, func() float64 { return float64(r.inFlight.taken()) })
	limit := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "stampede_http_requests_in_flight_limit", Help: "Beyond this many requests at once, the answer is overloaded.",
	})
	limit.Set(float64(r.inFlight.limit()))
	waiting := r.waiting.gauge(prometheus.GaugeOpts{
		Name: "stampede_waiting_requests", Help: "Purchases that wait for the end of their order, or are about to.",
	})
	streams := func(of string, r *slots) prometheus.Collector {
		return r.gauge(prometheus.GaugeOpts{
			Name: "stampede_event_streams", Help: "Open streams of events, of orders and of sales.",
			ConstLabels: prometheus.Labels{"of": of},
		})
	}
	connections := func(value func(*accept.Listener) float64) func() float64 {
		return func() float64 {
			if l := r.connections(); l != nil {
				return value(l)
			}
			return 0
		}
	}
	open := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stampede_connections", Help: "Open connections of clients.",
	}, connections(func(l *accept.Listener) float64 { return float64(l.Open()) }))
	openLimit := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "stampede_connections_limit", Help: "Beyond this many connections, idle ones are closed, and new ones wait; 0: unlimited.",
	})
	openLimit.Set(float64(r.maxConnections))
	evicted := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "stampede_idle_connections_closed_total", Help: "Idle connections that were closed to make room for others.",
	}, connections(func(l *accept.Listener) float64 { return float64(l.Evicted()) }))
	m.outcomeMessages = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_outcome_messages_total", Help: "Messages in which workers told what became of orders.",
	})
	m.outcomeLookups = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_outcome_lookups_total", Help: "Looks into Postgres, each for up to a thousand orders that somebody waits for.",
	})

	err := register(registry,
		m.requests, count, seconds, held, limit, waiting, streams("order", r.orderStreams), streams("sale", r.saleStreams),
		m.outcomeMessages, m.outcomeLookups, open, openLimit, evicted,
	)
	if err != nil {
		return nil, err
	}
	for verdict, outcome := range outcomeByVerdict {
		m.verdicts[verdict] = verdictMetrics{count.WithLabelValues(string(verdict)), seconds.WithLabelValues(outcome)}
	}
	return m, nil
}

func register(registry *prometheus.Registry, collectors ...prometheus.Collector) error {
	for _, c := range collectors {
		if err := registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

// purchased counts a purchase whose request began to be served then. A verdict that this code does not know is
// answered as unavailable, and counted so.
func (m *metrics) countPurchase(verdict reservation.Verdict, began time.Time) {
	counted, known := m.verdicts[verdict]
	if !known {
		counted = m.verdicts[verdictUnavailable]
	}
	counted.count.Inc()
	counted.seconds.Observe(time.Since(began).Seconds())
}

// verdictOf is what the metrics call an error of Reservations.Reserve.
func verdictOf(err error) reservation.Verdict {
	switch {
	case errors.Is(err, reservation.ErrOverloaded):
		return verdictOverloaded
	case errors.Is(err, reservation.ErrOutcomeUnknown):
		return verdictUnknown
	}
	return verdictUnavailable
}

func (m *metrics) route(name string) *routeCounters {
	c := new(routeCounters)
	for class := 2; class < len(c); class++ {
		c[class] = m.requests.WithLabelValues(name, fmt.Sprintf("%dxx", class))
	}
	return c
}

func (c *routeCounters) count(status int) {
	if class := status / 100; class >= 2 && class < len(c) {
		c[class].Inc()
	}
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}
