package ingress

import (
	"context"
	"net/http"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

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
