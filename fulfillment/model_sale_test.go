package fulfillment_test

import (
	"maps"
	"slices"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/reservation/order"
)

// model is a correct sale with a payment window: nothing fails, and each step ends before the next one begins.
type model struct {
	items  bool    // of a sale with items; otherwise the stock is that of the only thing
	stock  []int64 // of each item
	state  reservation.State
	orders map[uuid.UUID]modelOrder
	holds  map[string]uuid.UUID // the live order of each user
}

type modelOrder struct {
	user, key, reference string
	quantity             int64
	lines                order.Lines // in a sale with items
	status               order.Status
	version              int
}

// wanted returns the units of each item that a request wants.
func (m *model) wanted(r reservation.Request) []int64 {
	if !m.items {
		return []int64{r.Quantity}
	}
	units := make([]int64, len(m.stock))
	for i := range units {
		units[i] = r.Items[order.ItemLetter(i)]
	}
	return units
}

// ordered returns the order that a request makes.
func (m *model) ordered(r reservation.Request) modelOrder {
	o := modelOrder{user: r.User, key: r.IdempotencyKey, quantity: r.Quantity, status: order.StatusConfirmed, version: 2}
	if m.items {
		o.lines = order.MakeLines(m.wanted(r))
		o.quantity = o.lines.Units()
	}
	return o
}

// left returns the units of each item that no live order has.
func (m *model) left() []int64 {
	left := slices.Clone(m.stock)
	for o := range maps.Values(m.orders) {
		if o.status.Live() && !m.items {
			left[0] -= o.quantity
		} else if o.status.Live() {
			for item, units := range o.lines.Each() {
				left[item] -= units
			}
		}
	}
	return left
}

// wantsSoldOut reports whether nothing is left of an item that the request wants.
func (m *model) wantsSoldOut(r reservation.Request) bool {
	wanted, left := m.wanted(r), m.left()
	for i, units := range wanted {
		if units > 0 && left[i] == 0 {
			return true
		}
	}
	return false
}

// verdict returns the answer to a purchase, and the id of an existing order if the verdict names one.
func (m *model) verdict(r reservation.Request) (reservation.Verdict, uuid.UUID) {
	wants := m.ordered(r)
	for id, o := range m.orders {
		if r.IdempotencyKey == "" || o.user != r.User || o.key != r.IdempotencyKey {
			continue
		}
		switch {
		case o.quantity != wants.quantity || o.lines != wants.lines:
			return reservation.KeyReused, uuid.Nil
		case o.status.Live():
			return reservation.Replayed, id
		default:
			return reservation.OrderEnded, id
		}
	}
	if id, holds := m.holds[r.User]; holds {
		return reservation.AlreadyPurchased, id
	}
	switch {
	case m.state == reservation.StatePaused:
		return reservation.Paused, uuid.Nil
	case wants.quantity > modelPerOrder || m.items && m.wanted(r)[0] > modelPerFirst:
		return reservation.OverLimit, uuid.Nil
	}
	left := m.left()
	for i, units := range m.wanted(r) {
		if units > left[i] {
			return reservation.SoldOut, uuid.Nil
		}
	}
	return reservation.Reserved, uuid.Nil
}

func (m *model) reserve(r reservation.Request, id uuid.UUID) {
	m.orders[id] = m.ordered(r)
	m.holds[r.User] = id
}

// step applies an allowed step to an order.
func (m *model) step(id uuid.UUID, to order.Status, reference string) {
	o := m.orders[id]
	o.status, o.reference, o.version = to, reference, o.version+1
	m.orders[id] = o
	if !to.Live() {
		delete(m.holds, o.user)
	}
}

// lose removes orders that Redis loses before a worker has read them.
func (m *model) lose(ids []uuid.UUID) {
	for _, id := range ids {
		delete(m.holds, m.orders[id].user)
		delete(m.orders, id)
	}
}

// units returns the units of the orders with this status.
func (m *model) units(status order.Status) (n int64) {
	for o := range maps.Values(m.orders) {
		if o.status == status {
			n += o.quantity
		}
	}
	return n
}

func sum(units []int64) (all int64) {
	for _, n := range units {
		all += n
	}
	return all
}
