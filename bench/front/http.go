package front

import (
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"

	"stampede/internal/accept"
)

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
