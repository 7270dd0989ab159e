package locks

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

// leaseTime is the lease of all locks: the default of Redisson and of stampede/lock. It is longer
// than the comparisons of latencies, so that no renewal disturbs them.
const leaseTime = 30 * time.Second

// library is a lock with its settings.
type library struct {
	name string
	open func(url string) (client, error)
}

// client is a library as one process uses it, with its own connections.
type client struct {
	// acquire waits for the lock of a key and returns a function that releases it.
	acquire func(ctx context.Context, key string) (release func() error, err error)
	close   func() error
}

// shortDelay is a second setting for pollers, about the shortest that a service would choose:
// redislock's documentation recommends at least 16 ms (for its exponential back-off), and redsync's
// recommends nothing. It is random, as redsync's default is: with a fixed delay many waiters
// synchronize and find the lock later.
func shortDelay() time.Duration { return 8*time.Millisecond + rand.N(16*time.Millisecond) }

// randomDelay is a strategy of redislock.
type randomDelay func() time.Duration

// NextBackoff implements redislock.RetryStrategy.
func (d randomDelay) NextBackoff() time.Duration { return d() }

var (
	// redsync as in its README, with one pool of go-redis. Its default delay is random, 50 to 250
	// ms. Attempts are unlimited because the other libraries do not limit them; the default is 32.
	redsyncDefault = library{"redsync", openRedsync()}
	redsyncShort   = library{
		"redsync-16ms",
		openRedsync(redsync.WithRetryDelayFunc(func(int) time.Duration { return shortDelay() })),
	}

	// redislock as in its examples: retries every 100 ms.
	redislockDefault = library{"redislock", openRedislock(redislock.LinearBackoff(100 * time.Millisecond))}
	redislockShort   = library{"redislock-16ms", openRedislock(randomDelay(shortDelay))}

	// rueidislock as in its README for a single Redis ≥ 7.0.5, woken by client-side caching. It
	// renews, as stampede/lock does without an explicit lease.
	rueidislock1 = library{"rueidislock", openRueidislock(leaseTime)}
)

// contended are the candidates for one lock with many waiters.
var contended = []library{watched, rueidislock1, redsyncDefault, redsyncShort, redislockDefault, redislockShort}

func openRedsync(options ...redsync.Option) func(string) (client, error) {
	options = append([]redsync.Option{redsync.WithExpiry(leaseTime), redsync.WithTries(math.MaxInt)}, options...)
	return func(url string) (client, error) {
		rdb, err := openRedis(url)
		if err != nil {
			return client{}, err
		}
		rs := redsync.New(goredis.NewPool(rdb))
		acquire := func(ctx context.Context, key string) (func() error, error) {
			mutex := rs.NewMutex(key, options...)
			if err := mutex.LockContext(ctx); err != nil {
				return nil, err
			}
			return func() error {
				if stillHeld, err := mutex.UnlockContext(context.Background()); err != nil {
					return err
				} else if !stillHeld {
					return errors.New("redsync: no longer held")
				}
				return nil
			}, nil
		}
		return client{acquire, rdb.Close}, nil
	}
}

func openRedislock(strategy redislock.RetryStrategy) func(string) (client, error) {
	options := &redislock.Options{RetryStrategy: strategy} // stateless, so shared
	return func(url string) (client, error) {
		rdb, err := openRedis(url)
		if err != nil {
			return client{}, err
		}
		locker := redislock.New(rdb)
		acquire := func(ctx context.Context, key string) (func() error, error) {
			lock, err := locker.Obtain(ctx, key, leaseTime, options)
			if err != nil {
				return nil, err
			}
			return func() error { return lock.Release(context.Background()) }, nil
		}
		return client{acquire, rdb.Close}, nil
	}
}

func openRueidislock(lease time.Duration) func(string) (client, error) {
	return func(url string) (client, error) {
		options, err := rueidis.ParseURL(url)
		if err != nil {
			return client{}, err
		}
		locker, err := rueidislock.NewLocker(rueidislock.LockerOption{
			ClientOption:   options,
			KeyMajority:    1,
			NoLoopTracking: true,
			KeyValidity:    lease,
			ExtendInterval: lease / 3, // as the other libraries that renew; its default is half
			// With one key there is no next one to try. The default of 20 ms would make a slow
			// answer of Redis a failure, after which it waits for a message that is not sent.
			TryNextAfter: time.Second,
		})
		if err != nil {
			return client{}, err
		}
		acquire := func(ctx context.Context, key string) (func() error, error) {
			holding, cancel, err := locker.WithContext(ctx, key)
			if err != nil {
				return nil, err
			}
			return func() error {
				err := holding.Err() // reports a loss; cancel sets an error in any case
				cancel()
				return err
			}, nil
		}
		return client{acquire, func() error {
			locker.Close()
			return nil
		}}, nil
	}
}

// openRedis opens a client of go-redis with default settings.
func openRedis(url string) (*redis.Client, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	return redis.NewClient(options), nil
}
