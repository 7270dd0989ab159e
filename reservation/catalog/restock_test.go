package catalog_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// saleEvents are the events of a sale in order, written as "type data".
func saleEvents(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID) (events []string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT array_agg(type || ' ' || data ORDER BY revision) FROM sale_events WHERE sale_id = $1", sale).Scan(&events))
	return events
}

// stocks returns the stock in Postgres, the stock in Redis and the units left in Redis.
func stocks(t testing.TB, s *testshop.Shop, sale uuid.UUID) []int64 {
	t.Helper()
	var inPostgres int64
	require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT stock FROM sales WHERE id = $1", sale).Scan(&inPostgres))
	values, err := s.Rdb.HMGet(t.Context(), s.Keys.Sale(0, sale), "stock", "left").Result()
	require.NoError(t, err)
	stock, err := strconv.ParseInt(values[0].(string), 10, 64)
	require.NoError(t, err)
	left, err := strconv.ParseInt(values[1].(string), 10, 64)
	require.NoError(t, err)
	return []int64{inPostgres, stock, left}
}

func taken(t testing.TB, s *testshop.Shop, err error) int64 {
	t.Helper()
	var tooLow *catalog.TakenError
	require.ErrorAs(t, err, &tooLow)
	return tooLow.Taken
}

func TestStockIsNotLoweredBelowTakenUnits(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	sale := s.Sale(t, 10).ID
	for _, user := range []string{"ann", "bob", "cid"} {
		s.Buy(t, sale, user)
	}
	lowered, err := s.Restock(ctx, sale, -5, "returned-1")
	require.NoError(t, err)
	require.Equal(t, []int64{5, 2, 3}, []int64{lowered.Stock, lowered.Available, lowered.Held})
	again, err := s.Restock(ctx, sale, -5, "returned-1")
	require.NoError(t, err)
	require.Equal(t, lowered, again)
	_, err = s.Restock(ctx, sale, -4, "returned-1")
	require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused)

	_, err = s.Restock(ctx, sale, -3, "returned-2")
	require.EqualValues(t, 3, taken(t, s, err))
	require.Equal(t, []int64{5, 5, 2}, stocks(t, s, sale))
	released, err := s.Release(
		ctx, []reservation.Release{{SaleID: sale, OrderID: s.Ask(t, sale, "cid").Reservation.OrderID, UserID: "cid"}},
	)
	require.NoError(t, err)
	require.Equal(t, []reservation.ReleaseResult{reservation.Released}, released)
	_, err = s.Restock(ctx, sale, -3, "returned-2")
	require.EqualValues(t, 3, taken(t, s, err), "the same key gets the same refusal")
	require.Equal(t, []int64{5, 5, 3}, stocks(t, s, sale))

	paused, err := s.Pause(ctx, sale)
	require.NoError(t, err, "a refusal does not block later changes")
	require.Equal(t, reservation.StatePaused, paused.State)
	lowered, err = s.Restock(ctx, sale, -3, "returned-3")
	require.NoError(t, err)
	require.Equal(t, []int64{2, 0, 2}, []int64{lowered.Stock, lowered.Available, lowered.Held})
	require.Equal(t, reservation.StatePaused, lowered.State)
	_, err = s.Resume(ctx, sale)
	require.NoError(t, err)
	require.Equal(t, reservation.SoldOut, s.Ask(t, sale, "dan").Verdict)
	_, err = s.Restock(ctx, sale, 1, "")
	require.NoError(t, err)
	testkit.Eventually(
		t, 30*time.Second, "dan buys", func() bool { return s.Ask(t, sale, "dan").Verdict == reservation.Reserved },
	)
	require.Equal(t, []int64{3, 3, 0}, stocks(t, s, sale))

	require.Equal(t, []string{
		`SaleCreated {"stock": 10}`,
		`SaleLowering {"stock": 5, "units": -5}`, `SaleRestocked {"stock": 5, "lowering": 2}`,
		`SaleLowering {"stock": 2, "taken": 3, "units": -3}`, // refused
		`SalePaused {"stock": 5}`,
		`SaleLowering {"stock": 2, "units": -3}`, `SaleRestocked {"stock": 2, "lowering": 6}`,
		`SaleResumed {"stock": 2}`, `SaleRestocked {"stock": 3, "units": 1}`,
	}, saleEvents(t, s.Pool, sale))

	var invalid *order.InvalidError
	_, err = s.Restock(ctx, sale, -3, "")
	require.ErrorAs(t, err, &invalid, "a stock of 0")
	_, err = s.End(ctx, sale)
	require.NoError(t, err)
	var illegal *reservation.IllegalTransitionError
	_, err = s.Restock(ctx, sale, -1, "")
	require.ErrorAs(t, err, &illegal)
}

// breakAt makes Postgres refuse one step of a lowering, as if its process had crashed before it, and
// returns a function that allows the step again.
func breakAt(t testing.TB, pool *pgxpool.Pool, step string) (mend func()) {
	t.Helper()
	testshop.Exec(t, pool, `CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'broken'; END $$;
		CREATE TRIGGER broken BEFORE `+step+` EXECUTE FUNCTION broken()`)
	return func() {
		testshop.Exec(t, pool, "DROP FUNCTION broken CASCADE")
	}
}

// The next publisher finishes an interrupted lowering, exactly once.
func TestInterruptedLoweringIsFinishedOnce(t *testing.T) {
	t.Parallel()
	const (
		noted  = "INSERT ON sale_events FOR EACH ROW WHEN (NEW.data ? 'lowering')"
		marked = "UPDATE OF published_revision ON sales FOR EACH ROW"
	)
	worker := func(t testing.TB, s *testshop.Shop, _ uuid.UUID) error {
		_, err := s.PublishPending(t.Context())
		return err
	}
	operator := func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
		_, err := s.Restock(t.Context(), sale, -4, "returned")
		return err
	}
	for name, c := range map[string]struct {
		step string
		// meanwhile runs after the failed step; finish is the next call.
		meanwhile, finish func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error
		// after is the final result of stocks.
		after []int64
	}{
		"unrecorded, finished by a worker":              {noted, nil, worker, []int64{6, 6, 5}},
		"unrecorded, finished by the operator":          {noted, nil, operator, []int64{6, 6, 5}},
		"unmarked, finished by a worker":                {marked, nil, worker, []int64{6, 6, 5}},
		"unmarked, finished by the operator":            {marked, nil, operator, []int64{6, 6, 5}},
		"finished by another restock that adds units":   {noted, nil, restocking(2), []int64{8, 8, 7}},
		"finished by another restock that removes more": {noted, nil, restocking(-2), []int64{4, 4, 3}},
		"finished by a pause":                           {noted, nil, pausing, []int64{6, 6, 5}},
		"finished by an end":                            {noted, nil, ending, []int64{6, 6, 5}},
		"unrecorded, sold out meanwhile":                {noted, buyAll, worker, []int64{6, 6, 0}},
		"unmarked, sold out meanwhile":                  {marked, buyAll, worker, []int64{6, 6, 0}},
		"withdrawn by a rebuild":                        {noted, rebuild, worker, []int64{10, 10, 9}},
		"withdrawn by a rebuild, then units are added":  {noted, rebuild, restocking(2), []int64{12, 12, 11}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			pool := s.Pool
			sale := s.Sale(t, 10).ID
			s.Buy(t, sale, "ann")
			repair := breakAt(t, pool, c.step)
			require.ErrorIs(t, operator(t, s, sale), catalog.ErrRestockUndecided)
			require.EqualValues(t, []int64{6, 5}, stocks(t, s, sale)[1:], "Redis granted it")
			if c.meanwhile != nil {
				require.NoError(t, c.meanwhile(t, s, sale))
			}
			repair()
			require.NoError(t, c.finish(t, s, sale))
			require.Equal(t, c.after, stocks(t, s, sale))
			require.NoError(t, worker(t, s, sale))
			require.Equal(t, c.after, stocks(t, s, sale), "a repeat changes nothing")
			if c.after[0] == 10 || c.after[0] == 12 { // withdrawn, so a repeat is a new lowering
				for i := range c.after {
					c.after[i] -= 4
				}
			}
			for range 2 {
				require.NoError(t, operator(t, s, sale), "a repeat changes nothing more")
				require.Equal(t, c.after, stocks(t, s, sale))
			}
		})
	}
}

// buyAll buys the units that are left.
func buyAll(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
	for i := 0; ; i++ {
		a, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: fmt.Sprintf("user-%d", i), Quantity: 1})
		if err != nil || a.Verdict == reservation.SoldOut {
			return err
		}
	}
}

// rebuild rebuilds the stock from Postgres, with its one order.
func rebuild(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
	var revision int64
	if err := s.Pool.QueryRow(
		t.Context(), "UPDATE sales SET epoch = 2 WHERE id = $1 RETURNING revision", sale,
	).Scan(&revision); err != nil {
		return err
	}
	return s.Rdb.HSet(
		t.Context(), s.Keys.Sale(0, sale), "epoch", 2, "stock", 10, "left", 9, "revision", revision,
	).Err()
}

func TestLoweringWaitsForRedis(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, own.URL)})
	sale := s.Sale(t, 10).ID
	s.Buy(t, sale, "ann")
	own.Kill()
	_, err := s.Restock(t.Context(), sale, -4, "returned")
	require.ErrorIs(t, err, catalog.ErrRestockUndecided)
	require.NotErrorIs(t, err, catalog.ErrNotInForce, "a rebuild withdraws it")
	_, err = s.Restock(t.Context(), sale, 2, "delivered")
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.NotErrorIs(t, err, catalog.ErrNotInForce, "the stock is unknown, so nothing is recorded")
	require.NoError(t, own.Restart(t.Context()))
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	testkit.Eventually(t, 30*time.Second, "the change is published", func() bool {
		n, err := s.PublishPending(t.Context())
		return err == nil && n == 1
	})
	require.Equal(t, []int64{6, 6, 5}, stocks(t, s, sale))
	_, err = s.Restock(t.Context(), sale, 2, "delivered")
	require.NoError(t, err)
	require.Equal(t, []int64{8, 8, 7}, stocks(t, s, sale))
}

// The stock is rebuilt after Redis granted a lower one, and before Postgres records it.
func TestRebuildWithdrawsGrantedLowering(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	pool := s.Pool
	sale := s.Sale(t, 10).ID
	s.Buy(t, sale, "ann")
	repair := breakAt(t, pool, "INSERT ON sale_events FOR EACH ROW WHEN (NEW.data ? 'lowering')")
	_, err := s.Restock(t.Context(), sale, -4, "returned")
	require.ErrorIs(t, err, catalog.ErrRestockUndecided)
	require.NotErrorIs(t, err, catalog.ErrNotInForce, "a rebuild withdraws it")
	repair()

	rebuilding, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = rebuilding.Rollback(context.Background()) }()
	_, err = rebuilding.Exec(t.Context(), "UPDATE sales SET epoch = 2 WHERE id = $1", sale)
	require.NoError(t, err)
	published := make(chan error, 1)
	go func() {
		_, err := s.PublishPending(context.Background())
		published <- err
	}()
	testshop.AwaitWaiting(t, pool, 1)
	require.NoError(t, rebuilding.Commit(t.Context()))
	require.ErrorIs(t, <-published, reservation.ErrUnavailable)
	require.EqualValues(t, 10, stocks(t, s, sale)[0])
	require.NoError(t, rebuild(t, s, sale))
	_, err = s.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, []int64{10, 10, 9}, stocks(t, s, sale))
}

// buyItems buys these units of each item.
func buyItems(t testing.TB, s *testshop.Shop, sale uuid.UUID, user string, items map[string]int64) reservation.Answer {
	t.Helper()
	answer, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Items: items})
	require.NoError(t, err)
	return answer
}

// requireItems requires the stock of m and of l in Postgres and in Redis, and what is left of them.
func requireItems(t testing.TB, s *testshop.Shop, sale reservation.Sale, m, l, leftM, leftL int64) {
	t.Helper()
	require.Equal(t, []int64{m + l, m + l, leftM + leftL}, stocks(t, s, sale.ID))
	require.Equal(t, []string{fmt.Sprintf("m%d l%d", m, l)}, testshop.Rows(t, s.Pool,
		"SELECT string_agg(code || stock, ' ' ORDER BY item) FROM sale_items WHERE sale_id = $1", sale.ID))
	require.Equal(t, map[string]int64{"": leftM + leftL, "a": leftM, "b": leftL}, s.LeftItems(t, sale))
	fields := s.SaleInRedis(t, sale.ID)
	require.Equal(t, fmt.Sprintf("%d %d", m, l), fields["stock.a"]+" "+fields["stock.b"])
}

func restockingItems(units map[string]int64, key string) func(testing.TB, *testshop.Shop, uuid.UUID) error {
	return func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
		_, err := s.RestockItems(t.Context(), sale, units, key)
		return err
	}
}

func TestItemsAreRestocked(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	created, err := s.Create(ctx, sizes())
	require.NoError(t, err)
	sale := created.Sale
	require.Equal(t, reservation.Reserved, buyItems(t, s, sale.ID, "ann", map[string]int64{"m": 1, "l": 1}).Verdict)
	require.Equal(t, reservation.Reserved, buyItems(t, s, sale.ID, "bob", map[string]int64{"m": 1}).Verdict)

	raise := map[string]int64{"m": 1, "l": 3}
	raised, err := s.RestockItems(ctx, sale.ID, raise, "delivered")
	require.NoError(t, err)
	require.Equal(t, []int64{4, 2, 5, 4}, []int64{
		raised.Items[0].Stock, raised.Items[0].Available, raised.Items[1].Stock, raised.Items[1].Available,
	})
	again, err := s.RestockItems(ctx, sale.ID, raise, "delivered")
	require.NoError(t, err)
	require.Equal(t, raised, again)
	for _, other := range []map[string]int64{{"m": 3, "l": 1}, {"m": 1}, {"l": 4}} {
		_, err = s.RestockItems(ctx, sale.ID, other, "delivered")
		require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused, other)
	}
	_, err = s.Restock(ctx, sale.ID, 4, "delivered")
	require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused)
	requireItems(t, s, sale, 4, 5, 2, 4)

	// Two are taken of m, and one of l, so l has enough for its part.
	lower := map[string]int64{"m": -3, "l": -4}
	for range 2 {
		var tooLow *catalog.TakenError
		_, err = s.RestockItems(ctx, sale.ID, lower, "returned-1")
		require.ErrorAs(t, err, &tooLow)
		require.Equal(t, catalog.TakenError{Taken: 2, Items: `{"m":2}`}, *tooLow)
		requireItems(t, s, sale, 4, 5, 2, 4)
	}
	for range 2 {
		lowered, err := s.RestockItems(ctx, sale.ID, map[string]int64{"l": -4}, "returned-2")
		require.NoError(t, err)
		require.Equal(t, []int64{4, 2, 1, 0}, []int64{
			lowered.Items[0].Stock, lowered.Items[0].Available, lowered.Items[1].Stock, lowered.Items[1].Available,
		})
		requireItems(t, s, sale, 4, 1, 2, 0)
	}
	var tooLow *catalog.TakenError
	_, err = s.RestockItems(ctx, sale.ID, map[string]int64{"m": -3, "l": -1}, "")
	require.ErrorAs(t, err, &tooLow)
	require.Equal(t, catalog.TakenError{Taken: 3, Items: `{"m":2,"l":1}`}, *tooLow, "in the order of the items")

	const m = `{"code": "m", "name": "Medium", "stock": 4, "unit_price": 1290, "per_order_limit": 2}`
	const l = `{"code": "l", "name": "Large", "stock": %d, "unit_price": 1490}`
	require.Equal(t, []string{
		fmt.Sprintf(`SaleRestocked {"items": [`+m+`, `+l+`], "stock": 9, "units": 4, "item_units": {"l": 3, "m": 1}}`, 5),
		`SaleLowering {"stock": 2, "taken": 2, "units": -7, "item_taken": {"m": 2}, "item_units": {"l": -4, "m": -3}}`,
		`SaleLowering {"stock": 5, "units": -4, "item_units": {"l": -4}}`,
		fmt.Sprintf(`SaleRestocked {"items": [`+m+`, `+l+`], "stock": 5, "lowering": 4}`, 1),
		`SaleLowering {"stock": 1, "taken": 3, "units": -4, "item_taken": {"l": 1, "m": 2}, ` +
			`"item_units": {"l": -1, "m": -3}}`,
	}, saleEvents(t, s.Pool, sale.ID)[1:])
	testwork.FulfilAll(t, s)
	testwork.RequireUnbroken(t, s, sale.ID)
}

func TestItemIsLoweredToNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	created, err := s.Create(t.Context(), sizes())
	require.NoError(t, err)
	require.NoError(t, restockingItems(map[string]int64{"m": -3}, "")(t, s, created.ID))
	requireItems(t, s, created.Sale, 0, 2, 0, 2)
	var invalid *order.InvalidError
	require.ErrorAs(t, restockingItems(map[string]int64{"l": -2}, "")(t, s, created.ID), &invalid, "no stock at all")
	require.NoError(t, restockingItems(map[string]int64{"m": 1}, "")(t, s, created.ID))
	requireItems(t, s, created.Sale, 1, 2, 1, 2)
}

func TestInvalidRestockOfItemsChangesNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	plain := s.Sale(t, 5)
	created, err := s.Create(t.Context(), sizes())
	require.NoError(t, err)
	for name, units := range map[string]map[string]int64{
		"no item":             {},
		"no units":            {"m": 1, "l": 0},
		"one up and one down": {"m": 2, "l": -1},
		"too many units":      {"m": order.MaxStock + 1},
		"too many in all":     {"m": order.MaxStock - 4},
		"unknown code":        {"m": 1, "xl": 1},
		"more than its stock": {"m": -4},
		"all of the sale":     {"m": -3, "l": -2},
		"the lowest number":   {"m": -1 << 63},
		"a sum of zero":       {"m": 1, "l": -1},
	} {
		var invalid *order.InvalidError
		require.ErrorAs(t, restockingItems(units, "key")(t, s, created.ID), &invalid, name)
	}
	var invalid *order.InvalidError
	require.ErrorAs(t, restockingItems(map[string]int64{"m": 1}, "")(t, s, plain.ID), &invalid)
	require.Equal(t, "items", invalid.Field)
	for _, units := range []int64{1, -1} {
		_, err = s.Restock(t.Context(), created.ID, units, "")
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "units", invalid.Field)
	}
	requireItems(t, s, created.Sale, 3, 2, 3, 2)
	require.Equal(t, []int64{5, 5, 5}, stocks(t, s, plain.ID))
	require.Len(t, saleEvents(t, s.Pool, created.ID), 1)
}

// A worker that has locked an item does not wait for a change of the stock that waits for the item.
func TestRestockOfItemsLocksThemBeforeTheSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	created, err := s.Create(t.Context(), sizes())
	require.NoError(t, err)
	lower := restockingItems(map[string]int64{"m": -1}, "returned")
	for name, change := range map[string]func() error{
		"raise": func() error {
			_, err := s.RestockItems(context.Background(), created.ID, map[string]int64{"m": 1}, "")
			return err
		},
		"finish a lowering": func() error {
			_, err := s.PublishPending(context.Background())
			return err
		},
	} {
		if name == "finish a lowering" {
			mend := breakAt(t, s.Pool, "INSERT ON sale_events FOR EACH ROW WHEN (NEW.data ? 'lowering')")
			require.ErrorIs(t, lower(t, s, created.ID), catalog.ErrRestockUndecided)
			mend()
		}
		worker, err := s.Pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = worker.Rollback(context.Background()) }()
		_, err = worker.Exec(t.Context(), "UPDATE sale_items SET sold = sold WHERE sale_id = $1 AND code = 'm'", created.ID)
		require.NoError(t, err)
		changed := make(chan error, 1)
		go func() { changed <- change() }()
		testshop.AwaitWaiting(t, s.Pool, 1)
		_, err = worker.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR NO KEY UPDATE NOWAIT", created.ID)
		require.NoError(t, err, name)
		require.NoError(t, worker.Commit(t.Context()))
		require.NoError(t, <-changed, name)
	}
	requireItems(t, s, created.Sale, 3, 2, 3, 2)
	require.NoError(t, lower(t, s, created.ID), "a repeat")
	requireItems(t, s, created.Sale, 3, 2, 3, 2)
}

// Operators restock items while they sell and a worker records the orders.
func TestRestockOfItemsDuringRunningSaleNeverOversells(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	terms := sizes()
	terms.Stock, terms.Items[0].Stock, terms.Items[1].Stock = 40, 20, 20
	created, err := s.Create(t.Context(), terms)
	require.NoError(t, err)
	stop := testwork.Work(t, testwork.Config(t, s))
	var all errgroup.Group
	stock := map[string]int64{"m": 20, "l": 20}
	for buyer := range 3 {
		all.Go(func() error {
			for i := range 30 {
				if _, err := s.Reserve(context.Background(), reservation.Request{
					Sale: created.ID, User: fmt.Sprintf("user-%d-%d", buyer, i),
					Items: map[string]int64{"m": int64(1 + i%2), "l": 1},
				}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	changes := map[string][]int64{"m": {5, -3, 4, -9}, "l": {-4, 6, -8, 3}}
	granted := make(chan map[string]int64, 100)
	for code, list := range changes {
		all.Go(func() error {
			for range 5 {
				for _, units := range list {
					change := map[string]int64{code: units}
					_, err := s.RestockItems(context.Background(), created.ID, change, uuid.NewString())
					var tooLow *catalog.TakenError
					var invalid *order.InvalidError
					switch {
					case err == nil:
						granted <- change
					case !errors.As(err, &tooLow) && !errors.As(err, &invalid):
						return err
					}
				}
			}
			return nil
		})
	}
	require.NoError(t, all.Wait())
	close(granted)
	for change := range granted {
		for code, units := range change {
			stock[code] += units
		}
	}
	testwork.AwaitRest(t, s)
	stop()
	left := s.LeftItems(t, created.Sale)
	requireItems(t, s, created.Sale, stock["m"], stock["l"], left["a"], left["b"])
	require.Equal(t, fmt.Sprintf("%d,%d %d", stock["m"]-left["a"], stock["l"]-left["b"],
		stock["m"]+stock["l"]-left[""]), testwork.SoldItems(t, s.Pool, created.ID))
	testwork.RequireUnbroken(t, s, created.ID)
}
