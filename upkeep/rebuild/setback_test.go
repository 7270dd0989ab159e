package rebuild_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/rebuild"
)

// snapshot is the data of Redis, as in a snapshot of its virtual machine.
type snapshot map[string]string

func takeSnapshot(s *testshop.Shop, t *testing.T) snapshot {
	t.Helper()
	taken := snapshot{}
	for _, key := range s.Rdb.Keys(t.Context(), s.Keys.Prefix+":*").Val() {
		value, err := s.Rdb.Dump(t.Context(), key).Result()
		if !errors.Is(err, redis.Nil) { // it has expired
			require.NoError(t, err)
			taken[key] = value
		}
	}
	return taken
}

// setBack restores a snapshot in one step, within the same process and with its loaded scripts.
func setBack(s *testshop.Shop, t *testing.T, to snapshot) {
	t.Helper()
	runID := s.Rdb.InfoMap(t.Context(), "server").Item("Server", "run_id")
	now := s.Rdb.Keys(t.Context(), s.Keys.Prefix+":*").Val()
	_, err := s.Rdb.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
		p.Del(t.Context(), now...)
		for key, value := range to {
			p.Restore(t.Context(), key, 0, value)
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, runID, s.Rdb.InfoMap(t.Context(), "server").Item("Server", "run_id"))
}

// newIngress returns an ingress that has seen no sale.
func newIngress(s *testshop.Shop, t *testing.T) *testshop.Shop {
	t.Helper()
	return testshop.NewShopOn(t, s.Pool, "redis://"+s.Rdb.(*redis.Client).Options().Addr, s.Keys)
}

// setBackShop returns a sale of which Redis lost the orders of "lost-…", which are in Postgres, and sold as many units
// to others since, so its highest place equals that of Postgres.
func setBackShop(t *testing.T, stock, lost int) (s testshop.LostShop, sale uuid.UUID) {
	t.Helper()
	s = testshop.NewLostShop(t)
	sale = s.Open(t, int64(stock))
	for i := range 5 {
		s.Buy(t, sale, fmt.Sprint("kept-", i))
	}
	testwork.Fulfil(s.Shop, t)
	before := takeSnapshot(s.Shop, t)
	for i := range lost {
		s.Buy(t, sale, fmt.Sprint("lost-", i))
	}
	testwork.Fulfil(s.Shop, t)
	setBack(s.Shop, t, before)
	ingress := newIngress(s.Shop, t)
	for i := range lost {
		ingress.Buy(t, sale, fmt.Sprint("new-", i))
	}
	require.Equal(t, fmt.Sprint(5+lost), s.SaleInRedis(t, sale)["sequence"])
	testwork.RequireNoNeeds(s.Shop, t, 1) // no number differs
	return s, sale
}

// awaitRebuilt waits until the sale is in the epoch in Redis and Postgres, and its rebuilds have finished: a partition
// sells again only when its server is verified, after its sales are open.
func awaitRebuilt(s *testshop.Shop, t *testing.T, registry *prometheus.Registry, sale uuid.UUID, epoch int64) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "the sale is rebuilt", func() bool {
		return s.EpochOf(t, sale) == epoch && s.SaleInRedis(t, sale)["epoch"] == fmt.Sprint(epoch) &&
			testwork.Rebuilds(t, registry) >= float64(epoch-1)
	})
}

// A Redis that is set back within one process is found when Postgres refuses an order that Redis has accepted.
func TestRebuildAfterRedisIsSetBackInPlace(t *testing.T) {
	t.Parallel()
	t.Run("user buys again", func(t *testing.T) {
		t.Parallel()
		s, sale := setBackShop(t, 100, 10)
		registry, _ := testwork.Guarded(s.Shop, t)
		s.AwaitConfirmed(t, 25)
		ingress := newIngress(s.Shop, t)
		ingress.Buy(t, sale, "lost-3") // a live order in Postgres
		awaitRebuilt(s.Shop, t, registry, sale, 2)
		for _, user := range []string{"lost-3", "lost-7", "kept-1", "new-2"} {
			require.Equal(t, reservation.AlreadyPurchased, ingress.Reserve(t, sale, user, 1, "").Verdict, user)
		}
		ingress.Buy(t, sale, "another")
		s.AwaitConfirmed(t, 26)
		testwork.AwaitRest(s.Shop, t)
		s.RequireSound(t)
		require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE status = 'rejected'"),
			"the refused order")
		require.Equal(t, 1.0, testshop.ValueOf(t, registry, "stampede_rebuilds_total", rebuild.ReasonRefused))
		require.Equal(t, 1.0, testwork.Rebuilds(t, registry), "one rebuild")
	})
	t.Run("stock sold out", func(t *testing.T) {
		t.Parallel()
		s, sale := setBackShop(t, 30, 10) // of which Postgres has sold 25, and Redis 15
		registry, _ := testwork.Guarded(s.Shop, t)
		s.AwaitConfirmed(t, 25)
		ingress := newIngress(s.Shop, t)
		require.Equal(t, 15, ingress.Crowd(t, sale, 15))
		awaitRebuilt(s.Shop, t, registry, sale, 2)
		require.Equal(t, reservation.SoldOut, ingress.Reserve(t, sale, "late", 1, "").Verdict)
		s.AwaitConfirmed(t, 30)
		testwork.AwaitRest(s.Shop, t)
		s.RequireSound(t)
		require.EqualValues(t, 10,
			s.Count(t, "SELECT count(*) FROM orders WHERE status = 'rejected' AND reason = 'sold-out'"))
		require.Equal(t, 1.0, testwork.Rebuilds(t, registry))
	})
}

// The worker finds the loss before Postgres refuses an order.
func TestWorkerDetectsLostRecordedOrders(t *testing.T) {
	t.Parallel()
	s := testshop.NewLostShop(t)
	sale := s.Open(t, 100)
	for i := range 5 {
		s.Buy(t, sale, fmt.Sprint("kept-", i))
	}
	testwork.Fulfil(s.Shop, t)
	early := takeSnapshot(s.Shop, t)
	ingress := newIngress(s.Shop, t)
	for i := range 8 {
		ingress.Buy(t, sale, fmt.Sprint("new-", i))
	}
	testwork.Fulfil(s.Shop, t)
	other := takeSnapshot(s.Shop, t) // with the highest place that Postgres will have
	setBack(s.Shop, t, early)
	require.NoError(t, testshop.ExecSQL(t, s.Shop, "DELETE FROM orders WHERE user_id LIKE 'new-%'"))
	require.NoError(t, testshop.ExecSQL(t, s.Shop, "DELETE FROM order_events WHERE user_id LIKE 'new-%'"))
	require.NoError(t, testshop.ExecSQL(t, s.Shop, "UPDATE sales SET sold = 5, last_sequence = 5"))

	registry, _ := testwork.Guarded(s.Shop, t)
	ingress = newIngress(s.Shop, t)
	for i := range 8 {
		ingress.Buy(t, sale, fmt.Sprint("lost-", i))
	}
	s.AwaitConfirmed(t, 13)
	testwork.AwaitRest(s.Shop, t)
	setBack(s.Shop, t, other)
	awaitRebuilt(s.Shop, t, registry, sale, 2)
	require.Equal(t, reservation.AlreadyPurchased, ingress.Reserve(t, sale, "lost-3", 1, "").Verdict)
	testwork.AwaitRest(s.Shop, t)
	testkit.Eventually(t, 20*time.Second, "the reason is set-back", func() bool {
		return testshop.ValueOf(t, registry, "stampede_rebuilds_total", rebuild.ReasonSetBack) == 1
	})
	s.RequireSound(t)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
}

// An order that Redis had not accepted is no proof when Postgres refuses it.
func TestUnknownRejectedOrderStartsNoRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 3)
	registry, _ := testwork.Guarded(s, t)
	for _, user := range []string{"ann", "bob", "cid"} {
		s.Buy(t, sale, user)
	}
	s.AwaitConfirmed(t, 3)
	testwork.AwaitRest(s, t)
	entries := s.Rdb.XRange(t.Context(), s.Keys.Orders(0), "-", "+").Val()
	forge := func(user string) {
		t.Helper()
		entry := forgedEntry(sale, user)
		require.NoError(t, s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: s.Keys.Orders(0), Values: entry}).Err())
	}
	for i := range 5 {
		forge("ann")                    // has a live order
		forge(fmt.Sprint("forged-", i)) // Postgres has no stock
	}
	require.NoError(t, s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: s.Keys.Orders(0), Values: entries[0].Values}).Err(),
		"a copy of an old entry")
	testkit.Eventually(t, 20*time.Second, "they are refused", func() bool {
		return s.Count(t, "SELECT count(*) FROM orders WHERE status = 'rejected'") == 10
	})
	testwork.AwaitRest(s, t)
	testwork.RequireNoNeeds(s, t, 1)
	require.Zero(t, testwork.Rebuilds(t, registry))
	require.EqualValues(t, 1, s.EpochOf(t, sale))
}

// forgedEntry returns an entry of an order that Redis never accepted.
func forgedEntry(sale uuid.UUID, user string) map[string]any {
	return stream.Values(order.OrderReserved{
		OrderID: order.NewOrderID(sale), SaleID: sale, UserID: user, Quantity: 1, Epoch: 1, ReservedAt: time.UnixMilli(1),
	})
}
