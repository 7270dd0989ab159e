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
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation"
)

// openPayable opens a sale with a payment window.
func openPayable(s *testshop.Shop, t testing.TB, stock int64) uuid.UUID {
	t.Helper()
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "test", Stock: stock, PerOrderLimit: 10, PaymentWindow: paymentWindow,
	})
	require.NoError(t, err)
	return sale.ID
}

// left is how many units Redis has for sale, -1 while it has none to speak of.
func left(s *testshop.Shop, t testing.TB, sale uuid.UUID) int64 {
	t.Helper()
	left, err := s.Rdb.HGet(t.Context(), s.Keys.Sale(0, sale), "left").Int64()
	if errors.Is(err, redis.Nil) {
		return -1
	}
	require.NoError(t, err)
	return left
}

// expire and giveBack are the turns of a sweeper, without a worker.
func expire(s *testshop.Shop, ctx context.Context) (int, error) {
	return fulfillment.SweepSales(ctx, fulfillment.NewExpirer(fulfillment.NewLedger(s.Pool), slog.Default()).Some)
}

func giveBack(s *testshop.Shop, ctx context.Context) (int, error) {
	return fulfillment.SweepSales(ctx, func(ctx context.Context, except []uuid.UUID) (uuid.UUID, int, error) {
		return fulfillment.NewLedger(s.Pool).ReleaseSome(ctx, s.Store, except)
	})
}

const (
	pendingReleases = "SELECT count(*) FROM releases"
	expiredOrders   = "SELECT count(*) FROM orders WHERE status = 'expired'"
	// brokenLogs counts orders whose events are not one for each version, or end elsewhere than the order.
	brokenLogs = `SELECT count(*) FROM orders AS o WHERE (SELECT array_agg(version ORDER BY version) FROM order_events WHERE order_id = o.id)
		IS DISTINCT FROM (SELECT array_agg(n) FROM generate_series(1, o.version) AS n)`
)

func TestWorkersReleaseUnpaidAndCancelledUnits(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := openPayable(s, t, 5)
	config, registry := testwork.Config(s, t), prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	users := []string{"ann", "bob", "cid", "dan", "eve"}
	orders := map[string]uuid.UUID{}
	for _, user := range users {
		orders[user] = s.Buy(t, sale, user)
	}
	s.AwaitConfirmed(t, 5)
	testwork.AwaitRest(s, t)
	answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "fay", Quantity: 1})
	require.NoError(t, err)
	require.Equal(t, reservation.SoldOut, answer.Verdict)

	ledger := fulfillment.NewLedger(s.Pool)
	_, err = ledger.Pay(t.Context(), orders["ann"], "ann", "pi_1")
	require.NoError(t, err)
	_, err = ledger.Cancel(t.Context(), orders["bob"], "bob")
	require.NoError(t, err)
	endWindow(t, s.Pool, orders["cid"], orders["dan"])
	testkit.Eventually(t, 10*time.Second, "three units are for sale again", func() bool { return left(s, t, sale) == 3 })
	testkit.Eventually(t, 10*time.Second, "nothing waits to be given back", func() bool { return s.Count(t, pendingReleases) == 0 })
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed", "3 OrderExpired"}, history(t, s.Pool, orders["cid"]))
	require.Equal(t, reservation.Order{
		ID: orders["cid"], SaleID: sale, UserID: "cid", Quantity: 1, Status: reservation.StatusExpired, Version: 3,
		ReservedAt: orderOfID(t, s.Pool, orders["cid"]).ReservedAt,
	}, orderOfID(t, s.Pool, orders["cid"]))
	require.EqualValues(t, 2, soldOf(t, s.Pool, sale))
	counted, err := s.Catalog.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 1, 1}, []int64{counted.Available, counted.Held, counted.Sold})

	// Who gave a unit up may buy again, and so may who did not pay; and somebody else.
	for _, user := range []string{"bob", "cid", "fay"} {
		testkit.Eventually(t, 10*time.Second, user+" buys", func() bool {
			answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
			require.NoError(t, err)
			return answer.Verdict == reservation.Reserved // an ingress may believe for a moment that it is sold out
		})
	}
	s.AwaitConfirmed(t, 4) // and ann has paid
	testwork.AwaitRest(s, t)
	require.EqualValues(t, 5, soldOf(t, s.Pool, sale))
	require.EqualValues(t, 2, valueOf(t, registry, "stampede_orders_total", "expired"))
	require.False(t, audit(s, t, sale).Broken(), textOf(t, audit(s, t, sale)))
	stop()
}

func TestConcurrentSweepersExpireAndReleaseOnce(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	const perSale = 700 // more than one batch
	sales := []uuid.UUID{openPayable(s, t, perSale), openPayable(s, t, perSale), openPayable(s, t, perSale)}
	var orders []uuid.UUID
	for _, sale := range sales {
		require.Equal(t, perSale, crowd(s, t, sale, perSale))
		for _, out := range fulfil(s, t) {
			orders = append(orders, out.Event.OrderID)
		}
	}
	endWindow(t, s.Pool, orders...)
	together := func(turn func(context.Context) (int, error)) {
		done := make([]int, 4)
		var all errgroup.Group
		for i := range done {
			all.Go(func() (err error) {
				done[i], err = turn(t.Context())
				return err
			})
		}
		require.NoError(t, all.Wait())
		left, err := turn(t.Context()) // a sweeper may stop while another one has the rest in hand
		require.NoError(t, err)
		require.Zero(t, left)
		require.Equal(t, len(orders), done[0]+done[1]+done[2]+done[3])
	}
	together(func(ctx context.Context) (int, error) { return expire(s, ctx) })
	require.EqualValues(t, len(orders), s.Count(t, expiredOrders))
	require.EqualValues(t, len(orders), s.Count(t, pendingReleases))
	require.Zero(t, s.Count(t, brokenLogs))
	report := audit(s, t, uuid.Nil)
	require.False(t, report.Broken(), textOf(t, report))
	together(func(ctx context.Context) (int, error) { return giveBack(s, ctx) })
	require.Zero(t, s.Count(t, pendingReleases))
	for _, sale := range sales {
		require.EqualValues(t, perSale, left(s, t, sale))
		require.Zero(t, soldOf(t, s.Pool, sale))
		require.Zero(t, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())
	}
}

func TestSweepIsBoundedAndOfOneSale(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	first, second := newPayableSale(t, s.Pool, 2000), newPayableSale(t, s.Pool, 2000)
	orders := append(confirm(t, s.Pool, first, fulfillment.SweepMax+1), confirm(t, s.Pool, second, 1)...)
	endWindow(t, s.Pool, orders...)
	ledger := fulfillment.NewLedger(s.Pool)
	var batches []int
	for range 3 {
		_, n, err := fulfillment.NewExpirer(ledger, testkit.Logger(t)).Some(t.Context(), []uuid.UUID{})
		require.NoError(t, err)
		batches = append(batches, n)
	}
	require.ElementsMatch(t, []int{fulfillment.SweepMax, 1, 1}, batches)
	sale, n, err := fulfillment.NewExpirer(ledger, testkit.Logger(t)).Some(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, uuid.Nil, sale)
}

func TestFaultySaleDoesNotBlockExpiryOfOtherSales(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	var sales, orders []uuid.UUID
	for range 5 {
		sale := openPayable(s, t, 10)
		sales = append(sales, sale)
		crowd(s, t, sale, 10)
		for _, out := range fulfil(s, t) {
			orders = append(orders, out.Event.OrderID)
		}
	}
	endWindow(t, s.Pool, orders...)
	broken := sales[2]
	// Nobody can take back what is not sold.
	_, err := s.Pool.Exec(t.Context(), "UPDATE sales SET sold = 0 WHERE id = $1", broken)
	require.NoError(t, err)
	expired, err := expire(s, t.Context())
	require.ErrorContains(t, err, "sale="+broken.String())
	require.Equal(t, 40, expired)
	_, err = s.Pool.Exec(t.Context(), "UPDATE sales SET sold = 10 WHERE id = $1", broken)
	require.NoError(t, err)
	expired, err = expire(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 10, expired)

	// Nor give back to what is no sale.
	key := s.Keys.Sale(0, broken)
	kept := s.Rdb.Dump(t.Context(), key).Val()
	require.NoError(t, s.Rdb.Set(t.Context(), key, "rubbish", 0).Err())
	released, err := giveBack(s, t.Context())
	require.ErrorContains(t, err, "sale="+broken.String())
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.Equal(t, 40, released)
	require.EqualValues(t, 10, s.Count(t, "SELECT count(*) FROM releases WHERE sale_id = $1", broken))
	require.NoError(t, s.Rdb.RestoreReplace(t.Context(), key, 0, kept).Err())
	released, err = giveBack(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 10, released)
	for _, sale := range sales {
		require.EqualValues(t, 10, left(s, t, sale))
	}
}

func TestReleasesRetryUntilRedisAnswers(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	s := testshop.NewShopOn(t, testkit.Pool(t), server.URL, reservation.Keys{Prefix: "test", Partitions: 1})
	sale := openPayable(s, t, 10)
	orders := []uuid.UUID{s.Buy(t, sale, "ann"), s.Buy(t, sale, "bob")}
	fulfil(s, t)
	config, registry := testwork.Config(s, t), prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	server.Kill()
	_, err := fulfillment.NewLedger(s.Pool).Cancel(t.Context(), orders[0], "ann")
	require.NoError(t, err, "an order can be cancelled without Redis")
	endWindow(t, s.Pool, orders[1])
	failing := func() float64 { return valueOf(t, registry, "stampede_worker_failing", "release") }
	testkit.Eventually(t, 30*time.Second, "orders expire without Redis, and their release is tried", func() bool {
		return s.Count(t, expiredOrders) == 1 && failing() == 1
	})
	require.EqualValues(t, 2, s.Count(t, pendingReleases))
	testkit.Eventually(t, 30*time.Second, "the worker counts them", func() bool { return gaugeOf(t, registry, "stampede_releases_pending") == 2 })
	require.NoError(t, server.Restart(t.Context()))
	testkit.Eventually(t, 30*time.Second, "the units are back", func() bool { return s.Count(t, pendingReleases) == 0 })
	// A rebuild forgets them first, and opens the sale with their units then.
	testkit.Eventually(t, 30*time.Second, "and for sale", func() bool { return left(s, t, sale) == 10 })
	testkit.Eventually(t, 30*time.Second, "the worker says so", func() bool {
		return failing() == 0 && gaugeOf(t, registry, "stampede_releases_pending") == 0
	})
	stop()
}

// The buyer is quicker than a worker that died after it had told Redis, and before it could note so.
func TestRepeatedReleaseKeepsNextOrderOfUser(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := openPayable(s, t, 3)
	first := s.Buy(t, sale, "ann")
	fulfil(s, t)
	_, err := fulfillment.NewLedger(s.Pool).Cancel(t.Context(), first, "ann")
	require.NoError(t, err)
	release := reservation.Release{SaleID: sale, OrderID: first, UserID: "ann"}
	_, err = s.Store.Release(t.Context(), []reservation.Release{release})
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Count(t, pendingReleases))

	second := s.Buy(t, sale, "ann")
	fulfil(s, t)
	released, err := giveBack(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, released)
	require.EqualValues(t, 2, left(s, t, sale))
	held, err := s.Store.FindReserved(t.Context(), second, "ann")
	require.NoError(t, err)
	require.Equal(t, second, held.ID)
	require.False(t, audit(s, t, sale).Broken(), textOf(t, audit(s, t, sale)))
}

func TestExpiryRequiresHeartbeatAfterDeadline(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := newPayableSale(t, s.Pool, 10)
	orders := confirm(t, s.Pool, sale, 3)
	for name, c := range map[string]struct {
		expiresAt, seenAt string
		expires           bool
	}{
		"seen after the deadline":                  {"now() - interval '2 s'", "now() - interval '1 s'", true},
		"not seen since":                           {"now() - interval '1 s'", "now() - interval '2 s'", false},
		"seen after it, and not lately":            {"now() - interval '2 h'", "now() - interval '1 h'", true},
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
			got, err := fulfillment.LockOverdue(t.Context(), tx, []uuid.UUID{}, []uuid.UUID{}, fulfillment.SweepMax)
			require.NoError(t, err)
			require.Equal(t, len(want), len(got))
			order, overdue, err := fulfillment.LockOrder(t.Context(), tx, orders[0], "user-1")
			require.NoError(t, err)
			require.Equal(t, c.expires, overdue, "buyers and sweepers have one rule")
			require.Equal(t, orders[0], order.ID)
		})
	}
}

func TestSweepRunsUntilEmptyAndStopsOnError(t *testing.T) {
	t.Parallel()
	bad, good := uuid.New(), uuid.New()
	away := errors.New("away")
	steps := 0
	done, err := fulfillment.SweepSales(t.Context(), func(_ context.Context, except []uuid.UUID) (uuid.UUID, int, error) {
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
