package fulfillment_test

import (
	"maps"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/reservation/order"
)

// model is a sale with a payment window as it ought to be: one buyer after the other, nothing ever fails,
// and every step is done before the next one begins.
type model struct {
	stock  int64
	state  reservation.State
	orders map[uuid.UUID]modelOrder
	holds  map[string]uuid.UUID // user → the order that keeps the user from another one
}

type modelOrder struct {
	user, key, reference string
	quantity             int64
	status               order.Status
	version              int
}

// verdict is what a purchase is answered; the order is that of the verdicts that name one.
func (m *model) verdict(r reservation.Request) (reservation.Verdict, uuid.UUID) {
	for id, o := range m.orders {
		if r.IdempotencyKey == "" || o.user != r.User || o.key != r.IdempotencyKey {
			continue
		}
		switch {
		case o.quantity != r.Quantity:
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
	case r.Quantity > modelPerOrder:
		return reservation.OverLimit, uuid.Nil
	case r.Quantity > m.stock-m.taken():
		return reservation.SoldOut, uuid.Nil
	}
	return reservation.Reserved, uuid.Nil
}

func (m *model) reserve(r reservation.Request, id uuid.UUID) {
	m.orders[id] = modelOrder{r.User, r.IdempotencyKey, "", r.Quantity, order.StatusConfirmed, 2}
	m.holds[r.User] = id
}

// step takes an order of which the step is allowed one event further.
func (m *model) step(id uuid.UUID, to order.Status, reference string) {
	o := m.orders[id]
	o.status, o.reference, o.version = to, reference, o.version+1
	m.orders[id] = o
	if !to.Live() {
		delete(m.holds, o.user)
	}
}

// lose is what remains when Redis loses orders that no worker has seen.
func (m *model) lose(ids []uuid.UUID) {
	for _, id := range ids {
		delete(m.holds, m.orders[id].user)
		delete(m.orders, id)
	}
}

// units are those of the orders with this status.
func (m *model) units(status order.Status) (n int64) {
	for o := range maps.Values(m.orders) {
		if o.status == status {
			n += o.quantity
		}
	}
	return n
}

func (m *model) taken() int64 {
	return m.units(order.StatusConfirmed) + m.units(order.StatusPaid)
}
