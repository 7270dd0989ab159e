package rebuild_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

// shardedSale returns a sale of 100 units in 4 shards of a shop with 8 partitions. It has 30 recorded orders of
// "user-…", one that was cancelled with the key "k", and 20 orders of "late-…" that no worker has read.
func shardedSale(t *testing.T) (s *testshop.Shop, sale uuid.UUID) {
	t.Helper()
	s = testshop.OnOwnRedis(t, 8)
	sale = s.OpenSharded(t, 100, 4)
	require.Equal(t, 30, s.Crowd(t, sale, 30))
	cancelled := s.Attempt(t, sale, "cancelled", 1, "k").Reservation.OrderID
	testwork.FulfilAll(t, s)
	_, err := testwork.Rebuilder(t, s).Ledger.Cancel(t.Context(), cancelled, "cancelled")
	require.NoError(t, err)
	testwork.ReleaseUnits(t, s)
	for i := range 20 {
		s.Buy(t, sale, fmt.Sprint("late-", i))
	}
	return s, sale
}

// lastPlace returns the highest place that Redis has given out or Postgres has.
func lastPlace(t *testing.T, s *testshop.Shop, sale uuid.UUID) (last int64) {
	t.Helper()
	layout := s.Layout(t, sale)
	for shard := range layout.Shards {
		for _, text := range s.Rdb.HGetAll(t.Context(), s.Keys.Buyers(layout.Partition(shard), sale)).Val() {
			held, _, err := order.ParseReservation(text)
			require.NoError(t, err)
			last = max(last, held.Sequence)
		}
	}
	return max(last, s.Count(t, "SELECT coalesce(max(sequence), 0) FROM orders WHERE sale_id = $1", sale))
}

// requireSells requires that users of all shards can buy, at new places in a new epoch, and holders cannot.
func requireSells(t *testing.T, s *testshop.Shop, sale uuid.UUID, above int64) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "the store knows the shards", func() bool {
		_, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "user-0", Quantity: 1})
		return err == nil
	})
	for i := range 30 {
		require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, sale, fmt.Sprintf("user-%d", i)).Verdict)
	}
	for i := range 20 {
		answer := s.Ask(t, sale, fmt.Sprint("new-", i))
		require.Equal(t, reservation.Reserved, answer.Verdict)
		if answer.Reservation.Epoch > 1 {
			require.Greater(t, answer.Reservation.Sequence, above, "a place was given out again")
		}
	}
	require.Equal(t, reservation.OrderEnded, s.Attempt(t, sale, "cancelled", 1, "k").Verdict)
	testwork.FulfilAll(t, s)
	s.RequireShards(t, sale)
	testwork.RequireNoNeeds(t, s, s.Keys.Partitions)
}

// dataIn returns the keys of a partition.
func dataIn(t *testing.T, s *testshop.Shop, partition int) []string {
	t.Helper()
	server := s.Keys.Server(partition)
	keys, err := s.Rdb.Keys(t.Context(), server[:len(server)-len("server")]+"*").Result()
	require.NoError(t, err)
	return keys
}

// A loss in one partition, or in all, ends with all shards in one new epoch, without a lost or doubled unit.
func TestShardedSaleIsRebuiltAfterLoss(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		lose func(t *testing.T, s *testshop.Shop, sale uuid.UUID, partition int) error
		kept bool // the orders that no worker has read
	}{
		"a shard is deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID, p int) error {
			return s.Rdb.Del(t.Context(), s.Keys.Sale(p, sale), s.Keys.Buyers(p, sale), s.Keys.Ended(p, sale)).Err()
		}, true},
		"a partition is emptied": {func(t *testing.T, s *testshop.Shop, _ uuid.UUID, p int) error {
			return s.Rdb.Del(t.Context(), dataIn(t, s, p)...).Err()
		}, false},
		"a server is distrusted": {func(t *testing.T, s *testshop.Shop, _ uuid.UUID, p int) error {
			return s.Store.Distrust(t.Context(), p)
		}, true},
		"a shard is in a wrong layout": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID, p int) error {
			return s.Rdb.HSet(t.Context(), s.Keys.Sale(p, sale), "shard", "0 2 8").Err()
		}, true},
		"a number is damaged": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID, p int) error {
			return s.Rdb.HSet(t.Context(), s.Keys.Sale(p, sale), "sequence", "x").Err()
		}, true},
		"Redis is emptied": {func(t *testing.T, s *testshop.Shop, _ uuid.UUID, _ int) error {
			return s.Rdb.FlushAll(t.Context()).Err()
		}, false},
		"Redis is restarted": {func(t *testing.T, s *testshop.Shop, _ uuid.UUID, _ int) error {
			s.Server.Kill()
			return s.Server.Restart(t.Context())
		}, true},
	} {
		for shard := range 2 { // the home, and another one
			t.Run(fmt.Sprint(name, "/", shard), func(t *testing.T) {
				t.Parallel()
				s, sale := shardedSale(t)
				last := lastPlace(t, s, sale)
				require.NoError(t, c.lose(t, s, sale, s.Layout(t, sale).Partition(shard)))
				testwork.HealAll(t, s)
				require.Greater(t, s.Epoch(t, sale), int64(1))
				if c.kept {
					require.EqualValues(t, 50, s.Count(t, testshop.ConfirmedOrders))
				} else {
					last = 31 // of the lost orders, places may be given out again
				}
				requireSells(t, s, sale, last)
			})
		}
	}
}

// Several partitions notice the same loss, and the sale is rebuilt once.
func TestShardedSaleIsRebuiltOnce(t *testing.T) {
	t.Parallel()
	s, sale := shardedSale(t)
	layout := s.Layout(t, sale)
	for shard := range layout.Shards {
		require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(layout.Partition(shard), sale)).Err())
	}
	r := testwork.Rebuilder(t, s)
	found, err := r.Needs(t.Context(), 8, false)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, []any{sale, rebuild.ReasonSaleLost}, []any{found[0].Sale, found[0].Reason})
	before, err := r.Required(t.Context(), true)
	require.NoError(t, err)
	for p := range 8 { // each with what Postgres required before the first rebuild
		_, err := r.HealPartition(t.Context(), p, before)
		require.NoError(t, err)
	}
	require.EqualValues(t, 2, s.Epoch(t, sale))
	requireSells(t, s, sale, 51)
}

// The rebuild of a partition closes its shard, and the sale is open again when its other servers are verified as well.
func TestPartitionRebuildEndsWithItsShardedSales(t *testing.T) {
	t.Parallel()
	s, sale := shardedSale(t)
	other := s.OpenIn(t, s.Layout(t, sale).Partition(1), 10)
	layout, r := s.Layout(t, sale), testwork.Rebuilder(t, s)
	for shard := range 2 {
		require.NoError(t, s.Store.Distrust(t.Context(), layout.Partition(shard)))
	}
	report, err := r.Partition(t.Context(), layout.Partition(1), rebuild.ReasonByHand)
	require.NoError(t, err)
	require.Equal(t, []uuid.UUID{sale}, report.Unfinished)
	require.NotEmpty(t, report.Sales)
	drained := report.Drained.Confirmed
	s.Buy(t, other, "ann")
	_, err = r.Sale(t.Context(), sale, rebuild.ReasonByHand)
	require.ErrorIs(t, err, rebuild.ErrServerUnverified)
	require.EqualValues(t, 1, s.Epoch(t, sale))

	report, err = r.Partition(t.Context(), layout.Home, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.Empty(t, report.Unfinished)
	rebuilt := report.Sales[len(report.Sales)-1]
	require.Equal(t, sale, rebuilt.ID)
	require.Equal(t, []int64{4, 100, 50, 50, 50},
		[]int64{int64(rebuilt.Shards), rebuilt.Stock, rebuilt.Left, rebuilt.Held, rebuilt.Orders})
	require.GreaterOrEqual(t, rebuilt.Sequence, int64(51))
	require.EqualValues(t, 20, drained+report.Drained.Confirmed)
	again, err := r.Finish(t.Context(), sale, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.Empty(t, again, "another process has rebuilt it")
	require.EqualValues(t, 2, s.Epoch(t, sale))
	testwork.FulfilAll(t, s)
	requireSells(t, s, sale, 51)
}

// A sale with one shard gets more, and refuses fewer or too many.
func TestNumberOfShardsIsOnlyRaised(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	sale := s.OpenPayable(t, 100)
	require.Equal(t, 30, s.Crowd(t, sale, 30))
	r := testwork.Rebuilder(t, s)
	for _, step := range []struct {
		shards int
		reason string
	}{{3, ""}, {2, "must be 3, as many as the sale has, to 8"}, {9, "to 8, the number of partitions"}, {3, ""}, {8, ""}} {
		_, err := r.RaiseShards(t.Context(), sale, step.shards, rebuild.ReasonByHand)
		if step.reason == "" {
			require.NoError(t, err)
			continue
		}
		var invalid *order.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.ErrorContains(t, err, step.reason)
	}
	require.EqualValues(t, 4, s.Epoch(t, sale), "a refused raise changes nothing")
	require.Equal(t, 8, s.Layout(t, sale).Shards)
	s.RequireShards(t, sale)
	testwork.RequireNoNeeds(t, s, 8)
}

// One shard is set back within the process of Redis. It is found by the highest place, or because it lacks an order
// that this worker or an earlier one has recorded.
func TestShardSetBackInPlaceIsFound(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		last     bool // the shard has the highest place
		looked   bool // the worker has looked at the sale before
		recorded bool // the worker has recorded the order
	}{
		"by place":                {last: true, looked: true},
		"by probe":                {looked: true, recorded: true},
		"by an order in Postgres": {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, sale := shardedSale(t)
			layout := s.Layout(t, sale)
			users := map[int]string{} // a new one for each shard
			for i := 0; len(users) < layout.Shards; i++ {
				user := fmt.Sprint("fresh-", i)
				users[layout.ShardOf(user)] = user
			}
			testwork.FulfilAll(t, s)
			r := testwork.Rebuilder(t, s)
			if c.looked {
				required, err := r.Required(t.Context(), true)
				require.NoError(t, err)
				for p := range 8 {
					tried, err := r.HealPartition(t.Context(), p, required)
					require.NoError(t, err)
					require.False(t, tried)
				}
			}
			const shard = 1
			partition := layout.Partition(shard)
			before := takeSnapshot(t, s)
			s.Buy(t, sale, users[shard])
			// Another shard, or this one, gets the highest place of the sale.
			highest := map[bool]int{false: 2, true: shard}[c.last]
			for i := 0; int(lastPlace(t, s, sale)-1)%layout.Shards != highest || i < 20; i++ {
				if user := fmt.Sprint("more-", i); layout.ShardOf(user) == highest {
					s.Buy(t, sale, user)
				}
			}
			events := s.Events(t, partition)
			testwork.FulfilAll(t, s)
			if c.recorded {
				outcomes, err := r.Ledger.Record(t.Context(), events)
				require.NoError(t, err)
				for i := range outcomes {
					outcomes[i].Fresh = true // as when this worker records them
				}
				r.Probes.Note(partition, outcomes)
			}
			keys := []string{s.Keys.Sale(partition, sale), s.Keys.Buyers(partition, sale)}
			for _, key := range keys {
				require.NoError(t, s.Rdb.RestoreReplace(t.Context(), key, 0, before[key]).Err())
			}
			found, err := r.Needs(t.Context(), 8, false)
			require.NoError(t, err)
			require.Len(t, found, 1)
			require.Equal(t, []any{sale, rebuild.ReasonSetBack}, []any{found[0].Sale, found[0].Reason})
			require.NoError(t, testwork.Heal(t, s, r, 8))
			require.EqualValues(t, 2, s.Epoch(t, sale))
			require.Equal(t, reservation.AlreadyPurchased, s.Attempt(t, sale, users[shard], 1, "").Verdict)
			s.RequireShards(t, sale)
			testwork.RequireNoNeeds(t, s, 8)
		})
	}
}

// The orders of one shard are lost with its stream, and only its sequence in Redis shows their places.
func TestPlacesOfLostOrdersAreNotGivenOutAgain(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	sale := s.OpenSharded(t, 100, 4)
	layout := s.Layout(t, sale)
	for i := 0; i < 60; i++ {
		if user := fmt.Sprint("lost-", i); layout.ShardOf(user) == 2 {
			s.Buy(t, sale, user)
		}
	}
	last := lastPlace(t, s, sale)
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(layout.Partition(2))).Err())
	report, err := testwork.Rebuilder(t, s).Sale(t.Context(), sale, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.Zero(t, report.Sales[0].Orders)
	require.GreaterOrEqual(t, report.Sales[0].Sequence, last)
	for i := range 8 {
		require.Greater(t, s.Ask(t, sale, fmt.Sprint("new-", i)).Reservation.Sequence, last)
	}
}

// Stock that was moved between shards, units on their way included, is part of the new shares.
func TestRebuildCountsUnitsOnTheirWay(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	sale := s.OpenSharded(t, 100, 4)
	require.Equal(t, 40, s.Crowd(t, sale, 40))
	testwork.FulfilAll(t, s)
	testwork.GiveUnits(t, s, sale, 0, 1)
	s.RequireShards(t, sale)
	_, err := testwork.Rebuilder(t, s).Sale(t.Context(), sale, rebuild.ReasonByHand)
	require.NoError(t, err)
	s.RequireShards(t, sale)
	layout := s.Layout(t, sale)
	for shard := range layout.Shards {
		fields := s.Rdb.HGetAll(t.Context(), s.Keys.Sale(layout.Partition(shard), sale)).Val()
		require.Equal(t, "15", fields["left"], "an even share")
		require.NotContains(t, fields, "given:1")
	}
}

// Each item is rebuilt by itself over all shards, also over more of them than before.
func TestItemsAreRebuiltOverShards(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	stocks := map[string]int64{"s": 3, "m": 40, "l": 10}
	created := s.ShardedItems(t, 3, reservation.Item{Code: "s", Stock: 3}, reservation.Item{Code: "m", Stock: 40},
		reservation.Item{Code: "l", Stock: 10})
	want := func(user string, items map[string]int64) reservation.Answer {
		var answer reservation.Answer
		testkit.Eventually(t, testshop.Soon, "the store knows the shards", func() (ok bool) {
			var err error
			answer, err = s.Store.Reserve(t.Context(),
				reservation.Request{Sale: created.ID, User: user, IdempotencyKey: "k", Items: items})
			return err == nil
		})
		return answer
	}
	basket := func(i int) map[string]int64 {
		items := map[string]int64{"m": 1}
		if i%5 == 0 {
			items["l"] = 2
		}
		if i < 3 {
			items["s"] = 1
		}
		return items
	}
	for i := range 20 {
		require.Equal(t, reservation.Reserved, want(fmt.Sprint("user-", i), basket(i)).Verdict)
	}
	testwork.FulfilAll(t, s)
	ledger := testwork.Rebuilder(t, s).Ledger
	_, err := ledger.Cancel(t.Context(), want("user-0", basket(0)).Reservation.OrderID, "user-0")
	require.NoError(t, err)
	testwork.ReleaseUnits(t, s)
	left := map[string]int64{"": 26, "a": 1, "b": 21, "c": 4} // 19 m, 6 l and 2 s are held
	require.Equal(t, left, s.LeftItems(t, created.Sale))
	s.RequireShards(t, created.ID)

	require.NoError(t, s.Rdb.FlushAll(t.Context()).Err())
	testwork.HealAll(t, s)
	require.Equal(t, left, s.LeftItems(t, created.Sale))
	s.RequireShards(t, created.ID)
	require.Equal(t, reservation.Replayed, want("user-1", basket(1)).Verdict)
	require.Equal(t, reservation.OrderEnded, want("user-0", basket(0)).Verdict)

	_, err = testwork.Rebuilder(t, s).RaiseShards(t.Context(), created.ID, 7, rebuild.ReasonByHand)
	require.NoError(t, err)
	raised := created.Sale
	raised.Shards = 7
	require.Equal(t, left, s.LeftItems(t, raised))
	s.RequireShards(t, created.ID)
	testwork.RequireUnbroken(t, s, uuid.Nil)

	sold := map[string]int64{}
	for code, letter := range map[string]string{"s": "a", "m": "b", "l": "c"} {
		for i := 0; ; i++ {
			var answer reservation.Answer
			testkit.Eventually(t, testshop.Soon, "a second has passed since the rebuild", func() bool {
				answer = want(fmt.Sprint("last-", code, i), map[string]int64{code: 1})
				isLeft := answer.Of != nil && !strings.Contains(string(answer.Of.Units), fmt.Sprintf("%q:0", code))
				return answer.Verdict == reservation.Reserved || !isLeft
			})
			if answer.Verdict != reservation.Reserved {
				require.Equal(t, []any{reservation.SoldOut, []string{code}}, []any{answer.Verdict, answer.Of.Codes})
				break
			}
			sold[letter]++
		}
	}
	delete(left, "")
	require.Equal(t, left, sold)
	testwork.FulfilAll(t, s)
	s.RequireShards(t, created.ID)
	require.Equal(t, fmt.Sprintf("%d,%d,%d 53", stocks["s"], stocks["m"], stocks["l"]),
		testwork.SoldItems(t, s.Pool, created.ID))
	testwork.RequireUnbroken(t, s, uuid.Nil)
}
