package catalog_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

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
