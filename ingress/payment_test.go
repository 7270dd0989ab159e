package ingress

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

var cashier = bearing("token-cashier")

// newReference makes a reference that no other test has: all sales share them.
func newReference() string { return "pi_" + uuid.NewString() }

// reports reports money and returns what became of it: its state, and the reason of a refund.
func (s *shop) reports(reference, rest string) (payment map[string]any, outcome string) {
	s.t.Helper()
	payment = s.post(paymentsPath, fmt.Sprintf(`{"reference":%q%s}`, reference, rest), cashier).is(http.StatusOK)
	require.Equal(s.t, reference, payment["reference"])
	return payment, strings.TrimSpace(fmt.Sprint(payment["state"], " ", orEmpty(payment["reason"])))
}

func orEmpty(v any) any {
	if v == nil {
		return ""
	}
	return v
}

func ofOrder(id uuid.UUID) string { return fmt.Sprintf(`,"order_id":%q`, id) }

// A webhook of the shop acknowledges each of these, and repeats all else.
func TestReportedMoneyIsAlwaysKept(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	sale := s.sale(reservation.Terms{Stock: 20, PaymentWindow: time.Hour})
	priced := s.sale(reservation.Terms{Stock: 20, PaymentWindow: time.Hour, UnitPrice: 4900, Currency: "EUR"})
	confirmed := func(sale uuid.UUID) uuid.UUID {
		_, id := s.confirm(sale, uuid.NewString())
		return id
	}
	_, cancelled := s.confirm(sale, "ada")
	s.cancel(orderPath(cancelled), as("ada")).is(http.StatusOK)
	_, late := s.confirm(sale, "eve")
	s.overdue(late)
	_, reserved := s.order(sale, "bob")
	final := confirmed(s.sale(reservation.Terms{Stock: 1}))
	for _, test := range []struct{ rest, outcome, unreadable string }{
		{ofOrder(confirmed(sale)), "settled", ""},
		{ofOrder(confirmed(sale)) + `,"amount":12,"currency":"EUR","livemode":true,"x":{"a":[1]}`, "settled", ""},
		{ofOrder(final), "settled", ""},
		{ofOrder(confirmed(priced)) + `,"amount":4900,"currency":"EUR"`, "settled", ""},
		{ofOrder(confirmed(priced)) + `,"amount":4901,"currency":"EUR"`, "refund_due amount-mismatch", ""},
		{ofOrder(confirmed(priced)) + `,"amount":4900,"currency":"USD"`, "refund_due amount-mismatch", ""},
		{ofOrder(confirmed(priced)) + `,"amount":4900`, "refund_due amount-mismatch", ""},
		{ofOrder(confirmed(priced)), "refund_due amount-mismatch", ""},
		{ofOrder(confirmed(sale)) + `,"amount":"12"`, "refund_due amount-mismatch", `amount "12"`},
		{ofOrder(confirmed(sale)) + `,"amount":12.5`, "refund_due amount-mismatch", "amount 12.5"},
		{ofOrder(confirmed(priced)) + `,"amount":4900.0,"currency":"EUR"`, "settled", ""},
		{ofOrder(confirmed(priced)) + `,"amount":4.9e3,"currency":"eur","x":NaN`, "settled", ""},
		{ofOrder(confirmed(sale)) + `,"amount":4900.5e-1`, "refund_due amount-mismatch", "amount 4900.5e-1"},
		{ofOrder(confirmed(sale)) + `,"amount":-1`, "refund_due amount-mismatch", "amount -1"},
		{
			ofOrder(confirmed(sale)) + `,"amount":9223372036854775808`, "refund_due amount-mismatch",
			"amount 9223372036854775808",
		},
		{ofOrder(confirmed(sale)) + `,"currency":"eur1"`, "refund_due amount-mismatch", `currency "eur1"`},
		{
			ofOrder(confirmed(sale)) + `,"amount":"\u0000\ud800"`, "refund_due amount-mismatch",
			`amount "\u0000\ud800"`,
		},
		{ofOrder(uuid.New()) + ofOrder(confirmed(sale)), "settled", ""}, // the last one counts
		{ofOrder(cancelled), "refund_due order-cancelled", ""},
		{ofOrder(late), "refund_due order-expired", ""},
		{ofOrder(reserved), "waiting", ""},
		{ofOrder(order.NewOrderID(sale)), "waiting", ""},
		{`,"order_id":"cart 7"`, "refund_due order-not-found", `order_id "cart 7"`},
		{`,"order_id":17`, "refund_due order-not-found", "order_id 17"},
		{`,"order_id":null`, "refund_due order-not-found", ""},
		{"", "refund_due order-not-found", ""},
	} {
		payment, outcome := s.reports(newReference(), test.rest)
		require.Equal(t, test.outcome, outcome, test.rest)
		require.Equal(t, test.unreadable, orEmpty(payment["unreadable"]), test.rest)
	}
	longest := newReference() + strings.Repeat("r", 255)
	_, outcome := s.reports(longest[:255], ofOrder(confirmed(sale)))
	require.Equal(t, "settled", outcome)
}

// Only what is no report at all is refused, and nothing is kept of it.
func TestWhatIsNoReportOfMoneyIsRefused(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	_, id := s.confirm(s.sale(reservation.Terms{Stock: 1, PaymentWindow: time.Hour}), "ada")
	rest := ofOrder(id)
	for body, detail := range map[string]string{
		"": "JSON object", "[]": "JSON object", `"p"`: "JSON object", "{": "JSON object", "{} {}": "JSON object",
		"null": "JSON object", "{}": "reference", `{"Order_id":1}`: "reference",
		`{"reference":7` + rest + `}`: "reference must be a text", `{"reference":null` + rest + `}`: "reference",
		`{"reference":" "` + rest + `}`: "reference", `{"reference":"a\nb"` + rest + `}`: "ASCII",
		`{"reference":"a\u0000"` + rest + `}`: "ASCII", `{"reference":"ü"` + rest + `}`: "ASCII",
		`{"reference":"` + strings.Repeat("r", 256) + `"` + rest + `}`: "255",
	} {
		p := s.post(paymentsPath, body, cashier).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, body)
	}
	report := fmt.Sprintf(`{"reference":%q%s}`, newReference(), rest)
	s.post(paymentsPath, report+strings.Repeat(" ", 1<<20), cashier).
		isProblem(http.StatusRequestEntityTooLarge, "body-too-large")
	s.ask(http.MethodPost, paymentsPath, strings.NewReader(report), cashier, reqHeader{"Content-Type", "text/plain"}).
		isProblem(http.StatusUnsupportedMediaType, "unsupported-media-type")
	require.Equal(t, "confirmed", s.get(orderPath(id), as("ada")).is(http.StatusOK)["status"])
	require.Empty(t, s.get("/v1/admin/payments?order="+id.String(), cashier).is(http.StatusOK)["payments"])
}

func TestRepeatedReportChangesNothing(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	sale := s.sale(reservation.Terms{Stock: 9, PaymentWindow: time.Hour})
	path, id := s.confirm(sale, "ada")
	_, other := s.confirm(sale, "bob")
	reference := newReference()
	first, outcome := s.reports(reference, ofOrder(id))
	require.Equal(t, "settled", outcome)
	require.Equal(t, sale.String(), first["sale_id"])
	for _, rest := range []string{ofOrder(id), ""} {
		again, _ := s.reports(reference, rest)
		require.Equal(t, first, again)
	}
	paid := s.get(path, as("ada")).is(http.StatusOK)
	require.Equal(t, []any{"paid", reference}, []any{paid["status"], paid["payment_reference"]})
	second := newReference()
	_, outcome = s.reports(second, ofOrder(id))
	require.Equal(t, "refund_due already-paid", outcome)
	require.Equal(t, "confirmed", s.get(orderPath(other), as("bob")).is(http.StatusOK)["status"])
	// The buyer's own report takes no reference of a provider, and the provider's none of a buyer.
	s.pay(orderPath(other), reference, as("bob")).is(http.StatusOK)
	again, _ := s.reports(reference, "")
	require.Equal(t, first, again)
}

// It is kept for people, and decides nothing.
func TestReportThatContradictsAnotherIsUnclear(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	sale := s.sale(reservation.Terms{Stock: 9, PaymentWindow: time.Hour})
	_, id := s.confirm(sale, "ada")
	_, other := s.confirm(sale, "bob")
	reference := newReference()
	s.reports(reference, ofOrder(id)+`,"amount":5,"currency":"EUR"`)
	for rest, reason := range map[string]string{
		ofOrder(other) + `,"amount":5,"currency":"EUR"`: "other-order", ofOrder(id) + `,"amount":6`: "other-amount",
		ofOrder(id) + `,"currency":"USD"`: "other-amount", ofOrder(id) + `,"amount":-1`: "other-amount",
	} {
		report := fmt.Sprintf(`{"reference":%q%s}`, reference, rest)
		p := s.post(paymentsPath, report, cashier).is(http.StatusOK)
		require.Equal(t, []any{"unclear", reason}, []any{p["state"], p["reason"]}, rest)
		require.Regexp(t, "^"+reference+"~[0-9a-f]{8}$", p["reference"])
		require.Equal(t, p, s.post(paymentsPath, report, cashier).is(http.StatusOK), "a repeat of it")
	}
	require.Equal(t, "confirmed", s.get(orderPath(other), as("bob")).is(http.StatusOK)["status"])

	unclear := s.get("/v1/admin/payments?state=unclear&order="+other.String(), cashier).is(http.StatusOK)
	one := unclear["payments"].([]any)[0].(map[string]any)["reference"].(string)
	dismiss := func(reference, body string) reply {
		return s.post(strings.Replace(refundedPath(reference), "/refunded", "/dismissed", 1), body, cashier)
	}
	for body, detail := range map[string]string{
		"{}": "reason", `{"reason":" "}`: "reason", `{"reason":"r","refund_reference":"r"}`: "refund_reference",
	} {
		p := dismiss(one, body).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, body)
	}
	for range 2 {
		p := dismiss(one, `{"reason":"Entered by hand."}`).is(http.StatusOK)
		require.Equal(t, []any{"dismissed", "other-order", "Entered by hand.", "the-cashier"},
			[]any{p["state"], p["reason"], p["note"], p["operator"]})
	}
	dismiss(reference, `{"reason":"r"}`).isProblem(http.StatusConflict, "not-unclear")
	dismiss("pi_unknown", `{"reason":"r"}`).isProblem(http.StatusNotFound, "payment-not-found")
	dismiss("a\x00", `{"reason":"r"}`).isProblem(http.StatusNotFound, "payment-not-found")
	s.post(refundedPath(one), `{"refund_reference":"re_1"}`, cashier).isProblem(http.StatusConflict, "refund-not-due")
	_, outcome := s.reports(newReference()+"-x", `,"order_id":"cart 7"`)
	require.Equal(t, "refund_due order-not-found", outcome)
}

// A buyer's word makes no refund due. What the shop reports under its reference counts in its place.
func TestBuyersWordIsNoMoney(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	path, id := s.confirm(s.sale(reservation.Terms{Stock: 9, PaymentWindow: time.Hour}), "ada")
	first, second := newReference(), newReference()
	s.pay(path, first, as("ada")).is(http.StatusOK)
	s.pay(path, second, as("ada")).isProblem(http.StatusConflict, "already-paid")
	claimed := s.get("/v1/admin/payments?state=claimed&order="+id.String(), cashier).is(http.StatusOK)["payments"].([]any)
	require.Len(t, claimed, 1)
	require.Equal(t, id.String()+":"+second, claimed[0].(map[string]any)["reference"])
	p, outcome := s.reports(second, ofOrder(id))
	require.Equal(t, []any{second, "refund_due already-paid"}, []any{p["reference"], outcome})
}

// The list and its error know each state.
func TestEachStateOfPaymentsIsListed(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	wrong := s.get("/v1/admin/payments?state=due", cashier).isProblem(http.StatusBadRequest, "invalid-request")["detail"]
	for _, state := range order.PaymentStates() {
		s.get("/v1/admin/payments?limit=1&state="+string(state), cashier).is(http.StatusOK)
		require.Contains(t, wrong, string(state))
	}
}

func refundedPath(reference string) string {
	return "/v1/admin/payments/" + url.PathEscape(reference) + "/refunded"
}

func TestRefundsAreNotedAndListed(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	sale := s.sale(reservation.Terms{Stock: 9, PaymentWindow: time.Hour})
	_, id := s.confirm(sale, "ada")
	unique := newReference()
	settled := unique + "/100% of a+b//?#\"ok\""
	s.reports(settled, ofOrder(id))
	var due []string
	for i := range 3 {
		due = append(due, fmt.Sprint(unique, "-", i))
		s.reports(due[i], ofOrder(id))
	}
	list := func(query string) (references []string) {
		t.Helper()
		for next := ""; ; {
			page := s.get("/v1/admin/payments?limit=2&"+query+next, bearing("token-viewer")).is(http.StatusOK)
			for _, p := range page["payments"].([]any) {
				references = append(references, p.(map[string]any)["reference"].(string))
			}
			cursor, more := page["next_cursor"].(string)
			if !more {
				return references
			}
			next = "&cursor=" + cursor
		}
	}
	require.Equal(t, append([]string{settled}, due...), list("order="+id.String()))
	require.Equal(t, due, list("state=refund_due&sale="+sale.String()))
	require.Equal(t, []string{settled}, list("state=settled&sale="+sale.String()))
	require.Empty(t, list("state=waiting&sale="+sale.String()))
	one := func(reference string) []any {
		page := s.get("/v1/admin/payments?reference="+url.QueryEscape(reference), cashier).is(http.StatusOK)
		return page["payments"].([]any)
	}
	require.Len(t, one(settled), 1)
	require.Empty(t, one(settled+"x"))
	require.Empty(t, one("\x00"))
	for query, detail := range map[string]string{
		"state=": "state", "state=due": "state", "sale=": "sale", "order=x": "order", "cursor=x": "cursor",
		"cursor=+1": "cursor", "limit=101": "limit", "reference=": "reference",
		"reference=a&limit=1": "reference", "status=paid": "status",
	} {
		p := s.get("/v1/admin/payments?"+query, cashier).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, query)
	}

	note := func(reference, refund string) reply {
		return s.post(refundedPath(reference), fmt.Sprintf(`{"refund_reference":%q}`, refund), cashier)
	}
	p := note(settled, "re_1").isProblem(http.StatusConflict, "refund-not-due")
	require.Contains(t, p["detail"], "neither refund_due nor unclear")
	s.post(adminPath(orderPath(id))+"/cancel", `{"reason":"r"}`, operator).is(http.StatusOK)
	for range 2 {
		refunded := note(settled, "re_1").is(http.StatusOK)
		require.Equal(t, []any{settled, "refunded", "order-cancelled", "re_1", "the-cashier"}, []any{
			refunded["reference"], refunded["state"], refunded["reason"], refunded["refund_reference"], refunded["operator"],
		})
	}
	p = note(settled, "re_2").isProblem(http.StatusConflict, "already-refunded")
	require.Equal(t, "re_1", p["refund_reference"])
	require.Equal(t, []string{settled}, list("state=refunded&sale="+sale.String()))
	s.reports(unique+"%41", "") // the path of which a URL does not keep as it was sent
	require.Equal(t, unique+"%41", note(unique+"%41", "re_3").is(http.StatusOK)["reference"])
	for _, missing := range []string{unique, settled + "x", "a\x00", "\xff", " "} {
		note(missing, "re_1").isProblem(http.StatusNotFound, "payment-not-found")
	}
	for body, detail := range map[string]string{
		"{}": "refund_reference", `{"refund_reference":" "}`: "refund_reference", `{"refund_reference":"a\nb"}`: "ASCII",
		`{"refund_reference":"` + strings.Repeat("r", 256) + `"}`: "255",
		`{"refund_reference":"r","reference":"r"}`:                "reference",
	} {
		p := s.post(refundedPath(due[0]), body, cashier).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, body)
	}
}

// A shop reports the payments of all buyers from one address, which is limited only without a valid token.
func TestReportsOfMoneyHaveNoRateLimit(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t), func(c *Config) { c.AddressLimit = Limit{Rate: 0.001, Burst: 3} })
	for range 9 {
		_, outcome := s.reports(newReference(), "")
		require.Equal(t, "refund_due order-not-found", outcome)
	}
	for _, token := range []string{"wrong", "token-viewer", "guessed"} {
		require.Less(t, s.post(paymentsPath, "{}", bearing(token)).status, 404)
	}
	s.post(paymentsPath, "{}", bearing("guessed")).isProblem(http.StatusTooManyRequests, "rate-limited")
	s.reports(newReference(), "")
	s.post(paymentsPath, "{}").isProblem(http.StatusTooManyRequests, "rate-limited")
	s.post(paymentsPath, "[]", cashier).isProblem(http.StatusBadRequest, "invalid-request")
	counted := `stampede_payment_reports_total{by="shop",outcome="`
	s.awaitMetrics(counted+`kept"} 10`, counted+`unauthorized"} 3`, counted+`forbidden"} 1`, counted+`anonymous"} 1`,
		counted+`invalid"} 1`, counted+`unavailable"} 0`)
}

func TestBuyersReportPaymentsOnlyWhereTheyMay(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		pay  Switch
		jwt  bool
		isOn bool
	}{{SwitchOn, false, true}, {SwitchOff, false, false}, {"", false, true}, {"", true, false}, {SwitchOn, true, true}} {
		t.Run(fmt.Sprint(test), func(t *testing.T) {
			t.Parallel()
			s, buyer := openShop(t, func(c *Config) {
				if c.BuyerPay = test.pay; test.jwt {
					withJWT(c)
				}
			}), as("ada")
			if test.jwt {
				buyer = bearing(sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims()))
			}
			if r := s.pay(orderPath(uuid.New()), "r-1", buyer); test.isOn {
				r.isProblem(http.StatusNotFound, "order-not-found")
			} else {
				r.isProblem(http.StatusNotFound, "not-found")
			}
		})
	}
	c := Config{BuyerPay: "yes"}
	require.ErrorContains(t, c.Validate(), `STAMPEDE_BUYER_PAY is "yes"`)
}

// The price is known before the sale opens, or after its first look: no purchase waits for it.
func TestPurchaseShowsItsAmount(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.PlainReader = true })
	sale := s.sale(reservation.Terms{Stock: 9, UnitPrice: 4900, Currency: "EUR", PerOrderLimit: 3})
	free := s.sale(reservation.Terms{Stock: 9})
	for _, id := range []uuid.UUID{sale, free} {
		s.get("/v1/sales/" + id.String()).is(http.StatusOK)
	}
	for _, buyer := range []string{"ada", "bob"} {
		bought := s.buy(sale, `{"quantity":3}`, as(buyer), withKey("k")).is(http.StatusAccepted)
		require.Equal(t, []any{14700.0, "EUR"}, []any{bought["amount"], bought["currency"]})
		shown := s.get(orderPath(uuid.MustParse(bought["order_id"].(string))), as(buyer)).is(http.StatusOK)
		require.Equal(t, []any{"reserved", 14700.0, "EUR"}, []any{shown["status"], shown["amount"], shown["currency"]})
	}
	require.NotContains(t, s.buy(free, "", as("ada")).is(http.StatusAccepted), "amount")
	body := `{"name":"x","stock":1,"unit_price":7,"currency":"CHF"}`
	created := uuid.MustParse(s.post("/v1/sales", body, operator).is(http.StatusCreated)["id"].(string))
	require.EqualValues(t, 7, s.buy(created, "", as("ada")).is(http.StatusAccepted)["amount"])

	// Of a sale that nobody has looked at, the first purchases may not know it: the next do.
	unseen := s.sale(reservation.Terms{Stock: 1000, UnitPrice: 5, Currency: "EUR"})
	buyers := 0
	testkit.Eventually(t, 20*time.Second, "the price is known", func() bool {
		buyers++
		return s.buy(unseen, "", as(fmt.Sprint("buyer-", buyers))).is(http.StatusAccepted)["amount"] == 5.0
	})
}

const stripeSecret = "whsec_0123456789abcdef"

// withStripe has the server take Stripe's events, signed with the secrets in a file.
func withStripe(t testing.TB, secrets ...string) (file string, change func(*Config)) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "stripe")
	require.NoError(t, os.WriteFile(file, []byte("# live\n"+strings.Join(secrets, "\n")+"\n"), 0o600))
	return file, func(c *Config) { c.StripeSecretsFile = file }
}

func stripeSign(secret, body string, at time.Time) string {
	mac := hmac.New(sha256.New, []byte(secret))
	_, _ = fmt.Fprintf(mac, "%d.%s", at.Unix(), body)
	return hex.EncodeToString(mac.Sum(nil))
}

func (s *shop) stripe(body, signature string) reply {
	s.t.Helper()
	return s.post(stripePath, body, reqHeader{"Stripe-Signature", signature})
}

// signed sends an event with a signature of now.
func (s *shop) signed(body string) reply {
	s.t.Helper()
	now := time.Now()
	return s.stripe(body, fmt.Sprintf("t=%d,v1=%s", now.Unix(), stripeSign(stripeSecret, body, now)))
}

func TestSignaturesOfStripe(t *testing.T) {
	t.Parallel()
	file, change := withStripe(t, "whsec_another-secret", stripeSecret)
	s := openShop(t, change)
	now := time.Now()
	body := `{"type":"charge.succeeded"}`
	header := func(secret string, at time.Time) string {
		return fmt.Sprintf("t=%d,v1=%s", at.Unix(), stripeSign(secret, body, at))
	}
	good := header(stripeSecret, now)
	wrong := strings.Repeat("0", 64)
	for name, test := range map[string]struct{ body, signature, detail string }{
		"signed":             {body, good, ""},
		"another secret":     {body, header("whsec_another-secret", now), ""},
		"two signatures":     {body, strings.Replace(good, "v1=", "v1="+wrong+",v0="+wrong+",v1=", 1), ""},
		"in time":            {body, header(stripeSecret, now.Add(-4*time.Minute)), ""},
		"clocks differ":      {body, header(stripeSecret, now.Add(time.Minute)), ""},
		"replayed":           {body, header(stripeSecret, now.Add(-6*time.Minute)), "300 seconds from now"},
		"far ahead":          {body, header(stripeSecret, now.Add(6*time.Minute)), "300 seconds from now"},
		"no time in it":      {body, header(stripeSecret, time.Unix(0, 0)), "300 seconds from now"},
		"altered body":       {body + " ", good, "fits no secret"},
		"altered time":       {body, header(stripeSecret, now.Add(time.Second))[:13] + good[13:], "fits no secret"},
		"another time":       {body, strings.Replace(good, "t=", "t=1", 1), "300 seconds from now"},
		"unknown secret":     {body, header("whsec_unknown-secret", now), "fits no secret"},
		"only another kind":  {body, strings.Replace(good, "v1", "v0", 1), "t=…,v1=…"},
		"no time":            {body, good[strings.Index(good, ",")+1:], "300 seconds from now"},
		"no number":          {body, strings.Replace(good, "t=", "t=x", 1), "t=…,v1=…"},
		"nothing":            {body, "", "t=…,v1=…"},
		"empty signature":    {body, fmt.Sprintf("t=%d,v1=", now.Unix()), "t=…,v1=…"},
		"short signature":    {body, good[:len(good)-2], "t=…,v1=…"},
		"signed with no key": {body, header("", now), "fits no secret"},
	} {
		if r := s.stripe(test.body, test.signature); test.detail == "" {
			require.Contains(t, r.is(http.StatusOK), "ignored", name)
		} else {
			require.Contains(t, r.isProblem(http.StatusBadRequest, "invalid-request")["detail"], test.detail, name)
		}
	}
	s.post(stripePath, body).isProblem(http.StatusBadRequest, "invalid-request")
	s.post(stripePath, body, reqHeader{"Stripe-Signature", good}, reqHeader{"Stripe-Signature", good}).
		isProblem(http.StatusBadRequest, "invalid-request")

	// A secret is rotated while the server runs; a file that cannot be used is asked for again.
	require.NoError(t, os.WriteFile(file, []byte("whsec_the-next-secret\n"), 0o600))
	s.stripe(body, good).isProblem(http.StatusBadRequest, "invalid-request")
	s.stripe(body, header("whsec_the-next-secret", now)).is(http.StatusOK)
	many := strings.Repeat("whsec_the-next-secret\n", 17)
	for _, text := range []string{"", "# none", "whsec_the-next-secret\nshort", many} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		s.stripe(body, header("whsec_the-next-secret", now)).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
		c := Config{StripeSecretsFile: file}
		err := c.Validate()
		require.ErrorContains(t, err, "STAMPEDE_STRIPE_SECRETS_FILE")
		require.NotContains(t, err.Error(), "short")
	}
	require.NoError(t, os.Remove(file))
	s.stripe(body, good).isProblem(http.StatusServiceUnavailable, "sale-unavailable")

	openShop(t).signed(body).isProblem(http.StatusNotFound, "not-found")
}

func TestEventsOfStripe(t *testing.T) {
	t.Parallel()
	_, change := withStripe(t, stripeSecret)
	s := openShop(t, withOperators(t), change)
	sale := s.sale(reservation.Terms{Stock: 9, PaymentWindow: time.Hour, UnitPrice: 4900, Currency: "EUR"})
	buyers := 0
	event := func(kind, id, rest string) string {
		return fmt.Sprintf(`{"id":"evt_1","object":"event","type":%q,"data":{"object":{"id":%q,%s}}}`, kind, id, rest)
	}
	metadata := func(id any) string { return fmt.Sprintf(`"metadata":{"order_id":"%v"}`, id) }
	confirmed := func() uuid.UUID {
		buyers++
		_, id := s.confirm(sale, fmt.Sprint("buyer-", buyers))
		return id
	}
	intent := func(reference string, id any) string {
		rest := `"amount":4900,"amount_received":4900,"currency":"eur",` + metadata(id)
		return event("payment_intent.succeeded", reference, rest)
	}
	session := func(kind, reference, status string, id any) string {
		return event("checkout.session."+kind, "cs_1", fmt.Sprintf(
			`"payment_intent":%q,"payment_status":%q,"amount_total":4900,"currency":"eur",%s`, reference, status, metadata(id)))
	}
	// Several events of one payment count once, in any order.
	for _, isIntentFirst := range []bool{true, false} {
		reference, id := newReference(), confirmed()
		events := []string{session("completed", reference, "paid", id), intent(reference, id)}
		if isIntentFirst {
			events[0], events[1] = events[1], events[0]
		}
		first := s.signed(events[0]).is(http.StatusOK)
		require.Equal(t, []any{reference, "settled", id.String(), 4900.0, "EUR"}, []any{
			first["reference"], first["state"], first["order_id"], first["amount"], first["currency"],
		})
		require.Equal(t, first, s.signed(events[1]).is(http.StatusOK))
	}
	slow, id := newReference(), confirmed()
	require.Contains(t, s.signed(session("completed", slow, "unpaid", id)).is(http.StatusOK)["ignored"], "not paid")
	require.Equal(t, "settled", s.signed(session("async_payment_succeeded", slow, "paid", id)).is(http.StatusOK)["state"])
	alone := "cs_" + uuid.NewString()
	p := s.signed(event("checkout.session.completed", alone, `"payment_intent":null,"payment_status":"paid",`+
		`"amount_total":4900,"currency":"eur",`+metadata(confirmed()))).is(http.StatusOK)
	require.Equal(t, []any{alone, "settled"}, []any{p["reference"], p["state"]})

	p = s.signed(intent(newReference(), "cart 7")).is(http.StatusOK)
	require.Equal(t, []any{"unclear-order", `order_id "cart 7"`}, []any{p["reason"], p["unreadable"]})
	p = s.signed(event("payment_intent.succeeded", newReference(), `"amount_received":"x","currency":7,`+
		metadata(confirmed()))).is(http.StatusOK)
	require.Equal(t, []any{"amount-mismatch", `currency 7, amount "x"`}, []any{p["reason"], p["unreadable"]})
	for name, body := range map[string]string{
		"another sale of the account": event("payment_intent.succeeded", newReference(), `"amount_received":1,"metadata":{}`),
		"no metadata":                 event("payment_intent.succeeded", newReference(), `"metadata":null`),
		"free":                        session("completed", "pi_x", "no_payment_required", confirmed()),
		"another type":                event("payment_intent.created", "pi_x", metadata(confirmed())),
		"another object":              `{"type":"customer.updated","data":{"object":{"currency":null,"metadata":[1]}}}`,
		"no type":                     `{}`,
	} {
		require.Contains(t, s.signed(body).is(http.StatusOK), "ignored", name)
	}
	// This call alone takes long bodies.
	long := fmt.Sprintf(`{"type":"x","padding":%q}`, strings.Repeat("x", stripeBodyMax-30))
	require.Contains(t, s.signed(long).is(http.StatusOK), "ignored")
	for _, body := range []string{long + strings.Repeat(" ", 40), strings.Repeat("x", 1<<20)} {
		s.signed(body).isProblem(http.StatusRequestEntityTooLarge, "body-too-large")
	}
}
