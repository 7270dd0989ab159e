//go:build system

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	ratelimiter "golang.org/x/time/rate"

	"stampede/internal/connect"
	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql/migrate"
)

func TestPaymentCommands(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sale, orders := s.recorded("ann", "bob")
	ann := orders["ann"].String()
	file := filepath.Join(t.TempDir(), "provider.jsonl")
	lines := []string{
		`{"order_id":"` + ann + `","reference":"pi_1","amount":4900,"currency":"EUR","livemode":true}`,
		`{"order_id":"` + ann + `","reference":"pi_2","amount":4900,"currency":"EUR"}`,
		``,
		`{"order_id":"` + ann + `"}`,
		`{"order_id":"cart 7","reference":"pi_3"}`,
		`{"order_id":"` + order.NewOrderID(sale).String() + `","reference":"pi_4"}`,
		`{"order_id":"` + ann + `","reference":"pi_1"`,
		`{"order_id":"` + orders["bob"].String() + `","reference":"pi_1"}`,
		`{"order_id":"` + ann + `","reference":"pi_5","refund_reference":7}`,
		`{"order_id":"` + ann + `","reference":"pi_5","refund_reference":"re\n"}`,
	}
	require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600))
	output := s.ends(exitFailed, "payment", "import", file)
	assert.Contains(t, output, "line 4: reference must be 1 to 255 characters\n")
	assert.Contains(t, output, "line 7: the report must be one JSON object\n")
	assert.Contains(t, output, "line 9: refund_reference must be a text\n")
	assert.Contains(t, output, "line 10: refund_reference must be printable ASCII\n")
	assert.Contains(t, output, "1 settled, 2 due for refund, 1 waiting, 1 unclear, 0 refunded, 0 reported before, 4 bad lines\n")
	output = s.ends(exitFailed, "payment", "import", "--output=json", file)
	assert.Contains(t, output, `{"settled":0,"refund_due":0,"waiting":0,"unclear":0,"refunded":0,"repeated":5,"bad":4}`)
	output = s.ends(exitOK, "payment", "import", "-")
	assert.Equal(t, "0 settled, 0 due for refund, 0 waiting, 0 unclear, 0 refunded, 0 reported before, 0 bad lines\n", output, "the input is empty")

	references := func(flags ...string) (found []string) {
		for _, p := range objects(t, s.ends(exitOK, append([]string{"payment", "list", "--output=json"}, flags...)...)) {
			found = append(found, fmt.Sprint(p["reference"], " ", p["state"], " ", p["reason"]))
		}
		return found
	}
	due := []string{"pi_2 refund_due already-paid", "pi_3 refund_due order-not-found"}
	assert.Equal(t, due, references("--state=refund_due"))
	assert.Equal(t, []string{"pi_1 settled <nil>", due[0]}, references("--sale="+sale.String(), "--order="+ann))
	assert.Len(t, references(), 5)
	unclear := objects(t, s.ends(exitOK, "payment", "list", "--output=json", "--state=unclear"))
	require.Len(t, unclear, 1)
	contradicts := unclear[0]["reference"].(string)
	assert.Regexp(t, "^pi_1~[0-9a-f]{8}$", contradicts)
	for range 2 {
		output = s.ends(exitOK, "payment", "dismissed", contradicts, "a typing error", "--operator=eve")
		assert.Equal(t, "payment "+contradicts+" is dismissed: a typing error\n", output)
	}
	output = s.ends(exitOK, "payment", "show", contradicts)
	for _, want := range []string{`state +dismissed`, `reason +other-order`, `note +a typing error`, `operator +eve`} {
		assert.Regexp(t, want, output)
	}
	output = s.ends(exitOK, "payment", "list", "--limit=3")
	assert.Equal(t, 5, strings.Count(output, "\n"), output)
	assert.Contains(t, output, "there are more: raise --limit")
	assert.Regexp(t, `pi_2 +refund_due +already-paid +4900 EUR +`+ann, output)
	assert.Regexp(t, `pi_3 +refund_due +order-not-found +- +- +2`, output)

	for range 2 {
		output = s.ends(exitOK, "payment", "refunded", "pi_2", "re_1", "--operator=eve")
		assert.Equal(t, "payment pi_2 is refunded with re_1\n", output)
	}
	output = s.ends(exitOK, "payment", "show", "pi_2")
	for _, want := range []string{
		`state +refunded`, `reason +already-paid`, `amount +4900 EUR`, `refund +re_1`, `operator +eve`,
	} {
		assert.Regexp(t, want, output)
	}
	output = s.ends(exitOK, "payment", "show", "pi_3")
	assert.Regexp(t, `cannot be read +order_id "cart 7"`, output)
	output = s.ends(exitOK, "order", "cancel", ann, "--reason=r")
	assert.Contains(t, output, "refund the payment pi_1: `stampede payment list --order "+ann+"` shows it")
	assert.Equal(t, []string{due[1], "pi_1 refund_due order-cancelled"}, references("--state=refund_due"))

	for want, args := range map[string][]string{
		"payment not found":                    {"refunded", "pi_0", "re_1"},
		"no refund of the payment is due":      {"refunded", "pi_4", "re_1"},
		`it was refunded with reference "re_1`: {"refunded", "pi_2", "re_2"},
		"the payment is not unclear":           {"dismissed", "pi_2", "r"},
	} {
		assert.Contains(t, s.ends(exitFailed, append([]string{"payment"}, args...)...), want)
	}
	assert.Contains(t, s.ends(exitFailed, "payment", "show", "pi_0"), "payment not found")
	for want, args := range map[string][]string{
		"refund_reference must not": {"refunded", "pi_3", " "},
		"reason must":               {"dismissed", "pi_3", " "},
		"--limit is 0":              {"list", "--limit=0"},
		"must be one of":            {"list", "--state=paid"},
		`"x" is not an order id`:    {"list", "--order=x"},
		"no such file or directory": {"import", filepath.Join(t.TempDir(), uuid.NewString())},
	} {
		assert.Contains(t, s.ends(exitUsage, append([]string{"payment"}, args...)...), want)
	}
}

// The flag takes each state.
func TestPaymentListTakesEachState(t *testing.T) {
	t.Parallel()
	field, ok := reflect.TypeFor[paymentListCmd]().FieldByName("State")
	require.True(t, ok)
	var states []string
	for _, state := range order.PaymentStates() {
		states = append(states, string(state))
	}
	assert.Equal(t, ","+strings.Join(states, ","), field.Tag.Get("enum"))
	last := len(states) - 1
	help := "Only payments in this state: " + strings.Join(states[:last], ", ") + " or " + states[last] + "."
	assert.Equal(t, help, field.Tag.Get("help"))
}

// Through an ingress, the commands on payments print what they print on the databases.
func TestPaymentCommandsWorkThroughServer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	sale, orders := s.recorded("ann")
	over := func(status int, args ...string) string {
		t.Helper()
		is, out, output := remote(t, url, adminToken, append([]string{"payment"}, args...)...)
		require.Equal(t, status, is, "%v: %s", args, output)
		return out + output
	}
	var lines []string
	for i := range 5 {
		lines = append(lines, fmt.Sprintf(`{"order_id":%q,"reference":"pi/%d..","amount":5,"note":"é"}`, orders["ann"], i))
	}
	provider := file(t, strings.Join(append(lines, `{"reference":"..."}`, `{"reference":".."}`, `{}`), "\n"))
	assert.Contains(t, over(exitFailed, "import", provider),
		"1 settled, 5 due for refund, 0 waiting, 0 unclear, 0 refunded, 0 reported before, 2 bad lines\n")
	refunds := file(t, `{"reference":"...","refund_reference":"re_1"}`)
	assert.Contains(t, over(exitOK, "import", refunds), "0 waiting, 0 unclear, 1 refunded, 0 reported before, 0 bad lines\n")
	assert.Contains(t, over(exitOK, "import", refunds), "0 waiting, 0 unclear, 0 refunded, 1 reported before, 0 bad lines\n")
	assert.Contains(t, over(exitOK, "refunded", "pi/4..", "re_4"), "payment pi/4.. is refunded with re_4\n")
	assert.Contains(t, over(exitOK, "show", "pi/4.."), " admin\n", "the server records the operator of the token")
	other := file(t, fmt.Sprintf(`{"order_id":%q,"reference":"pi/0..","amount":6}`, orders["ann"]))
	assert.Contains(t, over(exitOK, "import", other), "0 waiting, 1 unclear, 0 refunded, 0 reported before, 0 bad lines\n")
	assert.Contains(t, over(exitOK, "import", other), "0 waiting, 0 unclear, 0 refunded, 1 reported before, 0 bad lines\n")
	unclear := objects(t, over(exitOK, "list", "--state=unclear", "--output=json"))[0]["reference"].(string)
	assert.Contains(t, over(exitOK, "dismissed", unclear, "r"), "payment "+unclear+" is dismissed: r\n")
	for _, args := range [][]string{
		{"list"},
		{"dismissed", unclear, "r"},
		{"list", "--state=refund_due", "--limit=2"},
		{"list", "--sale=" + sale.String()},
		{"list", "--order=" + orders["ann"].String()},
		{"show", "pi/0.."},
		{"show", "..."},
		{"refunded", "pi/4..", "re_4"},
	} {
		for _, format := range []string{"--output=text", "--output=json"} {
			c := append([]string{"payment"}, append(args, format)...)
			_, out, _ := remote(t, url, adminToken, c...)
			assert.Contains(t, s.ends(exitOK, c...), out, "%v", c)
			assert.NotEmpty(t, out)
		}
	}
	assert.Contains(t, over(exitOK, "list", "--limit=2"), "there are more: raise --limit")
	for want, args := range map[string][]string{
		"payment not found":               {"show", "pi_0"},
		"no refund of the payment is due": {"refunded", "pi/0..", "re_1"},
		"re_4":                            {"refunded", "pi/4..", "re_5"},
	} {
		assert.Contains(t, over(exitFailed, args...), want)
	}
}

// A restored Postgres has forgotten orders that were cancelled, payments and refunds. Any order of the lines does.
func TestImportTakesRefundsInAnyOrder(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, orders := s.recorded("ann", "bob", "cid")
	report := func(user, reference, rest string) string {
		return fmt.Sprintf(`{"order_id":%q,"reference":%q%s}`, orders[user], reference, rest)
	}
	refunded := func(reference, refund string) string {
		return fmt.Sprintf(`{"reference":%q,"refund_reference":%q}`, reference, refund)
	}
	lines := []string{
		refunded("pi_1", "re_1"),                            // its payment comes later
		report("ann", "pi_1", ""),                           // paid twice, and the first one was refunded
		report("ann", "pi_2", ""),                           // settles
		`{"reference":"pi_3"}`,                              // due, no order
		refunded("pi_3", "re_3"),                            //
		report("bob", "pi_4", `,"refund_reference":"re_4"`), // bob's order was cancelled: it is not, yet
		refunded("pi_5", "re_5"),                            // nobody knows its payment
		refunded("pi_3", "re_other"),                        // contradicts line 5
		report("cid", "pi_6", `,"refund_reference":null`),
	}
	for shift := range lines {
		list := file(t, strings.Join(append(slices.Clone(lines[shift:]), lines[:shift]...), "\n"))
		output := s.ends(exitFailed, "payment", "import", "--operator=eve", list)
		if shift == 0 {
			assert.Contains(t, output, "2 settled, 0 due for refund, 0 waiting, 0 unclear, 2 refunded, 0 reported before, 3 bad lines\n")
			assert.Contains(t, output, "line 6: not imported: the payment pi_4 was refunded, and would settle the order "+
				orders["bob"].String())
			assert.Contains(t, output, "line 7: not imported: nobody has reported the payment pi_5")
			assert.Contains(t, output, `line 8: the payment pi_3 is refunded with "re_other" here, and with "re_3" in line 5`)
			s.ends(exitOK, "order", "cancel", orders["bob"].String(), "--reason=r")
			continue
		}
		if shift == 1 {
			assert.Contains(t, output, "0 settled, 0 due for refund, 0 waiting, 0 unclear, 1 refunded, 4 reported before, 2 bad lines\n")
		} else {
			assert.Regexp(t, "0 settled, 0 due for refund, 0 waiting, 0 unclear, 0 refunded, [45] reported before, [23] bad lines\n", output)
		}
	}
	var states []string
	for _, p := range objects(t, s.ends(exitOK, "payment", "list", "--output=json")) {
		states = append(states, fmt.Sprint(p["reference"], " ", p["state"], " ", p["reason"], " ", p["refund_reference"]))
	}
	assert.ElementsMatch(t, []string{
		"pi_1 refunded already-paid re_1", "pi_2 settled <nil> <nil>", "pi_3 refunded order-not-found re_3",
		"pi_4 refunded order-cancelled re_4", "pi_6 settled <nil> <nil>",
	}, states)
	output := s.ends(exitFailed, "payment", "import", file(t, refunded("pi_2", "re_2")+"\n"+refunded("pi_1", "re_2")))
	assert.Contains(t, output, "line 1: not imported: no refund of the payment pi_2 is due: it is settled, for the order "+
		orders["ann"].String()+"; `stampede order cancel` makes it due")
	assert.Contains(t, output, `line 2: no refund of the payment is due: it was refunded with reference "re_1"`)
	own := s.ends(exitOK, "payment", "list", "--output=json") // what it writes, it takes
	assert.Contains(t, s.ends(exitOK, "payment", "import", file(t, own)), "0 refunded, 5 reported before, 0 bad lines\n")
}

var outageOfPostgres = flag.Duration("payments.outage", 8*time.Second, "how long Postgres is away while buyers pay")

// Buyers pay at a provider that takes 25 payments a second, and Postgres is away meanwhile, for longer than some of
// them have left. Nobody's money that the provider has taken in time is refunded, and each report that was answered 200
// is what Postgres has.
func TestOutageRefundsNoMoneyInTime(t *testing.T) {
	t.Parallel()
	const winners, perSecond = 150, 25
	postgres := testkit.OwnPostgres(t)
	require.NoError(t, migrate.Up(t.Context(), postgres.URL))
	pool, err := connect.Postgres(t.Context(), postgres.URL, 4)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s := &shop{t: t, keys: testkit.Keys(t), pool: pool, databaseURL: postgres.URL}
	_, url := s.serve()
	s.worker("worker").Start()
	sale := s.createSale(url, reservation.Terms{
		Name: "test", Stock: winners, PaymentWindow: 12 * time.Second, UnitPrice: 1290, Currency: "EUR",
	})
	orders := make([]order.View, winners)
	var buyers errgroup.Group
	for n := range orders {
		buyers.Go(func() error {
			return postJSON(t.Context(), url+"/v1/sales/"+sale.String()+"/orders", nil, &orders[n],
				"X-User-ID", fmt.Sprint("buyer-", n), "Prefer", "wait=30")
		})
	}
	require.NoError(t, buyers.Wait())

	limit := ratelimiter.NewLimiter(perSecond, 1)
	var mu sync.Mutex
	answers := map[string]order.PaymentView{} // of the reports that were answered 200, by reference
	var payers errgroup.Group
	for n, o := range orders {
		payers.Go(func() error {
			until, err := time.Parse(time.RFC3339, o.ExpiresAt)
			if err == nil {
				err = limit.Wait(t.Context())
			}
			if err != nil || time.Now().After(until) {
				return err // the provider does not take it any more
			}
			report := fmt.Appendf(nil, `{"order_id":%q,"reference":"ch_%d","amount":1290,"currency":"EUR"}`, o.OrderID, n)
			for {
				var p order.PaymentView
				if postJSON(t.Context(), url+"/v1/payments", report, &p, "Authorization", "Bearer "+adminToken) == nil {
					mu.Lock()
					answers[p.Reference] = p
					mu.Unlock()
					return nil
				}
				if !retry.Pause(100*time.Millisecond+rand.N(400*time.Millisecond), t.Context().Done()) {
					return t.Context().Err()
				}
			}
		})
	}
	testkit.Eventually(t, within, "some have paid", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(answers) >= winners/10
	})
	postgres.StopImmediate()
	retry.Pause(*outageOfPostgres, t.Context().Done())
	require.NoError(t, postgres.Restart(t.Context()))
	require.NoError(t, payers.Wait())
	testkit.Eventually(t, within, "each payment is decided", func() bool {
		return s.count("SELECT count(*) FROM open_payments WHERE state = 'waiting'") == 0
	})
	t.Logf("%d of %d orders were paid in time, with Postgres away for %v", len(answers), winners, *outageOfPostgres)
	require.Greater(t, len(answers), winners/2)
	rows, _ := pool.Query(t.Context(), "SELECT reference, state, order_id FROM payments") // its error comes with the rows
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Reference, State, OrderID string }])
	require.NoError(t, err)
	require.Len(t, found, len(answers))
	for _, p := range found {
		require.Equal(t, "settled", p.State, p.Reference)
		require.Equal(t, answers[p.Reference].OrderID.String(), p.OrderID)
	}
	require.Equal(t, len(answers), s.count("SELECT count(*) FROM orders WHERE status = 'paid'"))
	s.ends(exitOK, "audit", "--wait=60s", "--sale="+sale.String())
}

// postJSON posts a JSON document, and reads the answer of 200 or 201 into another one.
func postJSON(ctx context.Context, to string, body []byte, into any, header ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 40*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK && answer.StatusCode != http.StatusCreated {
		return fmt.Errorf("%s: HTTP %d", to, answer.StatusCode)
	}
	return json.NewDecoder(answer.Body).Decode(into)
}

// payableSale creates a sale with a payment window.
func (s *shop) payableSale(stock, window string) uuid.UUID {
	s.t.Helper()
	output := s.ends(exitOK, "sale", "create", "--name=test", "--stock="+stock, "--payment-window="+window,
		"--output=json")
	var sale struct{ ID uuid.UUID }
	require.NoError(s.t, json.Unmarshal([]byte(output), &sale), output)
	return sale.ID
}

// The unit of an unpaid order goes to another buyer, who pays; the audit holds.
func TestUnpaidOrderReleasesUnitToNextBuyer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	sale := s.payableSale("1", "1s")
	orders := url + "/v1/sales/" + sale.String() + "/orders"

	late := ask(t, http.MethodPost, orders, "ann", "")
	require.Equal(t, http.StatusAccepted, late.HTTP)
	require.Equal(t, http.StatusConflict, ask(t, http.MethodPost, orders, "bob", "").HTTP)
	s.worker("worker").Start() // from its confirmation on, the order can expire
	order := url + "/v1/orders/" + late.OrderID
	testkit.Eventually(t, within, "the order expires",
		func() bool { return ask(t, http.MethodGet, order, "ann", "").Status == "expired" })
	assert.Equal(t, http.StatusGone, ask(t, http.MethodPost, order+"/pay", "ann", `{"reference":"too late"}`).HTTP)

	// On a busy machine the buyer may miss the window of one second, and buys again.
	testkit.Eventually(t, within, "another buyer pays", func() bool {
		bought := ask(t, http.MethodPost, orders, "bob", "")
		if bought.HTTP != http.StatusAccepted {
			return false
		}
		var paid apiAnswer
		testkit.Eventually(t, within, "a decision", func() bool {
			paid = ask(t, http.MethodPost, url+"/v1/orders/"+bought.OrderID+"/pay", "bob", `{"reference":"in time"}`)
			return paid.HTTP == http.StatusOK || paid.HTTP == http.StatusGone
		})
		return paid.HTTP == http.StatusOK
	})
	assert.Zero(t, ask(t, http.MethodGet, url+"/v1/sales/"+sale.String(), "bob", "").Available)
	s.ends(exitOK, "audit", "--wait=30s", "--sale="+sale.String())
}

// Time without a running ingress does not count towards the payment window.
func TestOutageExtendsPaymentWindow(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	ingress, url := s.serve()
	s.worker("worker").Start()
	bought := ask(t, http.MethodPost, url+"/v1/sales/"+s.payableSale("1", "30m").String()+"/orders", "ann", "")
	require.Equal(t, http.StatusAccepted, bought.HTTP)
	var before apiAnswer
	testkit.Eventually(t, within, "the order is confirmed", func() bool {
		before = ask(t, http.MethodGet, url+"/v1/orders/"+bought.OrderID, "ann", "")
		return before.Status == "confirmed"
	})
	seenAt := func() (seen time.Time) {
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT seen_at FROM pulse`).Scan(&seen))
		return seen
	}
	first := seenAt()
	testkit.Eventually(t, within, "the ingress is seen again", func() bool { return seenAt().After(first) })

	// The ingress is killed, and an hour passes.
	ingress.Kill()
	for _, column := range []string{"pulse SET seen_at = seen_at", "orders SET due = due"} {
		_, err := s.pool.Exec(t.Context(), "UPDATE "+column+" - interval '1 hour'")
		require.NoError(t, err)
	}
	_, url = s.serve()
	var outages int
	testkit.Eventually(t, within, "the outage is recorded", func() bool {
		outages = s.count(`SELECT count(*) FROM outages WHERE ended_at - began_at > interval '59 minutes'`)
		return outages > 0
	})
	assert.Equal(t, 1, outages)
	after := ask(t, http.MethodGet, url+"/v1/orders/"+bought.OrderID, "ann", "")
	assert.Equal(t, "confirmed", after.Status)
	assert.WithinDuration(t, before.ExpiresAt, after.ExpiresAt, time.Minute, "the remaining time is unchanged")
	assert.False(t, after.ExpiresAt.Before(before.ExpiresAt))
	assert.Equal(t, "paid", ask(t, http.MethodPost, url+"/v1/orders/"+bought.OrderID+"/pay", "ann",
		`{"reference":"r-1"}`).Status)
}

// Anonymous readers hold every connection that they can get; heartbeats, the guard, payments, reads of orders and
// purchases continue.
func TestAnonymousReadersDoNotBlockPayments(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	s.worker("worker").Start()
	sale := s.payableSale("1000", "30m")
	page := url + "/v1/sales/" + sale.String()
	bought := ask(t, http.MethodPost, page+"/orders", "ann", "")
	require.Equal(t, http.StatusAccepted, bought.HTTP)
	order := url + "/v1/orders/" + bought.OrderID
	testkit.Eventually(t, within, "the order is confirmed",
		func() bool { return ask(t, http.MethodGet, order, "ann", "").Status == "confirmed" })

	outages := func() int { return s.count("SELECT count(*) FROM outages") }
	before := outages()
	// From now on every read of a sale blocks.
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE sales IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	var readers sync.WaitGroup
	done := make(chan struct{})
	for n := range 40 {
		readers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					ask(t, http.MethodGet, []string{page, url + "/v1/sales", fmt.Sprintf("%s/v1/sales?limit=%d", url, n+1)}[n%3], "",
						"")
				}
			}
		})
	}
	blocked := func() int {
		return s.count(`SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND application_name = 'stampede serve'`)
	}
	most := 0
	testkit.Eventually(t, within, "readers hold all connections that they can get", func() bool {
		before := most
		most = max(most, blocked())
		return most > 0 && most == before
	})
	seen := func() (at time.Time) {
		require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT seen_at FROM pulse").Scan(&at))
		return at
	}
	for try := range 3 {
		_, err := tx.Exec(t.Context(), "SELECT 1") // the worker ends a session that blocks others and is silent
		require.NoError(t, err)
		last := seen()
		testkit.Eventually(t, within, "heartbeats arrive", func() bool { return seen().After(last) })
		assert.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, page+"/orders", fmt.Sprint("buyer-", try), "").HTTP)
	}
	assert.Equal(t, before, outages())
	require.NoError(t, tx.Rollback(t.Context()))
	// A payment reads the price of its sale, so it waited as well. The readers go on.
	testkit.Eventually(t, within, "the order is paid", func() bool {
		return ask(t, http.MethodPost, order+"/pay", "ann", `{"reference":"pi_1"}`).HTTP == http.StatusOK
	})
	assert.Equal(t, "paid", ask(t, http.MethodGet, order, "ann", "").Status)
	assert.Equal(t, http.StatusOK, ask(t, http.MethodGet, url+"/v1/orders", "ann", "").HTTP)
	close(done)
	readers.Wait()
}
