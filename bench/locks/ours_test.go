package locks

import (
	"context"
	"errors"

	"stampede/lock"
)

var (
	// stampede/lock without options: the watchdog renews the lease.
	watched = library{"stampede", openOurs()}
	// The same with a lease that is not renewed, as redsync and redislock have.
	unwatched = library{"stampede-explicit-lease", openOurs(lock.For(leaseTime))}
)

func openOurs(options ...lock.AcquireOption) func(string) (client, error) {
	return func(url string) (client, error) {
		_, c, err := openLocker(url, nil, options...)
		return c, err
	}
}

// openLocker opens a Locker with its own connection pool. The client closes both.
func openLocker(url string, settings []lock.Option, options ...lock.AcquireOption) (*lock.Locker, client, error) {
	rdb, err := openRedis(url)
	if err != nil {
		return nil, client{}, err
	}
	locker := lock.New(rdb, settings...)
	acquire := func(ctx context.Context, key string) (func() error, error) {
		lease, err := locker.Acquire(ctx, key, options...)
		if err != nil {
			return nil, err
		}
		return func() error { return lease.Release(context.Background()) }, nil
	}
	return locker, client{acquire, func() error {
		return errors.Join(locker.Close(context.Background()), rdb.Close())
	}}, nil
}
