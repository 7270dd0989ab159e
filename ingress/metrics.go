package ingress

import (
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"stampede/reservation"
)

// metrics holds every counter with its labels resolved, so that a request looks none up.
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	verdicts map[reservation.Verdict]verdictMetrics
	// failed counts the purchases that came to no verdict.
	failed verdictMetrics

	outcomesHeard, outcomeLookups prometheus.Counter
}

// rooms are those of a server that its metrics show.
type rooms struct{ inFlight, waiting, orderStreams, saleStreams *room }

type verdictMetrics struct {
	count   prometheus.Counter
	seconds prometheus.Observer
}

// routeCounters counts a route's requests by the class of their status: [2] is 2xx.
type routeCounters [6]prometheus.Counter

func newMetrics(registry *prometheus.Registry, r rooms) (*metrics, error) {
	m := &metrics{
		registry: registry,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stampede_http_requests_total", Help: "Requests answered, by route and class of status.",
		}, []string{"route", "status"}),
		verdicts: make(map[reservation.Verdict]verdictMetrics),
	}
	count := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_purchases_total", Help: `Purchases by verdict; "failed" came to none.`,
	}, []string{"verdict"})
	seconds := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "stampede_purchase_duration_seconds", Help: "From the head of the request to its answer, for winners, losers and failures apart.",
		Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5},
	}, []string{"outcome"})
	held := r.inFlight.gauge(prometheus.GaugeOpts{
		Name: "stampede_http_requests_in_flight", Help: "Requests that are being worked on.",
	})
	limit := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "stampede_http_requests_in_flight_limit", Help: "Beyond this many requests at once, the answer is overloaded.",
	})
	limit.Set(float64(r.inFlight.limit))
	waiting := r.waiting.gauge(prometheus.GaugeOpts{
		Name: "stampede_waiting_requests", Help: "Purchases that wait for the end of their order, or are about to.",
	})
	streams := func(of string, r *room) prometheus.Collector {
		return r.gauge(prometheus.GaugeOpts{
			Name: "stampede_event_streams", Help: "Open streams of events, of orders and of sales.",
			ConstLabels: prometheus.Labels{"of": of},
		})
	}
	m.outcomesHeard = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_outcome_messages_total", Help: "Messages in which workers told what became of orders.",
	})
	m.outcomeLookups = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_outcome_lookups_total", Help: "Looks into Postgres, each for up to a thousand orders that somebody waits for.",
	})

	for _, c := range []prometheus.Collector{
		m.requests, count, seconds, held, limit, waiting, streams("order", r.orderStreams), streams("sale", r.saleStreams),
		m.outcomesHeard, m.outcomeLookups,
	} {
		if err := registry.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	for _, v := range []reservation.Verdict{
		reservation.Reserved, reservation.Replayed, reservation.KeyReused, reservation.AlreadyPurchased, reservation.Paused,
		reservation.Ended, reservation.NotOpen, reservation.OverLimit, reservation.SoldOut, reservation.UnknownSale,
	} {
		outcome := "refused"
		if v == reservation.Reserved || v == reservation.Replayed {
			outcome = "accepted"
		}
		m.verdicts[v] = verdictMetrics{count.WithLabelValues(string(v)), seconds.WithLabelValues(outcome)}
	}
	m.failed = verdictMetrics{count.WithLabelValues("failed"), seconds.WithLabelValues("failed")}
	return m, nil
}

// verdict finds where to count a purchase; a verdict that this code does not know is a failure.
func (m *metrics) verdict(v reservation.Verdict) verdictMetrics {
	if known, ok := m.verdicts[v]; ok {
		return known
	}
	return m.failed
}

func (r *room) gauge(o prometheus.GaugeOpts) prometheus.GaugeFunc {
	return prometheus.NewGaugeFunc(o, func() float64 { return float64(r.taken.Load()) })
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
