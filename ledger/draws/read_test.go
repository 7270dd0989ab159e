package draws_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/draw"
)

// A crowd of entrants that ask for their proofs has the hashes of the chunks read once.
func TestProofsShareHashes(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 1500)
	d.prepare(t)
	entries := d.receipts(t)
	first, err := d.Proof(t.Context(), d.goods, entries[0])
	require.NoError(t, err)
	d.exec(t, "DELETE FROM draw_chunks WHERE sale_id = $1 AND chunk = 1", d.goods)
	again, err := d.Proof(t.Context(), d.goods, entries[0])
	require.NoError(t, err)
	require.Equal(t, first, again)
}

// A bundle has the stock of the freeze and each change since, as of one revision.
func TestBundleHasChangesOfTheStock(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 20, "a1", "b1")
	d.exec(t, "UPDATE draws SET version = 2")
	items := func(a, b int64) []draw.Item {
		return []draw.Item{{Code: "item-a", Stock: a}, {Code: "item-b", Stock: b}}
	}
	frozen := &draw.Goods{Revision: 1, Stock: 10, Items: items(5, 5)}
	prepared := d.prepare(t)
	require.Equal(t, frozen, prepared.Goods)
	require.Equal(t, frozen, prepared.View().Goods)
	b, err := d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	require.Equal(t, []any{int64(2), frozen, []draw.Restock(nil)}, []any{b.Revision, b.Goods, b.Restocks})
	for _, change := range []string{
		`'SaleRestocked', '{"stock": 13, "items": [{"code": "item-a", "stock": 8, "name": "A"}, {"code": "item-b", "stock": 5}]}'`,
		`'SaleLowering', '{"stock": 11, "units": -2}'`,
		`'SaleRestocked', '{"stock": 11, "lowering": 4, "items": [{"code": "item-a", "stock": 8}, {"code": "item-b", "stock": 3}]}'`,
	} {
		d.exec(t, `WITH next AS (UPDATE sales SET revision = revision + 1, stock = 11 WHERE id = $1 RETURNING revision),
			items AS (UPDATE sale_items SET stock = CASE item WHEN 'a' THEN 8 ELSE 3 END WHERE sale_id = $1)
			INSERT INTO sale_events (sale_id, revision, occurred_at, type, data)
			SELECT $1, revision, '2026-11-22T18:00:00.5Z', `+change+` FROM next`, d.goods)
	}
	b, err = d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	at := time.Date(2026, 11, 22, 18, 0, 0, 5e8, time.UTC)
	require.Equal(t, []draw.Restock{
		{Revision: 3, At: at, Stock: 13, Items: items(8, 5)}, {Revision: 5, At: at, Stock: 11, Items: items(8, 3)},
	}, b.Restocks)
	require.Equal(t, []any{int64(5), int64(11), items(8, 3), frozen}, []any{b.Revision, b.Stock, b.Items, b.Goods})

	d.exec(t, "UPDATE draws SET version = 1")
	b, err = d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	require.Equal(t, []any{int64(0), []draw.Restock(nil)}, []any{b.Revision, b.Restocks}, "its verifiers know none of it")
}
