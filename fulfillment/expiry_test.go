package fulfillment_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

func TestWorkersReleaseUnpaidAndCancelledUnits(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 5)
	config, registry := testwork.Config(t, s), prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	users := []string{"ann", "bob", "cid", "dan", "eve"}
	orders := map[string]uuid.UUID{}
	for _, user := range users {
		orders[user] = s.Buy(t, sale, user)
	}
	s.AwaitConfirmed(t, 5)
	testwork.AwaitRest(t, s)
	answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "fay", Quantity: 1})
	require.NoError(t, err)
	require.Equal(t, reservation.SoldOut, answer.Verdict)

	l := ledger.New(s.Pool)
	testwork.Pay(t, l, orders["ann"], "ann", "pi_1")
	testwork.Cancel(t, l, orders["bob"], "bob")
	testwork.EndWindow(t, s.Pool, orders["cid"], orders["dan"])
	testkit.Eventually(t, 30*time.Second, "three units are for sale again", func() bool { return s.Left(t, sale) == 3 })
	testkit.Eventually(
		t, 30*time.Second, "all units are released", func() bool { return s.Count(t, testshop.PendingReleases) == 0 },
	)
	require.Equal(
		t, []string{"1 OrderReserved", "2 OrderConfirmed", "3 OrderExpired"}, testshop.History(t, s.Pool, orders["cid"]),
	)
	expired := testwork.Order(t, s.Pool, orders["cid"])
	require.NotZero(t, expired.UpdatedAt)
	require.Equal(t, order.Order{
		ID: orders["cid"], SaleID: sale, UserID: "cid", Quantity: 1, Status: order.StatusExpired, Version: 3,
		ReservedAt: expired.ReservedAt, UpdatedAt: expired.UpdatedAt,
	}, expired)
	require.EqualValues(t, 2, testshop.Sold(t, s.Pool, sale))
	counted, err := s.Catalog.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 1, 1}, []int64{counted.Available, counted.Held, counted.Sold})

	// A user who cancelled, one who did not pay, and another one can buy.
	for _, user := range []string{"bob", "cid", "fay"} {
		testkit.Eventually(t, 30*time.Second, user+" buys", func() bool {
			answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
			require.NoError(t, err)
			return answer.Verdict == reservation.Reserved // an ingress may briefly remember the sale as sold out
		})
	}
	s.AwaitConfirmed(t, 4) // and ann has paid
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 5, testshop.Sold(t, s.Pool, sale))
	testwork.RequireUnbroken(t, s, sale)
	stop() // orders are counted after their commit
	require.EqualValues(t, 2, testshop.Metric(t, registry, "stampede_orders_total", "expired"))
}

func TestSweepIsBoundedAndOfOneSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	first, second := testshop.NewPayableSale(t, s.Pool, 2000), testshop.NewPayableSale(t, s.Pool, 2000)
	orders := append(testwork.Confirm(t, s.Pool, first, ledger.SweepMax+1), testwork.Confirm(t, s.Pool, second, 1)...)
	testwork.EndWindow(t, s.Pool, orders...)
	l := ledger.New(s.Pool)
	var batches []int
	for range 3 {
		_, n, err := ledger.NewExpirer(l, testkit.Logger(t)).ExpireSome(t.Context(), []uuid.UUID{})
		require.NoError(t, err)
		batches = append(batches, n)
	}
	require.ElementsMatch(t, []int{ledger.SweepMax, 1, 1}, batches)
	sale, n, err := ledger.NewExpirer(l, testkit.Logger(t)).ExpireSome(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, uuid.Nil, sale)
}

func TestFaultySaleDoesNotBlockExpiryOfOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	var sales, orders []uuid.UUID
	for range 5 {
		sale := s.OpenPayable(t, 10)
		sales = append(sales, sale)
		s.Crowd(t, sale, 10)
		for _, out := range testwork.Fulfil(t, s) {
			orders = append(orders, out.Event.OrderID)
		}
	}
	testwork.EndWindow(t, s.Pool, orders...)
	broken := sales[2]
	// More units than sold cannot be taken back.
	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = 0 WHERE id = $1", broken))
	expired, err := testwork.TryExpire(t.Context(), s)
	require.ErrorContains(t, err, "sale="+broken.String())
	require.Equal(t, 40, expired)
	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = 10 WHERE id = $1", broken))
	expired = testwork.Expire(t, s)
	require.Equal(t, 10, expired)

	// Units cannot be released in a key that is not a sale.
	key := s.Keys.Sale(0, broken)
	kept := s.Rdb.Dump(t.Context(), key).Val()
	require.NoError(t, s.Rdb.Set(t.Context(), key, "not a sale", 0).Err())
	released, err := testwork.TryReleaseUnits(t.Context(), s)
	require.ErrorContains(t, err, "sale="+broken.String())
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.Equal(t, 40, released)
	require.EqualValues(t, 10, s.Count(t, "SELECT count(*) FROM releases WHERE sale_id = $1", broken))
	require.NoError(t, s.Rdb.RestoreReplace(t.Context(), key, 0, kept).Err())
	released = testwork.ReleaseUnits(t, s)
	require.Equal(t, 10, released)
	for _, sale := range sales {
		require.EqualValues(t, 10, s.Left(t, sale))
	}
}

func TestReleasesRetryUntilRedisAnswers(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.OpenPayable(t, 10)
	orders := []uuid.UUID{s.Buy(t, sale, "ann"), s.Buy(t, sale, "bob")}
	testwork.Fulfil(t, s)
	config, registry := testwork.Config(t, s), prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	s.Server.Kill()
	_, err := ledger.New(s.Pool).Cancel(t.Context(), orders[0], "ann")
	require.NoError(t, err, "an order can be cancelled without Redis")
	testwork.EndWindow(t, s.Pool, orders[1])
	failing := func() float64 { return testshop.Metric(t, registry, "stampede_worker_failing", "release") }
	testkit.Eventually(t, 30*time.Second, "orders expire without Redis, and their release is tried", func() bool {
		return s.Count(t, testshop.ExpiredOrders) == 1 && failing() == 1
	})
	require.EqualValues(t, 2, s.Count(t, testshop.PendingReleases))
	testkit.Eventually(t, 30*time.Second, "the metrics count the releases",
		func() bool { return testshop.Metric(t, registry, "stampede_releases_pending", "") == 2 })
	require.NoError(t, s.Server.Restart(t.Context()))
	testkit.Eventually(t, 30*time.Second, "the units are released",
		func() bool { return s.Count(t, testshop.PendingReleases) == 0 })
	// A rebuild deletes the releases before it opens the sale with their units.
	testkit.Eventually(t, 30*time.Second, "the units are for sale", func() bool { return s.Left(t, sale) == 10 })
	testkit.Eventually(t, 30*time.Second, "the metrics show it", func() bool {
		return failing() == 0 && testshop.Metric(t, registry, "stampede_releases_pending", "") == 0
	})
	stop()
}

// A worker crashes after it has released the units in Redis and before it records so; the user buys before the retry.
func TestRepeatedReleaseKeepsNextOrderOfUser(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 3)
	first := s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	testwork.Cancel(t, ledger.New(s.Pool), first, "ann")
	release := reservation.Release{SaleID: sale, OrderID: first, UserID: "ann"}
	_, err := s.Store.Release(t.Context(), []reservation.Release{release})
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Count(t, testshop.PendingReleases))

	second := s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	released := testwork.ReleaseUnits(t, s)
	require.Equal(t, 1, released)
	require.EqualValues(t, 2, s.Left(t, sale))
	held, err := s.Store.FindReserved(t.Context(), second, "ann")
	require.NoError(t, err)
	require.Equal(t, second, held.ID)
	testwork.RequireUnbroken(t, s, sale)
}

func TestExpiryRequiresHeartbeatAfterDeadline(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := testshop.NewPayableSale(t, s.Pool, 10)
	orders := testwork.Confirm(t, s.Pool, sale, 3)
	for name, c := range map[string]struct {
		expiresAt, seenAt string
		expires           bool
	}{
		"seen after the deadline":                  {"now() - interval '2 s'", "now() - interval '1 s'", true},
		"not seen since":                           {"now() - interval '1 s'", "now() - interval '2 s'", false},
		"seen after it, not recently":              {"now() - interval '2 h'", "now() - interval '1 h'", true},
		"not seen for long":                        {"now() - interval '1 h'", "now() - interval '2 h'", false},
		"in time":                                  {"now() + interval '1 h'", "now()", false},
		"in time, and a heartbeat from the future": {"now() + interval '1 h'", "now() + interval '2 h'", false},
		"no heartbeat":                             {"now() - interval '1 h'", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			tx, err := s.Pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			_, err = tx.Exec(t.Context(), "UPDATE orders SET due = "+c.expiresAt+" WHERE id = $1", orders[0])
			require.NoError(t, err)
			if c.seenAt == "" {
				_, err = tx.Exec(t.Context(), "DELETE FROM pulse")
			} else {
				_, err = tx.Exec(t.Context(), "UPDATE pulse SET seen_at = "+c.seenAt)
			}
			require.NoError(t, err)
			var want []uuid.UUID
			if c.expires {
				want = orders[:1]
			}
			got, err := ledger.LockOverdue(t.Context(), tx, []uuid.UUID{}, []uuid.UUID{}, ledger.SweepMax)
			require.NoError(t, err)
			require.Equal(t, len(want), len(got))
			o, overdue, err := ledger.New(s.Pool).LockOrder(t.Context(), tx, orders[0], new("user-1"))
			require.NoError(t, err)
			require.Equal(t, c.expires, overdue, "buyers and sweepers follow the same rule")
			require.Equal(t, orders[0], o.ID)
		})
	}
}

func TestSweepRunsUntilEmptyAndStopsOnError(t *testing.T) {
	t.Parallel()
	bad, good := uuid.New(), uuid.New()
	away := errors.New("away")
	steps := 0
	done, err := ledger.SweepSales(t.Context(), func(_ context.Context, except []uuid.UUID) (uuid.UUID, int, error) {
		switch steps++; steps {
		case 1:
			require.Empty(t, except)
			require.NotNil(t, except)
			return bad, 0, errors.New("bad sale")
		case 2, 3:
			require.Equal(t, []uuid.UUID{bad}, except)
			return good, 5, nil
		default:
			return uuid.Nil, 0, away
		}
	})
	require.Equal(t, 10, done)
	require.ErrorIs(t, err, away)
	require.ErrorContains(t, err, fmt.Sprintf("sale=%s: bad sale", bad))
	require.Equal(t, 4, steps)
}
