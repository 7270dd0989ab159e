// Package loadgen is an open-loop load generator: buyers arrive on a schedule, whether or not the server
// keeps up, and every answer is recorded in a ledger.
//
// Latency counts from the moment a buyer is due, so a stalled server cannot hide the requests that
// it delayed (coordinated omission, a term of Gil Tene's). A Verifier compares the ledger with the
// stored orders, one by one.
package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"

	"stampede/internal/accept"
	"stampede/internal/apiclient"
	"stampede/internal/retry"
	"stampede/reservation"
)

// MaxBuyers bounds a crowd, and with it the memory of its ledger: 34 bytes per buyer, and some 200 for the receipt of
// each accepted order.
const MaxBuyers = 20_000_000

// maxActiveBuyers bounds how many buyers wait at the same time for their due time, a connection, an answer or
// their next try; each is a goroutine. Further buyers start late, which their latency includes.
const maxActiveBuyers = 4096

// Config describes the buyers, their schedule and their behaviour.
type Config struct {
	// URLs are the ingresses, at least one. Buyers, second clicks and retries use them in turn.
	URLs   []string
	Sale   uuid.UUID
	Buyers int
	// Arrivals is when they are due; nil for all at once.
	Arrivals Arrivals
	// Quantity is the units per purchase; 0 means 1.
	Quantity int64
	// Items are the codes of the items, in their order, of a sale that has some. The units of a purchase are then of
	// items that follow each other, beginning with another one than those of the buyer before.
	Items []string
	// DoubleClicks is the share of buyers, 0 to 1, who send a second request at the same time: half
	// of them with the same idempotency key, half with another key.
	DoubleClicks float64
	// Connections bounds the connections to each ingress; 0 means 256.
	Connections int
	// TryTimeout bounds one request; 0 means 5 s.
	TryTimeout time.Duration
	// Patience is how long after its due time a buyer retries with the same key while the outcome is
	// unknown or the server is too busy; 0 means 30 s.
	Patience time.Duration
	// Auth signs a request as its buyer; nil means HeaderAuth(accept.UserHeader).
	Auth Auth
}

func (c *Config) setDefaults() {
	if c.Quantity == 0 {
		c.Quantity = 1
	}
	if c.Connections == 0 {
		c.Connections = 256
	}
	if c.Arrivals == nil {
		c.Arrivals = Evenly(0)
	}
	if c.TryTimeout == 0 {
		c.TryTimeout = 5 * time.Second
	}
	if c.Patience == 0 {
		c.Patience = 30 * time.Second
	}
	if c.Auth == nil {
		c.Auth = HeaderAuth(accept.UserHeader)
	}
}

// Validate returns an error for a field that is missing or out of range.
func (c Config) Validate() error {
	c.setDefaults()
	switch {
	case len(c.URLs) == 0:
		return errors.New("a crowd needs the URL of an ingress")
	case c.Buyers < 1 || c.Buyers > MaxBuyers:
		return fmt.Errorf("buyers must be 1 to %d", MaxBuyers)
	case over(c.Arrivals, c.Buyers) < 0 || c.TryTimeout < 0 || c.Patience < 0:
		return errors.New("durations must not be negative")
	case !(c.DoubleClicks >= 0 && c.DoubleClicks <= 1): // true for NaN
		return errors.New("the share of double clicks must be 0 to 1")
	case c.Connections < 1:
		return errors.New("connections must be at least 1")
	case c.Quantity < 1:
		return errors.New("quantity must be at least 1")
	}
	for _, u := range c.URLs {
		if parsed, err := url.Parse(u); err != nil || parsed.Scheme == "" || parsed.Host == "" {
			return fmt.Errorf("%q is not the URL of an ingress: want http://host:port", u)
		}
	}
	return nil
}

// Crowd is one run of a crowd. Run may be called once; the other methods at any time.
type Crowd struct {
	config    Config
	client    *http.Client
	transport *http.Transport
	targets   []string
	ledger    *Ledger
	tally     *tally
	maxActive int           // maxActiveBuyers, except in tests
	next      atomic.Int64  // the next buyer
	start     atomic.Int64  // Unix nanoseconds; 0 before Run
	done      chan struct{} // closed when Run has returned
}

// New checks the configuration and prepares a crowd.
func New(config Config) (*Crowd, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config.setDefaults()
	transport := &http.Transport{
		MaxConnsPerHost:     config.Connections,
		MaxIdleConnsPerHost: config.Connections,
		DisableCompression:  true,
	}
	c := &Crowd{
		config:    config,
		client:    &http.Client{Transport: transport},
		transport: transport,
		ledger:    newLedger(config.Buyers, config.Quantity, config.Items...),
		maxActive: maxActiveBuyers,
		done:      make(chan struct{}),
	}
	c.tally = newTally(c.ledger)
	for _, u := range config.URLs {
		target, err := url.JoinPath(u, "v1", "sales", config.Sale.String(), "orders")
		if err != nil {
			return nil, fmt.Errorf("url %q: %w", u, err)
		}
		c.targets = append(c.targets, target)
	}
	return c, nil
}

// Run runs the crowd and returns when every buyer has an answer or has lost patience. When ctx ends no
// more buyers start; those that have started finish their current try.
func (c *Crowd) Run(ctx context.Context) {
	defer close(c.done)
	defer c.transport.CloseIdleConnections()
	start := time.Now()
	c.start.Store(start.UnixNano())
	c.tally.begin(start)
	var buyers, watching sync.WaitGroup
	stop := make(chan struct{})
	watching.Go(func() { c.tally.watchCPU(stop) })
	for range min(c.maxActive, c.config.Buyers) {
		buyers.Go(func() { c.sendBuyers(ctx, start) })
	}
	buyers.Wait()
	close(stop)
	watching.Wait()
}

// sendBuyers runs one scheduled buyer after the other.
func (c *Crowd) sendBuyers(ctx context.Context, start time.Time) {
	for {
		buyer := int(c.next.Add(1) - 1)
		if buyer >= c.config.Buyers {
			return
		}
		due := start.Add(c.config.Arrivals.due(buyer, c.config.Buyers))
		if !retry.Pause(time.Until(due), ctx.Done()) {
			return
		}
		c.buy(ctx, buyer, due)
	}
}

// buy runs one buyer: one click, or two at the same time.
func (c *Crowd) buy(ctx context.Context, buyer int, due time.Time) {
	c.tally.sentAfter(time.Since(due))
	second, sameKey := doubleClick(buyer, c.config.DoubleClicks)
	if !second {
		c.click(ctx, click{buyer: buyer}, due)
		return
	}
	var clicks sync.WaitGroup
	clicks.Go(func() { c.click(ctx, click{buyer: buyer, second: true, sameKey: sameKey}, due) })
	c.click(ctx, click{buyer: buyer}, due)
	clicks.Wait()
}

// doubleClick chooses the buyers who click twice by a low-discrepancy sequence (multiples of the
// golden ratio, and of the plastic number for the key), so any part of the crowd has the same share
// of them and every run chooses the same ones.
func doubleClick(buyer int, share float64) (second, sameKey bool) {
	const golden, plastic = 0.6180339887498949, 0.7548776662466927
	n := float64(buyer + 1)
	_, a := math.Modf(n * golden)
	_, b := math.Modf(n * plastic)
	return a < share, b < 0.5
}

// Ledger holds the answers to the crowd. It is complete when Run has returned.
func (c *Crowd) Ledger() *Ledger { return c.ledger }

// Progress returns the counts so far.
func (c *Crowd) Progress() Progress {
	p := c.tally.progress()
	p.Buyers = c.config.Buyers
	if start := c.start.Load(); start != 0 {
		p.Elapsed = time.Since(time.Unix(0, start))
		p.Due = dueBy(c.config.Arrivals, c.config.Buyers, p.Elapsed)
	}
	return p
}

// Report summarizes the crowd. Call it when Run has returned.
func (c *Crowd) Report() Report {
	r := c.tally.report()
	r.Buyers = c.config.Buyers
	r.Over = over(c.config.Arrivals, c.config.Buyers)
	r.Quantity = c.config.Quantity
	return r
}

// CreateSale creates a sale at an ingress, as an operator. Without a limit per order it is one unit.
func CreateSale(ctx context.Context, url, adminToken string, terms reservation.Terms) (uuid.UUID, error) {
	client, err := apiclient.New(url, adminToken, "stampede crowd")
	if err != nil {
		return uuid.Nil, fmt.Errorf("create a sale: %w", err)
	}
	defer client.Close()
	terms.PerOrderLimit = max(terms.PerOrderLimit, 1)
	sale, _, err := client.CreateOnce(ctx, terms, uuid.NewString())
	return sale.ID, err
}

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
