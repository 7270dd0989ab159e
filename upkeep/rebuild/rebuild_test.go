package rebuild_test

import (
	"context"
	"fmt"
	"log/slog"
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
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

func TestMain(m *testing.M) { testwork.Main(m) }

func TestRebuildRestoresStockFromPostgres(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale, paused, ended := s.OpenPayable(t, 20), s.Open(t, 5), s.Open(t, 7)
	keyed := s.Attempt(t, sale, "ann", 3, "key-of-ann")
	require.Equal(t, reservation.Reserved, keyed.Verdict)
	for _, user := range []string{"bob", "carol", "dave", "erin"} {
		s.Buy(t, sale, user)
	}
	s.Buy(t, ended, "ann")
	outcomes := testwork.Fulfil(t, s)
	require.Len(t, outcomes, 6)
	orders := map[string]uuid.UUID{}
	for _, out := range outcomes {
		if out.Event.SaleID == sale {
			orders[out.Event.UserID] = out.Event.OrderID
		}
	}
	l := ledger.New(s.Pool)
	testwork.Pay(t, l, orders["bob"], "bob", "pi")
	testwork.Cancel(t, l, orders["carol"], "carol")
	testwork.EndWindow(t, s.Pool, orders["dave"])
	testwork.Expire(t, s)
	require.EqualValues(t, 2, s.Count(t, testshop.PendingReleases))
	_, err := s.Catalog.Pause(t.Context(), paused)
	require.NoError(t, err)
	_, err = s.Catalog.End(t.Context(), ended)
	require.NoError(t, err)
	lost := s.Buy(t, sale, "lost")

	s.Flush(t)
	s.RequireClosed(t, sale)
	report := testwork.Rebuild(t, s)
	require.Len(t, report.Sales, 3)
	require.Equal(t, ended, report.Sales[2].ID, "ended sales come last")
	for _, rebuilt := range report.Sales {
		rebuilt.Seconds = 0
		want := rebuild.SaleReport{ID: rebuilt.ID, Epoch: 2, Revision: 2, Shards: 1}
		switch rebuilt.ID {
		case sale:
			// The place of the lost order is unknown, so it is given out again.
			want.Stock, want.Left, want.Held, want.Orders, want.Sequence = 20, 15, 5, 3, 5
		case paused:
			want.Revision, want.Stock, want.Left = 3, 5, 5
		case ended:
			want.Revision, want.Ended, want.Stock, want.Left, want.Held, want.Orders, want.Sequence = 3, true, 7, 6, 1, 1, 1
		}
		require.Equal(t, want, rebuilt)
	}
	require.Zero(t, s.Count(t, testshop.PendingReleases), "their units are in the new stock")
	s.RequireSound(t)
	require.Equal(t, map[string]string{
		"left": "15", "stock": "20", "state": "open", "opens_at_ms": "0", "closes_at_ms": "0", "per_order_limit": "10",
		"payment_window_s": s.SaleInRedis(t, sale)["payment_window_s"], "epoch": "2", "sequence": "5", "generation": "1",
		"revision": "2",
	}, s.SaleInRedis(t, sale))
	require.Equal(t, "paused", s.SaleInRedis(t, paused)["state"])
	require.Equal(t, "ended", s.SaleInRedis(t, ended)["state"])

	// Holders of live orders get the first answer again. The others may buy.
	again := s.Attempt(t, sale, "ann", 3, "key-of-ann")
	require.Equal(t, reservation.Replayed, again.Verdict)
	require.Equal(t, keyed.Reservation, again.Reservation, "with its first epoch, which is in the receipt")
	require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, sale, "ann").Verdict)
	require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, sale, "bob").Verdict)
	for i, user := range []string{"carol", "dave", "lost"} {
		answer := s.Ask(t, sale, user)
		require.Equal(t, reservation.Reserved, answer.Verdict)
		require.EqualValues(t, 6+i, answer.Reservation.Sequence)
		require.EqualValues(t, 2, answer.Reservation.Epoch)
	}
	require.Equal(t, reservation.Paused, s.Ask(t, paused, "ann").Verdict)
	require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, ended, "ann").Verdict)
	require.Equal(t, reservation.Ended, s.Ask(t, ended, "bob").Verdict)
	testwork.Fulfil(t, s)
	s.RequireSound(t)
	require.EqualValues(t, 6,
		s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1 AND is_live(status)", sale))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE id = $1", lost))

	// Operators can still change the sales.
	_, err = s.Catalog.Resume(t.Context(), paused)
	require.NoError(t, err)
	_, err = s.Catalog.Restock(t.Context(), sale, 10, "")
	require.NoError(t, err)
	s.Buy(t, paused, "ann")
	testwork.Fulfil(t, s)
	s.RequireSound(t)
	var event string
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"SELECT (data - 'timeline')::text FROM sale_events WHERE sale_id = $1 AND type = 'SaleRebuilt' AND data ? 'timeline'",
		sale).Scan(&event))
	require.JSONEq(t, `{"epoch": 2, "sequence": 5, "reason": "by-hand", "stock": 20, "held": 5, "orders": 3, "shards": 1}`,
		event)
}

// readPending reads unread entries as another worker, which does not acknowledge them.
func readPending(t testing.TB, s *testshop.Shop, count int64) {
	t.Helper()
	_, err := s.Rdb.XReadGroup(t.Context(), &redis.XReadGroupArgs{
		Group: reservation.Group, Consumer: "elsewhere", Streams: []string{s.Keys.Orders(0), ">"}, Count: count, Block: -1,
	}).Result()
	require.NoError(t, err)
}

// The orders in the stream are recorded before the epoch ends.
func TestRebuildDrainsStream(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		group    func(t *testing.T, s *testshop.Shop) error
		recorded int64 // orders that were recorded before
	}{
		"unread":         {func(*testing.T, *testshop.Shop) error { return nil }, 0},
		"one pending":    {func(t *testing.T, s *testshop.Shop) error { readPending(t, s, 1); return nil }, 0},
		"partly pending": {func(t *testing.T, s *testshop.Shop) error { readPending(t, s, 20); return nil }, 0},
		"pending":        {func(t *testing.T, s *testshop.Shop) error { readPending(t, s, 5000); return nil }, 0},
		"group set back": {func(t *testing.T, s *testshop.Shop) error {
			readPending(t, s, 5000)
			return s.Rdb.XGroupSetID(t.Context(), s.Keys.Orders(0), reservation.Group, "0").Err()
		}, 2},
		"group deleted": {func(t *testing.T, s *testshop.Shop) error {
			return s.Rdb.XGroupDestroy(t.Context(), s.Keys.Orders(0), reservation.Group).Err()
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale, other := s.Open(t, 2000), s.Open(t, 10)
			s.Buy(t, other, "first")
			s.Buy(t, other, "second")
			testwork.Fulfil(t, s)
			for i := range 40 { // more entries than are read at a time
				s.Buy(t, sale, fmt.Sprintf("early-%d", i))
			}
			require.Equal(t, 1160, s.Crowd(t, sale, 1160))
			testwork.AppendUnreadable(t, s)
			s.Buy(t, other, "late")
			require.NoError(t, c.group(t, s))
			testshop.RaiseEpoch(t, s.Pool, other) // as an interrupted rebuild
			report := testwork.Rebuild(t, s)
			require.Greater(t, report.Drained.Entries, int64(40))
			report.Drained.Entries = 0
			require.Equal(t, rebuild.Drained{Confirmed: 1200, Voided: 1, Left: 1, Recorded: c.recorded}, report.Drained)
			require.EqualValues(t, 1200, testshop.Sold(t, s.Pool, sale))
			require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE status = 'voided' AND user_id = 'late'"))
			s.RequireSound(t)

			// A worker finds that the entries are recorded.
			config := testwork.Config(t, s)
			config.MinIdle = 100 * time.Millisecond
			stop := testwork.Work(t, config)
			testwork.AwaitRest(t, s)
			stop()
			require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM dead_letters"))
			require.EqualValues(t, 1200, testshop.Sold(t, s.Pool, sale))
			require.EqualValues(t, 2, s.Epoch(t, sale), "the worker rebuilds nothing")
			s.RequireSound(t)
		})
	}
}

// The stream has two orders too many. The rebuild rejects the last ones in the order of the sale, as a worker does.
func TestRebuildRejectsOrdersBeyondStock(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 12)
	for i := range 12 {
		s.Buy(t, sale, fmt.Sprintf("user-%d", i))
	}
	require.NoError(t, s.Exec(t, "UPDATE sales SET stock = 10 WHERE id = $1", sale))
	require.Equal(t, rebuild.Drained{Entries: 12, Confirmed: 10, Rejected: 2}, testwork.Rebuild(t, s).Drained)
	for _, user := range []string{"user-10", "user-11"} {
		require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE status = 'rejected' AND user_id = $1", user))
		require.False(t, s.Rdb.HExists(t.Context(), s.Keys.Buyers(0, sale), user).Val())
	}
	s.RequireSound(t)
	testwork.Work(t, testwork.Config(t, s))
	testwork.AwaitRest(t, s)
	s.RequireSound(t)
}

func TestRebuildsAreExclusive(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	r := testwork.Rebuilder(t, s)
	session, err := r.Begin(t.Context(), 0)
	require.NoError(t, err)
	_, err = testwork.Rebuilder(t, s).Partition(t.Context(), 0, rebuild.ReasonByHand)
	require.ErrorIs(t, err, rebuild.ErrRunning)
	_, err = r.Sale(t.Context(), sale, rebuild.ReasonByHand)
	require.ErrorIs(t, err, rebuild.ErrRunning)
	s.Buy(t, sale, "ann")
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "epoch", 0).Err())
	require.NoError(t, testwork.Heal(t, s, r, 1), "another rebuild has the lock")
	require.EqualValues(t, 1, s.Epoch(t, sale))
	var silence string
	require.NoError(t, session.Conn().QueryRow(t.Context(), "SHOW idle_session_timeout").Scan(&silence))
	require.Equal(t, "30s", silence, "Postgres ends a session that hangs")
	session.End()
	testwork.Rebuild(t, s)
	require.EqualValues(t, 2, s.Epoch(t, sale))
}

func TestRebuildOfOneSaleKeepsOtherSalesOpen(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, other := s.Open(t, 10), s.Open(t, 10)
	s.Buy(t, sale, "ann")
	s.Buy(t, other, "ann")
	r := testwork.Rebuilder(t, s)
	report, err := r.Sale(t.Context(), sale, rebuild.ReasonReconciled)
	require.NoError(t, err)
	require.Equal(t, rebuild.Drained{Entries: 2, Confirmed: 1, Left: 1}, report.Drained,
		"the other sale's order is left to the workers")
	require.Len(t, report.Sales, 1)
	require.EqualValues(t, 2, s.Epoch(t, sale))
	require.EqualValues(t, 1, s.Epoch(t, other))
	s.Buy(t, other, "bob")
	s.Buy(t, sale, "bob")
	testwork.Fulfil(t, s)
	s.RequireSound(t)

	_, err = r.Sale(t.Context(), uuid.Must(uuid.NewV7()), rebuild.ReasonByHand)
	require.ErrorIs(t, err, reservation.ErrSaleNotFound)
	require.NoError(t, s.Store.Distrust(t.Context(), 0))
	_, err = r.Sale(t.Context(), sale, rebuild.ReasonByHand)
	require.ErrorIs(t, err, rebuild.ErrServerUnverified)
	require.EqualValues(t, 2, s.Epoch(t, sale))
}

func TestOperatorChangesDuringRebuildAreKept(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	r := testwork.Rebuilder(t, s)
	session, err := r.Begin(t.Context(), 0)
	require.NoError(t, err)
	defer session.End()
	s.Flush(t)

	guarded, err := r.FindSale(t.Context(), sale)
	require.NoError(t, err)
	_, err = s.Catalog.Restock(t.Context(), sale, 5, "")
	require.ErrorIs(t, err, catalog.ErrNotInForce, "before the epoch is raised")
	b := r.NewBuild(session, rebuild.Need{Reason: rebuild.ReasonByHand})
	err = b.CloseSale(t.Context(), &guarded)
	require.NoError(t, err)
	raised, err := session.RaiseEpoch(t.Context(), guarded, rebuild.ReasonByHand)
	require.NoError(t, err)
	_, err = s.Catalog.Pause(t.Context(), sale)
	require.ErrorIs(t, err, catalog.ErrNotInForce, "after the epoch is raised")
	_, err = s.Catalog.Restock(t.Context(), sale, 7, "")
	require.ErrorIs(t, err, catalog.ErrNotInForce)
	created, err := s.Catalog.Create(t.Context(), reservation.Terms{Name: "new", Stock: 3, PerOrderLimit: 1})
	require.NoError(t, err)
	_, err = s.Catalog.PublishPending(t.Context())
	require.Error(t, err)

	all, err := b.StageBuyers(t.Context(), raised)
	require.NoError(t, err)
	require.NoError(t, b.Open(t.Context(), raised, raised.Stock-all.Units(), all))
	require.NoError(t, session.Exec(t.Context(), markPublished, sale, raised.Revision))
	server, err := b.Inspect(t.Context())
	require.NoError(t, err)
	require.NoError(t, b.Distrust(t.Context()))
	require.NoError(t, b.MarkVerified(t.Context(), server))
	require.Equal(t, []string{"15", "14", "open", "3"}, pick(s.SaleInRedis(t, sale), "stock", "left", "state", "revision"))

	_, err = s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"22", "21", "paused", "5"},
		pick(s.SaleInRedis(t, sale), "stock", "left", "state", "revision"))
	s.Buy(t, created.ID, "ann")
	testwork.Fulfil(t, s)
	s.RequireSound(t)
}

const markPublished = "UPDATE sales SET published_revision = $2 WHERE id = $1"

func pick(fields map[string]string, names ...string) (values []string) {
	for _, name := range names {
		values = append(values, fields[name])
	}
	return values
}

func TestOrderEndedDuringRebuildReleasesUnit(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 10)
	orders := map[string]uuid.UUID{}
	for _, user := range []string{"ann", "bob", "carol"} {
		orders[user] = s.Buy(t, sale, user)
	}
	testwork.Fulfil(t, s)
	l, r := ledger.New(s.Pool), testwork.Rebuilder(t, s)
	cancel := func(user string) {
		testwork.Cancel(t, l, orders[user], user)
	}
	session, err := r.Begin(t.Context(), 0)
	require.NoError(t, err)
	defer session.End()
	guarded, err := r.FindSale(t.Context(), sale)
	require.NoError(t, err)
	b := r.NewBuild(session, rebuild.Need{Reason: rebuild.ReasonByHand})

	// A worker has released this unit in Redis in the old epoch, and is deleting the release.
	cancel("ann")
	hold, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = hold.Exec(t.Context(), "DELETE FROM releases")
	require.NoError(t, err)
	require.NoError(t, b.CloseAndDrain(t.Context(), []rebuild.RequiredSale{guarded}))
	raised, err := session.RaiseEpoch(t.Context(), guarded, rebuild.ReasonByHand)
	require.NoError(t, err)
	cancel("bob") // before the orders are read
	all, err := b.StageBuyers(t.Context(), raised)
	require.NoError(t, err)
	cancel("carol") // after the orders are read
	_, err = testwork.TryReleaseUnits(t.Context(), s)
	require.Error(t, err, "a closed sale releases no units")
	require.NoError(t, b.Open(t.Context(), raised, raised.Stock-all.Units(), all))
	require.NoError(t, hold.Rollback(t.Context()))
	require.EqualValues(t, 1, all.Orders())
	require.EqualValues(t, 9, s.Left(t, sale))
	testkit.Eventually(t, 30*time.Second, "all releases are applied", func() bool {
		_, err := testwork.TryReleaseUnits(t.Context(), s)
		return err == nil && s.Count(t, testshop.PendingReleases) == 0
	})
	require.EqualValues(t, 10, s.Left(t, sale))
	require.Zero(t, testshop.Sold(t, s.Pool, sale))
	for user := range orders {
		s.Buy(t, sale, user)
	}
}

func TestRebuildLogsAndCounts(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	s.Buy(t, s.Open(t, 10), "ann")
	log, registry := &testshop.CountingLog{}, prometheus.NewRegistry()
	r, err := rebuild.New(rebuild.Config{Catalog: s.Catalog, Logger: slog.New(log), Registerer: registry})
	require.NoError(t, err)
	_, err = r.Partition(t.Context(), 0, rebuild.ReasonServer)
	require.NoError(t, err)
	require.Equal(t, 1, log.Times(rebuild.LogBegunPartition))
	require.Equal(t, 1, log.Times("rebuilt the stock from Postgres"))
	require.Equal(t, 1.0, testshop.Metric(t, registry, "stampede_rebuilds_total", rebuild.ReasonServer))

	// A second Rebuilder shares the metrics. A failed rebuild does not count.
	_, err = rebuild.New(rebuild.Config{Catalog: s.Catalog, Registerer: registry})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = r.Partition(ctx, 0, rebuild.ReasonServer)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1.0, testshop.Metric(t, registry, "stampede_rebuilds_total", rebuild.ReasonServer))
}

// After a restore of Postgres ingresses have seen a later epoch than Postgres has, and refuse earlier ones.
func TestRebuildContinuesAfterLatestSeenEpoch(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 10)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "epoch", 99).Err())
	require.EqualValues(t, 99, s.Ask(t, sale, "ann").Reservation.Epoch)
	report, err := testwork.Rebuilder(t, s).Sale(t.Context(), sale, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.EqualValues(t, 100, report.Sales[0].Epoch)
	require.EqualValues(t, 100, s.Ask(t, sale, "bob").Reservation.Epoch)
	require.EqualValues(t, 1, s.Count(t, testshop.ConfirmedOrders), "the order in the stream")
}

// drawn opens a sale whose units are offered to entrants.
func drawn(t *testing.T, s *testshop.Shop, stock int64) reservation.Sale {
	t.Helper()
	entries, err := s.Create(t.Context(), reservation.Terms{
		Name: "entries", Stock: 9, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour),
	})
	require.NoError(t, err)
	goods := s.OpenPayable(t, stock)
	_, err = s.CreateDraw(t.Context(), goods, catalog.DrawTerms{Entries: entries.ID, Freeze: time.Minute})
	require.NoError(t, err)
	return reservation.Sale{ID: goods}
}

// offered repeats offers, and returns the verdicts.
func offered(
	t *testing.T, s *testshop.Shop, sale reservation.Sale, offers ...reservation.Offer,
) (words []reservation.Verdict) {
	t.Helper()
	answers, err := s.Offer(t.Context(), sale, offers)
	require.NoError(t, err)
	for _, a := range answers {
		words = append(words, a.Verdict)
	}
	return words
}

func offerTo(sale reservation.Sale, user string) reservation.Offer {
	return reservation.Offer{OrderID: order.NewOrderID(sale.ID), UserID: user}
}

// A rebuilt sale gives its units to entrants as before, and repeats of offers are recognized.
func TestRebuildKeepsUnitsOffered(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	open, paused := drawn(t, s, 2), drawn(t, s, 2)
	_, err := s.Catalog.Pause(t.Context(), paused.ID)
	require.NoError(t, err)
	list, err := s.Create(t.Context(), reservation.Terms{Name: "list", Stock: 2, PerOrderLimit: 1, Waitlist: true})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, s.Ask(t, list.ID, "ann").Verdict)
	ann, bob, cid := offerTo(open, "ann"), offerTo(open, "bob"), offerTo(open, "cid")
	require.Equal(t, []reservation.Verdict{reservation.Reserved, reservation.Reserved}, offered(t, s, open, ann, bob))
	testwork.Fulfil(t, s)
	testwork.Cancel(t, ledger.New(s.Pool), ann.OrderID, "ann")
	testwork.RequireUnbroken(t, s, uuid.Nil)

	s.Flush(t)
	testwork.Rebuild(t, s)
	s.RequireSound(t)
	testwork.RequireUnbroken(t, s, uuid.Nil)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, open.ID, "eve").Verdict)
	require.Equal(t, []reservation.Verdict{reservation.OrderEnded, reservation.Replayed, reservation.Reserved},
		offered(t, s, open, ann, bob, cid))
	require.Equal(t, reservation.Paused, s.Ask(t, paused.ID, "eve").Verdict)
	_, err = s.Catalog.Resume(t.Context(), paused.ID)
	require.NoError(t, err)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, paused.ID, "eve").Verdict)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, list.ID, "eve").Verdict, "somebody may wait")
	rebuilt, err := s.Show(t.Context(), list.ID)
	require.NoError(t, err)
	reopened, err := s.Reopen(t.Context(), rebuilt.Sale, nil)
	require.NoError(t, err)
	require.True(t, reopened)
	require.Equal(t, reservation.Reserved, s.Ask(t, list.ID, "eve").Verdict)
	testwork.Fulfil(t, s)
	testwork.RequireUnbroken(t, s, uuid.Nil)
}
