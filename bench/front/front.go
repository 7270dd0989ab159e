// Package front is the HTTP front that serves every design of the ladder: the same Echo, the same
// limits and the same answers, in its own process that can be killed. So two figures differ only by
// their designs.
package front

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"

	"stampede/internal/accept"
)

// Order is what a buyer asks for.
type Order struct {
	ID       uuid.UUID // made by the front, UUIDv7
	Sale     uuid.UUID
	User     string
	Quantity int64
}

// Verdict is the result of a purchase.
type Verdict int

// The verdicts, and the status of their answers.
const (
	Reserved         Verdict = iota + 1 // 202: promised, not yet in Postgres
	Confirmed                           // 201: in Postgres
	SoldOut                             // 409
	AlreadyPurchased                    // 409
)

// Design is a way to sell.
type Design interface {
	// Prepare makes the sale ready if it is not yet. Every front calls it before its first Buy, also
	// after a restart or a kill -9, when it must keep what is left. The row of the sale is in Postgres
	// by then, with its stock and at first sold = 0.
	Prepare(ctx context.Context, sale uuid.UUID, stock int64) error
	// Buy is called concurrently. An error is answered 500.
	Buy(ctx context.Context, o Order) (Verdict, error)
	// Run does background work until ctx is done, and may then finish what it has begun: no Buy is running
	// any more. A design without such work waits for ctx.
	Run(ctx context.Context) error
}

// fixed is a design that answers every request with the same bytes. The front only sends them: it reads
// no body, creates no order, and has no middleware.
type fixed interface {
	Design
	Answer() (status int, contentType string, body []byte)
}

// PlainReader is the option of a Backend with which the front reads plain purchases in front of net/http, by the
// reader of `stampede serve`. Its value is "on".
const PlainReader = "plain-reader"

// Backend is what a design may use. Each design chooses how many connections it opens.
type Backend struct {
	RedisURL, DatabaseURL string
	Prefix                string            // of its keys in Redis
	Options               map[string]string // settings from the benchmark
}

// New creates a design. It may connect now or later. The end of its process closes it.
type New func(ctx context.Context, b Backend) (Design, error)

// failuresLogged is how many failures a process logs. Some designs fail for most of their buyers, and
// logging each failure would be measured as well.
const failuresLogged = 10

// handler serves one sale of a design.
type handler struct {
	design Design
	sale   uuid.UUID
	logged atomic.Int64
}

const route = "/v1/sales/:sale/orders"

func newServer(design Design, sale uuid.UUID) *http.Server {
	e := echo.New()
	if raw, ok := design.(fixed); ok {
		status, contentType, body := raw.Answer()
		e.POST(route, func(c echo.Context) error { return c.Blob(status, contentType, body) })
	} else {
		e.Use(middleware.Recover(), middleware.RequestID())
		e.POST(route, newHandler(design, sale).buy)
	}
	return accept.NewServer(e, slog.Default())
}

func newHandler(design Design, sale uuid.UUID) *handler { return &handler{design: design, sale: sale} }

// plainReader has plain purchases read in front of the server, and answered by the design. Its reader recovers from
// panics; request ids are not made, as `stampede serve` makes none for them.
func plainReader(design Design, sale uuid.UUID) *accept.PlainConfig {
	h, e := newHandler(design, sale), echo.New()
	return &accept.PlainConfig{
		Buyer: accept.UserHeader, Logger: slog.Default(),
		Handler: func(w http.ResponseWriter, r *http.Request) func(sale string) {
			c := e.NewContext(r, w)
			return func(sale string) {
				c.Reset(r, w)
				c.SetPath(route)
				c.SetParamNames("sale")
				c.SetParamValues(sale)
				if err := h.buy(c); err != nil {
					e.HTTPErrorHandler(err, c)
				}
			}
		},
	}
}

type purchase struct {
	Quantity int64 `json:"quantity"`
}

// reservation is the answer to an accepted purchase.
type reservation struct {
	OrderID    uuid.UUID `json:"order_id"`
	SaleID     uuid.UUID `json:"sale_id"`
	Status     string    `json:"status"`
	Quantity   int64     `json:"quantity"`
	ReservedAt time.Time `json:"reserved_at"`
}

// problem is any other answer.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
}

func (h *handler) buy(c echo.Context) error {
	user := c.Request().Header.Get(accept.UserHeader)
	if user == "" {
		return refuse(c, http.StatusUnauthorized, "unauthorized", "The request has no user id")
	}
	if sale, err := uuid.Parse(c.Param("sale")); err != nil || sale != h.sale {
		return refuse(c, http.StatusNotFound, "sale-not-found", "Sale not found")
	}
	var asked purchase
	if err := c.Bind(&asked); err != nil || asked.Quantity < 1 {
		return refuse(c, http.StatusBadRequest, "invalid-request", "The body is not a valid purchase")
	}
	id, err := uuid.NewV7()
	if err != nil {
		return err
	}
	order := Order{ID: id, Sale: h.sale, User: user, Quantity: asked.Quantity}
	verdict, err := h.design.Buy(c.Request().Context(), order)
	if err != nil {
		if h.logged.Add(1) <= failuresLogged {
			slog.Error("purchase failed", "order", id, "user", user, "error", err)
		}
		return refuse(c, http.StatusInternalServerError, "internal", "Internal error")
	}
	answer := reservation{OrderID: id, SaleID: h.sale, Quantity: asked.Quantity, ReservedAt: time.Now().UTC()}
	switch verdict {
	case Reserved:
		answer.Status = "reserved"
		return c.JSON(http.StatusAccepted, answer)
	case Confirmed:
		answer.Status = "confirmed"
		return c.JSON(http.StatusCreated, answer)
	case SoldOut:
		return refuse(c, http.StatusConflict, "sold-out", "Sold out")
	case AlreadyPurchased:
		return refuse(c, http.StatusConflict, "already-purchased", "This buyer has an order already")
	}
	panic("front: verdict " + strconv.Itoa(int(verdict))) // a bug of the design
}

func refuse(c echo.Context, status int, slug, title string) error {
	return c.JSON(status, problem{Type: "/problems/" + slug, Title: title, Status: status})
}

// AddressLine begins the line of output with the address of a front.
const AddressLine = "listens on "

func announce(l net.Listener) string { return AddressLine + l.Addr().String() }

// Env is the environment variable with the Spec of a front process, in JSON.
const Env = "STAMPEDE_BENCH_FRONT"

// Spec says what a front sells, and how.
type Spec struct {
	Design  string // its name in the registry
	Backend Backend
	Sale    uuid.UUID
	Stock   int64
	Addr    string // host:port to listen on; port 0 takes a free one
}

// Environ is the variable that makes a process of this program a front.
func (s Spec) Environ() (string, error) {
	text, err := json.Marshal(s)
	return Env + "=" + string(text), err
}

// drainTimeout bounds how long a stopping front may take to answer its buyers.
const drainTimeout = 10 * time.Second

// Main runs the front that the environment asks for until SIGTERM, and returns the exit status. It
// prints its address in one line on standard output.
func Main(find func(design string) (New, bool)) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Getenv(Env), find, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "front:", err)
		return 1
	}
	return 0
}

func run(ctx context.Context, text string, find func(design string) (New, bool), out io.Writer) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // as `stampede serve` does
	}
	uuid.EnableRandPool() // without the pool each order would cost the design a system call
	var spec Spec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fmt.Errorf("read %s: %w", Env, err)
	}
	open, found := find(spec.Design)
	if !found {
		return fmt.Errorf("unknown design %q", spec.Design)
	}
	design, err := open(ctx, spec.Backend)
	if err != nil {
		return fmt.Errorf("open %s: %w", spec.Design, err)
	}
	if err := design.Prepare(ctx, spec.Sale, spec.Stock); err != nil {
		return fmt.Errorf("prepare the sale for %s: %w", spec.Design, err)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", spec.Addr)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, announce(listener))
	return serve(ctx, listener, design, spec)
}

// serve answers buyers until ctx is done or the design fails. The background work of the design is stopped
// after the last answer, so that it can finish accepted orders.
func serve(ctx context.Context, listener net.Listener, design Design, spec Spec) error {
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	worked := make(chan error, 1)
	go func() { worked <- design.Run(background) }()

	server := newServer(design, spec.Sale)
	var served <-chan error
	shutdown := server.Shutdown
	if spec.Backend.Options[PlainReader] == "on" {
		connections := accept.New(listener, 0)
		served = accept.Serve(background, server, connections, plainReader(design, spec.Sale))
		shutdown = func(ctx context.Context) error {
			return errors.Join(connections.Drain(ctx), server.Shutdown(ctx))
		}
	} else {
		ended := make(chan error, 1)
		go func() { ended <- server.Serve(listener); close(ended) }()
		served = ended
	}

	var failed error
	select {
	case err := <-worked:
		worked <- err
		failed = errors.New("the design's background work ended early")
	case failed = <-served:
	case <-ctx.Done():
	}
	draining, cancel := context.WithTimeout(background, drainTimeout)
	defer cancel()
	unfinished := shutdown(draining)
	if unfinished != nil {
		_ = server.Close()
	}
	stop()
	if failed == nil {
		failed = ignore(ignore(<-served, http.ErrServerClosed), net.ErrClosed)
	}
	return errors.Join(failed, unfinished, ignore(<-worked, context.Canceled))
}

// ignore returns err unless it is the expected one.
func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}
