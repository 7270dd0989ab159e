package ingress

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// withOperators gives the server a file with an operator of each role, named as the role is. Their tokens are
// token-viewer and so on.
func withOperators(t testing.TB) func(*Config) {
	t.Helper()
	var lines strings.Builder
	for _, role := range []string{"viewer", "cashier", "operator", "admin"} {
		hash := sha256.Sum256([]byte("token-" + role))
		lines.WriteString("the-" + role + " " + role + " " + hex.EncodeToString(hash[:]) + "\n")
	}
	file := filepath.Join(t.TempDir(), "operators")
	require.NoError(t, os.WriteFile(file, []byte(lines.String()), 0o600))
	return func(c *Config) { c.OperatorsFile = file }
}

func adminPath(path string) string { return strings.Replace(path, "/v1/orders", "/v1/admin/orders", 1) }

// orderEvents returns the types of the events of an answer, with the data of the last one.
func orderEvents(answer map[string]any) (types []string, last map[string]any) {
	for _, e := range answer["events"].([]any) {
		event := e.(map[string]any)
		types = append(types, event["type"].(string))
		last = event["data"].(map[string]any)
	}
	return types, last
}

func TestOperatorsShowAnyOrderWithItsEvents(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	viewer := bearing("token-viewer")
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id := s.confirm(sale, "ada")
	s.pay(path, "pi_1", as("ada")).is(http.StatusOK)
	r := s.get(adminPath(path), viewer)
	shown := r.is(http.StatusOK)
	require.Equal(t, "no-store", r.header.Get("Cache-Control"))
	types, data := orderEvents(shown)
	require.Equal(t, []string{"OrderReserved", "OrderConfirmed", "OrderPaid"}, types)
	require.Equal(t, map[string]any{"reference": "pi_1"}, data)
	first := shown["events"].([]any)[0].(map[string]any)
	require.Equal(t, map[string]any{
		"version": 1.0, "type": "OrderReserved", "occurred_at": shown["reserved_at"],
		"data": map[string]any{"sequence": 1.0, "epoch": 1.0},
	}, first)
	delete(shown, "events")
	buyers := s.get(path, as("ada")).is(http.StatusOK)
	buyers["sequence"], buyers["epoch"] = 1.0, 1.0
	require.Equal(t, buyers, shown, "the buyer's order and its place")
	require.Equal(t, shown["paid_at"], shown["updated_at"])

	// An order that is not in Postgres is found by its buyer.
	reserved, _ := s.order(sale, "bob")
	s.get(adminPath(reserved), viewer).isProblem(http.StatusNotFound, "order-not-found")
	s.get(adminPath(reserved)+"?user=ada", viewer).isProblem(http.StatusNotFound, "order-not-found")
	found := s.get(adminPath(reserved)+"?user=bob", viewer).is(http.StatusOK)
	require.Equal(t, []any{"reserved", 1.0}, []any{found["status"], found["version"]})
	types, _ = orderEvents(found)
	require.Equal(t, []string{"OrderReserved"}, types)
	s.post(adminPath(reserved)+"/cancel?user=bob", `{"reason":"r"}`, operator).
		isProblem(http.StatusConflict, "order-not-confirmed")
	s.post(adminPath(reserved)+"/cancel", `{"reason":"r"}`, operator).isProblem(http.StatusNotFound, "order-not-found")

	for _, missing := range []string{uuid.NewString(), "x", uuid.Nil.String(), order.NewOrderID(sale).String()} {
		s.get("/v1/admin/orders/"+missing, viewer).isProblem(http.StatusNotFound, "order-not-found")
		s.post("/v1/admin/orders/"+missing+"/cancel", `{"reason":"r"}`, operator).
			isProblem(http.StatusNotFound, "order-not-found")
	}
	for query, detail := range map[string]string{
		"user=": "user id", "user=a&user=b": "once", "receipt=x": "receipt", "user=%zz": "query", "user=a%20b": "user id",
	} {
		for _, r := range []reply{
			s.get(adminPath(path)+"?"+query, viewer), s.post(adminPath(path)+"/cancel?"+query, `{"reason":"r"}`, operator),
		} {
			require.Contains(t, r.isProblem(http.StatusBadRequest, "invalid-request")["detail"], detail)
		}
	}

	_, err := s.pool.Exec(t.Context(), "UPDATE sales SET archived_at = now(); DELETE FROM orders")
	require.NoError(t, err)
	s.get("/v1/admin/orders/"+id.String(), viewer).isProblem(http.StatusGone, "order-archived")
	s.post("/v1/admin/orders/"+id.String()+"/cancel", `{"reason":"r"}`, operator).
		isProblem(http.StatusGone, "order-archived")
}

func TestOperatorsListOrders(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	viewer := bearing("token-viewer")
	sale, other := s.sale(reservation.Terms{Stock: 50, PaymentWindow: time.Hour}), s.sale(reservation.Terms{Stock: 50})
	var all, ofAda, paid []string // newest first
	for i := range 9 {
		path, id := s.confirm(sale, fmt.Sprint("user-", i))
		if all = append([]string{id.String()}, all...); i%4 == 0 {
			s.pay(path, "pi", as(fmt.Sprint("user-", i))).is(http.StatusOK)
			paid = append([]string{id.String()}, paid...)
		}
	}
	for _, its := range []uuid.UUID{sale, other} {
		_, id := s.confirm(its, "ada")
		ofAda = append([]string{id.String()}, ofAda...)
	}
	all = append([]string{ofAda[1]}, all...)

	walk := func(query string, limit int) (ids []string) {
		t.Helper()
		for next := ""; ; {
			page := s.get(fmt.Sprintf("/v1/admin/orders?%s&limit=%d%s", query, limit, next), viewer).is(http.StatusOK)
			orders := page["orders"].([]any)
			require.LessOrEqual(t, len(orders), limit)
			for _, o := range orders {
				ids = append(ids, o.(map[string]any)["order_id"].(string))
				require.EqualValues(t, 1, o.(map[string]any)["epoch"])
			}
			cursor, more := page["next_cursor"].(string)
			if !more {
				return ids
			}
			next = "&cursor=" + cursor
		}
	}
	for _, limit := range []int{1, 3, 100} {
		require.Equal(t, all, walk("sale="+sale.String(), limit))
		require.Equal(t, paid, walk("status=paid&sale="+sale.String(), limit))
		require.Equal(t, ofAda, walk("user=ada", limit))
		require.Equal(t, ofAda[:1], walk("user=ada&sale="+other.String(), limit))
		require.Equal(t, ofAda, walk("user=ada&status=confirmed", limit))
		require.Empty(t, walk("user=ada&status=paid&sale="+sale.String(), limit))
		require.Empty(t, walk("user=eve", limit))
		require.Empty(t, walk("sale="+uuid.Must(uuid.NewV7()).String(), limit))
	}
	// A buyer lists those of one sale.
	mine := s.get("/v1/orders?limit=1&sale_id="+other.String(), as("ada")).is(http.StatusOK)
	require.Equal(t, ofAda[0], mine["orders"].([]any)[0].(map[string]any)["order_id"])
	require.NotContains(t, mine, "next_cursor")
	require.NotContains(t, mine["orders"].([]any)[0], "sequence")
	require.Empty(t, s.get("/v1/orders?sale_id="+other.String(), as("user-1")).is(http.StatusOK)["orders"])

	for query, detail := range map[string]string{
		"": "needs user or sale", "status=paid": "needs user or sale", "limit=5": "needs user or sale",
		"user=": "user id", "sale=": "sale", "sale=x": "sale", "sale=" + uuid.Nil.String(): "sale", "status=": "status",
		"user=a&status=reserved": "status", "user=a&status=Paid": "status", "user=a&user=b": "once",
		"user=a&limit=101": "limit", "user=a&cursor=x": "cursor", "user=a&sale_id=x": "sale_id", "user=%22": "user id",
		"user=" + strings.Repeat("u", 129): "user id",
	} {
		p := s.get("/v1/admin/orders?"+query, viewer).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, query)
	}
	for _, wrong := range []string{"", "x", uuid.Nil.String(), "{" + sale.String() + "}"} {
		p := s.get("/v1/orders?sale_id="+wrong, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], "sale_id")
	}
}

// A page with a status looks at a bounded number of orders, and may be empty without being the last.
func TestRareStatusIsFoundPageByPage(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 20_000})
	_, err := s.pool.Exec(t.Context(), `INSERT INTO orders
		(id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, reason)
		SELECT ('01a20000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, $1,
			'user-' || n, 1, CASE n WHEN 1 THEN 'rejected' ELSE 'confirmed' END, 2, n, 1, now(), now(),
			CASE n WHEN 1 THEN 'sold-out' END
		FROM generate_series(1, 12000) AS n`, sale)
	require.NoError(t, err)
	pages, found := 0, 0
	for next := ""; ; pages++ {
		page := s.get("/v1/admin/orders?status=rejected&sale="+sale.String()+next, operator).is(http.StatusOK)
		found += len(page["orders"].([]any))
		cursor, more := page["next_cursor"].(string)
		if !more {
			break
		}
		next = "&cursor=" + cursor
	}
	require.Equal(t, []int{2, 1}, []int{pages, found})
}

func TestOperatorsCancelPaidOrders(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id, _ := s.purchased(sale, "ada", withKey("k"))
	s.awaitStatus(path, "ada", order.StatusConfirmed)
	w := s.watch(path+"/events", as("ada"))
	w.receivesStatus(order.StatusConfirmed, 2)
	s.pay(path, "pi_1", as("ada")).is(http.StatusOK)
	w.receivesStatus(order.StatusPaid, 3)
	w.receivesEnd() // nothing else is expected
	s.awaitUnits(sale, 9, 0, 1)
	s.cancel(path, as("ada")).isProblem(http.StatusConflict, "illegal-transition")

	cancel := adminPath(path) + "/cancel"
	r := s.post(cancel, `{"reason":"bought twice: “ada”"}`, bearing("token-operator"))
	cancelled := r.is(http.StatusOK)
	require.Equal(t, []any{"cancelled", 4.0, "pi_1"}, []any{
		cancelled["status"], cancelled["version"], cancelled["payment_reference"],
	})
	require.NotContains(t, cancelled, "paid_at")
	require.NotContains(t, cancelled, "reason", "it is not for the buyer")
	require.Equal(t, cancelled, s.post(cancel, `{"reason":"again"}`, operator).is(http.StatusOK), "repeatable")
	types, data := orderEvents(s.get(adminPath(path), operator).is(http.StatusOK))
	require.Equal(t, []string{"OrderReserved", "OrderConfirmed", "OrderPaid", "OrderCancelled"}, types)
	require.Equal(t, map[string]any{
		"reference": "pi_1", "reason": "bought twice: “ada”", "operator": "the-operator",
	}, data)

	// The buyer sees it, also one who reconnects after the end of the stream.
	delete(cancelled, "sequence")
	delete(cancelled, "epoch")
	require.Equal(t, cancelled, s.get(path, as("ada")).is(http.StatusOK))
	require.Equal(t, cancelled,
		s.watch(path+"/events", as("ada"), reqHeader{"Last-Event-ID", "3"}).receivesStatus(order.StatusCancelled, 4))
	require.Equal(t, http.StatusNoContent, s.watch(path+"/events", as("ada"), reqHeader{"Last-Event-ID", "4"}).status)
	s.pay(path, "pi_1", as("ada")).isProblem(http.StatusConflict, "illegal-transition")
	s.cancel(path, as("ada")).is(http.StatusOK)
	s.awaitReleased(sale, "ada")
	s.awaitUnits(sale, 10, 0, 0)
	s.buy(sale, "", as("ada"), withKey("k")).isEnded(id, order.StatusCancelled)
	s.buy(sale, "", as("ada"), withKey("another")).is(http.StatusAccepted)
}

func TestOperatorsCancelFinalOrders(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	for _, over := range []bool{false, true} {
		sale := s.sale(reservation.Terms{Stock: 1})
		path, _, _ := s.purchased(sale, "ada")
		s.awaitStatus(path, "ada", order.StatusConfirmed)
		s.awaitUnits(sale, 0, 0, 1)
		if over {
			_, err := s.catalog.End(t.Context(), sale)
			require.NoError(t, err)
		} else {
			s.buy(sale, "", as("bob")).isProblem(http.StatusConflict, "sold-out")
		}
		cancelled := s.post(adminPath(path)+"/cancel", `{"reason":"fraud"}`, operator).is(http.StatusOK)
		require.Equal(t, []any{"cancelled", 3.0}, []any{cancelled["status"], cancelled["version"]})
		_, data := orderEvents(s.get(adminPath(path), operator).is(http.StatusOK))
		require.Equal(t, map[string]any{"reason": "fraud", "operator": "admin"}, data)
		s.awaitReleased(sale, "ada")
		s.awaitUnits(sale, 1, 0, 0)
		if over {
			s.buy(sale, "", as("bob")).isProblem(http.StatusGone, "sale-ended")
			continue
		}
		testkit.Eventually(t, 20*time.Second, "the unit is for sale again", func() bool {
			return s.buy(sale, "", as("bob")).status == http.StatusAccepted
		})
	}
	expired, id := s.confirm(s.sale(reservation.Terms{Stock: 1, PaymentWindow: time.Hour}), "ada")
	s.overdue(id)
	s.awaitStatus(expired, "ada", order.StatusExpired)
	p := s.post(adminPath(expired)+"/cancel", `{"reason":"r"}`, operator).
		isProblem(http.StatusConflict, "illegal-transition")
	require.Contains(t, p["detail"], "expired")
}

func TestOperatorsCancellationsNeedReason(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	path, _ := s.confirm(s.sale(reservation.Terms{Stock: 1}), "ada")
	cancel := adminPath(path) + "/cancel"
	for body, detail := range map[string]string{
		"{}": "reason", `{"reason":""}`: "reason", `{"reason":" "}`: "reason", `{"reason":1}`: "reason",
		`{"reason":"a\nb"}`: "control", `{"reason":"a\u0000"}`: "control", `{"reason":null}`: "reason",
		`{"reason":"` + strings.Repeat("x", 501) + `"}`: "500", `{"reason":"x","operator":"eve"}`: "operator",
	} {
		p := s.post(cancel, body, operator).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, body)
	}
	require.Equal(t, "confirmed", s.get(path, as("ada")).is(http.StatusOK)["status"])
	s.post(cancel, `{"reason":"`+strings.Repeat("ü", 500)+`"}`, operator).is(http.StatusOK)
}

// Each call has a lowest role, and a too low one is told which.
func TestRolesOfOperators(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _ := s.confirm(sale, "ada")
	base, reference := "/v1/sales/"+sale.String(), newReference()
	roles := []string{"viewer", "cashier", "operator", "admin"}
	for _, call := range []struct{ path, body, lowest string }{
		{"/v1/admin/orders?user=ada", "-", "viewer"},
		{adminPath(path), "-", "viewer"},
		{"/v1/admin/sales/" + sale.String() + "/history", "-", "viewer"},
		{"/v1/admin/payments", "-", "viewer"},
		{paymentsPath, fmt.Sprintf(`{"reference":%q}`, reference), "cashier"},
		{refundedPath(reference), `{"refund_reference":"re_1"}`, "cashier"},
		{base + "/pause", "", "operator"},
		{base + "/resume", "", "operator"},
		{base + "/restock", `{"units":1}`, "operator"},
		{base + "/rename", `{"name":"y"}`, "operator"},
		{adminPath(path) + "/cancel", `{"reason":"r"}`, "operator"},
		{"/v1/sales", `{"name":"x","stock":1}`, "admin"},
		{base + "/end", "", "admin"},
	} {
		allowed := false
		for _, role := range roles {
			allowed = allowed || role == call.lowest
			ask := func(headers ...reqHeader) reply {
				if call.body == "-" {
					return s.get(call.path, headers...)
				}
				return s.post(call.path, call.body, headers...)
			}
			r := ask(bearing("token-" + role))
			if allowed {
				require.Less(t, r.status, 300, "%s %s: %s", role, call.path, r.body)
				continue
			}
			p := r.isProblem(http.StatusForbidden, "forbidden")
			require.Contains(t, p["detail"], "needs the role "+call.lowest)
			require.Equal(t, `Bearer realm="stampede-admin", error="insufficient_scope", scope="`+call.lowest+`"`,
				r.header.Get("WWW-Authenticate"))
			ask(as("ada")).isProblem(http.StatusUnauthorized, "unauthorized")
			for _, wrong := range []string{
				"token-" + role + "x", ("token-" + role)[1:], adminToken + "x", adminToken[1:], strings.ToUpper(adminToken),
			} {
				r := ask(bearing(wrong))
				r.isProblem(http.StatusUnauthorized, "unauthorized")
				require.Equal(t, `Bearer realm="stampede-admin", error="invalid_token"`, r.header.Get("WWW-Authenticate"))
			}
		}
	}
	var who []string
	rows, err := s.pool.Query(t.Context(), "SELECT type || ' ' || coalesce(operator, '-') FROM sale_events WHERE sale_id = $1 "+
		"ORDER BY revision", sale)
	require.NoError(t, err)
	for rows.Next() {
		var line string
		require.NoError(t, rows.Scan(&line))
		who = append(who, line)
	}
	require.NoError(t, rows.Err())
	require.Equal(t, []string{
		"SaleCreated -", "SalePaused the-operator", "SaleResumed the-operator", "SaleRestocked the-operator",
		"SaleRestocked the-admin", "SaleRenamed the-operator", "SaleEnded the-admin",
	}, who)

	// Nobody is an operator: the calls are switched off.
	off := openShop(t, func(c *Config) { c.AdminToken = "" })
	for _, r := range []reply{
		off.get(adminPath(path), bearing("token-admin")), off.get("/v1/admin/orders?user=a", operator),
		off.post(adminPath(path)+"/cancel", `{"reason":"r"}`, operator),
	} {
		p := r.isProblem(http.StatusForbidden, "forbidden")
		require.Contains(t, p["detail"], "no STAMPEDE_ADMIN_TOKEN and no STAMPEDE_OPERATORS_FILE")
	}
}

// Looks at orders that wait for Postgres take no slot from a purchase, a payment, or an operator who pauses the sale.
func TestOperatorsWhoLookCrowdNobodyOut(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.MaxInFlight = 64 })
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	s.get(path, as("ada")).is(http.StatusOK) // from now on its sale is known
	unlock := s.lock("order_events")
	var hanging sync.WaitGroup
	hanging.Go(func() { s.get(adminPath(path), operator) })
	testkit.Eventually(t, 30*time.Second, "a look hangs in Postgres", func() bool {
		return s.server.inFlight.looks.taken.Load() == 1
	})
	s.get(adminPath(path), operator).isProblem(http.StatusServiceUnavailable, "overloaded")
	s.get("/v1/admin/orders?user=ada", operator).isProblem(http.StatusServiceUnavailable, "overloaded")
	s.buy(sale, "", as("bob")).is(http.StatusAccepted)
	s.get(path, as("ada")).is(http.StatusOK)
	s.post("/v1/sales/"+sale.String()+"/pause", "", operator).is(http.StatusOK)
	unlock()
	hanging.Wait()
	require.Equal(t, "confirmed", s.get(adminPath(path), operator).is(http.StatusOK)["status"])
}

func FuzzReason(f *testing.F) {
	for _, body := range []string{
		`{"reason":"r"}`, `{"reason":"\u0000"}`, `{"reason":"ü"}`, `{"reason":"\ud800"}`, "{}", `{"reason":["x"]}`, "\xff",
	} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		var read struct {
			Reason string `json:"reason"`
		}
		if decodeStrict([]byte(body), &read) != nil || order.ValidateReason(read.Reason) != nil {
			return
		}
		// What is stored can be stored, and shown again.
		require.True(t, json.Valid([]byte(body)))
		require.NotContains(t, read.Reason, "\x00")
		require.LessOrEqual(t, len([]rune(read.Reason)), 500)
	})
}
