package ingress

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
	"stampede/reservation/problems"
)

const (
	salesPath    = "/v1/sales"
	purchasePath = salesPath + "/:sale/orders"
)

// router serves the routes. It does for each request what is middleware elsewhere.
type router struct {
	*core
	echo *echo.Echo
	cors *cors // nil if no origin is allowed
	// servePurchase is the route of purchases. It answers its errors.
	servePurchase echo.HandlerFunc
	outages       outageLog
}

func newRouter(c *core) *router {
	s := &router{core: c, echo: echo.New(), cors: newCORS(c.config)}
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
	return s
}

// handleGet serves GET and HEAD; for HEAD net/http leaves the body out.
func (s *router) handleGet(path string, h echo.HandlerFunc) {
	get := func(c echo.Context) error {
		c.Response().Header()["Cache-Control"] = noStore
		return h(c)
	}
	s.handle(http.MethodGet, path, get)
	s.handle(http.MethodHead, path, get)
}

// handlePost serves a call that changes something. It is not carried out late, as by an ingress that was frozen: its
// client may have done the opposite through another one since. Purchases are decided in a queue, which looks then.
func (s *router) handlePost(path string, h echo.HandlerFunc) {
	s.handle(http.MethodPost, path, func(c echo.Context) error {
		if arrived(c).IsLate() {
			return problemOverloaded
		}
		return h(c)
	})
}

// arrived returns the arrival of what has been read of a request.
func arrived(c echo.Context) accept.Arrival { return accept.Arrived(c.Response().Writer, c.Request()) }

// handle registers a route. It does for each request what is middleware elsewhere: it recovers panics,
// counts, refuses a body that is too large, and answers errors. It returns the handler of the route, which never
// returns an error.
func (s *router) handle(method, path string, h echo.HandlerFunc) echo.HandlerFunc {
	counters := s.metrics.route(method + " " + path)
	var seconds *routeSeconds
	if class := classOf(method, path); class != "" {
		seconds = s.metrics.durations(class)
	}
	bodyMax, tooLarge := int64(accept.MaxBodyBytes), problemTooLarge
	switch path {
	case stripePath:
		bodyMax, tooLarge = stripeBodyMax, problemStripeTooLarge
	case salesPath:
		bodyMax, tooLarge = int64(saleBodyMax), problemSaleTooLarge
	}
	served := func(c echo.Context) error {
		defer func() {
			if cause := recover(); cause != nil {
				s.answerPanic(c, cause)
			}
			counters.count(c.Response().Status)
		}()
		if seconds != nil {
			seconds.observeHead(c)
		}
		s.closeIfStopping(c)
		if c.Request().ContentLength > bodyMax {
			s.fail(c, tooLarge)
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

// plainHandler answers the plain purchases of a connection by the handler of their route.
func (s *router) plainHandler(w http.ResponseWriter, r *http.Request) func(sale string) {
	c := s.echo.NewContext(r, w)
	names, values := []string{"sale"}, []string{""}
	return func(sale string) {
		s.metrics.plainPurchases.Inc()
		if s.cors != nil {
			s.cors.allow(w.Header(), r.Header["Origin"])
		}
		c.Reset(r, w)
		c.SetPath(purchasePath)
		values[0] = sale
		c.SetParamNames(names...)
		c.SetParamValues(values...)
		_ = s.servePurchase(c) // it answers its errors itself
	}
}

// closeIfStopping closes the connection behind the answer of a stopping server, so that the client's next
// request goes to another server.
func (s *router) closeIfStopping(c echo.Context) {
	if s.stopping.Load() {
		c.Response().Header()["Connection"] = closeConnection
	}
}

// fail answers an error with its problem, and logs it if our own servers are at fault.
func (s *router) fail(c echo.Context, err error) {
	p := problemFor(err)
	r := c.Request()
	if isOutage(r.Context(), p) {
		s.outages.log(r.Context(), s.log, r.Method+" "+c.Path(), err, func() []any { return pathIDs(c) })
	}
	writeProblem(c, p)
}

// pathIDs returns the ids in the path of a request, for the log: its order or its sale.
func pathIDs(c echo.Context) (fields []any) {
	for i, name := range c.ParamNames() {
		if id, ok := parseID(c.ParamValues()[i]); ok {
			fields = append(fields, name, id)
		}
	}
	return fields
}

// answerPanic answers a panic with an id that finds the stack in the log.
func (s *router) answerPanic(c echo.Context, cause any) {
	if cause == http.ErrAbortHandler { //nolint:errorlint // net/http compares it like this
		panic(cause)
	}
	r := c.Request()
	id := uuid.NewString()
	s.log.With(pathIDs(c)...).ErrorContext(r.Context(), "request panicked", "request_id", id, "method", r.Method,
		"route", c.Path(),
		"panic", fmt.Sprint(cause), "stack", string(debug.Stack()))
	if c.Response().Committed {
		// A partial answer must not look like a complete one.
		panic(http.ErrAbortHandler)
	}
	writeProblem(c, &problem{Kind: problems.Internal, requestID: id, detail: "See the server's log for this request_id."})
}

// traced makes the span of a request that has a sampled parent. It is not called if tracing is off.
func (s *router) traced(name, method, path string, h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		r := c.Request()
		span := s.config.Tracer.Request(r.Header, name)
		if !span.On() {
			return h(c)
		}
		span.Text("http.request.method", method)
		span.Text("http.route", path)
		span.Text("url.path", r.URL.Path)
		scheme := "http"
		if s.limits.proxies.Secure(r) {
			scheme = "https"
		}
		span.Text("url.scheme", scheme)
		if host := (&url.URL{Host: r.Host}).Hostname(); host != "" { // the reader of plain purchases drops it
			span.Text("server.address", host)
		}
		for i, param := range c.ParamNames() {
			if id, ok := parseID(c.ParamValues()[i]); ok {
				span.Text("stampede."+param+"_id", id.String())
			}
		}
		c.SetRequest(r.WithContext(span.In(r.Context())))
		defer func() {
			status := c.Response().Status
			span.Number("http.response.status_code", int64(status))
			if status >= http.StatusInternalServerError {
				span.FailAs(strconv.Itoa(status))
			}
			span.End()
		}()
		return h(c)
	}
}

// isOutage reports whether a problem is worth a log line, because our own servers are at fault: a refusal, a
// client that has left, and an overload, which the metrics count, are not.
func isOutage(ctx context.Context, p *problem) bool {
	return p.Status >= http.StatusInternalServerError && p.Slug != problems.Overloaded.Slug &&
		p.Kind != problems.Withdrawn && ctx.Err() == nil
}

// outageLogInterval bounds the log lines of an outage, which a crowd would write a thousand times a second.
const outageLogInterval = time.Second

// outageLog logs the first error of each interval, and how many it skipped before.
type outageLog struct {
	cooldown cooldown
	skipped  atomic.Int64
}

func (l *outageLog) log(ctx context.Context, log *slog.Logger, route string, err error, ids func() []any) {
	if !l.cooldown.start(outageLogInterval) {
		l.skipped.Add(1)
		return
	}
	log.With(ids()...).ErrorContext(ctx, "request failed", "route", route, "error", err, "skipped", l.skipped.Swap(0))
}

// cooldown is a time in which something is not repeated.
type cooldown struct{ untilNanos atomic.Int64 }

// start returns false during a cooldown; otherwise it starts one.
func (c *cooldown) start(length time.Duration) bool {
	now := time.Now()
	until := c.untilNanos.Load()
	return now.UnixNano() >= until && c.untilNanos.CompareAndSwap(until, now.Add(length).UnixNano())
}
