package ingress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/singleflight"

	"stampede/internal/accept"
	"stampede/internal/pg"
	"stampede/internal/telemetry"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/order"
)

// Verdicts of purchases that the script did not decide.
const (
	verdictOverloaded  reservation.Verdict = "overloaded"  // too many at once: nothing was reserved
	verdictUnavailable reservation.Verdict = "unavailable" // Redis was not asked: nothing was reserved
	verdictUnknown     reservation.Verdict = "unknown"     // no answer came back: units may be reserved
	verdictRateLimited reservation.Verdict = "rate-limited"
	verdictInvalid     reservation.Verdict = "invalid" // a quantity for a sale with items, or items for one without
)

// The values of the label outcome of stampede_purchase_duration_seconds.
const (
	outcomeAccepted = "accepted"
	outcomeRefused  = "refused"
	outcomeFailed   = "failed"
)

// outcomeByVerdict has all verdicts that the metrics know.
var outcomeByVerdict = map[reservation.Verdict]string{
	reservation.Reserved:         outcomeAccepted,
	reservation.Replayed:         outcomeAccepted,
	reservation.OrderEnded:       outcomeRefused,
	reservation.KeyReused:        outcomeRefused,
	reservation.AlreadyPurchased: outcomeRefused,
	reservation.Paused:           outcomeRefused,
	reservation.OffersOnly:       outcomeRefused,
	reservation.Ended:            outcomeRefused,
	reservation.Retired:          outcomeRefused,
	reservation.NotOpen:          outcomeRefused,
	reservation.OverLimit:        outcomeRefused,
	reservation.SoldOut:          outcomeRefused,
	reservation.UnknownSale:      outcomeRefused,
	reservation.UnknownItem:      outcomeRefused,
	verdictInvalid:               outcomeRefused,
	verdictRateLimited:           outcomeRefused,
	verdictOverloaded:            outcomeFailed,
	verdictUnavailable:           outcomeFailed,
	verdictUnknown:               outcomeFailed,
}

// metrics holds every counter with its labels resolved, so that requests need no lookup.
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	verdicts map[reservation.Verdict]verdictMetrics

	sales *saleMetrics
	wait  prometheus.Histogram
	// receiptSecret gets its label when the secret was read.
	receiptSecret *prometheus.GaugeVec

	plainPurchases, outcomeMessages, outcomeLookups prometheus.Counter

	stripe  map[stripeOutcome]prometheus.Counter
	reports map[reportKey]prometheus.Counter
}

type verdictMetrics struct {
	count   prometheus.Counter
	seconds prometheus.Observer
	sale    saleOutcome
}

// gaugeSources are the parts of a server that gauges read.
type gaugeSources struct {
	inFlight                           *inFlightSlots
	waiting, orderStreams, saleStreams *slots

	connections    func() *accept.Listener // nil until Run listens
	maxConnections int
}

// purchaseBuckets are the buckets for the times of a purchase.
var purchaseBuckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5}

func newMetrics(registry *prometheus.Registry, from gaugeSources) (*metrics, error) {
	m := &metrics{
		registry: registry,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stampede_http_requests_total", Help: "Requests answered, by route and class of status.",
		}, []string{"route", "status"}),
		seconds: prometheus.NewHistogramVec(telemetry.Native(prometheus.HistogramOpts{
			Name: "stampede_http_request_duration_seconds",
			Help: "Time from the head of a request to that of its answer, by class of calls and outcome: ok, refused (4xx) or " +
				"failed (5xx). Purchases have stampede_purchase_duration_seconds.",
			Buckets: purchaseBuckets,
		}), []string{"class", "outcome"}),
		verdicts: make(map[reservation.Verdict]verdictMetrics),
		sales:    newSaleMetrics(),
		stripe:   make(map[stripeOutcome]prometheus.Counter),
		reports:  make(map[reportKey]prometheus.Counter),
		wait: prometheus.NewHistogram(telemetry.Native(prometheus.HistogramOpts{
			Name: "stampede_purchase_wait_seconds",
			Help: "Time from the arrival of the last bytes of a purchase at this machine until it is read: in the kernel, " +
				"until its connection is accepted, and until a processor is free. Only on Linux.",
			Buckets: purchaseBuckets,
		})),
		receiptSecret: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stampede_receipt_secret_info",
			Help: "A fingerprint of the secret for receipts. It must be the same in each ingress.",
		}, []string{"fingerprint"}),
		plainPurchases: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stampede_plain_purchases_total", Help: "Purchases that were read in front of net/http.",
		}),
		outcomeMessages: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stampede_outcome_messages_total", Help: "Messages in which workers announced changes of orders.",
		}),
		outcomeLookups: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stampede_outcome_lookups_total",
			Help: "Queries of Postgres for orders that requests wait for, each for at most 1000 orders.",
		}),
	}
	byVerdict := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_purchases_total",
		Help: "Purchases by verdict. The script did not decide overloaded, unavailable, unknown and rate-limited ones, " +
			"nor invalid and unknown-item, which are of sales with items; of these, only unknown ones may have reserved units.",
	}, []string{"verdict"})
	seconds := prometheus.NewHistogramVec(telemetry.Native(prometheus.HistogramOpts{
		Name: "stampede_purchase_duration_seconds",
		Help: "Time from the head of a purchase, once it is read, to its answer, by outcome: accepted, refused or failed. " +
			"stampede_purchase_wait_seconds comes before it.",
		Buckets: purchaseBuckets,
	}), []string{"outcome"})
	stripe := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_stripe_messages_total",
		Help: "Messages at Stripe's endpoint by outcome: kept, refused without a signature that fits, overloaded if others " +
			"were read in its place, or why a signed one was ignored: no-event, thin-event, other-type, test-mode, unpaid, " +
			"free, no-order, no-refund, unknown-payment or archived.",
	}, []string{"outcome"})
	taken := []stripeOutcome{stripeKept, stripeRefused, stripeOverloaded}
	for _, outcome := range slices.AppendSeq(taken, maps.Keys(stripeIgnored)) {
		m.stripe[outcome] = stripe.WithLabelValues(string(outcome))
	}
	collectors := append(from.collectors(),
		m.requests, m.seconds, m.plainPurchases, m.outcomeMessages, m.outcomeLookups, byVerdict, seconds, m.wait,
		m.receiptSecret, m.sales.purchases, stripe, m.newReports())
	if err := register(registry, collectors...); err != nil {
		return nil, err
	}
	for verdict, outcome := range outcomeByVerdict {
		m.verdicts[verdict] = verdictMetrics{
			byVerdict.WithLabelValues(string(verdict)), seconds.WithLabelValues(outcome), saleOutcomeFor(verdict, outcome),
		}
	}
	return m, nil
}

func (s gaugeSources) collectors() []prometheus.Collector {
	inFlightLimit := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "stampede_http_requests_in_flight_limit", Help: "Requests in flight beyond which the answer is overloaded.",
	})
	inFlightLimit.Set(float64(s.inFlight.limit()))
	connectionsLimit := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "stampede_connections_limit",
		Help: "Connections beyond which idle ones are closed and new ones wait; 0 is unlimited.",
	})
	connectionsLimit.Set(float64(s.maxConnections))
	streams := func(kind string, taken *slots) prometheus.Collector {
		return taken.gauge(prometheus.GaugeOpts{
			Name: "stampede_event_streams", Help: "Open event streams, of orders and of sales.",
			ConstLabels: prometheus.Labels{"of": kind},
		})
	}
	listening := func(value func(*accept.Listener) float64) func() float64 {
		return func() float64 {
			if l := s.connections(); l != nil {
				return value(l)
			}
			return 0
		}
	}
	return []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "stampede_http_requests_in_flight", Help: "Requests in flight.",
		}, func() float64 { return float64(s.inFlight.taken()) }),
		inFlightLimit,
		s.waiting.gauge(prometheus.GaugeOpts{
			Name: "stampede_waiting_requests", Help: "Purchases that wait for their order, or are about to.",
		}),
		streams("order", s.orderStreams), streams("sale", s.saleStreams),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "stampede_connections", Help: "Open connections of clients.",
		}, listening(func(l *accept.Listener) float64 { return float64(l.Open()) })),
		connectionsLimit,
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "stampede_idle_connections_closed_total", Help: "Idle connections that were closed to make room for others.",
		}, listening(func(l *accept.Listener) float64 { return float64(l.Evicted()) })),
	}
}

func register(registry *prometheus.Registry, collectors ...prometheus.Collector) error {
	for _, c := range collectors {
		if err := registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	return nil
}

// routeCounters counts a route's requests by the class of their status: [2] is 2xx.
type routeCounters [6]prometheus.Counter

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

// routeSeconds observes the requests of a class by the class of their status, as routeCounters counts them.
type routeSeconds [6]prometheus.Observer

func (m *metrics) durations(of class) *routeSeconds {
	by := func(outcome string) prometheus.Observer { return m.seconds.WithLabelValues(string(of), outcome) }
	return &routeSeconds{2: by("ok"), 3: by("ok"), 4: by(outcomeRefused), 5: by(outcomeFailed)}
}

// observeHead observes how long the answer's head took. An event stream goes on after it.
func (s *routeSeconds) observeHead(c echo.Context) {
	began, res := time.Now(), c.Response()
	res.Before(func() {
		if class := res.Status / 100; class >= 2 && class < len(s) {
			s[class].Observe(time.Since(began).Seconds())
		}
	})
}

// saleOutcomeFor is what the metrics of a sale call the outcome of a verdict.
func saleOutcomeFor(verdict reservation.Verdict, outcome string) saleOutcome {
	switch {
	case verdict == verdictOverloaded || verdict == verdictRateLimited:
		return saleShed
	case outcome == outcomeAccepted:
		return saleAccepted
	case outcome == outcomeRefused:
		return saleRefused
	}
	return saleFailed
}

// countPurchase counts a purchase and its duration. An unknown verdict is answered, and counted, as unavailable.
func (m *metrics) countPurchase(sale uuid.UUID, verdict reservation.Verdict, began time.Time) {
	counted, known := m.verdicts[verdict]
	if !known {
		counted = m.verdicts[verdictUnavailable]
	}
	counted.count.Inc()
	counted.seconds.Observe(time.Since(began).Seconds())
	decided := counted.sale == saleAccepted || counted.sale == saleRefused && verdict != reservation.UnknownSale
	m.sales.count(sale, counted.sale, decided)
}

// verdictFor is the verdict for an error of Reservations.Reserve.
func verdictFor(err error) reservation.Verdict {
	var input *order.InvalidError
	switch {
	case errors.As(err, &input):
		return verdictInvalid
	case errors.Is(err, reservation.ErrOverloaded):
		return verdictOverloaded
	case errors.Is(err, reservation.ErrOutcomeUnknown):
		return verdictUnknown
	}
	return verdictUnavailable
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// ObserveScripts registers the metrics of the calls of scripts, for the Store of an ingress.
func ObserveScripts(reg *prometheus.Registry) (reservation.Observer, error) {
	seconds := prometheus.NewHistogramVec(telemetry.Native(prometheus.HistogramOpts{
		Name:    "stampede_script_duration_seconds",
		Help:    "Round trip of one try to call a script in Redis, tries without an answer included.",
		Buckets: []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 3},
	}), []string{"script"})
	orders := prometheus.NewHistogram(telemetry.Native(prometheus.HistogramOpts{
		Name:    "stampede_script_batch_orders",
		Help:    "Purchases that one call of the script reserve decides.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 9),
	}))
	if err := register(reg, seconds, orders); err != nil {
		return reservation.Observer{}, err
	}
	reserve := seconds.WithLabelValues("reserve")
	return reservation.Observer{Reserve: func(requests int, took time.Duration) {
		reserve.Observe(took.Seconds())
		orders.Observe(float64(requests))
	}}, nil
}

// pingTimeout bounds a ping. It is below the few seconds after which health checks time out.
const pingTimeout = 500 * time.Millisecond

// health answers the probes of those who operate the server.
type health struct {
	*core
	pings singleflight.Group
}

// serverStates are the states of both servers, as /readyz shows them: up, down or read-only.
type serverStates struct {
	Status   string `json:"status"`
	Redis    string `json:"redis"`
	Postgres string `json:"postgres"`
}

// live serves GET /livez: the process runs.
func (s *health) live(c echo.Context) error {
	return writeJSON(c, http.StatusOK, struct {
		Status string `json:"status"`
	}{"alive"})
}

// ready serves GET /readyz: the server takes requests, Redis takes the writes of a purchase, the secret for receipts
// was read, and a key for the tokens of buyers is known. Postgres is reported, but not required: a sale goes on without
// it. Neither is the provider of the keys, once they are known.
func (s *health) ready(c echo.Context) error {
	states, err := s.readiness()
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, states)
}

// readiness returns the states of both servers, and a problem if this one takes no requests. It asks none if this one
// is stopping.
func (s *health) readiness() (serverStates, error) {
	if s.stopping.Load() {
		return serverStates{}, &problem{Kind: problems.NotReady, detail: "This server is stopping.", retryAfter: retrySoon}
	}
	states := serverStates{Status: "ready"}
	var pinging sync.WaitGroup
	pinging.Go(func() { states.Postgres, _ = s.ping("postgres", s.config.Postgres.Ping) })
	redisState, err := s.ping("redis", s.config.Reservations.Writable)
	pinging.Wait()
	states.Redis = redisState
	detail := ""
	switch code := reservation.RefusalCode(err); {
	case err == nil && s.receipts.signer.Load() != nil && s.hasKeys():
		return states, nil
	case err == nil && !s.hasKeys():
		detail = "No key for the tokens of buyers is known: STAMPEDE_JWKS_URL does not answer, or with no usable key."
	case err == nil:
		detail = "The secret for receipts was not read from Postgres yet, and STAMPEDE_RECEIPT_SECRET is not set."
	case code != "":
		detail = "Redis refuses writes: " + code + "."
	default:
		detail = "Redis does not answer."
	}
	return states, &problem{
		Kind: problems.NotReady, retryAfter: retrySoon, redis: states.Redis, postgres: states.Postgres, detail: detail,
	}
}

// hasKeys is false if no token of a buyer can be verified.
func (s *health) hasKeys() bool { return s.keys == nil || s.keys.Known() != nil }

// look is readiness for the metrics.
func (s *health) look(context.Context) (notReady string, dependencies map[string]bool) {
	states, err := s.readiness()
	var why *problem
	if errors.As(err, &why) {
		notReady = strings.TrimSuffix(why.detail, ".")
	}
	if states.Redis == "" { // nothing was asked, because the server is stopping
		return notReady, nil
	}
	return notReady, map[string]bool{
		"redis": states.Redis == "up", "postgres": states.Postgres == "up", "receipt-secret": s.receipts.signer.Load() != nil,
	}
}

// ping asks a server once for all concurrent calls, because the route needs no authentication.
func (s *health) ping(name string, ask func(context.Context) error) (state string, err error) {
	_, err, _ = s.pings.Do(name, func() (any, error) {
		ctx, cancel := context.WithTimeout(s.background.ctx, pingTimeout)
		defer cancel()
		return nil, ask(ctx)
	})
	switch {
	case errors.Is(err, pg.ErrReadOnly):
		return "read-only", err
	case err != nil:
		return "down", err
	}
	return "up", nil
}
