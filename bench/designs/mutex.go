package designs

import (
	"context"
	"sync"

	"stampede/bench/front"
)

// mutex is the second step of tutorials: synchronized, a ReentrantLock, or in Go a sync.Mutex around
// the check and the write.
//
// What it gets right: one process sells exactly its stock, without any other system for it.
//
// How it fails: the mutex is in the memory of one process. With a second process, for more speed or for
// a release without downtime, each has its own mutex: they oversell as if there were none. And all
// buyers of all sales wait in one queue, for two round trips each.
//
// The lock covers only the read and the write of the stock: the order is written to Postgres after it
// is released. Tutorials that hold it during their database transaction sell a fraction of that.
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
	return d.sell(ctx, o, d.take)
}

func (d *mutex) take(ctx context.Context, o front.Order) (front.Verdict, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.checkSet.take(ctx, o)
}
