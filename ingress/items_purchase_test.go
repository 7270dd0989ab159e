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
