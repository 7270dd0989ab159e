package retire_test

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/clocks"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/retire"
)

func TestMain(m *testing.M) { testwork.Main(m) }

// retirer retires sales as soon as they are over.
func retirer(t testing.TB, s *testshop.Shop) *retire.Retirer {
	return retire.New(retire.Config{Catalog: s.Catalog, Logger: testkit.Logger(t)})
}

func sweep(t testing.TB, s *testshop.Shop) int {
	t.Helper()
	retired, err := retirer(t, s).Sweep(t.Context())
	require.NoError(t, err)
	return retired
}

func end(t testing.TB, s *testshop.Shop, sale uuid.UUID) {
	t.Helper()
	_, err := s.Catalog.End(t.Context(), sale)
	require.NoError(t, err)
}

// requireRetired checks that Redis has a constant of the sale, and that everything else is content with that.
func requireRetired(t testing.TB, s *testshop.Shop, sale uuid.UUID) {
	t.Helper()
	layout := s.Layout(t, sale)
	for shard := range layout.Shards {
		p := layout.Partition(shard)
		require.Zero(t, s.Rdb.Exists(t.Context(), s.Keys.Buyers(p, sale), s.Keys.Ended(p, sale)).Val(), "shard %d", shard)
		fields := s.Rdb.HGetAll(t.Context(), s.Keys.Sale(p, sale)).Val()
		require.Equal(t, reservation.StateRetired, fields["state"], "shard %d", shard)
		require.Equal(t, strconv.FormatInt(s.Epoch(t, sale), 10), fields["epoch"])
		require.True(t, s.Rdb.SIsMember(t.Context(), s.Keys.Sales(p), sale.String()).Val())
	}
	report := testwork.RequireUnbroken(t, s, uuid.Nil)
	require.False(t, report.Unchecked(), testwork.Text(t, report))
	needs, err := testwork.Rebuilder(t, s).Needs(t.Context(), s.Keys.Partitions, true)
	require.NoError(t, err)
	require.Empty(t, needs)
}

// eachShop runs a test with a sale of one shard, and with one of four.
func eachShop(t *testing.T, do func(t *testing.T, s *testshop.Shop, open func(stock int64) uuid.UUID)) {
	t.Run("one shard", func(t *testing.T) {
		t.Parallel()
		s := testshop.OnOwnRedis(t, 1)
		do(t, s, func(stock int64) uuid.UUID { return s.OpenPayable(t, stock) })
	})
	t.Run("four shards", func(t *testing.T) {
		t.Parallel()
		s := testshop.OnOwnRedis(t, 8)
		do(t, s, func(stock int64) uuid.UUID { return s.OpenSharded(t, stock, 4) })
	})
}

// A sale waits until each of its orders is final and known to Postgres. Its units are then those of Postgres.
func TestSaleWaitsUntilItsOrdersAreFinal(t *testing.T) {
	t.Parallel()
	eachShop(t, func(t *testing.T, s *testshop.Shop, open func(int64) uuid.UUID) {
		l := ledger.New(s.Pool)
		sale := open(100)
		require.NoError(t, s.Exec(t, "UPDATE sales SET payments_per_second = 1"))
		answers := map[string]reservation.Answer{}
		for i := range 20 {
			user := fmt.Sprintf("user-%d", i)
			answers[user] = s.Attempt(t, sale, user, 2, "key-"+user)
		}
		require.Zero(t, sweep(t, s), "it is open")
		end(t, s, sale)
		require.Zero(t, sweep(t, s), "orders wait in the stream")
		testwork.FulfilAll(t, s)
		require.Zero(t, sweep(t, s), "orders await payment")
		for user, a := range answers {
			var err error
			if user < "user-15" {
				_, err = l.Pay(t.Context(), a.Reservation.OrderID, user, "pi-"+user)
			} else {
				_, err = l.Cancel(t.Context(), a.Reservation.OrderID, user)
			}
			require.NoError(t, err)
		}
		require.Zero(t, sweep(t, s), "units are not released")
		seen, err := s.Catalog.Show(t.Context(), sale)
		require.NoError(t, err)
		err = s.Catalog.Retire(t.Context(), sale, seen.Epoch, seen.Revision)
		require.ErrorIs(t, err, catalog.ErrNotRetired, "the last look finds the releases, too")
		_, err = l.SweepReleases(t.Context(), s.Store)
		require.NoError(t, err)
		err = s.Catalog.Retire(t.Context(), sale, seen.Epoch, seen.Revision-1)
		require.ErrorIs(t, err, catalog.ErrNotRetired, "it has changed since")
		before, err := s.Catalog.Show(t.Context(), sale)
		require.NoError(t, err)

		const turns = "SELECT count(*) FROM pay_turns"
		require.NotZero(t, s.Count(t, turns))
		require.Equal(t, 1, sweep(t, s))
		requireRetired(t, s, sale)
		require.Zero(t, sweep(t, s), "it is retired once")
		require.Zero(t, s.Count(t, turns))
		after, err := s.Catalog.Show(t.Context(), sale)
		require.NoError(t, err)
		before.Revision, before.Retired = after.Revision, true
		require.Equal(t, before, after, "nothing of it has changed for those who look")

		for user, a := range answers {
			require.Equal(t, reservation.Retired, s.Attempt(t, sale, user, 2, "key-"+user).Verdict)
			request := reservation.Request{Sale: sale, User: user, Quantity: 2, IdempotencyKey: "key-" + user}
			past, err := l.PastAnswer(t.Context(), request)
			require.NoError(t, err)
			if user < "user-15" {
				require.Equal(t, reservation.Answer{Verdict: reservation.Replayed, Reservation: a.Reservation}, past)
			} else {
				require.Equal(t, reservation.OrderEnded, past.Verdict)
				require.Equal(t, a.Reservation.OrderID, past.Reservation.OrderID)
				require.Equal(t, order.StatusCancelled, past.Status)
			}
			request.Quantity = 3
			past, err = l.PastAnswer(t.Context(), request)
			require.NoError(t, err)
			require.Equal(t, reservation.KeyReused, past.Verdict)
		}
		for _, key := range []string{"", "another"} {
			past, err := l.PastAnswer(t.Context(),
				reservation.Request{Sale: sale, User: "user-1", Quantity: 2, IdempotencyKey: key})
			require.NoError(t, err)
			require.Equal(t, reservation.AlreadyPurchased, past.Verdict)
			require.Equal(t, answers["user-1"].Reservation, past.Reservation)
			past, err = l.PastAnswer(t.Context(),
				reservation.Request{Sale: sale, User: "stranger", Quantity: 2, IdempotencyKey: key})
			require.NoError(t, err)
			require.Equal(t, reservation.Answer{Verdict: reservation.Ended}, past)
		}
	})
}

// Whatever Redis knows of a sale and Postgres does not keeps it.
func TestSaleWithDifferencesStays(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T, s *testshop.Shop, sale uuid.UUID){
		"a buyer without an order": func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Exec(t, `
				WITH gone AS (DELETE FROM orders WHERE user_id = 'user-3' RETURNING 1)
				UPDATE sales SET sold = sold - 1`))
		},
		"an order without a buyer": func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Buyers(0, sale), "user-3").Err())
		},
		"as many others": func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			held := s.Rdb.HGet(t.Context(), s.Keys.Buyers(0, sale), "user-3").Val()
			require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Buyers(0, sale), "user-3").Err())
			require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale), "eve", held).Err())
		},
		"other units": func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", 1).Err())
		},
		"a rebuild": func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			_, err := s.Store.CloseSale(t.Context(), sale, 0, reservation.NewRebuildToken(), 1)
			require.NoError(t, err)
		},
		"an unverified server": func(t *testing.T, s *testshop.Shop, _ uuid.UUID) {
			require.NoError(t, s.Store.Distrust(t.Context(), 0))
		},
		"another server": func(t *testing.T, s *testshop.Shop, _ uuid.UUID) {
			require.NoError(t, s.Exec(t, "UPDATE redis_servers SET run_id = repeat('f', 40)"))
		},
		"a pending entry": func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.XAdd(t.Context(), &redis.XAddArgs{
				Stream: s.Keys.Orders(0), Values: stream.Values(testshop.Reserved(sale, "zoe", 4)),
			}).Err())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 1)
			sale := s.Open(t, 100)
			require.Equal(t, 10, s.Crowd(t, sale, 10))
			testwork.Fulfil(t, s)
			end(t, s, sale)
			spoil(t, s, sale)
			require.Zero(t, sweep(t, s))
			require.Zero(t, s.Count(t, "SELECT count(*) FROM sales WHERE retired_at IS NOT NULL"))
			require.NotZero(t, s.Rdb.Exists(t.Context(), s.Keys.Buyers(0, sale)).Val())
		})
	}
}

// A sale that closes by its time is retired too, after the time that is set.
func TestClosedSaleIsRetiredAfterAWhile(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const window = 8 * time.Second // within which a busy machine creates the sale and buys
	closing, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "closing", Stock: 10, PerOrderLimit: 1, ClosesAt: time.Now().Add(window),
	})
	require.NoError(t, err)
	s.Buy(t, closing.ID, "ann")
	testwork.Fulfil(t, s)
	testkit.Eventually(t, testshop.Soon, "the sale closes", func() bool {
		return s.Attempt(t, closing.ID, "eve", 2, "").Verdict == reservation.Ended
	})
	later := retire.New(retire.Config{Catalog: s.Catalog, Logger: testkit.Logger(t), After: time.Hour})
	retired, err := later.Sweep(t.Context())
	require.NoError(t, err)
	require.Zero(t, retired)
	testkit.Eventually(t, testshop.Soon, "it is retired", func() bool { return sweep(t, s) == 1 })
	requireRetired(t, s, closing.ID)
	_, err = s.Catalog.Restock(t.Context(), closing.ID, 5, "")
	require.ErrorAs(t, err, new(*reservation.IllegalTransitionError))
	_, err = s.Catalog.Resume(t.Context(), closing.ID)
	require.ErrorAs(t, err, new(*reservation.IllegalTransitionError))
	end(t, s, closing.ID) // may be repeated
}

// A rebuild brings no buyers back, whether it is of a lost Redis or manual.
func TestRebuildRespectsRetiredSale(t *testing.T) {
	t.Parallel()
	eachShop(t, func(t *testing.T, s *testshop.Shop, open func(int64) uuid.UUID) {
		l := ledger.New(s.Pool)
		sale, other := open(100), s.Open(t, 50)
		id := s.Attempt(t, sale, "ann", 2, "key").Reservation.OrderID
		require.Equal(t, 20, s.Crowd(t, other, 20))
		testwork.FulfilAll(t, s)
		testwork.Pay(t, l, id, "ann", "pi")
		end(t, s, sale)
		require.Equal(t, 1, sweep(t, s))
		r := testwork.Rebuilder(t, s)
		_, err := r.Sale(t.Context(), sale, "by-hand")
		require.NoError(t, err)
		requireRetired(t, s, sale)
		require.EqualValues(t, 2, s.Epoch(t, sale))

		s.Flush(t)
		for p := range s.Keys.Partitions {
			_, err := r.Partition(t.Context(), p, "by-hand")
			require.NoError(t, err)
		}
		requireRetired(t, s, sale)
		require.Equal(t, reservation.Retired, s.Attempt(t, sale, "ann", 2, "key").Verdict)
		require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, other, "user-1").Verdict)
	})
}

// Several workers retire each sale once.
func TestWorkersRetireSaleOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const sales, workers = 5, 4
	for range sales {
		sale := s.Open(t, 10)
		s.Buy(t, sale, "ann")
		end(t, s, sale)
	}
	testwork.Fulfil(t, s)
	var all errgroup.Group
	var retired atomic.Int64
	for range workers {
		all.Go(func() error {
			r := retirer(t, s)
			for s.Count(t, "SELECT count(*) FROM sales WHERE retired_at IS NULL") > 0 {
				n, err := r.Sweep(t.Context())
				if err != nil {
					return err
				}
				retired.Add(int64(n))
			}
			return nil
		})
	}
	require.NoError(t, all.Wait())
	require.EqualValues(t, sales, retired.Load())
	require.EqualValues(t, sales, s.Count(t, "SELECT count(*) FROM sale_events WHERE type = 'SaleRetired'"))
	require.False(t, testwork.Audit(t, s, uuid.Nil).Broken())
}

// An old copy of Redis has the buyers again, and a restored Postgres lacks the retirement. The audit names both, and
// a rebuild of the sale puts it right.
func TestAuditNamesRetirementOfOneSide(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 100)
	s.Attempt(t, sale, "ann", 2, "key")
	testwork.Fulfil(t, s)
	end(t, s, sale)
	buyers := s.Rdb.HGetAll(t.Context(), s.Keys.Buyers(0, sale)).Val()
	require.Equal(t, 1, sweep(t, s))

	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale), buyers).Err())
	report := testwork.Audit(t, s, uuid.Nil)
	require.Equal(t, "S7", testwork.Broken(report))
	require.Contains(t, testwork.Text(t, report),
		"the sale is retired, and Redis still has 1 buyers and 0 ended orders of it")
	testwork.Reconcile(t, s)
	requireRetired(t, s, sale)

	require.NoError(t, s.Exec(t, "UPDATE sales SET retired_at = NULL"))
	report = testwork.Audit(t, s, uuid.Nil)
	require.Contains(t, testwork.Text(t, report), "Redis has retired the sale, and Postgres has not")
	testwork.Reconcile(t, s)
	require.False(t, testwork.Audit(t, s, uuid.Nil).Broken())
	require.Equal(t, reservation.Replayed, s.Attempt(t, sale, "ann", 2, "key").Verdict)
}

// A sale whose keys an operator has deleted is retired as well, and gets what is left of a retired one.
func TestSaleWithoutKeysIsRetired(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 100)
	s.Attempt(t, sale, "ann", 2, "key")
	testwork.Fulfil(t, s)
	end(t, s, sale)
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale), s.Keys.Buyers(0, sale)).Err())
	require.Equal(t, 1, sweep(t, s))
	require.NoError(t, testwork.Heal(t, s, testwork.Rebuilder(t, s), 1))
	requireRetired(t, s, sale)
}

// A clock of Postgres that is ahead for a moment retires no sale.
func TestClockAheadRetiresNoSale(t *testing.T) {
	t.Parallel()
	s, set := testshop.OnClockedPostgres(t)
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "test", Stock: 10, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Minute),
	})
	require.NoError(t, err)
	set(2 * time.Minute)
	_, err = retirer(t, s).Sweep(t.Context())
	require.ErrorIs(t, err, clocks.ErrApart)
	set(0)
	require.Zero(t, sweep(t, s))
	require.Equal(t, reservation.Reserved, s.Ask(t, sale.ID, "ann").Verdict)
}

// A sale with items retires as any other, and Postgres answers with the lines of its orders.
func TestSaleWithItemsIsRetired(t *testing.T) {
	t.Parallel()
	for name, shards := range map[string]int{"one shard": 1, "four shards": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireItemsRetired(t, testshop.OnOwnRedis(t, 8), shards)
		})
	}
}

func requireItemsRetired(t *testing.T, s *testshop.Shop, shards int) {
	t.Helper()
	l := ledger.New(s.Pool)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", Stock: 8, PerOrderLimit: 4, PaymentWindow: testshop.PaymentWindow, Shards: shards,
		Items: []reservation.Item{{Code: "m", Name: "M", Stock: 5}, {Code: "l", Name: "L", Stock: 3}},
	})
	require.NoError(t, err)
	sale := created.ID
	request := func(user string) reservation.Request {
		return reservation.Request{
			Sale: sale, User: user, IdempotencyKey: "key-" + user, Items: map[string]int64{"m": 2, "l": 1},
		}
	}
	made := map[string]reservation.Answer{}
	for _, user := range []string{"ann", "bob"} {
		made[user], err = s.Reserve(t.Context(), request(user))
		require.NoError(t, err)
	}
	testwork.FulfilAll(t, s)
	testwork.Pay(t, l, made["ann"].Reservation.OrderID, "ann", "pi")
	testwork.Cancel(t, l, made["bob"].Reservation.OrderID, "bob")
	testwork.ReleaseUnits(t, s)
	end(t, s, sale)
	before, err := s.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 2}, []int64{before.Items[0].Available, before.Items[1].Available})

	require.Equal(t, 1, sweep(t, s))
	for range 2 {
		requireRetired(t, s, sale)
		for _, partition := range created.Layout().All() {
			fields := s.Rdb.HGetAll(t.Context(), s.Keys.Sale(partition, sale)).Val()
			require.Equal(t, "m l", fields["items"])
			require.NotContains(t, fields, "left.a")
		}
		after, err := s.Show(t.Context(), sale)
		require.NoError(t, err)
		before.Epoch, before.Revision, before.Retired = after.Epoch, after.Revision, true
		require.Equal(t, before, after, "nothing of it has changed for those who look")
		answer, err := s.Reserve(t.Context(), request("ann"))
		require.NoError(t, err)
		require.Equal(t, reservation.Retired, answer.Verdict)

		s.Flush(t)
		for partition := range s.Keys.Partitions {
			_, err := testwork.Rebuilder(t, s).Partition(t.Context(), partition, "by-hand")
			require.NoError(t, err)
		}
	}
	for user, verdict := range map[string]reservation.Verdict{
		"ann": reservation.Replayed, "bob": reservation.OrderEnded,
	} {
		past, err := l.PastAnswer(t.Context(), request(user))
		require.NoError(t, err)
		require.Equal(t, []any{verdict, made[user].Reservation.OrderID, order.Lines("a2b1"), order.Items(`{"m":2,"l":1}`)},
			[]any{past.Verdict, past.Reservation.OrderID, past.Reservation.Lines, past.Of.Units})
	}
}
