package ingress

import (
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
)

func (s *Server) routes() {
	s.echo = echo.New()
	// Echo would believe any client's X-Forwarded-For.
	s.echo.IPExtractor = func(r *http.Request) string { return s.limits.addresses.of(r).String() }
	unmatched := s.metrics.route("unmatched")
	s.echo.HTTPErrorHandler = func(err error, c echo.Context) {
		s.closeIfStopping(c)
		if strings.Contains(c.Request().URL.Path, "//") {
			// Another method would find nothing here either.
			err = problemRouteNotFound
			c.Response().Header().Del(echo.HeaderAllow)
		}
		s.fail(c, err)
		unmatched.count(c.Response().Status)
	}

	limited := s.limits.limitAddress
	s.handle(http.MethodPost, "/v1/sales/:sale/orders", s.purchase)

	s.handle(http.MethodPost, "/v1/sales", limited(s.inFlight.operators.admit(s.createSale)))
	s.handle(http.MethodPost, "/v1/sales/:sale/pause", limited(s.inFlight.operators.admit(s.operate(s.config.Sales.Pause))))
	s.handle(http.MethodPost, "/v1/sales/:sale/resume", limited(s.inFlight.operators.admit(s.operate(s.config.Sales.Resume))))
	s.handle(http.MethodPost, "/v1/sales/:sale/end", limited(s.inFlight.operators.admit(s.operate(s.config.Sales.End))))
	s.handle(http.MethodPost, "/v1/sales/:sale/restock", limited(s.inFlight.operators.admit(s.restockSale)))
	s.handleGet("/v1/sales", limited(s.yieldToBuyers(s.inFlight.sales.admit(s.listSales))))
	s.handleGet("/v1/sales/:sale", limited(s.yieldToBuyers(s.inFlight.sales.admit(s.showSale))))
	s.handleGet("/v1/orders", s.inFlight.orders.admit(s.listOrders))
	s.handleGet("/v1/orders/:order", s.inFlight.orders.admit(s.showOrder))
	s.handle(http.MethodPost, "/v1/orders/:order/pay", s.payOrder)
	// Without HEAD, which would not end either.
	s.handle(http.MethodGet, "/v1/orders/:order/events", s.streamOrder)
	s.handle(http.MethodGet, "/v1/sales/:sale/events", limited(s.streamSale))
	s.handle(http.MethodPost, "/v1/orders/:order/cancel", s.cancelOrder)

	// These take no room: whoever watches a server must reach it when it is full.
	s.handleGet("/livez", s.live)
	s.handleGet("/readyz", s.ready)
	s.handleGet("/metrics", echo.WrapHandler(s.metrics.handler()))
}

// handleGet serves HEAD like GET; net/http leaves the body away.
func (s *Server) handleGet(path string, h echo.HandlerFunc) {
	get := func(c echo.Context) error {
		// Sales and orders change from one moment to the next.
		c.Response().Header()["Cache-Control"] = noStore
		return h(c)
	}
	s.handle(http.MethodGet, path, get)
	s.handle(http.MethodHead, path, get)
}

// handle registers a route and does for each of its requests what middleware does elsewhere: it
// counts, refuses what is too large, answers errors and survives panics.
func (s *Server) handle(method, path string, h echo.HandlerFunc) {
	counters := s.metrics.route(method + " " + path)
	s.echo.Add(method, path, func(c echo.Context) error {
		defer func() {
			if cause := recover(); cause != nil {
				s.answerPanic(c, cause)
			}
			counters.count(c.Response().Status)
		}()
		s.closeIfStopping(c)
		if c.Request().ContentLength > maxBodyBytes {
			s.fail(c, problemTooLarge)
			return nil
		}
		if ids := c.ParamValues(); len(ids) > 0 && ids[0] == "" {
			s.fail(c, problemRouteNotFound)
			return nil
		}
		if err := h(c); err != nil {
			s.fail(c, err)
		}
		return nil
	})
}

// sendAway has the client of a stopping server use another connection, to another server, for its next request.
func (s *Server) closeIfStopping(c echo.Context) {
	if s.stopping.Load() {
		c.Response().Header()["Connection"] = closeConnection
	}
}

// fail answers with the problem that err is, and logs what our own servers did wrong.
func (s *Server) fail(c echo.Context, err error) {
	p := problemOf(err)
	r := c.Request()
	if isOutage(r.Context(), p) {
		s.outages.log(r.Context(), s.log, r.Method+" "+c.Path(), err)
	}
	writeProblem(c, p)
}

// survive answers a panic. The id in the answer finds the stack in the log.
func (s *Server) answerPanic(c echo.Context, cause any) {
	if cause == http.ErrAbortHandler { //nolint:errorlint // net/http compares it like this
		panic(cause)
	}
	r := c.Request()
	id := uuid.NewString()
	s.log.ErrorContext(r.Context(), "request panicked", "request_id", id, "method", r.Method, "route", c.Path(),
		"panic", fmt.Sprint(cause), "stack", string(debug.Stack()))
	if c.Response().Committed {
		// Half an answer must not look like a whole one.
		panic(http.ErrAbortHandler)
	}
	writeProblem(c, &problem{kind: kindInternal, requestID: id, detail: "The log of this server tells more under the request_id."})
}

// Values of headers that are the same in every answer. They must not be changed.
var (
	noStore         = []string{"no-store"}
	publicSecond    = []string{"public, max-age=1"}
	jsonContent     = []string{"application/json"}
	problemContent  = []string{"application/problem+json"}
	closeConnection = []string{"close"}
)

func writeProblem(c echo.Context, p *problem) {
	h := c.Response().Header()
	h["Content-Type"] = problemContent
	if p.location != "" {
		h["Location"] = []string{p.location}
	}
	if p.challenge != "" {
		h["Www-Authenticate"] = []string{p.challenge}
	}
	if p.retryAfter != 0 {
		h["Retry-After"] = []string{strconv.Itoa(p.retryAfter)}
	}
	if p.closes {
		h["Connection"] = closeConnection
	}
	body := p.body
	if body == nil {
		body = p.appendJSON(nil)
	}
	write(c, p.status, body)
}

// write sends the answer. An error means that the client is gone, and nobody is left to be told.
func write(c echo.Context, status int, body []byte) {
	res := c.Response()
	res.WriteHeader(status)
	_, _ = res.Write(body)
}

func appendTime(dst []byte, t time.Time) []byte {
	return t.UTC().AppendFormat(dst, "2006-01-02T15:04:05.000Z07:00")
}
