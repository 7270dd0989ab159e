package fulfillment_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/ledger"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation"
)

// cancelled opens a sale of 10 units, and returns orders of so many users that have bought one each and
// given it up again. Redis has not been told.
func cancelled(s *testshop.Shop, t testing.TB, users int) (sale uuid.UUID, orders []uuid.UUID) {
	t.Helper()
	sale = s.OpenPayable(t, 10)
	for n := range users {
		orders = append(orders, s.Buy(t, sale, fmt.Sprintf("user-%d", n)))
	}
	testwork.Fulfil(s, t)
	for n, order := range orders {
		_, err := ledger.New(s.Pool).Cancel(t.Context(), order, fmt.Sprintf("user-%d", n))
		require.NoError(t, err)
	}
	return sale, orders
}

// waitNoLonger lets the releases that Redis refused be tried again at once.
func waitNoLonger(s *testshop.Shop, t testing.TB) {
	t.Helper()
	_, err := s.Pool.Exec(t.Context(), "UPDATE releases SET again_at = now()")
	require.NoError(t, err)
}

func TestReleaseWaitsUntilRedisHasSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	lost, _ := cancelled(s, t, 2)
	other, _ := cancelled(s, t, 3)
	_, err := s.Pool.Exec(t.Context(), "UPDATE releases SET again_at = again_at - interval '1 h' WHERE sale_id = $1", lost)
	require.NoError(t, err) // so that the lost one is in front
	bringBack := s.Lose(t, lost)

	released, err := testwork.ReleaseUnits(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 3, released, "it keeps no other sale from its turn")
	require.EqualValues(t, 10, s.Left(t, other))
	require.EqualValues(t, 2, s.Count(t, "SELECT count(*) FROM releases WHERE sale_id = $1 AND refusals = 1", lost))
	pending, err := ledger.New(s.Pool).PendingReleases(t.Context())
	require.ErrorIs(t, err, ledger.ErrRefused)
	require.ErrorContains(t, err, lost.String())
	require.Equal(t, 2, pending)
	before := s.Count(t, "SELECT extract(epoch FROM min(again_at) - now())::bigint FROM releases")
	for range 4 {
		waitNoLonger(s, t)
		_, err = testwork.ReleaseUnits(s, t.Context())
		require.NoError(t, err)
	}
	require.Greater(t, s.Count(t, "SELECT extract(epoch FROM min(again_at) - now())::bigint FROM releases"), before+5,
		"it is asked less and less often")

	bringBack()
	waitNoLonger(s, t)
	for _, want := range []int{2, 0} {
		released, err = testwork.ReleaseUnits(s, t.Context())
		require.NoError(t, err)
		require.Equal(t, want, released)
		require.EqualValues(t, 10, s.Left(t, lost))
	}
	pending, err = ledger.New(s.Pool).PendingReleases(t.Context())
	require.NoError(t, err)
	require.Zero(t, pending)
	s.Buy(t, lost, "user-0")
}

// Nobody will buy what comes back, and a Redis that is made anew does not count it.
func TestReleaseOfEndedSaleCompletesWithoutRedis(t *testing.T) {
	t.Parallel()
	for name, over := range map[string]string{
		"ended by an operator": "UPDATE sales SET state = 'ended' WHERE id = $1",
		"closed":               "UPDATE sales SET closes_at = now() WHERE id = $1",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t, testkit.Pool(t))
			sale, _ := cancelled(s, t, 2)
			s.Lose(t, sale)
			_, err := testwork.ReleaseUnits(s, t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 2, s.Count(t, testshop.PendingReleases))
			_, err = s.Pool.Exec(t.Context(), over, sale)
			require.NoError(t, err)
			waitNoLonger(s, t)
			released, err := testwork.ReleaseUnits(s, t.Context())
			require.NoError(t, err)
			require.Equal(t, 2, released)
			require.Zero(t, s.Count(t, testshop.PendingReleases))
		})
	}
}

// With one more unit left than there should be, the last release would make more of them than are for sale.
func TestReleaseBeyondStockIsRefused(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale, _ := cancelled(s, t, 3)
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", 1).Err())
	released, err := testwork.ReleaseUnits(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, released)
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM releases WHERE refusals = 1"))
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", -1).Err())
	waitNoLonger(s, t)
	released, err = testwork.ReleaseUnits(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, released)
	require.EqualValues(t, 10, s.Left(t, sale))
}

// The clock of whoever created the sale was ahead: its id looks as if it did not exist yet.
func TestReleaseOfSaleWithFutureID(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale, _ := cancelled(s, t, 2)
	future := sale
	future[0]++ // half a year
	dump := func(key func(int, uuid.UUID) string) {
		require.NoError(t, s.Rdb.Rename(t.Context(), key(0, sale), key(0, future)).Err())
	}
	dump(s.Keys.Sale)
	dump(s.Keys.Buyers)
	_, err := s.Pool.Exec(t.Context(), "UPDATE releases SET sale_id = $1", future)
	require.NoError(t, err)
	released, err := testwork.ReleaseUnits(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, released)
	require.EqualValues(t, 10, s.Left(t, future))
}

func TestHangingRedisDoesNotDelayExpiry(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	s := testshop.NewShopOn(t, testkit.Pool(t), server.URL, reservation.Keys{Prefix: "test", Partitions: 1})
	for range 6 { // a turn of the releases asks for each of them until it gives up
		cancelled(s, t, 1)
	}
	order := s.Buy(t, s.OpenPayable(t, 1), "ann")
	testwork.Fulfil(s, t)
	server.Freeze()
	defer server.Thaw()
	config, registry := testwork.Config(s, t), prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	testkit.Eventually(t, 20*time.Second, "somebody waits for Redis with releases in hand", func() bool {
		tx, err := s.Pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		var free int
		require.NoError(t, tx.QueryRow(t.Context(),
			"SELECT count(*) FROM (SELECT FROM releases FOR UPDATE SKIP LOCKED) AS free").Scan(&free))
		return free < 6
	})
	testwork.EndWindow(t, s.Pool, order)
	testkit.Eventually(t, 20*time.Second, "the order expires",
		func() bool { return s.Count(t, testshop.ExpiredOrders) == 1 })
	require.Zero(t, testshop.ValueOf(t, registry, "stampede_worker_failing", "release"),
		"the releases' turn is not over yet")
	server.Thaw()
	testkit.Eventually(t, 30*time.Second, "all units are back",
		func() bool { return s.Count(t, testshop.PendingReleases) == 0 })
	stop()
}

// gaugeOf is the value of a gauge without labels.
func gaugeOf(t testing.TB, from prometheus.Gatherer, name string) float64 {
	t.Helper()
	families, err := from.Gather()
	require.NoError(t, err)
	for _, family := range families {
		if family.GetName() == name {
			return family.GetMetric()[0].GetGauge().GetValue()
		}
	}
	require.Fail(t, "no such metric", name)
	return 0
}

func TestPendingReleasesAreCounted(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	l := ledger.New(s.Pool)
	_, err := s.Pool.Exec(t.Context(), `INSERT INTO releases (order_id, sale_id, user_id, quantity)
		SELECT gen_random_uuid(), gen_random_uuid(), 'ann', 1 FROM generate_series(1, $1)`, ledger.ReleasesCountMax-1)
	require.NoError(t, err)
	pending, err := l.PendingReleases(t.Context())
	require.NoError(t, err)
	require.Equal(t, ledger.ReleasesCountMax-1, pending)
	_, err = s.Pool.Exec(t.Context(),
		"INSERT INTO releases SELECT gen_random_uuid(), sale_id, user_id, quantity FROM releases LIMIT 2")
	require.NoError(t, err)
	pending, err = l.PendingReleases(t.Context())
	require.NoError(t, err)
	require.Equal(t, ledger.ReleasesCountMax, pending, "and no more")
}
