package ingress

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
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
	"stampede/ledger/problems"
	"stampede/reservation/order"
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

// stripeOutcome is what became of a message at Stripe's endpoint.
type stripeOutcome string

const (
	stripeKept       stripeOutcome = "kept"
	stripeRefused    stripeOutcome = "refused"
	stripeOverloaded stripeOutcome = "overloaded" // its place went to another

	stripeNoEvent   stripeOutcome = "no-event"
	stripeThin      stripeOutcome = "thin-event"
	stripeOtherType stripeOutcome = "other-type"
	stripeTestMode  stripeOutcome = "test-mode"
	stripeUnpaid    stripeOutcome = "unpaid"
	stripeFree      stripeOutcome = "free"
	stripeNoOrder   stripeOutcome = "no-order"
	stripeNoRefund  stripeOutcome = "no-refund"
	stripeUnknown   stripeOutcome = "unknown-payment"
	stripeArchived  stripeOutcome = "archived"
)

// stripeIgnored says why a signed message is not kept. Its answer is 200: Stripe would repeat it for days.
var stripeIgnored = map[stripeOutcome]string{
	stripeNoEvent:   "The body is not an event of Stripe, or names no payment.",
	stripeThin:      "A thin event does not have the payment. Create the endpoint in Stripe with the payload style snapshot.",
	stripeOtherType: "Events of this type report no payment, no refund and no dispute.",
	stripeTestMode:  "The payment was made in a test mode of Stripe. STAMPEDE_STRIPE_TEST_MODE=on takes such payments.",
	stripeUnpaid:    "The session is not paid yet.",
	stripeFree:      "The session required no payment, so there is no money.",
	stripeNoOrder:   "Its metadata name no order, under the name in STAMPEDE_STRIPE_METADATA (order_id).",
	stripeNoRefund:  "No money that was received has gone back: an authorization was released.",
	stripeUnknown:   "The payment was not reported here. It may be that of another sale of the account.",
	stripeArchived:  "The payment is archived with its sale, and cannot be changed any more.",
}

// stripePowers has the currencies that Stripe counts in another unit than ISO 4217, by the power of ten between them.
// It counts krónur of Iceland and shillings of Uganda in hundredths, which they no longer have, and ariary of
// Madagascar whole (https://docs.stripe.com/currencies#minor-units).
var stripePowers = map[string]string{"ISK": "e-2", "UGX": "e-2", "MGA": "e2"}

// stripeNews is what an event says: that money came, that it went back, or that its payer disputes it.
type stripeNews struct {
	order.Money
	// refund has a RefundReference, and dispute an ID, if the event is of one.
	refund  order.ProviderRefund
	dispute order.Dispute
}

// readEvent reads what an event says. All events of a payment have the reference of its PaymentIntent, so that the
// money counts once. Money without an order in its metadata is ignored: an account may sell more than what is here, and
// a PaymentIntent does not get the metadata of its session.
//
// It takes events of all versions of the API since 2023. A member of another type than Stripe's is like none.
func (s *stripeService) readEvent(event []byte) (news stripeNews, outcome stripeOutcome) {
	e := order.ReadMembers(event)
	object := order.ReadMembers(order.ReadMembers(e["data"])["object"])
	kind := stripeText(e["type"])
	references, amount := []string{stripeID(object["id"]), stripeID(e["id"])}, object["amount_received"]
	switch kind {
	case "checkout.session.completed", "checkout.session.async_payment_succeeded":
		switch stripeText(object["payment_status"]) {
		case "paid":
		case "no_payment_required":
			return news, stripeFree
		default:
			return news, stripeUnpaid
		}
		references, amount = slices.Insert(references, 0, stripeID(object["payment_intent"])), object["amount_total"]
	case "payment_intent.succeeded":
	case "charge.refunded":
		references = []string{stripeID(object["payment_intent"]), stripeID(object["id"])}
		amount = object["amount"]
	case "charge.dispute.created", "charge.dispute.updated", "charge.dispute.closed", "charge.dispute.funds_withdrawn",
		"charge.dispute.funds_reinstated":
		references = []string{stripeID(object["payment_intent"]), stripeID(object["charge"])}
	case "":
		return news, stripeNoEvent
	default:
		if stripeText(e["object"]) == "v2.core.event" {
			return news, stripeThin
		}
		return news, stripeOtherType
	}
	if s.config.StripeTestMode != SwitchOn && (string(e["livemode"]) == "false" || string(object["livemode"]) == "false") {
		return news, stripeTestMode
	}
	named := order.ReadMembers(object["metadata"])[s.config.StripeMetadata]
	if text := string(named); text == "null" || text == `""` {
		named = nil
	}
	if named == nil && !strings.HasPrefix(kind, "charge.") {
		return news, stripeNoOrder
	}
	currency := object["currency"]
	// Sessions from before Basil, whose buyer has paid in another currency, have the sum that the shop asked for here.
	// Later ones have it as their amount, and what the buyer has paid in presentment_details.
	if asked := order.ReadMembers(object["currency_conversion"]); asked != nil {
		amount, currency = asked["amount_total"], asked["source_currency"]
	}
	var err error
	for _, reference := range references {
		news.Money, err = order.Report{
			Reference: json.RawMessage(strconv.Quote(reference)), OrderID: named,
			Amount: stripeAmount(amount, stripeText(currency)), Currency: currency,
		}.Money()
		if err == nil {
			break
		}
	}
	if err != nil {
		return news, stripeNoEvent
	}
	// Ids of orders have version 7. Those of another system may be any, and its money must not be sent back.
	if news.OrderID.Version() != 7 {
		news.Unclear = order.UnclearOrder
	}
	switch {
	case kind == "charge.refunded":
		return news.refunded(object)
	case strings.HasPrefix(kind, "charge."):
		return news.disputed(object)
	}
	return news, stripeKept
}

// refunded reads how much of a charge went back. Stripe counts what it has never captured as refunded, though nobody
// has received it. The latest refund is the first of the list, which a charge does not have since 2022-11-15: then the
// refund has the name of the charge.
func (n stripeNews) refunded(charge map[string]json.RawMessage) (stripeNews, stripeOutcome) {
	sum := func(name string) int64 {
		money, _ := order.Report{ // a number that cannot be read is 0
			Reference: json.RawMessage(strconv.Quote(n.Reference)), Amount: stripeAmount(charge[name], n.Currency),
		}.Money()
		return money.Amount
	}
	n.refund = order.ProviderRefund{
		Money: n.Money, RefundReference: stripeText(charge["id"]), Refunded: sum("amount_refunded"), By: "stripe",
	}
	if charge["amount_captured"] != nil {
		n.refund.Amount = sum("amount_captured")
		n.refund.Refunded -= n.Amount - n.refund.Amount
	}
	var latest []struct {
		ID string `json:"id"`
	}
	_ = json.Unmarshal(order.ReadMembers(charge["refunds"])["data"], &latest) // else there is none
	if len(latest) > 0 {
		n.refund.RefundReference = latest[0].ID
	}
	switch {
	case order.ValidateRefundReference(n.refund.RefundReference) != nil:
		return n, stripeNoEvent
	case n.refund.Refunded <= 0 || n.refund.Amount <= 0:
		return n, stripeNoRefund
	}
	return n, stripeKept
}

func (n stripeNews) disputed(dispute map[string]json.RawMessage) (stripeNews, stripeOutcome) {
	n.dispute = order.Dispute{Reference: n.Reference, ID: stripeText(dispute["id"])}
	switch stripeText(dispute["status"]) {
	case "won", "warning_closed":
		n.dispute.State = order.DisputeWon
	case "lost":
		n.dispute.State = order.DisputeLost
	}
	if order.ValidateReference(n.dispute.ID) != nil {
		return n, stripeNoEvent
	}
	return n, stripeKept
}

// stripeAmount returns Stripe's number in the units of ISO 4217. A number that is none there stays unreadable.
func stripeAmount(number json.RawMessage, currency string) json.RawMessage {
	power := stripePowers[strings.ToUpper(currency)]
	if power == "" || strings.IndexAny(string(number), "-0123456789") != 0 {
		return number
	}
	return slices.Concat(number, []byte(power))
}

func stripeText(value json.RawMessage) (text string) {
	_ = json.Unmarshal(value, &text) // anything else is like none
	return text
}

// stripeID reads the id of an object, which stands for it unless it is expanded.
func stripeID(value json.RawMessage) string {
	if object := order.ReadMembers(value); object != nil {
		value = object["id"]
	}
	return stripeText(value)
}
