package fulfillment_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/rebuild"
)

// makeUnreachable returns the shop as a process sees it to which the server of a partition does not answer, until
// restore is called.
func makeUnreachable(t *testing.T, s *testshop.Shop, partition int) (seen *testshop.Shop, restore func()) {
	t.Helper()
	unreachable := s.Keys.Server(partition)
	unreachable = unreachable[:strings.Index(unreachable, "}")+1]
	var isUnreachable atomic.Bool
	isUnreachable.Store(true)
	options := *s.Rdb.(*redis.Client).Options()
	rdb := redis.NewClient(&options)
	t.Cleanup(func() { _ = rdb.Close() })
	rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		for _, arg := range cmd.Args() {
			if key, ok := arg.(string); ok && isUnreachable.Load() && strings.HasPrefix(key, unreachable) {
				cmd.SetErr(context.DeadlineExceeded)
				return context.DeadlineExceeded
			}
		}
		return next(ctx, cmd)
	}))
	return s.Next(t, rdb), func() { isUnreachable.Store(false) }
}

// The shard of most releases does not answer; it may be the shard of the home partition. The releases of the other
// shards do not wait for it, and its own are applied when it answers.
func TestDarkShardDelaysNoOtherRelease(t *testing.T) {
	t.Parallel()
	for shard := range 2 {
		t.Run(fmt.Sprint(shard), func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 8)
			sale := s.OpenSharded(t, 2000, 2)
			layout := s.Layout(t, sale)
			const unreachable, others = ledger.SweepMax + 10, 10
			buy := func(of, users int) {
				for i := 0; users > 0; i++ {
					if user := fmt.Sprint("user-", of, "-", i); layout.ShardOf(user) == of {
						s.Buy(t, sale, user)
						users--
					}
				}
			}
			buy(shard, unreachable)
			buy(1-shard, others)
			testwork.FulfilAll(t, s)
			release := func(shard int, age string) {
				_, err := s.Pool.Exec(t.Context(), `INSERT INTO releases (order_id, sale_id, user_id, quantity, again_at)
					SELECT id, sale_id, user_id, quantity, now() - $2::interval FROM orders WHERE user_id LIKE $1`,
					fmt.Sprint("user-", shard, "-%"), age)
				require.NoError(t, err)
			}
			release(shard, "1 hour") // they come first
			release(1-shard, "1 minute")

			seen, restore := makeUnreachable(t, s, layout.Partition(shard))
			released := 0
			testkit.Eventually(t, 20*time.Second, "the others are released", func() bool {
				n, err := testwork.TryReleaseUnits(t.Context(), seen)
				require.Error(t, err, "a partition does not answer")
				released += n
				return released == others
			})
			require.EqualValues(t, unreachable, s.Count(t, testshop.PendingReleases))
			require.Zero(t, s.Count(t, "SELECT count(*) FROM releases WHERE refusals > 0"), "Redis has refused none")
			restore()
			testkit.Eventually(t, 20*time.Second, "all are released", func() bool {
				_, err := testwork.TryReleaseUnits(t.Context(), seen)
				return err == nil && s.Count(t, testshop.PendingReleases) == 0
			})
			var left int64
			for shard := range layout.Shards {
				n, err := s.Rdb.HGet(t.Context(), s.Keys.Sale(layout.Partition(shard), sale), "left").Int64()
				require.NoError(t, err)
				left += n
			}
			require.EqualValues(t, 2000, left)
		})
	}
}

// An ingress crashed between the two steps of a move. The worker completes it, also while another sale has an
// unreachable shard.
func TestWorkerCompletesMovesOfUnits(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	sale, other := s.OpenSharded(t, 100, 2), uuid.Nil
	layout := s.Layout(t, sale)
	unreachable := (layout.Home + 4) % 8
	for other == uuid.Nil || s.Layout(t, other).Partition(1) != unreachable {
		other = s.OpenSharded(t, 10, 2)
	}
	testwork.GiveUnits(t, s, sale, 0, 1)
	seen, _ := makeUnreachable(t, s, unreachable)
	config := testwork.Config(t, seen)
	config.GuardInterval = 20 * time.Millisecond
	testwork.Work(t, config)
	testkit.Eventually(t, 30*time.Second, "the other shard has got the units", func() bool {
		return s.Rdb.HGet(t.Context(), s.Keys.Sale(layout.Partition(1), sale), "left").Val() == "75"
	})
	require.Equal(t, "25", s.Rdb.HGet(t.Context(), s.Keys.Sale(layout.Home, sale), "left").Val())
}

// A worker rebuilds a sale with several shards after all of its partitions were lost.
func TestWorkerRebuildsShardedSale(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	sale := s.OpenSharded(t, 100, 4)
	require.Equal(t, 40, s.Crowd(t, sale, 40))
	testwork.FulfilAll(t, s)
	testwork.Guarded(t, s)
	s.Flush(t)
	testkit.Eventually(t, 60*time.Second, "all shards are open", func() bool {
		found, err := testwork.Rebuilder(t, s).Needs(t.Context(), 8, true)
		return err == nil && len(found) == 0
	})
	s.RequireShards(t, sale)
	for i := range 20 {
		s.Buy(t, sale, fmt.Sprint("new-", i))
	}
	s.AwaitConfirmed(t, 60)
	s.RequireShards(t, sale)
}

// Baskets with an item that Postgres lacks become dead letters, each alone. A replay records the basket when the item
// is there, and a discard returns its units to each item.
func TestBasketsAreReplayedAndDiscarded(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", PerOrderLimit: 4, Stock: 10,
		Items: []reservation.Item{{Code: "m", Name: "M", Stock: 6}, {Code: "l", Name: "L", Stock: 4}},
	})
	require.NoError(t, err)
	sale := created.Sale
	var events []order.OrderReserved
	for user, items := range map[string]map[string]int64{
		"ann": {"m": 2, "l": 1}, "bob": {"m": 1}, "cid": {"m": 1, "l": 2},
	} {
		answer, err := s.Reserve(t.Context(),
			reservation.Request{Sale: sale.ID, User: user, Items: items, IdempotencyKey: "key-" + user})
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, answer.Verdict)
		made, err := deadletter.OrdersOf(testwork.TakeOut(t, s))
		require.NoError(t, err)
		events = append(events, made...)
	}
	entry := &redis.XAddArgs{Stream: s.Keys.Orders(0), Values: stream.Values(events...)}
	require.NoError(t, s.Exec(t, "UPDATE sale_items SET item = 'Z' WHERE code = 'l'"))
	require.NoError(t, s.Rdb.XAdd(t.Context(), entry).Err())
	config := testwork.Config(t, s)
	config.MaxDeliveries = 2
	testwork.Work(t, config)
	testwork.AwaitRest(t, s)

	store := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	letters, err := store.List(t.Context(), deadletter.StatusParked, 10)
	require.NoError(t, err)
	require.Len(t, letters, 2)
	ids, orders := map[string]int64{}, map[string]uuid.UUID{}
	for _, letter := range letters {
		held, err := deadletter.OrdersOf(letter.Entry)
		require.NoError(t, err)
		require.Len(t, held, 1)
		require.Contains(t, events, held[0])
		require.Equal(t, letter.OrderID, held[0].OrderID)
		require.Contains(t, letter.Reason, "the lines are not of the items of the sale: "+string(held[0].Lines))
		ids[held[0].UserID], orders[held[0].UserID] = letter.ID, letter.OrderID
	}
	require.Equal(t, []string{"bob a1"}, testshop.Rows(t, s.Pool, "SELECT user_id || ' ' || lines FROM orders"))

	require.NoError(t, s.Exec(t, "UPDATE sale_items SET item = 'b' WHERE code = 'l'"))
	_, appended, err := store.Replay(t.Context(), ids["ann"], "zoe")
	require.NoError(t, err)
	require.True(t, appended)
	require.NoError(t, store.Discard(t.Context(), ids["cid"], "a mistake", "zoe"))
	testwork.AwaitRest(t, s)
	for range 2 {
		for user, want := range map[string]order.Order{
			"ann": {Status: order.StatusConfirmed, Lines: "a2b1", Items: `{"m":2,"l":1}`},
			"cid": {Status: order.StatusRejected, Lines: "a1b2", Items: `{"m":1,"l":2}`, Reason: deadletter.RejectedDiscarded},
		} {
			o := testwork.Order(t, s.Pool, orders[user])
			require.Equal(t, want, order.Order{Status: o.Status, Lines: o.Lines, Items: o.Items, Reason: o.Reason})
		}
		require.Equal(t, "3,1 4", testwork.SoldItems(t, s.Pool, sale.ID))
		require.Equal(t, map[string]int64{"": 6, "a": 3, "b": 3}, s.LeftItems(t, sale))
		testwork.RequireUnbroken(t, s, sale.ID)
		// Another delivery of all three changes nothing, also without the item.
		require.NoError(t, s.Exec(t, "UPDATE sale_items SET item = 'Z' WHERE code = 'l'"))
		require.NoError(t, s.Rdb.XAdd(t.Context(), entry).Err())
		testwork.AwaitRest(t, s)
		require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters WHERE status = 'parked'"))
		require.NoError(t, s.Exec(t, "UPDATE sale_items SET item = 'b' WHERE code = 'l'"))
	}
}

// lostAnswer loses the answer to the next reservation, and delays the retry until resume is closed.
type lostAnswer struct {
	orders string // the stream, which is the third key of a reservation and of no other script
	lost   atomic.Bool
	resume chan struct{}
}

func (h *lostAnswer) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	err := next(ctx, cmd)
	args := cmd.Args()
	if err == nil && cmd.Name() == "evalsha" && len(args) > 5 && args[5] == h.orders &&
		h.lost.CompareAndSwap(false, true) {
		<-h.resume
		err = &net.OpError{Op: "read", Err: errors.New("reset")}
		cmd.SetErr(err)
	}
	return err
}

// An ingress without an answer retries with the same order. If the order has ended meanwhile, the retry
// reserves units for an ended order, which nothing else would release. In another epoch the retry
// reserves nothing.
func TestRetryOfEndedReservationHoldsNothing(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]struct {
		how    func(t *testing.T, s *testshop.Shop, b *batch.Batcher)
		status order.Status
		// The answer of the retry.
		verdict reservation.Verdict
		err     error
	}{
		"Redis lost it": {func(t *testing.T, s *testshop.Shop, b *batch.Batcher) {
			messages := testwork.Messages(t, s) // a worker has read them
			s.Flush(t)
			testwork.Rebuild(t, s)
			testwork.RequireDone(t, testwork.Handle(b, messages...))
		}, order.StatusVoided, "", reservation.ErrOutcomeUnknown},
		"it expired": {func(t *testing.T, s *testshop.Shop, b *batch.Batcher) {
			testwork.RequireDone(t, testwork.Handle(b, testwork.Messages(t, s)...))
			require.NoError(t, s.Exec(t, "UPDATE orders SET due = due - interval '1 day' WHERE user_id = 'alice'"))
			testwork.Heartbeat(t, s.Pool)
			testwork.Expire(t, s)
			testwork.ReleaseUnits(t, s)
		}, order.StatusExpired, reservation.Reserved, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 1)
			sale := s.OpenPayable(t, 10)
			b := testwork.Batch(t, s, nil)
			s.Buy(t, sale, "ann")
			testwork.RequireDone(t, testwork.Handle(b, testwork.Messages(t, s)...))
			hook := &lostAnswer{orders: s.Keys.Orders(0), resume: make(chan struct{})}
			resume := sync.OnceFunc(func() { close(hook.resume) })
			defer resume()
			s.Rdb.AddHook(testkit.Hook(hook.process))
			// Bounds all tries together: longer than the order takes to end.
			ingress := reservation.NewStore(s.Rdb, s.Keys,
				reservation.StoreOptions{Logger: testkit.Logger(t), CallTimeout: time.Minute})
			t.Cleanup(ingress.Close)
			var again reservation.Answer
			reserved := make(chan error, 1)
			go func() {
				var err error
				again, err = ingress.Reserve(t.Context(), reservation.Request{Sale: sale, User: "alice", Quantity: 1})
				reserved <- err
			}()
			testkit.Eventually(t, 20*time.Second, "the first answer is lost", hook.lost.Load)
			end.how(t, s, b)
			resume()
			require.ErrorIs(t, testshop.Answer(t, reserved), end.err)
			require.Equal(t, end.verdict, again.Verdict)
			testwork.RequireDone(t, testwork.Handle(b, testwork.Messages(t, s)...))
			var status order.Status
			require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT status FROM orders WHERE user_id = 'alice'").Scan(&status))
			require.Equal(t, end.status, status)
			require.EqualValues(t, 9, s.Left(t, sale), "the unit is released")
			require.Equal(t, reservation.Reserved, s.Ask(t, sale, "alice").Verdict, "the user can buy")
		})
	}
}

// An operator's change does not verify a server.
func TestOnlyRebuildVerifiesUsedPartition(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 10)
	require.NoError(t, s.Exec(t, "DELETE FROM redis_servers"))
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Server(0)).Err())
	require.NoError(t, s.Rdb.ScriptFlush(t.Context()).Err())
	s.RequireClosed(t, sale)

	other := s.Open(t, 5)
	s.RequireClosed(t, sale)
	needs, err := testwork.Rebuilder(t, s).Needs(t.Context(), 1, true)
	require.NoError(t, err)
	require.Equal(t, []rebuild.Need{{Reason: rebuild.ReasonUnverified}}, needs)
	testwork.Rebuild(t, s)
	_, err = s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, s.Ask(t, sale, "ann").Verdict)
	require.Equal(t, reservation.Reserved, s.Ask(t, other, "ann").Verdict)
}
