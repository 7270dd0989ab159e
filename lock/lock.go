// Package lock is a reentrant lock with a lease, in Redis, that speaks the protocol of Redisson's RLock:
// services in Java and in Go exclude and wake each other on one key.
//
// [Locker.Acquire] waits for a lock, [Locker.TryAcquire] does not, [Locker.AcquireAll] takes several
// or none, [Locker.TryEach] takes of many those that are free, and [Locker.Do] holds one while a
// function runs. [Locker.Look] says who holds one. A call with the context of a [Lease] goes deeper into the locks of that lease.
//
// In Stampede a worker locks the users of a batch before it writes their orders, so that two workers do
// not do the same work; users that are busy are put off to a later batch.
//
// # What it can promise
//
//   - While a lease lasts, no other owner is given the same key by the same, healthy Redis.
//   - A holder that dies blocks a key for no longer than the rest of its lease.
//   - A holder that loses a lock is told: the context of its lease ends, and [Lease.Err] says so without
//     asking anybody, also in a process that was stopped for longer than its lease.
//   - Every outermost acquire of a key has a larger fencing token than any earlier one of that key.
//   - What is sent again because an answer was lost, or arrives within minutes when nobody waits for it
//     any more, changes nothing: no lock is deeper for it, and none is left behind.
//   - A lock is only ever released by its owner, and a release says which locks were lost before.
//
// # What it cannot promise
//
//   - That a holder that stalls right after it looked is still the holder when it writes. What it writes
//     to has to compare the token ([Lease.Token]), or a version of its own, when it is read for a write, too.
//   - Anything across a failover, or a restart of a Redis that does not write every command to disk:
//     the locks may be gone while their holders work on. [Multi] spreads a lock over several servers.
//
// So a lock saves double work and puts work in line, and correctness has to come from what is
// written: a token that is compared, a unique key, a version, a CHECK.
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

// Bounds of what a caller may ask for.
const (
	// MinLease is the shortest lease: below it, a lease may end before its holder hears of it.
	MinLease = 10 * time.Millisecond
	// MaxLease is the longest lease, and so the longest time that a dead holder blocks a key.
	MaxLease = time.Hour
	// MaxKeys is how many keys one call of TryEach may name.
	MaxKeys = 65_536
	// MaxKeysAtOnce is how many keys one call of AcquireAll may name: they travel in one script call.
	MaxKeysAtOnce = keysPerCall
	// MaxKeyBytes is how long a key may be.
	MaxKeyBytes = 1024
)

var (
	// ErrInvalid is returned for a key, a lease or a setting out of bounds. Redis was not asked.
	ErrInvalid = errors.New("invalid lock request")
	// ErrBusy is returned by TryAcquire when another owner holds the lock, and by those who wait when the
	// deadline of their context passes before they have it: then the error is context.DeadlineExceeded, too.
	ErrBusy = errors.New("lock busy")
	// ErrLost is returned when a lock was not held any more: by Err and as the cause of the lease's
	// context when the lease had ended or Redis had lost it; by Release for the same reasons; and on
	// acquiring, when a lock that was to be held deeper was gone, or the lease was over before the
	// answer came. It is always a *LostError, which says which keys.
	ErrLost = errors.New("lock lost")
	// ErrReleased is returned by Err, and is the cause of the lease's context, after Release.
	ErrReleased = errors.New("lock released")
	// ErrClosed is returned to those who acquire or wait after Close, and is the cause of the contexts
	// of the leases that Close released.
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
// It runs one goroutine while it has leases to watch, and one, with a connection, while somebody waits for a
// lock (in a Redis Cluster, for each hash tag that is waited for). They end some seconds after the last such
// lease or waiter, or with Close.
type Locker struct {
	rdb redis.UniversalClient
	settings
	clustered bool
	id        string // unique among all processes
	fence     string // the name of the counter of the tokens
	clientErr error  // why no call can be served
	watchdog  *watchdog
	waiting   waiting

	// running ends with Close, and tasks are what Close waits for.
	running context.Context
	stop    context.CancelFunc
	tasks   sync.WaitGroup

	// mu guards what follows, and all that owners, holds and leases know. Nothing is sent to Redis,
	// and no function of the user's is called, while it is held.
	mu             sync.Mutex
	closed         bool
	serial         uint64
	receipts       receipts
	abandonedCalls abandonedCalls
	leases         map[*Lease]struct{} // that are not released
	closing        <-chan struct{}     // closed when the last Close is done; nil if there was none
}

// New returns a Locker. It does not ask Redis, and never closes the client, which is a *redis.Client or a
// *redis.ClusterClient: any other one would look for the locks where they are not, and is refused by every
// call with ErrInvalid.
//
// The client's ReadTimeout should be shorter than a third of the shortest lease, so that a renewal can be
// tried again, and its ContextTimeoutEnabled be set: without that, go-redis waits for an answer to the end of
// ReadTimeout, whatever the deadlines here say.
//
// In a Redis Cluster, the keys of one call have to share a hash tag.
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
