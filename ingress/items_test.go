package ingress

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
	"stampede/reservation/order"
)

const twoSizes = `"items":[{"code":"m","name":"M","stock":3,"unit_price":12900},` +
	`{"code":"l","name":"L","stock":1,"unit_price":9900,"per_order_limit":1}]`

func TestSaleWithItemsIsCreatedAndShown(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	created := s.post("/v1/sales", `{"name":"Shirt","currency":"EUR",`+twoSizes+`}`, operator).is(http.StatusCreated)
	require.EqualValues(t, 4, created["stock"])
	shown := created["items"].([]any)
	require.Len(t, shown, 2)
	require.Equal(t, map[string]any{
		"code": "l", "name": "L", "stock": 1.0, "unit_price": 9900.0, "per_order_limit": 1.0, "available": 1.0,
	}, shown[1])
	refused := func(detail, members string) {
		t.Helper()
		p := s.post("/v1/sales", `{"name":"x",`+members+`}`, operator).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, members)
	}
	items := func(n int, old, changed string) string {
		return `"items":[` + strings.ReplaceAll(manyItems(n, "x"), old, changed) + `]`
	}
	refused("stock must be a whole number", `"per_order_limit":1`)
	refused("items must be at least 1", `"items":[]`)
	refused("items must be at most 52", items(order.MaxItems+1, "-", "-"))
	refused("items must have at most 100000000 units together", items(2, ":1}", ":99999999}"))
	refused("items has the wrong type", `"items":{"m":1}`)
	refused("items[0] has the wrong type", `"items":["m"]`)
	refused("stock must be left out", `"stock":4,`+items(1, "-", "-"))
	refused("unit_price must be left out", `"unit_price":1,"currency":"EUR",`+items(1, "-", "-"))
	refused("items[0].unit_price must be given for all items", twoSizes)
	refused("items[0].unit_price must be given for all items", `"currency":"EUR",`+items(1, "-", "-"))
	refused("shards must be 1", `"shards":2,`+items(1, "-", "-"))
	for _, code := range []string{"", "M", "a b", strings.Repeat("a", 33)} {
		refused("items[0].code must be 1 to 32", items(1, "size-aa", code))
	}
	refused("items[1].code is that of another item", items(2, "size-ab", "size-aa"))
	refused("items[0].stock must be a whole number", items(1, `,"stock":1`, ""))
	refused("items[0].stock has the wrong type", items(1, ":1}", ":1.5}"))
	refused("items[0].stock is given twice", items(1, ":1}", `:1,"stock":1}`))
	refused("items[0].size is not a known member", items(1, ":1}", `:1,"size":1}`))
	all := s.post("/v1/sales", `{"name":"x","items":[`+manyItems(order.MaxItems, strings.Repeat("x", 200))+`]}`, operator)
	require.Len(t, all.is(http.StatusCreated)["items"], order.MaxItems)
	s.post("/v1/sales", `{"name":"x"}`+strings.Repeat(" ", saleBodyMax), operator).
		isProblem(http.StatusRequestEntityTooLarge, "body-too-large")
}

// manyItems are so many items with one unit each.
func manyItems(n int, name string) string {
	items := make([]string, n)
	for i := range items {
		items[i] = `{"code":"size-` + string(rune('a'+i/26)) + string(rune('a'+i%26)) + `","name":"` + name + `","stock":1}`
	}
	return strings.Join(items, ",")
}

func TestProblemsNameItems(t *testing.T) {
	t.Parallel()
	at := problemForVerdict(reservation.Answer{
		Verdict: reservation.SoldOut, Of: &reservation.OfItems{Codes: []string{"m", "l"}, Units: `{"xl":3}`},
	}, time.Now())
	require.Contains(t, string(at.appendJSON(nil)), `,"items":["m","l"],"available":{"xl":3}}`)
	of := &reservation.OfItems{Codes: []string{`x"y`}}
	at = problemForVerdict(reservation.Answer{Verdict: reservation.UnknownItem, Of: of}, time.Now())
	require.Equal(t, http.StatusUnprocessableEntity, at.Status)
	require.Contains(t, string(at.appendJSON(nil)), `,"item":"x\"y"}`)
	of = &reservation.OfItems{Codes: []string{"l"}}
	at = problemForVerdict(reservation.Answer{Verdict: reservation.OverLimit, Limit: 1, Of: of}, time.Now())
	require.Contains(t, string(at.appendJSON(nil)), `at most 1 units of item l.","limit":1,"item":"l"}`)
	require.Same(t, problemSoldOut, problemForVerdict(reservation.Answer{Verdict: reservation.SoldOut}, time.Now()))
}

func TestAmountOfLines(t *testing.T) {
	t.Parallel()
	p := price{items: []reservation.Item{{UnitPrice: 12900}, {UnitPrice: 9900}}, currency: "EUR"}
	require.EqualValues(t, 2*12900+9900, p.amount(3, "a2b1"))
	require.EqualValues(t, 30, price{unit: 10}.amount(3, ""))
}

func TestAcceptedPurchaseShowsItems(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := uuid.MustParse(s.post("/v1/sales", `{"name":"Shirt","currency":"EUR",`+twoSizes+`}`, operator).
		is(http.StatusCreated)["id"].(string))
	purchase := &purchaseService{s.server.core, s.server.sales}
	body := purchase.appendReservation(nil, &reservation.Request{Sale: sale, User: "ada"}, &reservation.Answer{
		Verdict: reservation.Reserved, Of: &reservation.OfItems{Units: `{"m":2,"l":1}`},
		Reservation: order.Reservation{OrderID: order.NewOrderID(sale), Quantity: 3, Lines: "a2b1", Epoch: 1, Sequence: 1},
	}, false)
	require.Contains(t, string(body), `"quantity":3,"items":{"m":2,"l":1},"amount":35700,"currency":"EUR"`)
}
