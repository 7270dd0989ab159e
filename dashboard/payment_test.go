package dashboard

import (
	"encoding/csv"
	"fmt"
	"html"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

func TestRefundIsNotedOnce(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	sale, err := d.Shop.Catalog.Create(t.Context(), reservation.Terms{
		Name: "<b>drop", Stock: 5, PerOrderLimit: 2, PaymentWindow: time.Hour, PaymentsPerSecond: 5, UnitPrice: 4900,
		Currency: "EUR",
	})
	require.NoError(t, err)
	d.show(sale.ID)
	o := d.Attempt(t, sale.ID, "ann", 2, "").Reservation.OrderID
	testwork.FulfilAll(t, d.Shop)
	d.report(order.Money{Reference: "pi_lost", OrderID: uuid.Nil, Amount: 70, Currency: "JPY", Unreadable: hostile})
	money := order.Money{Reference: "pi_paid", OrderID: o, Amount: 9800, Currency: "EUR"}
	require.Equal(t, order.PaymentSettled, d.report(money).State)
	money.Reference = `"><b>pi_twice`
	require.Equal(t, order.RefundAlreadyPaid, d.report(money).Reason)

	b := d.as("cas")
	page := "/orders/" + o.String()
	_, shown := b.get(page)
	require.Regexp(t, `Price</dt><dd>98\.00 EUR<.*Pay from</dt>`, shown)
	require.Regexp(t, `(?s)pi_paid</code> <span class="badge settled">.*98\.00 EUR.*pi_twice<.*refund due.*already paid`,
		shown)
	_, shown = b.get("/refunds")
	require.Regexp(t, `(?s)98\.00 EUR</span> 1 due.*70 JPY</span> 1 due.*pi_lost.*70 JPY.*order not found.*pi_twice.*98\.00`,
		shown)
	require.NotContains(t, shown, "pi_paid")
	require.NotContains(t, shown, "<b>")
	require.NotContains(t, shown, "<script>document")
	filtered := "/refunds?sale=" + sale.ID.String()
	_, shown = b.get(filtered)
	require.Contains(t, shown, "pi_twice")
	require.NotContains(t, shown, "pi_lost")
	_, shown = b.get("/refunds?sale=x")
	require.Contains(t, shown, "That is not the id of a sale.")

	for _, c := range []struct{ payment, refund, answer string }{
		{money.Reference, "", "The refund_reference must be 1 to 255 characters"},
		{money.Reference, " re_1 ", "pi_twice is refunded: 98.00 EUR."},
		{money.Reference, "re_1", "pi_twice is refunded: 98.00 EUR."}, // the form is sent again
		{money.Reference, "re_2", "The payment was refunded before, with the reference re_1."},
		{"pi_paid", "re_2", "No refund of the payment is due."},
		{"pi_none", "re_2", "There is no payment with this reference."},
	} {
		_, shown = b.post("/refunds", "payment", c.payment, "refund", c.refund, "back", "sale="+sale.ID.String()+"&after=0")
		require.Contains(t, shown, c.answer)
		require.NotContains(t, shown, "pi_lost", "the filter stays")
	}
	require.Contains(t, shown, "No refund is due here.")
	require.Regexp(t, `an operator acted.*operator=cas.*action=refunded.*payment=.*pi_twice`, d.log.String())
	_, shown = b.post("/refunds", "payment", money.Reference, "refund", "re_1", "order", o.String())
	require.Regexp(t, `(?s)refunded</span>.*<code>re_1</code><span class="sub">by <bdi>cas`, shown)
	_, err = ledger.New(d.Shop.Pool).Withdraw(t.Context(), o, "a mistake", "ann")
	require.NoError(t, err)
	_, shown = b.get(filtered)
	require.Regexp(t, `(?s)pi_paid.*order cancelled</span><span class="sub">by <bdi>ann`, shown)
}

// A cashier sees what contradicts what, and ends it. A disputed payment and a buyer's word have no form.
func TestUnclearPaymentIsDismissed(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	sale := d.sale("drop", 5)
	first, second := d.Buy(t, sale, "ann"), d.Buy(t, sale, "bob")
	testwork.FulfilAll(t, d.Shop)
	money := order.Money{Reference: "pi_1", OrderID: first, Amount: 4900, Currency: "EUR"}
	require.Equal(t, order.PaymentSettled, d.report(money).State)
	again := money
	again.OrderID = second
	d.report(again)
	again = money
	again.Amount = 7700
	d.report(again)
	d.report(order.Money{Reference: "pi_foreign", Unreadable: hostile, Unclear: order.UnclearOrder})
	payments := ledger.New(d.Shop.Pool)
	d.report(order.Money{Reference: "pi_2", OrderID: first})
	_, err := payments.Disputed(t.Context(), order.Dispute{ID: "dp_2", Reference: "pi_2", State: order.DisputeOpen})
	require.NoError(t, err)
	_, err = payments.Pay(t.Context(), first, "ann", "my word")
	require.Error(t, err)

	b := d.as("cas")
	_, shown := b.get("/refunds")
	require.Regexp(t, `(?s)>Unclear<.*pi_1~.*/orders/`+second.String()+`.*other order.*first: 49\.00 EUR, `+
		`settled, order <a href="/orders/`+first.String()+`.*77\.00 EUR.*other amount.*pi_foreign.*unclear order`+
		`.*>Disputed<.*pi_2.*dispute <code>dp_2<.*>Due<.*No refund is due\.`, shown)
	require.NotContains(t, shown, "<script>document")
	require.Equal(t, 3, strings.Count(shown, `<input type="checkbox" name="payment"`))
	require.Equal(t, 1, strings.Count(shown, `<form method="post" action="/refunds">`))
	require.Equal(t, 1, strings.Count(shown, `formaction="/refunds/dismissed"`))
	page := "/orders/" + first.String()
	_, shown = b.get(page)
	require.Regexp(t, `(?s)my word.*claimed</span>.*the buyer says so; no money`, shown)

	kept := again.KeyOfContradiction()
	for _, c := range []struct{ payment, reason, answer string }{
		{kept, " ", "Say why nothing has to go back."},
		{kept, strings.Repeat("x", reasonMax+1), "The reason must be 1 to 500 characters"},
		{kept, " <b>a test", kept + " is dismissed: nothing has to go back."},
		{kept, "a test", kept + " is dismissed"}, // the form is sent again
		{"pi_2", "a test", "The payment is not unclear."},
		{"pi_none", "a test", "There is no payment with this reference."},
	} {
		_, shown = b.post("/refunds/dismissed", "payment", c.payment, "reason", c.reason, "back", "after=0")
		require.Contains(t, shown, c.answer)
	}
	require.NotContains(t, shown, kept)
	require.Regexp(t, `an operator acted.*operator=cas.*action=dismissed.*payment=`+kept, d.log.String())
	_, shown = b.post("/refunds", "payment", "pi_foreign", "refund", "re_1")
	require.Contains(t, shown, "pi_foreign is refunded")
	status, shown := d.as("vic").post("/refunds/dismissed", "payment", "pi_1", "reason", "a test")
	require.Equal(t, http.StatusForbidden, status)
	require.Contains(t, shown, "This takes the role cashier, and you are viewer.")

	_, err = payments.RefundedAtProvider(t.Context(), order.ProviderRefund{
		Money: money, RefundReference: "re_2", Refunded: 4900, By: "stripe",
	})
	require.NoError(t, err)
	_, shown = b.get(page)
	require.Regexp(t, `(?s)refunded outside<.*re_2`, shown)
	require.Regexp(t, `(?s)dismissed</span>.*other amount</span><span class="sub"><bdi>&lt;b&gt;a test</bdi></span><span class="sub">by <bdi>cas`,
		shown)
}

// Refunds are found by page, the oldest first.
func TestRefundsArePaged(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	for _, reference := range []string{"pi_huge", "pi_vast"} { // their sum is no bigint
		d.report(order.Money{Reference: reference, Amount: math.MaxInt64, Currency: "EUR"})
	}
	for i := range paymentsOnPage - 1 {
		d.report(order.Money{Reference: fmt.Sprintf("pi_%03d", i)})
	}
	b := d.as("vic")
	_, shown := b.get("/refunds")
	require.Regexp(t, `(?s)no amount</span> 49 due.*92,233,720,368,547,758.07 EUR</span> 2 due.*pi_huge.*pi_047<`, shown)
	require.NotContains(t, shown, "pi_048")
	next := regexp.MustCompile(`href="(/refunds\?after=\d+&amp;state=refund_due)">Later ones`).FindStringSubmatch(shown)
	require.NotNil(t, next)
	_, shown = b.get(html.UnescapeString(next[1]))
	require.Equal(t, 1, strings.Count(shown, "<code>pi_"))
	require.NotContains(t, shown, "Later ones")
}

// One reference ends many refunds, and one reason many that are unclear; what fails is said.
func TestPaymentsAreEndedTogether(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	for i := range 6 {
		m := order.Money{Reference: fmt.Sprintf("pi_%d", i), OrderID: uuid.New(), Amount: 1050, Currency: "EUR"}
		if i == 3 {
			m.Currency = "JPY"
		}
		d.report(m)
		d.report(order.Money{Reference: fmt.Sprintf("px_%d", i), Unreadable: "far", Unclear: order.UnclearOrder})
	}
	testwork.FulfilAll(t, d.Shop)
	d.Shop.Exec(t, `INSERT INTO payment_events (reference, version, type, order_id, amount, currency, reason)
		SELECT reference, 2, 'PaymentRefundDue', order_id, amount, currency, 'order-not-found' FROM payments WHERE state = 'waiting'`)
	b := d.as("cas")
	_, shown := b.get("/refunds?reason=order-not-found&currency=EUR")
	require.Equal(t, 5, strings.Count(shown, `<input type="checkbox" name="payment"`))
	back := html.UnescapeString(regexp.MustCompile(`name="back" value="([^"]*)"`).FindStringSubmatch(shown)[1])
	for _, c := range []struct {
		path, text string
		fields     []string
	}{
		{"/refunds", "No payment is selected.", nil},
		{"/refunds", "The refund_reference must be 1 to 255 characters", []string{"payment", "pi_0", "payment", "pi_1"}},
		{
			"/refunds", "3 payments are refunded: 21.00 EUR, 1,050 JPY.",
			[]string{"payment", "pi_0", "payment", "pi_1", "payment", "pi_3", "refund", "batch-7"},
		},
		{"/refunds/dismissed", "Say why nothing has to go back.", []string{"payment", "px_0", "payment", "px_1"}},
		{
			"/refunds/dismissed", "3 payments are dismissed: nothing has to go back.",
			[]string{"payment", "px_0", "payment", "px_1", "payment", "px_2", "reason", "of the other shop"},
		},
		{
			"/refunds", `The payment pi_2 is refunded: 10.50 EUR. 2 failed.</b> `,
			[]string{"payment", "pi_0", "payment", "pi_2", "payment", "pi_none", "refund", "batch-8"},
		},
	} {
		_, shown = b.post(c.path, append(c.fields, "back", back)...)
		require.Contains(t, strings.Replace(shown, "2 failed. <span>", "2 failed.</b> <span>", 1), c.text)
		require.NotContains(t, shown, "px_5", "the filter stays")
	}
	require.Contains(t, shown, "pi_0: The payment was refunded before, with the reference batch-7.")
	require.Equal(t, 2, strings.Count(shown, `<input type="checkbox" name="payment"`))
	require.EqualValues(t, 3, d.Count(t, `SELECT count(*) FROM payments
		WHERE state = 'dismissed' AND data->>'note' = 'of the other shop' AND data->>'operator' = 'cas'`))
	many := []string{"refund", "x"}
	for i := range bulkMax + 1 {
		many = append(many, "payment", fmt.Sprint(i))
	}
	_, shown = b.post("/refunds", many...)
	require.Contains(t, shown, "Too many payments are selected.")
}

// Refunds are found by reason, age and currency, also beyond those that one page looks at, and are saved as a file with
// how late the money came.
func TestRefundsAreFilteredAndSaved(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	sale, err := d.Shop.Catalog.Create(t.Context(), reservation.Terms{
		Name: "=drop", Stock: 5, PerOrderLimit: 2, PaymentWindow: time.Hour, UnitPrice: 4900, Currency: "EUR",
	})
	require.NoError(t, err)
	late := d.Attempt(t, sale.ID, "ann", 1, "").Reservation.OrderID
	testwork.FulfilAll(t, d.Shop)
	d.Shop.Exec(t, "UPDATE pulse SET seen_at = now()")
	d.Shop.Exec(t, `UPDATE orders SET due = pay_clock() - interval '7 min'`)
	due := d.report(order.Money{Reference: "pi_late", OrderID: late, Amount: 4900, Currency: "EUR"})
	require.Equal(t, order.RefundOrderExpired, due.Reason)
	d.Shop.Exec(t, `INSERT INTO outages (began_at, ended_at) VALUES (now() + interval '1 h', now() + interval '9 h')`)
	d.Shop.Exec(t, `INSERT INTO payment_events (reference, version, type, occurred_at, currency, amount, reason)
		SELECT 'pi_old_' || n, v, CASE v WHEN 1 THEN 'PaymentReceived' ELSE 'PaymentRefundDue' END, now() - interval '2 days', 'JPY', 70,
			CASE v WHEN 2 THEN 'already-paid' END FROM generate_series(1, 5100) AS n, generate_series(1, 2) AS v`)
	d.Shop.Exec(t, `INSERT INTO payment_events (reference, version, type, order_id, currency, amount, reason)
		SELECT 'pi_new', v, CASE v WHEN 1 THEN 'PaymentReceived' ELSE 'PaymentRefundDue' END, $1, 'JPY', 71,
			CASE v WHEN 2 THEN 'amount-mismatch' END FROM generate_series(1, 2) AS v`, late)

	b := d.as("vic")
	for query, want := range map[string]string{
		"reason=order-expired": "pi_late", "currency=eur": "pi_late", "sale=" + sale.ID.String(): "pi_late",
		"hours=24": "pi_old_1", "reason=already-paid": "pi_old_1", "currency=JPY": "pi_old_1", "": "pi_late",
	} {
		_, shown := b.get("/refunds?" + query)
		require.Equal(t, want, regexp.MustCompile(`<code>(pi_\w+)<`).FindStringSubmatch(shown)[1], query)
		require.NotContains(t, shown, "pi_new", query)
	}
	_, shown := b.get("/refunds?reason=order-expired")
	require.Regexp(t, `(?s)order expired</span></td>\s*<td data-th="Late by">7 min<`, shown)
	_, shown = b.get("/refunds?reason=amount-mismatch")
	require.Contains(t, shown, "No refund is due among those that were looked at: look further.")
	next := regexp.MustCompile(`href="(/refunds\?[^"]*)">Later ones`).FindStringSubmatch(shown)
	_, shown = b.get(html.UnescapeString(next[1]))
	require.Contains(t, shown, "pi_new")
	require.NotContains(t, shown, "Later ones")
	for query, text := range map[string]string{
		"reason=x": "There is no such reason.", "currency=EURO": "That is not a currency.",
		"hours=720": "No refund is due here.", "sale=x": "That is not the id of a sale.",
	} {
		_, shown = b.get("/refunds?" + query)
		require.Contains(t, shown, text)
		require.NotContains(t, shown, "Later ones")
	}

	_, file := b.get("/refunds.csv")
	rows, err := csv.NewReader(strings.NewReader(file)).ReadAll()
	require.NoError(t, err)
	require.Len(t, rows, 5103)
	require.Equal(t, []string{"pi_late", "refund_due", "order-expired"}, rows[1][:3])
	require.Regexp(t, `^42\d$`, rows[1][3])
	require.Equal(t, []string{"4900", "EUR"}, rows[1][4:6])
	require.Equal(t, []string{late.String(), sale.ID.String(), "'=drop", ""}, rows[1][8:])
	_, file = b.get("/refunds.csv?currency=JPY&hours=24")
	require.Equal(t, 5100, strings.Count(file, "pi_old_"))
	require.NotContains(t, file, "pi_late")
	status, _ := b.get("/refunds.csv?sale=x")
	require.Equal(t, http.StatusUnprocessableEntity, status)
}

// One box finds orders, sales, users and payments, from every page.
func TestOneBoxFindsAll(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	sale := d.sale("Midnight <b>Drop", 50)
	bought := d.Buy(t, sale, "ann-7")
	for i := range hitsMax + 1 {
		d.Buy(t, sale, fmt.Sprintf("bob-%d", i))
		d.report(order.Money{Reference: fmt.Sprintf("pi_9_%d", i), OrderID: bought})
	}
	testwork.FulfilAll(t, d.Shop)
	d.report(order.Money{Reference: "pi_3Qx", OrderID: bought, Amount: 4900, Currency: "EUR"})
	b := d.as("vic")
	find := func(text string) (shown string) {
		_, shown = b.get("/find?q=" + url.QueryEscape(text))
		return shown
	}
	for _, page := range []string{"/", "/sales", "/refunds", "/audit", "/docs/runbook", "/none"} {
		_, shown := b.get(page)
		require.Contains(t, shown, `<form class="find" role="search" action="/find">`, page)
	}
	require.Regexp(t, `<code class="id">`+bought.String(), find(" "+strings.ToUpper(bought.String())+" "))
	require.Contains(t, find(sale.String()), "<h1><bdi>Midnight &lt;b&gt;Drop")
	require.Regexp(t, `(?s)Found for.*>Sales<.*/sales/`+sale.String()+`.*Midnight &lt;b&gt;Drop`, find("night <B>"))
	require.Regexp(t, `(?s)>Payments<.*<code>pi_3Qx</code>.*49\.00 EUR.*/orders/`+bought.String(), find("pi_3Q"))
	require.Regexp(t, `(?s)>Orders<.*/orders/`+bought.String()+`.*ann-7`, find("ann-7"))
	shown := find("bob-")
	require.Equal(t, hitsMax, strings.Count(shown, `User"><bdi>bob-`))
	more := regexp.MustCompile(`href="(/orders\?[^"]*)">More orders`).FindStringSubmatch(shown)
	require.NotNil(t, more)
	require.Contains(t, find("pi_9"), "There are more: write more of the reference.")
	for _, text := range []string{uuid.NewString(), "none", "%", "\x00", "\xff", hostile, strings.Repeat("x", 2000)} {
		status, shown := b.get("/find?q=" + url.QueryEscape(text))
		require.Equal(t, http.StatusOK, status, "%q", text)
		require.Contains(t, shown, "There is nothing like it in Postgres.", "%q", text)
		require.NotContains(t, shown, "<script>document")
	}
	require.Contains(t, find(""), "Write something in the box")
}

// Sales are found by a part of their name, and by state, page after page.
func TestSalesAreFiltered(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	var ids []uuid.UUID
	for i := range salesOnPage + 5 {
		ids = append(ids, d.sale(fmt.Sprintf("Autumn %03d", i), 5))
	}
	_, err := d.Shop.Catalog.Pause(t.Context(), ids[1])
	require.NoError(t, err)
	_, err = d.Shop.Catalog.End(t.Context(), ids[2])
	require.NoError(t, err)
	d.sale("Winter", 5)
	b := d.as("vic")
	rows := func(path string) []string {
		_, shown := b.get(path)
		var names []string
		for _, m := range regexp.MustCompile(`<bdi>((?:Autumn|Winter)[^<]*)</bdi></a>`).FindAllStringSubmatch(shown, -1) {
			names = append(names, m[1])
		}
		return names
	}
	require.Equal(t, []string{"Autumn 007"}, rows("/sales?name=N+007"))
	require.Equal(t, []string{"Autumn 001"}, rows("/sales?state=paused"))
	require.Equal(t, []string{"Autumn 002"}, rows("/sales?name=autumn&state=ended"))
	require.Empty(t, rows("/sales?name=winter&state=paused"))
	require.Empty(t, rows("/sales?state=x"))
	require.Equal(t, "Winter", rows("/sales")[0])
	first := rows("/sales?name=autumn")
	require.Len(t, first, salesOnPage)
	_, shown := b.get("/sales?name=autumn")
	next := regexp.MustCompile(`href="(/sales\?[^"]*)">Older sales`).FindStringSubmatch(shown)
	require.NotNil(t, next)
	require.Equal(t, []string{"Autumn 004", "Autumn 003", "Autumn 002", "Autumn 001", "Autumn 000"},
		rows(strings.ReplaceAll(next[1], "&amp;", "&")))
}
