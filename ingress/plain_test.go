package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/internal/forwarded"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// TestPlainPurchasesAreAnsweredAsOthers compares a server that reads plain purchases in front of net/http with one that
// does not: all that a purchase needs of a server is the same. How they are read is compared in internal/accept.
func TestPlainPurchasesAreAnsweredAsOthers(t *testing.T) {
	t.Parallel()
	token := func(change ...func(jwt.MapClaims)) string {
		return "Authorization: Bearer " + sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims(change...))
	}
	byVerdict := []string{"", "X-User-ID: a b"}
	for user := range decidedByName {
		byVerdict = append(byVerdict, "X-User-ID: "+user, "X-User-ID: "+user+"\r\nIdempotency-Key: k")
	}
	byOrigin := []string{
		"X-User-ID: ada", "X-User-ID: ada\r\nOrigin: https://shop.example", "X-User-ID: ada\r\nOrigin: https://evil.example",
	}
	for name, c := range map[string]struct {
		headers []string
		change  func(*Config)
		stopped bool
	}{
		"verdicts":     {byVerdict, func(*Config) {}, false},
		"tokens":       {[]string{token(), token(expiredClaim), "Authorization: Bearer x", ""}, withJWT, false},
		"some origins": {byOrigin, func(c *Config) { c.CORSOrigins = []string{"https://shop.example"} }, false},
		"any origin":   {byOrigin, func(c *Config) { c.CORSOrigins = []string{"*"} }, false},
		"users' rate": {
			[]string{"X-User-ID: ada", "X-User-ID: ada", "X-User-ID: bob"},
			func(c *Config) { c.UserLimit = Limit{Rate: .001, Burst: 1} }, false,
		},
		"addresses' rate": {
			[]string{
				"X-User-ID: a\r\nX-Forwarded-For: 192.0.2.1", "X-User-ID: b\r\nX-Forwarded-For: 192.0.2.1",
				"X-User-ID: c\r\nX-Forwarded-For: 192.0.2.2",
			},
			func(c *Config) {
				c.AddressLimit = Limit{Rate: .001, Burst: 1}
				c.TrustedProxies = forwarded.Proxies{netip.MustParsePrefix("127.0.0.0/8")}
			}, false,
		},
		"stopping": {[]string{"X-User-ID: ada"}, func(*Config) {}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var answers [2][]string
			for i, plain := range []bool{true, false} {
				s := openStub(t, func(config *Config) { config.PlainReader = plain; c.change(config) })
				s.server.stopping.Store(c.stopped)
				for _, header := range c.headers {
					answers[i] = append(answers[i], s.answerTo(t, header, "{}"), s.answerTo(t, header, `{"quantity":0}`))
				}
				want := 0
				if plain {
					want = len(answers[i])
				}
				require.EqualValues(t, want, testutil.ToFloat64(s.server.metrics.plainPurchases))
			}
			require.Equal(t, answers[1], answers[0])
		})
	}
}

func TestPanicInPlainPurchaseIsAnswered(t *testing.T) {
	t.Parallel()
	s := openStub(t, func(c *Config) { c.PlainReader = true })
	c := s.dial()
	c.sends(s.head(uuid.UUID{6: 0x70}, "panics", "Content-Length: 0\r\n"))
	c.receives().isProblem(http.StatusInternalServerError, "internal-error")
	c.sends(s.head(uuid.UUID{6: 0x70}, "ada", "Content-Length: 0\r\n"))
	c.receives().is(http.StatusAccepted)
	c.sends(s.head(uuid.UUID{6: 0x70}, "aborts", "Content-Length: 0\r\n"))
	c.receivesEnd()
	require.EqualValues(t, 3, testutil.ToFloat64(s.server.metrics.plainPurchases))
	require.Zero(t, s.server.inFlight.taken())
}

// The connection is closed, though its purchase goes on.
func TestStopClosesPlainConnAfterDrainTimeout(t *testing.T) {
	t.Parallel()
	held := stubReservations{entered: make(chan struct{}), goOn: make(chan struct{})}
	s := prepareStub(t, func(c *Config) {
		c.PlainReader, c.Reservations, c.DrainTimeout = true, held, 100*time.Millisecond
	})
	stop, ended := s.run()
	defer close(held.goOn)
	c := s.dial()
	c.sends(s.head(uuid.UUID{6: 0x70}, "held", "Content-Length: 0\r\n"))
	select {
	case <-held.entered:
	case <-time.After(20 * time.Second):
		t.Fatal("the purchase is not decided")
	}
	stop()
	require.ErrorContains(t, <-ended, "1 requests were not finished after 100ms")
	c.receivesEnd()
}

func TestIdleConnsMakeRoom(t *testing.T) {
	t.Parallel()
	s := openStub(t, func(c *Config) { c.PlainReader, c.MaxConnections = true, 2 })
	for _, user := range []string{"ada", "bob", "cid"} {
		c := s.dial()
		c.sends(s.head(uuid.UUID{6: 0x70}, user, "Content-Length: 0\r\n"))
		_ = c.receives()
	}
	require.EqualValues(t, 1, s.server.connections.Load().Evicted())
	require.Equal(t, 2, s.server.connections.Load().Open())
}

// openStub runs a server without Redis and Postgres, where the names of buyers decide.
func openStub(t *testing.T, change func(*Config)) *shop {
	t.Helper()
	s := prepareStub(t, change)
	s.run()
	return s
}

// prepareStub makes the server without listening.
func prepareStub(t *testing.T, change func(*Config)) *shop {
	t.Helper()
	config := Config{
		Addr: "127.0.0.1:0", Reservations: stubReservations{}, Sales: stubSales{}, Orders: stubOrders{},
		Postgres: stubOrders{}, Auth: AuthHeader, ReceiptSecret: "a secret that is the same for both",
		Logger: slog.New(slog.DiscardHandler),
	}
	change(&config)
	server, err := New(config)
	require.NoError(t, err)
	t.Cleanup(server.Close)
	return &shop{t: t, server: server}
}

// answerTo returns the answer to a purchase on a connection of its own, without its date.
func (s *shop) answerTo(t *testing.T, header, body string) string {
	t.Helper()
	if header != "" {
		header += "\r\n"
	}
	c := s.dial()
	c.sends(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: shop\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s",
		ordersPath(uuid.UUID{6: 0x70}), header, len(body), body))
	r := c.receives()
	require.Len(t, r.header["Date"], 1)
	delete(r.header, "Date")
	return fmt.Sprint(r.status, r.header, r.closes, r.body)
}

// decidedByName has the verdict for each buyer; others have reserved.
var decidedByName = map[string]reservation.Verdict{
	"ada": reservation.Reserved, "bob": reservation.SoldOut, "cid": reservation.AlreadyPurchased,
	"dan": reservation.Paused, "eve": reservation.Replayed, "gus": reservation.OrderEnded, "fay": "",
}

// stubReservations decide by the name of the buyer, always in the same way. They tell entered of the buyer "held", and
// decide no such purchase before goOn.
type stubReservations struct {
	Reservations
	entered, goOn chan struct{}
}

func (stubReservations) Writable(context.Context) error { return nil }

func (s stubReservations) Reserve(_ context.Context, r reservation.Request) (reservation.Answer, error) {
	switch r.User {
	case "panics":
		panic("on purpose")
	case "aborts":
		panic(http.ErrAbortHandler)
	case "held":
		close(s.entered)
		<-s.goOn
	}
	verdict, known := decidedByName[r.User]
	switch {
	case !known:
		verdict = reservation.Reserved
	case verdict == "":
		return reservation.Answer{}, reservation.ErrOutcomeUnknown
	}
	return reservation.Answer{Verdict: verdict, Status: order.StatusCancelled, Reservation: order.Reservation{
		OrderID:  uuid.NewSHA1(r.Sale, fmt.Append(nil, r.User, " ", r.IdempotencyKey)),
		Quantity: r.Quantity, Epoch: 1, Sequence: 7, ReservedAt: time.UnixMilli(1_700_000_000_123),
	}}, nil
}

// stubOrders are a Postgres without orders.
type stubOrders struct{ Orders }

func (stubOrders) Ping(context.Context) error                                     { return nil }
func (stubOrders) FindOrders(context.Context, []uuid.UUID) ([]order.Order, error) { return nil, nil }

// stubSales are no sales.
type stubSales struct{ Sales }

func (stubSales) Followed(context.Context, []uuid.UUID, int) ([]uuid.UUID, error) {
	return nil, errors.New("there is no Redis")
}

func (stubSales) CountSales(context.Context, []uuid.UUID) ([]catalog.CountResult, error) {
	return nil, errors.New("there is no Redis")
}
