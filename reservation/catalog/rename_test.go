package catalog_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

func TestRenamedSaleKeepsEverythingElse(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	created, _, err := s.CreateOnce(ctx, sizes(), "drop-1")
	require.NoError(t, err)
	shirt := "T-shirt"
	to := catalog.Names{Sale: &shirt, Items: map[string]string{"l": "Very large", "m": "Medium"}}
	renamed, err := s.Rename(ctx, created.ID, to)
	require.NoError(t, err)
	want := created
	want.Name, want.Revision, want.Terms.Items, want.Items = shirt, 2, renamed.Terms.Items, renamed.Items
	require.Equal(t, want, renamed)
	m, l := sizes().Items[0], sizes().Items[1]
	l.Name = "Very large"
	require.Equal(t, []catalog.CountedItem{{Item: m, Available: 3}, {Item: l, Available: 2}}, renamed.Items)
	again, err := s.Rename(ctx, created.ID, to)
	require.NoError(t, err)
	require.Equal(t, renamed, again, "a repeat changes nothing")

	// Later changes keep the names.
	_, err = s.RestockItems(ctx, created.ID, map[string]int64{"m": 4}, "")
	require.NoError(t, err)
	_, err = s.RestockItems(ctx, created.ID, map[string]int64{"l": -1}, "")
	require.NoError(t, err)
	tee := "Tee"
	now, err := s.Rename(ctx, created.ID, catalog.Names{Sale: &tee})
	require.NoError(t, err)
	require.Equal(t, []string{tee, "Medium", "Very large"}, []string{now.Name, now.Items[0].Name, now.Items[1].Name})
	require.Equal(t, []int64{8, 7, 1}, []int64{now.Stock, now.Items[0].Stock, now.Items[1].Stock})
	require.Equal(t, `SaleRenamed {"name": "T-shirt", "items": [`+
		`{"code": "m", "name": "Medium", "stock": 3, "unit_price": 1290, "per_order_limit": 2}, `+
		`{"code": "l", "name": "Very large", "stock": 2, "unit_price": 1490}], `+
		`"item_names": {"l": "Very large", "m": "Medium"}, "previous_name": "shirt"}`, saleEvents(t, s.Pool, created.ID)[1])

	same, replayed, err := s.CreateOnce(ctx, sizes(), "drop-1")
	require.NoError(t, err)
	require.True(t, replayed)
	created.Revision = same.Revision
	require.Equal(t, created, same, "as it was created")
	other := sizes()
	other.Name = tee
	_, _, err = s.CreateOnce(ctx, other, "drop-1")
	require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused)
}

// A name that could not be published is shown, and later changes do not wait for a rebuild.
func TestRenameIsPublishedLater(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 8, 4)
	name := "autumn"
	s.Rdb.HSet(t.Context(), s.Keys.Sale(sale.Layout().Partition(2), sale.ID), "epoch", 9)
	_, err := s.Rename(t.Context(), sale.ID, catalog.Names{Sale: &name})
	require.ErrorIs(t, err, catalog.ErrNotInForce)
	s.Rdb.HSet(t.Context(), s.Keys.Sale(sale.Layout().Partition(2), sale.ID), "epoch", 1)
	published, err := s.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, published)
	paused, err := s.Pause(t.Context(), sale.ID)
	require.NoError(t, err)
	require.Equal(t, []any{name, reservation.StatePaused}, []any{paused.Name, paused.State})
}
