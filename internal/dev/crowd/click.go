package crowd

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"

	"stampede/internal/retry"
)

// click is one purchase attempt of a buyer. All tries of a click have the same idempotency key.
type click struct {
	buyer   int
	second  bool
	sameKey bool // a second click with the key of the first
}

func (k click) number() int {
	if k.second {
		return 1
	}
	return 0
}

// answerBytes bounds how much of a body is read; answers of an ingress are far smaller.
const answerBytes = 4 << 10

// The pauses between the tries of one click.
const (
	firstPause = 50 * time.Millisecond
	maxPause   = time.Second
)

// click tries until the outcome is known or the buyer's patience ends, and records the outcome.
func (c *Crowd) click(ctx context.Context, k click, due time.Time) {
	user, key, wanted := c.ledger.user(k.buyer), c.ledger.key(k), c.ledger.body(k.buyer)
	wait := firstPause
	for try := 0; ; try++ {
		target := c.targets[(k.buyer+k.number()+try)%len(c.targets)]
		a := c.try(ctx, target, user, key, wanted)
		now := time.Now()
		outOfPatience := now.Sub(due)+wait > c.config.Patience || ctx.Err() != nil
		if !a.retryable || outOfPatience {
			c.tally.record(k, a, due, now)
			return
		}
		c.tally.retried(a.problem)
		retry.Pause(max(wait, min(a.retryAfter, maxPause)), ctx.Done())
		wait = min(2*wait, maxPause)
	}
}

// answer is the result of one try.
type answer struct {
	outcome    clickOutcome
	order      uuid.UUID
	receipt    string // of the order, if the answer had one
	problem    string // the slug of a problem, or the kind of a network error
	retryable  bool   // the outcome is unknown, and the same key may be sent again
	retryAfter time.Duration
}

// try sends one request. It is not cancelled when ctx ends, so that a stopped crowd still records the answers to its
// running requests.
func (c *Crowd) try(ctx context.Context, target, user, key, wanted string) answer {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.config.TryTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, strings.NewReader(wanted))
	if err != nil {
		return answer{outcome: failed, problem: "unsendable request"}
	}
	req.Header["Content-Type"] = []string{"application/json"}
	req.Header["Idempotency-Key"] = []string{key}
	if err := c.config.Auth.sign(req.Header, user); err != nil {
		return answer{outcome: failed, problem: "unsignable request"}
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return answer{outcome: unknown, problem: networkProblem(err), retryable: true}
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, answerBytes))
	if err != nil {
		return answer{outcome: unknown, problem: networkProblem(err), retryable: true}
	}
	return parseAnswer(resp, body)
}

// parseAnswer classifies the answer of an ingress.
func parseAnswer(resp *http.Response, body []byte) answer {
	var a answer
	switch resp.StatusCode {
	case http.StatusCreated, http.StatusAccepted:
		a.outcome = accepted
		if resp.Header.Get("Idempotency-Replayed") == "true" {
			a.outcome = replayed
		}
		a.order = orderIn(resp)
		if a.order == uuid.Nil { // no ingress made it
			return answer{outcome: unknown, problem: "acceptance without an order", retryable: true}
		}
		a.receipt = receiptIn(body)
		return a
	}
	var ours bool
	a.problem, ours = problemIn(resp, body)
	switch {
	case a.problem == "sold-out":
		a.outcome = soldOut
	case a.problem == "already-purchased":
		a.outcome = alreadyPurchased
		a.order = orderIn(resp)
	case a.problem == "sale-ended", a.problem == "sale-paused", a.problem == "sale-not-open",
		a.problem == "offers-only":
		a.outcome = notOnSale
	case !ours, resp.StatusCode == http.StatusTooManyRequests, resp.StatusCode >= http.StatusInternalServerError:
		a.outcome, a.retryable = unknown, true
		if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
			a.retryAfter = time.Duration(s) * time.Second
		}
	default:
		a.outcome = failed
	}
	return a
}

// orderIn returns the order in an answer's Location, uuid.Nil for none.
func orderIn(resp *http.Response) uuid.UUID {
	id, err := uuid.Parse(path.Base(resp.Header.Get("Location")))
	if err != nil {
		return uuid.Nil
	}
	return id
}

// receiptIn returns the receipt in the answer to an accepted purchase, "" for none.
func receiptIn(body []byte) string {
	var purchase struct {
		Receipt string `json:"receipt"`
	}
	if json.Unmarshal(body, &purchase) != nil {
		return ""
	}
	return purchase.Receipt
}

// problemIn returns the slug of a problem, or the status for an answer that no ingress made.
func problemIn(resp *http.Response, body []byte) (slug string, ours bool) {
	var problem struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(body, &problem); err == nil {
		if slug, ours = strings.CutPrefix(problem.Type, "/problems/"); ours {
			return slug, true
		}
	}
	return "HTTP " + strconv.Itoa(resp.StatusCode), false
}

func networkProblem(err error) string {
	var network net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "connection reset"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "connection closed"
	case errors.As(err, &network) && network.Timeout():
		return "no answer in time"
	}
	return "network error"
}

// Auth signs requests as a buyer. Implementations are safe for concurrent use.
type Auth interface {
	sign(h http.Header, user string) error
}

// HeaderAuth is the name of the header that names the buyer, for an ingress with STAMPEDE_AUTH=header.
type HeaderAuth string

// sign implements Auth.
func (name HeaderAuth) sign(h http.Header, user string) error {
	h.Set(string(name), user)
	return nil
}

// JWTAuth creates an HS256 token per request, signed with the secret of the ingress.
type JWTAuth struct {
	Secret   []byte
	Issuer   string // no claim if empty
	Audience string // no claim if empty
}

// sign implements Auth.
func (a JWTAuth) sign(h http.Header, user string) error {
	now := time.Now()
	claims := jwt.RegisteredClaims{
		Subject:   user,
		Issuer:    a.Issuer,
		IssuedAt:  jwt.NewNumericDate(now),
		ExpiresAt: jwt.NewNumericDate(now.Add(time.Minute)),
	}
	if a.Audience != "" {
		claims.Audience = jwt.ClaimStrings{a.Audience}
	}
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString(a.Secret)
	if err != nil {
		return err
	}
	h.Set("Authorization", "Bearer "+token)
	return nil
}
