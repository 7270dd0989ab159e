package feed_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/relay/feed"
	"stampede/reservation/order"
)

// The events of a sale with items, and of its orders, show them.
func TestEventsShowItems(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testwork.NewSaleWithItems(t, pool, 10, 10)
	for revision, event := range []string{
		`SaleWithItemsCreated {"stock": 20, "items": [{"code": "item-a", "stock": 10}]}`, `SalePaused {}`,
		`SaleRestocked {"stock": 25, "items": [{"code": "item-a", "stock": 15}]}`,
		`SaleRenamed {"name": "new", "previous_name": "old"}`, `SaleRenamed {"name": "test", "previous_name": "new"}`,
		`SaleRenamed {"items": [{"code": "item-a", "name": "A", "stock": 15}], "item_names": {"item-a": "A"}}`,
	} {
		kind, data, _ := strings.Cut(event, " ")
		testshop.Exec(t, pool, "INSERT INTO sale_events (sale_id, revision, type, data) VALUES ($1, $2, $3, $4)",
			sale, revision+1, kind, data)
	}
	basket := testwork.Basket(sale, "ann", 1, "a1b2")
	testwork.Record(t, ledger.New(pool), []order.OrderReserved{basket})
	testwork.Cancel(t, ledger.New(pool), basket.OrderID, "ann")
	r := feed.NewReader(session(t, pool), "/stampede")
	look(t, r)
	events, _, err := r.Read(t.Context(), 0, 1000)
	require.NoError(t, err)
	var bodies []string
	for _, e := range events {
		bodies = append(bodies, string(e.Body))
	}
	require.Len(t, bodies, 8)
	for i, stock := range []int{10, 10, 15, 15, 15} {
		require.Contains(t, bodies[i], fmt.Sprintf(`"items":[{"code":"item-a","stock":%d}]`, stock))
	}
	for i, name := range []string{"old", "old", "old", "new", "test", "test"} {
		require.Contains(t, bodies[i], fmt.Sprintf(`"name":%q,"stock"`, name), i) // as of the event
	}
	require.Contains(t, bodies[5], `"type":"stampede.sale.renamed"`)
	require.Contains(t, bodies[5], `"items":[{"code":"item-a","name":"A","stock":15}]`)
	require.Contains(t, bodies[0], `"type":"stampede.sale.created"`)
	require.Contains(t, bodies[0], `"change":"created"`)
	require.Contains(t, bodies[0], `"state":"open"`)
	for _, body := range bodies[6:] {
		require.Contains(t, body, `"quantity":3,"items":{"item-a":1,"item-b":2}`)
		require.Contains(t, body, `"amount":5000`)
	}
}
