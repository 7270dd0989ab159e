package fulfillment_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
			require.Equal(t, 2, testwork.ReleaseUnits(t, s))
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
	require.Equal(t, 2, testwork.ReleaseUnits(t, s))
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
		Kind: order.KindOrder, ReservedAt: expired.ReservedAt, UpdatedAt: expired.UpdatedAt,
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
	require.Equal(t, 1, testwork.ReleaseUnits(t, s))
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

// TestExpirySkipsContradictoryOrder has an order that its log calls paid and its row confirmed, one whose row is behind
// its log, one whose row is ahead of it, and one whose deadline is -infinity, which expires nevertheless.
func TestExpirySkipsContradictoryOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, other := s.OpenPayable(t, 100), s.OpenPayable(t, 100)
	s.Crowd(t, sale, 40)
	s.Crowd(t, other, 10)
	var orders []uuid.UUID
	for _, out := range testwork.Fulfil(t, s) {
		orders = append(orders, out.Event.OrderID)
	}
	testwork.EndWindow(t, s.Pool, orders...)
	paid, behind, ahead, timeless := orders[7], orders[23], orders[27], orders[31]
	for query, id := range map[string]uuid.UUID{
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 3, 'OrderPaid', sale_id, user_id, quantity, now() FROM orders WHERE id = $1`: paid,
		"UPDATE orders SET version = 1 WHERE id = $1":       behind,
		"UPDATE orders SET version = 9 WHERE id = $1":       ahead,
		"UPDATE orders SET due = '-infinity' WHERE id = $1": timeless,
	} {
		require.NoError(t, s.Exec(t, query, id))
	}

	config, log, registry := testwork.Config(t, s), &testshop.CountingLog{}, prometheus.NewRegistry()
	config.Logger, config.Registerer = slog.New(log), registry
	stop := testwork.Work(t, config)
	testkit.Eventually(t, testshop.Soon, "all others have expired",
		func() bool { return s.Count(t, testshop.ExpiredOrders) == 47 })
	testkit.Eventually(t, testshop.Soon, "the metrics count the three contradictory orders", func() bool {
		return testshop.Metric(t, registry, "stampede_orders_set_aside", "") == 3
	})
	stop()
	require.Equal(t, 3, log.Times(ledger.QuarantinedMessage), "each is logged once")
	for _, o := range []uuid.UUID{paid, behind, ahead} {
		require.Equal(t, order.StatusConfirmed, testwork.Order(t, s.Pool, o).Status)
		require.Contains(t, testwork.Text(t, testwork.Audit(t, s, uuid.Nil)), o.String())
	}

	// They expire after the repair.
	require.NoError(t, s.Exec(t, "DELETE FROM order_events WHERE order_id = $1 AND version = 3", paid))
	testwork.RebuildProjections(t, s)
	expired := testwork.Expire(t, s)
	require.Equal(t, 3, expired)
	require.Zero(t, s.Count(t, testshop.BrokenLogs))
}
