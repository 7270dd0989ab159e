package fulfillment_test

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

	"stampede/fulfillment"
	"stampede/internal/localserver"
	"stampede/internal/testkit"
	"stampede/reservation"
)

// lostShop is a shop on a Redis of its own, which can be lost.
type lostShop struct {
	*shop
	server *localserver.Redis
}

func newLostShop(t testing.TB) lostShop {
	t.Helper()
	server := testkit.OwnRedis(t)
	return lostShop{newShopOn(t, testkit.Pool(t), server.URL, reservation.Keys{Prefix: "test", Partitions: 1}), server}
}

func (s *shop) rebuilder(t testing.TB) *fulfillment.Rebuilder {
	t.Helper()
	r, err := fulfillment.NewRebuilder(fulfillment.RebuilderConfig{Pool: s.pool, Redis: s.rdb, Keys: s.keys, Store: s.store, Logger: testkit.Logger(t)})
	require.NoError(t, err)
	return r
}

// rebuild rebuilds the only partition.
func (s *shop) rebuild(t testing.TB) fulfillment.RebuildReport {
	t.Helper()
	report, err := s.rebuilder(t).Partition(t.Context(), 0, fulfillment.RebuildByHand)
	require.NoError(t, err)
	return report
}

// heal does what a worker does who looks at everything.
func (s *shop) heal(t testing.TB, r *fulfillment.Rebuilder, partitions int) error {
	t.Helper()
	_, err := r.Heal(t.Context(), partitions, true)
	return err
}

func (s lostShop) flush(t testing.TB) {
	t.Helper()
	require.NoError(t, s.rdb.FlushAll(t.Context()).Err())
}

// reserve asks for units as a buyer with an idempotency key.
func (s *shop) reserve(t testing.TB, sale uuid.UUID, user string, quantity int64, key string) reservation.Answer {
	t.Helper()
	answer, err := s.store.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: quantity, IdempotencyKey: key})
	require.NoError(t, err)
	return answer
}

func (s *shop) requireClosed(t testing.TB, sale uuid.UUID) {
	t.Helper()
	_, err := s.store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "somebody", Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
}

func (s *shop) saleInRedis(t testing.TB, sale uuid.UUID) map[string]string {
	t.Helper()
	fields, err := s.rdb.HGetAll(t.Context(), s.keys.Sale(0, sale)).Result()
	require.NoError(t, err)
	return fields
}

func (s *shop) epochOf(t testing.TB, sale uuid.UUID) int64 {
	t.Helper()
	return s.count(t, "SELECT epoch FROM sales WHERE id = $1", sale)
}

// requireSound holds the books against each other.
func (s *shop) requireSound(t testing.TB) {
	t.Helper()
	require.Zero(t, s.count(t, brokenLogs))
	require.Zero(t, s.count(t, `SELECT count(*) FROM sales AS s
		WHERE sold <> (SELECT coalesce(sum(quantity), 0) FROM orders WHERE sale_id = s.id AND status IN ('confirmed', 'paid'))`))
	rows, err := s.pool.Query(t.Context(), "SELECT id, stock - sold, epoch, revision, published_revision FROM sales")
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var sale uuid.UUID
		var left, epoch, revision, published int64
		require.NoError(t, rows.Scan(&sale, &left, &epoch, &revision, &published))
		fields := s.saleInRedis(t, sale)
		require.Equal(t, fmt.Sprint(left), fields["left"], "units left of %s", sale)
		require.Equal(t, fmt.Sprint(epoch), fields["epoch"])
		require.Equal(t, fmt.Sprint(revision), fields["revision"])
		require.Equal(t, revision, published)
	}
	require.NoError(t, rows.Err())
}

func TestRebuildRestoresStockFromPostgres(t *testing.T) {
	t.Parallel()
	s := newLostShop(t)
	sale, paused, ended := s.openPayable(t, 20), s.open(t, 5), s.open(t, 7)
	keyed := s.reserve(t, sale, "ann", 3, "key-of-ann")
	require.Equal(t, reservation.Reserved, keyed.Verdict)
	for _, user := range []string{"bob", "carol", "dave", "erin"} {
		s.buy(t, sale, user)
	}
	s.buy(t, ended, "ann")
	outcomes := s.fulfil(t)
	require.Len(t, outcomes, 6)
	orders := map[string]uuid.UUID{}
	for _, out := range outcomes {
		if out.Event.SaleID == sale {
			orders[out.Event.UserID] = out.Event.OrderID
		}
	}
	ledger := fulfillment.NewLedger(s.pool)
	_, err := ledger.Pay(t.Context(), orders["bob"], "bob", "pi")
	require.NoError(t, err)
	_, err = ledger.Cancel(t.Context(), orders["carol"], "carol")
	require.NoError(t, err)
	endWindow(t, s.pool, orders["dave"])
	_, err = s.expire(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 2, s.count(t, pendingReleases))
	_, err = s.catalog.Pause(t.Context(), paused)
	require.NoError(t, err)
	_, err = s.catalog.End(t.Context(), ended)
	require.NoError(t, err)
	lost := s.buy(t, sale, "lost")

	s.flush(t)
	s.requireClosed(t, sale)
	report := s.rebuild(t)
	require.Len(t, report.Sales, 3)
	require.Equal(t, ended, report.Sales[2].ID, "it can wait")
	for _, rebuilt := range report.Sales {
		rebuilt.Seconds = 0
		want := fulfillment.RebuiltSale{ID: rebuilt.ID, Epoch: 2, Revision: 2}
		switch rebuilt.ID {
		case sale:
			// The place of the lost order was never seen, so it is given out once more.
			want.Stock, want.Left, want.Held, want.Orders, want.Sequence = 20, 15, 5, 3, 5
		case paused:
			want.Revision, want.Stock, want.Left = 3, 5, 5
		case ended:
			want.Revision, want.Ended, want.Stock, want.Left, want.Held, want.Orders, want.Sequence = 3, true, 7, 6, 1, 1, 1
		}
		require.Equal(t, want, rebuilt)
	}
	require.Zero(t, s.count(t, pendingReleases), "their units are in the new stock")
	s.requireSound(t)
	require.Equal(t, map[string]string{
		"left": "15", "stock": "20", "state": "open", "opens_at_ms": "0", "closes_at_ms": "0", "per_order_limit": "10",
		"payment_window_s": s.saleInRedis(t, sale)["payment_window_s"], "epoch": "2", "sequence": "5", "generation": "1", "revision": "2",
	}, s.saleInRedis(t, sale))
	require.Equal(t, "paused", s.saleInRedis(t, paused)["state"])
	require.Equal(t, "ended", s.saleInRedis(t, ended)["state"])

	// Whoever holds units gets the first answer again, and whoever does not buys as anybody else.
	again := s.reserve(t, sale, "ann", 3, "key-of-ann")
	require.Equal(t, reservation.Replayed, again.Verdict)
	require.Equal(t, keyed.Reservation, again.Reservation, "the epoch in which it was made included: it is in the receipt")
	require.Equal(t, reservation.AlreadyPurchased, s.reserve(t, sale, "ann", 1, "").Verdict)
	require.Equal(t, reservation.AlreadyPurchased, s.reserve(t, sale, "bob", 1, "").Verdict)
	for i, user := range []string{"carol", "dave", "lost"} {
		answer := s.reserve(t, sale, user, 1, "")
		require.Equal(t, reservation.Reserved, answer.Verdict)
		require.EqualValues(t, 6+i, answer.Reservation.Sequence)
		require.EqualValues(t, 2, answer.Reservation.Epoch)
	}
	require.Equal(t, reservation.Paused, s.reserve(t, paused, "ann", 1, "").Verdict)
	require.Equal(t, reservation.AlreadyPurchased, s.reserve(t, ended, "ann", 1, "").Verdict)
	require.Equal(t, reservation.Ended, s.reserve(t, ended, "bob", 1, "").Verdict)
	s.fulfil(t)
	s.requireSound(t)
	require.EqualValues(t, 6, s.count(t, "SELECT count(*) FROM orders WHERE sale_id = $1 AND status IN ('confirmed', 'paid')", sale))
	require.Zero(t, s.count(t, "SELECT count(*) FROM orders WHERE id = $1", lost))

	// Operators go on where they were.
	_, err = s.catalog.Resume(t.Context(), paused)
	require.NoError(t, err)
	_, err = s.catalog.Restock(t.Context(), sale, 10, "")
	require.NoError(t, err)
	s.buy(t, paused, "ann")
	s.fulfil(t)
	s.requireSound(t)
	var event string
	require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT data::text FROM sale_events WHERE sale_id = $1 AND type = 'SaleRebuilt'", sale).Scan(&event))
	require.JSONEq(t, `{"epoch": 2, "sequence": 5, "reason": "by-hand", "stock": 20, "held": 5, "orders": 3}`, event)
}

// takeInHand reads what is new in the stream as a worker that is not done with it.
func (s *shop) takeInHand(t testing.TB, count int64) {
	t.Helper()
	_, err := s.rdb.XReadGroup(t.Context(), &redis.XReadGroupArgs{
		Group: reservation.Group, Consumer: "elsewhere", Streams: []string{s.keys.Orders(0), ">"}, Count: count, Block: -1,
	}).Result()
	require.NoError(t, err)
}

// A server that lost nothing loses nothing: what is in the stream is in Postgres before the epoch ends.
func TestRebuildDrainsStream(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		group    func(t *testing.T, s *shop) error
		recorded int64 // orders that are looked at once more
	}{
		"nobody has read it":      {func(*testing.T, *shop) error { return nil }, 1},
		"some of it is unread":    {func(t *testing.T, s *shop) error { s.takeInHand(t, 700); return nil }, 0},
		"somebody has it in hand": {func(t *testing.T, s *shop) error { s.takeInHand(t, 5000); return nil }, 0},
		"the group was set back": {func(t *testing.T, s *shop) error {
			s.takeInHand(t, 5000)
			return s.rdb.XGroupSetID(t.Context(), s.keys.Orders(0), reservation.Group, "0").Err()
		}, 2},
		"the group is gone": {func(t *testing.T, s *shop) error {
			return s.rdb.XGroupDestroy(t.Context(), s.keys.Orders(0), reservation.Group).Err()
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, testkit.Pool(t))
			sale, other := s.open(t, 2000), s.open(t, 10)
			s.buy(t, other, "first")
			s.buy(t, other, "second")
			s.fulfil(t)
			require.Equal(t, 1200, s.crowd(t, sale, 1200))
			s.rubbish(t)
			s.buy(t, other, "late")
			require.NoError(t, c.group(t, s))
			raiseEpoch(t, s.pool, other) // a rebuild has got so far and no further
			report := s.rebuild(t)
			require.Equal(t, fulfillment.Drained{Entries: 1202 + c.recorded, Confirmed: 1200, Voided: 1, Left: 1, Recorded: c.recorded}, report.Drained)
			require.EqualValues(t, 1200, soldOf(t, s.pool, sale))
			require.EqualValues(t, 1, s.count(t, "SELECT count(*) FROM orders WHERE status = 'voided' AND user_id = 'late'"))
			s.requireSound(t)

			// A worker finds the entries, and that nothing is to be done with them.
			config := s.config(t)
			config.MinIdle = 100 * time.Millisecond
			stop := work(t, config)
			s.awaitRest(t)
			stop()
			require.EqualValues(t, 1, s.count(t, "SELECT count(*) FROM dead_letters"))
			require.EqualValues(t, 1200, soldOf(t, s.pool, sale))
			require.EqualValues(t, 2, s.epochOf(t, sale), "the worker has found nothing to be rebuilt")
			s.requireSound(t)
		})
	}
}

// Two orders too many are in the stream: the rebuild rejects them, in the order of the sale, as a worker would.
func TestRebuildRejectsOrdersBeyondStock(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 12)
	for i := range 12 {
		s.buy(t, sale, fmt.Sprintf("user-%d", i))
	}
	_, err := s.pool.Exec(t.Context(), "UPDATE sales SET stock = 10 WHERE id = $1", sale)
	require.NoError(t, err)
	report := s.rebuild(t)
	require.Equal(t, fulfillment.Drained{Entries: 12, Confirmed: 10, Rejected: 2}, report.Drained)
	for _, user := range []string{"user-10", "user-11"} {
		require.EqualValues(t, 1, s.count(t, "SELECT count(*) FROM orders WHERE status = 'rejected' AND user_id = $1", user))
		require.False(t, s.rdb.HExists(t.Context(), s.keys.Buyers(0, sale), user).Val())
	}
	s.requireSound(t)
	work(t, s.config(t))
	s.awaitRest(t)
	s.requireSound(t)
}

func TestRebuildsAreExclusive(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 10)
	r := s.rebuilder(t)
	session, err := r.Begin(t.Context())
	require.NoError(t, err)
	_, err = s.rebuilder(t).Partition(t.Context(), 0, fulfillment.RebuildByHand)
	require.ErrorIs(t, err, fulfillment.ErrRebuildUnderWay)
	_, err = r.Sale(t.Context(), sale, fulfillment.RebuildByHand)
	require.ErrorIs(t, err, fulfillment.ErrRebuildUnderWay)
	s.buy(t, sale, "ann")
	require.NoError(t, s.rdb.HSet(t.Context(), s.keys.Sale(0, sale), "epoch", 0).Err())
	require.NoError(t, s.heal(t, r, 1), "it is not this one's turn")
	require.EqualValues(t, 1, s.epochOf(t, sale))
	var silence string
	require.NoError(t, session.Conn.QueryRow(t.Context(), "SHOW idle_session_timeout").Scan(&silence))
	require.Equal(t, "30s", silence, "one that hangs is not waited for for ever")
	session.Close()
	s.rebuild(t)
	require.EqualValues(t, 2, s.epochOf(t, sale))
}

func TestRebuildOfOneSaleKeepsOtherSalesOpen(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale, other := s.open(t, 10), s.open(t, 10)
	s.buy(t, sale, "ann")
	s.buy(t, other, "ann")
	r := s.rebuilder(t)
	report, err := r.Sale(t.Context(), sale, fulfillment.RebuildReconciled)
	require.NoError(t, err)
	require.Equal(t, fulfillment.Drained{Entries: 2, Confirmed: 1, Left: 1}, report.Drained, "the other sale's order is for the workers")
	require.Len(t, report.Sales, 1)
	require.EqualValues(t, 2, s.epochOf(t, sale))
	require.EqualValues(t, 1, s.epochOf(t, other))
	s.buy(t, other, "bob")
	s.buy(t, sale, "bob")
	s.fulfil(t)
	s.requireSound(t)

	_, err = r.Sale(t.Context(), uuid.Must(uuid.NewV7()), fulfillment.RebuildByHand)
	require.ErrorIs(t, err, reservation.ErrSaleNotFound)
	require.NoError(t, s.store.Distrust(t.Context(), 0))
	_, err = r.Sale(t.Context(), sale, fulfillment.RebuildByHand)
	require.ErrorIs(t, err, fulfillment.ErrServerUnverified)
	require.EqualValues(t, 2, s.epochOf(t, sale))
}

// What operators decide while a rebuild is under way comes on top of it.
func TestOperatorChangesDuringRebuildAreKept(t *testing.T) {
	t.Parallel()
	s := newLostShop(t)
	sale := s.open(t, 10)
	s.buy(t, sale, "ann")
	s.fulfil(t)
	r := s.rebuilder(t)
	session, err := r.Begin(t.Context())
	require.NoError(t, err)
	defer session.Close()
	s.flush(t)

	guarded, err := r.FindSale(t.Context(), sale)
	require.NoError(t, err)
	_, err = s.catalog.Restock(t.Context(), sale, 5, "")
	require.ErrorIs(t, err, reservation.ErrNotInForce, "before the epoch is raised")
	b := r.NewBuild(session, fulfillment.Need{Reason: fulfillment.RebuildByHand})
	guarded.Closed, err = b.CloseSale(t.Context(), guarded)
	require.NoError(t, err)
	raised, err := session.RaiseEpoch(t.Context(), guarded, fulfillment.RebuildByHand)
	require.NoError(t, err)
	_, err = s.catalog.Pause(t.Context(), sale)
	require.ErrorIs(t, err, reservation.ErrNotInForce, "and after that")
	_, err = s.catalog.Restock(t.Context(), sale, 7, "")
	require.ErrorIs(t, err, reservation.ErrNotInForce)
	created, err := s.catalog.Create(t.Context(), reservation.Terms{Name: "new", Stock: 3, PerOrderLimit: 1})
	require.NoError(t, err)
	_, err = s.catalog.PublishPending(t.Context())
	require.Error(t, err)

	all, err := b.StageBuyers(t.Context(), raised)
	require.NoError(t, err)
	require.NoError(t, b.Open(t.Context(), raised, raised.Stock-all.Units, all))
	require.NoError(t, session.Exec(t.Context(), markPublished, sale, raised.Revision))
	server, err := b.Inspect(t.Context())
	require.NoError(t, err)
	require.NoError(t, b.Distrust(t.Context()))
	require.NoError(t, b.MarkVerified(t.Context(), server))
	require.Equal(t, []string{"15", "14", "open", "3"}, pick(s.saleInRedis(t, sale), "stock", "left", "state", "revision"))

	_, err = s.catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"22", "21", "paused", "5"}, pick(s.saleInRedis(t, sale), "stock", "left", "state", "revision"))
	s.buy(t, created.ID, "ann")
	s.fulfil(t)
	s.requireSound(t)
}

const markPublished = "UPDATE sales SET published_revision = $2 WHERE id = $1"

func pick(fields map[string]string, names ...string) (values []string) {
	for _, name := range names {
		values = append(values, fields[name])
	}
	return values
}

// An order that is cancelled while its sale is rebuilt gives its unit back in the new epoch.
func TestOrderEndedDuringRebuildReleasesUnit(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.openPayable(t, 10)
	orders := map[string]uuid.UUID{}
	for _, user := range []string{"ann", "bob", "carol"} {
		orders[user] = s.buy(t, sale, user)
	}
	s.fulfil(t)
	ledger, r := fulfillment.NewLedger(s.pool), s.rebuilder(t)
	cancel := func(user string) {
		_, err := ledger.Cancel(t.Context(), orders[user], user)
		require.NoError(t, err)
	}
	session, err := r.Begin(t.Context())
	require.NoError(t, err)
	defer session.Close()
	guarded, err := r.FindSale(t.Context(), sale)
	require.NoError(t, err)
	b := r.NewBuild(session, fulfillment.Need{Reason: fulfillment.RebuildByHand})

	// A worker has this one in hand, and has told Redis of it, in the old epoch.
	cancel("ann")
	hold, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = hold.Exec(t.Context(), "DELETE FROM releases")
	require.NoError(t, err)
	require.NoError(t, b.CloseAndDrain(t.Context(), []fulfillment.GuardedSale{guarded}))
	raised, err := session.RaiseEpoch(t.Context(), guarded, fulfillment.RebuildByHand)
	require.NoError(t, err)
	cancel("bob") // before the orders are read
	all, err := b.StageBuyers(t.Context(), raised)
	require.NoError(t, err)
	cancel("carol") // after that
	_, err = s.giveBack(t.Context())
	require.Error(t, err, "while it is closed nothing comes back")
	require.NoError(t, b.Open(t.Context(), raised, raised.Stock-all.Units, all))
	require.NoError(t, hold.Rollback(t.Context()))
	require.EqualValues(t, 1, all.Orders)
	require.EqualValues(t, 9, s.left(t, sale))
	testkit.Eventually(t, 10*time.Second, "all releases are done with", func() bool {
		_, err := s.giveBack(t.Context())
		return err == nil && s.count(t, pendingReleases) == 0
	})
	require.EqualValues(t, 10, s.left(t, sale))
	require.Zero(t, soldOf(t, s.pool, sale))
	for user := range orders {
		s.buy(t, sale, user)
	}
}

// The log has a line at the beginning and one at the end, and the metrics count it.
func TestRebuildLogsAndCounts(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	s.buy(t, s.open(t, 10), "ann")
	log, registry := &countingLog{}, prometheus.NewRegistry()
	r, err := fulfillment.NewRebuilder(fulfillment.RebuilderConfig{
		Pool: s.pool, Redis: s.rdb, Keys: s.keys, Store: s.store, Logger: slog.New(log), Registerer: registry,
	})
	require.NoError(t, err)
	_, err = r.Partition(t.Context(), 0, fulfillment.RebuildServer)
	require.NoError(t, err)
	require.Equal(t, 1, log.times(fulfillment.RebuildingPart))
	require.Equal(t, 1, log.times("rebuilt the stock from Postgres"))
	require.Equal(t, 1.0, valueOf(t, registry, "stampede_rebuilds_total", fulfillment.RebuildServer))

	// A second one shares the metrics, and one that fails does not count.
	_, err = fulfillment.NewRebuilder(fulfillment.RebuilderConfig{Pool: s.pool, Redis: s.rdb, Keys: s.keys, Store: s.store, Registerer: registry})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = r.Partition(ctx, 0, fulfillment.RebuildServer)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1.0, valueOf(t, registry, "stampede_rebuilds_total", fulfillment.RebuildServer))
}

func execSQL(t testing.TB, s *shop, query string, args ...any) error {
	t.Helper()
	_, err := s.pool.Exec(t.Context(), query, args...)
	return err
}

// Postgres was set back, from a backup for instance, or somebody has written to Redis: ingresses have seen a
// later epoch than Postgres has, and do not go back.
func TestRebuildContinuesAfterLatestSeenEpoch(t *testing.T) {
	t.Parallel()
	s := newLostShop(t)
	sale := s.open(t, 10)
	require.NoError(t, s.rdb.HSet(t.Context(), s.keys.Sale(0, sale), "epoch", 99).Err())
	require.EqualValues(t, 99, s.reserve(t, sale, "ann", 1, "").Reservation.Epoch)
	report, err := s.rebuilder(t).Sale(t.Context(), sale, fulfillment.RebuildByHand)
	require.NoError(t, err)
	require.EqualValues(t, 100, report.Sales[0].Epoch)
	require.EqualValues(t, 100, s.reserve(t, sale, "bob", 1, "").Reservation.Epoch)
	require.EqualValues(t, 1, s.count(t, confirmedOrders), "what the stream held")
}

// TestLoweringWithdrawnByRebuildCanBeRetried: Redis is away when the stock is to be lowered, and is rebuilt when it is
// back, from the stock in Postgres.
func TestLoweringWithdrawnByRebuildCanBeRetried(t *testing.T) {
	t.Parallel()
	s := newLostShop(t)
	sale := s.open(t, 10)
	s.buy(t, sale, "ann")
	s.fulfil(t)
	s.server.Kill()
	_, err := s.catalog.Restock(t.Context(), sale, -4, "returned")
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.NotErrorIs(t, err, reservation.ErrNotInForce, "nobody can promise that it takes effect")

	require.NoError(t, s.server.Restart(t.Context()))
	r := s.rebuilder(t)
	testkit.Eventually(t, 20*time.Second, "the stock is rebuilt", func() bool { return s.heal(t, r, 1) == nil })
	_, err = s.catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"10", "9"}, pick(s.saleInRedis(t, sale), "stock", "left"), "nothing was changed")

	for range 2 {
		lowered, err := s.catalog.Restock(t.Context(), sale, -4, "returned")
		require.NoError(t, err)
		require.Equal(t, []int64{6, 5}, []int64{lowered.Stock, lowered.Available})
	}
	_, err = s.catalog.Restock(t.Context(), sale, -3, "returned")
	require.ErrorIs(t, err, reservation.ErrIdempotencyKeyReused)
	s.requireSound(t)
}
