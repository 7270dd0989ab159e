package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/ratelimit"
	"stampede/reservation"
)

// Reservations decides purchases and knows those that Postgres has not seen yet: *reservation.Store.
type Reservations interface {
	Reserve(ctx context.Context, r reservation.Request) (reservation.Answer, error)
	FindReserved(ctx context.Context, order uuid.UUID, user string) (reservation.Order, error)
	Ping(ctx context.Context) error
}

// Sales is what operators work on: *reservation.Catalog.
type Sales interface {
	CreateOnce(ctx context.Context, terms reservation.Terms, idempotencyKey string) (sale reservation.Standing, replayed bool, err error)
	CountPage(ctx context.Context, after uuid.UUID, limit int) ([]reservation.Counted, error)
	CountSales(ctx context.Context, sales []uuid.UUID) ([]reservation.Counted, error)
	Pause(ctx context.Context, sale uuid.UUID) (reservation.Standing, error)
	Resume(ctx context.Context, sale uuid.UUID) (reservation.Standing, error)
	End(ctx context.Context, sale uuid.UUID) (reservation.Standing, error)
	Restock(ctx context.Context, sale uuid.UUID, units int64, idempotencyKey string) (reservation.Standing, error)
}

// Orders is the orders that are in Postgres: *fulfillment.Ledger. The error for one that is not there
// is reservation.ErrOrderNotFound. But for those that are named here, every other error means that
// Postgres could not be asked.
type Orders interface {
	Order(ctx context.Context, id uuid.UUID) (reservation.Order, error)
	// FindOrders returns those of the orders that are there.
	FindOrders(ctx context.Context, ids []uuid.UUID) ([]reservation.Order, error)
	// Fate returns the order of a receipt, also one that is not there and never will be: it is voided.
	Fate(ctx context.Context, r reservation.Receipt) (reservation.Order, error)
	// ReceiptSecret is the secret for receipts that all ingresses share, unless they were given one.
	ReceiptSecret(ctx context.Context) ([]byte, error)
	// OrdersOf lists a user's orders, newest first: those older than before, or the newest if it is zero.
	OrdersOf(ctx context.Context, user string, before uuid.UUID, limit int) ([]reservation.Order, error)
	// Pay and Cancel change an order and may be repeated. To another user than the order's it is not
	// there. Their errors are reservation.ErrIllegalTransition, reservation.ErrOrderExpired, and
	// reservation.ErrOrderDamaged if Postgres refuses the change whenever it is asked.
	Pay(ctx context.Context, order uuid.UUID, user, reference string) (reservation.Order, error)
	Cancel(ctx context.Context, order uuid.UUID, user string) (reservation.Order, error)
}

// AwaitedOrders is the orders that purchases ask for: *fulfillment.Ledger. Its methods are those of Orders.
type AwaitedOrders interface {
	FindOrders(ctx context.Context, ids []uuid.UUID) ([]reservation.Order, error)
	Fate(ctx context.Context, r reservation.Receipt) (reservation.Order, error)
}

// Pinger tells whether a server answers.
type Pinger interface {
	Ping(ctx context.Context) error
}

// AuthMode is how a buyer says who they are.
type AuthMode string

const (
	// AuthJWT takes the subject of a signed bearer token.
	AuthJWT AuthMode = "jwt"
	// AuthHeader believes a header. It is for development, and for a gateway in front that has
	// authenticated the buyer and overwrites the header on every request.
	AuthHeader AuthMode = "header"
)

const (
	defaultAddr         = ":8080"
	defaultAuthHeader   = "X-User-ID"
	defaultMaxInFlight  = 4096
	defaultMaxWaiting   = 20_000
	defaultMaxStreams   = 10_000
	defaultDrainTimeout = 10 * time.Second

	// minSecretBytes is what RFC 7518, section 3.2, asks of a key for HS256.
	minSecretBytes = 32
)

// Config is what a Server needs. Reservations, Sales, Orders, Postgres and Auth are required.
type Config struct {
	// Addr is where to listen, host:port (":8080"). Listener, when given, is used instead.
	Addr     string
	Listener net.Listener

	Reservations Reservations
	Sales        Sales
	Orders       Orders
	// AwaitedOrders, when given, is what purchases ask, which wait or are repeated, instead of Orders: on connections of their
	// own, so that purchases take none from buyers who pay, cancel, or look at their orders.
	AwaitedOrders AwaitedOrders
	// Postgres tells whether orders can be asked for, on a connection that nobody else uses: *fulfillment.Ledger. While it
	// does not answer, no request waits for it. It is reported by /readyz; readiness does not depend on it once the secret
	// for receipts is known.
	Postgres Pinger

	Auth AuthMode
	// AuthHeader is the header that mode "header" believes ("X-User-ID").
	AuthHeader string
	// Mode "jwt" takes exactly one of the two: a secret for HS256, of 32 bytes at least, or the URL
	// of a JSON Web Key Set with public keys.
	JWTSecret string
	JWKSURL   string
	// JWTIssuer and JWTAudience are compared with the token's iss and aud where they are not empty.
	JWTIssuer   string
	JWTAudience string
	// AdminToken is the bearer token of the operators; without it their calls are refused.
	AdminToken string

	// ReceiptSecret is what receipts are signed with, of reservation.MinReceiptSecretBytes at least, the same on all
	// ingresses; without it they share the one that is in Postgres, and sell nothing until they have read it.
	ReceiptSecret string
	// Outcomes opens a client for reading OutcomesStream, which tells what becomes of orders; the server closes the
	// client. Without it buyers who wait are looked up once a second.
	Outcomes       func() (redis.UniversalClient, error)
	OutcomesStream string

	// MaxInFlight is how many requests are worked on at once (4096); more are answered "overloaded". An eighth is kept for
	// buyers who pay, cancel and look at their orders, an eighth for those who look at sales, and a sixteenth
	// for operators: nobody else takes these places, and they take none of the purchases'.
	MaxInFlight int
	// MaxWaiting is how many purchases wait for their end at once (20,000); more are answered without waiting. MaxStreams
	// is how many streams of events there are of orders, and of sales as well (10,000); more are answered "overloaded".
	MaxWaiting, MaxStreams int
	// UserLimit bounds each user, once for purchases and once for what they do with their orders. AddressLimit bounds each
	// client address in the same way, and a third time for all other calls, /livez, /readyz and /metrics excepted.
	UserLimit, AddressLimit Limit
	// UserStreams is how many streams of orders each user may have open at once, and AddressStreams how many of orders, and
	// how many of sales, each client address (0: as many as there are). An address never gets more than a quarter of them.
	UserStreams, AddressStreams int
	// TrustedProxies are believed what X-Forwarded-For says of the address that a request came to them from.
	TrustedProxies []netip.Prefix
	// MaxConnections is how many connections are open at once (0: as many as come). It leaves files for the connections
	// to Redis and Postgres. Where it is reached, connections that were idle for longest are closed to make room, and
	// new ones wait while none is idle. Streams of orders, streams of sales and waiting purchases get a quarter each.
	MaxConnections int
	// StopDelay is how long a stopping server still takes new connections (0), so that a load
	// balancer sees /readyz answer 503 before connections are refused.
	StopDelay time.Duration
	// DrainTimeout is how long a stopping server waits for the requests that it has accepted (10 s).
	DrainTimeout time.Duration

	// Metrics is where the server registers its metrics and what /metrics shows (a registry of its own).
	Metrics *prometheus.Registry
	Logger  *slog.Logger
}

func (c *Config) setDefaults() {
	if c.Addr == "" {
		c.Addr = defaultAddr
	}
	if c.AuthHeader == "" {
		c.AuthHeader = defaultAuthHeader
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = defaultMaxInFlight
	}
	if c.MaxWaiting == 0 {
		c.MaxWaiting = defaultMaxWaiting
	}
	if c.MaxStreams == 0 {
		c.MaxStreams = defaultMaxStreams
	}
	if c.MaxConnections > 0 {
		// What stays open for long must not keep out what is answered at once, a health check for one.
		share := max(1, c.MaxConnections/4)
		c.MaxWaiting, c.MaxStreams = min(c.MaxWaiting, share), min(c.MaxStreams, share)
	}
	if c.AddressStreams > 0 {
		c.AddressStreams = min(c.AddressStreams, max(1, c.MaxStreams/4))
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = defaultDrainTimeout
	}
	if c.AwaitedOrders == nil {
		c.AwaitedOrders = c.Orders
	}
	if c.Metrics == nil {
		c.Metrics = prometheus.NewRegistry()
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

// Validate tells what is missing or contradicts itself, everything at once.
func (c *Config) Validate() error {
	var errs []error
	if c.Reservations == nil || c.Sales == nil || c.Orders == nil || c.Postgres == nil {
		errs = append(errs, errors.New("Reservations, Sales, Orders and Postgres are required"))
	}
	if c.MaxInFlight < 0 || c.MaxWaiting < 0 || c.MaxStreams < 0 || c.MaxConnections < 0 {
		errs = append(errs, fmt.Errorf("MaxInFlight is %d, MaxWaiting %d, MaxStreams %d and MaxConnections %d, want at least 1",
			c.MaxInFlight, c.MaxWaiting, c.MaxStreams, c.MaxConnections))
	}
	for _, l := range []Limit{c.UserLimit, c.AddressLimit} {
		if l.Rate < 0 || l.Rate > ratelimit.MaxPerSecond || l.Rate > 0 && (l.Burst < 1 || l.Burst > ratelimit.MaxBurst) {
			errs = append(errs, fmt.Errorf("UserLimit or AddressLimit is %v with a burst of %d, want at most %d/s and 1 to %d",
				l.Rate, l.Burst, ratelimit.MaxPerSecond, ratelimit.MaxBurst))
		}
	}
	if c.UserStreams < 0 || c.AddressStreams < 0 {
		errs = append(errs, errors.New("UserStreams and AddressStreams must not be negative"))
	}
	if n := len(c.ReceiptSecret); n > 0 && n < reservation.MinReceiptSecretBytes {
		errs = append(errs, fmt.Errorf("the secret for receipts (STAMPEDE_RECEIPT_SECRET) has %d bytes, want at least %d", n, reservation.MinReceiptSecretBytes))
	}
	if c.Outcomes != nil && c.OutcomesStream == "" {
		errs = append(errs, errors.New("OutcomesStream is required with Outcomes"))
	}
	if c.StopDelay < 0 || c.DrainTimeout < 0 {
		errs = append(errs, errors.New("StopDelay and DrainTimeout must not be negative"))
	}
	if !isVisibleASCII(c.AdminToken) {
		errs = append(errs, errors.New("the admin token (STAMPEDE_ADMIN_TOKEN) must be visible ASCII without spaces and line ends, or no request could carry it"))
	}
	switch c.Auth {
	case AuthHeader:
		if !isVisibleASCII(c.AuthHeader) {
			errs = append(errs, fmt.Errorf("the auth header (STAMPEDE_AUTH_HEADER) %q is no header name", c.AuthHeader))
		}
	case AuthJWT:
		errs = append(errs, c.validateJWT())
	default:
		errs = append(errs, fmt.Errorf("the auth mode (STAMPEDE_AUTH) is %q, want %q or %q", c.Auth, AuthJWT, AuthHeader))
	}
	return errors.Join(errs...)
}

func (c *Config) validateJWT() error {
	switch {
	case c.JWTSecret == "" && c.JWKSURL == "":
		return errors.New("auth mode jwt needs STAMPEDE_JWT_SECRET or STAMPEDE_JWKS_URL")
	case c.JWTSecret != "" && c.JWKSURL != "":
		return errors.New("auth mode jwt takes STAMPEDE_JWT_SECRET or STAMPEDE_JWKS_URL, not both")
	case c.JWTSecret != "" && len(c.JWTSecret) < minSecretBytes:
		return fmt.Errorf("STAMPEDE_JWT_SECRET has %d bytes, HS256 needs at least %d", len(c.JWTSecret), minSecretBytes)
	case c.JWKSURL != "":
		u, err := url.Parse(c.JWKSURL)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return errors.New("STAMPEDE_JWKS_URL must be an http or https URL")
		}
	}
	return nil
}

func isVisibleASCII(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
