package locks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	"github.com/stretchr/testify/require"

	"stampede/bench/designs/redisson"
	"stampede/bench/rig"
	"stampede/lock"
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

// redissonClasses is the class path of the program, empty if it cannot be built.
var redissonClasses = sync.OnceValue(func() string {
	classPath, err := redisson.Compile()
	if err != nil {
		fmt.Fprintf(os.Stderr, "NOT COMPARED WITH REDISSON: %v\n", err)
	}
	return classPath
})

// javaProcess is the Java program, connected to a server. It measures the same two calls with
// System.nanoTime.
type javaProcess struct {
	*redisson.Redisson
	warm bool
}

// withRedisson adds Redisson to the candidates if Java and Maven are installed.
func withRedisson(candidates []rig.Candidate, measure func(b *testing.B, v rig.Values)) []rig.Candidate {
	if redissonClasses() == "" {
		return candidates
	}
	return append(candidates, rig.Candidate{Name: "redisson", Turn: func(b *testing.B, _ int) rig.Values {
		v := rig.Values{}
		measure(b, v)
		return v
	}})
}

// java starts the program on first use.
func (s *server) java(b *testing.B) *javaProcess {
	b.Helper()
	if s.redisson == nil {
		s.redisson = startRedisson(b, redissonClasses(), s.url)
	}
	if r := s.redisson; b.N > 1 && !r.warm { // a smoke test may run cold Java
		r.run(b, rig.Values{}, "", "bench-uncontended "+newKey()+" 4s")
		r.run(b, rig.Values{}, "", "bench-contended "+newKey()+" 32 300 1000")
		r.warm = true
	}
	return s.redisson
}

func startRedisson(b *testing.B, classes, url string) *javaProcess {
	b.Helper()
	java, err := redisson.Start(classes, url, leaseTime)
	require.NoError(b, err)
	rig.AtExit(java.Stop)
	return &javaProcess{Redisson: java}
}

// run runs one command of the Java program.
func (r *javaProcess) run(b *testing.B, v rig.Values, what, command string) {
	b.Helper()
	line, err := r.Ask(b.Context(), command)
	require.NoError(b, err)
	var answer struct {
		MedianNS time.Duration `json:"median_ns"`
		P99NS    time.Duration `json:"p99_ns"`
	}
	require.NoError(b, json.Unmarshal([]byte(line), &answer), "Redisson answers %q: %q", command, line)
	require.NotZero(b, answer.MedianNS, line)
	put(v, what, []time.Duration{answer.MedianNS})
	v[what+p99] = percentile([]time.Duration{answer.P99NS}, 99)
}

const (
	// A holder keeps the lock for a random time in this range, so that pollers do not synchronize with
	// the releases.
	holdMin, holdMax = time.Millisecond, 5 * time.Millisecond
	// stallTimeout ends a benchmark in which no waiter gets the lock.
	stallTimeout = 30 * time.Second
)

// The two ways to share clients, and a figure beside the times.
const (
	oneClient  = "one client"
	ownClients = "own clients"
	commands   = ", commands"
)

// BenchmarkHandover measures how long a released lock takes to reach the next of 32 waiters: from just
// before the call of release until the next acquire returns. A participant that released the lock waits
// again once the next one has it, so that it cannot take it back immediately and 32 always wait. The
// participants share a client, or each has its own, as if in another process.
func BenchmarkHandover(b *testing.B) {
	s := serverWith(b, inMemory)
	waiters := rig.Scale(b, 32, 8)
	turns, times := rig.Scale(b, 3, 1), rig.Scale(b, 100, 10)
	measure := func(v rig.Values, mode string, handOvers func()) {
		before := s.work(b)
		handOvers()
		v[mode+commands] = float64(s.work(b).since(before).commands) / float64(times)
	}
	var candidates []rig.Candidate
	for _, l := range contended {
		crowds := map[string]*crowd{}
		for mode, clients := range map[string]int{oneClient: 1, ownClients: waiters + 1} {
			c := &crowd{b: b, name: l.name, events: make(chan event, 4*waiters)}
			for i := range waiters + 1 {
				if i < clients {
					c.clients = append(c.clients, s.open(b, l))
				} else {
					c.clients = append(c.clients, c.clients[0])
				}
			}
			crowds[mode] = c
		}
		candidates = append(candidates, rig.Candidate{Name: l.name, Turn: func(*testing.B, int) rig.Values {
			v := rig.Values{}
			for mode, c := range crowds {
				measure(v, mode, func() { put(v, mode, c.handOvers(times)) })
			}
			return v
		}})
	}
	// Its waiters are threads that share a client: 33 Java processes would saturate the machine.
	candidates = withRedisson(candidates, func(b *testing.B, v rig.Values) {
		java := s.java(b)
		measure(v, oneClient, func() {
			java.run(b, v, oneClient, fmt.Sprintf("bench-contended %s %d %d %d", newKey(), waiters, times,
				((holdMin+holdMax)/2).Microseconds()))
		})
	})
	results := rig.CompareInTurns(b, turns, candidates...)
	table := rig.Table{
		Title: "Hand-over",
		Note: fmt.Sprintf("From just before the release until the next acquire returns, with %d waiters: goroutines (in "+
			"Redisson: threads) that share a client, and with a client each, as if in other processes. The median, and its "+
			"ratio to the first (least–greatest over rounds); commands of Redis for each hand-over. The lock is held for %v "+
			"to %v; persistence is off. %d rounds of %d hand-overs.", waiters, holdMin, holdMax, b.N, turns*times),
		Head: []string{"", "shared client", "p99", "commands", "own clients", "p99", "commands"},
	}
	for _, c := range candidates {
		row := []string{c.Name}
		for _, mode := range []string{oneClient, ownClients} {
			row = append(row, compared(results, c.Name, watched.name, mode+p50),
				results.Of(c.Name, mode+p99).FormatMedian(micros), results.Of(c.Name, mode+commands).FormatMedian(rig.Count))
		}
		table.Rows = append(table.Rows, row)
	}
	rig.Put(table)
}

// crowd passes one lock around among waiters + 1 participants.
type crowd struct {
	b       *testing.B
	name    string
	clients []client // of each participant
	events  chan event

	// released is when the last holder began its release, and holders is how many hold the lock.
	released atomic.Pointer[time.Time]
	holders  atomic.Int32
}

// event is what a participant did.
type event struct {
	who  int
	did  string        // got or ended, or the reason of a failure
	took time.Duration // from the release until it got the lock
}

const (
	got   = "got"
	ended = "ended"
)

// handOvers measures hand-overs, beginning with the release of the first holder.
func (c *crowd) handOvers(times int) []time.Duration {
	key := newKey()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	again := make([]chan struct{}, len(c.clients))
	join := func(i int) {
		again[i] = make(chan struct{}, 1)
		go c.participate(ctx, i, key, again[i])
	}
	join(0)
	holder := c.next(got).who
	// The waiters start spread over the longest delay of the pollers: if all started at the same time,
	// they would poll at the same time.
	arrivals := make([]time.Duration, len(c.clients)-1)
	for i := range arrivals {
		arrivals[i] = rand.N(time.Duration(rig.Scale(c.b, 250, 25)) * time.Millisecond)
	}
	slices.Sort(arrivals)
	began := time.Now()
	for i, arrival := range arrivals {
		<-time.After(time.Until(began.Add(arrival)))
		join(i + 1)
	}
	<-time.After(20 * time.Millisecond) // the last one is waiting
	again[0] <- struct{}{}

	took := make([]time.Duration, times)
	for i := range took {
		next := c.next(got)
		took[i] = next.took
		again[holder] <- struct{}{}
		holder = next.who
	}
	stop()
	for range c.clients {
		for c.next(got, ended).did != ended {
		}
	}
	return took
}

// next waits for one of these events.
func (c *crowd) next(did ...string) event {
	c.b.Helper()
	select {
	case e := <-c.events:
		require.Contains(c.b, did, e.did, c.name)
		return e
	case <-time.After(stallTimeout):
		c.b.Fatalf("%s: none of %v within %v", c.name, did, stallTimeout)
		panic("not reached")
	}
}

// participate acquires, holds and releases the lock, once more for each signal, until ctx is done. The
// first participant holds it until the signal.
func (c *crowd) participate(ctx context.Context, who int, key string, again <-chan struct{}) {
	emit := func(did string, took time.Duration) { c.events <- event{who, did, took} }
	defer func() { emit(ended, 0) }()
	for first := who == 0; ; first = false {
		release, err := c.clients[who].acquire(ctx, key)
		now := time.Now()
		if err != nil {
			if ctx.Err() == nil {
				emit("acquire: "+err.Error(), 0)
			}
			return
		}
		if c.holders.Add(1) > 1 {
			emit("two hold the lock", 0)
			return
		}
		if first {
			emit(got, 0)
			wait(ctx, again)
		} else {
			emit(got, now.Sub(*c.released.Load()))
			wait(ctx, time.After(holdMin+rand.N(holdMax-holdMin)))
		}
		c.holders.Add(-1)
		now = time.Now()
		c.released.Store(&now)
		if err := release(); err != nil && ctx.Err() == nil { // rueidislock's lease ends with ctx
			emit("release: "+err.Error(), 0)
		}
		wait(ctx, again)
		if ctx.Err() != nil {
			return
		}
	}
}

func wait[T any](ctx context.Context, until <-chan T) {
	select {
	case <-until:
	case <-ctx.Done():
	}
}
