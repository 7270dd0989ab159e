package ingress

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

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
