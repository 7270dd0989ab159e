package ingress

import (
	"sync/atomic"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
)

// shares are the places of Config.MaxInFlight, in parts that take nothing from each other: however many purchases or
// anonymous requests there are, a buyer pays, and an operator pauses a sale.
type shares struct {
	purchases room
	// orders is for buyers who pay, cancel, and look at their own orders.
	orders room
	// sales is for those who look at sales: anybody.
	sales room
	// others is for operators.
	others room
}

// shareOut leaves most places to purchases. Each kind has one place at least, also where that is more than all.
func shareOut(all int) shares {
	part := func(n int) room { return room{limit: int64(max(1, n))} }
	eighth, sixteenth := all/8, all/16
	return shares{purchases: part(all - 2*eighth - sixteenth), orders: part(eighth), sales: part(eighth), others: part(sixteenth)}
}

func (s *shares) all() [4]*room { return [...]*room{&s.purchases, &s.orders, &s.sales, &s.others} }

func (s *shares) limit() (n int64) {
	for _, r := range s.all() {
		n += r.limit
	}
	return n
}

// taken is how many requests are being worked on.
func (s *shares) taken() (n int64) {
	for _, r := range s.all() {
		n += r.taken.Load()
	}
	return n
}

// room bounds how many requests are worked on at once. Invariant: 0 <= taken <= limit, but for the
// instants in which somebody is being turned away.
type room struct {
	limit int64
	taken atomic.Int64
}

// enter takes a place, which leave gives back. It is false if there is none.
func (r *room) enter() bool {
	if r.taken.Add(1) > r.limit {
		r.leave()
		return false
	}
	return true
}

func (r *room) leave() { r.taken.Add(-1) }

// admit lets h work while there is room.
func (r *room) admit(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if !r.enter() {
			return problemOverloaded
		}
		defer r.leave()
		return h(c)
	}
}

func (r *room) gauge(o prometheus.GaugeOpts) prometheus.GaugeFunc {
	return prometheus.NewGaugeFunc(o, func() float64 { return float64(r.taken.Load()) })
}
