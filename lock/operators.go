package lock

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/lua"
)

// Holding is who holds a lock, and for how long, at the moment at which Redis was asked. The zero value is a lock
// that nobody holds.
type Holding struct {
	// Owner is the name of the holder in Redis: of a Locker "<id of the Locker>:<number of the call>", and of
	// Redisson "<id of the client>:<id of the thread>".
	Owner string
	// Depth is how many releases the lock is away from being free. Depth is counted in the process of the
	// holder, so for a lock that another Locker holds it is 1; Redisson counts in Redis.
	Depth int
	// Left is what is left of the lease, which the holder may renew: above 0, or 0 for a lock that never ends,
	// which neither a Locker nor Redisson makes.
	Left time.Duration
	// Mine is set if it is this Locker that holds the lock.
	Mine bool
}

// Held tells whether anybody holds the lock.
func (h Holding) Held() bool { return h.Owner != "" }

// looked is how many fields of a lock are asked for: it has one, or it is no lock of this kind.
const scanCount = 10

// Look says who holds the lock of a key, and for how long: for operators and logs. By the time it answers, that may
// be over; to hold the lock, acquire it. It takes nothing, and returns the error if Redis is away. Of
// a lock of another kind, such as Redisson's read lock, it names one of those who hold it.
func (l *Locker) Look(ctx context.Context, key string) (Holding, error) {
	if err := cmp.Or(l.clientErr, l.validateKey(key)); err != nil {
		return Holding{}, err
	}
	var fields *redis.ScanCmd
	var left *redis.DurationCmd
	_, err := l.rdb.TxPipelined(ctx, func(tx redis.Pipeliner) error { // in one step
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
		if depth, err := strconv.Atoi(page[i+1]); err == nil { // or it says what kind of lock that is
			h = Holding{Owner: page[i], Depth: depth, Left: max(0, left.Val())}
		}
	}
	if deep := l.depthOf(key, h.Owner); deep > 0 {
		h.Depth, h.Mine = deep, true
	}
	return h, nil
}

// depthOf is how many leases hold a lock under that name here; 0 if none does.
func (l *Locker) depthOf(key, owner string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	for le := range l.leases {
		if h := le.find(key); h != nil && h.owner == owner {
			return len(h.leases)
		}
	}
	return 0
}

// ForceRelease takes the lock of a key away from whoever holds it, in this process or another one or
// in a Java service, wakes those who wait for it, and tells whether anybody held it. The holder hears of
// it when it next renews or releases the lock. It is for operators: a lock that a dead process left
// ends by itself.
func (l *Locker) ForceRelease(ctx context.Context, key string) (held bool, err error) {
	if err := cmp.Or(l.clientErr, l.validateKey(key)); err != nil {
		return false, err
	}
	l.mu.Lock()
	c := l.newCall()
	l.mu.Unlock()
	answer, err := lua.LockForce.Run(ctx, l.rdb, []string{l.inSlotOf(key, string(c.receipt)), key},
		decimal(c.serial), receiptMS, l.publishCommand()).Text()

	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		// If it is still on its way, it must not take the lock away from somebody who gets it later.
		l.abandonCall(0, abandonedCall{call: call{c.receipt, l.nextSerial()}, owner: "nobody", keys: []string{key}})
		return false, fmt.Errorf("force the release of lock %q: %w", key, err)
	}
	l.freeReceipt(c)
	if answer != answerReleased && answer != answerFree {
		return false, fmt.Errorf("force the release of lock %q: unknown answer %q", key, answer)
	}
	return answer == answerReleased, nil
}
