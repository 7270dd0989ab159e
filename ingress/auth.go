package ingress

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/golang-jwt/jwt/v5"
	"github.com/labstack/echo/v4"

	"stampede/internal/keyset"
	"stampede/internal/operators"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/order"
)

// authenticator identifies the buyer of a request, by an id that order.ValidateUser accepts.
type authenticator interface {
	user(r *http.Request) (string, error)
}

// newAuthenticator also returns the key set with which tokens are verified, or nil.
func newAuthenticator(ctx context.Context, c Config) (authenticator, *keyset.Source, error) {
	if c.Auth == AuthHeader {
		c.JWKSURL = "" // it is not used
	}
	keys, err := keyset.New(ctx, c.JWKSURL, c.Logger, c.Metrics)
	if c.Auth == AuthHeader {
		return headerAuth{name: http.CanonicalHeaderKey(c.AuthHeader)}, keys, err
	}
	return newJWTAuth(c, keys), keys, err
}

// headerAuth trusts a header.
type headerAuth struct{ name string }

func (a headerAuth) user(r *http.Request) (string, error) {
	switch ids := r.Header[a.name]; len(ids) {
	case 0:
		return "", unauthorized("Name the buyer in the header "+a.name+".", `Header realm="stampede", name="`+a.name+`"`)
	case 1:
		return ids[0], order.ValidateUser(ids[0])
	default:
		// Behind a proxy that adds the header instead of overwriting it, a client could choose.
		return "", invalid(a.name + " must be sent once.")
	}
}

// Challenges (RFC 6750, section 3). A request without credentials gets no error code.
const (
	challengeBuyer = `Bearer realm="stampede"`
	challengeAdmin = `Bearer realm="stampede-admin"`

	errorMalformed = `, error="invalid_request"`
	errorInvalid   = `, error="invalid_token"`
	errorScope     = `, error="insufficient_scope"`
)

func unauthorized(detail, challenge string) *problem {
	return &problem{Kind: problems.Unauthorized, detail: detail, challenge: challenge}
}

// forbidden is for operators whose token does not suffice; scope is the end of the challenge.
func forbidden(detail, scope string) *problem {
	return &problem{Kind: problems.Forbidden, detail: detail, challenge: challengeAdmin + errorScope + scope}
}

// clockLeeway bounds how far the clock of a token's issuer may differ from ours.
const clockLeeway = 30 * time.Second

// jwtAuth takes the subject of a signed token.
type jwtAuth struct {
	parser *jwt.Parser
	secret []byte
	keys   *keyset.Source // nil with a secret
}

func newJWTAuth(c Config, keys *keyset.Source) *jwtAuth {
	methods := []string{jwt.SigningMethodHS256.Alg()}
	if keys != nil {
		methods = keyset.Methods()
	}
	options := []jwt.ParserOption{
		jwt.WithExpirationRequired(), jwt.WithLeeway(clockLeeway), jwt.WithValidMethods(methods),
	}
	if c.JWTIssuer != "" {
		options = append(options, jwt.WithIssuer(c.JWTIssuer))
	}
	if c.JWTAudience != "" {
		options = append(options, jwt.WithAudience(c.JWTAudience))
	}
	return &jwtAuth{parser: jwt.NewParser(options...), secret: []byte(c.JWTSecret), keys: keys}
}

var (
	errTokenHeader = errors.New("crit names an extension that is not known, or kid is no text")
	errNoKeys      = fmt.Errorf("%w: no keys to verify tokens", reservation.ErrUnavailable)
)

// key returns what may verify a token.
func (a *jwtAuth) key(token *jwt.Token) (any, error) {
	kid, hasKID := token.Header["kid"]
	id, isText := kid.(string)
	if _, critical := token.Header["crit"]; critical || hasKID && !isText {
		return nil, errTokenHeader // RFC 7515, section 4.1.11: no extension is known here
	}
	if a.keys == nil {
		return a.secret, nil
	}
	known := a.keys.Known()
	if known == nil {
		return nil, errNoKeys
	}
	var set jwt.VerificationKeySet
	for _, one := range known.Find(id, token.Method.Alg()) {
		set.Keys = append(set.Keys, one)
	}
	return set, nil // an empty set is an error
}

// buyerClaims are the claims of a token. Their names are compared exactly: encoding/json would take "SUB" for "sub".
type buyerClaims struct{ jwt.RegisteredClaims }

// UnmarshalJSON implements json.Unmarshaler.
func (c *buyerClaims) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(text, &c.RegisteredClaims, jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
}

// verify returns the claims of a token. If no known key verifies it, it may be signed with a new one.
func (a *jwtAuth) verify(ctx context.Context, token string) (jwt.RegisteredClaims, error) {
	claims, tried, err := a.parse(token)
	unverified := errors.Is(err, jwt.ErrTokenUnverifiable) || errors.Is(err, jwt.ErrTokenSignatureInvalid)
	if !unverified || !tried || a.keys == nil {
		return claims, err
	}
	if busy := a.keys.Renew(ctx); busy != nil {
		return claims, fmt.Errorf("%w: %w", reservation.ErrUnavailable, busy)
	}
	claims, _, err = a.parse(token)
	return claims, err
}

// parse returns the claims of a token, and whether it was tried with the known keys.
func (a *jwtAuth) parse(token string) (_ jwt.RegisteredClaims, tried bool, err error) {
	var claims buyerClaims
	_, err = a.parser.ParseWithClaims(token, &claims, func(t *jwt.Token) (any, error) {
		key, err := a.key(t)
		tried = err == nil
		return key, err
	})
	return claims.RegisteredClaims, tried, err
}

func (a *jwtAuth) user(r *http.Request) (string, error) {
	token, err := bearer(r.Header, challengeBuyer)
	if err != nil {
		return "", err
	}
	claims, err := a.verify(r.Context(), token)
	switch {
	case errors.Is(err, reservation.ErrUnavailable):
		return "", err
	case err != nil:
		return "", unauthorized(tokenProblem(err), challengeBuyer+errorInvalid)
	case claims.Subject == "":
		return "", unauthorized("The token lacks a required claim: sub.", challengeBuyer+errorInvalid)
	}
	if err := order.ValidateUser(claims.Subject); err != nil {
		return "", unauthorized("The sub of the token is not valid: a "+err.Error()+".", challengeBuyer+errorInvalid)
	}
	return claims.Subject, nil
}

// tokenProblem says what a client can correct; it says nothing about signatures and keys.
func tokenProblem(err error) string {
	switch {
	case errors.Is(err, errTokenHeader):
		return "The header of the token has crit, whose extensions are not known here, or a kid that is no text."
	case errors.Is(err, jwt.ErrTokenExpired):
		return "The token has expired."
	case errors.Is(err, jwt.ErrTokenNotValidYet):
		return "The token is not valid yet."
	case errors.Is(err, jwt.ErrTokenInvalidIssuer):
		return "The token is from another issuer."
	case errors.Is(err, jwt.ErrTokenInvalidAudience):
		return "The token is for another audience."
	case errors.Is(err, jwt.ErrTokenRequiredClaimMissing):
		return "The token lacks a required claim: exp, or iss or aud if the server checks them."
	}
	return "The token is not valid."
}

// bearer returns the token of the Authorization header. Credentials of another scheme are like none. What is sent
// twice, or has no token, is malformed (RFC 6750, section 3.1).
func bearer(h http.Header, challenge string) (string, error) {
	values := h["Authorization"]
	if len(values) == 0 {
		return "", unauthorized("Send a token: Authorization: Bearer …", challenge)
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	switch token = strings.TrimLeft(token, " "); {
	case len(values) > 1:
		return "", malformedCredentials("Authorization must be sent once.", challenge)
	case !strings.EqualFold(scheme, "Bearer"):
		return "", unauthorized("Send a token: Authorization: Bearer …", challenge)
	case token == "" || strings.ContainsAny(token, " ,"):
		return "", malformedCredentials("Authorization must have one token: Bearer …", challenge)
	}
	return token, nil
}

func malformedCredentials(detail, challenge string) *problem {
	return &problem{Kind: problems.Invalid, detail: detail, challenge: challenge + errorMalformed}
}

// operatorsGate admits operators.
type operatorsGate struct{ known *operators.Registry }

// admit returns the name of the operator who makes the request, if they may take the action.
func (g operatorsGate) admit(r *http.Request, action operators.Action) (name string, err error) {
	if !g.known.Configured() {
		return "", forbidden(
			"Operators' calls are disabled: the server has no STAMPEDE_ADMIN_TOKEN and no STAMPEDE_OPERATORS_FILE.", "")
	}
	token, err := bearer(r.Header, challengeAdmin)
	if err != nil {
		return "", err
	}
	person, ok := g.known.Find(token)
	lowest := action.Lowest()
	switch {
	case !ok:
		return "", unauthorized("The operator's token is wrong.", challengeAdmin+errorInvalid)
	case !person.May(action):
		return "", forbidden("This call needs the role "+lowest.String()+", and "+person.Name+" has the role "+
			person.Role.String()+".", `, scope="`+lowest.String()+`"`)
	}
	return person.Name, nil
}

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
