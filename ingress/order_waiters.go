package ingress

import (
	"context"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/reservation"
)

const (
	// overdueAfter is after what time of waiting an order is looked up though nothing was heard of it, and how often from then on.
	overdueAfter = time.Second
	// lookedUpTogether bounds the orders of one look into Postgres.
	lookupMax = 1000
	// waitersTimeout bounds that look. It is longer than the one for a single order.
	lookupTimeout = 3 * time.Second
	// rememberedMin is how many outcomes are remembered at least, and twice as many at most.
	rememberedMin = 1 << 15
)

// hub is where requests wait for what becomes of orders. That there is something new is heard from the workers
// (outcomes.go); what it is, is looked up in Postgres, for all orders at once of which something was heard while the
// last look was under way. Orders of which nothing is heard for a second are looked up together as well, because
// messages get lost. So a look costs one of a thousand who wait hardly anything, and a hub never answers what is not in Postgres.
// It is safe for concurrent use.
type orderWaiters struct {
	find    func(ctx context.Context, ids []uuid.UUID) ([]reservation.Order, error)
	lookups prometheus.Counter

	mu sync.Mutex
	// waiting is who waits, by order: a list, because several may wait for one.
	byOrder map[uuid.UUID]*waiter
	// due are orders of which something was heard that somebody who waits for them does not know.
	due map[uuid.UUID]struct{}
	// young and old are the versions that were heard of lately: the worker may be done with an order before the
	// request that reserved it comes to wait. When young is full it becomes old.
	young, old map[uuid.UUID]int

	wake chan struct{}
}

// waiter waits for what becomes of an order.
type waiter struct {
	order uuid.UUID
	next  *waiter // another one who waits for it
	since time.Time
	// seen is the version of the order that the waiter knows.
	seen int
	// heard takes the latest version that is later than seen, in place of one that nobody has taken from it.
	updates chan reservation.Order
}

// lookForWaiters is the find of the hub.
func (s *Server) findForWaiters(ctx context.Context, ids []uuid.UUID) (orders []reservation.Order, err error) {
	err = s.queryPostgres(ctx, lookupTimeout, func(ctx context.Context) (err error) {
		orders, err = s.config.AwaitedOrders.FindOrders(ctx, ids)
		return err
	})
	return orders, err
}

func newOrderWaiters(find func(context.Context, []uuid.UUID) ([]reservation.Order, error), lookups prometheus.Counter) *orderWaiters {
	return &orderWaiters{
		find: find, lookups: lookups,
		byOrder: make(map[uuid.UUID]*waiter), due: make(map[uuid.UUID]struct{}),
		young: make(map[uuid.UUID]int), old: make(map[uuid.UUID]int),
		wake: make(chan struct{}, 1),
	}
}

// wait waits for a version of the order that is later than seen. With now, it is looked up at once. Whoever waits
// calls leave in the end.
func (h *orderWaiters) add(order uuid.UUID, seen int, now bool) *waiter {
	w := &waiter{order: order, seen: seen, since: time.Now(), updates: make(chan reservation.Order, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	w.next = h.byOrder[order]
	h.byOrder[order] = w
	if now || max(h.young[order], h.old[order]) > seen {
		h.schedule(order)
	}
	return w
}

// saw notes what a waiter has learned elsewhere.
func (h *orderWaiters) setSeen(w *waiter, version int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w.seen = max(w.seen, version)
}

func (h *orderWaiters) remove(w *waiter) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if first := h.byOrder[w.order]; first != w {
		for ; first != nil; first = first.next {
			if first.next == w {
				first.next = w.next
			}
		}
		return
	}
	if w.next != nil {
		h.byOrder[w.order] = w.next
		return
	}
	delete(h.byOrder, w.order)
	delete(h.due, w.order)
}

// idle is true if nobody waits.
func (h *orderWaiters) isEmpty() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.byOrder) == 0
}

// hear takes what workers tell.
func (h *orderWaiters) notify(outcomes []reservation.OrderOutcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, o := range outcomes {
		if len(h.young) >= rememberedMin {
			h.young, h.old = h.old, h.young
			clear(h.young)
		}
		h.young[o.OrderID] = max(o.Version, h.young[o.OrderID])
		for w := h.byOrder[o.OrderID]; w != nil; w = w.next {
			if w.seen < o.Version {
				h.schedule(o.OrderID)
				break
			}
		}
	}
}

// lookUp has the order looked up as soon as the look is over that is under way. mu is held.
func (h *orderWaiters) schedule(order uuid.UUID) {
	h.due[order] = struct{}{}
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// run looks orders up until ctx ends.
func (h *orderWaiters) run(ctx context.Context) {
	tick := time.NewTicker(overdueAfter)
	defer tick.Stop()
	for {
		var ids []uuid.UUID
		select {
		case <-h.wake:
			ids = h.takeDue()
		case <-tick.C:
			ids = h.overdue(time.Now().Add(-overdueAfter))
		case <-ctx.Done():
			return
		}
		for len(ids) > 0 {
			some := ids[:min(len(ids), lookupMax)]
			ids = ids[len(some):]
			h.lookups.Inc()
			orders, err := h.find(ctx, some)
			if err != nil {
				break // those who are still waiting are overdue soon
			}
			h.deliver(orders)
		}
	}
}

func (h *orderWaiters) takeDue() []uuid.UUID {
	h.mu.Lock()
	defer h.mu.Unlock()
	ids := make([]uuid.UUID, 0, len(h.due))
	for id := range h.due {
		ids = append(ids, id)
	}
	clear(h.due)
	return ids
}

// overdue is the orders for which somebody has been waiting since then.
func (h *orderWaiters) overdue(then time.Time) []uuid.UUID {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ids []uuid.UUID
	for id, w := range h.byOrder {
		for ; w != nil; w = w.next {
			if !w.since.After(then) {
				ids = append(ids, id)
				break
			}
		}
	}
	return ids
}

// deliver gives orders to those who do not know them like this. It never waits.
func (h *orderWaiters) deliver(orders []reservation.Order) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, o := range orders {
		for w := h.byOrder[o.ID]; w != nil; w = w.next {
			if w.seen >= o.Version {
				continue
			}
			w.seen = o.Version
			select {
			case <-w.updates: // an earlier version, which nobody took
			default:
			}
			w.updates <- o // nobody else sends, and there is room now
		}
	}
}
