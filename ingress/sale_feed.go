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
	lookEvery = 500 * time.Millisecond
	// trustedFor is how old an answer may be: as long as an operator's change may take to be in force.
	trustedFor = time.Second
	// boardTimeout bounds one look.
	boardTimeout = 2 * time.Second
	// slowLook is when fewer things are looked at together next time.
	slowLook = lookEvery / 4
	// fewTogether is how many things are looked at together at first.
	fewTogether = 50
	// answersMax bounds the answers of one sight that are kept: pages of other lengths.
	answersMax = 4
	// boardTick is how often a board sees what is watched, and what it may forget.
	boardTick = lookEvery / 5
	// unaskedFor is how long something is kept that nobody asks for. What was seen of it is too old then to be an answer,
	// and who asks for many things keeps others out for so long.
	unaskedFor = trustedFor
)

// board answers from memory what everybody may know: it looks once for all who ask, twice a second at most, and at many
// things together. It has one look under way at a time, and remembers a bounded number of things. Those who ask
// wait only if what is remembered is older than trustedFor. It is safe for concurrent use.
type board struct {
	// look looks at the things with these keys. What is not in its answer does not exist. Its error is about all of them.
	look func(ctx context.Context, keys []uuid.UUID) (map[uuid.UUID][]reservation.Counted, error)
	// together bounds the things of one look, and most those that are remembered.
	together, most int

	mu     sync.Mutex
	things map[uuid.UUID]*thing
	due    []*thing
	// changedAt is when an operator last changed something here: what was seen before is not shown any more.
	changedAt time.Time

	wake  chan struct{}
	ended <-chan struct{}
}

// thing is something that is asked for, or watched.
type thing struct {
	key uuid.UUID
	// seen is the last look that succeeded, and failed the last one if it did not.
	seen, failed *sight
	// asked is when somebody asked for it last, or had the answer.
	asked time.Time
	// done is closed when the look is over for which the thing is due, or which is under way; else it is nil.
	done    chan struct{}
	viewers map[*viewer]struct{}
	// told is what the viewers were told last; nil if that was nothing.
	told []byte
}

// sight is what a look has found.
type sight struct {
	began, ended time.Time
	sales        []reservation.Counted
	err          error

	mu      sync.Mutex
	answers map[int]*publicAnswer
}

// publicAnswer is JSON for everybody.
type publicAnswer struct {
	body []byte
	etag string
}

func startBoard(b *background, together, most int, look func(context.Context, []uuid.UUID) (map[uuid.UUID][]reservation.Counted, error)) *board {
	started := &board{
		look: look, together: together, most: most,
		things: make(map[uuid.UUID]*thing), wake: make(chan struct{}, 1), ended: b.ctx.Done(),
	}
	b.start(started.run)
	return started
}

// ask returns what was seen of a thing a moment ago, or is seen now.
func (b *board) ask(ctx context.Context, key uuid.UUID) (*sight, error) {
	since := time.Now().Add(-trustedFor)
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
func (b *board) recall(key uuid.UUID, since time.Time) (seen *sight, done <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, err := b.find(key)
	if err != nil {
		return nil, nil, err
	}
	t.asked = time.Now()
	if since.Before(b.changedAt) {
		since = b.changedAt
	}
	b.lookIfDue(t, since)
	if t.seen != nil && !t.seen.began.Before(since) {
		return t.seen, nil, nil
	}
	if t.failed != nil && !t.failed.began.Before(since) && time.Since(t.failed.ended) < lookEvery {
		return t.failed, nil, nil
	}
	return nil, t.done, nil
}

// find returns the thing with the key; it begins to remember it if there is room. mu is held.
func (b *board) find(key uuid.UUID) (*thing, error) {
	t := b.things[key]
	if t == nil {
		if len(b.things) >= b.most {
			return nil, problemOverloaded
		}
		t = &thing{key: key, viewers: make(map[*viewer]struct{})}
		b.things[key] = t
	}
	return t, nil
}

// lookIfDue has the thing looked at, unless that was done less than lookEvery ago, and since then. mu is held.
func (b *board) lookIfDue(t *thing, since time.Time) {
	for _, last := range []*sight{t.seen, t.failed} {
		if last != nil && !last.began.Before(since) && (time.Since(last.began) < lookEvery || time.Since(last.ended) < last.ended.Sub(last.began)) {
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
func (b *board) changed() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changedAt = time.Now()
}

// run looks until ctx ends.
func (b *board) run(ctx context.Context) {
	tick := time.NewTicker(boardTick)
	defer tick.Stop()
	for together := min(b.together, fewTogether); ; {
		select {
		case <-b.wake:
		case <-tick.C:
			b.tidy()
		case <-ctx.Done():
			return
		}
		for due := b.take(together); len(due) > 0 && ctx.Err() == nil; due = b.take(together) {
			if b.lookAt(ctx, due) > slowLook {
				together = max(1, len(due)/2)
			} else {
				together = min(b.together, 2*together)
			}
		}
	}
}

// tidy has looked at what is watched, and forgets what nobody asks for.
func (b *board) tidy() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, t := range b.things {
		switch {
		case len(t.viewers) > 0:
			b.lookIfDue(t, b.changedAt)
		case t.done != nil:
		case time.Since(t.asked) > unaskedFor, t.seen != nil && t.seen.err != nil && time.Since(t.seen.began) > lookEvery:
			delete(b.things, key)
		}
	}
}

func (b *board) take(most int) []*thing {
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
func (b *board) lookAt(ctx context.Context, due []*thing) time.Duration {
	keys := make([]uuid.UUID, len(due))
	for i, t := range due {
		keys[i] = t.key
	}
	limited, cancel := context.WithTimeout(ctx, boardTimeout)
	defer cancel()
	began := time.Now()
	found, err := b.look(limited, keys)
	ended := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range due {
		s := &sight{began: began, ended: ended, err: err}
		if err == nil {
			if s.sales = found[t.key]; s.sales == nil {
				s.err = reservation.ErrSaleNotFound
			}
			t.seen, t.failed = s, nil
		} else {
			t.failed = s
		}
		close(t.done)
		t.done, t.asked = nil, ended // it is not forgotten before those who wait have seen it
		t.tell(s)
	}
	return ended.Sub(began)
}

// answer is the JSON of what render makes of the sight, made once for each n.
func (s *sight) answer(n int, render func() (any, error)) (*publicAnswer, error) {
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
	a := &publicAnswer{body: body, etag: `"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`}
	if s.answers == nil {
		s.answers = make(map[int]*publicAnswer)
	}
	if len(s.answers) < answersMax {
		s.answers[n] = a
	}
	return a, nil
}
