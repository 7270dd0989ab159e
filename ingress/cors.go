package ingress

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/labstack/echo/v4"
)

const (
	// anyOrigin is the only entry of Config.CORSOrigins that allows every page. No call uses cookies, so a page gets
	// nothing by it that its server could not ask for.
	anyOrigin = "*"
	// preflightSeconds is how long a browser may keep the answer to a preflight: the most that Chromium does.
	preflightSeconds = "7200"
)

// Headers of answers that scripts may read, besides those that every script may. Date tells them our clock.
const exposedHeaders = "Date, ETag, Idempotency-Replayed, Location, Preference-Applied, Retry-After, WWW-Authenticate"

// Methods and headers of requests that scripts may send.
const (
	browserMethods = "GET, HEAD, POST"
	browserHeaders = "Authorization, Content-Type, Idempotency-Key, Last-Event-ID, Prefer"
)

// cors lets the scripts of some origins read answers (https://fetch.spec.whatwg.org/#http-cors-protocol). Its values
// are shared by all answers and must not be changed.
type cors struct {
	any bool
	// allowed has the value of Access-Control-Allow-Origin for each allowed origin.
	allowed map[string][]string
	headers []string
	// ofSales has the calls below a sale that change something and are not an operator's, such as orders.
	ofSales map[string]bool
}

var (
	varyOrigin       = []string{"Origin"}
	exposed          = []string{exposedHeaders}
	preflightMethods = []string{browserMethods}
	preflightMaxAge  = []string{preflightSeconds}
	originsAny       = []string{anyOrigin}
)

// newCORS returns nil if no origin is allowed: then no answer has a header of CORS.
func newCORS(c Config) *cors {
	if len(c.CORSOrigins) == 0 {
		return nil
	}
	made := &cors{any: c.CORSOrigins[0] == anyOrigin, allowed: map[string][]string{}, headers: []string{browserHeaders}}
	made.ofSales = map[string]bool{}
	for _, origin := range c.CORSOrigins {
		made.allowed[origin] = []string{origin}
	}
	if c.Auth == AuthHeader {
		made.headers = []string{browserHeaders + ", " + http.CanonicalHeaderKey(c.AuthHeader)}
	}
	return made
}

// add learns whom a route is for.
func (o *cors) add(r route) {
	if call, ok := strings.CutPrefix(r.path, "/v1/sales/:sale/"); ok && r.method == http.MethodPost {
		o.ofSales[call] = r.admission.proof != operatorsToken
	}
}

// forBrowsers reports whether scripts of other origins may make a call: not those of operators, of payment providers
// and of monitoring. They may read that a path has no call.
func (o *cors) forBrowsers(method, path string) bool {
	if path == "/metrics" || path == "/v1/admin" || strings.HasPrefix(path, "/v1/admin/") {
		return false
	}
	if method == http.MethodGet || method == http.MethodHead || method == http.MethodOptions {
		return true
	}
	if path == paymentsPath || path == stripePath {
		return false
	}
	sale, ok := strings.CutPrefix(path, "/v1/sales")
	if !ok {
		return true
	}
	// Everything else that changes a sale is an operator's.
	_, call, _ := strings.Cut(strings.TrimPrefix(sale, "/"), "/")
	return o.ofSales[call]
}

// withCORS wraps all routes: it answers preflights, and sets the headers of all other answers.
func (s *router) withCORS(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		r := c.Request()
		method := r.Method
		asked := r.Header["Access-Control-Request-Method"]
		preflight := method == http.MethodOptions && len(asked) == 1
		if preflight {
			method = asked[0]
		}
		if !s.cors.forBrowsers(method, r.URL.Path) {
			return next(c)
		}
		h := c.Response().Header()
		if !s.cors.allow(h, r.Header["Origin"]) || !preflight {
			return next(c)
		}
		h["Access-Control-Allow-Methods"] = preflightMethods
		h["Access-Control-Allow-Headers"] = s.cors.headers
		h["Access-Control-Max-Age"] = preflightMaxAge
		s.closeIfStopping(c)
		return c.NoContent(http.StatusNoContent)
	}
}

// allow sets the headers of an answer to a request with these Origin headers, and reports whether its origin is
// allowed. The answer depends on the origin also where it has none, which caches must know.
func (o *cors) allow(h http.Header, origins []string) bool {
	allowed := originsAny
	if !o.any {
		h["Vary"] = varyOrigin
		if len(origins) != 1 {
			return false
		}
		if allowed = o.allowed[origins[0]]; allowed == nil {
			return false
		}
	}
	h["Access-Control-Allow-Origin"] = allowed
	h["Access-Control-Expose-Headers"] = exposed
	return true
}

// ParseOrigins reads origins as browsers send them ("https://shop.example"), separated by commas, or "*" alone.
func ParseOrigins(text string) (origins []string, err error) {
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			origins = append(origins, part)
		}
	}
	return origins, validateOrigins(origins)
}

func validateOrigins(origins []string) error {
	if len(origins) > 1 && slices.Contains(origins, anyOrigin) {
		return errors.New(`origin "*" allows every page, so it must be the only one`)
	}
	for _, origin := range origins {
		if origin == anyOrigin {
			continue
		}
		if reason := originFault(origin); reason != "" {
			return fmt.Errorf("%q is not an origin as browsers send it: %s", origin, reason)
		}
	}
	return nil
}

// originFault says what is wrong with an origin: browsers send it in one way, and it is compared as text.
func originFault(origin string) string {
	u, err := url.Parse(origin)
	switch {
	case err != nil || u.Host == "" || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https":
		return "want http:// or https:// and a host, and a port unless it is the usual one"
	case strings.Contains(u.Host, "*"):
		return "list each host; there are no wildcards, except * alone"
	case u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" || strings.ContainsAny(origin, "?#"):
		return "nothing may follow the host and the port, not even a slash"
	case origin != strings.ToLower(origin):
		return "browsers write it in lower case"
	case !isVisibleASCII(origin):
		return "browsers write it in ASCII; names of other scripts begin with xn--"
	case strings.HasSuffix(u.Host, ":"):
		return "the port is missing"
	case u.Scheme == "http" && u.Port() == "80" || u.Scheme == "https" && u.Port() == "443":
		return "browsers leave the usual port out"
	}
	return ""
}
