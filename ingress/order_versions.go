package ingress

import (
	"sync"
	"time"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/reservation/order"
)

// versionsMin bounds a generation: between versionsMin and twice as many orders are remembered, some 20 MB.
const versionsMin = 1 << 15

// orderVersions gives buyers monotonic reads: once this server has shown an order in some version, it shows no
// lower one. A query that is slower than a later one could, and so could Redis, which is asked while
// Postgres does not answer. The first version is not remembered, because no version is lower.
//
// Its memory is bounded: a full young generation becomes the old one, and the old one is forgotten. An order
// that was made before the old generation began may have been forgotten; a later one is remembered if it
// was shown in a later version than the first. It is safe for concurrent use.
type orderVersions struct {
	mu                   sync.Mutex
	young, old           map[uuid.UUID]order.Order
	youngSince, oldSince time.Time // zero is the start of the server
}

func newOrderVersions() *orderVersions {
	return &orderVersions{young: make(map[uuid.UUID]order.Order), old: make(map[uuid.UUID]order.Order)}
}

// latest returns the version to show: the found one, or a later one that was shown before.
func (m *orderVersions) latest(found order.Order) order.Order {
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

// recall returns the order as it was shown last, if it is remembered.
func (m *orderVersions) recall(id uuid.UUID) (o order.Order, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.recallLocked(id)
}

// mayHaveForgotten is false if the order is remembered, or was never shown in a later version than the first.
func (m *orderVersions) mayHaveForgotten(id uuid.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, known := m.recallLocked(id)
	return !known && !m.oldSince.IsZero() && reservation.MadeAt(id).Before(m.oldSince.Add(reservation.ClockMargin))
}

func (m *orderVersions) recallLocked(id uuid.UUID) (o order.Order, known bool) {
	if o, known = m.young[id]; !known {
		o, known = m.old[id]
	}
	return o, known
}

func (m *orderVersions) remember(o order.Order) {
	if _, known := m.young[o.ID]; !known && len(m.young) >= versionsMin {
		m.young, m.old = m.old, m.young
		clear(m.young)
		m.oldSince, m.youngSince = m.youngSince, time.Now()
	}
	m.young[o.ID] = o
}
