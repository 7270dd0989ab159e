package ingress

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func (s *shop) pay(path, reference string, headers ...reqHeader) reply {
	s.t.Helper()
	return s.post(path+"/pay", fmt.Sprintf(`{"reference":%q}`, reference), headers...)
}

func (s *shop) cancel(path string, headers ...reqHeader) reply {
	s.t.Helper()
	return s.post(path+"/cancel", "", headers...)
}

// overdue moves the order's deadline so far into the past that no outage extends it.
func (s *shop) overdue(id uuid.UUID) {
	s.t.Helper()
	tag, err := s.pool.Exec(
		s.t.Context(), `UPDATE orders SET due = pay_clock() - interval '1 year' WHERE id = $1 AND due > pay_clock()`, id,
	)
	require.NoError(s.t, err)
	require.EqualValues(s.t, 1, tag.RowsAffected())
}

func TestPayMarksOrderAsPaid(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: 10 * time.Minute})
	path, id := s.order(sale, "ada")
	for _, early := range []reply{s.pay(path, "r-1", as("ada")), s.cancel(path, as("ada"))} {
		early.isProblem(http.StatusConflict, "order-not-confirmed")
		require.Equal(t, "1", early.header.Get("Retry-After"))
	}
	require.NotContains(t, s.get(path, as("ada")).is(http.StatusOK), "expires_at")

	s.startWorker()
	confirmed := s.awaitStatus(path, "ada", order.StatusConfirmed)
	// The first heartbeat moves the deadline by the time since the database was created.
	testkit.Eventually(t, 20*time.Second, "there are ten minutes to pay", func() bool {
		expires, err := time.Parse(
			"2006-01-02T15:04:05.000Z", s.get(path, as("ada")).is(http.StatusOK)["expires_at"].(string),
		)
		require.NoError(t, err)
		return time.Until(expires.Add(-10*time.Minute)).Abs() < time.Minute
	})
	require.NotContains(t, confirmed, "payment_reference")
	s.awaitUnits(sale, 9, 1, 0)

	first := s.pay(path, "r-1", as("ada"))
	paid := first.is(http.StatusOK)
	require.Equal(t, map[string]any{
		"order_id":          id.String(),
		"kind":              "order",
		"sale_id":           sale.String(),
		"user_id":           "ada",
		"quantity":          1.0,
		"status":            "paid",
		"version":           3.0,
		"reserved_at":       confirmed["reserved_at"],
		"updated_at":        paid["paid_at"],
		"paid_at":           paid["paid_at"],
		"payment_reference": "r-1",
	}, paid)
	require.Equal(t, first.body, s.pay(path, "r-1", as("ada")).body)
	require.Equal(t, first.body, s.get(path, as("ada")).body)
	s.awaitUnits(sale, 9, 0, 1)

	second := s.pay(path, "r-2", as("ada")).isProblem(http.StatusConflict, "already-paid")
	require.Equal(t, "r-1", second["payment_reference"])
	require.Contains(t, second["detail"], "Refund")
	s.pay(path, "r-2", as("bob")).isProblem(http.StatusNotFound, "order-not-found")
	require.Contains(t, s.cancel(path, as("ada")).isProblem(http.StatusConflict, "illegal-transition")["detail"], "paid")
	require.Equal(t, first.body, s.get(path, as("ada")).body)
}

// An order cannot be paid after its deadline, before and after a worker has expired it.
func TestPayRejectsExpiredOrder(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 1, PaymentWindow: 10 * time.Minute})
	path, id := s.confirm(sale, "ada")
	s.overdue(id)
	s.pay(path, "r-1", as("ada")).isProblem(http.StatusGone, "order-expired")
	require.Equal(t, "confirmed", s.get(path, as("ada")).is(http.StatusOK)["status"])
	s.buy(sale, "", as("bob")).isProblem(http.StatusConflict, "sold-out")

	s.startWorker()
	expired := s.awaitStatus(path, "ada", order.StatusExpired)
	require.NotContains(t, expired, "expires_at")
	require.EqualValues(t, 3, expired["version"])
	for _, late := range []reply{s.pay(path, "r-1", as("ada")), s.cancel(path, as("ada"))} {
		late.isProblem(http.StatusGone, "order-expired")
	}
	testkit.Eventually(t, 20*time.Second, "the unit is for sale again", func() bool {
		return s.buy(sale, "", as("bob")).status == http.StatusAccepted
	})
	s.buy(sale, "", as("ada")).isProblem(http.StatusConflict, "sold-out")
}

func TestCancelLetsBuyerPurchaseAgain(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 1, PaymentWindow: 10 * time.Minute})
	path, _ := s.order(sale, "ada")
	s.awaitStatus(path, "ada", order.StatusConfirmed)
	s.buy(sale, "", as("ada")).isProblem(http.StatusConflict, "already-purchased")
	s.buy(sale, "", as("bob")).isProblem(http.StatusConflict, "sold-out")

	first := s.cancel(path, as("ada"))
	cancelled := first.is(http.StatusOK)
	require.Equal(t, []any{"cancelled", 3.0}, []any{cancelled["status"], cancelled["version"]})
	require.NotContains(t, cancelled, "expires_at")
	require.Equal(t, first.body, s.cancel(path, as("ada")).body)
	require.Equal(t, first.body, s.post(path+"/cancel", ` { } `, as("ada")).body)
	require.Contains(
		t, s.pay(path, "r-1", as("ada")).isProblem(http.StatusConflict, "illegal-transition")["detail"], "cancelled",
	)

	var again string
	testkit.Eventually(t, 20*time.Second, "the unit is for sale again", func() bool {
		r := s.buy(sale, "", as("ada"))
		again = r.header.Get("Location")
		return r.status == http.StatusAccepted
	})
	require.NotEqual(t, path, again)
	s.awaitStatus(again, "ada", order.StatusConfirmed)
	s.pay(again, "r-2", as("ada")).is(http.StatusOK)
	require.Equal(t, first.body, s.get(path, as("ada")).body)
	s.awaitUnits(sale, 0, 0, 1)
}

// Its buyer cannot cancel it, and it takes money all the same.
func TestConfirmedIsFinalWithoutPaymentWindow(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	path, _ := s.confirm(s.sale(reservation.Terms{Stock: 1}), "ada")
	before := s.get(path, as("ada"))
	require.NotContains(t, before.is(http.StatusOK), "expires_at")
	p := s.cancel(path, as("ada")).isProblem(http.StatusConflict, "illegal-transition")
	require.Contains(t, p["detail"], "confirmed")
	require.Equal(t, before.body, s.get(path, as("ada")).body)
	require.Equal(t, "paid", s.pay(path, "r-1", as("ada")).is(http.StatusOK)["status"])
}

func TestOrdersOfOthersCannotBeChanged(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 2, PaymentWindow: 10 * time.Minute})
	path, _ := s.confirm(sale, "ada")
	reserved, _ := s.order(sale, "eve")
	before := s.get(path, as("ada"))
	for _, target := range []string{
		path, reserved, orderPath(order.NewOrderID(sale)), orderPath(uuid.New()), orderPath(uuid.Nil), "/v1/orders/x",
		path + "0",
	} {
		s.pay(target, "r-1", as("bob")).isProblem(http.StatusNotFound, "order-not-found")
		s.cancel(target, as("bob")).isProblem(http.StatusNotFound, "order-not-found")
	}
	for _, r := range []reply{s.pay(path, "r-1"), s.cancel(path)} {
		r.isProblem(http.StatusUnauthorized, "unauthorized")
	}
	s.pay(path, "r-1", as("ada"), as("bob")).isProblem(http.StatusBadRequest, "invalid-request")
	require.Equal(t, before.body, s.get(path, as("ada")).body)
}

func TestPayRejectsInvalidReferences(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	path, _ := s.confirm(s.sale(reservation.Terms{Stock: 1, PaymentWindow: 10 * time.Minute}), "ada")
	before := s.get(path, as("ada"))
	for _, reference := range []string{
		`""`, `null`, `"  "`, `1`, `["r"]`, `"r\n1"`, `"r\u00001"`, "\"\xff\"", `"` + strings.Repeat("r", 256) + `"`,
	} {
		p := s.post(path+"/pay", `{"reference":`+reference+`}`, as("ada")).
			isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], "reference", reference)
	}
	for _, action := range []string{"/pay", "/cancel"} {
		s.post(path+action, `{"reason":"x"}`, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
	}
	require.Equal(t, before.body, s.get(path, as("ada")).body)

	longest := strings.Repeat("r", 255)
	require.Equal(t, longest, s.pay(path, longest, as("ada")).is(http.StatusOK)["payment_reference"])
}

// No retry can succeed, so the answer has no Retry-After.
func TestChangeOfDamagedOrderIsInternalError(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	terms := reservation.Terms{Stock: 2, PaymentWindow: 10 * time.Minute}
	damaged, well := s.sale(terms), s.sale(terms)
	first, _ := s.confirm(damaged, "ada")
	second, id := s.confirm(damaged, "bob")
	other, _ := s.confirm(well, "ada")
	_, err := s.pool.Exec(t.Context(), "UPDATE sales SET sold = 0 WHERE id = $1", damaged) // no unit can be released
	require.NoError(t, err)
	_, err = s.pool.Exec(t.Context(), `INSERT INTO order_events
		(order_id, version, type, sale_id, user_id, quantity, occurred_at)
		VALUES ($1, 3, 'OrderPaid', $2, 'bob', 1, now())`, id, damaged)
	require.NoError(t, err)
	for range 3 {
		for _, r := range []reply{s.cancel(first, as("ada")), s.pay(second, "r-1", as("bob"))} {
			require.NotContains(t, r.isProblem(http.StatusInternalServerError, "internal-error")["detail"], "SQL")
			require.Empty(t, r.header.Get("Retry-After"))
		}
		require.Equal(t, "confirmed", s.get(first, as("ada")).is(http.StatusOK)["status"])
	}
	s.pay(other, "r-1", as("ada")).is(http.StatusOK)
}

// Clients that send their bodies slowly do not keep others from paying.
func TestSlowChangeBodiesTakeNoSlot(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.MaxInFlight = 2 })
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: 10 * time.Minute})
	path, _ := s.confirm(sale, "ada")
	for _, action := range []string{"/pay", "/pay", "/pay", "/cancel", "/cancel", "/cancel"} {
		conn := s.dial()
		head := s.head(sale, "ada", "Content-Length: 2\r\nExpect: 100-continue\r\n")
		conn.sends(strings.Replace(head, ordersPath(sale), path+action, 1))
		conn.receivesContinue()
	}
	s.pay(path, "r-1", as("ada")).is(http.StatusOK)
}

// afterFirstTry calls a function between the first attempt to pay and the lookup in Redis.
type afterFirstTry struct {
	Orders
	tries *int
	then  func()
}

func (a afterFirstTry) Pay(ctx context.Context, id uuid.UUID, user, reference string) (order.Order, error) {
	paid, err := a.Orders.Pay(ctx, id, user, reference)
	if *a.tries++; *a.tries == 1 {
		a.then()
	}
	return paid, err
}

// The order is rejected and released between the attempt in Postgres and the lookup in Redis, so both miss
// it.
func TestPayFindsOrderRejectedMeanwhile(t *testing.T) {
	t.Parallel()
	var (
		tries  int
		reject func()
	)
	s := openShop(t, func(c *Config) { c.Orders = afterFirstTry{c.Orders, &tries, func() { reject() }} })
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: 10 * time.Minute})
	path, id := s.order(sale, "ada")
	reject = func() {
		s.record(id, sale, "ada", order.StatusRejected, order.RejectedSoldOut)
		_, err := s.store.Release(t.Context(), []reservation.Release{{SaleID: sale, UserID: "ada", OrderID: id}})
		require.NoError(t, err)
	}
	require.Contains(
		t, s.pay(path, "r-1", as("ada")).isProblem(http.StatusConflict, "illegal-transition")["detail"], "rejected",
	)
	require.Equal(t, 2, tries)
}

// A change that waits for a locked order does not open the breaker.
func TestBlockedChangeDelaysNoOther(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 2, PaymentWindow: 10 * time.Minute})
	path, id := s.confirm(sale, "ada")
	other, _ := s.confirm(sale, "bob")
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", id)
	require.NoError(t, err)

	began := time.Now()
	r := s.pay(path, "r-1", as("ada"))
	detail := r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")["detail"]
	require.Contains(t, detail, "Nothing was done", "it waited for the order and decided nothing")
	require.Equal(t, "1", r.header.Get("Retry-After"))
	require.Less(t, time.Since(began), 10*time.Second)
	require.Equal(t, "confirmed", s.get(path, as("ada")).is(http.StatusOK)["status"])
	s.pay(other, "r-2", as("bob")).is(http.StatusOK)

	require.NoError(t, tx.Rollback(t.Context()))
	s.pay(path, "r-1", as("ada")).is(http.StatusOK)
}

// lossyConn loses the answer to the next commit, or to the next insertion of a sale, after it succeeded.
type lossyConn struct {
	net.Conn
	armed *atomic.Bool
	lost  bool
}

func (c *lossyConn) Write(p []byte) (int, error) {
	asks := bytes.Contains(p, []byte("commit\x00")) || bytes.Contains(p, []byte("INSERT INTO sales"))
	if asks && c.armed.CompareAndSwap(true, false) {
		c.lost = true
	}
	return c.Conn.Write(p)
}

func (c *lossyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.lost && err == nil { // Postgres has committed
		_ = c.Conn.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// shopOnLossyPostgres opens a shop whose next commit gets no answer once it is armed.
func shopOnLossyPostgres(t *testing.T) (*shop, *atomic.Bool) {
	t.Helper()
	armed := new(atomic.Bool)
	s := openShop(t)
	config := s.pool.Config()
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		return &lossyConn{Conn: conn, armed: armed}, err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return openShopOn(t, s.on, func(c *Config) {
		c.Orders, c.Sales = ledger.New(pool), catalog.New(pool, s.store)
	}), armed
}

func TestChangeIsUnknownIfCommitGetsNoAnswer(t *testing.T) {
	t.Parallel()
	s, armed := shopOnLossyPostgres(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	paid, _ := s.confirm(sale, "ada")
	cancelled, _ := s.confirm(sale, "bob")
	key := withKey("restock")
	for name, ask := range map[string]func() reply{
		"pay":     func() reply { return s.pay(paid, "r-1", as("ada")) },
		"cancel":  func() reply { return s.cancel(cancelled, as("bob")) },
		"pause":   func() reply { return s.post("/v1/sales/"+sale.String()+"/pause", "", operator) },
		"restock": func() reply { return s.post("/v1/sales/"+sale.String()+"/restock", `{"units":5}`, operator, key) },
		"create": func() reply {
			return s.post("/v1/sales", `{"name":"once","stock":1}`, operator, withKey("create"))
		},
	} {
		armed.Store(true)
		r := ask()
		require.False(t, armed.Load(), "%s: no answer was lost", name)
		p := r.isProblem(http.StatusServiceUnavailable, "outcome-unknown")
		require.Contains(t, p["detail"], "may have been made", name)
		require.Equal(t, "1", r.header.Get("Retry-After"), name)
		again := ask() // finds the outcome
		require.Less(t, again.status, 300, "%s: %s", name, again.body)
	}
	require.EqualValues(t, 15, s.get("/v1/sales/" + sale.String()).is(http.StatusOK)["stock"])
}
