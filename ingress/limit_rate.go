package ingress

import (
	"log/slog"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/forwarded"
	"stampede/internal/ratelimit"
)

// Limit bounds how often each user or each address may call this server: a burst of Burst calls, and Rate from
// then on. The zero Limit is unlimited.
type Limit struct {
	Rate  ratelimit.Rate
	Burst int
}

var problemRateLimited = fixed(problem{
	kind: kindRateLimited, detail: "Nothing was done. Retry after the seconds in Retry-After.",
})

// clientLimits bounds each client. Each kind of call has buckets of its own, so that a buyer who purchases too
// often can still pay.
type clientLimits struct {
	proxies   forwarded.Proxies
	purchases callLimits
	orders    callLimits // paying, cancelling, and looking at orders
	others    callLimits // everything else

	// Open streams.
	orderStreamsOfUser    keyedSlots[string]
	orderStreamsOfAddress keyedSlots[forwarded.Key]
	saleStreamsOfAddress  keyedSlots[forwarded.Key]

	log          *slog.Logger
	proxyWarning cooldown
}

func newClientLimits(c Config, registry *prometheus.Registry) (*clientLimits, error) {
	refused := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_rate_limited_total",
		Help: "Requests answered rate-limited, by the kind of limit (user or address) and of call.",
	}, []string{"by", "calls"})
	l := &clientLimits{proxies: c.TrustedProxies, log: c.Logger}
	collectors := []prometheus.Collector{refused}
	newRateLimit := func(limit Limit, by, calls string) rateLimit {
		made := rateLimit{refused: refused.WithLabelValues(by, calls)}
		if limit.Rate > 0 {
			made.limiter = ratelimit.New(limit.Rate, limit.Burst)
		}
		collectors = append(collectors, prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name:        "stampede_rate_limit_evictions_total",
			Help:        "Clients whose calls were forgotten early, because the table of a rate limit was full.",
			ConstLabels: prometheus.Labels{"by": by, "calls": calls},
		}, made.evicted))
		return made
	}
	l.purchases = callLimits{
		user: newRateLimit(c.UserLimit, "user", "purchases"), address: newRateLimit(c.AddressLimit, "address", "purchases"),
	}
	l.orders = callLimits{
		user: newRateLimit(c.UserLimit, "user", "orders"), address: newRateLimit(c.AddressLimit, "address", "orders"),
	}
	l.others = callLimits{address: newRateLimit(c.AddressLimit, "address", "others")}
	l.orderStreamsOfUser = keyedSlots[string]{
		limit: c.UserStreams, refused: refused.WithLabelValues("user", "order-streams"),
	}
	l.orderStreamsOfAddress = keyedSlots[forwarded.Key]{
		limit: c.AddressStreams, refused: refused.WithLabelValues("address", "order-streams"),
	}
	l.saleStreamsOfAddress = keyedSlots[forwarded.Key]{
		limit: c.AddressStreams, refused: refused.WithLabelValues("address", "sale-streams"),
	}
	return l, register(registry, collectors...)
}

// callLimits are the limits of one kind of call.
type callLimits struct{ user, address rateLimit }

// rateLimit bounds each user, or each address.
type rateLimit struct {
	limiter *ratelimit.Limiter // nil is unlimited
	refused prometheus.Counter
}

func (l rateLimit) evicted() float64 {
	if l.limiter == nil {
		return 0
	}
	return float64(l.limiter.Evicted())
}

func (l rateLimit) refuse(wait time.Duration) *problem {
	l.refused.Inc()
	p := *problemRateLimited
	p.retryAfter = secondsUntil(time.Time{}.Add(wait), time.Time{})
	return &p
}

// limitAddress wraps a handler of other calls than purchases and calls on orders.
func (l *clientLimits) limitAddress(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if err := l.admitAddress(&l.others, c.Request(), time.Now()); err != nil {
			return err
		}
		return h(c)
	}
}

// admitAddress comes before authentication: counting costs less than verifying a token.
func (l *clientLimits) admitAddress(calls *callLimits, r *http.Request, now time.Time) error {
	if calls.address.limiter == nil {
		return nil
	}
	key := l.proxies.Key(r)
	if wait, ok := calls.address.limiter.TakeBytes(key[:], now); !ok {
		l.warnOfProxy(r)
		return calls.address.refuse(wait)
	}
	return nil
}

// admitUser comes after authentication.
func (l *clientLimits) admitUser(calls *callLimits, user string, now time.Time) error {
	if calls.user.limiter == nil {
		return nil
	}
	if wait, ok := calls.user.limiter.Take(user, now); !ok {
		return calls.user.refuse(wait)
	}
	return nil
}

// warnOfProxy logs that a refused address forwards requests and is not trusted: it may be a proxy, by whose
// address all clients are limited together.
func (l *clientLimits) warnOfProxy(r *http.Request) {
	if r.Header["X-Forwarded-For"] != nil && l.proxies.Client(r) == forwarded.Proxies(nil).Client(r) &&
		l.proxyWarning.start(time.Minute) {
		l.log.WarnContext(r.Context(), "rate-limited an address that forwards requests and is not in "+
			"STAMPEDE_TRUSTED_PROXIES: if it is a proxy, all its clients share one limit",
			"address", l.proxies.Client(r).String())
	}
}
