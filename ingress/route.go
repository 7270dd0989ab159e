package ingress

import (
	"cmp"
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
	"stampede/ledger/problems"
)

// router serves the routes. It does for each request what is middleware elsewhere.
type router struct {
	*core
	operators operatorsGate
	echo      *echo.Echo
	cors      *cors // nil if no origin is allowed
	// routes are those that were added, also if they are off.
	routes []route
	// servePurchase is the route of purchases. It answers its errors.
	servePurchase echo.HandlerFunc
	outages       outageLog
}

func newRouter(c *core, operators operatorsGate) *router {
	s := &router{core: c, operators: operators, echo: echo.New(), cors: newCORS(c.config)}
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

// add registers a route, unless it is off.
func (s *router) add(r route) {
	s.routes = append(s.routes, r)
	if s.cors != nil {
		s.cors.add(r)
	}
	if !r.isOn {
		return
	}
	served := s.handle(r.method, r, s.admitted(r))
	if r.path == purchasePath {
		s.servePurchase = served
	}
	if r.isLook() {
		s.handle(http.MethodHead, r, s.admitted(r)) // net/http leaves the body out
	}
}

// admitted returns the handler of a route behind its admission. What changes something is not carried out late, as by
// an ingress that was frozen: its client may have done the opposite through another one since.
func (s *router) admitted(r route) echo.HandlerFunc {
	a := &r.admission
	return func(c echo.Context) error {
		switch {
		case r.isLook():
			c.Response().Header()["Cache-Control"] = noStore
		case r.method == http.MethodPost && !a.queued && arrived(c).IsLate():
			return problemOverloaded
		}
		if a.body != nil {
			c.Set(bodyKey, a.body)
		}
		caller, err := s.admit(c, a)
		switch {
		case err != nil:
			return err
		case a.slot == nil:
			return r.serve(c, caller)
		}
		return a.slot.withSlot(func() error { return r.serve(c, caller) })
	}
}

// admit returns who makes a request, once it may be served. Counting costs less than verifying a token, so an address
// is limited first.
func (s *router) admit(c echo.Context, a *admission) (caller string, err error) {
	if a.byHandler {
		return "", nil
	}
	now := time.Now()
	if a.limits != nil {
		if err := s.limits.admitAddress(a.limits, c.Request(), now); err != nil {
			return "", err
		}
	}
	if a.yields {
		s.yieldToBuyers(c)
	}
	caller, err = s.prove(c, a)
	switch {
	case err != nil && a.refused != nil:
		return "", a.refused(c, err)
	case err == nil && a.limits != nil:
		err = s.limits.admitUser(a.limits, caller, now)
	}
	return caller, err
}

// prove returns who makes a request.
func (s *router) prove(c echo.Context, a *admission) (caller string, err error) {
	switch a.proof {
	case buyer:
		return s.auth.user(c.Request())
	case buyerOrTicket:
		return s.ticketHolder(c)
	case ticketIfAny:
		return "", s.checkTicket(c)
	case operatorsToken:
		return s.operators.admit(c.Request(), a.action)
	}
	return "", nil
}

// yieldPause is how much longer a request that yields takes while buyers are served.
const yieldPause = 50 * time.Millisecond

// yieldToBuyers delays anonymous requests while buyers pay, cancel or look at their orders. A payment waits for
// the CPU several times, each time behind all requests that are answered from memory: a crowd of those would
// make it take a quarter of a second. The delay comes before the slot, so that refused requests wait as well.
func (s *router) yieldToBuyers(c echo.Context) {
	if s.inFlight.orders.taken.Load() == 0 {
		return
	}
	select {
	case <-time.After(yieldPause):
	case <-s.waitsEnd:
	case <-c.Request().Context().Done():
	}
}

// arrived returns the arrival of what has been read of a request.
func arrived(c echo.Context) accept.Arrival { return accept.Arrived(c.Response().Writer, c.Request()) }

// handle registers the handler of a method of a route. It does for each request what is middleware elsewhere: it
// recovers panics, counts, refuses a body that is too large, and answers errors. It returns the handler that never
// returns an error.
func (s *router) handle(method string, r route, h echo.HandlerFunc) echo.HandlerFunc {
	name := method + " " + r.path
	counters := s.metrics.route(name)
	var seconds *routeSeconds
	if r.class != untimed {
		seconds = s.metrics.durations(r.class)
	}
	body := cmp.Or(r.admission.body, defaultBody)
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
		if c.Request().ContentLength > int64(body.bytes) {
			s.fail(c, body.tooLarge)
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
		served = s.traced(name, method, r.path, served)
	}
	s.echo.Add(method, r.path, served)
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
