//go:build system

package fulfillment_test

import (
	"fmt"
	"net"
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
	"stampede/upkeep/rebuild"
)

// The usual events of a day cause no rebuild.
func TestGuardStartsNoNeedlessRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	r := testwork.Rebuilder(t, s)
	none := func(what string, partitions int) {
		t.Helper()
		found, err := r.Needs(t.Context(), partitions, true)
		require.NoError(t, err, what)
		require.Empty(t, found, what)
	}
	none("a fresh deployment", 1)
	registry, _ := testwork.Guarded(t, s)
	unpublished := testshop.NewSale(t, s.Pool, 10)
	none("a sale that was never published to Redis", 1)
	require.NoError(t, s.Exec(t, "DELETE FROM sales WHERE id = $1", unpublished))

	sale := s.Open(t, 100)
	none("the first sale", 1)
	for i := range 20 {
		s.Buy(t, sale, fmt.Sprintf("user-%d", i))
		none("orders arrive", 1)
	}
	s.AwaitConfirmed(t, 20)
	none("orders are confirmed", 1)
	require.NoError(t, s.Rdb.ScriptFlush(t.Context()).Err())
	none("the scripts were flushed", 1)
	s.Buy(t, sale, "after-script-flush")

	replica := testkit.OwnRedis(t)
	primary, err := redis.ParseURL(s.Server.URL)
	require.NoError(t, err)
	host, port, err := net.SplitHostPort(primary.Addr)
	require.NoError(t, err)
	rdb := testkit.Control(t, replica.URL)
	require.NoError(t, rdb.ReplicaOf(t.Context(), host, port).Err())
	testkit.Eventually(t, 20*time.Second, "the first replica is connected", func() bool {
		return s.Rdb.InfoMap(t.Context(), "replication").Item("Replication", "connected_slaves") == "1" &&
			rdb.Exists(t.Context(), s.Keys.Sale(0, sale)).Val() == 1
	})
	none("the first replica was attached", 1)
	s.Buy(t, sale, "with-a-replica")

	wide := s.Keys
	wide.Partitions = 4
	none("partitions were added", 4)
	more := testshop.NewShopOn(t, testshop.Options{Pool: s.Pool, RedisURL: s.Server.URL, Keys: wide})
	for range 12 {
		more.Open(t, 10)
		none("a sale in a new partition", 4)
	}
	over := s.Open(t, 10)
	_, err = s.Catalog.End(t.Context(), over)
	require.NoError(t, err)
	none("a sale has ended", 4)
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, over), s.Keys.Buyers(0, over)).Err())
	none("the ended sale was deleted", 4)
	_, err = s.Catalog.Restock(t.Context(), sale, 10, "")
	require.NoError(t, err)
	_, err = s.Catalog.Pause(t.Context(), sale)
	require.NoError(t, err)
	none("operators changed the sale", 4)

	s.AwaitConfirmed(t, 22)
	require.Zero(t, testwork.Rebuilds(t, registry))
	require.EqualValues(t, 1, s.Count(t, "SELECT max(epoch) FROM sales"))
}

// A publisher crashed between the two steps that verify the server of a new partition.
func TestGuardFinishesInterruptedVerification(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	server, err := s.Store.Inspect(t.Context(), 0)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, "INSERT INTO redis_servers VALUES (0, $1, $2)", server.RunID,
		server.ReplicationID))
	registry, _ := testwork.Guarded(t, s)
	var sale uuid.UUID
	testkit.Eventually(t, 20*time.Second, "the server is verified",
		func() bool { return testwork.Rebuilds(t, registry) == 1 })
	sale = s.Open(t, 10)
	s.Buy(t, sale, "ann")
	s.AwaitConfirmed(t, 1)
	testwork.RequireNoNeeds(t, s, 1)
}

// Workers detect each loss, and the metrics name its reason.
func TestGuardDetectsLossesOfRedis(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason string
		lose   func(t *testing.T, s *testshop.Shop, sale uuid.UUID) error
		all    bool // sales are rebuilt, not only this one
	}{
		"everything": {rebuild.ReasonServer, func(t *testing.T, s *testshop.Shop,
			_ uuid.UUID,
		) error {
			return s.Rdb.FlushAll(t.Context()).Err()
		}, true},
		"its process, killed": {rebuild.ReasonServer, func(t *testing.T, s *testshop.Shop, _ uuid.UUID) error {
			s.Server.Kill()
			return s.Server.Restart(t.Context())
		}, true},
		"its process, restarted": {rebuild.ReasonServer, func(t *testing.T, s *testshop.Shop, _ uuid.UUID) error {
			return s.Server.Restart(t.Context())
		}, true},
		"the verification": {
			rebuild.ReasonServer,
			func(t *testing.T, s *testshop.Shop, _ uuid.UUID) error { return s.Store.Distrust(t.Context(), 0) }, true,
		},
		"the record of the server": {rebuild.ReasonUnverified, func(t *testing.T, s *testshop.Shop, _ uuid.UUID) error {
			return s.Exec(t, "DELETE FROM redis_servers")
		}, true},
		"a sale": {rebuild.ReasonSaleLost, func(t *testing.T, s *testshop.Shop, sale uuid.UUID) error {
			return s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale)).Err()
		}, false},
		"a sale, replaced by another value": {
			rebuild.ReasonUnfinished,
			func(t *testing.T, s *testshop.Shop, sale uuid.UUID) error {
				return s.Rdb.Set(t.Context(), s.Keys.Sale(0, sale), "nonsense", 0).Err()
			}, false,
		},
		"an epoch": {rebuild.ReasonUnfinished, func(t *testing.T, s *testshop.Shop, sale uuid.UUID) error {
			return s.Exec(t, "UPDATE sales SET epoch = epoch + 1 WHERE id = $1", sale)
		}, false},
		"sequence numbers": {rebuild.ReasonSetBack, func(t *testing.T, s *testshop.Shop, sale uuid.UUID) error {
			return s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "sequence", 2, "left", 8).Err()
		}, false},
		"an unreadable sequence number": {
			rebuild.ReasonSetBack,
			func(t *testing.T, s *testshop.Shop, sale uuid.UUID) error {
				return s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "sequence", "x").Err()
			}, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 1)
			registry, _ := testwork.Guarded(t, s)
			sale, other := s.Open(t, 10), s.Open(t, 10)
			for i := range 3 {
				s.Buy(t, sale, fmt.Sprintf("user-%d", i))
				s.Buy(t, other, fmt.Sprintf("user-%d", i))
			}
			s.AwaitConfirmed(t, 6)
			epoch := s.Epoch(t, sale)
			require.NoError(t, c.lose(t, s, sale))
			testkit.Eventually(t, 30*time.Second, "the loss is detected", func() bool {
				return testshop.Metric(t, registry, "stampede_rebuilds_total", c.reason) > 0
			})
			testkit.Eventually(t, 30*time.Second, "the sale continues", func() bool {
				answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "late", Quantity: 1})
				return err == nil && (answer.Verdict == reservation.Reserved || answer.Verdict == reservation.AlreadyPurchased)
			})
			s.AwaitConfirmed(t, 7)
			testwork.AwaitRest(t, s)
			require.Greater(t, s.Epoch(t, sale), epoch)
			require.Equal(t, c.all, s.Epoch(t, other) > 1)
			require.Equal(t, 1.0, testwork.Rebuilds(t, registry), "it is rebuilt once")
			s.RequireSound(t)
			testwork.RequireNoNeeds(t, s, 1)
		})
	}
}

// An ended sale is rebuilt only by the less frequent check.
func TestGuardReopensEndedSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	_, err := s.Catalog.End(t.Context(), sale)
	require.NoError(t, err)
	_, err = s.Store.CloseSale(t.Context(), sale, 0, reservation.NewRebuildToken(), 1)
	require.NoError(t, err)
	r := testwork.Rebuilder(t, s)
	found, err := r.Needs(t.Context(), 1, false)
	require.NoError(t, err)
	require.Empty(t, found)
	found, err = r.Needs(t.Context(), 1, true)
	require.NoError(t, err)
	require.Equal(t, []rebuild.Need{{Sale: sale, Reason: rebuild.ReasonUnfinished}}, found)
	require.NoError(t, testwork.Heal(t, s, r, 1))
	require.Equal(t, reservation.Ended, s.Ask(t, sale, "bob").Verdict)
	s.RequireSound(t)
}

// An old primary that returns still counts as verified. Only an operator decides which server is right.
func TestGuardDoesNotRebuildOldPrimary(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	require.NoError(t, s.Exec(t, "UPDATE redis_servers SET run_id = 'of another server'"))
	r := testwork.Rebuilder(t, s)
	require.ErrorIs(t, testwork.Heal(t, s, r, 1), rebuild.ErrOtherServer)
	require.EqualValues(t, 1, s.Epoch(t, sale))
	testwork.Rebuild(t, s)
	require.NoError(t, testwork.Heal(t, s, r, 1))
	require.EqualValues(t, 2, s.Epoch(t, sale))
	s.Buy(t, sale, "ann")
}

// Workers that detect the same loss at the same time rebuild it once.
func TestConcurrentWorkersRebuildOnce(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 100)
	s.Crowd(t, sale, 50)
	var registries []*prometheus.Registry
	for i := range 4 {
		config := testwork.Config(t, s)
		registry := prometheus.NewRegistry()
		registries = append(registries, registry)
		config.GuardInterval, config.Registerer, config.Consumer = 5*time.Millisecond, registry, fmt.Sprintf("worker-%d", i)
		testwork.Work(t, config)
	}
	s.AwaitConfirmed(t, 50)
	for round := range 5 {
		s.Flush(t)
		testkit.Eventually(t, 30*time.Second, "the sale is rebuilt", func() bool {
			var n float64
			for _, registry := range registries {
				n += testwork.Rebuilds(t, registry)
			}
			return n == float64(round+1)
		})
		testwork.RequireNoNeeds(t, s, 1)
		require.EqualValues(t, round+2, s.Epoch(t, sale))
		s.Buy(t, sale, fmt.Sprintf("late-%d", round))
		s.AwaitConfirmed(t, 51+round)
	}
	testwork.AwaitRest(t, s)
	s.RequireSound(t)
}
