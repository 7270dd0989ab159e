package ingress

import (
	"sync/atomic"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
)

// shares are the places of Config.MaxInFlight, in parts that take nothing from each other: however many purchases or
// anonymous requests there are, a buyer pays, and an operator pauses a sale.
type inFlightSlots struct {
	purchases slots
	// orders is for buyers who pay, cancel, and look at their own orders.
	orders slots
	// sales is for those who look at sales: anybody.
	sales slots
	// others is for operators.
	operators slots
}

// shareOut leaves most places to purchases. Each kind has one place at least, also where that is more than all.
func newInFlightSlots(all int) inFlightSlots {
	part := func(n int) slots { return slots{limit: int64(max(1, n))} }
	eighth, sixteenth := all/8, all/16
	return inFlightSlots{purchases: part(all - 2*eighth - sixteenth), orders: part(eighth), sales: part(eighth), operators: part(sixteenth)}
}

func (s *inFlightSlots) all() [4]*slots {
	return [...]*slots{&s.purchases, &s.orders, &s.sales, &s.operators}
}

func (s *inFlightSlots) limit() (n int64) {
	for _, r := range s.all() {
		n += r.limit
	}
	return n
}

// taken is how many requests are being worked on.
func (s *inFlightSlots) taken() (n int64) {
	for _, r := range s.all() {
		n += r.taken.Load()
	}
	return n
}

// room bounds how many requests are worked on at once. Invariant: 0 <= taken <= limit, but for the
// instants in which somebody is being turned away.
type slots struct {
	limit int64
	taken atomic.Int64
}

// enter takes a place, which leave gives back. It is false if there is none.
func (r *slots) acquire() bool {
	if r.taken.Add(1) > r.limit {
		r.release()
		return false
	}
	return true
}

func (r *slots) release() { r.taken.Add(-1) }

// admit lets h work while there is room.
func (r *slots) admit(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if !r.acquire() {
			return problemOverloaded
		}
		defer r.release()
		return h(c)
	}
}

func (r *slots) gauge(o prometheus.GaugeOpts) prometheus.GaugeFunc {
	return prometheus.NewGaugeFunc(o, func() float64 { return float64(r.taken.Load()) })
}
