package reservation_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithRedisInMemory()) }

// commandsServed counts the commands that a Redis has served, except INFO.
func commandsServed(t *testing.T, rdb redis.UniversalClient) (n int) {
	t.Helper()
	stats, err := rdb.Info(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for line := range strings.Lines(stats) {
		name, rest, _ := strings.Cut(line, ":calls=")
		if rest != "" && name != "cmdstat_info" {
			var calls int
			_, err := fmt.Sscanf(rest, "%d,", &calls)
			require.NoError(t, err)
			n += calls
		}
	}
	return n
}

func TestReserveReturnsEveryVerdict(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	sale := s.Sale(t, 4)

	request := reservation.Request{Sale: sale.ID, User: "ann", Quantity: 2, IdempotencyKey: "click-1"}
	first, err := s.Reserve(ctx, request)
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, first.Verdict)
	require.EqualValues(t, 1, first.Reservation.Sequence)
	require.EqualValues(t, 2, first.Reservation.Quantity)
	require.WithinDuration(t, time.Now(), first.Reservation.ReservedAt, time.Minute)

	again, err := s.Reserve(ctx, request)
	require.NoError(t, err)
	require.Equal(t, reservation.Answer{Verdict: reservation.Replayed, Reservation: first.Reservation}, again,
		"a retry gets the first answer")

	other := request
	other.Quantity = 1
	reused, err := s.Reserve(ctx, other)
	require.NoError(t, err)
	require.Equal(t, reservation.KeyReused, reused.Verdict)

	other.IdempotencyKey = "click-2"
	purchased, err := s.Reserve(ctx, other)
	require.NoError(t, err)
	require.Equal(t, reservation.Answer{Verdict: reservation.AlreadyPurchased, Reservation: first.Reservation}, purchased)

	for _, quantity := range []int64{11, 1 << 53, math.MaxInt64} {
		over, err := s.Reserve(ctx, reservation.Request{Sale: sale.ID, User: "bob", Quantity: quantity})
		require.NoError(t, err)
		require.Equal(t, reservation.Answer{Verdict: reservation.OverLimit, Limit: 10}, over)
	}
	s.Buy(t, sale.ID, "dan")
	short, err := s.Reserve(ctx, reservation.Request{Sale: sale.ID, User: "bob", Quantity: 2})
	require.NoError(t, err)
	require.Equal(t, reservation.SoldOut, short.Verdict, "one is left, and two were requested")

	_, err = s.Pause(ctx, sale.ID)
	require.NoError(t, err)
	require.Equal(t, reservation.Paused, s.Ask(t, sale.ID, "bob").Verdict)
	_, err = s.Resume(ctx, sale.ID)
	require.NoError(t, err)
	_, err = s.End(ctx, sale.ID)
	require.NoError(t, err)
	require.Equal(t, reservation.Ended, s.Ask(t, sale.ID, "cid").Verdict)

	opensAt := time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond)
	future, err := s.Create(ctx, reservation.Terms{Name: "tomorrow", Stock: 1, PerOrderLimit: 1, OpensAt: opensAt})
	require.NoError(t, err)
	require.Equal(t, reservation.Answer{Verdict: reservation.NotOpen, OpensAt: opensAt}, s.Ask(t, future.ID, "ann"))

	require.Equal(t, reservation.UnknownSale, s.Ask(t, uuid.New(), "ann").Verdict)
}

func TestReserveRejectsInvalidInputWithoutRedis(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 3)
	for name, r := range map[string]reservation.Request{
		"user missing":                  {Quantity: 1},
		"braces":                        {User: "{0}", Quantity: 1},
		"user with a quote":             {User: `a","x":"`, Quantity: 1},
		"user with a control character": {User: "a\nb", Quantity: 1},
		"user not ASCII":                {User: "änne", Quantity: 1},
		"user of 10 KB":                 {User: string(make([]byte, 10<<10)), Quantity: 1},
		"quantity 0":                    {User: "ann"},
		"quantity -1":                   {User: "ann", Quantity: -1},
		"key of 256 characters":         {User: "ann", Quantity: 1, IdempotencyKey: fmt.Sprintf("%0256d", 0)},
		"key not ASCII":                 {User: "ann", Quantity: 1, IdempotencyKey: "schlüssel"},
	} {
		r.Sale = sale.ID
		_, err := s.Reserve(t.Context(), r)
		var invalid *order.InvalidError
		require.ErrorAs(t, err, &invalid, name)
	}
	require.EqualValues(t, 3, s.Left(t, sale.ID))
	require.Empty(t, s.Events(t, 0))
}

func TestReserveSellsExactlyTheStockToTenThousandBuyers(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const stock, buyers = 100, 10_000
	sale := s.Sale(t, stock+1)
	s.Buy(t, sale.ID, "warm-up") // loads the script before many goroutines compete for the processor

	var won sync.Map
	var winners, refused atomic.Int64
	var wg sync.WaitGroup
	for buyer := range buyers {
		wg.Go(func() {
			user := fmt.Sprintf("buyer-%d", buyer)
			a, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			switch {
			case err == nil && a.Verdict == reservation.Reserved:
				winners.Add(1)
				_, twice := won.LoadOrStore(a.Reservation.OrderID, user)
				require.False(t, twice)
			case err == nil && a.Verdict == reservation.SoldOut:
				refused.Add(1)
			case err != nil:
				require.ErrorIs(t, err, reservation.ErrOverloaded)
				refused.Add(1)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, stock, winners.Load())
	require.EqualValues(t, buyers-stock, refused.Load())
	require.EqualValues(t, 0, s.Left(t, sale.ID))
	require.Len(t, s.Events(t, 0), stock+1)
}

// whilePaused lets a call, and the requests behind it, wait for a Redis that pauses.
var whilePaused = reservation.StoreOptions{WaitMax: time.Minute, CallTimeout: time.Minute}

// pauseWrites has Redis hold back commands that write, until resume is called or the test ends.
func pauseWrites(t *testing.T, rdb redis.UniversalClient) (resume func()) {
	t.Helper()
	require.NoError(t, rdb.Do(t.Context(), "CLIENT", "PAUSE", "60000", "WRITE").Err())
	resume = sync.OnceFunc(func() {
		require.NoError(t, rdb.Do(context.WithoutCancel(t.Context()), "CLIENT", "UNPAUSE").Err())
	})
	t.Cleanup(resume)
	return resume
}

func TestConcurrentRequestsShareCalls(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Client(t, own.URL)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb, Store: whilePaused})
	sale := s.Sale(t, 1000)
	s.Buy(t, sale.ID, "warm-up")

	before := commandsServed(t, rdb)
	// While Redis pauses, all others wait behind the first request.
	resume := pauseWrites(t, rdb)
	var asking, wg sync.WaitGroup
	for i := range 512 {
		asking.Add(1)
		wg.Go(func() {
			asking.Done()
			s.Buy(t, sale.ID, fmt.Sprintf("u%d", i))
		})
	}
	asking.Wait()
	resume()
	wg.Wait()
	// The served commands are CLIENT PAUSE and UNPAUSE, the calls, and the commands inside them: HMGET twice, TIME,
	// XADD, HSET twice.
	const inside = 6
	calls := (commandsServed(t, rdb) - before - 2) / (1 + inside)
	require.Positive(t, calls)
	require.Less(t, calls, 20, "calls of the script for 512 requests")
}

func TestCancelBeforeSendReservesNothing(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Client(t, own.URL)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb, Store: whilePaused})
	sale := s.Sale(t, 10)
	s.Buy(t, sale.ID, "warm-up")

	resume := pauseWrites(t, rdb)
	sent := make(chan error, 1)
	firstCtx, giveUp := context.WithCancel(t.Context())
	go func() {
		_, err := s.Reserve(firstCtx, reservation.Request{Sale: sale.ID, User: "sent", Quantity: 1, IdempotencyKey: "k"})
		sent <- err
	}()
	awaitBlocked(t, rdb, "the first request is sent")
	queued, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := s.Reserve(queued, reservation.Request{Sale: sale.ID, User: "queued", Quantity: 1})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, reservation.ErrOutcomeUnknown)

	giveUp()
	require.ErrorIs(t, <-sent, reservation.ErrOutcomeUnknown, "the request was sent")
	resume()

	again, err := s.Reserve(t.Context(), reservation.Request{
		Sale: sale.ID, User: "sent", Quantity: 1,
		IdempotencyKey: "k",
	})
	require.NoError(t, err)
	require.Equal(t, reservation.Replayed, again.Verdict, "a retry with the same key")
	require.EqualValues(t, 8, s.Left(t, sale.ID), "the warm-up and the sent request, not the queued one")
}

func TestRequestOlderThanWaitMaxIsOverloaded(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Client(t, own.URL)
	const waitMax = time.Second
	s := testshop.NewShopOn(t, testshop.Options{
		Redis: rdb, Store: reservation.StoreOptions{WaitMax: waitMax, CallTimeout: whilePaused.CallTimeout},
	})
	sale := s.Sale(t, 10)
	s.Buy(t, sale.ID, "warm-up")

	resume := pauseWrites(t, rdb)
	var buyers sync.WaitGroup
	buyers.Go(func() {
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "sent", Quantity: 1})
		assert.NoError(t, err, "it was sent immediately")
	})
	awaitBlocked(t, rdb, "the first request is sent")
	var asking sync.WaitGroup
	for i := range 20 {
		asking.Add(1)
		buyers.Go(func() {
			asking.Done()
			_, err := s.Reserve(context.Background(), reservation.Request{
				Sale: sale.ID, User: fmt.Sprintf("late-%d", i),
				Quantity: 1,
			})
			assert.ErrorIs(t, err, reservation.ErrOverloaded)
		})
	}
	asking.Wait()
	<-time.After(2 * waitMax)
	resume()
	buyers.Wait()
	require.EqualValues(t, 8, s.Left(t, sale.ID))
	require.Equal(t, reservation.Reserved, s.Ask(t, sale.ID, "late-0").Verdict, "later requests are served again")
}

func awaitBlocked(t *testing.T, rdb redis.UniversalClient, what string) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, what, func() bool {
		clients, err := rdb.Info(t.Context(), "clients").Result()
		return err == nil && !containsLine(clients, "blocked_clients:0")
	})
}

func containsLine(text, line string) bool {
	for l := range strings.Lines(text) {
		if strings.TrimSpace(l) == line {
			return true
		}
	}
	return false
}

func TestFullQueueIsOverloaded(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Client(t, own.URL)
	options := whilePaused
	options.QueueMax, options.BatchMax = 4, 2
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb, Store: options})
	sale := s.Sale(t, 100)
	s.Buy(t, sale.ID, "warm-up")

	resume := pauseWrites(t, rdb)
	var overloaded, reserved atomic.Int64
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: fmt.Sprintf("u%d", i), Quantity: 1})
			if err == nil {
				reserved.Add(1)
				return
			}
			require.ErrorIs(t, err, reservation.ErrOverloaded)
			overloaded.Add(1)
		})
	}
	testkit.Eventually(t, 20*time.Second, "requests are refused", func() bool { return overloaded.Load() > 0 })
	resume()
	wg.Wait()
	require.Equal(t, 100-1-reserved.Load(), s.Left(t, sale.ID), "refused requests took nothing")
}

func TestLostReplyIsRetriedOnce(t *testing.T) {
	t.Parallel()
	proxy, rdb, _ := testkit.RedisThroughProxy(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
	sale := s.Sale(t, 10)
	s.Buy(t, sale.ID, "warm-up")

	proxy.Lose(2)
	a := s.Ask(t, sale.ID, "ann")
	proxy.RequireLost(t)
	require.Equal(t, reservation.Replayed, a.Verdict, "the third try gets the first answer")
	require.EqualValues(t, 8, s.Left(t, sale.ID))
	require.Len(t, s.Events(t, 0), 2)

	proxy.Lose(3)
	request := reservation.Request{Sale: sale.ID, User: "bob", Quantity: 1, IdempotencyKey: "k"}
	_, err := s.Reserve(t.Context(), request)
	proxy.RequireLost(t)
	require.ErrorIs(t, err, reservation.ErrOutcomeUnknown)
	again, err := s.Reserve(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, reservation.Replayed, again.Verdict)
	require.EqualValues(t, 7, s.Left(t, sale.ID))
	require.Len(t, s.Events(t, 0), 3)
}

func TestClientRetriesReserveOnce(t *testing.T) {
	t.Parallel()
	proxy, rdb, _ := testkit.RedisThroughProxy(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
	sale := s.Sale(t, 10)
	s.Buy(t, sale.ID, "warm-up")

	keys := []string{s.Keys.Sale(0, sale.ID), s.Keys.Buyers(0, sale.ID), s.Keys.Orders(0), s.Keys.Ended(0, sale.ID)}
	require.NoError(t, lua.Reserve.Load(t.Context(), rdb).Err())
	proxy.Lose(3)
	answers, err := lua.Reserve.Run(t.Context(), rdb, keys, "1", "0",
		order.ReservedMetadataPrefix(sale.ID, 1, false), "ann", order.CompactID(order.NewOrderID(sale.ID)), "-", "1").Slice()
	require.NoError(t, err, "go-redis tried four times")
	proxy.RequireLost(t)
	require.Contains(t, answers[3], "replayed ")
	require.EqualValues(t, 8, s.Left(t, sale.ID))
	require.Len(t, s.Events(t, 0), 2)
}

func TestReserveOfLostSaleIsUnavailable(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 10)
	s.Buy(t, sale.ID, "ann")
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale.ID)).Err())
	_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "bob", Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.Len(t, s.Events(t, 0), 1)
}

func TestRebuiltSaleIsServedInNewEpoch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 10)
	s.Buy(t, sale.ID, "ann")
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale.ID), "epoch", 2).Err())

	s.Buy(t, sale.ID, "bob")
	events := s.Events(t, 0)
	require.Len(t, events, 2)
	require.EqualValues(t, 2, events[1].Epoch)
}

func TestSaleIsFoundInPartitionOfItsCreation(t *testing.T) {
	t.Parallel()
	keys := testkit.Keys(t)
	keys.Partitions = 8
	before := testshop.NewShopOn(t, testshop.Options{Keys: keys})
	var sales []catalog.CountedSale
	for range 8 {
		sales = append(sales, before.Sale(t, 5))
	}
	keys.Partitions = 1
	after := testshop.NewShopOn(t, testshop.Options{Keys: keys})
	for _, sale := range sales {
		a := after.Ask(t, sale.ID, "ann")
		require.Equal(t, reservation.Reserved, a.Verdict)
		found, err := after.FindReserved(t.Context(), a.Reservation.OrderID, "ann")
		require.NoError(t, err)
		require.Equal(t, sale.ID, found.SaleID)
	}
}

func TestFindReservedEndsWithContext(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Client(t, own.URL)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
	sale := s.Sale(t, 5)
	require.NoError(t, syscall.Kill(own.Pid(), syscall.SIGSTOP))
	defer func() { require.NoError(t, syscall.Kill(own.Pid(), syscall.SIGCONT)) }()
	began := time.Now()
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := s.FindReserved(ctx, order.NewOrderID(sale.ID), "ann")
			require.ErrorIs(t, err, reservation.ErrUnavailable)
		})
	}
	wg.Wait()
	require.Less(t, time.Since(began), 50*time.Second, "one after the other they would wait for 100 s")
}

func TestClosedStoreReturnsError(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 1)
	s.Close()
	_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
}

func TestReleaseReturnsUnitsOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	one, two := s.Sale(t, 5), s.Sale(t, 5)
	a, b := s.Ask(t, one.ID, "ann"), s.Ask(t, two.ID, "ann")
	releases := []reservation.Release{
		{SaleID: one.ID, OrderID: a.Reservation.OrderID, UserID: "ann"},
		{SaleID: two.ID, OrderID: b.Reservation.OrderID, UserID: "ann"},
		{SaleID: uuid.New(), OrderID: uuid.New(), UserID: "ann"}, // of a sale that Redis does not have
	}
	for range 2 {
		_, err := s.Release(t.Context(), releases)
		require.NoError(t, err)
		require.Equal(t, []int64{5, 5}, []int64{s.Left(t, one.ID), s.Left(t, two.ID)})
	}
	s.Buy(t, one.ID, "ann")
	_, err := s.Release(t.Context(), releases)
	require.NoError(t, err, "the former order, not the current one")
	require.EqualValues(t, 4, s.Left(t, one.ID))
}
