package designs

import (
	"context"
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

// setnx is the third step: the mutex moves into Redis, where all processes see it. SET NX PX takes
// it for a lease, with a random owner as its value; a script gives it back if that is still the owner; who does not get
// it tries again after a pause, until a deadline.
//
// What it gets right: several processes sell together, a process that dies does not lock the sale for
// ever, and nobody gives back the lock of somebody else. (Earlier versions of the tutorial get
// the last two wrong: SETNX and EXPIRE as two commands, and DEL without a look at the owner.)
//
// How it fails: the lease ends by the clock, whether its holder is done or not. One that was paused
// longer than that (a garbage collection, a slow disk, a suspended machine) wakes up and stores
// the remainder that it read before, over what others sold meanwhile; nothing in Redis knows that it is
// late. And nobody is woken when the lock is free: waiting buyers poll in no order, the more of them
// the slower, until some run into their deadline. A dead holder stops the sale for what is left of its lease.
//
// As with the mutex, the lock covers the check and the set, and not the writing of the order.
type setnx struct {
	*checkSet
	lease    time.Duration
	patience time.Duration
	pauseMax time.Duration
}

const (
	// setnxLease is hundreds of times what a purchase holds the lock, and what a crash costs.
	setnxLease = 2 * time.Second
	// setnxPatience is longer than the lease, so that buyers outlast a holder that died, and shorter than what
	// the front gives an answer.
	setnxPatience = 8 * time.Second
	// The pause between two tries begins short, for when there is no crowd, and doubles up to where
	// hundreds of waiting buyers do not keep Redis busy with their polls alone.
	setnxPauseMin   = time.Millisecond
	setnxPauseMaxMS = 64
)

// errLockBusy is returned when the lock was not to be had in time. The buyer may try again.
var errLockBusy = errors.New("the lock of the sale was not free in time")

func newSetNX(ctx context.Context, b front.Backend) (front.Design, error) {
	unlocked, err := openCheckSet(ctx, b)
	if err != nil {
		return nil, err
	}
	pauseMaxMS, err := option(b, "pause-max-ms", setnxPauseMaxMS)
	if err != nil {
		return nil, err
	}
	return &setnx{
		checkSet: unlocked, lease: setnxLease, patience: setnxPatience,
		pauseMax: time.Duration(pauseMaxMS) * time.Millisecond,
	}, nil
}

// Buy implements front.Design.
func (d *setnx) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	if refusal, err := d.take(ctx, o); refusal != none || err != nil {
		return refusal, err
	}
	return d.confirm(ctx, o)
}

func (d *setnx) take(ctx context.Context, o front.Order) (front.Verdict, error) {
	owner := uuid.NewString()
	if err := d.lock(ctx, o.Sale, owner); err != nil {
		return none, err
	}
	// A buyer who went away must not leave the lock to all others for the rest of its lease.
	defer d.unlock(context.WithoutCancel(ctx), o.Sale, owner)
	return d.checkSet.take(ctx, o)
}

func (d *setnx) lockKey(sale uuid.UUID) string { return d.prefix + ":lock:" + sale.String() }

func (d *setnx) lock(ctx context.Context, sale uuid.UUID, owner string) error {
	deadline := time.Now().Add(d.patience)
	for wait := setnxPauseMin; ; wait = min(2*wait, d.pauseMax) {
		locked, err := d.rdb.SetNX(ctx, d.lockKey(sale), owner, d.lease).Result()
		if err != nil {
			return fmt.Errorf("lock the sale: %w", err)
		}
		if locked {
			return nil
		}
		// A random part keeps those who came together from trying together for ever.
		jittered := wait/2 + rand.N(wait)
		if time.Until(deadline) < jittered {
			return errLockBusy
		}
		if !retry.Pause(jittered, ctx.Done()) {
			return ctx.Err()
		}
	}
}

// unlock can only tell that the lease ended too early: what was done without the lock is done.
func (d *setnx) unlock(ctx context.Context, sale uuid.UUID, owner string) {
	released, err := unlockScript.Run(ctx, d.rdb, []string{d.lockKey(sale)}, owner).Int()
	switch {
	case err != nil && !errors.Is(err, redis.Nil):
		slog.Warn("the lock was not given back and ends with its lease", "sale", sale, "err", err)
	case released == 0:
		slog.Warn("the lease ended before the purchase did", "sale", sale)
	}
}
