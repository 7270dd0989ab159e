package ingress

import (
	"context"
	"net/http"
	"strings"
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
		PaymentWindow: boundedSeconds(body.PaymentWindowSeconds),
	}
	if body.PerOrderLimit != nil {
		terms.PerOrderLimit = *body.PerOrderLimit
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	sale, again, err := s.config.Sales.CreateOnce(ctx, terms, key)
	s.invalidateFeeds()
	if err != nil {
		return err
	}
	if again {
		c.Response().Header()["Idempotency-Replayed"] = headerTrue
	}
	c.Response().Header()["Location"] = []string{"/v1/sales/" + sale.ID.String()}
	return writeJSON(c, http.StatusCreated, sale)
}

// seconds makes a duration that is out of bounds when n is, also where the product would overflow.
func boundedSeconds(n int64) time.Duration {
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
func (s *Server) showSale(c echo.Context) error {
	id, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	return s.answerFromFeed(c, s.saleFeed, id, 0, func(sales []reservation.Counted) (any, error) {
		return sales[0].Standing, sales[0].Err
	})
}

// answerSale answers an operator with the sale in the path, after act.
func (s *Server) answerSale(c echo.Context, act func(context.Context, uuid.UUID) (reservation.Standing, error)) error {
	id, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	sale, err := act(ctx, id)
	s.invalidateFeeds()
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
	pages := s.laterPagesFeed
	if page.after == uuid.Nil {
		pages = s.firstPageFeed
	}
	return s.answerFromFeed(c, pages, page.after, page.limit, func(sales []reservation.Counted) (any, error) {
		var answer struct {
			Sales      []reservation.Standing `json:"sales"`
			NextCursor string                 `json:"next_cursor,omitempty"`
		}
		answer.Sales = make([]reservation.Standing, min(len(sales), page.limit))
		for i := range answer.Sales {
			if sales[i].Err != nil {
				return nil, sales[i].Err
			}
			answer.Sales[i] = sales[i].Standing
		}
		if len(sales) > page.limit {
			answer.NextCursor = cursorAfter(sales[page.limit-1].ID)
		}
		return answer, nil
	})
}

const (
	// salesTogether bounds the sales of one look, and salesAtHand those that are remembered.
	salesBatchMax = 1000
	salesMax      = 10_000
	// pagesAtHand bounds the pages of the list that are remembered, but for the first.
	pagesMax = 100
)

// startBoards starts what answers for all who look at sales. The first page of the list has a board of its own, so that it
// waits for none of the others, which anybody can ask for from any place in the list on.
func (s *Server) startFeeds() {
	s.saleFeed = startFeed(s.background, salesBatchMax, salesMax, s.countSales)
	s.firstPageFeed = startFeed(s.background, 1, 1, s.countPages)
	s.laterPagesFeed = startFeed(s.background, 1, pagesMax, s.countPages)
}

// salesChanged is called when an operator may have changed a sale: it is seen at once at this server then.
func (s *Server) invalidateFeeds() {
	for _, b := range []*feed{s.saleFeed, s.firstPageFeed, s.laterPagesFeed} {
		b.invalidate()
	}
}

func (s *Server) countSales(ctx context.Context, ids []uuid.UUID) (map[uuid.UUID][]reservation.Counted, error) {
	sales, err := s.config.Sales.CountSales(ctx, ids)
	found := make(map[uuid.UUID][]reservation.Counted, len(sales))
	for _, sale := range sales {
		found[sale.ID] = []reservation.Counted{sale}
	}
	return found, err
}

func (s *Server) countPages(ctx context.Context, after []uuid.UUID) (map[uuid.UUID][]reservation.Counted, error) {
	found := make(map[uuid.UUID][]reservation.Counted, len(after))
	for _, key := range after {
		// One more than a page may have tells whether there is a next page.
		sales, err := s.config.Sales.CountPage(ctx, key, pageMax+1)
		if err != nil {
			return nil, err
		}
		found[key] = sales
	}
	return found, nil
}

// giveWayFor is how much longer a look at a sale takes while buyers are served.
const yieldPause = 50 * time.Millisecond

// giveWay lets anonymous requests wait a little while buyers pay, cancel or look at their orders. A payment waits for its turn at
// the CPU several times, behind all requests that can be answered at once from memory: a crowd of these would
// make it take a quarter of a second. It comes before the request takes a place, so that one that is turned away waits as well.
func (s *Server) yieldToBuyers(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if s.inFlight.orders.taken.Load() > 0 {
			select {
			case <-time.After(yieldPause):
			case <-s.waitsEnd:
			case <-c.Request().Context().Done():
			}
		}
		return h(c)
	}
}

// answerPublic answers with what render makes of something on a board, for everybody who asks within a second, and for
// caches between.
func (s *Server) answerFromFeed(c echo.Context, on *feed, key uuid.UUID, n int, render func([]reservation.Counted) (any, error)) error {
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	seen, err := on.get(ctx, key)
	if err != nil {
		return err
	}
	answer, err := seen.render(n, func() (any, error) { return render(seen.sales) })
	if err != nil {
		return err
	}
	h := c.Response().Header()
	h["Cache-Control"] = publicSecond
	h["Etag"] = []string{answer.etag}
	if etagMatches(c.Request().Header["If-None-Match"], answer.etag) {
		c.Response().WriteHeader(http.StatusNotModified)
		return nil
	}
	h["Content-Type"] = jsonContent
	write(c, http.StatusOK, answer.body)
	return nil
}

// noneMatch is true if the client has what the tag is of (RFC 9110, section 13.1.2).
func etagMatches(headers []string, etag string) bool {
	for _, header := range headers {
		for header != "" {
			var one string
			one, header = cutUnquoted(header, ',')
			if one = trimOWS(one); one == "*" || strings.TrimPrefix(one, "W/") == etag {
				return true
			}
		}
	}
	return false
}
