package ingress

import (
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
)

// inFlightSlots splits the slots of Config.MaxInFlight, so that buyers can pay and operators can pause a sale
// however many purchases and anonymous requests there are.
type inFlightSlots struct {
	purchases slots
	orders    slots // buyers who pay, cancel, and look at their orders
	sales     slots // requests for sales
	operators slots
	desk      slots // operators who look at orders
}

// newInFlightSlots gives most slots to purchases, and at least one to each kind, even if that is more than limit.
func newInFlightSlots(limit int) inFlightSlots {
	part := func(n int) slots { return slots{limit: int64(max(1, n))} }
	eighth, sixteenth, desk := limit/8, limit/16, limit/64
	return inFlightSlots{
		purchases: part(limit - 2*eighth - sixteenth - desk),
		orders:    part(eighth), sales: part(eighth), operators: part(sixteenth), desk: part(desk),
	}
}

func (s *inFlightSlots) all() [5]*slots {
	return [...]*slots{&s.purchases, &s.orders, &s.sales, &s.operators, &s.desk}
}

func (s *inFlightSlots) limit() (n int64) {
	for _, part := range s.all() {
		n += part.limit
	}
	return n
}

// taken is the number of requests in flight.
func (s *inFlightSlots) taken() (n int64) {
	for _, part := range s.all() {
		n += part.taken.Load()
	}
	return n
}

// slots is a semaphore that never blocks. Invariant: 0 <= taken <= limit, except for the instants in which
// acquire fails.
type slots struct {
	limit int64
	taken atomic.Int64
}

// admit wraps a handler to run in a slot.
func (s *slots) admit(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if !s.acquire() {
			return problemOverloaded
		}
		defer s.release()
		return h(c)
	}
}

// acquire takes a slot, which release returns. It is false if none is free.
func (s *slots) acquire() bool {
	if s.taken.Add(1) > s.limit {
		s.release()
		return false
	}
	return true
}

func (s *slots) release() { s.taken.Add(-1) }

func (s *slots) gauge(o prometheus.GaugeOpts) prometheus.GaugeFunc {
	return prometheus.NewGaugeFunc(o, func() float64 { return float64(s.taken.Load()) })
}

// keyedSlots bounds the slots of each key. It has an entry for each key with a slot, so the bound of all slots
// together bounds it as well.
type keyedSlots[K comparable] struct {
	limit   int // 0 is unlimited
	refused prometheus.Counter

	mu    sync.Mutex
	taken map[K]int
}

// acquire takes a slot, which release returns. It is false if the key has all that it may have.
func (s *keyedSlots[K]) acquire(key K) bool {
	if s.limit == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[key] >= s.limit {
		s.refused.Inc()
		return false
	}
	if s.taken == nil {
		s.taken = make(map[K]int)
	}
	s.taken[key]++
	return true
}

func (s *keyedSlots[K]) release(key K) {
	if s.limit == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[key]--; s.taken[key] == 0 {
		delete(s.taken, key)
	}
}

var problemTooManyStreams = fixed(problem{
	kind: kindRateLimited, retryAfter: retryPaused,
	detail: "This user or address has too many event streams open. Close one, or poll instead.",
})

// acquireOrderStream takes a slot for a stream of an order.
func (s *Server) acquireOrderStream(r *http.Request, user string) (release func(), err error) {
	l := s.limits
	address := l.proxies.Key(r)
	if !l.orderStreamsOfUser.acquire(user) {
		return nil, problemTooManyStreams
	}
	if !l.orderStreamsOfAddress.acquire(address) {
		l.warnOfProxy(r)
		l.orderStreamsOfUser.release(user)
		return nil, problemTooManyStreams
	}
	if !s.orderStreamSlots.acquire() {
		l.orderStreamsOfAddress.release(address)
		l.orderStreamsOfUser.release(user)
		return nil, problemOverloaded
	}
	return func() {
		s.orderStreamSlots.release()
		l.orderStreamsOfAddress.release(address)
		l.orderStreamsOfUser.release(user)
	}, nil
}

// acquireSaleStream takes a slot for a stream of a sale.
func (s *Server) acquireSaleStream(r *http.Request) (release func(), err error) {
	l := s.limits
	address := l.proxies.Key(r)
	if !l.saleStreamsOfAddress.acquire(address) {
		l.warnOfProxy(r)
		return nil, problemTooManyStreams
	}
	if !s.saleStreamSlots.acquire() {
		l.saleStreamsOfAddress.release(address)
		return nil, problemOverloaded
	}
	return func() {
		s.saleStreamSlots.release()
		l.saleStreamsOfAddress.release(address)
	}, nil
}
