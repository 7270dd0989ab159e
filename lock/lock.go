// Package lock is a reentrant lock with a lease in Redis. It speaks the protocol of Redisson's
// RLock, so services in Java and in Go exclude and wake each other on one key.
//
// [Locker.Acquire] waits for a lock and [Locker.TryAcquire] does not. [Locker.AcquireAll] takes
// several locks or none, [Locker.TryEach] takes those of many that are free, and [Locker.Do] holds
// one while a function runs. [Locker.Look] reports the holder. A call with the context of a [Lease]
// reenters the locks of that lease.
//
// A worker of Stampede locks the users of a batch before it writes their orders, so that two
// workers do not do the same work. Orders of users that are busy go to a later batch.
//
// # Guarantees
//
//   - While a lease lasts, the same healthy Redis gives its key to no other owner.
//   - A dead holder blocks a key until its lease ends, and no longer.
//   - A holder learns that it lost a lock: the context of its lease ends, and [Lease.Err] reports
//     the loss from the clock alone, even in a process that was stopped for longer than its lease.
//   - Every acquire that does not reenter gets a larger fencing token than any earlier one of its
//     key.
//   - A script call that is repeated, or arrives up to five minutes after it was given up, makes no
//     lock deeper and leaves none behind.
//   - Only its owner, or ForceRelease, releases a lock. A release reports the locks that were lost.
//
// # What a lock cannot guarantee
//
//   - That a holder which stalls after a check still holds the lock when it writes. The store must
//     compare the token ([Lease.Token]) or a version, also when a value is read in order to be
//     written.
//   - Anything across a failover, or across a restart of a Redis that does not write every command
//     to disk: the locks may be gone while their holders work. [Multi] spreads a lock over several
//     servers.
//
// Use a lock to save double work. Correctness comes from the store: a token that is compared, a
// unique key, a version, a CHECK.
//
// # Reading order
//
// Files in the order in which Acquire runs: lock, acquire, scripts, queue, listener, lease, watchdog. The file multi
// builds on these.
package lock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// Limits of a request.
const (
	// MinLease is the shortest lease. A shorter one could end before its holder has the answer.
	MinLease = 10 * time.Millisecond
	// MaxLease is the longest lease, and so the longest time for which a dead holder blocks a key.
	MaxLease = time.Hour
	// MaxKeys is the most keys that one TryEach may name.
	MaxKeys = 65_536
	// MaxKeysAtOnce is the most keys that one AcquireAll may name: one script call takes them.
	MaxKeysAtOnce = keysPerCall
	// MaxKeyBytes is the longest key.
	MaxKeyBytes = 1024
)

var (
	// ErrInvalid is returned for a key, lease, setting or client that is not allowed. Redis is not
	// called.
	ErrInvalid = errors.New("invalid lock request")
	// ErrBusy is returned by TryAcquire when another owner holds the lock. Acquire and AcquireAll
	// return it when the deadline of their context passes first; that error also wraps
	// context.DeadlineExceeded.
	ErrBusy = errors.New("lock busy")
	// ErrLost means that a lock is no longer held. Lease.Err and the cause of the lease's context
	// report it when the lease has ended or Redis no longer has the lock, and Release reports it
	// for the same reasons. An acquire returns it when a lock to reenter is lost, or when the lease
	// ended before the answer arrived. Errors that wrap it are a *LostError with the keys.
	ErrLost = errors.New("lock lost")
	// ErrReleased is what Err returns after Release, and the cause of the lease's context.
	ErrReleased = errors.New("lock released")
	// ErrClosed is returned by acquires during and after Close. It is the cause of the contexts of
	// the leases that Close released.
	ErrClosed = errors.New("locker closed")
)

// LostError names the locks that were lost. It wraps ErrLost.
type LostError struct {
	Keys []string
}

func (e *LostError) Error() string {
	const shown = 5
	names := strings.Join(e.Keys[:min(shown, len(e.Keys))], ", ")
	if more := len(e.Keys) - shown; more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	return ErrLost.Error() + ": " + names
}

// Unwrap makes errors.Is(err, ErrLost) true.
func (e *LostError) Unwrap() error { return ErrLost }

// Locker takes locks in one Redis. It is safe for concurrent use.
//
// It runs one goroutine while it has leases to watch, and one goroutine with one connection while a
// call waits for a lock (in a Redis Cluster, one for each hash tag that is waited for). They stop
// some seconds after the last lease or waiter, or on Close.
type Locker struct {
	settings
	*lifetime
	clientErr error // every call returns it, if it is set
	scripts   scripts
	watchdog  *watchdog
	waiters   *waiters
	calls     *calls
	leases    map[*Lease]struct{} // not released; guarded by mu
	// closing ends when the latest Close has done its work; guarded by mu.
	closing <-chan struct{}
}

// lifetime is shared by the parts of a Locker. No call to Redis and no function of the user runs
// while mu is held.
type lifetime struct {
	mu sync.Mutex // also guards the state of owners, holds and leases
	// closed is set when running ends, with Close, which waits for tasks.
	closed  bool
	running context.Context
	stop    context.CancelFunc
	tasks   sync.WaitGroup
}

// startTask makes Close wait until tasks.Done, and returns false if the Locker is closed.
func (lt *lifetime) startTask() bool {
	lt.mu.Lock()
	defer lt.mu.Unlock()
	if !lt.closed {
		lt.tasks.Add(1)
	}
	return !lt.closed
}

// spawnTask runs f in a goroutine that Close waits for, unless the Locker is closed.
func (lt *lifetime) spawnTask(f func()) bool {
	if !lt.startTask() {
		return false
	}
	go func() {
		defer lt.tasks.Done()
		f()
	}()
	return true
}

// New returns a Locker. It does not call Redis, and the Locker never closes the client. The client
// is a *redis.Client or a *redis.ClusterClient; with any other type, every call returns ErrInvalid.
//
// The client's ReadTimeout should be shorter than a third of the shortest lease, so that a failed
// renewal can be retried. Set its ContextTimeoutEnabled: without it go-redis waits for an answer
// until ReadTimeout, whatever the deadline of the context is.
//
// In a Redis Cluster, the keys of one call must share a hash tag.
func New(rdb redis.UniversalClient, opts ...Option) *Locker {
	l := &Locker{settings: defaults(), lifetime: &lifetime{}, leases: make(map[*Lease]struct{})}
	for _, opt := range opts {
		opt(&l.settings)
	}
	l.scripts = scripts{rdb: rdb, prefix: l.prefix, vanishing: l.vanishing}
	switch rdb.(type) {
	case *redis.Client:
	case *redis.ClusterClient:
		l.scripts.clustered = true
	default:
		l.clientErr = fmt.Errorf("%w: a client of type %T, want *redis.Client or *redis.ClusterClient", ErrInvalid, rdb)
	}
	l.running, l.stop = context.WithCancel(context.Background())
	l.watchdog = newWatchdog(&l.mu, l.lease.Truncate(time.Millisecond), l.renewRound, l.leasesExpired)
	l.waiters = newWaiters(l.lifetime, l.scripts, l.settings)
	l.calls = &calls{lifetime: l.lifetime, scripts: l.scripts, id: uuid.NewString()}
	return l
}

// closeParallel is how many leases Close releases at the same time.
const closeParallel = 16

// Close releases all leases of the Locker, ends their contexts with the cause ErrClosed, and makes
// waiting acquires return ErrClosed. It returns when that is done, or with the cause of ctx. The
// error names what could not be released; those locks end with their leases. Close may be called
// again.
func (l *Locker) Close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	l.waiters.wakeAll()
	leases := slices.Collect(maps.Keys(l.leases))
	before, closed := l.closing, make(chan struct{})
	l.closing = closed
	l.mu.Unlock()
	l.stop()
	l.watchdog.stop()

	done := make(chan error, 1)
	go func() {
		defer close(closed)
		err := releaseAll(ctx, leases)
		if before != nil {
			<-before // it may still be releasing
		}
		l.tasks.Wait()
		l.watchdog.wait()
		l.calls.releaseAbandonedOnce(ctx)
		done <- err
	}()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("close the locker: %w", err)
	}
	return nil
}

// releaseAll ends all leases and then releases them in parallel, so that no holder waits for a slow
// Redis to learn that its lease is no longer renewed.
func releaseAll(ctx context.Context, leases []*Lease) error {
	for _, le := range leases {
		select {
		case le.sem <- struct{}{}:
			le.end(ErrClosed)
			<-le.sem
		default: // it is being released
		}
	}
	failed := make([]error, len(leases))
	inParallel(len(leases), closeParallel, func(i int) { failed[i] = leases[i].release(ctx, ErrClosed) })
	return errors.Join(failed...)
}

// inParallel calls f with 0 to n-1, at most limit of them at the same time.
func inParallel(n, limit int, f func(i int)) {
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(n, limit) {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	workers.Wait()
}

// pause waits, and returns early if stop is closed or, with its cause, when ctx is done.
func pause(ctx context.Context, d time.Duration, stop <-chan struct{}) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-stop:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

const (
	defaultLease  = 30 * time.Second // the default of Redisson's watchdog
	defaultPoll   = time.Second
	defaultPrefix = "lock"
	// defaultListenIdle saves a new connection for each waiter where few wait.
	defaultListenIdle = 5 * time.Second

	// defaultYield is about the time in which a Java thread wakes on a message and asks, on a busy
	// machine.
	defaultYield = 2 * time.Millisecond

	minPoll = 10 * time.Millisecond
)

// settings belong to a Locker and do not change after New. Each acquire checks them.
type settings struct {
	lease    time.Duration
	poll     time.Duration
	prefix   string
	observer Observer
	// vanishing: see MayVanish.
	vanishing bool
	// listenIdle is how long the connection for release messages stays open without a waiter. No
	// Option sets it.
	listenIdle time.Duration
	// yield is how long waiters here leave a lock that was released here to each other process that
	// listens for it. No Option sets it.
	yield time.Duration
}

func defaults() settings {
	return settings{
		lease: defaultLease, poll: defaultPoll, prefix: defaultPrefix,
		listenIdle: defaultListenIdle, yield: defaultYield,
	}
}

// Option changes a setting of a Locker.
type Option func(*settings)

// WithLease sets the lease of locks that are acquired without For: MinLease to MaxLease, 30 s by
// default. It is renewed every third of its length until Release. A dead holder blocks a key for at
// most this time.
func WithLease(lease time.Duration) Option { return func(s *settings) { s.lease = lease } }

// WithPoll sets how often a waiter asks Redis without a message: 10 ms or more, 1 s by default.
// Messages are lost when a connection breaks. It also bounds the pause between two attempts while
// Redis is unavailable.
func WithPoll(poll time.Duration) Option { return func(s *settings) { s.poll = poll } }

// WithPrefix sets the prefix of the Locker's own keys, "lock" by default: the counter of fencing
// tokens (prefix:fence) and the receipts of calls (prefix:receipt:…). All who lock the same keys
// must use the same prefix, or their tokens do not compare. In a Redis Cluster the names also carry
// the hash tag of the locks, unless the prefix has it.
func WithPrefix(prefix string) Option { return func(s *settings) { s.prefix = prefix } }

// MayVanish makes locks cheaper that only save double work: Redis writes them neither to its append-only file nor to
// its replicas (a snapshot has them), and a release wakes nobody. After a restart or a failover of Redis they are gone
// while their holders work, which learn of it when a lock is renewed or released. Who waits for one asks again after
// WithPoll. All who lock the same keys should agree on it.
func MayVanish() Option { return func(s *settings) { s.vanishing = true } }

// WithObserver reports what the Locker does.
func WithObserver(o Observer) Option { return func(s *settings) { s.observer = o } }

// Observer receives what a Locker does, for metrics. Each function may be nil. They run
// concurrently and in the path of callers, so they should count and return.
type Observer struct {
	// Acquired reports locks taken from Redis, and the time since the call began.
	Acquired func(locks int, waited time.Duration)
	// Reentered reports locks taken that their owner already held.
	Reentered func(locks int)
	// Busy reports locks that others hold. A waiting Acquire reports them for each attempt.
	Busy func(locks int)
	// Unreachable reports each attempt of a waiting Acquire that failed because Redis is
	// unavailable.
	Unreachable func(locks int, err error)
	// Renewed reports the renewals of one script call, how long it took, and its error.
	Renewed func(locks int, took time.Duration, err error)
	// Lost reports locks that their holder lost.
	Lost func(locks int)
	// Released reports locks released in Redis. A lock that was reported lost may be among them, if
	// Redis still had it.
	Released func(locks int)
}

func (o *Observer) acquired(locks int, since time.Time) {
	if o.Acquired != nil && locks > 0 {
		o.Acquired(locks, time.Since(since))
	}
}

func (o *Observer) unreachable(locks int, err error) {
	if o.Unreachable != nil {
		o.Unreachable(locks, err)
	}
}

func (o *Observer) renewed(locks int, sent time.Time, err error) {
	if o.Renewed != nil && locks > 0 {
		o.Renewed(locks, time.Since(sent), err)
	}
}

func (o *Observer) reentered(locks int) { report(o.Reentered, locks) }
func (o *Observer) busy(locks int)      { report(o.Busy, locks) }
func (o *Observer) lost(locks int)      { report(o.Lost, locks) }
func (o *Observer) released(locks int)  { report(o.Released, locks) }

func report(f func(int), locks int) {
	if f != nil && locks > 0 {
		f(locks)
	}
}

// AcquireOption changes one acquire.
type AcquireOption func(*terms)

// terms are the options of one acquire.
type terms struct {
	lease time.Duration
	// watched leases are renewed until Release.
	watched bool
}

// For sets a lease that is not renewed: MinLease to MaxLease, cut to whole milliseconds. It counts
// from before the call to Redis. When a lock is reentered, For extends what is left of its lease if
// that is shorter, and never shortens it.
func For(lease time.Duration) AcquireOption {
	return func(t *terms) { *t = terms{lease: lease} }
}

func (s *settings) terms(opts []AcquireOption) (terms, error) {
	t := terms{lease: s.lease, watched: true}
	for _, opt := range opts {
		opt(&t)
	}
	switch {
	case t.lease < MinLease || t.lease > MaxLease:
		return t, fmt.Errorf("%w: a lease of %v, want %v to %v", ErrInvalid, t.lease, MinLease, MaxLease)
	case s.poll < minPoll:
		return t, fmt.Errorf("%w: a poll of %v, want at least %v", ErrInvalid, s.poll, minPoll)
	case s.prefix == "" || len(s.prefix) > MaxKeyBytes:
		return t, fmt.Errorf("%w: a prefix of %d bytes, want 1 to %d", ErrInvalid, len(s.prefix), MaxKeyBytes)
	}
	t.lease = t.lease.Truncate(time.Millisecond)
	return t, nil
}

// drift is how much shorter a lease is here than in Redis, because two clocks do not run at the
// same pace and Redis counts whole milliseconds. The formula is Redlock's.
func drift(lease time.Duration) time.Duration { return lease/100 + 2*time.Millisecond }

// Holding describes the holder of a lock at the time of a Look. The zero value is a free lock.
type Holding struct {
	// Owner is the name of the holder in Redis: "<id of the Locker>:<number of the call>", or
	// Redisson's "<id of the client>:<id of the thread>".
	Owner string
	// Depth is how many releases free the lock. Lockers count reentries in their process, so it is
	// 1 for a lock of another Locker. Redisson counts in Redis.
	Depth int
	// Left is what is left of the lease, which the holder may renew. It is 0 for a lock without
	// expiry, which neither a Locker nor Redisson creates.
	Left time.Duration
	// Mine is set if this Locker holds the lock.
	Mine bool
}

// Held reports whether the lock is held.
func (h Holding) Held() bool { return h.Owner != "" }

// scanCount bounds the fields that are read. A lock has one field.
const scanCount = 10

// Look reports who holds the lock of a key and for how long, for operators and logs. The answer may
// be outdated when it arrives. Look changes nothing and returns the error if Redis is unavailable.
// For a lock of another kind, such as Redisson's read lock, it reports one of the holders.
func (l *Locker) Look(ctx context.Context, key string) (Holding, error) {
	if err := cmp.Or(l.clientErr, l.validateKey(key)); err != nil {
		return Holding{}, err
	}
	var fields *redis.ScanCmd
	var left *redis.DurationCmd
	_, err := l.scripts.rdb.TxPipelined(ctx, func(tx redis.Pipeliner) error { // in one step
		fields = tx.HScan(ctx, key, 0, "", scanCount)
		left = tx.PTTL(ctx, key)
		return nil
	})
	if err != nil {
		return Holding{}, fmt.Errorf("look at lock %s: %w", key, err)
	}
	var h Holding
	page, _ := fields.Val()
	for i := 0; i+1 < len(page) && !h.Held(); i += 2 {
		if depth, err := strconv.Atoi(page[i+1]); err == nil { // other fields name the kind of lock
			h = Holding{Owner: page[i], Depth: depth, Left: max(0, left.Val())}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for le := range l.leases {
		if mine := le.byKey[key]; mine != nil && mine.owner == h.Owner {
			h.Depth, h.Mine = len(mine.leases), true
		}
	}
	return h, nil
}

// ForceRelease takes the lock of a key from its holder, which may be in another process or a Java
// service, wakes the waiters, and reports whether it was held. The holder learns of the loss when
// it next renews or releases the lock. It is for operators: the lock of a dead process ends by
// itself.
func (l *Locker) ForceRelease(ctx context.Context, key string) (held bool, err error) {
	if err := cmp.Or(l.clientErr, l.validateKey(key)); err != nil {
		return false, err
	}
	l.mu.Lock()
	c := l.calls.next()
	l.mu.Unlock()
	held, err = l.scripts.sendForce(ctx, c, key)
	open := l.startTask()
	if open {
		defer l.tasks.Done()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		l.calls.done(c)
		return held, nil
	case open:
		// If the call is still in progress, it must not take the lock from a later holder.
		l.calls.abandon(0, abandonedCall{call: l.calls.nextOn(c.receipt), owner: "none", keys: []string{key}})
	}
	return false, fmt.Errorf("force the release of lock %q: %w", key, err)
}
