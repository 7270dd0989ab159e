package ingress

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"

	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

const (
	// refreshInterval bounds how often an item is queried.
	refreshInterval = 500 * time.Millisecond
	// answerMaxAge bounds the age of an answer. An operator's change may take as long to be in force.
	answerMaxAge = time.Second
	// refreshTimeout bounds one query.
	refreshTimeout = 2 * time.Second
	// slowRefresh is the duration of a query after which the next one has fewer items.
	slowRefresh = refreshInterval / 4
	// firstBatch is the number of items of the first query.
	firstBatch = 50
	// answersMax bounds the rendered answers of a snapshot: pages of several lengths.
	answersMax = 4
	// sweepInterval is how often a feed finds items to refresh and to forget.
	sweepInterval = refreshInterval / 5
	// forgetAfter is how long an item is kept after its last request. Its snapshot is too old to answer with then,
	// and a client that requests many items keeps others out no longer.
	forgetAfter = answerMaxAge
)

// feed answers public requests about sales and draws from memory. It queries an item at most twice a second, whatever
// the number of requests, and many items together, one query at a time. Requests wait only if the snapshot is older
// than answerMaxAge. The number of items is bounded. It is safe for concurrent use.
type feed struct {
	// query reads the items with these keys. A key that is missing in its answer does not exist.
	query func(ctx context.Context, keys []uuid.UUID) (map[uuid.UUID]found, error)
	// batchMax bounds the items of one query, and itemsMax those in memory.
	batchMax, itemsMax int

	mu    sync.Mutex
	items map[uuid.UUID]*feedItem
	due   []*feedItem
	// changedAt is when an operator made a change here. Older snapshots are not shown.
	changedAt time.Time

	wake  chan struct{}
	ended <-chan struct{}
}

// feedItem is a sale, a page of the list, or a draw, that is requested or subscribed to.
type feedItem struct {
	key uuid.UUID
	// latest is the result of the last query that succeeded, and failure that of the last query if it failed.
	latest, failure *snapshot
	// askedAt is the time of the last request, or of the query that it waited for.
	askedAt time.Time
	// done is closed by the query for which the item is due or which is in progress; otherwise it is nil.
	done        chan struct{}
	subscribers map[*saleSubscriber]struct{}
	// sent is what the subscribers were sent last, or nil.
	sent []byte
}

// found is what a query reads of an item: a sale or a page of them, or a draw.
type found struct {
	sales []catalog.CountResult
	draw  *draws.Draw
}

// snapshot is the result of a query.
type snapshot struct {
	began, ended time.Time
	found
	err error

	mu      sync.Mutex
	answers map[int]*renderedAnswer
}

// renderedAnswer is a public answer in JSON.
type renderedAnswer struct {
	body []byte
	etag string
}

func startFeed(
	b *background, batchMax, itemsMax int,
	query func(context.Context, []uuid.UUID) (map[uuid.UUID]found, error),
) *feed {
	f := &feed{
		query: query, batchMax: batchMax, itemsMax: itemsMax,
		items: make(map[uuid.UUID]*feedItem), wake: make(chan struct{}, 1), ended: b.ctx.Done(),
	}
	b.start(f.run)
	return f
}

// get returns a recent snapshot of an item, or waits for one.
func (f *feed) get(ctx context.Context, key uuid.UUID) (*snapshot, error) {
	since := time.Now().Add(-answerMaxAge)
	for {
		recent, done, err := f.recall(key, since)
		switch {
		case err != nil:
			return nil, err
		case recent != nil:
			return recent, recent.err
		}
		select {
		case <-done:
		case <-ctx.Done():
			return nil, problemUnavailable
		case <-f.ended:
			return nil, problemOverloaded
		}
	}
}

// recall returns the snapshot of a query that began after since, or a channel that the next query closes.
func (f *feed) recall(key uuid.UUID, since time.Time) (recent *snapshot, done <-chan struct{}, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	item, err := f.item(key)
	if err != nil {
		return nil, nil, err
	}
	item.askedAt = time.Now()
	if since.Before(f.changedAt) {
		since = f.changedAt
	}
	f.scheduleIfDue(item, since)
	if item.latest != nil && !item.latest.began.Before(since) {
		return item.latest, nil, nil
	}
	if item.failure != nil && !item.failure.began.Before(since) && time.Since(item.failure.ended) < refreshInterval {
		return item.failure, nil, nil
	}
	return nil, item.done, nil
}

// item returns the item with the key, which it adds unless the feed is full. mu is held.
func (f *feed) item(key uuid.UUID) (*feedItem, error) {
	item := f.items[key]
	if item == nil {
		if len(f.items) >= f.itemsMax {
			return nil, problemOverloaded
		}
		item = &feedItem{key: key, subscribers: make(map[*saleSubscriber]struct{})}
		f.items[key] = item
	}
	return item, nil
}

// scheduleIfDue has the item queried, unless a query after since began less than refreshInterval ago, or ended
// less than its own duration ago. mu is held.
func (f *feed) scheduleIfDue(item *feedItem, since time.Time) {
	for _, last := range []*snapshot{item.latest, item.failure} {
		if last != nil && !last.began.Before(since) &&
			(time.Since(last.began) < refreshInterval || time.Since(last.ended) < last.ended.Sub(last.began)) {
			return
		}
	}
	if item.done == nil {
		item.done = make(chan struct{})
		f.due = append(f.due, item)
		select {
		case f.wake <- struct{}{}:
		default:
		}
	}
}

// invalidate has no earlier snapshot shown any more.
func (f *feed) invalidate() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changedAt = time.Now()
}

// run refreshes items until ctx is done.
func (f *feed) run(ctx context.Context) {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for batch := min(f.batchMax, firstBatch); ; {
		select {
		case <-f.wake:
		case <-tick.C:
			f.sweep()
		case <-ctx.Done():
			return
		}
		for due := f.takeDue(batch); len(due) > 0 && ctx.Err() == nil; due = f.takeDue(batch) {
			if f.refresh(ctx, due) > slowRefresh {
				batch = max(1, len(due)/2)
			} else {
				batch = min(f.batchMax, 2*batch)
			}
		}
	}
}

// sweep schedules items with subscribers, and forgets those without requests.
func (f *feed) sweep() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, item := range f.items {
		missing := item.latest != nil && item.latest.err != nil
		switch {
		case len(item.subscribers) > 0:
			f.scheduleIfDue(item, f.changedAt)
		case item.done != nil:
		case time.Since(item.askedAt) > forgetAfter, missing && time.Since(item.latest.began) > refreshInterval:
			delete(f.items, key)
		}
	}
}

func (f *feed) takeDue(most int) []*feedItem {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := min(most, len(f.due))
	taken := f.due[:n:n]
	if f.due = f.due[n:]; len(f.due) == 0 {
		f.due = nil
	}
	return taken
}

// refresh queries the items together, and returns how long that took.
func (f *feed) refresh(ctx context.Context, due []*feedItem) time.Duration {
	keys := make([]uuid.UUID, len(due))
	for i, item := range due {
		keys[i] = item.key
	}
	limited, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	began := time.Now()
	all, err := f.query(limited, keys)
	ended := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, item := range due {
		result := &snapshot{began: began, ended: ended, err: err}
		if err == nil {
			var exists bool
			if result.found, exists = all[item.key]; !exists {
				result.err = reservation.ErrSaleNotFound
			}
			item.latest, item.failure = result, nil
		} else {
			item.failure = result
		}
		close(item.done)
		item.done, item.askedAt = nil, ended // keeps the item until the waiting requests have the result
		item.publish(result)
	}
	return ended.Sub(began)
}

// render returns the JSON of view, which it makes once for each variant.
func (s *snapshot) render(variant int, view func() (any, error)) (*renderedAnswer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.answers[variant]; a != nil {
		return a, nil
	}
	v, err := view()
	if err != nil {
		return nil, err
	}
	body, err := marshalLine(v)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(body)
	a := &renderedAnswer{body: body, etag: `"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`}
	if s.answers == nil {
		s.answers = make(map[int]*renderedAnswer)
	}
	if len(s.answers) < answersMax {
		s.answers[variant] = a
	}
	return a, nil
}

// saleSubscriber gets the updates of a sale.
type saleSubscriber struct {
	// updates takes the latest update. One that was not received is replaced.
	updates chan saleUpdate
}

// subscribe adds a subscriber of a sale, to which it sends what is known. The caller unsubscribes in the end.
func (f *feed) subscribe(sale uuid.UUID) (*saleSubscriber, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	item, err := f.item(sale)
	if err != nil {
		return nil, err
	}
	sub := &saleSubscriber{updates: make(chan saleUpdate, 1)}
	if len(item.subscribers) == 0 {
		item.sent = nil
	} else if item.sent != nil {
		sub.updates <- saleUpdate{data: item.sent}
	}
	item.subscribers[sub] = struct{}{}
	item.askedAt = time.Now()
	f.scheduleIfDue(item, f.changedAt)
	if last := cmp.Or(item.failure, item.latest); item.sent == nil && item.done == nil && last != nil {
		item.publish(last)
	}
	return sub, nil
}

func (f *feed) unsubscribe(sale uuid.UUID, sub *saleSubscriber) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.items[sale].subscribers, sub) // an item with subscribers is never forgotten
}

// publish sends the result of a query to the subscribers. It does not block. The feed's mu is held.
func (i *feedItem) publish(result *snapshot) {
	if len(i.subscribers) > 0 {
		i.send(newSaleUpdate(result))
	}
}

// send sends an update, unless the subscribers have it.
func (i *feedItem) send(update saleUpdate) {
	switch {
	case update.err == nil && bytes.Equal(update.data, i.sent):
		return
	case update.err == nil:
		i.sent = update.data
	case i.sent != nil && !errors.Is(update.err, reservation.ErrSaleNotFound):
		return // a server does not answer: the last update still holds
	}
	for sub := range i.subscribers {
		select {
		case <-sub.updates: // an earlier update that was not received
		default:
		}
		sub.updates <- update // does not block: only send and subscribe send, under mu
	}
}
