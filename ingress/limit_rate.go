package ingress

import (
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/ratelimit"
)

// Limit bounds how often each user, or each address, may call this server: Burst times at once, and Rate from then on.
// The zero Limit bounds nothing.
type Limit struct {
	Rate  ratelimit.Rate
	Burst int
}

var problemRateLimited = fixed(problem{kind: kindRateLimited, detail: "Nothing was done about this request. Try again after as many seconds as Retry-After says."})

// limits bound what each client does. Each kind of call has buckets of its own: a buyer who clicks too often can still pay.
type limits struct {
	addresses addresses
	purchases callLimit
	orders    callLimit // to pay, to cancel, and to look at one's orders
	others    callLimit // of everybody and of operators

	// Streams that are open.
	orderStreamsOfUser    holders[string]
	orderStreamsOfAddress holders[client]
	saleStreamsOfAddress  holders[client]

	log   *slog.Logger
	quiet cooldown
}

func newLimits(c Config, registry *prometheus.Registry) (*limits, error) {
	limited := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_rate_limited_total", Help: "Requests answered rate-limited, by whose bound it was and by what was called.",
	}, []string{"by", "calls"})
	l := &limits{addresses: addresses{c.TrustedProxies}, log: c.Logger}
	collectors := []prometheus.Collector{limited}
	table := func(of Limit, by, calls string) tableLimit {
		t := tableLimit{limited: limited.WithLabelValues(by, calls)}
		if of.Rate > 0 {
			t.limiter = ratelimit.New(of.Rate, of.Burst)
		}
		collectors = append(collectors, prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "stampede_rate_limit_evictions_total", Help: "Clients whose use was forgotten early, because the table of a rate limit was full.",
			ConstLabels: prometheus.Labels{"by": by, "calls": calls},
		}, t.evicted))
		return t
	}
	l.purchases = callLimit{table(c.UserLimit, "user", "purchases"), table(c.AddressLimit, "address", "purchases")}
	l.orders = callLimit{table(c.UserLimit, "user", "orders"), table(c.AddressLimit, "address", "orders")}
	l.others = callLimit{address: table(c.AddressLimit, "address", "others")}
	l.orderStreamsOfUser = holders[string]{most: c.UserStreams, limited: limited.WithLabelValues("user", "order-streams")}
	l.orderStreamsOfAddress = holders[client]{most: c.AddressStreams, limited: limited.WithLabelValues("address", "order-streams")}
	l.saleStreamsOfAddress = holders[client]{most: c.AddressStreams, limited: limited.WithLabelValues("address", "sale-streams")}
	return l, register(registry, collectors...)
}

// callLimit is for one kind of call.
type callLimit struct{ user, address tableLimit }

type tableLimit struct {
	limiter *ratelimit.Limiter // nil bounds nothing
	limited prometheus.Counter
}

func (t tableLimit) evicted() float64 {
	if t.limiter == nil {
		return 0
	}
	return float64(t.limiter.Evicted())
}

// admitUser is for after a user was authenticated.
func (l *limits) admitUser(of *callLimit, user string, now time.Time) error {
	if of.user.limiter == nil {
		return nil
	}
	if wait, ok := of.user.limiter.Take(user, now); !ok {
		return of.user.refuse(wait)
	}
	return nil
}

// admitAddress is for before that: to verify a token costs more than to count.
func (l *limits) admitAddress(of *callLimit, r *http.Request, now time.Time) error {
	if of.address.limiter == nil {
		return nil
	}
	c := l.addresses.client(r)
	if wait, ok := of.address.limiter.TakeBytes(c[:], now); !ok {
		l.tellOfProxy(r)
		return of.address.refuse(wait)
	}
	return nil
}

func (t tableLimit) refuse(wait time.Duration) *problem {
	t.limited.Inc()
	return rateLimited(wait)
}

func rateLimited(wait time.Duration) *problem {
	p := *problemRateLimited
	p.retryAfter = secondsUntil(time.Time{}.Add(wait), time.Time{})
	return &p
}

// limited lets h work as often as an address may call it.
func (l *limits) limited(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if err := l.admitAddress(&l.others, c.Request(), time.Now()); err != nil {
			return err
		}
		return h(c)
	}
}

// tellOfProxy tells why everybody may share one bound: the address of a proxy that is not known as one.
func (l *limits) tellOfProxy(r *http.Request) {
	if r.Header["X-Forwarded-For"] != nil && l.addresses.of(r) == (addresses{}).of(r) && l.quiet.begin(time.Minute) {
		l.log.WarnContext(r.Context(), "an address was refused that forwards requests and is not in STAMPEDE_TRUSTED_PROXIES: if it is a proxy, its clients share one bound",
			"address", l.addresses.of(r).String())
	}
}

// holders bounds how many places each of them has at once. It has an entry for each that has one, so the bound of all
// places together bounds it as well.
type holders[K comparable] struct {
	most    int // 0: as many as there are
	limited prometheus.Counter

	mu   sync.Mutex
	held map[K]int
}

// enter takes a place, which leave gives back. It is false if the holder has as many as one may have.
func (h *holders[K]) enter(holder K) bool {
	if h.most == 0 {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held[holder] >= h.most {
		h.limited.Inc()
		return false
	}
	if h.held == nil {
		h.held = make(map[K]int)
	}
	h.held[holder]++
	return true
}

func (h *holders[K]) leave(holder K) {
	if h.most == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held[holder]--; h.held[holder] == 0 {
		delete(h.held, holder)
	}
}

var problemTooManyStreams = fixed(problem{
	kind: kindRateLimited, retryAfter: retryPaused,
	detail: "This user or this address has as many streams of events open as it may have at once. Close one, or ask again from time to time instead.",
})

// enterSaleStream takes a place among the streams of sales, which leave gives back.
func (s *Server) enterSaleStream(r *http.Request) (leave func(), err error) {
	l := s.limits
	from := l.addresses.client(r)
	if !l.saleStreamsOfAddress.enter(from) {
		l.tellOfProxy(r)
		return nil, problemTooManyStreams
	}
	if !s.saleStreams.enter() {
		l.saleStreamsOfAddress.leave(from)
		return nil, problemOverloaded
	}
	return func() {
		s.saleStreams.leave()
		l.saleStreamsOfAddress.leave(from)
	}, nil
}

// enterOrderStream takes a place among the streams of orders, which leave gives back.
func (s *Server) enterOrderStream(r *http.Request, user string) (leave func(), err error) {
	l := s.limits
	from := l.addresses.client(r)
	if !l.orderStreamsOfUser.enter(user) {
		return nil, problemTooManyStreams
	}
	if !l.orderStreamsOfAddress.enter(from) {
		l.tellOfProxy(r)
		l.orderStreamsOfUser.leave(user)
		return nil, problemTooManyStreams
	}
	if !s.orderStreams.enter() {
		l.orderStreamsOfAddress.leave(from)
		l.orderStreamsOfUser.leave(user)
		return nil, problemOverloaded
	}
	return func() {
		s.orderStreams.leave()
		l.orderStreamsOfAddress.leave(from)
		l.orderStreamsOfUser.leave(user)
	}, nil
}
