package rebuild_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/rebuild"
)

// A worker processes entries that Redis has lost. An order that is recorded before the rebuild stays valid, a later one
// is voided.
func TestLateEventOfOlderEpochIsVoided(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 10)
	for _, user := range []string{"early", "late", "by-hand"} {
		s.Buy(t, sale, user)
	}
	entries := s.Rdb.XRange(t.Context(), s.Keys.Orders(0), "-", "+").Val()
	msgs := testwork.Messages(t, s)
	b := testwork.Batch(t, s, nil)
	s.Flush(t)
	require.NoError(t, testshop.Answer(t, testwork.Handle(b, msgs[0])[0]))
	require.EqualValues(t, 1, testwork.Rebuild(t, s).Sales[0].Orders)
	require.NoError(t, testshop.Answer(t, testwork.Handle(b, msgs[1])[0]), "the message is acknowledged")

	// The third entry is appended again from a copy, twice.
	for range 2 {
		require.NoError(t,
			s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: s.Keys.Orders(0), Values: entries[2].Values}).Err())
	}
	s.Buy(t, sale, "late") // buys again and keeps this order
	testwork.Work(t, testwork.Config(t, s))
	s.AwaitConfirmed(t, 2)
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 2,
		s.Count(t,
			"SELECT count(*) FROM orders WHERE status = 'voided' AND epoch = 1 AND reason = 'sale-rebuilt' AND user_id IN "+
				"('late', 'by-hand')"))
	require.EqualValues(t, 4, s.Count(t, "SELECT count(*) FROM orders"))
	require.EqualValues(t, 8, s.Left(t, sale))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
	s.RequireSound(t)
}

func TestReplayedDeadLetterOfOlderEpochIsVoided(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	entry := testwork.TakeOut(t, s)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("a test")))
	testwork.Rebuild(t, s)
	s.Buy(t, sale, "ann") // possible, because the first order is lost
	_, _, err := letters.Replay(t.Context(), testwork.OnlyLetter(t, s, letters).ID, "ann")
	require.NoError(t, err)
	testwork.Work(t, testwork.Config(t, s))
	s.AwaitConfirmed(t, 1)
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE status = 'voided'"))
	s.RequireSound(t)
	require.EqualValues(t, 9, s.Left(t, sale))
}

// Each partition has its own server to verify, also one without a sale.
func TestPartitionsAreRebuiltIndependently(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	keys := testkit.Keys(t)
	keys.Partitions = 3
	s := testshop.NewShopOn(t, testshop.Options{Pool: pool, Keys: keys})
	sales := map[int]uuid.UUID{}
	for len(sales) < 2 {
		sale := s.Open(t, 10)
		if p := keys.Partition(sale); p < 2 {
			sales[p] = sale
		}
	}
	for _, sale := range sales {
		s.Buy(t, sale, "ann")
	}
	r := testwork.Rebuilder(t, s)
	partitions, err := r.Partitions(t.Context())
	require.NoError(t, err)
	require.Equal(t, 3, partitions)
	require.NoError(t, s.Store.Distrust(t.Context(), 1))
	require.NoError(t, testwork.Heal(t, s, r, 3))
	require.EqualValues(t, 1, s.Epoch(t, sales[0]))
	require.EqualValues(t, 2, s.Epoch(t, sales[1]))
	require.Equal(t, "1", s.Rdb.HGet(t.Context(), keys.Sale(0, sales[0]), "epoch").Val())

	// A failure of one partition does not stop the others.
	require.NoError(t,
		s.Exec(t, "UPDATE redis_servers SET run_id = 'another' WHERE partition = 0"))
	require.NoError(t, s.Store.Distrust(t.Context(), 1))
	require.ErrorIs(t, testwork.Heal(t, s, r, 3), rebuild.ErrOtherServer)
	require.EqualValues(t, 1, s.Epoch(t, sales[0]))
	require.EqualValues(t, 3, s.Epoch(t, sales[1]))
	_, err = r.Partition(t.Context(), 0, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.NoError(t, testwork.Heal(t, s, r, 3))

	empty := testshop.NewShopOn(t, testshop.Options{Pool: pool})
	empty.Keys.Partitions = 64
	report, err := testwork.Rebuilder(t, empty).Partition(t.Context(), 63, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.Empty(t, report.Sales)
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM redis_servers WHERE partition = 63"))
	s.Buy(t, sales[0], "bob")
	s.Buy(t, sales[1], "bob")
}

// fill inserts confirmed orders of a sale into Postgres.
func fill(t testing.TB, s *testshop.Shop, sale uuid.UUID, orders int) {
	t.Helper()
	for _, query := range []string{
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
			key_fingerprint)
		SELECT gen_random_uuid(), $1, 'user-' || n, 1 + n % 3, 'confirmed', 2, n, 1, now(), now(), 'AAAAAAAAAAAAAAAAAAAAAA'
		FROM generate_series(1, $2::int) AS n`,
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, data)
		SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, updated_at, reserved_at, '{}'
		FROM orders WHERE sale_id = $1 AND $2::int > 0`,
		`UPDATE sales SET sold = (SELECT sum(quantity) FROM orders WHERE sale_id = $1), last_sequence = $2 WHERE id = $1`,
	} {
		require.NoError(t, s.Exec(t, query, sale, orders))
	}
}

func TestOvertakenRebuildOpensNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	r := testwork.Rebuilder(t, s)
	session, err := r.Begin(t.Context(), 0)
	require.NoError(t, err)
	defer session.End()
	guarded, err := r.FindSale(t.Context(), sale)
	require.NoError(t, err)
	b := r.NewBuild(session, rebuild.Need{Reason: rebuild.ReasonByHand})
	sales := []rebuild.RequiredSale{guarded}
	require.NoError(t, b.CloseAndDrain(t.Context(), sales))
	ours, err := session.RaiseEpoch(t.Context(), sales[0], rebuild.ReasonByHand)
	require.NoError(t, err)
	all, err := b.StageBuyers(t.Context(), ours)
	require.NoError(t, err)

	_, err = session.RaiseEpoch(t.Context(), sales[0], rebuild.ReasonByHand)
	require.ErrorIs(t, err, rebuild.ErrOvertaken, "the epoch was raised after the sale was read")
	again, err := r.FindSale(t.Context(), sale)
	require.NoError(t, err)
	other := r.NewBuild(session, rebuild.Need{Reason: rebuild.ReasonByHand})
	sales = []rebuild.RequiredSale{again}
	require.NoError(t, other.CloseAndDrain(t.Context(), sales))
	require.Equal(t, b.Token(), sales[0].Closed().LastToken)
	require.ErrorIs(t, b.Open(t.Context(), ours, 10-all.Units(), all), reservation.ErrSaleNotClosed)
	theirs, err := session.RaiseEpoch(t.Context(), sales[0], rebuild.ReasonByHand)
	require.NoError(t, err)
	_, err = b.StageBuyers(t.Context(), ours)
	require.ErrorIs(t, err, rebuild.ErrOvertaken)
	require.NoError(t, session.Conn().Ping(t.Context()), "the session stays usable")
	all2, err := other.StageBuyers(t.Context(), theirs)
	require.NoError(t, err)
	require.NoError(t, other.Open(t.Context(), theirs, 9, all2))
	require.ErrorIs(t, b.Open(t.Context(), ours, 10-all.Units(), all), reservation.ErrSaleNotClosed)
	require.Equal(t, "3", s.SaleInRedis(t, sale)["epoch"])
	s.Buy(t, sale, "bob")
}

func TestRebuildDeletesLeftoversOfFailedRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	token := reservation.NewRebuildToken()
	_, err := s.Store.CloseSale(t.Context(), sale, 0, token, 1)
	require.NoError(t, err)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Staged(0, sale, token), "user", "reservation").Err())
	testwork.Rebuild(t, s)
	require.Empty(t, s.Rdb.Keys(t.Context(), s.Keys.Staged(0, sale, "*")).Val())
	require.Equal(t, []string{"ann"}, s.Rdb.HKeys(t.Context(), s.Keys.Buyers(0, sale)).Val())
	s.RequireSound(t)
}

// RaiseEpoch waits for the transaction of a worker that records an order of the old epoch, and counts the order.
func TestRaiseEpochCountsUncommittedOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	event := s.Events(t, 0)[0]
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err()) // nothing to drain
	recording, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = recording.Rollback(context.WithoutCancel(t.Context())) }()
	columns, _ := ledger.ColumnsOf([]order.OrderReserved{event})
	_, err = recording.Exec(t.Context(), sql.LedgerRecordOrders, append(columns.Arguments(), nil)...)
	require.NoError(t, err)
	_, err = recording.Exec(t.Context(), sql.LedgerAddSold, sale, 1, 1, 1)
	require.NoError(t, err)
	done := make(chan error, 1)
	var report rebuild.Report
	go func() {
		var err error
		report, err = testwork.Rebuilder(t, s).Partition(context.Background(), 0, rebuild.ReasonByHand)
		done <- err
	}()
	s.AwaitWaiting(t, 1)
	require.NoError(t, recording.Commit(t.Context()))
	require.NoError(t, <-done)
	require.EqualValues(t, 1, report.Sales[0].Orders)
	require.EqualValues(t, 1, s.Count(t, "SELECT (data ->> 'orders')::int FROM sale_events WHERE type = 'SaleRebuilt'"))
	s.RequireSound(t)
}

// BenchmarkRebuildOfAMillionOrders measures how long a sale with a million buyers is closed when Redis has lost it, and
// how much more memory Redis uses after a second rebuild. -benchtime=1x.
func BenchmarkRebuildOfAMillionOrders(b *testing.B) {
	const orders = 1_000_000
	s := testshop.OnOwnRedis(b, 1)
	sale := s.Open(b, 3*orders)
	fill(b, s, sale, orders)
	_, err := s.Pool.Exec(b.Context(), "VACUUM ANALYZE orders")
	require.NoError(b, err)
	s.Flush(b)
	testwork.Rebuild(b, s) // the base of the memory figure
	before := usedMemory(b, s)
	testwork.Rebuild(b, s)
	after := usedMemory(b, s)

	var seconds float64
	for b.Loop() {
		b.StopTimer()
		s.Flush(b)
		b.StartTimer()
		report := testwork.Rebuild(b, s)
		require.EqualValues(b, orders, report.Sales[0].Orders)
		seconds += report.Seconds
	}
	b.ReportMetric(seconds/float64(b.N), "s/rebuild")
	b.ReportMetric(float64(before)/orders, "B/order")
	b.ReportMetric(float64(after-before)/orders, "B/order-more")
}

// usedMemory returns the memory of Redis after all lazy frees.
func usedMemory(t testing.TB, s *testshop.Shop) int64 {
	t.Helper()
	var used int64
	testkit.Eventually(t, 60*time.Second, "lazy frees are done", func() bool {
		info := s.Rdb.InfoMap(t.Context(), "memory")
		used, _ = strconv.ParseInt(info.Item("Memory", "used_memory"), 10, 64)
		return info.Item("Memory", "lazyfree_pending_objects") == "0"
	})
	return used
}

// baskets are buyers of a sale with items.
type baskets struct {
	*testshop.Shop
	sale reservation.Sale
}

func newBaskets(t *testing.T) baskets {
	t.Helper()
	s := testshop.OnOwnRedis(t, 1)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", PerOrderLimit: 4, Stock: 10, PaymentWindow: testshop.PaymentWindow,
		Items: []reservation.Item{
			{Code: "m", Name: "M", Stock: 5, PerOrderLimit: 3},
			{Code: "l", Name: "L", Stock: 3},
			{Code: "s", Name: "S", Stock: 2},
		},
	})
	require.NoError(t, err)
	return baskets{s, created.Sale}
}

// want asks for a unit of the item of each letter, "mml" for two of m and one of l.
func (b baskets) want(t *testing.T, user, codes string) reservation.Answer {
	t.Helper()
	items := map[string]int64{}
	for _, code := range codes {
		items[string(code)]++
	}
	a, err := b.Reserve(t.Context(),
		reservation.Request{Sale: b.sale.ID, User: user, IdempotencyKey: "key-" + user, Items: items})
	require.NoError(t, err)
	return a
}

func (b baskets) requireLeft(t *testing.T, m, l, s int64) {
	t.Helper()
	require.Equal(t, map[string]int64{"": m + l + s, "a": m, "b": l, "c": s}, b.LeftItems(t, b.sale))
	b.RequireSound(t)
	testwork.RequireUnbroken(t, b.Shop, uuid.Nil)
}

func TestRebuildRestoresItems(t *testing.T) {
	t.Parallel()
	s := newBaskets(t)
	l := ledger.New(s.Pool)
	ann, bob := s.want(t, "ann", "mml"), s.want(t, "bob", "ll")
	carol, dave := s.want(t, "carol", "ms"), s.want(t, "dave", "s")
	testwork.Fulfil(t, s.Shop)
	testwork.Pay(t, l, bob.Reservation.OrderID, "bob", "pi")
	testwork.Cancel(t, l, carol.Reservation.OrderID, "carol")
	testwork.EndWindow(t, s.Pool, dave.Reservation.OrderID)
	testwork.Expire(t, s.Shop)
	testwork.ReleaseUnits(t, s.Shop)
	s.requireLeft(t, 3, 0, 2)
	before := s.SaleInRedis(t, s.sale.ID)
	s.want(t, "lost", "m") // unread by workers

	for range 2 {
		s.Flush(t)
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: s.sale.ID, User: "eve", Items: map[string]int64{"m": 1}})
		require.ErrorIs(t, err, reservation.ErrUnavailable)
		testwork.Rebuild(t, s.Shop)
		s.requireLeft(t, 3, 0, 2)
		after := s.SaleInRedis(t, s.sale.ID)
		for name, value := range before {
			switch name {
			case "epoch", "revision", "generation", "sequence", "quiet_since_ms", "quiet.a", "quiet.b", "quiet.c":
			default:
				require.Equal(t, value, after[name], name)
			}
		}

		ann.Verdict, bob.Verdict = reservation.Replayed, reservation.Replayed
		require.Equal(t, ann, s.want(t, "ann", "lmm"))
		require.Equal(t, bob, s.want(t, "bob", "ll"))
		require.Equal(t, reservation.KeyReused, s.want(t, "ann", "mll").Verdict)
		for user, ended := range map[string]struct {
			reservation.Answer
			codes  string
			status order.Status
		}{"carol": {carol, "sm", order.StatusCancelled}, "dave": {dave, "s", order.StatusExpired}} {
			again := s.want(t, user, ended.codes)
			require.Equal(t, []any{reservation.OrderEnded, ended.status, ended.Of.Units},
				[]any{again.Verdict, again.Status, again.Of.Units})
			require.Equal(t, []any{ended.Reservation.OrderID, ended.Reservation.Lines},
				[]any{again.Reservation.OrderID, again.Reservation.Lines})
			require.Equal(t, reservation.KeyReused, s.want(t, user, "m").Verdict)
		}
	}

	// An order of before returns its units to its items, and each item sells its rest.
	testwork.Cancel(t, l, ann.Reservation.OrderID, "ann")
	testwork.ReleaseUnits(t, s.Shop)
	s.requireLeft(t, 5, 1, 2)
	testkit.Eventually(t, testshop.Soon, "the returned unit is sold", func() bool {
		return s.want(t, "l0", "l").Verdict == reservation.Reserved
	})
	rest := map[string]int{"m": 5, "l": 0, "s": 2}
	for code, units := range rest {
		for i := range units + 1 {
			a := s.want(t, fmt.Sprint(code, i+1), code)
			if i < units {
				require.Equal(t, reservation.Reserved, a.Verdict)
			} else {
				require.Equal(t, reservation.SoldOut, a.Verdict)
				require.Equal(t, []string{code}, a.Of.Codes)
			}
		}
	}
	testwork.Fulfil(t, s.Shop)
	require.Equal(t, "5,3,2 10", testwork.SoldItems(t, s.Pool, s.sale.ID))
	s.requireLeft(t, 0, 0, 0)
}

// An item of which live orders hold more than its stock takes nothing from the others.
func TestRebuildKeepsItemsApart(t *testing.T) {
	t.Parallel()
	s := newBaskets(t)
	require.Equal(t, reservation.Reserved, s.want(t, "ann", "mml").Verdict)
	testwork.Fulfil(t, s.Shop)
	require.NoError(t, s.Exec(t, "UPDATE sale_items SET stock = 1, sold = 1 WHERE item = 'a'"))
	testwork.Rebuild(t, s.Shop)
	require.Equal(t, map[string]int64{"": 4, "a": 0, "b": 2, "c": 2}, s.LeftItems(t, s.sale))
}
