package ingress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/draw"
	"stampede/internal/accept"
	"stampede/internal/forwarded"
	"stampede/internal/ratelimit"
	"stampede/internal/tracing"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// Reservations decides purchases, and finds orders that are not in Postgres yet: *reservation.Store.
type Reservations interface {
	Reserve(ctx context.Context, r reservation.Request) (reservation.Answer, error)
	FindReserved(ctx context.Context, id uuid.UUID, user string) (order.Order, error)
	// Join gives a user a place in the waiting list of a sale, and WaitingPlace finds it.
	Join(ctx context.Context, sale reservation.Sale, item, user, idempotencyKey string) (reservation.Answer, error)
	WaitingPlace(ctx context.Context, sale reservation.Sale, user string) (order.Reservation, error)
	// Withdraw makes sure that somebody who has left gets no unit, or returns the order of the one they got.
	Withdraw(ctx context.Context, sale uuid.UUID, o reservation.Offer) (made uuid.UUID, err error)
	// Writable returns nil if purchases can be decided in any partition.
	Writable(ctx context.Context) error
}

// Sales are the sales that operators create and change: *catalog.Catalog.
type Sales interface {
	CreateOnce(
		ctx context.Context, terms reservation.Terms, key string,
	) (sale catalog.CountedSale, replayed bool, err error)
	CountPage(ctx context.Context, after uuid.UUID, limit int) ([]catalog.CountResult, error)
	Followed(ctx context.Context, active []uuid.UUID, limit int) ([]uuid.UUID, error)
	CountSales(ctx context.Context, sales []uuid.UUID) ([]catalog.CountResult, error)
	Pause(ctx context.Context, sale uuid.UUID) (catalog.CountedSale, error)
	Resume(ctx context.Context, sale uuid.UUID) (catalog.CountedSale, error)
	End(ctx context.Context, sale uuid.UUID) (catalog.CountedSale, error)
	Restock(ctx context.Context, sale uuid.UUID, units int64, key string) (catalog.CountedSale, error)
	RestockItems(
		ctx context.Context, sale uuid.UUID, units map[string]int64, key string,
	) (catalog.CountedSale, error)
	Rename(ctx context.Context, sale uuid.UUID, to catalog.Names) (catalog.CountedSale, error)
	History(ctx context.Context, sale uuid.UUID, limit int) ([]catalog.Change, error)
	CreateDraw(ctx context.Context, goods uuid.UUID, t catalog.DrawTerms) (replayed bool, err error)
	OpenDraw(ctx context.Context, goods uuid.UUID) error
}

// Draws are the draws in Postgres: *draws.Store, which lists the errors.
type Draws interface {
	FindDraw(ctx context.Context, goods uuid.UUID) (draws.Draw, error)
	FindAll(ctx context.Context, goods []uuid.UUID) ([]draws.Draw, error)
	Bundle(ctx context.Context, goods uuid.UUID) (*draw.Bundle, error)
	Leaves(ctx context.Context, goods uuid.UUID, w io.Writer) error
	FrozenList(ctx context.Context, goods uuid.UUID) (*draws.FrozenList, error)
	Proof(ctx context.Context, goods uuid.UUID, r order.Receipt) (draws.Proof, error)
	Beacon(ctx context.Context, goods uuid.UUID, round int64, signature []byte) (draws.Draw, error)
	Reveal(ctx context.Context, goods uuid.UUID, party string, secret []byte) (draws.Draw, error)
	// Waiter returns the place of a user in a waiting list, or order.ErrNotFound.
	Waiter(ctx context.Context, goods uuid.UUID, user string) (draws.Waiter, error)
	// WaitingPlaces returns the first draws.WaitingPlacesMax places of those who wait for an item, by its letter, in their
	// order.
	WaitingPlaces(ctx context.Context, goods uuid.UUID, item string) ([]int64, error)
}

// Orders are the orders in Postgres: *ledger.Ledger. A missing order is order.ErrNotFound.
// Any error that is not listed here means that Postgres did not answer.
type Orders interface {
	Order(ctx context.Context, id uuid.UUID) (order.Order, error)
	// FindOrders returns the orders that exist.
	FindOrders(ctx context.Context, ids []uuid.UUID) ([]order.Order, error)
	// FindByReceipt returns the order of a receipt, as voided if it is missing and always will be.
	FindByReceipt(ctx context.Context, r order.Receipt) (order.Order, error)
	// PastAnswer returns the answer to a purchase in an ended sale of which Redis has no buyers any more.
	PastAnswer(ctx context.Context, r reservation.Request) (reservation.Answer, error)
	// ReceiptSecret returns the secret for receipts that all ingresses without one of their own share.
	ReceiptSecret(ctx context.Context) ([]byte, error)
	// Pay and Cancel change an order; both can be repeated. Another user's order is missing. Their errors are
	// order.ErrIllegalTransition, order.ErrExpired, and order.ErrDamaged if
	// Postgres always refuses the change.
	Pay(ctx context.Context, id uuid.UUID, user, reference string) (order.Order, error)
	Cancel(ctx context.Context, id uuid.UUID, user string) (order.Order, error)
	// Report keeps money and returns what became of it; it can be repeated.
	Report(ctx context.Context, m order.Money) (order.Payment, error)
	// RefundedAtProvider and Disputed note what the payment provider did with a payment; they can be repeated. Their
	// errors are order.ErrPaymentNotFound, of Disputed, and order.ErrArchived.
	RefundedAtProvider(ctx context.Context, r order.ProviderRefund) (order.Payment, error)
	Disputed(ctx context.Context, d order.Dispute) (order.Payment, error)
	OperatorsOrders
}

// OperatorsOrders are the orders in Postgres as operators see and change them: *ledger.Ledger. Their errors are
// those of Orders, and order.ErrArchived.
type OperatorsOrders interface {
	// ListOrders lists orders of a user or a sale that are older than before, newest first, and returns where the next
	// page begins. A zero before lists the newest; a zero next ends the list.
	ListOrders(
		ctx context.Context, filter order.Filter, before uuid.UUID, limit int,
	) (orders []order.Placed, next uuid.UUID, err error)
	// History returns an order with its log.
	History(ctx context.Context, id uuid.UUID) (order.Placed, []order.Logged, error)
	// Withdraw cancels an order; it can be repeated.
	Withdraw(ctx context.Context, id uuid.UUID, reason, operator string) (order.Placed, error)
	// Payment returns a payment, or order.ErrPaymentNotFound.
	Payment(ctx context.Context, reference string) (order.Payment, error)
	// ListPayments lists payments in the order of their latest events, after a position, and returns where the next page
	// begins, or 0 at the end.
	ListPayments(
		ctx context.Context, filter order.PaymentFilter, after int64, limit int,
	) (payments []order.Payment, next int64, err error)
	// Refund notes a refund; it can be repeated. Its errors are order.ErrPaymentNotFound and order.ErrRefundNotDue.
	Refund(ctx context.Context, reference, refundReference, operator string) (order.Payment, error)
	// Dismiss notes that nothing of an unclear payment has to go back; it can be repeated. Its errors are
	// order.ErrPaymentNotFound and order.ErrNotUnclear.
	Dismiss(ctx context.Context, reference, why, operator string) (order.Payment, error)
}

// AwaitedOrders are the orders that purchases look up: *ledger.Ledger. The methods are those of Orders.
type AwaitedOrders interface {
	FindOrders(ctx context.Context, ids []uuid.UUID) ([]order.Order, error)
	FindByReceipt(ctx context.Context, r order.Receipt) (order.Order, error)
	PastAnswer(ctx context.Context, r reservation.Request) (reservation.Answer, error)
}

// Pinger reports whether a server answers.
type Pinger interface {
	Ping(ctx context.Context) error
}

// AuthMode selects how a request names its buyer.
type AuthMode string

const (
	// AuthJWT takes the subject of a signed bearer token.
	AuthJWT AuthMode = "jwt"
	// AuthHeader trusts a header. It is for development, and for a gateway in front that authenticates the
	// buyer and overwrites the header on every request.
	AuthHeader AuthMode = "header"
)

// Switch is a setting that is on or off; empty for its default.
type Switch string

// The values of a Switch.
const (
	SwitchOn  Switch = "on"
	SwitchOff Switch = "off"
)

// Defaults of settings, also of those of the command line.
const (
	DefaultAddr         = ":8080"
	DefaultMaxInFlight  = 4096
	DefaultDrainTimeout = 10 * time.Second
)

const (
	defaultMaxWaiting = 20_000
	defaultMaxStreams = 10_000

	// minSecretBytes is the shortest key for HS256 (RFC 7518, section 3.2).
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
	// Draws are draws and waiting lists. Without them their paths are 404.
	Draws Draws
	// AwaitedOrders (Orders) looks up orders for purchases that wait or are repeated. Give it connections of
	// its own, so that purchases take none from buyers who pay, cancel, or look at their orders.
	AwaitedOrders AwaitedOrders
	// Tracer traces requests that have a sampled parent; nil for none.
	Tracer *tracing.Tracer
	// OperatorsOrders (Orders) serves operators' calls on orders. Give it connections of its own, so that operators take
	// none from buyers.
	OperatorsOrders OperatorsOrders
	// Postgres reports whether Postgres answers, on its own connection: *ledger.Ledger. While it does
	// not, no request waits for Postgres. Readiness does not depend on it once the secret for receipts was read.
	Postgres Pinger

	Auth AuthMode
	// AuthHeader is the header that mode "header" trusts (accept.UserHeader).
	AuthHeader string
	// Mode "jwt" takes exactly one of the two: a secret for HS256 of at least 32 bytes, or the URL of a
	// JSON Web Key Set with public keys.
	JWTSecret string
	JWKSURL   string
	// JWTIssuer and JWTAudience, unless empty, are required as the token's iss and aud.
	JWTIssuer   string
	JWTAudience string
	// AdminToken is the bearer token of the operator "admin", and OperatorsFile has further operators
	// (internal/operators). Without both, operators' calls are refused.
	AdminToken    string
	OperatorsFile string
	// StripeSecretsFile has the secrets that sign Stripe's events, one a line; without it the path of these events is 404.
	// It is read for each event.
	StripeSecretsFile string
	// StripeTestMode is SwitchOn if payments of Stripe's test modes count, too. The default is SwitchOff: platforms get
	// such events with the secret of live ones.
	StripeTestMode Switch
	// StripeMetadata is the name of the metadata that have the id of the order (order_id).
	StripeMetadata string
	// BuyerPay is SwitchOn if buyers can report payments of their own orders, and SwitchOff if that path is 404. The
	// default is SwitchOff with AuthJWT, where a buyer would reach the path, and SwitchOn with AuthHeader.
	BuyerPay Switch
	// CORSOrigins are the origins whose scripts may make the calls of buyers and the public ones, as ParseOrigins
	// returns them; "*" alone allows all. Without any, no answer has a header of CORS.
	CORSOrigins []string

	// ReceiptSecret signs receipts: at least order.MinReceiptSecretBytes, the same on all ingresses.
	// Without it they share the secret in Postgres, and sell nothing until they have read it.
	ReceiptSecret string
	// Outcomes opens a client that reads the OutcomesStreams, in which changes of orders are announced; the server
	// closes the client. Without it the orders of waiting buyers are looked up once a second.
	Outcomes        func() (redis.UniversalClient, error)
	OutcomesStreams []string

	// MaxInFlight bounds the requests in flight (4096); more are answered "overloaded". An eighth is reserved for
	// buyers who pay, cancel and look at their orders, an eighth for looking at sales, a sixteenth for
	// operators, and a sixty-fourth for operators who look at orders.
	// Purchases have the rest.
	MaxInFlight int
	// MaxWaiting bounds the purchases that wait (20,000); more are answered without waiting. MaxStreams bounds the
	// event streams of orders, and those of sales (10,000 each); more are answered "overloaded".
	MaxWaiting, MaxStreams int
	// UserLimit bounds each user, once for purchases and once for calls on orders. AddressLimit bounds each client
	// address in the same way, and a third time for all other calls except /livez, /readyz and /metrics.
	UserLimit, AddressLimit Limit
	// UserStreams bounds the open streams of orders of each user. AddressStreams bounds those of each client
	// address, and as many streams of sales; it is at most a quarter of MaxStreams. 0 is unlimited.
	UserStreams, AddressStreams int
	// TrustedProxies are the proxies whose X-Forwarded-For is trusted.
	TrustedProxies forwarded.Proxies
	// MaxConnections bounds the open connections (0: unlimited), so that files are left for connections to Redis and
	// Postgres. At the bound the connections that have been idle for longest are closed, and new ones wait while
	// none is idle. Waiting purchases, streams of orders and streams of sales get a quarter each.
	MaxConnections int
	// PlainReader has Run read plain purchases in front of net/http, which takes half of the CPU time.
	PlainReader bool
	// StopDelay is how long a stopping server takes new connections (0), so that a load balancer sees /readyz
	// answer 503 before connections are refused.
	StopDelay time.Duration
	// DrainTimeout is how long a stopping server waits for accepted requests (10 s).
	DrainTimeout time.Duration

	// Metrics registers the server's metrics and is shown by /metrics (a registry of its own).
	Metrics *prometheus.Registry
	Logger  *slog.Logger
}

func (c *Config) setDefaults() {
	if c.Addr == "" {
		c.Addr = DefaultAddr
	}
	if c.AuthHeader == "" {
		c.AuthHeader = accept.UserHeader
	}
	c.StripeTestMode = cmp.Or(c.StripeTestMode, SwitchOff)
	c.StripeMetadata = cmp.Or(c.StripeMetadata, "order_id")
	if c.BuyerPay == "" {
		if c.BuyerPay = SwitchOn; c.Auth == AuthJWT {
			c.BuyerPay = SwitchOff
		}
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = DefaultMaxInFlight
	}
	if c.MaxWaiting == 0 {
		c.MaxWaiting = defaultMaxWaiting
	}
	if c.MaxStreams == 0 {
		c.MaxStreams = defaultMaxStreams
	}
	if c.MaxConnections > 0 {
		// Requests that stay open for long must leave connections to short ones, health checks for example.
		share := max(1, c.MaxConnections/4)
		c.MaxWaiting, c.MaxStreams = min(c.MaxWaiting, share), min(c.MaxStreams, share)
	}
	if c.AddressStreams > 0 {
		c.AddressStreams = min(c.AddressStreams, max(1, c.MaxStreams/4))
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = DefaultDrainTimeout
	}
	if c.AwaitedOrders == nil {
		c.AwaitedOrders = c.Orders
	}
	if c.OperatorsOrders == nil {
		c.OperatorsOrders = c.Orders
	}
	if c.Metrics == nil {
		c.Metrics = prometheus.NewRegistry()
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

// Validate returns all errors of the configuration.
func (c *Config) Validate() error {
	var errs []error
	if c.Reservations == nil || c.Sales == nil || c.Orders == nil || c.Postgres == nil {
		errs = append(errs, errors.New("Reservations, Sales, Orders and Postgres are required"))
	}
	if c.MaxInFlight < 0 || c.MaxWaiting < 0 || c.MaxStreams < 0 || c.MaxConnections < 0 {
		errs = append(errs, fmt.Errorf(
			"MaxInFlight is %d, MaxWaiting %d, MaxStreams %d and MaxConnections %d, want at least 1",
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
	if n := len(c.ReceiptSecret); n > 0 && n < order.MinReceiptSecretBytes {
		errs = append(errs, fmt.Errorf("the secret for receipts (STAMPEDE_RECEIPT_SECRET) has %d bytes, want at least %d",
			n, order.MinReceiptSecretBytes))
	}
	if c.Outcomes != nil && len(c.OutcomesStreams) == 0 {
		errs = append(errs, errors.New("OutcomesStreams are required with Outcomes"))
	}
	if c.StopDelay < 0 || c.DrainTimeout < 0 {
		errs = append(errs, errors.New("StopDelay and DrainTimeout must not be negative"))
	}
	if err := validateOrigins(c.CORSOrigins); err != nil {
		errs = append(errs, fmt.Errorf("the origins (STAMPEDE_CORS_ORIGINS): %w", err))
	}
	for name, given := range map[string]Switch{
		"STAMPEDE_BUYER_PAY": c.BuyerPay, "STAMPEDE_STRIPE_TEST_MODE": c.StripeTestMode,
	} {
		if given != "" && given != SwitchOn && given != SwitchOff {
			errs = append(errs, fmt.Errorf("%s is %q, want %q or %q", name, given, SwitchOn, SwitchOff))
		}
	}
	if len(c.StripeMetadata) > stripeMetadataMax {
		errs = append(errs, fmt.Errorf("STAMPEDE_STRIPE_METADATA has %d bytes; names of Stripe's metadata have at most %d",
			len(c.StripeMetadata), stripeMetadataMax))
	}
	if c.StripeSecretsFile != "" {
		_, err := readStripeSecrets(c.StripeSecretsFile)
		errs = append(errs, err)
	}
	if !isVisibleASCII(c.AdminToken) {
		errs = append(errs, errors.New("the admin token (STAMPEDE_ADMIN_TOKEN) must be visible ASCII without spaces: "+
			"a header cannot carry anything else"))
	}
	switch c.Auth {
	case AuthHeader:
		if !isVisibleASCII(c.AuthHeader) {
			errs = append(errs, fmt.Errorf("the auth header (STAMPEDE_AUTH_HEADER) %q is not a header name", c.AuthHeader))
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
