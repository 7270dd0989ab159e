package fulfillment_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
)

// cancelledOrders opens a sale of 10 units and returns cancelled orders of one unit each, of so many users. Their units
// are not released yet.
func cancelledOrders(t testing.TB, s *testshop.Shop, users int) (sale uuid.UUID, orders []uuid.UUID) {
	t.Helper()
	sale = s.OpenPayable(t, 10)
	for n := range users {
		orders = append(orders, s.Buy(t, sale, fmt.Sprintf("user-%d", n)))
	}
	testwork.Fulfil(t, s)
	for n, id := range orders {
		testwork.Cancel(t, ledger.New(s.Pool), id, fmt.Sprintf("user-%d", n))
	}
	return sale, orders
}

// retryReleasesNow makes the releases that Redis refused due immediately.
func retryReleasesNow(t testing.TB, s *testshop.Shop) {
	t.Helper()
	require.NoError(t, s.Exec(t, "UPDATE releases SET again_at = now()"))
}

func TestReleaseWaitsUntilRedisHasSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	lost, _ := cancelledOrders(t, s, 2)
	other, _ := cancelledOrders(t, s, 3)
	_, err := s.Pool.Exec(t.Context(), "UPDATE releases SET again_at = again_at - interval '1 h' WHERE sale_id = $1", lost)
	require.NoError(t, err) // so that the lost sale comes first
	_, err = s.Pool.Exec(t.Context(), "UPDATE releases SET again_at = again_at + interval '1 h' WHERE sale_id = $1", other)
	require.NoError(t, err) // the clock was set back since
	restore := s.Lose(t, lost)

	released := testwork.ReleaseUnits(t, s)
	require.Equal(t, 3, released, "the lost sale does not block another one")
	require.EqualValues(t, 10, s.Left(t, other))
	require.EqualValues(t, 2, s.Count(t, "SELECT count(*) FROM releases WHERE sale_id = $1 AND refusals = 1", lost))
	pending, err := ledger.New(s.Pool).PendingReleases(t.Context())
	require.ErrorIs(t, err, ledger.ErrRefused)
	require.ErrorContains(t, err, lost.String())
	require.Equal(t, 2, pending)
	before := s.Count(t, "SELECT extract(epoch FROM min(again_at) - now())::bigint FROM releases")
	for range 4 {
		retryReleasesNow(t, s)
		testwork.ReleaseUnits(t, s)
	}
	require.Greater(t, s.Count(t, "SELECT extract(epoch FROM min(again_at) - now())::bigint FROM releases"), before+5,
		"the retries become less frequent")

	restore()
	retryReleasesNow(t, s)
	for _, want := range []int{2, 0} {
		released = testwork.ReleaseUnits(t, s)
		require.Equal(t, want, released)
		require.EqualValues(t, 10, s.Left(t, lost))
	}
	pending, err = ledger.New(s.Pool).PendingReleases(t.Context())
	require.NoError(t, err)
	require.Zero(t, pending)
	s.Buy(t, lost, "user-0")
}

// The units of an ended sale cannot be bought, and a rebuild does not need their releases.
func TestReleaseOfEndedSaleCompletesWithoutRedis(t *testing.T) {
	t.Parallel()
	for name, over := range map[string]string{
		"ended by an operator": "UPDATE sales SET state = 'ended' WHERE id = $1",
		"closed":               "UPDATE sales SET closes_at = now() WHERE id = $1",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale, _ := cancelledOrders(t, s, 2)
			s.Lose(t, sale)
			testwork.ReleaseUnits(t, s)
			require.EqualValues(t, 2, s.Count(t, testshop.PendingReleases))
			require.NoError(t, s.Exec(t, over, sale))
			retryReleasesNow(t, s)
			released := testwork.ReleaseUnits(t, s)
			require.Equal(t, 2, released)
			require.Zero(t, s.Count(t, testshop.PendingReleases))
		})
	}
}

// Redis has one unit too many, so the last release would exceed the stock.
func TestReleaseBeyondStockIsRefused(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, _ := cancelledOrders(t, s, 3)
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", 1).Err())
	released := testwork.ReleaseUnits(t, s)
	require.Equal(t, 2, released)
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM releases WHERE refusals = 1"))
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", -1).Err())
	retryReleasesNow(t, s)
	released = testwork.ReleaseUnits(t, s)
	require.Equal(t, 1, released)
	require.EqualValues(t, 10, s.Left(t, sale))
}

// The clock of the sale's creator was ahead, so the time in its id is in the future.
func TestReleaseOfSaleWithFutureID(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, _ := cancelledOrders(t, s, 2)
	future := sale
	future[0]++ // half a year
	rename := func(key func(int, uuid.UUID) string) {
		require.NoError(t, s.Rdb.Rename(t.Context(), key(0, sale), key(0, future)).Err())
	}
	rename(s.Keys.Sale)
	rename(s.Keys.Buyers)
	require.NoError(t, s.Exec(t, "UPDATE releases SET sale_id = $1", future))
	released := testwork.ReleaseUnits(t, s)
	require.Equal(t, 2, released)
	require.EqualValues(t, 10, s.Left(t, future))
}

func TestPendingReleasesAreCounted(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	l := ledger.New(s.Pool)
	require.NoError(t, s.Exec(t, `INSERT INTO releases (order_id, sale_id, user_id, quantity)
		SELECT gen_random_uuid(), gen_random_uuid(), 'ann', 1 FROM generate_series(1, $1)`, ledger.ReleasesCountMax-1))
	pending, err := l.PendingReleases(t.Context())
	require.NoError(t, err)
	require.Equal(t, ledger.ReleasesCountMax-1, pending)
	require.NoError(t, s.Exec(t,
		"INSERT INTO releases SELECT gen_random_uuid(), sale_id, user_id, quantity FROM releases LIMIT 2"))
	pending, err = l.PendingReleases(t.Context())
	require.NoError(t, err)
	require.Equal(t, ledger.ReleasesCountMax, pending, "the count is bounded")
}
