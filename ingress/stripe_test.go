package ingress

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/format"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// stripeEvent is an event as Stripe's API sends it.
func stripeEvent(kind, object string) string {
	return fmt.Sprintf(`{"id":"evt_1","object":"event","api_version":"2025-03-31.basil","livemode":true,"type":%q,`+
		`"data":{"object":%s}}`, kind, object)
}

func paidIntent(reference, amount, currency, rest string) string {
	return stripeEvent("payment_intent.succeeded", fmt.Sprintf(
		`{"id":%q,"object":"payment_intent","amount":%[2]s,"amount_received":%[2]s,"currency":%[3]q,%[4]s}`,
		reference, amount, currency, rest))
}

func paidSession(rest string) string {
	return stripeEvent("checkout.session.completed",
		`{"id":"cs_`+uuid.NewString()+`","object":"checkout.session",`+rest+`}`)
}

func metadataOf(id any) string { return fmt.Sprintf(`"metadata":{"order_id":"%v"}`, id) }

// stripeCurrencies are those of https://docs.stripe.com/currencies in 2026, by the digits of their minor unit in
// Stripe's amounts. Payouts of some have other rules, and are not paid by buyers.
var stripeCurrencies = map[int]string{
	0: "BIF CLP DJF GNF JPY KMF KRW MGA PYG RWF VND VUV XAF XOF XPF",
	2: "USD AED AFN ALL AMD ANG AOA ARS AUD AWG AZN BAM BBD BDT BMD BND BOB BRL BSD BWP BYN BZD CAD CDF CHF CNY COP CRC " +
		"CVE CZK DKK DOP DZD EGP ETB EUR FJD FKP GBP GEL GIP GMD GTQ GYD HKD HNL HTG HUF IDR ILS INR ISK JMD KES KGS KHR KYD " +
		"KZT LAK LBP LKR LRD LSL MAD MDL MKD MMK MNT MOP MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD PAB PEN PGK PHP PKR " +
		"PLN QAR RON RSD RUB SAR SBD SCR SEK SGD SHP SLE SOS SRD STD SZL THB TJS TOP TRY TTD TWD TZS UAH UGX UYU UZS WST XCD " +
		"XCG YER ZAR ZMW",
	3: "BHD JOD KWD OMR TND",
}

// 5,000 of any currency are 5,000, whatever unit Stripe counts it in.
func TestStripesUnitsAreThoseOfISO4217(t *testing.T) {
	t.Parallel()
	s := stripeService{operatorService: &operatorService{core: &core{config: Config{StripeMetadata: "order_id"}}}}
	for digits, currencies := range stripeCurrencies {
		for currency := range strings.FieldsSeq(currencies) {
			want, ok := format.ParseMoney("5000", currency)
			require.True(t, ok)
			number := "5000" + strings.Repeat("0", digits)
			money, outcome := s.readEvent([]byte(paidIntent("pi_1", number, strings.ToLower(currency), metadataOf("x"))))
			require.Equal(t, stripeKept, outcome)
			require.Equal(t, []any{want, currency, `order_id "x"`}, []any{money.Amount, money.Currency, money.Unreadable})
		}
	}
	// What is no whole number of minor units is unreadable, and is not rounded.
	for number, unreadable := range map[string]string{"500050": "amount 500050e-2", "5e5": "amount 5e5e-2", "null": ""} {
		id := uuid.New()
		money, _ := s.readEvent([]byte(paidIntent("pi_1", number, "isk", metadataOf(id))))
		require.Equal(t, []any{int64(0), unreadable, id}, []any{money.Amount, money.Unreadable, money.OrderID}, number)
	}
}

// openStripe is a shop with Stripe's endpoint, and a maker of confirmed orders.
func openStripe(
	t *testing.T, change ...func(*Config),
) (s *shop, confirmed func(price int64, currency string) uuid.UUID) {
	t.Helper()
	_, stripe := withStripe(t, stripeSecret)
	s = openShop(t, append(change, withOperators(t), stripe)...)
	return s, func(price int64, currency string) uuid.UUID {
		sale := s.sale(reservation.Terms{Stock: 1, PaymentWindow: time.Hour, UnitPrice: price, Currency: currency})
		_, id := s.confirm(sale, uuid.NewString())
		return id
	}
}

func TestEventsOfEveryStripeSettle(t *testing.T) {
	t.Parallel()
	s, confirmed := openStripe(t)
	eur := func() uuid.UUID { return confirmed(4900, "EUR") }
	session := func(rest string) string {
		return paidSession(`"payment_status":"paid","amount_total":4900,"currency":"eur",` + rest + metadataOf(eur()))
	}
	withIntent := func(rest string) string { return session(`"payment_intent":"` + newReference() + `",` + rest) }
	for name, body := range map[string]string{
		"EUR":        paidIntent(newReference(), "4900", "eur", metadataOf(eur())),
		"ISK":        paidIntent(newReference(), "500000", "isk", metadataOf(confirmed(5000, "ISK"))),
		"MGA":        paidIntent(newReference(), "5000", "mga", metadataOf(confirmed(500000, "MGA"))),
		"a float":    paidIntent(newReference(), "4900.0", "eur", metadataOf(eur())),
		"of 2023":    strings.Replace(withIntent(`"currency_conversion":null,`), "2025-03-31.basil", "2023-10-16", 1),
		"of today":   withIntent(`"presentment_details":{"presentment_amount":5400,"presentment_currency":"usd"},`),
		"expanded":   session(`"payment_intent":{"id":"` + newReference() + `","object":"payment_intent"},`),
		"no version": strings.Replace(withIntent(""), `"livemode":true,`, "", 1),
		"the buyer's currency": paidSession(`"payment_status":"paid","amount_total":5400,"currency":"usd",` +
			`"currency_conversion":{"amount_subtotal":4900,"amount_total":4900,"fx_rate":"1.10","source_currency":"eur"},` +
			metadataOf(eur())),
		"the buyer's currency, of króna": paidSession(`"payment_status":"paid","amount_total":4400,"currency":"usd",` +
			`"currency_conversion":{"amount_total":500000,"source_currency":"isk"},` + metadataOf(confirmed(5000, "ISK"))),
		// What strict JSON refuses, in parts that nobody needs.
		"half an emoji":       withIntent(`"customer_details":{"name":"Ann \ud83c"},`),
		"not UTF-8":           withIntent(`"customer_details":{"name":"` + "\xff\xf0\x9f" + `"},`),
		"given twice":         withIntent(`"currency":"usd","currency":"eur","x":{"a":1,"a":2},`),
		"a raw line end":      withIntent(`"customer_details":{"name":"` + "A\nB" + `"},`),
		"a mark":              "\ufeff" + withIntent(""),
		"no number":           withIntent(`"x":[NaN,-Infinity,1e999],`),
		"many brackets":       withIntent(`"x":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `,`),
		"a letter in capital": strings.Replace(withIntent(""), `"eur"`, `"EUR"`, 1),
	} {
		require.Equal(t, "settled", s.signed(body).is(http.StatusOK)["state"], name)
	}

	id := newReference()
	expanded := s.signed(session(`"payment_intent":{"id":"` + id + `","amount":4900},`)).is(http.StatusOK)
	require.Equal(t, id, expanded["reference"])
}

// What is signed is never refused: Stripe would repeat it for days.
func TestSignedEventsOfStripeAreKeptOrIgnored(t *testing.T) {
	t.Parallel()
	s, confirmed := openStripe(t)
	for metadata, unreadable := range map[string]string{
		`{"order_id":17}`: "order_id 17", `{"order_id":"cart 7"}`: `order_id "cart 7"`, `{"order_id":[1]}`: "order_id [1]",
		`{"order_id":"\ud83d"}`: `order_id "\ud83d"`, `{"order_id":"` + "\xff" + `"}`: `order_id "` + "\ufffd" + `"`,
	} {
		p := s.signed(paidIntent(newReference(), "4900", "eur", `"metadata":`+metadata)).is(http.StatusOK)
		require.Equal(t, []any{"unclear-order", unreadable}, []any{p["reason"], p["unreadable"]}, metadata)
	}
	for amount, unreadable := range map[string]string{
		"500050": "amount 500050e-2", `"5000"`: `amount "5000"`, "-500000": "amount -500000e-2",
	} {
		p := s.signed(paidIntent(newReference(), amount, "isk", metadataOf(confirmed(5000, "ISK")))).is(http.StatusOK)
		require.Equal(t, []any{"amount-mismatch", unreadable}, []any{p["reason"], p["unreadable"]}, amount)
	}
	// Without a payment that has a name, the event is one.
	nameless := paidIntent("", "4900", "eur", metadataOf(confirmed(4900, "EUR")))
	named := "evt_" + uuid.NewString()
	p := s.signed(strings.Replace(nameless, "evt_1", named, 1)).is(http.StatusOK)
	require.Equal(t, []any{named, "settled"}, []any{p["reference"], p["state"]})

	paid, free := `"payment_status":"paid","amount_total":4900,"currency":"eur",`, `"payment_status":"no_payment_required",`
	for name, test := range map[string]struct{ body, why string }{
		"nothing":          {"", "not an event"},
		"a list":           {"[1]", "not an event"},
		"a text":           {`"x"`, "not an event"},
		"half":             {`{"type":"payment_intent.succeeded","data":{`, "not an event"},
		"no type":          {"{}", "not an event"},
		"no JSON":          {"type=payment_intent.succeeded", "not an event"},
		"nameless":         {strings.Replace(nameless, "evt_1", "", 1), "names no payment"},
		"bad name":         {strings.ReplaceAll(nameless, "evt_1", "ü"), "names no payment"},
		"no object":        {`{"id":"evt_1","type":"payment_intent.succeeded","data":null}`, "name no order"},
		"too deep":         {paidIntent("pi_1", "1", "eur", `"x":`+strings.Repeat("[", 20000)), "not an event"},
		"thin":             {`{"id":"evt_1","object":"v2.core.event","type":"v1.payment_intent.succeeded"}`, "payload style"},
		"another type":     {stripeEvent("charge.updated", "{}"), "of this type"},
		"free":             {paidSession(free + `"amount_total":0,` + metadataOf("x")), "required no payment"},
		"set up":           {paidSession(free + `"amount_total":null,` + metadataOf("x")), "required no payment"},
		"unpaid":           {paidSession(`"payment_status":"unpaid",` + metadataOf("x")), "not paid yet"},
		"no status":        {paidSession(metadataOf("x")), "not paid yet"},
		"no metadata":      {paidSession(paid + `"metadata":null`), "STAMPEDE_STRIPE_METADATA"},
		"empty metadata":   {paidSession(paid + metadataOf("")), "STAMPEDE_STRIPE_METADATA"},
		"null in metadata": {paidSession(paid + `"metadata":{"order_id":null}`), "STAMPEDE_STRIPE_METADATA"},
		"other metadata":   {paidSession(paid + `"metadata":{"Order_ID":"x","order":"x"}`), "STAMPEDE_STRIPE_METADATA"},
	} {
		require.Contains(t, s.signed(test.body).is(http.StatusOK)["ignored"], test.why, name)
	}
	shown := s.get("/metrics").body
	for outcome, n := range map[stripeOutcome]int{
		stripeKept: 9, stripeNoEvent: 9, stripeThin: 1, stripeOtherType: 1, stripeTestMode: 0, stripeUnpaid: 2, stripeFree: 2,
		stripeNoOrder: 5, stripeRefused: 0, stripeOverloaded: 0,
	} {
		require.Contains(t, shown, fmt.Sprintf("stampede_stripe_messages_total{outcome=%q} %d\n", outcome, n))
	}
}

// Platforms with Connect get events of a test mode at their live endpoint.
func TestStripesTestModePaysOnlyWhereItMay(t *testing.T) {
	t.Parallel()
	for _, mode := range []Switch{"", SwitchOff, SwitchOn} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			s, confirmed := openStripe(t, func(c *Config) { c.StripeTestMode = mode })
			for _, where := range []string{`"livemode":true`, `"payment_status":"paid"`} {
				id := confirmed(4900, "EUR")
				body := paidSession(`"payment_status":"paid","amount_total":4900,"currency":"eur",` + metadataOf(id))
				p := s.signed(strings.Replace(body, where, where+`,"livemode":false`, 1)).is(http.StatusOK)
				if mode == SwitchOn {
					require.Equal(t, "settled", p["state"])
					continue
				}
				require.Contains(t, p["ignored"], "STAMPEDE_STRIPE_TEST_MODE=on")
				require.Empty(t, s.get("/v1/admin/payments?order="+id.String(), cashier).is(http.StatusOK)["payments"])
				require.Equal(t, "settled", s.signed(body).is(http.StatusOK)["state"])
			}
		})
	}
	c := Config{StripeTestMode: "yes"}
	require.ErrorContains(t, c.Validate(), `STAMPEDE_STRIPE_TEST_MODE is "yes"`)
}

// The money of another system on the account must not go back because its order is none of Stampede's.
func TestMoneyOfAnotherSystemAtStripeIsUnclear(t *testing.T) {
	t.Parallel()
	s, confirmed := openStripe(t)
	random := uuid.NewString()
	for _, foreign := range []string{"4711", random, strings.ToUpper(random), uuid.Nil.String(), "urn:uuid:x"} {
		p := s.signed(paidIntent(newReference(), "4900", "eur", metadataOf(foreign))).is(http.StatusOK)
		require.Equal(t, []any{"unclear", "unclear-order"}, []any{p["state"], p["reason"]}, foreign)
	}
	missing := order.NewOrderID(uuid.New())
	p := s.signed(paidIntent(newReference(), "4900", "eur", metadataOf(missing))).is(http.StatusOK)
	require.Equal(t, "waiting", p["state"])
	// A message that names its order, of the same payment, mends it.
	reference := newReference()
	s.signed(paidIntent(reference, "4900", "eur", metadataOf("4711"))).is(http.StatusOK)
	p = s.signed(paidIntent(reference, "4900", "eur", metadataOf(confirmed(4900, "EUR")))).is(http.StatusOK)
	require.Equal(t, []any{reference, "settled"}, []any{p["reference"], p["state"]})
}

// refundedCharge is a charge whose PaymentIntent was refunded so far.
func refundedCharge(intent any, refunded, rest string) string {
	return stripeEvent("charge.refunded", fmt.Sprintf(`{"id":"ch_1","object":"charge","amount":4900,"amount_captured":4900,`+
		`"amount_refunded":%s,"currency":"eur","payment_intent":%s,%s}`, refunded, intent, rest))
}

func TestRefundsAtStripeAreSeen(t *testing.T) {
	t.Parallel()
	s, confirmed := openStripe(t)
	paid := func(id uuid.UUID) (reference, intent string) {
		reference = newReference()
		s.signed(paidIntent(reference, "4900", "eur", metadataOf(id))).is(http.StatusOK)
		return reference, strconv.Quote(reference)
	}
	event := func(body string) []any {
		t.Helper()
		p := s.signed(body).is(http.StatusOK)
		return []any{p["state"], p["reason"], p["refund_reference"], p["operator"], p["note"]}
	}
	const noRefunds = `"metadata":{}`
	id := confirmed(4900, "EUR")
	_, intent := paid(id)
	part := []any{"settled", nil, "ch_1", "stripe", "1000 of 4900 EUR went back outside of Stampede"}
	for range 2 {
		require.Equal(t, part, event(refundedCharge(intent, "1000", noRefunds)), "of the API since 2022-11-15")
	}
	whole := refundedCharge(intent, "4900", `"refunds":{"data":[{"id":"re_2"},{"id":"re_1"}]},`+noRefunds)
	for range 2 {
		require.Equal(t, []any{"refunded", "refunded-outside", "re_2", "stripe", nil}, event(whole), "with its refunds")
	}
	require.Equal(t, "paid", s.get(adminPath(orderPath(id)), operator).is(http.StatusOK)["status"])

	_, due := paid(id) // a second payment for the order
	refunded := event(refundedCharge(due, "4900", noRefunds))
	require.Equal(t, []any{"refunded", "already-paid", "ch_1", "stripe", nil}, refunded)
	_, expanded := paid(confirmed(4900, "EUR"))
	refunded = event(refundedCharge(`{"id":`+expanded+`,"object":"payment_intent"}`, "4900", noRefunds))
	require.Equal(t, "refunded", refunded[0])
	// It may come before its payment, which settles no order then.
	early, late := newReference(), confirmed(4900, "EUR")
	require.Equal(t, "refunded", event(refundedCharge(strconv.Quote(early), "4900", metadataOf(late)))[0])
	require.Equal(t, "refunded", event(paidIntent(early, "4900", "eur", metadataOf(late)))[0])
	// In the currency's own units.
	krona := newReference()
	s.signed(paidIntent(krona, "500000", "isk", metadataOf(confirmed(5000, "ISK")))).is(http.StatusOK)
	inKrona := strings.NewReplacer("4900", "500000", "eur", "isk")
	body := inKrona.Replace(refundedCharge(strconv.Quote(krona), "100000", noRefunds))
	require.Equal(t, "1000 of 5000 ISK went back outside of Stampede", event(body)[4])
	// Half of the authorization was captured, and the rest released, which nobody has received.
	half, ofHalf := newReference(), confirmed(2000, "EUR")
	s.signed(paidIntent(half, "2000", "eur", metadataOf(ofHalf))).is(http.StatusOK)
	captured := func(captured, refunded string) string {
		body := refundedCharge(strconv.Quote(half), refunded, metadataOf(ofHalf))
		return strings.Replace(body, `"amount_captured":4900`, `"amount_captured":`+captured, 1)
	}
	require.Equal(t, "500 of 2000 EUR went back outside of Stampede", event(captured("2000", "3400"))[4])
	require.Equal(t, "refunded", event(captured("2000", "4900"))[0])

	for name, test := range map[string]struct{ body, why string }{
		"released":        {captured("2000", "2900"), "authorization was released"},
		"never captured":  {captured("0", "4900"), "authorization was released"},
		"unknown":         {refundedCharge(`"pi_unknown"`, "4900", noRefunds), "not reported here"},
		"another system":  {refundedCharge(`"pi_unknown"`, "4900", metadataOf("4711")), "not reported here"},
		"without a name":  {strings.Replace(refundedCharge(`null`, "4900", noRefunds), "ch_1", "", 1), "names no payment"},
		"without amounts": {refundedCharge(intent, "null", noRefunds), "authorization was released"},
		"test mode": {
			strings.Replace(refundedCharge(intent, "4900", noRefunds), `"livemode":true`, `"livemode":false`, 1), "test mode",
		},
	} {
		require.Contains(t, s.signed(test.body).is(http.StatusOK)["ignored"], test.why, name)
	}
}

func stripeDispute(kind, reference, status string) string {
	return stripeEvent("charge.dispute."+kind, fmt.Sprintf(`{"id":"dp_1","object":"dispute","charge":"ch_1","status":%q,`+
		`"amount":4900,"currency":"eur","metadata":{},"payment_intent":%q}`, status, reference))
}

func TestDisputesAtStripeAreSeen(t *testing.T) {
	t.Parallel()
	s, confirmed := openStripe(t)
	state := func(body string) []any {
		t.Helper()
		p := s.signed(body).is(http.StatusOK)
		return []any{p["state"], p["dispute"], p["refund_reference"]}
	}
	for status, end := range map[string][]any{
		"won": {"settled", "dp_1", nil}, "warning_closed": {"settled", "dp_1", nil}, "lost": {"refunded", "dp_1", "dp_1"},
		"prevented": {"disputed", "dp_1", nil},
	} {
		reference, id := newReference(), confirmed(4900, "EUR")
		s.signed(paidIntent(reference, "4900", "eur", metadataOf(id))).is(http.StatusOK)
		open := []any{"disputed", "dp_1", nil}
		require.Equal(t, open, state(stripeDispute("created", reference, "warning_needs_response")))
		require.Equal(t, open, state(stripeDispute("funds_withdrawn", reference, "needs_response")))
		require.Equal(t, open, state(stripeDispute("updated", reference, "under_review")))
		for _, kind := range []string{"closed", "funds_reinstated"} {
			require.Equal(t, end, state(stripeDispute(kind, reference, status)), status)
		}
		require.Equal(t, "paid", s.get(adminPath(orderPath(id)), operator).is(http.StatusOK)["status"])
	}
	// The shop's server reports charges.
	charge := "ch_" + uuid.NewString()
	s.reports(charge, ofOrder(confirmed(4900, "EUR"))+`,"amount":4900,"currency":"EUR"`)
	body := strings.Replace(stripeDispute("created", "", "needs_response"), `"ch_1"`, strconv.Quote(charge), 1)
	require.Equal(t, "disputed", state(strings.Replace(body, `"payment_intent":""`, `"payment_intent":null`, 1))[0])
	for name, test := range map[string]struct{ body, why string }{
		"unknown": {stripeDispute("created", newReference(), "needs_response"), "not reported here"},
		"no name": {strings.Replace(stripeDispute("created", charge, "lost"), "dp_1", "", 1), "names no payment"},
		"test mode": {
			strings.Replace(stripeDispute("created", charge, "lost"), `"livemode":true`, `"livemode":false`, 1), "test mode",
		},
	} {
		require.Contains(t, s.signed(test.body).is(http.StatusOK)["ignored"], test.why, name)
	}
}

// Another system on the account may have an order_id of its own.
func TestStripesMetadataHaveTheNameThatIsSet(t *testing.T) {
	t.Parallel()
	s, confirmed := openStripe(t, func(c *Config) { c.StripeMetadata = "stampede_order" })
	pay := func(metadata string) map[string]any {
		return s.signed(paidIntent(newReference(), "4900", "eur", `"metadata":`+metadata)).is(http.StatusOK)
	}
	require.Contains(t, pay(`{"order_id":"4711"}`)["ignored"], "STAMPEDE_STRIPE_METADATA")
	metadata := fmt.Sprintf(`{"order_id":"4711","stampede_order":%q}`, confirmed(4900, "EUR"))
	require.Equal(t, "settled", pay(metadata)["state"])
	c := Config{StripeMetadata: strings.Repeat("x", 41)}
	require.ErrorContains(t, c.Validate(), "STAMPEDE_STRIPE_METADATA")
}

// stripeStrangers open connections from some addresses that send so many bytes of an event, and then nothing. They
// connect again whenever the server has had enough.
func (s *shop) stripeStrangers(connections, addresses, bytes int) {
	s.t.Helper()
	ctx, stop := context.WithCancel(s.t.Context())
	var strangers, sent sync.WaitGroup
	s.t.Cleanup(strangers.Wait)
	s.t.Cleanup(stop)
	text := strings.Repeat("x", bytes)
	hold := func(address net.IP, begun func()) {
		defer begun()
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: address}}
		conn, err := dialer.DialContext(ctx, "tcp", s.server.listenAddr())
		if err != nil {
			return
		}
		defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
		_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: shop\r\nStripe-Signature: t=%d,v1=%064d\r\n"+
			"Content-Length: %d\r\n\r\n%s", stripePath, time.Now().Unix(), 0, stripeBodyMax, text)
		begun()
		_, _ = io.Copy(io.Discard, conn)
		_ = conn.Close()
	}
	sent.Add(connections)
	for i := range connections {
		begun := sync.OnceFunc(sent.Done)
		strangers.Go(func() {
			for ctx.Err() == nil {
				hold(net.IPv4(127, 0, 1, byte(1+i%addresses)), begun)
			}
		})
	}
	sent.Wait()
}

// Whoever has proved nothing keeps no signed message out, from however many addresses.
func TestStrangersKeepNoMessageOfStripeOut(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ connections, addresses, bytes, length int }{
		"one address":              {160, 1, 1, 4000},
		"many addresses":           {1000, 200, stripeSmallMax - 1, 4000},
		"long events, one address": {160, 1, stripeSmallMax + 1, 200_000},
	} {
		t.Run(name, func(t *testing.T) {
			_, change := withStripe(t, stripeSecret)
			s := openShop(t, change)
			s.stripeStrangers(test.connections, test.addresses, test.bytes)
			var took [20]time.Duration
			for i := range took {
				began := time.Now()
				s.signed(stripeEvent("charge.updated", `{"text":"`+strings.Repeat("x", test.length)+`"}`)).is(http.StatusOK)
				took[i] = time.Since(began)
			}
			slices.Sort(took[:]) // the machine may be slow for a moment
			t.Log(took)
			require.Less(t, took[len(took)/2], time.Second)
		})
	}
}

// A message that takes its time keeps its place while strangers take those of each other.
func TestMessageOfStripeKeepsItsPlace(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ addresses, length int }{
		"a short one, many addresses": {200, stripeSmallMax - 100},
		"a long one, one address":     {1, 200_000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, change := withStripe(t, stripeSecret)
			s := openShop(t, change)
			body, now := stripeEvent("charge.updated", `"`+strings.Repeat("x", test.length-200)+`"`), time.Now()
			half := len(body) * 9 / 10
			slow := s.dial()
			slow.sends(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: shop\r\nStripe-Signature: t=%d,v1=%s\r\nContent-Length: %d\r\n"+
				"Expect: 100-continue\r\n\r\n", stripePath, now.Unix(), stripeSign(stripeSecret, body, now), len(body)))
			slow.receivesContinue()
			slow.sends(body[:half])
			s.stripeStrangers(2*stripeReadersMax, test.addresses, stripeSmallMax+1)
			testkit.Eventually(t, 30*time.Second, "strangers take the places of strangers", func() bool {
				return !strings.Contains(s.get("/metrics").body, `stampede_stripe_messages_total{outcome="overloaded"} 0`+"\n")
			})
			slow.sends(body[half:])
			require.Contains(t, slow.receives().is(http.StatusOK), "ignored")
		})
	}
}
