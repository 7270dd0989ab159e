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
// Files in the order in which Acquire runs: lock, settings, observer, acquire, await, attempt,
// owner, calls, scripts, queue, listener, yield, lease, watchdog, renew, release, abandoned, close.
// The files operators and multi build on these.
package lock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
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
	rdb redis.UniversalClient
	settings
	clustered bool
	id        string // unique among all processes
	fence     string // name of the counter of fencing tokens
	clientErr error  // every call returns it, if it is set
	watchdog  *watchdog
	waiting   waitState

	// running ends with Close, which waits for tasks.
	running context.Context
	stop    context.CancelFunc
	tasks   sync.WaitGroup

	// mu guards the fields below and the state of owners, holds and leases. No call to Redis and no
	// function of the user runs while it is held.
	mu             sync.Mutex
	closed         bool
	serial         uint64
	receipts       receipts
	abandonedCalls abandonedCalls
	leases         map[*Lease]struct{} // not released
	closing        <-chan struct{}     // closed when the last Close is done; nil before the first Close
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
	l := &Locker{rdb: rdb, settings: defaults(), id: uuid.NewString(), leases: make(map[*Lease]struct{})}
	switch rdb.(type) {
	case *redis.Client:
	case *redis.ClusterClient:
		l.clustered = true
	default:
		l.clientErr = fmt.Errorf("%w: a client of type %T, want *redis.Client or *redis.ClusterClient", ErrInvalid, rdb)
	}
	for _, opt := range opts {
		opt(&l.settings)
	}
	l.fence = l.prefix + ":fence"
	l.running, l.stop = context.WithCancel(context.Background())
	l.watchdog = newWatchdog(&l.mu, l.lease.Truncate(time.Millisecond), l.renewRound, l.leasesExpired)
	l.waiting = newWaiting(l.yield)
	return l
}
