package feed_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/ingress/apidoc"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/relay/feed"
	"stampede/reservation/order"
)

// Receivers read in the webhooks of openapi.yaml what an event has.
func TestEventsFitTheirDescription(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("../../ingress/openapi.yaml")
	require.NoError(t, err)
	site, err := apidoc.New(source)
	require.NoError(t, err)
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(site.JSON.Body))
	require.NoError(t, err)
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	compiler.AssertFormat()
	require.NoError(t, compiler.AddResource("openapi.json", document))
	schema := func(webhook string) *jsonschema.Schema {
		schema, err := compiler.Compile("openapi.json#/webhooks/" + webhook +
			"/post/requestBody/content/application~1cloudevents+json/schema")
		require.NoError(t, err)
		return schema
	}
	orders, sales, payments, draws := schema("order"), schema("sale"), schema("payment"), schema("draw")

	pool := testkit.Pool(t)
	exec := func(query string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), query, args...)
		require.NoError(t, err)
	}
	sale := uuid.Must(uuid.NewV7())
	exec(`INSERT INTO sales (id, name, stock, payment_window_seconds, opens_at, closes_at, payment_grace_seconds,
			payments_per_second, unit_price, currency)
		VALUES ($1, 'autumn', 70, 60, now(), now() + interval '1 day', 30, 25, 4900, 'EUR')`, sale)
	for revision, kind := range []string{
		"SaleCreated", "SalePaused", "SaleResumed", "SaleRestocked", "SaleLowering", "SaleRebuilt",
		"SaleReconciled", "SaleRenamed", "SaleEnded", "SaleRetired",
	} {
		exec("INSERT INTO sale_events (sale_id, revision, type, data, operator) VALUES ($1, $2, $3, '{\"stock\": 70}', 'ada')",
			sale, revision+1, kind)
	}
	hash, goods := strings.Repeat("0a", 32), uuid.Must(uuid.NewV7())
	party := `"parties": [{"name": "ann", "commitment": "` + hash + `"`
	at := time.Date(2026, 11, 22, 18, 0, 0, 512345000, time.UTC)
	frozen := draw.Frozen{
		Version:       draw.Version,
		EntriesSaleID: sale, Root: bytes.Repeat([]byte{10}, 32), FrozenAt: at, Rounds: []int64{7, 8}, ClosesAt: at,
		FreezeSeconds: 60, Parties: []draw.Party{{Name: "ann", Commitment: bytes.Repeat([]byte{10}, 32)}},
		Goods: &draw.Goods{
			Revision: 9, Stock: 70, Sold: 2, Holders: []draw.Place{3, 7},
			Items: []draw.Item{{Code: "s", Stock: 30, Sold: 2}, {Code: "m", Stock: 40}},
		},
	}
	frozenData, err := json.Marshal(frozen)
	require.NoError(t, err)
	frozen.SaleID = sale
	for i, event := range []string{
		`DrawCreated {"version": 2, "stock": 70, "freeze_seconds": 60, "entries_sale_id": "` + sale.String() + `", ` + party + `}]}`,
		"DrawFrozen " + string(frozenData),
		`DrawSeeded {"seed": "` + hash + `", "round": 8, "signature": "` + strings.Repeat("b7", 48) + `"}`,
		`DrawSeeded {"seed": "` + hash + `", ` + party + `, "secret": "` + hash + `"}]}`,
		`DrawVoided {"reason": "a party has not revealed its secret in time"}`,
		`WaitlistCreated {"stock": 70, "sale_id": "` + goods.String() + `", "entries_sale_id": "` + sale.String() + `"}`,
	} {
		kind, data, _ := strings.Cut(event, " ")
		exec("INSERT INTO sale_events (sale_id, revision, type, data) VALUES ($1, $2, $3, $4)", sale, 11+i, kind, data)
	}
	for _, steps := range [][][2]string{
		{{"OrderConfirmed", `{}`}},
		{
			{"OrderConfirmed", `{}`},
			{"OrderPaid", `{"reference": "pi_1"}`},
			{"OrderCancelled", `{"reference": "pi_1", "reason": "by phone", "operator": "bob"}`},
		},
		{{"OrderConfirmed", `{}`}, {"OrderCancelled", `{}`}},
		{{"OrderConfirmed", `{}`}, {"OrderExpired", `{}`}},
		{{
			"OrderConfirmed",
			`{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}`,
		}},
		{{"OrderRejected", `{"reason": "sold-out"}`}},
		{{"OrderVoided", `{"reason": "sale-rebuilt"}`}},
	} {
		id := uuid.Must(uuid.NewV7())
		for i, step := range steps {
			exec(`INSERT INTO order_events
				(order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, due, pay_from, data)
				VALUES ($1, $2, $3, $4, 'auth0|ann', 2, now(), CASE $2::int WHEN 2 THEN now() END, CASE WHEN $6 THEN now() END,
					CASE WHEN $6 THEN now() END, $5)`,
				id, i+2, step[0], sale, step[1], i == 0 && len(steps) > 1)
		}
	}
	keeper := ledger.New(pool)
	sizes := testwork.NewSaleWithItems(t, pool, 10, 10)
	exec(`INSERT INTO sale_events (sale_id, revision, type, data)
		VALUES ($1, 1, 'SaleWithItemsCreated', jsonb_build_object('stock', 20, 'items', items_of($1)))`, sizes)
	testwork.Record(t, keeper, []order.OrderReserved{testwork.Basket(sizes, "ann", 1, "a1b2")})
	for i, m := range []order.Money{{Amount: 5, Currency: "EUR", Unreadable: `order_id "cart 7"`}, {}} {
		m.Reference = fmt.Sprintf("/%d \u007e.p2", i)
		_, err := keeper.Report(t.Context(), m)
		require.NoError(t, err)
		_, err = keeper.Refund(t.Context(), m.Reference, "re_1", "ada")
		require.NoError(t, err)
	}
	r := feed.NewReader(session(t, pool), "/stampede")
	look(t, r)
	events, _, err := r.Read(t.Context(), 0, 1000)
	require.NoError(t, err)
	require.Len(t, events, 10+6+11+2*2+2)
	traced, withItems, ofDraws, ofLists, witnessed := 0, 0, 0, 0, 0
	for _, e := range events {
		event, err := jsonschema.UnmarshalJSON(bytes.NewReader(e.Body))
		require.NoError(t, err)
		schema := orders
		switch {
		case bytes.Contains(e.Body, []byte(`"type":"stampede.draw.`)):
			schema, ofDraws = draws, ofDraws+1
			if kept, err := draw.ParseWitness(e.Body); err == nil {
				require.Equal(t, []*draw.Frozen{&frozen}, kept.Frozen, "as a witness keeps it")
				witnessed++
			} else {
				require.NotContains(t, string(e.Body), `"stock"`)
			}
		case bytes.Contains(e.Body, []byte(`"type":"stampede.waitlist.created"`)):
			schema, ofLists = draws, ofLists+1
			require.Contains(t, string(e.Body), `"sale_id":"`+goods.String()+`","revision":16,"change":"created"`)
			require.Contains(t, string(e.Body), `"entries_sale_id":"`+sale.String()+`"`)
		case e.Subject == sale.String(), e.Subject == sizes.String():
			schema = sales
		case strings.HasPrefix(e.Subject, "/"):
			schema = payments
		}
		require.NoError(t, schema.Validate(event), "%s", e.Body)
		if wrong := bytes.Replace(e.Body, []byte(`"items":`), []byte(`"items":7,"x":`), 1); len(wrong) > len(e.Body) {
			event, err = jsonschema.UnmarshalJSON(bytes.NewReader(wrong))
			require.NoError(t, err)
			require.Error(t, schema.Validate(event), "%s", wrong)
			withItems++
		}
		if e.TraceParent != "" {
			traced++
			require.Contains(t, string(e.Body), `"traceparent":"`+e.TraceParent+`"`)
		}
	}
	require.Equal(t, []int{1, 3, 5, 1, 1}, []int{traced, withItems, ofDraws, ofLists, witnessed})
	renamed := bytes.Replace(events[16].Body, []byte(`"user_id"`), []byte(`"user"`), 1)
	wrong, err := jsonschema.UnmarshalJSON(bytes.NewReader(renamed))
	require.NoError(t, err)
	require.Error(t, orders.Validate(wrong))
}

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
