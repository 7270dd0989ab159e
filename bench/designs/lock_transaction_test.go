package designs

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

func TestLockTransactionSecondClickWaitsForLock(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := openDesign[*lockTransaction](t, s, newLockTransaction)
	unlock, err := d.locks.Lock(t.Context(), d.lockKey("alice"))
	require.NoError(t, err)
	click := s.startBuying(t, d, "alice")
	require.Equal(t, front.Confirmed, s.buy(t, d, "bob"), "users have separate locks")
	select {
	case <-click:
		t.Fatal("the second click did not wait for the lock")
	default:
	}
	require.NoError(t, unlock())
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-click)
}

func TestLockTransactionWaitsForLockOfDeadProcess(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := openDesign[*lockTransaction](t, s, newLockTransaction)
	_, err := d.locks.Lock(t.Context(), d.lockKey("alice")) // its holder never releases it
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = d.Buy(ctx, s.order("alice"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestLockTransactionRejectsSecondOrderAfterLostLock(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := openDesign[*lockTransaction](t, s, newLockTransaction)
	d.locks = lost{d.locks}
	s.requireOneOfClicks(t, d)
}

// lost grants every lock immediately and excludes no one, like locks whose leases have ended.
type lost struct{ userLocks }

func (lost) Lock(context.Context, string) (func() error, error) {
	return func() error { return nil }, nil
}

// TestLockTransactionWithRedisson starts Java. Without Java it is skipped, and says so.
func TestLockTransactionWithRedisson(t *testing.T) {
	t.Parallel()
	entry := All["lock-transaction-redisson"]
	if missing := entry.Missing(); missing != "" {
		t.Skip("NOT TESTED WITH REDISSON: " + missing)
	}
	s := newSale(t, 100, entry.Guarded)
	s.backend.Options = map[string]string{"warm-up": "64"}
	d := openDesign[*lockTransaction](t, s, entry.New)
	require.Equal(t, map[front.Verdict]int{front.Confirmed: 100, front.SoldOut: 60}, s.crowd(t, 160, d))
	s.requireRows(t, 100, 100)

	var winner string
	require.NoError(t, s.pool.QueryRow(t.Context(),
		"SELECT user_id FROM orders WHERE sale_id = $1 LIMIT 1", s.id).Scan(&winner))
	unlock, err := d.locks.Lock(t.Context(), d.lockKey(winner))
	require.NoError(t, err)
	click := s.startBuying(t, d, winner)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = d.locks.Lock(canceled, d.lockKey(winner))
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, unlock())
	require.Equal(t, purchaseResult{verdict: front.AlreadyPurchased}, <-click, "a canceled wait does not keep the lock")
}
