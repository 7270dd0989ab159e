package catalog_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// sizes are the terms of a sale of a shirt in two sizes.
func sizes() reservation.Terms {
	return reservation.Terms{
		Name: "shirt", Stock: 5, PerOrderLimit: 4, Currency: "EUR", Items: []reservation.Item{
			{Code: "m", Name: "Medium", Stock: 3, UnitPrice: 1290, PerOrderLimit: 2},
			{Code: "l", Name: "Large", Stock: 2, UnitPrice: 1490},
		},
	}
}

func TestSaleWithItemsIsCreatedOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	sale, replayed, err := s.CreateOnce(ctx, sizes(), "drop-1")
	require.NoError(t, err)
	require.False(t, replayed)
	m, l := sizes().Items[0], sizes().Items[1]
	require.Equal(t, []catalog.CountedItem{{Item: m, Available: 3}, {Item: l, Available: 2}}, sale.Items)
	require.Equal(t, []string{
		`SaleWithItemsCreated {"items": [{"code": "m", "name": "Medium", "stock": 3, "unit_price": 1290, "per_order_limit": 2}, ` +
			`{"code": "l", "name": "Large", "stock": 2, "unit_price": 1490}], "stock": 5}`,
	}, saleEvents(t, s.Pool, sale.ID))
	var letters string
	require.NoError(t, s.Pool.QueryRow(ctx,
		"SELECT string_agg(item || code || stock, ' ' ORDER BY item) FROM sale_items WHERE sale_id = $1", sale.ID).Scan(&letters))
	require.Equal(t, "am3 bl2", letters)

	_, err = s.Pool.Exec(ctx, "UPDATE sale_items SET stock = 9 WHERE sale_id = $1", sale.ID)
	require.NoError(t, err)
	again, replayed, err := s.CreateOnce(ctx, sizes(), "drop-1")
	require.NoError(t, err)
	require.True(t, replayed)
	require.Equal(t, sale, again, "as it was created")
	for name, change := range map[string]func(*reservation.Terms){
		"stock of the items": func(x *reservation.Terms) { x.Items[0].Stock, x.Items[1].Stock = 2, 3 },
		"order of the items": func(x *reservation.Terms) { x.Items[0], x.Items[1] = x.Items[1], x.Items[0] },
		"price of an item":   func(x *reservation.Terms) { x.Items[1].UnitPrice++ },
		"no items":           func(x *reservation.Terms) { x.Items, x.Currency = nil, "" },
	} {
		other := sizes()
		change(&other)
		_, _, err := s.CreateOnce(ctx, other, "drop-1")
		require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused, name)
	}
	changes, err := s.History(ctx, sale.ID, 1)
	require.NoError(t, err)
	require.Equal(t, "created", changes[0].Name())
}

func TestSaleWithItemsIsShown(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, err := s.Create(t.Context(), sizes())
	require.NoError(t, err)
	text, err := json.Marshal(sale)
	require.NoError(t, err)
	require.Contains(t, string(text), `"items":[{"code":"m","name":"Medium","stock":3,"unit_price":1290,"per_order_limit":2,`+
		`"available":3},{"code":"l","name":"Large","stock":2,"unit_price":1490,"available":2}]`)
	var read catalog.CountedSale
	require.NoError(t, json.Unmarshal(text, &read))
	require.Equal(t, sale.Items, read.Items)
	require.Equal(t, sale.Terms.Items, read.Terms.Items)

	// Without its keys an ended sale is counted in Postgres.
	_, err = s.End(t.Context(), sale.ID)
	require.NoError(t, err)
	_, err = s.Pool.Exec(t.Context(), "UPDATE sale_items SET sold = 1 WHERE sale_id = $1 AND code = 'l'", sale.ID)
	require.NoError(t, err)
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale.ID)).Err())
	shown, err := s.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 1}, []int64{shown.Items[0].Available, shown.Items[1].Available})
}
