package ingress

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
)

func withPlainReader(c *Config) { c.PlainReader = true }

// plainPurchases is how many purchases were read in front of net/http.
func (s *shop) plainPurchases() int {
	return int(testutil.ToFloat64(s.server.metrics.plainPurchases))
}

// caller is a connection on which a test writes HTTP by hand.
type caller struct {
	t *testing.T
	net.Conn
	answers *bufio.Reader
}

func (s *shop) call(t *testing.T) caller {
	t.Helper()
	conn := s.dial()
	return caller{t, conn, bufio.NewReader(conn)}
}

func (c caller) sends(text string) {
	c.t.Helper()
	_, err := io.WriteString(c, text)
	require.NoError(c.t, err)
}

func (c caller) receives(status int) *http.Response {
	c.t.Helper()
	res, err := http.ReadResponse(c.answers, nil)
	require.NoError(c.t, err)
	_, err = io.Copy(io.Discard, res.Body)
	require.NoError(c.t, err)
	require.NoError(c.t, res.Body.Close())
	require.Equal(c.t, status, res.StatusCode)
	return res
}

func (c caller) receivesEnd() {
	c.t.Helper()
	_, err := c.answers.ReadByte()
	require.ErrorIs(c.t, err, io.EOF)
}

const livez = "GET /livez HTTP/1.1\r\nHost: shop\r\n\r\n"

func TestPlainConnStaysWithNetHTTPAfterAnotherRequest(t *testing.T) {
	t.Parallel()
	s := openShop(t, withPlainReader)
	sale := s.sale(reservation.Terms{Stock: 10})
	buy := func(user string) string { return s.head(sale, user, "Content-Length: 2\r\n") + "{}" }
	c := s.call(t)
	for _, user := range []string{"ann", "bob"} {
		c.sends(buy(user))
		c.receives(http.StatusAccepted)
	}
	require.Equal(t, 2, s.plainPurchases())
	c.sends(livez)
	c.receives(http.StatusOK)
	c.sends(buy("cid"))
	c.receives(http.StatusAccepted)
	require.Equal(t, 2, s.plainPurchases())

	c = s.call(t)
	c.sends(buy("dan") + livez + buy("eve"))
	c.receives(http.StatusAccepted)
	c.receives(http.StatusOK)
	c.receives(http.StatusAccepted)
	require.Equal(t, 3, s.plainPurchases())
	require.EqualValues(t, 5, s.stock(sale).Orders)
	require.Contains(t, s.get("/metrics").body,
		`stampede_http_requests_total{route="POST /v1/sales/:sale/orders",status="2xx"} 5`+"\n")
}

func TestPlainReaderVerifiesTokens(t *testing.T) {
	t.Parallel()
	s := openShop(t, withPlainReader, withJWT)
	sale := s.sale(reservation.Terms{Stock: 10})
	c := s.call(t)
	for token, status := range map[string]int{
		sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims()):             http.StatusAccepted,
		sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims(expiredClaim)): http.StatusUnauthorized,
		"nonsense": http.StatusUnauthorized,
	} {
		c.sends("POST " + ordersOf(sale) + " HTTP/1.1\r\nHost: shop\r\nAuthorization: Bearer " + token +
			"\r\nContent-Length: 0\r\n\r\n")
		c.receives(status)
	}
	require.Equal(t, 3, s.plainPurchases())
	require.Contains(t, s.stock(sale).Buyers, "ada")
}

func TestPlainReaderIsOff(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.PlainReader = false })
	sale := s.sale(reservation.Terms{Stock: 10})
	c := s.call(t)
	c.sends(s.head(sale, "ann", "Content-Length: 0\r\n"))
	c.receives(http.StatusAccepted)
	require.Zero(t, s.plainPurchases())
}

func TestPlainReaderIsOffIfBuyerHeaderHasAnotherMeaning(t *testing.T) {
	t.Parallel()
	s := openShop(t, withPlainReader, func(c *Config) { c.AuthHeader = "Idempotency-Key" })
	sale := s.sale(reservation.Terms{Stock: 10})
	c := s.call(t)
	c.sends("POST " + ordersOf(sale) + " HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: ann\r\nContent-Length: 0\r\n\r\n")
	c.receives(http.StatusAccepted)
	require.Zero(t, s.plainPurchases())
}

// heldReservations decides no purchase before it may go on, and panics for some buyers.
type heldReservations struct {
	Reservations
	entered, goOn chan struct{}
}

func (h heldReservations) Reserve(ctx context.Context, r reservation.Request) (reservation.Answer, error) {
	switch r.User {
	case "panics":
		panic("on purpose")
	case "aborts":
		panic(http.ErrAbortHandler)
	case "held":
		h.entered <- struct{}{}
		<-h.goOn
	}
	return h.Reservations.Reserve(ctx, r)
}

func (h heldReservations) awaitEntered(t *testing.T) {
	t.Helper()
	select {
	case <-h.entered:
	case <-time.After(20 * time.Second):
		t.Fatal("the purchase is not decided")
	}
}

func TestPlainReaderRecoversFromPanics(t *testing.T) {
	t.Parallel()
	s := openShop(t, withPlainReader, func(c *Config) { c.Reservations = heldReservations{Reservations: c.Reservations} })
	sale := s.sale(reservation.Terms{Stock: 10})
	c := s.call(t)
	c.sends(s.head(sale, "panics", "Content-Length: 0\r\n"))
	c.receives(http.StatusInternalServerError)
	c.sends(s.head(sale, "ann", "Content-Length: 0\r\n"))
	c.receives(http.StatusAccepted)
	c.sends(s.head(sale, "aborts", "Content-Length: 0\r\n"))
	c.receivesEnd()
	require.Equal(t, 3, s.plainPurchases())
	require.Zero(t, s.server.inFlight.taken())
}

// Purchases in progress and connections whose request has begun are served to their end; idle ones are closed.
func TestStopFinishesPlainPurchases(t *testing.T) {
	t.Parallel()
	held := heldReservations{entered: make(chan struct{}), goOn: make(chan struct{})}
	s, stop, ended := runShop(t, withPlainReader, func(c *Config) {
		held.Reservations = c.Reservations
		c.Reservations = held
	})
	sale := s.sale(reservation.Terms{Stock: 10})
	bought := func(user string) caller {
		c := s.call(t)
		c.sends(s.head(sale, user, "Content-Length: 0\r\n"))
		c.receives(http.StatusAccepted)
		return c
	}
	busy := s.call(t)
	busy.sends(s.head(sale, "held", "Content-Length: 0\r\n"))
	held.awaitEntered(t)
	idle, half := bought("ann"), bought("bob")
	text := s.head(sale, "cid", "Content-Length: 0\r\n")
	half.sends(text[:30])
	stop()
	idle.receivesEnd()
	half.sends(text[30:])
	require.True(t, half.receives(http.StatusAccepted).Close)
	half.receivesEnd()
	require.Empty(t, ended)
	close(held.goOn)
	busy.receives(http.StatusAccepted)
	busy.receivesEnd()
	require.NoError(t, <-ended)
	require.EqualValues(t, 4, s.stock(sale).Orders)
}

func TestIdlePlainConnsMakeRoom(t *testing.T) {
	t.Parallel()
	s := openShop(t, withPlainReader, func(c *Config) { c.MaxConnections = 2 })
	sale := s.sale(reservation.Terms{Stock: 10})
	callers := make([]caller, 0, 3)
	for _, user := range []string{"ann", "bob", "cid"} {
		c := s.call(t)
		c.sends(s.head(sale, user, "Content-Length: 0\r\n"))
		c.receives(http.StatusAccepted)
		callers = append(callers, c)
	}
	// Either of the first two: they may become idle at the same time.
	require.EqualValues(t, 1, s.server.connections.Load().Evicted())
	require.Equal(t, 2, s.server.connections.Load().Open())
	for _, c := range callers {
		require.NoError(t, c.Close())
	}
	testkit.Eventually(t, 30*time.Second, "the connections are closed", func() bool {
		return s.server.connections.Load().Open() == 0
	})
}

// A client that connects and is silent, or begins a request and does not end it, is cut off.
func TestPlainConnIsCutOff(t *testing.T) {
	t.Parallel()
	s := openShop(t, withPlainReader)
	sale := s.sale(reservation.Terms{Stock: 10})
	text := s.head(sale, "bob", "Content-Length: 2\r\n") + "{}"
	for _, c := range []struct {
		name, text    string
		answers       bool
		least, most   time.Duration
		afterPurchase bool
	}{
		{name: "silent", least: readHeaderTimeout, most: readTimeout},
		{name: "half a head", text: text[:30], least: readHeaderTimeout, most: readTimeout, afterPurchase: true},
		{name: "half a body", text: text[:len(text)-1], answers: true, least: readTimeout, most: 2 * readTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			conn, began := s.call(t), time.Now()
			if c.afterPurchase {
				conn.sends(s.head(sale, "ann", "Content-Length: 0\r\n"))
				conn.receives(http.StatusAccepted)
				began = time.Now()
			}
			conn.sends(c.text)
			if c.answers {
				require.True(t, conn.receives(http.StatusBadRequest).Close)
			}
			_, err := io.ReadAll(conn.answers) // net/http may answer half a line
			require.NoError(t, err)
			require.GreaterOrEqual(t, time.Since(began), c.least-c.least/10)
			require.Less(t, time.Since(began), c.most)
		})
	}
}

// deadlineConn checks that each call has the deadline that it should have.
type deadlineConn struct {
	*scriptedConn
	t                   *testing.T
	reads, writes       int
	readBy, writeBy     time.Time
	readsSet, writesSet int
}

func (c *deadlineConn) SetReadDeadline(by time.Time) error {
	c.readBy, c.readsSet = by, c.readsSet+1
	return nil
}

func (c *deadlineConn) SetWriteDeadline(by time.Time) error {
	c.writeBy, c.writesSet = by, c.writesSet+1
	return nil
}

func (c *deadlineConn) Read(p []byte) (int, error) {
	wait, slack := idleTimeout, deadlineSlack
	if c.reads++; c.reads == 1 {
		wait, slack = readHeaderTimeout, 0
	}
	left := time.Until(c.readBy)
	assert.Greater(c.t, left, wait-time.Second)
	assert.LessOrEqual(c.t, left, wait+slack)
	return c.scriptedConn.Read(p)
}

func (c *deadlineConn) Write(p []byte) (int, error) {
	c.writes++
	left := time.Until(c.writeBy)
	assert.Greater(c.t, left, writeTimeout-time.Second)
	assert.LessOrEqual(c.t, left, writeTimeout+deadlineSlack)
	return c.scriptedConn.Write(p)
}

func TestPlainConnKeepsDeadlines(t *testing.T) {
	t.Parallel()
	both := newBothServers(t)
	c := &deadlineConn{t: t, scriptedConn: both.newScriptedConn([]byte(plainHead()+plainJSON), 0)}
	for range 99 {
		c.parts = append(c.parts, []byte(plainHead()+plainJSON))
	}
	both.front.serve(c)
	require.Equal(t, 100, c.writes)
	require.Equal(t, 101, c.reads)
	require.LessOrEqual(t, c.readsSet, 10, "deadlines move once a second")
	require.LessOrEqual(t, c.writesSet, 10)
}
