package ingress

import (
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/internal/test/testkit"
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

// openSizes opens a sale with twoSizes, of at most three units an order.
func (s *shop) openSizes() uuid.UUID {
	s.t.Helper()
	created := s.post("/v1/sales", `{"name":"Shirt","currency":"EUR","per_order_limit":3,"payment_window_seconds":3600,`+
		twoSizes+`}`, operator)
	return uuid.MustParse(created.is(http.StatusCreated)["id"].(string))
}

// showsLeft waits until the sale shows so many units of its items.
func (s *shop) showsLeft(sale uuid.UUID, m, l float64) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, "the units of each item", func() bool {
		items := s.get("/v1/sales/" + sale.String()).is(http.StatusOK)["items"].([]any)
		return items[0].(map[string]any)["available"] == m && items[1].(map[string]any)["available"] == l
	})
}

func TestBasketIsOneOrder(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.openSizes()
	basket := map[string]any{"m": 1.0, "l": 1.0}
	first := s.buy(sale, `{"items":{"m":1,"l":1}}`, as("ada"), withKey("k"))
	accepted := first.is(http.StatusAccepted)
	require.Equal(t, basket, accepted["items"])
	require.Equal(t, []any{2.0, 22800.0, "EUR"}, []any{accepted["quantity"], accepted["amount"], accepted["currency"]})
	s.showsLeft(sale, 2, 0)

	again := s.buy(sale, `{"items":{"l":1,"m":1}}`, as("ada"), withKey("k"))
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.Equal(t, first.body, again.body)
	for _, other := range []string{`{"items":{"m":2}}`, `{"items":{"m":1}}`} {
		s.buy(sale, other, as("ada"), withKey("k")).isProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")
	}
	s.buy(sale, `{"items":{"m":1}}`, as("ada"), withKey("other")).isProblem(http.StatusConflict, "already-purchased")
	s.buy(sale, `{"items":{"l":1}}`, as("ada")).isProblem(http.StatusConflict, "already-purchased")

	path := first.header.Get("Location")
	require.Equal(t, basket, s.get(path, as("ada")).is(http.StatusOK)["items"], "from Redis")
	w := s.watch(path+"/events", as("ada"))
	require.Equal(t, basket, w.receivesStatus(order.StatusReserved, 1)["items"])
	s.startWorker()
	require.Equal(t, basket, w.receivesStatus(order.StatusConfirmed, 2)["items"])
	shown := s.get(path, as("ada")).is(http.StatusOK)
	require.Equal(t, []any{basket, 22800.0}, []any{shown["items"], shown["amount"]}, "from Postgres")
	for list, headers := range map[string]reqHeader{
		"/v1/orders": as("ada"), "/v1/admin/orders?user=ada": operator, "/v1/admin/orders?sale=" + sale.String(): operator,
	} {
		orders := s.get(list, headers).is(http.StatusOK)["orders"].([]any)
		require.Len(t, orders, 1)
		require.Equal(t, basket, orders[0].(map[string]any)["items"], list)
	}
	id := accepted["order_id"].(string)
	found := s.get("/v1/admin/orders/"+id+"?user=ada", operator).is(http.StatusOK)
	require.Equal(t, basket, found["items"])

	require.Equal(t, basket, s.cancel(path, as("ada")).is(http.StatusOK)["items"])
	require.Equal(t, basket, w.receivesStatus(order.StatusCancelled, 3)["items"])
	s.showsLeft(sale, 3, 1)
}

// A buyer who gets less than the whole basket gets nothing, and hears what is left.
func TestSoldOutNamesItems(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.openSizes()
	s.buy(sale, `{"items":{"l":1}}`, as("bob")).is(http.StatusAccepted)
	before := s.stock(sale)
	for range 3 {
		p := s.buy(sale, `{"items":{"m":1,"l":1}}`, as("eve")).isProblem(http.StatusConflict, "sold-out")
		require.Equal(t, []any{"l"}, p["items"])
		require.Equal(t, map[string]any{"m": 3.0, "l": 0.0}, p["available"])
		s.buy(sale, `{"items":{"l":1}}`, as("bob")).isProblem(http.StatusConflict, "already-purchased")
	}
	require.Equal(t, before, s.stock(sale))
	s.buy(sale, `{"items":{"m":2}}`, as("eve")).is(http.StatusAccepted)
	p := s.buy(sale, `{"items":{"m":2}}`, as("dan")).isProblem(http.StatusConflict, "sold-out")
	require.Equal(t, []any{[]any{"m"}, map[string]any{"m": 1.0, "l": 0.0}}, []any{p["items"], p["available"]})
	s.buy(sale, `{"items":{"m":1}}`, as("dan")).is(http.StatusAccepted)
	p = s.buy(sale, `{"items":{"m":1}}`, as("fay")).isProblem(http.StatusConflict, "sold-out")
	require.Equal(t, []any{"m"}, p["items"])
}

func TestWrongItemsReserveNothing(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.openSizes()
	before := s.stock(sale)
	for _, body := range []string{
		"", `{}`, `{"quantity":1}`, `{"items":{}}`, `{"items":null}`, `{"items":[]}`, `{"items":{"m":0}}`,
		`{"items":{"m":-1}}`,
		`{"items":{"m":1.5}}`, `{"items":{"m":1,"m":1}}`, `{"items":{"":1}}`, `{"items":{"m":1},"quantity":1}`,
		`{"items":{` + itemsOf(order.MaxItems+1) + `}}`,
	} {
		s.buy(sale, body, as("eve")).isProblem(http.StatusBadRequest, "invalid-request")
	}
	for code, body := range map[string]string{
		"xl": `{"items":{"m":1,"xl":1}}`, "M": `{"items":{"M":1}}`, "a b": `{"items":{"a b":1}}`,
	} {
		p := s.buy(sale, body, as("eve")).isProblem(http.StatusUnprocessableEntity, "unknown-item")
		require.Equal(t, code, p["item"])
	}
	for body, limit := range map[string][]any{
		`{"items":{"l":2}}`:                {1.0, "l"},
		`{"items":{"m":4}}`:                {3.0, nil},
		`{"items":{"m":3,"l":1}}`:          {3.0, nil},
		`{"items":{"m":9007199254740993}}`: {3.0, nil},
	} {
		p := s.buy(sale, body, as("eve")).isProblem(http.StatusUnprocessableEntity, "quantity-over-limit")
		require.Equal(t, limit, []any{p["limit"], p["item"]}, body)
	}
	s.buy(sale, `{"items":{"m":1}}`+strings.Repeat(" ", accept.MaxBodyBytes), as("eve")).
		isProblem(http.StatusRequestEntityTooLarge, "body-too-large")
	require.Equal(t, before, s.stock(sale))

	plain := s.sale(reservation.Terms{Stock: 1})
	s.buy(plain, `{"items":{"m":1}}`, as("eve")).isProblem(http.StatusBadRequest, "invalid-request")
	require.Empty(t, s.stock(plain).Buyers)
}

func TestReceiptProvesItemsThatRedisLost(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.openSizes()
	r := s.buy(sale, `{"items":{"m":2,"l":1}}`, as("ada"))
	receipt := r.is(http.StatusAccepted)["receipt"].(string)
	got, err := s.server.receipts.signer.Load().Verify(receipt)
	require.NoError(t, err)
	require.Equal(t, []any{order.Lines("a2b1"), int64(3)}, []any{got.Lines, got.Quantity})
	path := withReceipt(r.header.Get("Location"), receipt)
	s.loseReservations(sale)
	s.get(path, as("ada")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	s.raiseEpoch(sale)
	lost := s.get(path, as("ada")).is(http.StatusOK)
	require.Equal(t, []any{"voided", 3.0, map[string]any{"m": 2.0, "l": 1.0}},
		[]any{lost["status"], lost["quantity"], lost["items"]})
}

// Watchers of a sale see each purchase, release and restock of an item.
func TestSaleStreamSendsWhatIsLeftOfItems(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	sale := s.openSizes()
	path := "/v1/sales/" + sale.String()
	w := s.watch(path + "/events")
	item := func(code string, stock, available float64) map[string]any {
		return map[string]any{"code": code, "stock": stock, "available": available}
	}
	shows := func(m, l map[string]any) {
		t.Helper()
		for want := []any{m, l}; ; { // other changes may come between
			e, ok := w.next()
			require.True(t, ok)
			if reflect.DeepEqual(e.data["items"], want) {
				require.Equal(t, m["stock"].(float64)+l["stock"].(float64), e.data["stock"])
				require.Equal(t, m["available"].(float64)+l["available"].(float64), e.data["available"])
				return
			}
		}
	}
	shows(item("m", 3, 3), item("l", 1, 1))
	bought := s.buy(sale, `{"items":{"m":1,"l":1}}`, as("ada"))
	bought.is(http.StatusAccepted)
	shows(item("m", 3, 2), item("l", 1, 0))
	s.awaitStatus(bought.header.Get("Location"), "ada", order.StatusConfirmed)
	s.post(path+"/restock", `{"items":{"l":4}}`, operator).is(http.StatusOK)
	shows(item("m", 3, 2), item("l", 5, 4))
	s.cancel(bought.header.Get("Location"), as("ada")).is(http.StatusOK)
	shows(item("m", 3, 3), item("l", 5, 5))
	s.post(path+"/restock", `{"items":{"m":-2}}`, operator).is(http.StatusOK)
	shows(item("m", 1, 1), item("l", 5, 5))
}
