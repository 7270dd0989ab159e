package ingress

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"stampede/internal/forwarded"
	"stampede/reservation/order"
	"stampede/reservation/problems"
)

const (
	// stripeBodyMax bounds an event of Stripe.
	stripeBodyMax = 256 << 10
	// stripeSmallMax is what is read of an event without a place among stripeReadersMax, as of every other call. Most
	// events are smaller.
	stripeSmallMax = 8 << 10
	// stripeReadersMax bounds the longer events that are read at the same time: 16 MB.
	stripeReadersMax = 64
	// stripeTolerance is how old a signature may be, as in Stripe's own libraries, and how far ahead its clock. A later
	// repeat would do no harm: money with one reference counts once.
	stripeTolerance = 300 * time.Second

	stripeSecretsMax     = 16
	minStripeSecretBytes = 16
	stripeMetadataMax    = 40
)

var (
	problemStripeTooLarge = fixed(problem{
		Kind: problems.TooLarge, detail: "An event of Stripe may have at most 262144 bytes.", closes: true,
	})
	problemStripeHeader = invalid("Stripe-Signature must be sent once, as t=…,v1=….")
	problemStripeTime   = invalid("The time in Stripe-Signature is more than 300 seconds from now. Look at the clocks.")
	problemStripeSecret = invalid("Stripe-Signature fits no secret in STAMPEDE_STRIPE_SECRETS_FILE, or the body was " +
		"changed on its way.")
)

// stripeService takes the events of Stripe (https://docs.stripe.com/webhooks). Their signature is the only proof of who
// sends them, and nobody has proved anything before the end of the body.
type stripeService struct {
	*operatorService
	readers stripeReaders
}

// serve serves POST /v1/payments/stripe. Stripe repeats for days what is not answered 2xx.
func (s *stripeService) serve(c echo.Context) error {
	body, err := s.readSigned(c)
	if err != nil {
		outcome := stripeRefused
		if errors.Is(err, problemOverloaded) {
			outcome = stripeOverloaded
		}
		s.metrics.stripe[outcome].Inc()
		s.metrics.countReport(reportByStripe, err, c.Request().Header.Get("Stripe-Signature"))
		return s.limits.limitRefused(c.Request(), err)
	}
	news, outcome := s.readEvent(body)
	if outcome == stripeKept {
		err = s.keepReported(c, func(ctx context.Context) (order.Payment, error) { return s.keepNews(ctx, news) })
		switch {
		case errors.Is(err, order.ErrPaymentNotFound):
			outcome = stripeUnknown
		case errors.Is(err, order.ErrArchived):
			outcome = stripeArchived
		}
	}
	s.metrics.stripe[outcome].Inc()
	if why, ignored := stripeIgnored[outcome]; ignored {
		return writeJSON(c, http.StatusOK, struct {
			Ignored string `json:"ignored"`
		}{why})
	}
	s.metrics.countReport(reportByStripe, err, "")
	return err
}

// keepNews keeps what an event says.
func (s *stripeService) keepNews(ctx context.Context, news stripeNews) (order.Payment, error) {
	switch {
	case news.refund.RefundReference != "":
		return s.keepRefund(ctx, news.refund)
	case news.dispute.ID != "":
		return s.config.Orders.Disputed(ctx, news.dispute)
	}
	return s.config.Orders.Report(ctx, news.Money)
}

// keepRefund notes a refund at Stripe. Of a payment that does not name an order as Stampede does, it is only noted if
// the payment was reported, because it may be another system's.
func (s *stripeService) keepRefund(ctx context.Context, refund order.ProviderRefund) (order.Payment, error) {
	if refund.Unclear != "" {
		if p, err := s.config.OperatorsOrders.Payment(ctx, refund.Reference); err != nil {
			return p, err
		}
	}
	return s.config.Orders.RefundedAtProvider(ctx, refund)
}

// readSigned returns the body of a request that is signed with one of the secrets.
func (s *stripeService) readSigned(c echo.Context) ([]byte, error) {
	at, signatures, err := parseStripeSignature(c.Request().Header["Stripe-Signature"])
	if err != nil {
		return nil, err
	}
	if age := time.Since(time.Unix(at, 0)); age > stripeTolerance || age < -stripeTolerance {
		return nil, problemStripeTime
	}
	body, err := s.readers.read(c, s.limits.proxies.Key(c.Request()))
	if err != nil {
		return nil, err
	}
	secrets, err := readStripeSecrets(s.config.StripeSecretsFile)
	if err != nil {
		return nil, err
	}
	for _, secret := range secrets {
		mac := hmac.New(sha256.New, []byte(secret))
		_, _ = fmt.Fprintf(mac, "%d.%s", at, body)
		sum := mac.Sum(nil)
		if slices.ContainsFunc(signatures, func(s []byte) bool { return hmac.Equal(sum, s) }) {
			return body, nil
		}
	}
	return nil, problemStripeSecret
}

// stripeReaders bounds the long bodies that are read at the same time. At the bound a newcomer takes the place of the
// address that has most of them, and of the oldest there: a body of Stripe is complete at once, so that strangers who
// send slowly, even from many addresses, only take the places of each other.
type stripeReaders struct {
	mu sync.Mutex
	// reading has the oldest first.
	reading []*stripeReader
}

type stripeReader struct {
	address    forwarded.Key
	connection *http.ResponseController
}

// read reads a body.
func (s *stripeReaders) read(c echo.Context, address forwarded.Key) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(c.Request().Body, stripeSmallMax))
	if err == nil && len(body) == stripeSmallMax {
		r := &stripeReader{address, http.NewResponseController(c.Response())}
		s.enter(r)
		var rest []byte
		rest, err = io.ReadAll(io.LimitReader(c.Request().Body, stripeBodyMax+1-stripeSmallMax))
		if !s.leave(r) {
			return nil, problemOverloaded
		}
		body = append(body, rest...)
	}
	switch {
	case err != nil:
		return nil, problemBodyBroken
	case len(body) > stripeBodyMax:
		return nil, problemStripeTooLarge
	}
	return body, nil
}

func (s *stripeReaders) enter(r *stripeReader) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.reading) == stripeReadersMax {
		ofAddress, most := map[forwarded.Key]int{}, 0
		for _, other := range s.reading {
			ofAddress[other.address]++
			most = max(most, ofAddress[other.address])
		}
		at := slices.IndexFunc(s.reading, func(other *stripeReader) bool { return ofAddress[other.address] == most })
		_ = s.reading[at].connection.SetReadDeadline(time.Now()) // ends its read
		s.reading = slices.Delete(s.reading, at, at+1)
	}
	s.reading = append(s.reading, r)
}

// leave is false if another has taken the place.
func (s *stripeReaders) leave(r *stripeReader) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.Index(s.reading, r)
	if at < 0 {
		return false
	}
	s.reading = slices.Delete(s.reading, at, at+1)
	return true
}

// parseStripeSignature reads the header of a signature: its time, and one signature for each secret.
func parseStripeSignature(headers []string) (at int64, signatures [][]byte, err error) {
	if len(headers) != 1 {
		return 0, nil, problemStripeHeader
	}
	for part := range strings.SplitSeq(headers[0], ",") {
		switch name, value, _ := strings.Cut(strings.TrimSpace(part), "="); name {
		case "t":
			if at, err = strconv.ParseInt(value, 10, 64); err != nil {
				return 0, nil, problemStripeHeader
			}
		case "v1":
			if signature, err := hex.DecodeString(value); err == nil && len(signature) == sha256.Size {
				signatures = append(signatures, signature)
			}
		}
	}
	if len(signatures) == 0 {
		return 0, nil, problemStripeHeader
	}
	return at, signatures, nil
}

// readStripeSecrets reads the file of secrets, one a line, without empty lines and those that begin with #. The file is
// read for each event, so that a change is in force at once. The error does not repeat a secret.
func readStripeSecrets(name string) (secrets []string, err error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("the secrets of Stripe (STAMPEDE_STRIPE_SECRETS_FILE): %w", err)
	}
	fault := func(format string, args ...any) error {
		return fmt.Errorf("the secrets of Stripe (STAMPEDE_STRIPE_SECRETS_FILE, %s): %s", name, fmt.Sprintf(format, args...))
	}
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		switch secret := strings.TrimSpace(line); {
		case secret == "" || secret[0] == '#':
		case len(secret) < minStripeSecretBytes || !isVisibleASCII(secret):
			return nil, fault("line %d is no secret (whsec_…) of at least %d characters", number, minStripeSecretBytes)
		default:
			secrets = append(secrets, secret)
		}
	}
	if len(secrets) == 0 || len(secrets) > stripeSecretsMax {
		return nil, fault("it has %d secrets, want 1 to %d, one a line", len(secrets), stripeSecretsMax)
	}
	return secrets, nil
}
