package ingress

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
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

func TestSaleGoesOnWithoutPostgres(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, servers{testkit.RedisURL(t), postgres.URL, testkit.Keys(t)})
	sale := s.sale(reservation.Terms{Stock: 2})
	earlier, _ := s.order(sale, "ada")
	require.Equal(t, "up", s.get("/readyz").is(http.StatusOK)["postgres"])

	postgres.StopImmediate()
	path, _ := s.order(sale, "bob")
	s.buy(sale, "", as("eve")).isProblem(http.StatusConflict, "sold-out")
	for range 20 {
		require.Equal(t, "reserved", s.get(path, as("bob")).is(http.StatusOK)["status"])
		require.Equal(t, "reserved", s.get(earlier, as("ada")).is(http.StatusOK)["status"])
	}
	// The order may be in Postgres, so the answer is not "not found".
	r := s.get("/v1/orders/"+uuid.NewString(), as("ada"))
	r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	require.Equal(t, "1", r.header.Get("Retry-After"))
	for _, text := range []string{"postgres", "dial", "127.0.0.1", "SQLSTATE"} {
		require.NotContains(t, r.body, text)
	}
	s.get("/v1/sales/"+sale.String()).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	s.post("/v1/sales", `{"name":"x","stock":1}`, operator).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	ready := s.get("/readyz").is(http.StatusOK)
	require.Equal(t, []any{"ready", "up", "down"}, []any{ready["status"], ready["redis"], ready["postgres"]})

	require.NoError(t, postgres.Restart(t.Context()))
	testkit.Eventually(t, 30*time.Second, "Postgres is queried again", func() bool {
		return s.get("/v1/orders/"+uuid.NewString(), as("ada")).status == http.StatusNotFound
	})
}

func TestIngressWithoutRedis(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := openShopOn(t, servers{own.URL, testkit.DatabaseURL(t), reservation.Keys{Prefix: "stampede", Partitions: 1}})
	sale := s.sale(reservation.Terms{Stock: 10})
	path, id := s.order(sale, "ada")
	s.record(id, sale, "ada", order.StatusConfirmed, "")
	own.Kill()

	r := s.buy(sale, "", as("bob"))
	r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	require.Equal(t, "1", r.header.Get("Retry-After"))
	for _, text := range []string{"redis", "dial", "refused", "127.0.0.1"} {
		require.NotContains(t, r.body, text)
	}
	require.Equal(t, "confirmed", s.get(path, as("ada")).is(http.StatusOK)["status"])
	s.get(orderPath(order.NewOrderID(sale)), as("ada")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	p := s.get("/readyz").isProblem(http.StatusServiceUnavailable, "not-ready")
	require.Equal(t, []any{"down", "up"}, []any{p["redis"], p["postgres"]})
	s.get("/livez").is(http.StatusOK)

	require.NoError(t, own.Restart(t.Context()))
	s.buy(sale, "", as("bob")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	testkit.VerifyServer(t, s.pool, s.store, 0)
	testkit.Eventually(t, 30*time.Second, "the sale goes on", func() bool {
		return s.buy(sale, "", as("bob")).status == http.StatusAccepted
	})
	s.get("/readyz").is(http.StatusOK)
}
