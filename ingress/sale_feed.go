package ingress

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"sync"
	"time"

	"github.com/google/uuid"

	"stampede/reservation"
)

const (
	// lookEvery is how often something is looked at that somebody asks for or watches, at most.
	refreshInterval = 500 * time.Millisecond
	// trustedFor is how old an answer may be: as long as an operator's change may take to be in force.
	answerMaxAge = time.Second
	// boardTimeout bounds one look.
	refreshTimeout = 2 * time.Second
	// slowLook is when fewer things are looked at together next time.
	slowRefresh = refreshInterval / 4
	// fewTogether is how many things are looked at together at first.
	firstBatch = 50
	// answersMax bounds the answers of one sight that are kept: pages of other lengths.
	answersMax = 4
	// boardTick is how often a board sees what is watched, and what it may forget.
	feedTick = refreshInterval / 5
	// unaskedFor is how long something is kept that nobody asks for. What was seen of it is too old then to be an answer,
	// and who asks for many things keeps others out for so long.
	forgetAfter = answerMaxAge
)

// board answers from memory what everybody may know: it looks once for all who ask, twice a second at most, and at many
// things together. It has one look under way at a time, and remembers a bounded number of things. Those who ask
// wait only if what is remembered is older than trustedFor. It is safe for concurrent use.
type feed struct {
	// look looks at the things with these keys. What is not in its answer does not exist. Its error is about all of them.
	query func(ctx context.Context, keys []uuid.UUID) (map[uuid.UUID][]reservation.Counted, error)
	// together bounds the things of one look, and most those that are remembered.
	batchMax, itemsMax int

	mu    sync.Mutex
	items map[uuid.UUID]*feedItem
	due   []*feedItem
	// changedAt is when an operator last changed something here: what was seen before is not shown any more.
	changedAt time.Time

	wake  chan struct{}
	ended <-chan struct{}
}

// thing is something that is asked for, or watched.
type feedItem struct {
	key uuid.UUID
	// seen is the last look that succeeded, and failed the last one if it did not.
	latest, failure *snapshot
	// asked is when somebody asked for it last, or had the answer.
	askedAt time.Time
	// done is closed when the look is over for which the thing is due, or which is under way; else it is nil.
	done        chan struct{}
	subscribers map[*subscriber]struct{}
	// told is what the viewers were told last; nil if that was nothing.
	sent []byte
}

// sight is what a look has found.
type snapshot struct {
	began, ended time.Time
	sales        []reservation.Counted
	err          error

	mu      sync.Mutex
	answers map[int]*renderedAnswer
}

// publicAnswer is JSON for everybody.
type renderedAnswer struct {
	body []byte
	etag string
}

func startFeed(b *background, together, most int, look func(context.Context, []uuid.UUID) (map[uuid.UUID][]reservation.Counted, error)) *feed {
	started := &feed{
		query: look, batchMax: together, itemsMax: most,
		items: make(map[uuid.UUID]*feedItem), wake: make(chan struct{}, 1), ended: b.ctx.Done(),
	}
	b.start(started.run)
	return started
}

// ask returns what was seen of a thing a moment ago, or is seen now.
func (b *feed) get(ctx context.Context, key uuid.UUID) (*snapshot, error) {
	since := time.Now().Add(-answerMaxAge)
	for {
		seen, done, err := b.recall(key, since)
		switch {
		case err != nil:
			return nil, err
		case seen != nil:
			return seen, seen.err
		}
		select {
		case <-done:
		case <-ctx.Done():
			return nil, problemUnavailable
		case <-b.ended:
			return nil, problemOverloaded
		}
	}
}

// recall returns what was seen by a look that began since then, or what closes when the next look is over.
func (b *feed) recall(key uuid.UUID, since time.Time) (seen *snapshot, done <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, err := b.item(key)
	if err != nil {
		return nil, nil, err
	}
	t.askedAt = time.Now()
	if since.Before(b.changedAt) {
		since = b.changedAt
	}
	b.scheduleIfDue(t, since)
	if t.latest != nil && !t.latest.began.Before(since) {
		return t.latest, nil, nil
	}
	if t.failure != nil && !t.failure.began.Before(since) && time.Since(t.failure.ended) < refreshInterval {
		return t.failure, nil, nil
	}
	return nil, t.done, nil
}

// find returns the thing with the key; it begins to remember it if there is room. mu is held.
func (b *feed) item(key uuid.UUID) (*feedItem, error) {
	t := b.items[key]
	if t == nil {
		if len(b.items) >= b.itemsMax {
			return nil, problemOverloaded
		}
		t = &feedItem{key: key, subscribers: make(map[*subscriber]struct{})}
		b.items[key] = t
	}
	return t, nil
}

// lookIfDue has the thing looked at, unless that was done less than lookEvery ago, and since then. mu is held.
func (b *feed) scheduleIfDue(t *feedItem, since time.Time) {
	for _, last := range []*snapshot{t.latest, t.failure} {
		if last != nil && !last.began.Before(since) && (time.Since(last.began) < refreshInterval || time.Since(last.ended) < last.ended.Sub(last.began)) {
			return
		}
	}
	if t.done == nil {
		t.done = make(chan struct{})
		b.due = append(b.due, t)
		select {
		case b.wake <- struct{}{}:
		default:
		}
	}
}

// changed tells that what was seen until now is not shown any more.
func (b *feed) invalidate() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changedAt = time.Now()
}

// run looks until ctx ends.
func (b *feed) run(ctx context.Context) {
	tick := time.NewTicker(feedTick)
	defer tick.Stop()
	for together := min(b.batchMax, firstBatch); ; {
		select {
		case <-b.wake:
		case <-tick.C:
			b.sweep()
		case <-ctx.Done():
			return
		}
		for due := b.takeDue(together); len(due) > 0 && ctx.Err() == nil; due = b.takeDue(together) {
			if b.refresh(ctx, due) > slowRefresh {
				together = max(1, len(due)/2)
			} else {
				together = min(b.batchMax, 2*together)
			}
		}
	}
}

// tidy has looked at what is watched, and forgets what nobody asks for.
func (b *feed) sweep() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, t := range b.items {
		switch {
		case len(t.subscribers) > 0:
			b.scheduleIfDue(t, b.changedAt)
		case t.done != nil:
		case time.Since(t.askedAt) > forgetAfter, t.latest != nil && t.latest.err != nil && time.Since(t.latest.began) > refreshInterval:
			delete(b.items, key)
		}
	}
}

func (b *feed) takeDue(most int) []*feedItem {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := min(most, len(b.due))
	taken := b.due[:n:n]
	if b.due = b.due[n:]; len(b.due) == 0 {
		b.due = nil
	}
	return taken
}

// lookAt looks at the things together, and returns how long that took.
func (b *feed) refresh(ctx context.Context, due []*feedItem) time.Duration {
	keys := make([]uuid.UUID, len(due))
	for i, t := range due {
		keys[i] = t.key
	}
	limited, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	began := time.Now()
	found, err := b.query(limited, keys)
	ended := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range due {
		s := &snapshot{began: began, ended: ended, err: err}
		if err == nil {
			if s.sales = found[t.key]; s.sales == nil {
				s.err = reservation.ErrSaleNotFound
			}
			t.latest, t.failure = s, nil
		} else {
			t.failure = s
		}
		close(t.done)
		t.done, t.askedAt = nil, ended // it is not forgotten before those who wait have seen it
		t.publish(s)
	}
	return ended.Sub(began)
}

// answer is the JSON of what render makes of the sight, made once for each n.
func (s *snapshot) render(n int, render func() (any, error)) (*renderedAnswer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.answers[n]; a != nil {
		return a, nil
	}
	v, err := render()
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
		s.answers[n] = a
	}
	return a, nil
}
