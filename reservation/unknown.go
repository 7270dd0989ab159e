package reservation

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
)

const (
	// unknownTrust is how long a missing sale is not looked up again, even if it is published
	// meanwhile.
	unknownTrust = 250 * time.Millisecond
	// unknownMax bounds how many missing sales are cached: about twice as many, of 24 bytes each.
	unknownMax = 4096
)

// saleLooks are the lookups of sales without a queue: one at a time per sale, and none for a sale
// that was missing less than unknownTrust ago. The zero value is ready; it is safe for concurrent use.
type saleLooks struct {
	mu         sync.Mutex
	inProgress map[uuid.UUID]*saleLook
	// young and old are the start times of lookups that found no sale. A full young becomes old.
	young, old map[uuid.UUID]time.Time
}

// saleLook is one lookup, whose place and err are set when done is closed.
type saleLook struct {
	done  chan struct{}
	place place
	err   error
}

// lookOnce finds a sale in Redis for a buyer, as find does.
func (s *Store) lookOnce(ctx context.Context, sale uuid.UUID) (place, error) {
	if !mayExist(sale, time.Now()) {
		return place{}, ErrSaleNotFound
	}
	look := s.joinLook(sale)
	select {
	case <-look.done:
		return look.place, look.err
	case <-ctx.Done():
		return place{}, ctx.Err()
	}
}

var unknownSale = func() *saleLook {
	look := &saleLook{done: make(chan struct{}), err: ErrSaleNotFound}
	close(look.done)
	return look
}()

// joinLook returns the lookup of a sale in progress, or unknownSale if the sale was just found
// missing, or begins a lookup.
func (s *Store) joinLook(sale uuid.UUID) *saleLook {
	x := &s.looks
	x.mu.Lock()
	defer x.mu.Unlock()
	if look := x.inProgress[sale]; look != nil {
		return look
	}
	began := time.Now()
	for _, seen := range []map[uuid.UUID]time.Time{x.young, x.old} {
		if at, there := seen[sale]; there && began.Sub(at) < unknownTrust {
			return unknownSale
		}
	}
	look := &saleLook{done: make(chan struct{})}
	if x.inProgress == nil {
		x.inProgress = make(map[uuid.UUID]*saleLook)
	}
	x.inProgress[sale] = look
	started := s.goBackground(func() {
		ctx, cancel := context.WithTimeout(s.ctx, s.options.CallTimeout)
		defer cancel()
		look.place, look.err = s.find(ctx, sale)
		x.end(sale, look, began)
	})
	if !started {
		look.err = errClosed
		delete(x.inProgress, sale)
		close(look.done)
	}
	return look
}

// end publishes the result of a lookup to its waiters.
func (x *saleLooks) end(sale uuid.UUID, look *saleLook, began time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.inProgress, sale)
	if errors.Is(look.err, ErrSaleNotFound) {
		if x.young == nil || len(x.young) >= unknownMax {
			x.young, x.old = make(map[uuid.UUID]time.Time), x.young
		}
		x.young[sale] = began
	}
	close(look.done)
}
