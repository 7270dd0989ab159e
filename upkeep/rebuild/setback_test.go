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
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// snapshot is the data of Redis, as in a snapshot of its virtual machine.
type snapshot map[string]string

func takeSnapshot(t *testing.T, s *testshop.Shop) snapshot {
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
func setBack(t *testing.T, s *testshop.Shop, to snapshot) {
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
func newIngress(t *testing.T, s *testshop.Shop) *testshop.Shop {
	t.Helper()
	return testshop.NewShopOn(t, testshop.Options{
		Pool: s.Pool, RedisURL: "redis://" + s.Rdb.(*redis.Client).Options().Addr, Keys: s.Keys,
	})
}

// setBackShop returns a sale of which Redis lost the orders of "lost-…", which are in Postgres, and sold as many units
// to others since, so its highest place equals that of Postgres.
func setBackShop(t *testing.T, stock, lost int) (s *testshop.Shop, sale uuid.UUID) {
	t.Helper()
	s = testshop.OnOwnRedis(t, 1)
	sale = s.Open(t, int64(stock))
	for i := range 5 {
		s.Buy(t, sale, fmt.Sprint("kept-", i))
	}
	testwork.Fulfil(t, s)
	before := takeSnapshot(t, s)
	for i := range lost {
		s.Buy(t, sale, fmt.Sprint("lost-", i))
	}
	testwork.Fulfil(t, s)
	setBack(t, s, before)
	ingress := newIngress(t, s)
	for i := range lost {
		ingress.Buy(t, sale, fmt.Sprint("new-", i))
	}
	require.Equal(t, fmt.Sprint(5+lost), s.SaleInRedis(t, sale)["sequence"])
	testwork.RequireNoNeeds(t, s, 1) // no number differs
	return s, sale
}

// awaitRebuilt waits until the sale is in the epoch in Redis and Postgres, and its rebuilds have finished: a partition
// sells again only when its server is verified, after its sales are open.
func awaitRebuilt(t *testing.T, s *testshop.Shop, registry *prometheus.Registry, sale uuid.UUID, epoch int64) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "the sale is rebuilt", func() bool {
		return s.Epoch(t, sale) == epoch && s.SaleInRedis(t, sale)["epoch"] == fmt.Sprint(epoch) &&
			testwork.Rebuilds(t, registry) >= float64(epoch-1)
	})
}

// A Redis that is set back within one process is found when Postgres refuses an order that Redis has accepted.
func TestRebuildAfterRedisIsSetBackInPlace(t *testing.T) {
	t.Parallel()
	t.Run("user buys again", func(t *testing.T) {
		t.Parallel()
		s, sale := setBackShop(t, 100, 10)
		registry, _ := testwork.Guarded(t, s)
		s.AwaitConfirmed(t, 25)
		ingress := newIngress(t, s)
		ingress.Buy(t, sale, "lost-3") // a live order in Postgres
		awaitRebuilt(t, s, registry, sale, 2)
		for _, user := range []string{"lost-3", "lost-7", "kept-1", "new-2"} {
			require.Equal(t, reservation.AlreadyPurchased, ingress.Ask(t, sale, user).Verdict, user)
		}
		ingress.Buy(t, sale, "another")
		s.AwaitConfirmed(t, 26)
		testwork.AwaitRest(t, s)
		s.RequireSound(t)
		require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE status = 'rejected'"),
			"the refused order")
		require.Equal(t, 1.0, testshop.Metric(t, registry, "stampede_rebuilds_total", rebuild.ReasonRefused))
		require.Equal(t, 1.0, testwork.Rebuilds(t, registry), "one rebuild")
	})
	t.Run("stock sold out", func(t *testing.T) {
		t.Parallel()
		s, sale := setBackShop(t, 30, 10) // of which Postgres has sold 25, and Redis 15
		registry, _ := testwork.Guarded(t, s)
		s.AwaitConfirmed(t, 25)
		ingress := newIngress(t, s)
		require.Equal(t, 15, ingress.Crowd(t, sale, 15))
		awaitRebuilt(t, s, registry, sale, 2)
		require.Equal(t, reservation.SoldOut, ingress.Ask(t, sale, "late").Verdict)
		s.AwaitConfirmed(t, 30)
		testwork.AwaitRest(t, s)
		s.RequireSound(t)
		require.EqualValues(t, 10,
			s.Count(t, "SELECT count(*) FROM orders WHERE status = 'rejected' AND reason = 'sold-out'"))
		require.Equal(t, 1.0, testwork.Rebuilds(t, registry))
	})
}

// The worker finds the loss before Postgres refuses an order.
func TestWorkerDetectsLostRecordedOrders(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 100)
	for i := range 5 {
		s.Buy(t, sale, fmt.Sprint("kept-", i))
	}
	testwork.Fulfil(t, s)
	early := takeSnapshot(t, s)
	ingress := newIngress(t, s)
	for i := range 8 {
		ingress.Buy(t, sale, fmt.Sprint("new-", i))
	}
	testwork.Fulfil(t, s)
	other := takeSnapshot(t, s) // with the highest place that Postgres will have
	setBack(t, s, early)
	require.NoError(t, s.Exec(t, "DELETE FROM orders WHERE user_id LIKE 'new-%'"))
	require.NoError(t, s.Exec(t, "DELETE FROM order_events WHERE user_id LIKE 'new-%'"))
	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = 5, last_sequence = 5"))

	registry, _ := testwork.Guarded(t, s)
	ingress = newIngress(t, s)
	for i := range 8 {
		ingress.Buy(t, sale, fmt.Sprint("lost-", i))
	}
	s.AwaitConfirmed(t, 13)
	testwork.AwaitRest(t, s)
	setBack(t, s, other)
	awaitRebuilt(t, s, registry, sale, 2)
	require.Equal(t, reservation.AlreadyPurchased, ingress.Ask(t, sale, "lost-3").Verdict)
	testwork.AwaitRest(t, s)
	testkit.Eventually(t, 20*time.Second, "the reason is set-back", func() bool {
		return testshop.Metric(t, registry, "stampede_rebuilds_total", rebuild.ReasonSetBack) == 1
	})
	s.RequireSound(t)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
}

// An order that Redis had not accepted is no proof when Postgres refuses it.
func TestUnknownRejectedOrderStartsNoRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 3)
	registry, _ := testwork.Guarded(t, s)
	for _, user := range []string{"ann", "bob", "cid"} {
		s.Buy(t, sale, user)
	}
	s.AwaitConfirmed(t, 3)
	testwork.AwaitRest(t, s)
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
	testwork.AwaitRest(t, s)
	testwork.RequireNoNeeds(t, s, 1)
	require.Zero(t, testwork.Rebuilds(t, registry))
	require.EqualValues(t, 1, s.Epoch(t, sale))
}

// forgedEntry returns an entry of an order that Redis never accepted.
func forgedEntry(sale uuid.UUID, user string) map[string]any {
	return stream.Values(order.OrderReserved{
		OrderID: order.NewOrderID(sale), SaleID: sale, UserID: user, Quantity: 1, Epoch: 1, ReservedAt: time.UnixMilli(1),
	})
}

// A retry of a request whose order has ended never makes another order.
func TestRebuildRestoresKeysOfEndedOrders(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.OpenPayable(t, 20)
	made := map[order.Status]uuid.UUID{}
	for _, status := range []order.Status{order.StatusRejected, order.StatusCancelled, order.StatusExpired} {
		made[status] = s.Attempt(t, sale, string(status), 1, "k").Reservation.OrderID
		s.Attempt(t, sale, string(status)+"-without-key", 1, "")
		if status == order.StatusRejected {
			refuseAll(t, s)
		} else {
			testwork.Fulfil(t, s)
		}
	}
	cancel := func(id uuid.UUID, user string) {
		t.Helper()
		testwork.Cancel(t, ledger.New(s.Pool), id, user)
	}
	cancel(made[order.StatusCancelled], "cancelled")
	testwork.EndWindow(t, s.Pool, made[order.StatusExpired])
	testwork.Expire(t, s)
	testwork.ReleaseUnits(t, s)

	late := s.Attempt(t, sale, "late", 1, "k").Reservation.OrderID
	testwork.Fulfil(t, s)
	voided := s.Attempt(t, sale, "voided", 1, "k").Reservation.OrderID // unread by workers
	for range 2 {
		require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
		s.Flush(t)
		testwork.Rebuild(t, s)
		for status, id := range made {
			again := s.Attempt(t, sale, string(status), 1, "k")
			require.Equal(t, []any{reservation.OrderEnded, id, status},
				[]any{again.Verdict, again.Reservation.OrderID, again.Status})
		}
	}
	require.Equal(t, reservation.Replayed, s.Attempt(t, sale, "late", 1, "k").Verdict)
	cancel(late, "late") // of a reservation of an earlier epoch
	testwork.ReleaseUnits(t, s)
	require.Equal(t, reservation.OrderEnded, s.Attempt(t, sale, "late", 1, "k").Verdict)
	// The key of a voided order may buy again.
	again := s.Attempt(t, sale, "voided", 1, "k")
	require.Equal(t, reservation.Reserved, again.Verdict)
	require.NotEqual(t, voided, again.Reservation.OrderID)
	require.Equal(t, reservation.Reserved, s.Attempt(t, sale, "cancelled", 1, "another").Verdict)
	require.EqualValues(t, -1, s.Rdb.TTL(t.Context(), s.Keys.Ended(0, sale)).Val(), "the staged key no longer expires")
}

// refuseAll rejects the orders in the stream and releases their units.
func refuseAll(t testing.TB, s *testshop.Shop) {
	t.Helper()
	b := testwork.Batcher(t, s, nil)
	outcomes, err := ledger.New(s.Pool).Refuse(t.Context(), s.Events(t, 0), order.RejectedSoldOut)
	require.NoError(t, err)
	require.True(t, b.Release(t.Context(), outcomes))
}

// Without its record of ended orders Redis would accept used idempotency keys.
func TestAuditReportsLostKeysOfEndedOrders(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		damage func(t *testing.T, s *testshop.Shop, sale uuid.UUID)
		found  int64
		what   string
	}{
		"hash deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Ended(0, sale)).Err())
		}, 2, "its idempotency key is missing in Redis: a retry would buy again"},
		"hash and mark deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Ended(0, sale)).Err())
			require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Sale(0, sale), "ended").Err())
		}, 2, "its idempotency key is missing in Redis: a retry would buy again"},
		"mark deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Sale(0, sale), "ended").Err())
		}, 1, "Redis has ended orders of the sale, and does not use them"},
		"field deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			names := s.Rdb.HKeys(t.Context(), s.Keys.Ended(0, sale)).Val()
			require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Ended(0, sale), names[0]).Err())
		}, 1, "its idempotency key is missing in Redis: a retry would buy again"},
		"value damaged": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			names := s.Rdb.HKeys(t.Context(), s.Keys.Ended(0, sale)).Val()
			require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Ended(0, sale), names[0], "?", "\xff", "?").Err())
		}, 1, "Redis has another record of its idempotency key"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := s.OpenPayable(t, 20)
			s.Attempt(t, sale, "rejected", 1, "k")
			refuseAll(t, s)
			require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
			cancelled := s.Attempt(t, sale, "cancelled", 1, "k").Reservation.OrderID
			s.Ask(t, sale, "keyless")
			testwork.Fulfil(t, s)
			testwork.Cancel(t, ledger.New(s.Pool), cancelled, "cancelled")
			require.NotContains(t, testwork.Text(t, testwork.Audit(t, s, sale)), "idempotency key", "its release is pending")
			testwork.ReleaseUnits(t, s)
			report := testwork.RequireUnbroken(t, s, sale)

			c.damage(t, s, sale)
			report = testwork.Audit(t, s, sale)
			require.Equal(t, c.found, report.Promise("S7").Found, testwork.Text(t, report))
			require.Contains(t, testwork.Text(t, report), c.what)
			require.Equal(t, audit.RemedyRebuild, report.Promise("S7").Findings[0].Remedy)
			testwork.RequireMended(t, s, sale, "")
			require.Equal(t, reservation.OrderEnded, s.Attempt(t, sale, "cancelled", 1, "k").Verdict)
			require.Equal(t, reservation.OrderEnded, s.Attempt(t, sale, "rejected", 1, "k").Verdict)
		})
	}
}
