package stream

import (
	"context"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

// delivery is an entry that is held here. It belongs to the reader until it is delivered, then to
// the goroutine that follows it; shared state is in the entryTable.
type delivery struct {
	id     string
	values map[string]any
	// orders is how many the entry holds.
	orders int
	// deliveries is how often the entry was given to a consumer, including this time.
	deliveries int64
	// refusals is how often the message was nacked here.
	refusals int
	notes    notes

	msg    *message.Message
	cancel context.CancelFunc // of the message's context
}

// parkedMax bounds the entries that wait to become dead letters; beyond it reading stops. They wait
// while the store of dead letters is away, and a faulty producer may fill the stream meanwhile.
const parkedMax = 1000

// entryTable holds every entry of one stream that is in this process: read, and not yet
// acknowledged in Redis. It recognises entries that are read a second time.
//
// Invariant: the orders of held entries that are not parked are at most max and those of one page,
// because only the reader adds and it asks for room before it reads.
type entryTable struct {
	max   int
	gauge prometheus.Gauge
	// freed has a value after entries were released or parked.
	freed chan struct{}

	mu      sync.Mutex
	entries map[string]*heldEntry
	// orders are those of entries that are not parked; parked is the number of the others.
	orders, parked int
}

// heldEntry is the table's record of an entry.
type heldEntry struct {
	orders int
	// renewed is when the lease was last renewed.
	renewed time.Time
	// parked entries wait to become dead letters.
	parked bool
	// leaseEnded entries are pending for another consumer, or for none: there is no lease to renew.
	leaseEnded bool
}

func newEntryTable(limit int, gauge prometheus.Gauge) *entryTable {
	return &entryTable{max: limit, gauge: gauge, freed: make(chan struct{}, 1), entries: make(map[string]*heldEntry)}
}

// hold adds the entries of a page and returns them in order, without those already held.
func (t *entryTable) hold(page []redis.XMessage) []*delivery {
	now := time.Now()
	held := make([]*delivery, 0, len(page))
	entries := make([]heldEntry, len(page))
	t.mu.Lock()
	for i, entry := range page {
		if _, known := t.entries[entry.ID]; known {
			continue
		}
		orders := ordersIn(entry.Values)
		entries[i] = heldEntry{orders: orders, renewed: now}
		t.entries[entry.ID] = &entries[i]
		t.orders += orders
		held = append(held, &delivery{id: entry.ID, values: entry.Values, orders: orders, deliveries: 1})
	}
	t.mu.Unlock()
	t.gauge.Add(float64(len(held)))
	return held
}

// release removes entries that are acknowledged or left to other consumers.
func (t *entryTable) release(ids ...string) {
	n := 0
	t.mu.Lock()
	for _, id := range ids {
		if held, known := t.entries[id]; known {
			delete(t.entries, id)
			n++
			if held.parked {
				t.parked--
			} else {
				t.orders -= held.orders
			}
		}
	}
	t.mu.Unlock()
	t.gauge.Sub(float64(n))
	t.signal()
}

// park takes an entry that waits to become a dead letter out of the count of held ones.
func (t *entryTable) park(id string) {
	t.mu.Lock()
	if held, known := t.entries[id]; known && !held.parked {
		held.parked = true
		t.parked++
		t.orders -= held.orders
	}
	t.mu.Unlock()
	t.signal()
}

// awaitRoom returns how many orders may be added, or 0 if stop was closed first.
func (t *entryTable) awaitRoom(stop <-chan struct{}) int {
	for {
		if room := t.room(); room > 0 {
			return room
		}
		select {
		case <-t.freed:
		case <-stop:
			return 0
		}
	}
}

func (t *entryTable) room() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.parked >= parkedMax {
		return 0
	}
	return t.max - t.orders
}

func (t *entryTable) signal() {
	select {
	case t.freed <- struct{}{}:
	default:
	}
}

// ids returns a copy of the ids that are held now.
func (t *entryTable) ids() map[string]struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	ids := make(map[string]struct{}, len(t.entries))
	for id := range t.entries {
		ids[id] = struct{}{}
	}
	return ids
}

// due returns the entries whose leases were not renewed since then.
func (t *entryTable) due(since time.Time) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var ids []string
	for id, held := range t.entries {
		if !held.leaseEnded && held.renewed.Before(since) {
			ids = append(ids, id)
		}
	}
	return ids
}

// renew records when the entry's lease was renewed.
func (t *entryTable) renew(id string, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if held, known := t.entries[id]; known {
		held.renewed = at
	}
}

// endLease records that the entry has no lease to renew. It returns false if that was known, or if
// the entry is not held any more.
func (t *entryTable) endLease(id string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	held, known := t.entries[id]
	if !known || held.leaseEnded {
		return false
	}
	held.leaseEnded = true
	return true
}

// clear releases all entries, and returns their number.
func (t *entryTable) clear() int {
	t.mu.Lock()
	n := len(t.entries)
	clear(t.entries)
	t.orders, t.parked = 0, 0
	t.mu.Unlock()
	t.gauge.Sub(float64(n))
	return n
}
