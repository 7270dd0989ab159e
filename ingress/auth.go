package ingress

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"
	"golang.org/x/time/rate"

	"stampede/internal/operators"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/reservation/problems"
)

// authenticator identifies the buyer of a request, by an id that order.ValidateUser accepts.
type authenticator interface {
	user(r *http.Request) (string, error)
}

func newAuthenticator(ctx context.Context, c Config) (authenticator, error) {
	if c.Auth == AuthHeader {
		return headerAuth{name: http.CanonicalHeaderKey(c.AuthHeader)}, nil
	}
	return newJWTAuth(ctx, c)
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

// How the keys of a JWKS URL are kept fresh.
const (
	jwksTimeout = 3 * time.Second
	jwksRefresh = 15 * time.Minute
	// jwksMissInterval is the pause between fetches because of unknown keys, which any client can invent.
	jwksMissInterval = 10 * time.Second
	// jwksMissWait bounds how long a request with an unknown key waits for its fetch.
	jwksMissWait = 2 * time.Second
	jwksBytesMax = 1 << 20
)

// clockLeeway bounds how far the clock of a token's issuer may differ from ours.
const clockLeeway = 30 * time.Second

// asymmetric lists the methods that need only a public key. HMAC must not be among them: it would take a public
// key for a secret.
var asymmetric = []string{"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}

// jwtAuth takes the subject of a signed token.
type jwtAuth struct {
	parser *jwt.Parser
	// key finds the key that verifies a token.
	key func(context.Context) jwt.Keyfunc
	// keysMissing reports that there are no keys, so that no token can be verified.
	keysMissing func(context.Context) bool
}

func newJWTAuth(ctx context.Context, c Config) (*jwtAuth, error) {
	options := []jwt.ParserOption{jwt.WithExpirationRequired(), jwt.WithLeeway(clockLeeway)}
	if c.JWTIssuer != "" {
		options = append(options, jwt.WithIssuer(c.JWTIssuer))
	}
	if c.JWTAudience != "" {
		options = append(options, jwt.WithAudience(c.JWTAudience))
	}
	if c.JWTSecret != "" {
		secret := []byte(c.JWTSecret)
		key := func(*jwt.Token) (any, error) { return secret, nil }
		return &jwtAuth{
			parser:      jwt.NewParser(append(options, jwt.WithValidMethods([]string{jwt.SigningMethodHS256.Alg()}))...),
			key:         func(context.Context) jwt.Keyfunc { return key },
			keysMissing: func(context.Context) bool { return false },
		}, nil
	}
	keys, err := keyfunc.NewDefaultOverrideCtx(ctx, []string{c.JWKSURL}, keyfunc.Override{
		Client: &http.Client{Transport: keySets{}}, HTTPTimeout: jwksTimeout, RefreshInterval: jwksRefresh,
		RefreshUnknownKID: rate.NewLimiter(rate.Every(jwksMissInterval), 1), RateLimitWaitMax: jwksMissWait,
		RefreshErrorHandlerFunc: func(u string) func(context.Context, error) {
			return func(ctx context.Context, err error) {
				c.Logger.LogAttrs(ctx, slog.LevelError, "fetch JWKS", slog.String("url", u), slog.Any("error", err))
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("JWKS: %w", err)
	}
	return &jwtAuth{
		parser: jwt.NewParser(append(options, jwt.WithValidMethods(asymmetric))...),
		key:    keys.KeyfuncCtx,
		keysMissing: func(ctx context.Context) bool {
			known, err := keys.Storage().KeyReadAll(ctx)
			return err != nil || len(known) == 0
		},
	}, nil
}

// keySets makes an answer without keys an error, as that of a proxy in maintenance: it would replace the known keys.
type keySets struct{}

// RoundTrip implements http.RoundTripper.
func (keySets) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := http.DefaultTransport.RoundTrip(r)
	if err != nil || answer.StatusCode != http.StatusOK {
		return answer, err
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, jwksBytesMax))
	err = errors.Join(err, answer.Body.Close())
	var set struct{ Keys []json.RawMessage }
	if err == nil {
		err = json.Unmarshal(body, &set)
	}
	if err == nil && len(set.Keys) == 0 {
		err = errors.New("the answer has no keys")
	}
	if err != nil {
		return nil, err
	}
	answer.Body = io.NopCloser(bytes.NewReader(body))
	return answer, nil
}

func (a *jwtAuth) user(r *http.Request) (string, error) {
	token, err := bearer(r.Header, challengeBuyer)
	if err != nil {
		return "", err
	}
	var claims jwt.RegisteredClaims
	if _, err := a.parser.ParseWithClaims(token, &claims, a.key(r.Context())); err != nil {
		if errors.Is(err, jwt.ErrTokenUnverifiable) && a.keysMissing(r.Context()) {
			return "", fmt.Errorf("%w: no keys to verify tokens", reservation.ErrUnavailable)
		}
		return "", unauthorized(tokenProblem(err), challengeBuyer+errorInvalid)
	}
	if claims.Subject == "" {
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

// admit returns the name of the operator who makes the request, if their role is high enough.
func (g operatorsGate) admit(r *http.Request, lowest operators.Role) (name string, err error) {
	if !g.known.Configured() {
		return "", forbidden(
			"Operators' calls are disabled: the server has no STAMPEDE_ADMIN_TOKEN and no STAMPEDE_OPERATORS_FILE.", "")
	}
	token, err := bearer(r.Header, challengeAdmin)
	if err != nil {
		return "", err
	}
	person, ok := g.known.Find(token)
	switch {
	case !ok:
		return "", unauthorized("The operator's token is wrong.", challengeAdmin+errorInvalid)
	case person.Role < lowest:
		return "", forbidden("This call needs the role "+lowest.String()+", and "+person.Name+" has the role "+
			person.Role.String()+".", `, scope="`+lowest.String()+`"`)
	}
	return person.Name, nil
}
