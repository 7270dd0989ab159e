package designs

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

func TestASecondClickWaitsForTheLockOfTheFirst(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := opened[*lockTransaction](t, s, newLockTransaction)
	unlock, err := d.locks.Lock(t.Context(), d.lockOf("alice"))
	require.NoError(t, err)
	click := s.startBuying(t, d, "alice")
	require.Equal(t, front.Confirmed, s.buy(t, d, "bob"), "the lock of one user is no other's")
	select {
	case <-click:
		t.Fatal("it did not wait")
	default:
	}
	require.NoError(t, unlock())
	require.Equal(t, bought{verdict: front.Confirmed}, <-click)
}

func TestALockOfADeadProcessKeepsItsUserOut(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := opened[*lockTransaction](t, s, newLockTransaction)
	_, err := d.locks.Lock(t.Context(), d.lockOf("alice")) // whose holder never comes back
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = d.Buy(ctx, s.order("alice"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestALostLockLeavesTheGuardOfTheIndex(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := opened[*lockTransaction](t, s, newLockTransaction)
	d.locks = lost{d.locks}
	counts := map[bought]int{}
	var clicks []<-chan bought
	for range 16 {
		clicks = append(clicks, s.startBuying(t, d, "alice"))
	}
	for _, click := range clicks {
		counts[<-click]++
	}
	require.Equal(t, map[bought]int{{verdict: front.Confirmed}: 1, {verdict: front.AlreadyPurchased}: 15}, counts)
	s.requireRows(t, 1, 1)
}

// lost are locks whose leases are over at once.
type lost struct{ locks }

func (lost) Lock(context.Context, string) (func() error, error) {
	return func() error { return nil }, nil
}

// TestRedissonLocksAroundATransaction starts Java. Where there is none it says so, and tests nothing.
func TestRedissonLocksAroundATransaction(t *testing.T) {
	t.Parallel()
	entry := All["lock-transaction-redisson"]
	if missing := entry.Missing(); missing != "" {
		t.Skip("NOT TESTED WITH REDISSON: " + missing)
	}
	s := newSale(t, 100, entry.Guarded)
	s.backend.Options = map[string]string{"warm-up": "64"}
	d := opened[*lockTransaction](t, s, entry.New)
	require.Equal(t, map[front.Verdict]int{front.Confirmed: 100, front.SoldOut: 60}, s.crowd(t, 160, d))
	s.requireRows(t, 100, 100)

	unlock, err := d.locks.Lock(t.Context(), d.lockOf("user-1"))
	require.NoError(t, err)
	click := s.startBuying(t, d, "user-1")
	giveUp, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = d.locks.Lock(giveUp, d.lockOf("user-1"))
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, unlock())
	require.Equal(t, bought{verdict: front.AlreadyPurchased}, <-click, "whoever gave up leaves the lock")
}
