package designs

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/bench/front"
	"stampede/internal/retry"
)

//go:embed lua/unlock.lua
var unlockSource string

// unlockScript is called by SHA-1, and sent as source if Redis does not know it; so are all scripts here.
var unlockScript = redis.NewScript(unlockSource)

// setnx is the third step: the mutex moves into Redis, where all processes see it. SET NX PX takes it
// for a lease, with a random owner as its value; a script releases it if that is still the owner; a
// buyer that does not get it retries after a pause, until a deadline.
//
// What it gets right: several processes can sell, a dead process does not lock the sale forever, and no
// process releases another owner's lock. wrongLock has the steps that tutorials get wrong before.
//
// How it fails: the lease ends by the clock, even if its holder has not finished. A holder that was
// paused for longer (a garbage collection, a slow disk, a suspended machine) continues and stores the
// remainder that it read before, over what others have sold since; nothing in Redis detects that it is
// late. And waiting buyers are not woken when the lock is free: they poll in no order, and the more
// they are the slower it gets, until some reach their deadline. A dead holder stops the sale for the
// rest of its lease.
//
// As with the mutex, the lock covers the check and the write of the stock, and not the order.
type setnx struct {
	*checkSet
	lease, timeout time.Duration
}

const (
	// setnxLease is hundreds of times as long as a purchase holds the lock. A crash costs as much.
	setnxLease = 2 * time.Second
	// setnxTimeout is longer than the lease, so that buyers can outwait a dead holder, and shorter than
	// the write timeout of the front.
	setnxTimeout = 8 * time.Second
	// The pause between two attempts begins short, for sales without a crowd, and doubles up to a
	// length at which hundreds of polling buyers do not saturate Redis.
	setnxPauseMin, setnxPauseMax = time.Millisecond, 64 * time.Millisecond
)

// errLockBusy is returned when the lock was not free before the deadline. The buyer may retry.
var errLockBusy = errors.New("the lock of the sale was not free in time")

func newSetNX(ctx context.Context, b front.Backend) (front.Design, error) {
	unlocked, err := openCheckSet(ctx, b)
	if err != nil {
		return nil, err
	}
	return &setnx{checkSet: unlocked, lease: setnxLease, timeout: setnxTimeout}, nil
}

// Buy implements front.Design.
func (d *setnx) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	return d.sell(ctx, o, d.take)
}

func (d *setnx) take(ctx context.Context, o front.Order) (front.Verdict, error) {
	owner := uuid.NewString()
	if err := d.lock(ctx, o.Sale, owner); err != nil {
		return none, err
	}
	// The lock must be released even if the buyer has disconnected, or it blocks all others until its
	// lease ends.
	defer d.unlock(context.WithoutCancel(ctx), o.Sale, owner)
	return d.checkSet.take(ctx, o)
}

func (d *setnx) lockKey(sale uuid.UUID) string { return d.prefix + ":lock:" + sale.String() }

func (d *setnx) lock(ctx context.Context, sale uuid.UUID, owner string) error {
	deadline := time.Now().Add(d.timeout)
	for wait := setnxPauseMin; ; wait = min(2*wait, setnxPauseMax) {
		locked, err := d.rdb.SetNX(ctx, d.lockKey(sale), owner, d.lease).Result()
		if err != nil {
			return fmt.Errorf("lock the sale: %w", err)
		}
		if locked {
			return nil
		}
		// Jitter separates buyers that arrived together.
		jittered := wait/2 + rand.N(wait)
		if time.Until(deadline) < jittered {
			return errLockBusy
		}
		if !retry.Pause(jittered, ctx.Done()) {
			return ctx.Err()
		}
	}
}

// unlock only logs if the lease ended too early: the purchase cannot be undone.
func (d *setnx) unlock(ctx context.Context, sale uuid.UUID, owner string) {
	released, err := unlockScript.Run(ctx, d.rdb, []string{d.lockKey(sale)}, owner).Int()
	switch {
	case err != nil && !errors.Is(err, redis.Nil):
		slog.Warn("releasing the lock failed; its lease will expire", "sale", sale, "error", err)
	case released == 0:
		slog.Warn("the lease ended before the purchase", "sale", sale)
	}
}

// wrongLock is the lock of tutorials on the way to setnx: each method is a step that is easy to get
// wrong. check_set_test.go shows on a Redis how each fails, and stampede/lock in the same case.
type wrongLock struct {
	rdb   *redis.Client
	key   string
	lease time.Duration
}

// lockForever has no lease. If its holder dies, the key stays, and the lock is never free again.
func (l wrongLock) lockForever(ctx context.Context, owner string) (locked bool, err error) {
	return l.rdb.SetNX(ctx, l.key, owner, 0).Result()
}

// lockThenExpire sets the lease by a command of its own. A holder that dies between the two has locked
// for ever.
func (l wrongLock) lockThenExpire(ctx context.Context, owner string) (locked bool, err error) {
	if locked, err = l.lockForever(ctx, owner); !locked || err != nil {
		return false, err
	}
	return true, l.rdb.Expire(ctx, l.key, l.lease).Err()
}

// tryLock is right so far: SET NX PX takes the lock with its lease and its owner in one command.
func (l wrongLock) tryLock(ctx context.Context, owner string) (locked bool, err error) {
	return l.rdb.SetNX(ctx, l.key, owner, l.lease).Result()
}

// unlockAny does not compare the owner. A holder that was slower than its lease deletes the lock of the
// next one, and a third one gets it as well.
func (l wrongLock) unlockAny(ctx context.Context) error {
	return l.rdb.Del(ctx, l.key).Err()
}

// unlockCompared compares the owner in the process. If the lease ends between GET and DEL, it deletes
// the lock of the next holder all the same.
func (l wrongLock) unlockCompared(ctx context.Context, owner string) error {
	holder, err := l.rdb.Get(ctx, l.key).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return err
	}
	if holder != owner {
		return nil
	}
	return l.rdb.Del(ctx, l.key).Err()
}

// sellOrFail gives up when the lock is taken. Buyers who come at the same moment are refused, although
// there are units for them.
func (l wrongLock) sellOrFail(ctx context.Context, owner string, sell func()) (sold bool, err error) {
	locked, err := l.tryLock(ctx, owner)
	if !locked || err != nil {
		return false, err
	}
	sell()
	return true, unlockScript.Run(ctx, l.rdb, []string{l.key}, owner).Err()
}
