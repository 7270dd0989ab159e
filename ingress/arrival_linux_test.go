package ingress

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
)

func (c caller) receivesOverloaded(what string) {
	c.t.Helper()
	require.Contains(c.t, c.receives().body, "/problems/overloaded", what)
}

// Each call that changes something is refused if its client has left, however it is served.
func TestNothingIsDoneForClientThatLeft(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	ids := strings.NewReplacer(":sale", sale.String(), ":order", uuid.NewString())
	calls := 0
	for _, route := range s.server.router.echo.Routes() {
		if route.Method != http.MethodPost {
			continue
		}
		calls++
		text := "POST " + ids.Replace(route.Path) + " HTTP/1.1\r\nHost: shop\r\nX-User-ID: ann\r\n" +
			"Authorization: Bearer " + adminToken + "\r\nContent-Type: application/json\r\nContent-Length: "
		c := s.dial()
		testkit.SendLast(t, c.Conn, text+"0\r\n\r\n")
		c.receivesOverloaded(route.Path)
	}
	require.Greater(t, calls, 8)

	for path, body := range map[string]string{
		ordersPath(sale): `{"quantity":1}`, "/v1/sales/" + sale.String() + "/restock": `{"units":10}`,
	} {
		c := s.dial()
		c.sends("POST " + path + " HTTP/1.1\r\nHost: shop\r\nX-User-ID: ann\r\nAuthorization: Bearer " + adminToken +
			"\r\nContent-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n")
		c.receivesContinue()
		testkit.SendLast(t, c.Conn, body+strings.Repeat(" ", 100-len(body)))
		c.receivesOverloaded(path + ", whose body comes later")
	}
	require.Zero(t, s.stock(sale).Orders)
	require.Equal(t, "10", s.stock(sale).Sale["left"])
}

// The age of a request begins with its last byte.
func TestSlowPurchaseIsNotLate(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	c := s.dial()
	c.sends(s.head(sale, "ann", "Content-Length: 2\r\n"))
	<-time.After(reservation.DefaultWaitMax + 100*time.Millisecond)
	c.sends("{}")
	c.receives().is(http.StatusAccepted)
}
