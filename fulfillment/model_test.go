package fulfillment_test

import (
	"maps"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/reservation/order"
)

// model is a correct sale with a payment window: nothing fails, and each step ends before the next one begins.
type model struct {
	stock  int64
	state  reservation.State
	orders map[uuid.UUID]modelOrder
	holds  map[string]uuid.UUID // the live order of each user
}

type modelOrder struct {
	user, key, reference string
	quantity             int64
	status               order.Status
	version              int
}

// verdict returns the answer to a purchase; the id is that of an existing order, if the verdict names one.
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

func (m *model) taken() int64 {
	return m.units(order.StatusConfirmed) + m.units(order.StatusPaid)
}
