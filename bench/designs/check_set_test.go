package designs

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/front"
	"stampede/internal/test/testkit"
	"stampede/lock"
)

// Two buyers read the stock before one of them writes it.
func TestCheckSetSellsLastUnitTwice(t *testing.T) {
	t.Parallel()
	for name, second := range map[string]string{"two buyers": "bob", "two clicks of a buyer": "alice"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSale(t, 1, All["check-set"].Guarded)
			d := openDesign[*checkSet](t, s, newCheckSet)
			g := holdCommands(d.rdb, "set")
			results := []<-chan purchaseResult{s.startBuying(t, d, "alice"), s.startBuying(t, d, second)}
			<-g.reached
			<-g.reached
			close(g.open)
			for _, result := range results {
				require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-result)
			}
			require.Equal(t, 2, s.orders(t), "orders of one unit")
			require.Equal(t, "0", s.rdb.Get(t.Context(), d.stockKey(s.id)).Val(), "both stored the same remainder")
		})
	}
}

func TestMutexOversellsInTwoProcesses(t *testing.T) {
	t.Parallel()
	s := newSale(t, 1, All["mutex"].Guarded)
	here, there := openDesign[*mutex](t, s, newMutex), openDesign[*mutex](t, s, newMutex)
	g := holdCommands(here.rdb, "set")
	alice := s.startBuying(t, here, "alice")
	<-g.reached
	require.Equal(t, front.Confirmed, s.buy(t, there, "bob"))
	close(g.open)
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-alice)
	require.Equal(t, 2, s.orders(t), "orders of one unit")
}

func (s *testSale) lockOwner(t *testing.T, d *setnx) string {
	t.Helper()
	return s.rdb.Get(t.Context(), d.lockKey(s.id)).Val()
}

func TestSETNXKeepsLockOfOtherOwner(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, All["setnx"].Guarded)
	d := openDesign[*setnx](t, s, newSetNX)
	d.lease = 20 * time.Millisecond
	require.NoError(t, d.lock(t.Context(), s.id, "late"))
	d.lease = time.Minute
	require.NoError(t, d.lock(t.Context(), s.id, "next"), "the lease of the late owner ends")
	d.unlock(t.Context(), s.id, "late")
	require.Equal(t, "next", s.lockOwner(t, d))
	d.unlock(t.Context(), s.id, "next")
	require.Empty(t, s.lockOwner(t, d))
}

func TestSETNXExpiredLeaseSellsUnitTwice(t *testing.T) {
	t.Parallel()
	s := newSale(t, 1, All["setnx"].Guarded)
	paused, other := openDesign[*setnx](t, s, newSetNX), openDesign[*setnx](t, s, newSetNX)
	paused.lease = 20 * time.Millisecond
	g := holdCommands(paused.rdb, "set")
	alice := s.startBuying(t, paused, "alice")
	<-g.reached
	require.Equal(t, front.Confirmed, s.buy(t, other, "bob"), "bob gets the lock after the lease of alice")
	close(g.open)
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-alice)
	require.Equal(t, 2, s.orders(t), "orders of one unit")
}

func TestSETNXWaitsForLeaseOfDeadHolder(t *testing.T) {
	t.Parallel()
	s := newSale(t, 1, All["setnx"].Guarded)
	d := openDesign[*setnx](t, s, newSetNX)
	require.NoError(t, d.lock(t.Context(), s.id, "dead"))
	began := time.Now()
	require.Equal(t, front.Confirmed, s.buy(t, d, "alice"))
	require.Greater(t, time.Since(began), setnxLease/2, "alice waited for the lease to end")
	require.Empty(t, s.lockOwner(t, d), "alice has released it")
}

func TestSETNXStopsAtDeadline(t *testing.T) {
	t.Parallel()
	s := newSale(t, 1, All["setnx"].Guarded)
	d := openDesign[*setnx](t, s, newSetNX)
	d.lease, d.timeout = time.Minute, 50*time.Millisecond
	require.NoError(t, d.lock(t.Context(), s.id, "busy"))
	_, err := d.Buy(t.Context(), s.order("alice"))
	require.ErrorIs(t, err, errLockBusy)
	require.Equal(t, "busy", s.lockOwner(t, d), "alice did not release the lock")
	require.Equal(t, "1", s.rdb.Get(t.Context(), d.stockKey(s.id)).Val())
}

// shortLease is the lease of holders who die or are late.
const shortLease = 50 * time.Millisecond

// lockers are two processes with a client each, and the key of one lock.
type lockers struct {
	alice, bob wrongLock
	// ours are stampede/lock on the same clients, with a key of their own.
	ourAlice, ourBob *lock.Locker
	ourKey           string
}

func newLockers(t *testing.T) lockers {
	t.Helper()
	prefix := testkit.Keys(t).Prefix
	open := func(lease time.Duration) (wrongLock, *lock.Locker) {
		rdb, err := openRedis(testkit.RedisURL(t), stockConnections)
		require.NoError(t, err)
		locker := lock.New(rdb)
		t.Cleanup(func() {
			_ = locker.Close(context.Background()) // reports the locks that dead holders have lost
			require.NoError(t, rdb.Close())
		})
		return wrongLock{rdb, prefix + ":lock", lease}, locker
	}
	l := lockers{ourKey: prefix + ":our-lock"}
	l.alice, l.ourAlice = open(shortLease)
	l.bob, l.ourBob = open(time.Minute)
	return l
}

// holder is the owner in Redis, or "".
func (l lockers) holder(t *testing.T) string {
	t.Helper()
	owner, err := l.bob.rdb.Get(t.Context(), l.bob.key).Result()
	if err != redis.Nil { //nolint:errorlint // go-redis returns it as it is
		require.NoError(t, err)
	}
	return owner
}

// requireLockedForever checks that the lock is taken and has no lease that ends.
func (l lockers) requireLockedForever(t *testing.T) {
	t.Helper()
	locked, err := l.bob.tryLock(t.Context(), "bob")
	require.NoError(t, err)
	require.False(t, locked)
	const noExpiry = time.Duration(-1)
	require.Equal(t, noExpiry, l.bob.rdb.PTTL(t.Context(), l.bob.key).Val())
}

func (l lockers) aliceLocks(t *testing.T) {
	t.Helper()
	locked, err := l.alice.tryLock(t.Context(), "alice")
	require.NoError(t, err)
	require.True(t, locked)
}

func (l lockers) ourAliceLocks(t *testing.T, options ...lock.AcquireOption) *lock.Lease {
	t.Helper()
	lease, err := l.ourAlice.Acquire(t.Context(), l.ourKey, options...)
	require.NoError(t, err)
	return lease
}

// bobLocks waits until the lease of alice has ended and bob has the lock.
func (l lockers) bobLocks(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, timeout, "bob's lock", func() bool {
		locked, err := l.bob.tryLock(t.Context(), "bob")
		require.NoError(t, err)
		return locked
	})
}

// ourBobLocks does the same with our lock, whose Acquire waits.
func (l lockers) ourBobLocks(t *testing.T) *lock.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	lease, err := l.ourBob.Acquire(ctx, l.ourKey)
	require.NoError(t, err)
	return lease
}

// requireOurBobHolds checks that alice does not get bob's lock.
func (l lockers) requireOurBobHolds(t *testing.T, lease *lock.Lease) {
	t.Helper()
	_, err := l.ourAlice.TryAcquire(t.Context(), l.ourKey)
	require.ErrorIs(t, err, lock.ErrBusy)
	require.NoError(t, lease.Release(t.Context()), "bob has not lost it")
}

func TestLockWithoutLeaseOutlivesItsHolder(t *testing.T) {
	t.Parallel()
	l := newLockers(t)
	locked, err := l.alice.lockForever(t.Context(), "alice") // and alice dies
	require.NoError(t, err)
	require.True(t, locked)
	l.requireLockedForever(t)

	l.ourAliceLocks(t, lock.For(shortLease))
	require.NoError(t, l.ourBobLocks(t).Release(t.Context()))
}

func TestCrashBetweenSetAndExpireLocksForever(t *testing.T) {
	t.Parallel()
	l := newLockers(t)
	alive, crash := context.WithCancel(t.Context())
	g := holdSingle(l.alice.rdb, "expire")
	done := make(chan error, 1)
	go func() {
		_, err := l.alice.lockThenExpire(alive, "alice")
		done <- err
	}()
	<-g.reached
	crash()
	require.ErrorIs(t, <-done, context.Canceled)
	l.requireLockedForever(t)

	// Ours takes lock and lease in one command: no other is sent after it.
	require.NoError(t, l.ourAliceLocks(t).Release(t.Context()))
	var commands atomic.Int64
	g = hold(l.alice.rdb, func(...redis.Cmder) bool { return commands.Add(1) > 1 })
	defer close(g.open)
	l.ourAliceLocks(t, lock.For(shortLease))
	require.NoError(t, l.ourBobLocks(t).Release(t.Context()))
}

func TestDeleteWithoutOwnerReleasesLockOfAnother(t *testing.T) {
	t.Parallel()
	l := newLockers(t)
	l.aliceLocks(t)
	l.bobLocks(t)
	require.NoError(t, l.alice.unlockAny(t.Context()), "alice was slower than her lease")
	require.Empty(t, l.holder(t), "bob still works, and anyone can lock")

	late := l.ourAliceLocks(t, lock.For(shortLease))
	bobs := l.ourBobLocks(t)
	require.Error(t, late.Release(t.Context()), "alice hears that she lost the lock")
	l.requireOurBobHolds(t, bobs)
}

func TestCompareAndDeleteInTwoCommandsReleasesLockOfAnother(t *testing.T) {
	t.Parallel()
	l := newLockers(t)
	l.aliceLocks(t)
	// The lease must not end before GET, so alice has her lock again for a minute.
	require.NoError(t, l.alice.rdb.Set(t.Context(), l.alice.key, "alice", time.Minute).Err())
	g := holdSingle(l.alice.rdb, "del")
	done := make(chan error, 1)
	go func() { done <- l.alice.unlockCompared(t.Context(), "alice") }()
	<-g.reached
	require.NoError(t, l.bob.rdb.PExpire(t.Context(), l.bob.key, time.Millisecond).Err(), "the minute is over")
	l.bobLocks(t)
	close(g.open)
	require.NoError(t, <-done)
	require.Empty(t, l.holder(t), "bob still works, and anyone can lock")

	late := l.ourAliceLocks(t, lock.For(shortLease))
	g = holdSingle(l.alice.rdb, "evalsha", "eval")
	go func() { done <- late.Release(t.Context()) }()
	<-g.reached
	bobs := l.ourBobLocks(t)
	close(g.open)
	require.Error(t, <-done)
	l.requireOurBobHolds(t, bobs)
}

func TestLoserThatDoesNotWaitLeavesUnitUnsold(t *testing.T) {
	t.Parallel()
	l := newLockers(t)
	l.alice.lease = time.Minute
	const units = 2
	sold := 0
	both := func() {
		sold++
		bought, err := l.bob.sellOrFail(t.Context(), "bob", func() { sold++ })
		require.NoError(t, err)
		require.False(t, bought, "bob comes while alice buys")
	}
	bought, err := l.alice.sellOrFail(t.Context(), "alice", both)
	require.NoError(t, err)
	require.True(t, bought)
	require.Less(t, sold, units, "a unit is left, and a buyer was refused")

	sold = 0
	alices := l.ourAliceLocks(t)
	done := make(chan error, 1)
	go func() {
		done <- l.ourBob.Do(t.Context(), l.ourKey, func(context.Context) error {
			sold++
			return nil
		})
	}()
	sold++
	require.NoError(t, alices.Release(t.Context()))
	require.NoError(t, <-done)
	require.Equal(t, units, sold)
}
