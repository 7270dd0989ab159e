package ingress

import (
	"context"
	"net/http"
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
