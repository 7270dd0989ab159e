package ingress

import (
	"sync"
	"time"

	"github.com/google/uuid"

	"stampede/reservation"
)

// shownMin is how many orders are remembered at least, and twice as many at most: some 20 MB.
const versionsMin = 1 << 15

// shownOrders remembers the latest version of each order that this server has shown to its buyer, so that no lower one
// follows: a look that was slower than a later one, and Redis, which is asked when Postgres is away, know less. The first
// version is not remembered, because there is no lower one.
//
// Its memory is bounded: when young is full it becomes old, and what was old is forgotten. An order that was made before
// the old generation began may have been forgotten; one that was made after is remembered if a later version than
// the first was ever shown. It is safe for concurrent use.
type orderVersions struct {
	mu                   sync.Mutex
	young, old           map[uuid.UUID]reservation.Order
	youngSince, oldSince time.Time // zero is the start of the server
}

func newOrderVersions() *orderVersions {
	return &orderVersions{young: make(map[uuid.UUID]reservation.Order), old: make(map[uuid.UUID]reservation.Order)}
}

// latest returns what is to be shown of an order that was found like this: itself, or the later version that was shown already.
func (m *orderVersions) latest(found reservation.Order) reservation.Order {
	m.mu.Lock()
	defer m.mu.Unlock()
	if before, known := m.recallLocked(found.ID); known && before.Version > found.Version {
		found = before
	}
	if found.Version > 1 {
		m.remember(found)
	}
	return found
}

// recall returns the order as it was shown last; known is false if it is not remembered.
func (m *orderVersions) recall(id uuid.UUID) (order reservation.Order, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.recallLocked(id)
}

// mayHaveForgotten is false if the order is remembered, or was never shown in a later version than its first.
func (m *orderVersions) mayHaveForgotten(id uuid.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, known := m.recallLocked(id)
	return !known && !m.oldSince.IsZero() && reservation.MadeAt(id).Before(m.oldSince.Add(reservation.ClockMargin))
}

func (m *orderVersions) recallLocked(id uuid.UUID) (order reservation.Order, known bool) {
	if order, known = m.young[id]; !known {
		order, known = m.old[id]
	}
	return order, known
}

func (m *orderVersions) remember(order reservation.Order) {
	if _, known := m.young[order.ID]; !known && len(m.young) >= versionsMin {
		m.young, m.old = m.old, m.young
		clear(m.young)
		m.oldSince, m.youngSince = m.youngSince, time.Now()
	}
	m.young[order.ID] = order
}
