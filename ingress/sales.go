package ingress

import (
	"context"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

const (
	// catalogTimeout bounds an operator's call; it is shorter than the server's writeTimeout.
	catalogTimeout = 5 * time.Second

	// defaultSales is how many sales a page has where the client does not say.
	defaultSales = 50
)

// createSale serves POST /v1/sales.
func (s *Server) createSale(c echo.Context) error {
	if err := s.admin.check(c.Request()); err != nil {
		return err
	}
	key, err := idempotencyKey(c.Request().Header)
	if err != nil {
		return err
	}
	body := struct {
		Name                 string    `json:"name"`
		Stock                int64     `json:"stock"`
		PerOrderLimit        *int64    `json:"per_order_limit"`
		OpensAt              time.Time `json:"opens_at"`
		ClosesAt             time.Time `json:"closes_at"`
		PaymentWindowSeconds int64     `json:"payment_window_seconds"`
	}{}
	if err := readObject(c.Request(), &body); err != nil {
		return err
	}
	terms := reservation.Terms{
		Name: body.Name, Stock: body.Stock, PerOrderLimit: 1, OpensAt: body.OpensAt, ClosesAt: body.ClosesAt,
		PaymentWindow: seconds(body.PaymentWindowSeconds),
	}
	if body.PerOrderLimit != nil {
		terms.PerOrderLimit = *body.PerOrderLimit
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	sale, again, err := s.config.Sales.CreateOnce(ctx, terms, key)
	if err != nil {
		return err
	}
	if again {
		c.Response().Header()["Idempotency-Replayed"] = replayed
	}
	c.Response().Header()["Location"] = []string{"/v1/sales/" + sale.ID.String()}
	return writeJSON(c, http.StatusCreated, sale)
}

// seconds makes a duration that is out of bounds when n is, also where the product would overflow.
func seconds(n int64) time.Duration {
	const beyond = int64(reservation.MaxPaymentWindow/time.Second) + 1
	return time.Duration(min(max(n, -1), beyond)) * time.Second
}

// operate serves POST /v1/sales/{sale}/pause, resume and end.
func (s *Server) operate(act func(context.Context, uuid.UUID) (reservation.Standing, error)) echo.HandlerFunc {
	return func(c echo.Context) error {
		if err := s.admin.check(c.Request()); err != nil {
			return err
		}
		return s.answerSale(c, act)
	}
}

// restockSale serves POST /v1/sales/{sale}/restock.
func (s *Server) restockSale(c echo.Context) error {
	if err := s.admin.check(c.Request()); err != nil {
		return err
	}
	key, err := idempotencyKey(c.Request().Header)
	if err != nil {
		return err
	}
	var body struct {
		Units int64 `json:"units"`
	}
	if err := readObject(c.Request(), &body); err != nil {
		return err
	}
	if body.Units == 0 {
		return &reservation.InvalidError{Field: "units", Reason: "must be a whole number, below zero to take units away"}
	}
	return s.answerSale(c, func(ctx context.Context, sale uuid.UUID) (reservation.Standing, error) {
		return s.config.Sales.Restock(ctx, sale, body.Units, key)
	})
}

// showSale serves GET /v1/sales/{sale}.
func (s *Server) showSale(c echo.Context) error { return s.answerSale(c, s.config.Sales.Show) }

// answerSale answers with the sale in the path, after act.
func (s *Server) answerSale(c echo.Context, act func(context.Context, uuid.UUID) (reservation.Standing, error)) error {
	id, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSale
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	sale, err := act(ctx, id)
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, sale)
}

// listSales serves GET /v1/sales, newest first.
func (s *Server) listSales(c echo.Context) error {
	page, err := readPage(c, defaultSales)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	// One more than asked for tells whether there is a next page.
	sales, err := s.config.Sales.List(ctx, page.after, page.limit+1)
	if err != nil {
		return err
	}
	var answer struct {
		Sales      []reservation.Standing `json:"sales"`
		NextCursor string                 `json:"next_cursor,omitempty"`
	}
	answer.Sales = sales
	if len(sales) > page.limit {
		answer.Sales = sales[:page.limit]
		answer.NextCursor = cursorAfter(sales[page.limit-1].ID)
	}
	return writeJSON(c, http.StatusOK, answer)
}
