package designs

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// wrongLock is the lock of tutorials on the way to setnx: each method is a step that is easy to get
// wrong. setnx_wrong_test.go shows on a Redis how each fails, and stampede/lock in the same case.
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
