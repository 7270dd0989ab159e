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
type clientLimits struct {
	addresses addresses
	purchases callLimits
	orders    callLimits // to pay, to cancel, and to look at one's orders
	others    callLimits // of everybody and of operators

	// Streams that are open.
	orderStreamsOfUser    keyedSlots[string]
	orderStreamsOfAddress keyedSlots[clientKey]
	saleStreamsOfAddress  keyedSlots[clientKey]

	log          *slog.Logger
	proxyWarning cooldown
}

func newClientLimits(c Config, registry *prometheus.Registry) (*clientLimits, error) {
	limited := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_rate_limited_total", Help: "Requests answered rate-limited, by whose bound it was and by what was called.",
	}, []string{"by", "calls"})
	l := &clientLimits{addresses: addresses{c.TrustedProxies}, log: c.Logger}
	collectors := []prometheus.Collector{limited}
	table := func(of Limit, by, calls string) rateLimit {
		t := rateLimit{refused: limited.WithLabelValues(by, calls)}
		if of.Rate > 0 {
			t.limiter = ratelimit.New(of.Rate, of.Burst)
		}
		collectors = append(collectors, prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "stampede_rate_limit_evictions_total", Help: "Clients whose use was forgotten early, because the table of a rate limit was full.",
			ConstLabels: prometheus.Labels{"by": by, "calls": calls},
		}, t.evicted))
		return t
	}
	l.purchases = callLimits{table(c.UserLimit, "user", "purchases"), table(c.AddressLimit, "address", "purchases")}
	l.orders = callLimits{table(c.UserLimit, "user", "orders"), table(c.AddressLimit, "address", "orders")}
	l.others = callLimits{address: table(c.AddressLimit, "address", "others")}
	l.orderStreamsOfUser = keyedSlots[string]{limit: c.UserStreams, refused: limited.WithLabelValues("user", "order-streams")}
	l.orderStreamsOfAddress = keyedSlots[clientKey]{limit: c.AddressStreams, refused: limited.WithLabelValues("address", "order-streams")}
	l.saleStreamsOfAddress = keyedSlots[clientKey]{limit: c.AddressStreams, refused: limited.WithLabelValues("address", "sale-streams")}
	return l, register(registry, collectors...)
}

// callLimit is for one kind of call.
type callLimits struct{ user, address rateLimit }

type rateLimit struct {
	limiter *ratelimit.Limiter // nil bounds nothing
	refused prometheus.Counter
}

func (t rateLimit) evicted() float64 {
	if t.limiter == nil {
		return 0
	}
	return float64(t.limiter.Evicted())
}

// admitUser is for after a user was authenticated.
func (l *clientLimits) admitUser(of *callLimits, user string, now time.Time) error {
	if of.user.limiter == nil {
		return nil
	}
	if wait, ok := of.user.limiter.Take(user, now); !ok {
		return of.user.refuse(wait)
	}
	return nil
}

// admitAddress is for before that: to verify a token costs more than to count.
func (l *clientLimits) admitAddress(of *callLimits, r *http.Request, now time.Time) error {
	if of.address.limiter == nil {
		return nil
	}
	c := l.addresses.keyOf(r)
	if wait, ok := of.address.limiter.TakeBytes(c[:], now); !ok {
		l.warnOfProxy(r)
		return of.address.refuse(wait)
	}
	return nil
}

func (t rateLimit) refuse(wait time.Duration) *problem {
	t.refused.Inc()
	return rateLimited(wait)
}

func rateLimited(wait time.Duration) *problem {
	p := *problemRateLimited
	p.retryAfter = secondsUntil(time.Time{}.Add(wait), time.Time{})
	return &p
}

// limited lets h work as often as an address may call it.
func (l *clientLimits) limitAddress(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if err := l.admitAddress(&l.others, c.Request(), time.Now()); err != nil {
			return err
		}
		return h(c)
	}
}

// tellOfProxy tells why everybody may share one bound: the address of a proxy that is not known as one.
func (l *clientLimits) warnOfProxy(r *http.Request) {
	if r.Header["X-Forwarded-For"] != nil && l.addresses.of(r) == (addresses{}).of(r) && l.proxyWarning.start(time.Minute) {
		l.log.WarnContext(r.Context(), "an address was refused that forwards requests and is not in STAMPEDE_TRUSTED_PROXIES: if it is a proxy, its clients share one bound",
			"address", l.addresses.of(r).String())
	}
}

// holders bounds how many places each of them has at once. It has an entry for each that has one, so the bound of all
// places together bounds it as well.
type keyedSlots[K comparable] struct {
	limit   int // 0: as many as there are
	refused prometheus.Counter

	mu    sync.Mutex
	taken map[K]int
}

// enter takes a place, which leave gives back. It is false if the holder has as many as one may have.
func (h *keyedSlots[K]) acquire(holder K) bool {
	if h.limit == 0 {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.taken[holder] >= h.limit {
		h.refused.Inc()
		return false
	}
	if h.taken == nil {
		h.taken = make(map[K]int)
	}
	h.taken[holder]++
	return true
}

func (h *keyedSlots[K]) release(holder K) {
	if h.limit == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.taken[holder]--; h.taken[holder] == 0 {
		delete(h.taken, holder)
	}
}

var problemTooManyStreams = fixed(problem{
	kind: kindRateLimited, retryAfter: retryPaused,
	detail: "This user or this address has as many streams of events open as it may have at once. Close one, or ask again from time to time instead.",
})

// enterSaleStream takes a place among the streams of sales, which leave gives back.
func (s *Server) enterSaleStream(r *http.Request) (leave func(), err error) {
	l := s.limits
	from := l.addresses.keyOf(r)
	if !l.saleStreamsOfAddress.acquire(from) {
		l.warnOfProxy(r)
		return nil, problemTooManyStreams
	}
	if !s.saleStreamSlots.acquire() {
		l.saleStreamsOfAddress.release(from)
		return nil, problemOverloaded
	}
	return func() {
		s.saleStreamSlots.release()
		l.saleStreamsOfAddress.release(from)
	}, nil
}

// enterOrderStream takes a place among the streams of orders, which leave gives back.
func (s *Server) enterOrderStream(r *http.Request, user string) (leave func(), err error) {
	l := s.limits
	from := l.addresses.keyOf(r)
	if !l.orderStreamsOfUser.acquire(user) {
		return nil, problemTooManyStreams
	}
	if !l.orderStreamsOfAddress.acquire(from) {
		l.warnOfProxy(r)
		l.orderStreamsOfUser.release(user)
		return nil, problemTooManyStreams
	}
	if !s.orderStreamSlots.acquire() {
		l.orderStreamsOfAddress.release(from)
		l.orderStreamsOfUser.release(user)
		return nil, problemOverloaded
	}
	return func() {
		s.orderStreamSlots.release()
		l.orderStreamsOfAddress.release(from)
		l.orderStreamsOfUser.release(user)
	}, nil
}
