package ingress

import (
	"context"
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// order purchases one unit and returns the path and id of the order.
func (s *shop) order(sale uuid.UUID, user string) (string, uuid.UUID) {
	s.t.Helper()
	r := s.buy(sale, "", as(user))
	answer := r.is(http.StatusAccepted)
	return r.header.Get("Location"), uuid.MustParse(answer["order_id"].(string))
}

func TestShowOrderBeforePostgresHasIt(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	bought := s.buy(sale, `{"quantity":2}`, as("ada"))
	want := bought.is(http.StatusAccepted)
	want["user_id"], want["version"], want["updated_at"] = "ada", 1.0, want["reserved_at"]
	delete(want, "receipt")
	r := s.get(bought.header.Get("Location"), as("ada"))
	require.Equal(t, want, r.is(http.StatusOK))
	require.Equal(t, "no-store", r.header.Get("Cache-Control"))

	s.get(bought.header.Get("Location"), as("bob")).isProblem(http.StatusNotFound, "order-not-found")
	s.get(bought.header.Get("Location")).isProblem(http.StatusUnauthorized, "unauthorized")
	for _, other := range []string{
		uuid.NewString(), uuid.Must(uuid.NewV7()).String(), uuid.Nil.String(), order.NewOrderID(sale).String(),
	} {
		s.get("/v1/orders/"+other, as("ada")).isProblem(http.StatusNotFound, "order-not-found")
	}
}

func TestShowOrderInPostgres(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, id := s.order(sale, "ada")
	s.record(id, sale, "ada", order.StatusConfirmed, "")
	o := s.get(path, as("ada")).is(http.StatusOK)
	require.Equal(t, "confirmed", o["status"])
	require.EqualValues(t, 2, o["version"])
	require.NotContains(t, o, "reason")
	s.get(path, as("bob")).isProblem(http.StatusNotFound, "order-not-found")

	path, id = s.order(sale, "eve")
	s.record(id, sale, "eve", order.StatusRejected, order.RejectedSoldOut)
	o = s.get(path, as("eve")).is(http.StatusOK)
	require.Equal(t, []any{"rejected", "sold-out"}, []any{o["status"], o["reason"]})
}

// afterFirstLookup calls a function between the first lookup in Postgres and the one in Redis.
type afterFirstLookup struct {
	Orders
	lookups *int
	then    func()
}

func (a afterFirstLookup) Order(ctx context.Context, id uuid.UUID) (order.Order, error) {
	found, err := a.Orders.Order(ctx, id)
	if *a.lookups++; *a.lookups == 1 {
		a.then()
	}
	return found, err
}

// The order is rejected and released between the lookups in Postgres and in Redis, so both miss it.
func TestShowOrderFindsOrderRejectedMeanwhile(t *testing.T) {
	t.Parallel()
	var (
		lookups int
		reject  func()
	)
	s := openShop(t, func(c *Config) { c.Orders = afterFirstLookup{c.Orders, &lookups, func() { reject() }} })
	sale := s.sale(reservation.Terms{Stock: 10})
	path, id := s.order(sale, "ada")
	reject = func() {
		s.record(id, sale, "ada", order.StatusRejected, order.RejectedAlreadyPurchased)
		_, err := s.store.Release(t.Context(), []reservation.Release{{SaleID: sale, UserID: "ada", OrderID: id}})
		require.NoError(t, err)
	}
	require.Equal(t, "rejected", s.get(path, as("ada")).is(http.StatusOK)["status"])
	require.Equal(t, 2, lookups)
	require.Equal(t, "10", s.stock(sale).Sale["left"])
}

// One buyer has 45 orders, mixed with those of another.
func TestListOrdersPages(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	require.Equal(t, map[string]any{"orders": []any{}}, s.get("/v1/orders", as("ada")).is(http.StatusOK))
	s.get("/v1/orders").isProblem(http.StatusUnauthorized, "unauthorized")

	var want []any
	for i := range 45 {
		terms := reservation.Terms{Stock: 2}
		if i%3 == 0 {
			terms.PaymentWindow = 10 * time.Minute
		}
		sale := s.sale(terms)
		path, _ := s.confirm(sale, "ada")
		switch {
		case i%6 == 0:
			s.pay(path, "r-1", as("ada")).is(http.StatusOK)
		case i%9 == 0:
			s.cancel(path, as("ada")).is(http.StatusOK)
		}
		if i%4 == 0 {
			s.confirm(sale, "bob")
		}
		want = append(want, map[string]any(s.get(path, as("ada")).is(http.StatusOK)))
	}
	slices.Reverse(want) // newest first

	walk := func(user, query string, sizes ...int) (got []any) {
		t.Helper()
		next := ""
		for i, size := range sizes {
			r := s.get("/v1/orders?"+query+next, as(user))
			page := r.is(http.StatusOK)
			require.Equal(t, "no-store", r.header.Get("Cache-Control"))
			require.Len(t, page["orders"], size)
			got = append(got, page["orders"].([]any)...)
			cursor, more := page["next_cursor"].(string)
			require.Equal(t, i < len(sizes)-1, more, "page %d", i)
			next = "&cursor=" + cursor
		}
		return got
	}
	require.Equal(t, want, walk("ada", "", 20, 20, 5))
	require.Equal(t, want, walk("ada", "limit=45", 45))
	require.Equal(t, want, walk("ada", "limit=44", 44, 1))
	require.Equal(t, want, walk("ada", "limit=100", 45))
	require.Equal(t, want[:3], walk("ada", "limit=1", slices.Repeat([]int{1}, 45)...)[:3])
	require.Len(t, walk("bob", "limit=5", 5, 5, 2), 12)
	require.Empty(t, walk("eve", "", 0))

	// A cursor keeps its place when there are new orders, and shows no other buyer's orders.
	first := s.get("/v1/orders", as("ada")).is(http.StatusOK)
	s.confirm(s.sale(reservation.Terms{Stock: 1}), "ada")
	second := s.get("/v1/orders?cursor="+first["next_cursor"].(string), as("ada")).is(http.StatusOK)
	require.Equal(t, want[20:40], second["orders"])
	others := s.get("/v1/orders?limit=100&cursor="+first["next_cursor"].(string), as("bob")).is(http.StatusOK)
	for _, order := range others["orders"].([]any) {
		require.Equal(t, "bob", order.(map[string]any)["user_id"])
	}

	// An order that only Redis knows is not in the list yet.
	s.order(s.sale(reservation.Terms{Stock: 1}), "ada")
	require.Len(t, s.get("/v1/orders?limit=100", as("ada")).is(http.StatusOK)["orders"], 46)
}

// A client with a misspelled cursor would read the first page forever.
func TestListsRejectInvalidPages(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	good := cursorAfter(uuid.Must(uuid.NewV7()))
	strayBits := good[:21] + string(good[21]+1) // stray bits after the 16 bytes, which a lenient decoder drops
	for _, list := range []string{"/v1/orders", "/v1/sales"} {
		s.get(list+"?limit=1&cursor="+good, as("ada")).is(http.StatusOK)
		for _, cursor := range []string{
			"x", "!", good + "=", good + "==", good[:21], good + "A", good + "\n", good[:10] + "\n" + good[10:], strayBits,
			uuid.NewString(), cursorAfter(uuid.Nil), cursorAfter(uuid.New()),
			base64.RawURLEncoding.EncodeToString([]byte("fifteen bytes..")),
			strings.Repeat("A", 4000), "\x00", "\xff", "{}",
		} {
			p := s.get(list+"?cursor="+url.QueryEscape(cursor), as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
			require.Contains(t, p["detail"], "cursor", cursor)
		}
		for _, limit := range []string{"0", "101", "-1", "x", "1.5", "99999999999999999999", "+"} {
			p := s.get(list+"?limit="+limit, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
			require.Contains(t, p["detail"], "limit", limit)
		}
		for query, detail := range map[string]string{
			"after=" + good: "after", "next=" + good: "next", "before=" + good: "before", "Cursor=" + good: "Cursor",
			"page=2": "page", "=1": "not known",
			"cursor=" + good + "&cursor=" + good: "once", "limit=1&limit=1": "once", "cursor=%zz": "query",
			"cursor=" + good + ";limit=1":    "query",
			strings.Repeat("y", 1000) + "=1": "yyy…",
		} {
			p := s.get(list+"?"+query, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
			require.Contains(t, p["detail"], detail, query)
		}
	}
}

// An order that was shown as paid stays so in every call while Postgres does not answer.
func TestShownVersionNeverDecreases(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	bought := s.buy(sale, "", as("ada"), withKey("k"))
	path := bought.header.Get("Location")
	s.recordReserved(sale, "ada", "")
	s.pay(path, "pi_1", as("ada")).is(http.StatusOK)
	unseen, _ := s.confirm(sale, "bob") // in a version that was not shown
	unlock := s.lock("orders")

	for range 3 {
		view := s.get(path, as("ada")).is(http.StatusOK)
		require.Equal(
			t,
			[]any{"paid", 3.0, "pi_1", true},
			[]any{view["status"], view["version"], view["payment_reference"], view["may_be_behind"]},
		)
		s.get(path, as("bob")).isProblem(http.StatusNotFound, "order-not-found")
		view = s.get(unseen, as("bob")).is(http.StatusOK)
		require.Equal(t, []any{"reserved", 1.0, true}, []any{view["status"], view["version"], view["may_be_behind"]})
		again := s.buy(sale, "", as("ada"), withKey("k"))
		view = again.is(http.StatusAccepted)
		require.Equal(t, "paid", view["status"])
		require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
		require.Equal(t, bought.json()["receipt"], view["receipt"])
	}
	w := s.watch(path+"/events", as("ada"))
	require.Equal(t, true, w.receivesStatus(order.StatusPaid, 3)["may_be_behind"])
	w.receivesEnd()

	unlock()
	testkit.Eventually(t, 30*time.Second, "Postgres is queried again", func() bool {
		return s.get(unseen, as("bob")).is(http.StatusOK)["status"] == "confirmed"
	})
	require.NotContains(t, s.get(path, as("ada")).is(http.StatusOK), "may_be_behind")
	require.NotContains(t, s.get("/v1/orders", as("ada")).body, "may_be_behind")
}

// slowFor takes longer to look up one order than any request waits.
type slowFor struct {
	Orders
	pool  *pgxpool.Pool
	order uuid.UUID
	slow  atomic.Int64
}

func (o *slowFor) Order(ctx context.Context, id uuid.UUID) (order.Order, error) {
	if id != o.order {
		return o.Orders.Order(ctx, id)
	}
	o.slow.Add(1)
	_, err := o.pool.Exec(ctx, "SELECT pg_sleep(60)")
	return order.Order{}, err
}

// Postgres answers other queries, though none was in progress at the time.
func TestSlowQueryDoesNotOpenBreaker(t *testing.T) {
	t.Parallel()
	slow := new(slowFor)
	s := openShop(t, func(c *Config) {
		slow.Orders = c.Orders
		c.Orders = slow
	})
	slow.pool = s.pool
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	late, id := s.confirm(sale, "bob")
	slow.order = id
	for range 2 {
		view := s.get(late, as("bob")).is(http.StatusOK)
		require.Equal(t, []any{"reserved", true}, []any{view["status"], view["may_be_behind"]})
		view = s.get(path, as("ada")).is(http.StatusOK)
		require.Equal(t, []any{"confirmed", nil}, []any{view["status"], view["may_be_behind"]})
	}
	require.EqualValues(t, 2, slow.slow.Load())
}

// Queries time out while they wait for a connection.
func TestExhaustedPoolDoesNotOpenBreaker(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	var held []*pgxpool.Conn
	for range s.pool.Config().MaxConns {
		conn, err := s.pool.Acquire(t.Context())
		require.NoError(t, err)
		t.Cleanup(conn.Release) // the pool could not close otherwise
		held = append(held, conn)
	}
	view := s.get(path, as("ada")).is(http.StatusOK)
	require.Equal(t, []any{"reserved", true}, []any{view["status"], view["may_be_behind"]})
	for _, conn := range held {
		conn.Release()
	}
	view = s.get(path, as("ada")).is(http.StatusOK)
	require.Equal(t, []any{"confirmed", nil}, []any{view["status"], view["may_be_behind"]})
}

// While Postgres does not answer, an order that may have been shown in a later version is not shown.
func TestForgottenVersionIsUnavailable(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	require.Equal(t, "confirmed", s.get(path, as("ada")).is(http.StatusOK)["status"])
	never, _ := s.order(sale, "bob")
	for _, user := range []string{"cid", "dan", "eve"} {
		s.buy(sale, "", as(user), withKey("k")).is(http.StatusAccepted)
		s.recordReserved(sale, user, "")
	}
	require.Equal(
		t, "confirmed", s.buy(sale, "", as("cid"), withKey("k"), prefer("wait=20")).is(http.StatusCreated)["status"],
	)
	for range 3 * versionsMin {
		s.server.orders.versions.latest(order.Order{ID: uuid.Must(uuid.NewV7()), Version: 2})
	}
	require.Equal(
		t, "confirmed", s.buy(sale, "", as("eve"), withKey("k")).is(http.StatusAccepted)["status"], "Postgres is queried",
	)
	s.lock("orders")
	for _, forgotten := range []reply{
		s.get(path, as("ada")), s.get(never, as("bob")),
		s.buy(sale, "", as("cid"), withKey("k")), s.buy(sale, "", as("dan"), withKey("k"), prefer("wait=1")),
	} {
		forgotten.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
		require.Equal(t, "1", forgotten.header.Get("Retry-After"))
	}
}

func TestOrderVersionsAreBounded(t *testing.T) {
	t.Parallel()
	m := newOrderVersions()
	shown := func(version int) order.Order {
		return order.Order{ID: uuid.Must(uuid.NewV7()), Version: version}
	}
	reserved, first := shown(1), shown(2)
	require.Equal(t, reserved, m.latest(reserved))
	require.Empty(t, m.young)
	require.Equal(t, first, m.latest(first))
	earlier := first
	earlier.Version = 1
	require.Equal(t, first, m.latest(earlier))
	for range versionsMin {
		m.latest(shown(2))
	}
	_, known := m.recall(first.ID)
	require.True(t, known, "the order is in the old generation")
	require.False(t, m.mayHaveForgotten(reserved.ID), "no generation was forgotten yet")
	for range versionsMin {
		m.latest(shown(2))
		m.latest(first) // an order that is shown again stays
	}
	require.Len(t, m.old, versionsMin)
	require.LessOrEqual(t, len(m.young), versionsMin)
	_, known = m.recall(first.ID)
	require.True(t, known)
	require.False(t, m.mayHaveForgotten(first.ID))
	require.True(t, m.mayHaveForgotten(reserved.ID))
	m.oldSince = m.oldSince.Add(-2 * reservation.ClockMargin)
	require.False(t, m.mayHaveForgotten(shown(1).ID), "the order is younger than the old generation")
}
