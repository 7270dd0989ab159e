package designs

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

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
