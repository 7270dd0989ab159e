package ingress

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/labstack/echo/v4"

	"stampede/reservation/problems"
)

const (
	stripePath = "/v1/payments/stripe"
	// stripeBodyMax bounds an event of Stripe.
	stripeBodyMax = 256 << 10
	// stripeReadingMax bounds the events that are read at the same time: 16 MB.
	stripeReadingMax = 64
	// stripeTolerance is how old a signature may be, as in Stripe's own libraries. A later repeat would do no harm: money
	// with one reference counts once.
	stripeTolerance = 300 * time.Second

	stripeSecretsMax     = 16
	minStripeSecretBytes = 16
)

var (
	problemStripeTooLarge = fixed(problem{
		Kind: problems.TooLarge, detail: "An event of Stripe may have at most 262144 bytes.", closes: true,
	})
	problemStripeHeader = invalid("Stripe-Signature must be sent once, as t=…,v1=….")
	problemStripeOld    = invalid("The signature in Stripe-Signature is older than 300 seconds. Look at the clocks.")
	problemStripeSecret = invalid("Stripe-Signature fits no secret in STAMPEDE_STRIPE_SECRETS_FILE, or the body was " +
		"changed on its way.")
)

// stripeService takes the events of Stripe (https://docs.stripe.com/webhooks). Their signature is the only proof of who
// sends them.
type stripeService struct {
	*operatorService
	reading slots
}

// serve serves POST /v1/payments/stripe. Stripe repeats for days what is not answered 2xx.
func (s *stripeService) serve(c echo.Context) error {
	return s.reading.hold(func() error {
		body, err := s.readSigned(c.Request())
		if err != nil {
			return s.limits.limitAddress(func(echo.Context) error { return err })(c)
		}
		report, ignored, err := stripeReport(body)
		if err != nil {
			return err
		}
		if ignored != "" {
			return writeJSON(c, http.StatusOK, struct {
				Ignored string `json:"ignored"`
			}{ignored})
		}
		return s.keepMoney(c, report)
	})
}

// readSigned returns the body of a request that is signed with one of the secrets.
func (s *stripeService) readSigned(r *http.Request) ([]byte, error) {
	at, signatures, err := parseStripeSignature(r.Header["Stripe-Signature"])
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, stripeBodyMax+1))
	switch {
	case err != nil:
		return nil, problemBodyBroken
	case len(body) > stripeBodyMax:
		return nil, problemStripeTooLarge
	}
	secrets, err := readStripeSecrets(s.config.StripeSecretsFile)
	if err != nil {
		return nil, err
	}
	for _, secret := range secrets {
		mac := hmac.New(sha256.New, []byte(secret))
		_, _ = fmt.Fprintf(mac, "%d.%s", at, body)
		for sum, i := mac.Sum(nil), 0; i < len(signatures); i++ {
			if hmac.Equal(sum, signatures[i]) {
				if time.Since(time.Unix(at, 0)) > stripeTolerance {
					return nil, problemStripeOld
				}
				return body, nil
			}
		}
	}
	return nil, problemStripeSecret
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
			if signature, err := hex.DecodeString(value); err == nil {
				signatures = append(signatures, signature)
			}
		}
	}
	if at == 0 || len(signatures) == 0 {
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

// stripeReport returns the report of the payment in an event, or why the event reports none. Both events of a payment
// have the reference of its PaymentIntent, so that the money counts once. Money without an order in its metadata is
// ignored: an account may sell more than what is here, and a PaymentIntent does not get the metadata of its session.
func stripeReport(event []byte) (report []byte, ignored string, err error) {
	var e struct {
		Type string `json:"type"`
		Data struct {
			Object map[string]jsontext.Value `json:"object"`
		} `json:"data"`
	}
	if json.Unmarshal(event, &e) != nil {
		return nil, "", invalid("The body is not an event of Stripe.")
	}
	member := func(name string) (text string) {
		_ = json.Unmarshal(e.Data.Object[name], &text) // anything else is like none
		return text
	}
	reference, amount := member("id"), "amount_received"
	switch e.Type {
	case "checkout.session.completed", "checkout.session.async_payment_succeeded":
		if member("payment_status") != "paid" {
			return nil, "The session is not paid yet.", nil
		}
		reference, amount = cmp.Or(member("payment_intent"), reference), "amount_total"
	case "payment_intent.succeeded":
	default:
		return nil, "Events of this type report no payment.", nil
	}
	var metadata struct {
		OrderID string `json:"order_id"`
	}
	if _ = json.Unmarshal(e.Data.Object["metadata"], &metadata); metadata.OrderID == "" {
		return nil, "Its metadata have no order_id.", nil
	}
	report, err = json.Marshal(map[string]any{
		"reference": reference, "order_id": metadata.OrderID, "amount": e.Data.Object[amount],
		"currency": strings.ToUpper(member("currency")),
	})
	return report, "", err
}
