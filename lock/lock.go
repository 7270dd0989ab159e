// Package lock is a reentrant lock with a lease, in Redis, taken for many keys in one script call.
//
// A lock is a hash with the field owner → depth that expires with its lease: the form of Redisson's
// RLock. In Stampede a worker locks the users of a batch before it writes their orders, so that
// two workers do not do the same work; users that are busy are put off to a later batch.
//
// # What it can promise
//
//   - While a lease lasts, no other owner is given the same key by the same, healthy Redis.
//   - A holder that dies blocks a key for no longer than the rest of its lease.
//   - Whatever go-redis sends again because a reply was lost changes nothing: neither is the lock
//     deeper, nor is a lock that was released properly reported as lost.
//   - A lock is only ever released by its owner, and a release says which locks were lost before.
//
// # What it cannot promise
//
//   - That a holder that stalls (a long collection, a stopped process, a slow disk) is still the
//     holder when it goes on. [Lease.Holds] looks at the clock, and a stall may come right after it.
//   - Anything across a failover, or a restart of a Redis that does not write every command to disk:
//     the locks may be gone while their holders work on.
//   - That a request which was stuck in the network does not take a lock after its repeat was
//     released: nobody uses such a lock, and it ends with its lease.
//
// So a lock saves double work and puts work in line, and correctness has to come from what is
// written: a unique key, a version, a CHECK.
package lock

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
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
	// MaxKeys is how many keys one call may name.
	MaxKeys = 65_536
	// MaxKeyBytes is how long a key may be.
	MaxKeyBytes = 1024
)

// keysPerCall bounds a script call, because Redis serves nobody else while it runs: 512 locks take
// it about a millisecond. It is above the orders of a batch, so that a batch is one call.
const keysPerCall = 512

var (
	// ErrInvalid is returned for a lease or a key out of bounds. Redis was not asked.
	ErrInvalid = errors.New("invalid lock request")
	// ErrLost is returned when a lock was not held any more: on release, when a lease had ended, or
	// Redis had lost it; and on acquiring, when a lock that was to be held deeper was gone, or the
	// lease was over before the answer came. A *LostError says which keys.
	ErrLost = errors.New("lock lost")
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
type Locker struct {
	rdb redis.UniversalClient
	// id and serial make names that are unique among all processes.
	id     string
	serial atomic.Uint64
}

// New returns a Locker. It neither asks Redis nor closes the client. In a Redis Cluster, the keys of
// one call have to share a hash tag.
func New(rdb redis.UniversalClient) *Locker {
	return &Locker{rdb: rdb, id: uuid.NewString()}
}

func (l *Locker) unique() string {
	return l.id + ":" + strconv.FormatUint(l.serial.Add(1), 10)
}
