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
	items := created["items"].([]any)
	require.Len(t, items, 2)
	require.Equal(t, map[string]any{
		"code": "l", "name": "L", "stock": 1.0, "unit_price": 9900.0, "per_order_limit": 1.0, "available": 1.0,
	}, items[1])
	long := strings.Repeat("x", 200)
	for _, body := range map[string]string{
		"no item":          `{"name":"x","items":[]}`,
		"a stock":          `{"name":"x","stock":4,"currency":"EUR",` + twoSizes + `}`,
		"a price too":      `{"name":"x","unit_price":1,"currency":"EUR",` + twoSizes + `}`,
		"no currency":      `{"name":"x",` + twoSizes + `}`,
		"a capital":        `{"name":"x","items":[{"code":"M","name":"M","stock":1}]}`,
		"a space":          `{"name":"x","items":[{"code":"a b","name":"M","stock":1}]}`,
		"a code twice":     `{"name":"x","items":[{"code":"m","name":"M","stock":1},{"code":"m","name":"M","stock":1}]}`,
		"no stock":         `{"name":"x","items":[{"code":"m","name":"M"}]}`,
		"an unknown field": `{"name":"x","items":[{"code":"m","name":"M","stock":1,"size":1}]}`,
		"two shards":       `{"name":"x","shards":2,"items":[{"code":"m","name":"M","stock":1}]}`,
		"53 items":         `{"name":"x","items":[` + manyItems(53, "x") + `]}`,
		"too many units":   `{"name":"x","items":[` + strings.ReplaceAll(manyItems(52, "x"), `:1}`, `:99999999}`) + `]}`,
	} {
		s.post("/v1/sales", body, operator).isProblem(http.StatusBadRequest, "invalid-request")
	}
	all := s.post("/v1/sales", `{"name":"x","items":[`+manyItems(order.MaxItems, long)+`]}`, operator)
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
		Verdict: reservation.SoldOut, Short: []string{"m", "l"}, Left: `{"xl":3}`,
	}, time.Now())
	require.Contains(t, string(at.appendJSON(nil)), `,"items":["m","l"],"available":{"xl":3}}`)
	at = problemForVerdict(reservation.Answer{Verdict: reservation.UnknownItem, Short: []string{`x"y`}}, time.Now())
	require.Equal(t, http.StatusUnprocessableEntity, at.Status)
	require.Contains(t, string(at.appendJSON(nil)), `,"item":"x\"y"}`)
	at = problemForVerdict(reservation.Answer{Verdict: reservation.OverLimit, Limit: 1, Item: "l"}, time.Now())
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
	body := purchase.appendReservation(nil, reservation.Request{Sale: sale, User: "ada"}, reservation.Answer{
		Verdict: reservation.Reserved, Items: `{"m":2,"l":1}`,
		Reservation: order.Reservation{OrderID: order.NewOrderID(sale), Quantity: 3, Lines: "a2b1", Epoch: 1, Sequence: 1},
	}, false)
	require.Contains(t, string(body), `"quantity":3,"items":{"m":2,"l":1},"amount":35700,"currency":"EUR"`)
}
