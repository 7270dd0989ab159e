//go:build system

package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

// The old primary was frozen while it was replaced.
func TestGuardRefusesThawedOldPrimary(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	front := guarded(t, testshop.NewShopOn(t, testshop.Options{Redis: h.client()}))
	misled := guarded(t, front.Next(t, h.atFirst)) // stays connected to the old primary
	unguarded := front.Next(t, h.atFirst)          // stays connected to it, too
	sale := front.Sale(t, 1000)
	front.Buy(t, sale.ID, "ann")
	misled.Buy(t, sale.ID, "bob")
	h.catchUp(h.atSecond, h.atFirst)

	h.first.Freeze()
	h.promote(h.atSecond)
	h.address.Store(h.atSecond.Options().Addr)
	front = guarded(t, front.Next(t, h.client()))
	rebuild(t, front, sale.Sale, 2)
	testkit.VerifyServer(t, front.Pool, front.Store, 0)
	testkit.Eventually(t, 30*time.Second, "the sale resumes", func() bool {
		a, err := front.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
		return err == nil && a.Reservation.Epoch == 2
	})
	sold, err := h.atSecond.XLen(t.Context(), front.Keys.Orders(0)).Result()
	require.NoError(t, err)

	h.first.Thaw()
	awaitRefusal(t, misled, sale.ID)
	other, err := front.Create(t.Context(), reservation.Terms{Name: "another", Stock: 1, PerOrderLimit: 1})
	require.NoError(t, err)
	refuses(t, misled, other.ID, "eve")
	_, err = misled.FindReserved(t.Context(), order.NewOrderID(sale.ID), "bob")
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	_, err = misled.Release(t.Context(), []reservation.Release{{SaleID: sale.ID, OrderID: uuid.New(), UserID: "bob"}})
	require.ErrorIs(t, err, reservation.ErrUnavailable)

	// Without a guard an ingress sells in the old epoch.
	require.EqualValues(t, 1, unguarded.Ask(t, sale.ID, "late").Reservation.Epoch)
	require.Equal(t, reservation.Reserved, front.Ask(t, sale.ID, "dan").Verdict, "the new primary still sells")
	require.EqualValues(t, sold+1, h.atSecond.XLen(t.Context(), front.Keys.Orders(0)).Val())
}

// A rebuild of lost data takes a moment, which is no error.
func TestGuardLogsOnlyLastingLossAsError(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 100).ID
	s.Buy(t, sale, "ann")
	said := make(records, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	guard := reservation.Guard{Store: s.Store, Pool: s.Pool, Logger: slog.New(said)}
	go func() { ended <- guard.Run(ctx) }()
	state, err := s.Inspect(t.Context(), 0)
	require.NoError(t, err)
	name := func(runID string) {
		require.NoError(t, s.Exec(t, "UPDATE redis_servers SET run_id = $1", runID))
	}
	for range 2 {
		name("another")
		warned := said.next(t)
		require.Equal(t, slog.LevelWarn, warned.Level, warned.Message)
		require.Contains(t, warned.Message, "a rebuild may be in progress")
		refuses(t, s, sale, "eve")
		failed := said.next(t)
		require.Equal(t, slog.LevelError, failed.Level, failed.Message)
		require.GreaterOrEqual(t, failed.Time.Sub(warned.Time), 3*time.Second)
		select {
		case more := <-said:
			t.Fatalf("logged again: %s", more.Message)
		case <-time.After(time.Second):
		}
		name(state.RunID)
		again := said.next(t)
		require.Equal(t, slog.LevelInfo, again.Level, again.Message)
	}
	cancel()
	require.NoError(t, <-ended)
	require.Empty(t, said)
}

// TestPartitionsSpreadOverMasters: among any power of two of masters with equal shares of the slots, the partitions are
// spread evenly. The slots are those of Redis.
func TestPartitionsSpreadOverMasters(t *testing.T) {
	t.Parallel()
	const slots = 16384
	cluster := testkit.OwnCluster(t)
	node := redis.NewClient(&redis.Options{Addr: cluster.Nodes[0].Addr()})
	t.Cleanup(func() { _ = node.Close() })
	keys := reservation.Keys{Prefix: "test", Partitions: reservation.MaxPartitions}
	var slotOf [reservation.MaxPartitions]int64
	for p := range slotOf {
		slot, err := node.ClusterKeySlot(t.Context(), keys.Orders(p)).Result()
		require.NoError(t, err)
		slotOf[p] = slot
	}
	for masters := int64(1); masters <= reservation.MaxPartitions; masters *= 2 {
		for partitions := masters; partitions <= reservation.MaxPartitions; partitions += masters {
			on := make(map[int64]int64)
			for _, slot := range slotOf[:partitions] {
				on[slot*masters/slots]++
			}
			for master := range masters {
				require.Equal(t, partitions/masters, on[master], "master %d of %d, %d partitions", master, masters, partitions)
			}
		}
	}
}

// TestUnconfirmedReservationIsUnknown: with ReplicaAcks a buyer gets a reservation only when a replica has it, also by
// a retry. Refusals need no replica.
func TestUnconfirmedReservationIsUnknown(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: h.client(), Store: reservation.StoreOptions{ReplicaAcks: 1}})
	sale := s.Sale(t, 2)
	buy := func(user string) (reservation.Answer, error) {
		return s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1, IdempotencyKey: "key"})
	}
	buyConfirmed(t, s, sale.ID, "ann")
	held, err := h.atSecond.HGet(t.Context(), s.Keys.Buyers(0, sale.ID), "ann").Result()
	require.NoError(t, err, "the replica has the reservation when its buyer gets the answer")
	require.NotEmpty(t, held)

	h.cut()
	_, err = buy("bob")
	require.ErrorIs(t, err, reservation.ErrOutcomeUnknown)
	_, err = buy("bob")
	require.ErrorIs(t, err, reservation.ErrOutcomeUnknown, "a replay is not confirmed either")
	answer, err := buy("cid")
	require.NoError(t, err)
	require.Equal(t, reservation.SoldOut, answer.Verdict)

	h.mend()
	buyConfirmed(t, s, sale.ID, "bob")
	require.NoError(t, h.atSecond.HGet(t.Context(), s.Keys.Buyers(0, sale.ID), "bob").Err())
}

// buyConfirmed buys until the replicas confirm it: on a busy machine they may take longer than an ingress waits.
func buyConfirmed(t testing.TB, s *testshop.Shop, sale uuid.UUID, user string) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "the replicas confirm the order of "+user, func() bool {
		answer, err := s.Reserve(t.Context(),
			reservation.Request{Sale: sale, User: user, Quantity: 1, IdempotencyKey: "key"})
		if errors.Is(err, reservation.ErrOutcomeUnknown) {
			return false
		}
		require.NoError(t, err)
		require.Contains(t, []reservation.Verdict{reservation.Reserved, reservation.Replayed}, answer.Verdict)
		return true
	})
}

// TestReplicasConfirmOnCluster: the confirmation is that of the partition's own replicas.
func TestReplicasConfirmOnCluster(t *testing.T) {
	t.Parallel()
	cluster := testkit.OwnCluster(t)
	rdb, err := connect.Ingress(cluster.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	keys := reservation.Keys{Prefix: "stampede", Partitions: 1}
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb, Keys: keys, Store: reservation.StoreOptions{ReplicaAcks: 1}})
	operator := testkit.Operate(t, cluster)
	master := operator.Master(operator.Slot(keys.Orders(0)))
	replica := operator.Client(operator.Replica(master))
	sale := s.Sale(t, 100)
	for i := range 20 {
		user := fmt.Sprintf("user-%d", i)
		buyConfirmed(t, s, sale.ID, user)
		_, err := replica.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			p.ReadOnly(t.Context()) // for the connection
			p.HGet(t.Context(), keys.Buyers(0, sale.ID), user)
			return nil
		})
		require.NoError(t, err)
	}
}

func TestSimulatedCrowdBuysFrom64Shards(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]simulatedCrowd{
		"even":        {shards: 64, ingresses: 2, buyers: 1_000, stock: 500, arriveWithin: 10 * time.Millisecond},
		"as many":     {shards: 16, ingresses: 2, buyers: 500, stock: 500, arriveWithin: 10 * time.Millisecond},
		"one shard's": {shards: 8, ingresses: 2, buyers: 900, stock: 600, arriveWithin: 50 * time.Millisecond, favorite: 1},
		"items":       {shards: 64, ingresses: 2, buyers: 1_000, stock: 500, arriveWithin: 10 * time.Millisecond, items: 5},
		"rare item": {
			shards: 64, ingresses: 2, buyers: 500, stock: 400, arriveWithin: 10 * time.Millisecond, items: 4, rare: 3,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := simulate(t, of)
			s.check(of)
			if of.rare > 0 {
				rare := s.lastOf(s.soldOf(0))
				require.Less(t, rare.answered-rare.asked, 2*time.Second, "the last rare unit is found")
			}
			t.Logf("%d reserve, %d count, %d give, %d take; %d units moved; sold out after %v, all answered after %v",
				s.calls[callReserve], s.calls[callCount], s.calls[callGive], s.calls[callTake], s.moved(), s.soldOutAt(), s.now)
		})
	}
}

func TestSoldOutMemoryEndsWithoutRedis(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, own.URL)})
	sale := s.Sale(t, 1).ID
	s.Buy(t, sale, "ann")
	s.RememberSoldOut(t, sale)
	own.Kill()
	testkit.Eventually(t, 30*time.Second, "the store is unavailable", func() bool {
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: "bob", Quantity: 1})
		return err != nil
	})
}

func TestReserveWithoutRedisIsUnavailable(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, own.URL)})
	sale := s.Sale(t, 10)
	s.Buy(t, sale.ID, "ann")

	own.Kill()
	_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "bob", Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.NotErrorIs(t, err, reservation.ErrOutcomeUnknown)
	require.ErrorIs(t, s.Ping(t.Context()), reservation.ErrUnavailable)
	_, err = s.FindReserved(t.Context(), order.NewOrderID(sale.ID), "bob")
	require.ErrorIs(t, err, reservation.ErrUnavailable)

	require.NoError(t, own.Restart(t.Context()))
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	require.Equal(
		t, reservation.AlreadyPurchased, s.Ask(t, sale.ID, "ann").Verdict, "with appendfsync always a kill -9 loses nothing",
	)
	s.Buy(t, sale.ID, "bob")
}

func TestCachedSalesAreBounded(t *testing.T) {
	t.Parallel()
	s := testshop.NewShopOn(t, testshop.Options{Store: reservation.StoreOptions{SalesMax: 2}})
	var sales []uuid.UUID
	for range 6 {
		sales = append(sales, s.Sale(t, 10_000).ID)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	// Many concurrently requested sales evict each other while their requests are in progress.
	var reserved atomic.Int64
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			for i := range 200 {
				request := reservation.Request{Sale: sales[(w+i)%len(sales)], User: fmt.Sprintf("u%d-%d", w, i), Quantity: 1}
				switch _, err := s.Reserve(ctx, request); {
				case err == nil:
					reserved.Add(1)
				default:
					require.ErrorIs(t, err, reservation.ErrOverloaded)
				}
			}
		})
	}
	wg.Wait()
	require.Positive(t, reserved.Load())
	require.Len(t, s.Events(t, 0), int(reserved.Load()))
}

func TestUnknownSalesAreCached(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Client(t, own.URL)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
	s.Sale(t, 1)
	require.Equal(t, reservation.UnknownSale, s.Ask(t, uuid.Must(uuid.NewV7()), "ann").Verdict)
	before := commandsServed(t, rdb)
	for range 1000 {
		require.Equal(t, reservation.UnknownSale, s.Ask(t, uuid.New(), "ann").Verdict, "not a version 7")
	}
	require.Less(t, commandsServed(t, rdb)-before, 10)
	for range 1000 {
		require.Equal(t, reservation.UnknownSale, s.Ask(t, uuid.Must(uuid.NewV7()), "ann").Verdict)
	}
	// A lookup for each, which is a script with three commands inside, and the index about once a second.
	require.Less(t, commandsServed(t, rdb)-before, 4*1000+20*reservation.MaxPartitions)
}
