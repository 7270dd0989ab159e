package reservation

import (
	"context"
	"sync"
	"time"
)

// shared lets concurrent callers share readings of a value. One reading is in progress at a time. The zero value is
// ready; it is safe for concurrent use.
type shared[T any] struct {
	mu   sync.Mutex
	last *reading[T] // the last one started
	good *reading[T] // the last successful one
}

// reading is one reading of a value, in progress or done.
type reading[T any] struct {
	begun time.Time
	done  chan struct{}
	// The others are set when done is closed.
	value T
	err   error
}

// latest returns the latest value that was read, and false if there is none.
func (x *shared[T]) latest() (value T, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.good == nil {
		return value, false
	}
	return x.good.value, true
}

// since returns a value whose reading began at that time or later; a time in the future counts as now. A new reading
// is one call of read in the background of the store, within the timeout. Waiting callers share one reading and its
// failure, and each waits no longer than its own ctx.
func (x *shared[T]) since(
	ctx context.Context, s *Store, earliest time.Time, timeout time.Duration, read func(context.Context) (T, error),
) (value T, err error) {
	if now := time.Now(); earliest.After(now) {
		earliest = now
	}
	for {
		r := x.join(s, earliest, timeout, read)
		select {
		case <-r.done:
		case <-ctx.Done():
			return value, ctx.Err()
		}
		if !r.begun.Before(earliest) {
			return r.value, r.err
		}
	}
}

// join returns the reading in progress, or the latest successful one if it is recent enough; otherwise it starts one.
func (x *shared[T]) join(
	s *Store, earliest time.Time, timeout time.Duration, read func(context.Context) (T, error),
) *reading[T] {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.good != nil && !x.good.begun.Before(earliest) {
		return x.good
	}
	if x.last != nil {
		select {
		case <-x.last.done:
		default:
			return x.last
		}
	}
	r := &reading[T]{begun: time.Now(), done: make(chan struct{})}
	x.last = r
	started := s.goBackground(func() {
		defer close(r.done)
		ctx, cancel := context.WithTimeout(s.ctx, timeout)
		defer cancel()
		r.value, r.err = read(ctx)
		if s.ctx.Err() != nil {
			r.err = errClosed
		}
		if r.err == nil {
			x.mu.Lock()
			x.good = r
			x.mu.Unlock()
		}
	})
	if !started {
		r.err = errClosed
		close(r.done)
	}
	return r
}
