package ingress

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/reservation/order"
)

const (
	// overdueAfter is how long an order may be waited for without an announcement before it is looked up anyway,
	// and how often that is repeated.
	overdueAfter = time.Second
	// lookupMax bounds the orders of one query.
	lookupMax = 1000
	// lookupTimeout bounds one query. It is longer than orderTimeout, which is for a single order.
	lookupTimeout = 3 * time.Second
	// rememberedMin bounds a generation of remembered announcements: between one and two of them are kept.
	rememberedMin = 1 << 15
)

// orderWaiters has the requests that wait for a change of an order. Workers announce changes (outcomeReader),
// and the orders are then read from Postgres: one query for all that were announced during the last one.
// Announcements can get lost, so orders that were waited for without one are looked up every second, also
// together. A waiter therefore costs nearly nothing, and gets only what is in Postgres. It is safe for
// concurrent use.
type orderWaiters struct {
	find    func(ctx context.Context, ids []uuid.UUID) ([]order.Order, error)
	lookups prometheus.Counter

	mu sync.Mutex
	// byOrder has a linked list of waiters for each order.
	byOrder map[uuid.UUID]*waiter
	// due are the announced orders with a waiter that has not seen the announced version.
	due map[uuid.UUID]struct{}
	// young and old are versions that were announced lately: a worker may announce an order before the request
	// that reserved it begins to wait. A full young generation becomes the old one.
	young, old map[uuid.UUID]int

	wake chan struct{}
}

// waiter waits for a change of an order.
type waiter struct {
	order uuid.UUID
	next  *waiter // another waiter for the same order
	since time.Time
	// seen is the latest version that the waiter knows.
	seen int
	// updates takes the latest version after seen. A version that was not received is replaced.
	updates chan order.Order
}

func newOrderWaiters(
	find func(context.Context, []uuid.UUID) ([]order.Order, error), lookups prometheus.Counter,
) *orderWaiters {
	return &orderWaiters{
		find: find, lookups: lookups,
		byOrder: make(map[uuid.UUID]*waiter), due: make(map[uuid.UUID]struct{}),
		young: make(map[uuid.UUID]int), old: make(map[uuid.UUID]int),
		wake: make(chan struct{}, 1),
	}
}

// add waits for a version of the order after seen. With now the order is looked up immediately. The caller
// removes the waiter in the end.
func (ws *orderWaiters) add(o uuid.UUID, seen int, now bool) *waiter {
	w := &waiter{order: o, seen: seen, since: time.Now(), updates: make(chan order.Order, 1)}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w.next = ws.byOrder[o]
	ws.byOrder[o] = w
	if now || max(ws.young[o], ws.old[o]) > seen {
		ws.schedule(o)
	}
	return w
}

// setSeen records a version that the waiter has from elsewhere.
func (ws *orderWaiters) setSeen(w *waiter, version int) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w.seen = max(w.seen, version)
}

func (ws *orderWaiters) remove(w *waiter) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if first := ws.byOrder[w.order]; first != w {
		for ; first != nil; first = first.next {
			if first.next == w {
				first.next = w.next
			}
		}
		return
	}
	if w.next != nil {
		ws.byOrder[w.order] = w.next
		return
	}
	delete(ws.byOrder, w.order)
	delete(ws.due, w.order)
}

func (ws *orderWaiters) isEmpty() bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return len(ws.byOrder) == 0
}

// notify takes an announcement of workers.
func (ws *orderWaiters) notify(outcomes []order.OrderOutcome) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for _, o := range outcomes {
		if len(ws.young) >= rememberedMin {
			ws.young, ws.old = ws.old, ws.young
			clear(ws.young)
		}
		ws.young[o.OrderID] = max(o.Version, ws.young[o.OrderID])
		for w := ws.byOrder[o.OrderID]; w != nil; w = w.next {
			if w.seen < o.Version {
				ws.schedule(o.OrderID)
				break
			}
		}
	}
}

// schedule has the order looked up after the current query. mu is held.
func (ws *orderWaiters) schedule(id uuid.UUID) {
	ws.due[id] = struct{}{}
	select {
	case ws.wake <- struct{}{}:
	default:
	}
}

// run looks orders up until ctx is done.
func (ws *orderWaiters) run(ctx context.Context) {
	tick := time.NewTicker(overdueAfter)
	defer tick.Stop()
	for {
		var ids []uuid.UUID
		select {
		case <-ws.wake:
			ids = ws.takeDue()
		case <-tick.C:
			ids = ws.overdue(time.Now().Add(-overdueAfter))
		case <-ctx.Done():
			return
		}
		for len(ids) > 0 {
			batch := ids[:min(len(ids), lookupMax)]
			ids = ids[len(batch):]
			ws.lookups.Inc()
			orders, err := ws.find(ctx, batch)
			if err != nil {
				break // orders with a waiter will be overdue
			}
			ws.deliver(orders)
		}
	}
}

func (ws *orderWaiters) takeDue() []uuid.UUID {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ids := make([]uuid.UUID, 0, len(ws.due))
	for id := range ws.due {
		ids = append(ids, id)
	}
	clear(ws.due)
	return ids
}

// overdue returns the orders with a waiter since then or earlier.
func (ws *orderWaiters) overdue(then time.Time) []uuid.UUID {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	var ids []uuid.UUID
	for id, w := range ws.byOrder {
		for ; w != nil; w = w.next {
			if !w.since.After(then) {
				ids = append(ids, id)
				break
			}
		}
	}
	return ids
}

// deliver sends each order to its waiters that have not seen this version. It does not block.
func (ws *orderWaiters) deliver(orders []order.Order) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for _, o := range orders {
		for w := ws.byOrder[o.ID]; w != nil; w = w.next {
			if w.seen >= o.Version {
				continue
			}
			w.seen = o.Version
			select {
			case <-w.updates: // an earlier version that was not received
			default:
			}
			w.updates <- o // does not block: only deliver sends, under mu
		}
	}
}

const (
	// outcomesBlock is how long a read of a stream blocks.
	outcomesBlock = time.Second
	// outcomesRetryPause is the pause before a stream is read again after an error.
	outcomesRetryPause = time.Second
)

// outcomeReader passes the announcements of workers to the waiters.
type outcomeReader struct {
	*core
	// malformed bounds the log lines about messages that cannot be decoded.
	malformed cooldown
}

// run passes the announcements of workers to the waiters until ctx is done. Waiters that miss one are
// looked up every second.
func (s *outcomeReader) run(ctx context.Context) {
	client, err := s.config.Outcomes()
	if err != nil {
		s.log.Error("cannot read the streams of outcomes: the orders of waiting buyers are looked up every second",
			"error", err)
		return
	}
	closed := make(chan struct{})
	context.AfterFunc(ctx, func() {
		defer close(closed)
		_ = client.Close() // ends reads that block
	})
	var following sync.WaitGroup
	for _, stream := range s.config.OutcomesStreams {
		following.Go(func() { s.follow(ctx, client, stream) })
	}
	following.Wait()
	<-closed
}

// follow reads one stream until ctx is done.
func (s *outcomeReader) follow(ctx context.Context, client redis.UniversalClient, stream string) {
	last, failing := "", false
	for {
		var err error
		if last == "" {
			last, err = lastEntry(ctx, client, stream)
		} else {
			last, err = s.read(ctx, client, stream, last)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil && !failing {
			s.log.Warn("cannot read a stream of outcomes: the orders of waiting buyers are looked up every second",
				"stream", stream, "error", err)
		}
		if failing = err != nil; !failing {
			continue
		}
		select {
		case <-time.After(outcomesRetryPause):
		case <-ctx.Done():
			return
		}
	}
}

// read reads the messages after the entry last, and returns their last entry.
func (s *outcomeReader) read(
	ctx context.Context, client redis.UniversalClient, stream, last string,
) (string, error) {
	found, err := client.XRead(ctx, &redis.XReadArgs{Streams: []string{stream, last}, Block: outcomesBlock}).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return last, nil
	case err != nil:
		return last, err
	}
	for _, entry := range found[0].Messages {
		s.handle(entry)
		last = entry.ID
	}
	return last, nil
}

// handle ignores messages while no request waits, or is about to.
func (s *outcomeReader) handle(entry redis.XMessage) {
	s.metrics.outcomeMessages.Inc()
	if s.waitSlots.taken.Load() == 0 && s.waiters.isEmpty() {
		return
	}
	var outcomes []order.OrderOutcome
	msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(entry.Values)
	if err == nil {
		outcomes, err = order.DecodeOutcomes(msg.Payload)
	}
	if err != nil {
		if s.malformed.start(outageLogInterval) {
			s.log.Warn("skipped a message of a stream of outcomes", "entry", entry.ID, "error", err)
		}
		return
	}
	s.waiters.notify(outcomes)
}

// lastEntry returns the id of the stream's last entry, or the lowest id if there is none.
func lastEntry(ctx context.Context, client redis.UniversalClient, stream string) (string, error) {
	entries, err := client.XRevRangeN(ctx, stream, "+", "-", 1).Result()
	switch {
	case err != nil:
		return "", fmt.Errorf("find the end of %s: %w", stream, err)
	case len(entries) == 0:
		return "0-0", nil
	}
	return entries[0].ID, nil
}
