package designs

import (
	"context"
	"sync"

	"stampede/bench/front"
)

// mutex is the second step of tutorials: synchronized, a ReentrantLock, or in Go a sync.Mutex around
// the check and the set.
//
// What it gets right: one process sells exactly what is there, and needs nobody else's help for it.
//
// How it fails: the mutex is in the memory of one process. Start a second one, for more speed or for
// a release without a pause, and each is alone with its own mutex: they oversell as if there was
// none. And all buyers stand in one line, for two round trips each, whatever they buy.
//
// The lock covers what must not be mixed and nothing else: the order is written to Postgres after it is given
// back. Tutorials that hold it over their database transaction sell a fraction of that.
type mutex struct {
	*checkSet
	mu sync.Mutex
}

func newMutex(ctx context.Context, b front.Backend) (front.Design, error) {
	unlocked, err := openCheckSet(ctx, b)
	if err != nil {
		return nil, err
	}
	return &mutex{checkSet: unlocked}, nil
}

// Buy implements front.Design.
func (d *mutex) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	if refusal, err := d.take(ctx, o); refusal != none || err != nil {
		return refusal, err
	}
	return d.confirm(ctx, o)
}

func (d *mutex) take(ctx context.Context, o front.Order) (front.Verdict, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.checkSet.take(ctx, o)
}
