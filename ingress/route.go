package ingress

import (
	"fmt"
	"net/http"
	"runtime/debug"
	"strings"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/operators"
)

const purchasePath = "/v1/sales/:sale/orders"

func (s *Server) routes() error {
	s.echo = echo.New()
	// Echo would trust any client's X-Forwarded-For.
	s.echo.IPExtractor = func(r *http.Request) string { return s.limits.proxies.Client(r).String() }
	unmatched := s.metrics.route("unmatched")
	s.echo.HTTPErrorHandler = func(err error, c echo.Context) {
		s.closeIfStopping(c)
		if strings.Contains(c.Request().URL.Path, "//") {
			// An id is missing, so no method is allowed here.
			err = problemRouteNotFound
			c.Response().Header().Del(echo.HeaderAllow)
		}
		s.fail(c, err)
		unmatched.count(c.Response().Status)
	}

	if s.cors != nil {
		s.echo.Pre(s.withCORS)
	}
	s.servePurchase = s.handle(http.MethodPost, purchasePath, s.purchase)

	limited := s.limits.limitAddress
	s.handleGet("/v1/orders", s.inFlight.orders.admit(s.listOrders))
	s.handleGet("/v1/orders/:order", s.inFlight.orders.admit(s.showOrder))
	s.handlePost("/v1/orders/:order/pay", s.payOrder)
	s.handlePost("/v1/orders/:order/cancel", s.cancelOrder)
	// Streams do not end, so they are not served to HEAD.
	s.handle(http.MethodGet, "/v1/orders/:order/events", s.streamOrder)
	s.handle(http.MethodGet, "/v1/sales/:sale/events", limited(s.streamSale))
	s.handlePost("/v1/orders/:order/events/ticket", s.createOrderTicket)
	s.handlePost("/v1/sales/:sale/events/ticket", limited(s.createSaleTicket))
	s.handleGet("/v1/sales", limited(s.yieldToBuyers(s.inFlight.sales.admit(s.listSales))))
	s.handleGet("/v1/sales/:sale", limited(s.yieldToBuyers(s.inFlight.sales.admit(s.showSale))))

	operate := func(path string, h echo.HandlerFunc) {
		s.handlePost(path, limited(s.inFlight.operators.admit(h)))
	}
	operate("/v1/sales", s.createSale)
	operate("/v1/sales/:sale/pause", s.operateSale(operators.Operator, s.config.Sales.Pause))
	operate("/v1/sales/:sale/resume", s.operateSale(operators.Operator, s.config.Sales.Resume))
	operate("/v1/sales/:sale/end", s.operateSale(operators.Admin, s.config.Sales.End))
	operate("/v1/sales/:sale/restock", s.restockSale)

	// Looks at orders and at histories have slots of their own, so that they keep no operator from pausing a sale.
	s.handleGet("/v1/admin/orders", limited(s.inFlight.desk.admit(s.listAnyOrders)))
	s.handleGet("/v1/admin/orders/:order", limited(s.inFlight.desk.admit(s.showAnyOrder)))
	operate("/v1/admin/orders/:order/cancel", s.cancelAnyOrder)
	s.handleGet("/v1/admin/sales/:sale/history", limited(s.inFlight.desk.admit(s.showSaleHistory)))

	// These take no slot, so that a full server can be monitored.
	s.handleGet("/livez", s.live)
	s.handleGet("/readyz", s.ready)
	s.handleGet("/metrics", echo.WrapHandler(s.metrics.handler()))
	return s.documentation()
}

// handleGet serves GET and HEAD; for HEAD net/http leaves the body out.
func (s *Server) handleGet(path string, h echo.HandlerFunc) {
	get := func(c echo.Context) error {
		c.Response().Header()["Cache-Control"] = noStore
		return h(c)
	}
	s.handle(http.MethodGet, path, get)
	s.handle(http.MethodHead, path, get)
}

// handle registers a route. It does for each request what is middleware elsewhere: it recovers panics,
// counts, refuses a body that is too large, and answers errors. It returns the handler of the route, which never
// returns an error.
func (s *Server) handle(method, path string, h echo.HandlerFunc) echo.HandlerFunc {
	counters := s.metrics.route(method + " " + path)
	served := func(c echo.Context) error {
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
	}
	if s.config.Tracer != nil {
		served = s.traced(method+" "+path, method, path, served)
	}
	s.echo.Add(method, path, served)
	return served
}

// closeIfStopping closes the connection behind the answer of a stopping server, so that the client's next
// request goes to another server.
func (s *Server) closeIfStopping(c echo.Context) {
	if s.stopping.Load() {
		c.Response().Header()["Connection"] = closeConnection
	}
}

// fail answers an error with its problem, and logs it if our own servers are at fault.
func (s *Server) fail(c echo.Context, err error) {
	p := problemOf(err)
	r := c.Request()
	if isOutage(r.Context(), p) {
		s.outages.log(r.Context(), s.log, r.Method+" "+c.Path(), err, func() []any { return idsOf(c) })
	}
	writeProblem(c, p)
}

// idsOf returns the ids in the path of a request, for the log: its order or its sale.
func idsOf(c echo.Context) (fields []any) {
	for i, name := range c.ParamNames() {
		if id, ok := parseID(c.ParamValues()[i]); ok {
			fields = append(fields, name, id)
		}
	}
	return fields
}

// answerPanic answers a panic with an id that finds the stack in the log.
func (s *Server) answerPanic(c echo.Context, cause any) {
	if cause == http.ErrAbortHandler { //nolint:errorlint // net/http compares it like this
		panic(cause)
	}
	r := c.Request()
	id := uuid.NewString()
	s.log.With(idsOf(c)...).ErrorContext(r.Context(), "request panicked", "request_id", id, "method", r.Method,
		"route", c.Path(),
		"panic", fmt.Sprint(cause), "stack", string(debug.Stack()))
	if c.Response().Committed {
		// A partial answer must not look like a complete one.
		panic(http.ErrAbortHandler)
	}
	writeProblem(c, &problem{kind: kindInternal, requestID: id, detail: "See the server's log for this request_id."})
}
