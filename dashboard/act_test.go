package dashboard

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/internal/operators"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/upkeep/audit"
)

func (d *testDesk) shown(sale uuid.UUID) catalog.CountedSale {
	d.t.Helper()
	found, err := d.Shop.Catalog.Show(d.t.Context(), sale)
	require.NoError(d.t, err)
	return found
}

func TestOperatorPausesAndResumes(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 5)
	b := d.as("ann")
	page := "/sales/" + id.String()
	_, shown := b.post(page + "/pause")
	require.Contains(t, shown, "The sale is paused")
	require.EqualValues(t, "paused", d.shown(id).State)
	_, shown = b.get(page)
	require.NotContains(t, shown, "The sale is paused", "a note is shown once")
	require.Regexp(t, `(?s)paused.*#2.*<bdi>ann</bdi>`, shown)
	_, shown = b.post(page + "/resume")
	require.Contains(t, shown, "The sale is resumed: it is open")
	require.EqualValues(t, "open", d.shown(id).State)
	require.Regexp(t, `an operator acted.*operator=ann.*action=pause.*sale=`+id.String(), d.log.String())
	_, shown = b.post("/sales/" + uuid.NewString() + "/pause")
	require.Contains(t, shown, "There is no such sale")
}

// Each page has a key, so that its form takes effect once however often it is sent.
func TestRestockFormTakesEffectOnce(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 5)
	b := d.as("ann")
	page := "/sales/" + id.String()
	_, shown := b.get(page)
	key := regexp.MustCompile(`name="key" value="([^"]+)"`).FindStringSubmatch(shown)[1]
	for range 3 {
		_, shown = b.post(page+"/restock", "key", key, "units", " 50 ")
		require.Contains(t, shown, "50 units were added: the stock is 55")
	}
	require.EqualValues(t, 55, d.shown(id).Stock)
	_, shown = b.post(page+"/restock", "key", key, "units", "60")
	require.Contains(t, shown, "This form was sent before with another number of units")
	for _, units := range []string{"", "0", "x", "1.5", "99999999999999999999"} {
		_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units", units)
		require.Contains(t, shown, "Restock takes a whole number of units", units)
	}
	_, shown = b.post(page+"/restock", "key", "chosen", "units", "5")
	require.Contains(t, shown, "The form is damaged")
	_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units", "-56")
	require.Contains(t, shown, "Not done.")
	_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units", "-5")
	require.Contains(t, shown, "5 units were removed: the stock is 50")
	require.EqualValues(t, 50, d.shown(id).Stock)
}

func TestEndTakesItsNameAndTheRole(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale(hostile, 5)
	d.show(id)
	page := "/sales/" + id.String()
	operator := d.as("ann")
	status, shown := operator.post(page+"/end", "name", hostile)
	require.Equal(t, http.StatusForbidden, status)
	require.Contains(t, shown, "This takes the role admin, and you are operator. Nothing was done.")
	admin := d.as("ada")
	for _, name := range []string{"", "drop", strings.ToUpper(hostile)} {
		_, shown = admin.post(page+"/end", "name", name)
		require.Contains(t, shown, "That is not the name of this sale")
	}
	require.EqualValues(t, "open", d.shown(id).State)
	for _, path := range []string{page, "/", "/sales", "/find?q=script"} {
		_, shown = admin.get(path)
		require.Contains(t, shown, `\u202egnp.exe`, path)
		require.NotContains(t, shown, "\u202e", "a name turns no text around it")
	}
	_, shown = admin.post(page+"/end", "name", hostile+" ")
	require.Contains(t, shown, "The sale is ended, permanently.")
	require.EqualValues(t, "ended", d.shown(id).State)
	_, shown = admin.post(page + "/resume")
	require.Contains(t, shown, "cannot resume a sale that is ended")
}

// A viewer, or a cashier, who sends the forms that their pages do not have.
func TestViewerChangesNothing(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 5)
	d.show(id)
	o := d.Buy(t, id, "ann")
	testwork.FulfilAll(t, d.Shop)
	letter := d.park(1)[0]
	d.target("shop", "https://shop.example/hook")
	for _, reference := range []string{"pi_1", "pi_2"} {
		d.report(order.Money{Reference: reference, OrderID: o})
	}
	viewer, cashier := d.as("vic"), d.as("cas")
	for _, path := range []string{
		"/", "/sales", "/sales/" + id.String(), "/orders/" + o.String(), "/refunds", "/letters",
		fmt.Sprint("/letters/", letter), "/targets", "/targets/shop", "/audit",
	} {
		for _, b := range []*browser{viewer, cashier} {
			status, shown := b.get(path)
			require.Equal(t, http.StatusOK, status, path)
			shown = strings.ReplaceAll(shown, `<form method="post" action="/letters"><section`, "")
			require.NotRegexp(t, `method="post" action="/(sales|orders|letters|targets|audit)`, shown, path)
			mayRefund := b == cashier && (path == "/refunds" || strings.HasPrefix(path, "/orders/"))
			require.Equal(t, mayRefund, strings.Contains(shown, `method="post" action="/refunds"`), path)
		}
	}
	for path, fields := range map[string][]string{
		"/sales/" + id.String() + "/pause":   {},
		"/sales/" + id.String() + "/resume":  {},
		"/sales/" + id.String() + "/restock": {"key", uuid.NewString(), "units", "5"},
		"/sales/" + id.String() + "/end":     {"name", "drop"},
		"/sales":                             {"key", uuid.NewString(), "name", "x", "stock", "5", "limit", "1"},
		"/orders/" + o.String() + "/cancel":  {"reason", "because"},
		"/letters":                           {"do", "discard", "reason", "because", "id", fmt.Sprint(letter)},
		"/targets/shop/pause":                {},
		"/targets/shop/resume":               {},
		"/targets/shop/replay":               {"name", "shop", "place", "start"},
		"/audit/run":                         {},
		"/audit/dry-run":                     {},
		"/audit/apply":                       {},
	} {
		status, shown := viewer.post(path, fields...)
		require.Equal(t, http.StatusForbidden, status, path)
		require.Contains(t, shown, "you are viewer. Nothing was done.")
		status, shown = cashier.post(path, fields...)
		require.Equal(t, http.StatusForbidden, status, path)
		require.Contains(t, shown, "you are cashier. Nothing was done.")
	}
	status, shown := viewer.post("/refunds", "payment", "pi_2", "refund", "re_2")
	require.Equal(t, http.StatusForbidden, status)
	require.Contains(t, shown, "This takes the role cashier, and you are viewer.")
	require.EqualValues(t, 27, testutil.ToFloat64(d.metrics.actions.WithLabelValues(actionDenied)))
	require.EqualValues(t, "open", d.shown(id).State)
	require.EqualValues(t, 5, d.shown(id).Stock)
	found, err := ledger.New(d.Shop.Pool).Order(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, []any{order.StatusPaid, "pi_1"}, []any{found.Status, found.PaymentReference})
	require.EqualValues(t, 1, d.Count(t, "SELECT count(*) FROM payments WHERE state = 'refund_due'"))
	l, err := d.letters.Get(t.Context(), letter)
	require.NoError(t, err)
	require.Equal(t, deadletter.StatusParked, l.Status)
	require.EqualValues(t, 1, d.Count(t, "SELECT count(*) FROM sales"))
}

func TestAdminCreatesSaleOnce(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("ada")
	fields := []string{
		"key", uuid.NewString(), "name", "drop <b>", "stock", "50", "limit", "2", "opens", "2099-01-02T03:04", "window", "10",
		"shards", "1", "grace", "90", "pace", "25", "price", "49.5", "currency", "eur",
	}
	for range 2 {
		_, shown := b.post("/sales", fields...)
		require.Contains(t, shown, "The sale drop &lt;b&gt; is created, with 50 units: it is scheduled.")
	}
	sales, err := d.Shop.Catalog.List(t.Context(), uuid.Nil, 10)
	require.NoError(t, err)
	require.Len(t, sales, 1)
	require.Equal(t, 10*time.Minute, sales[0].PaymentWindow)
	require.Equal(t, "2099-01-02T03:04:00Z", sales[0].OpensAt.UTC().Format(time.RFC3339))
	require.Equal(t, []any{90 * time.Second, int64(25), int64(4950), "EUR"}, []any{
		sales[0].PaymentGrace, sales[0].PaymentsPerSecond, sales[0].UnitPrice, sales[0].Currency,
	})
	_, shown := b.get("/sales/" + sales[0].ID.String())
	require.Regexp(t, `Grace</dt><dd>1m30s<.*Pace</dt><dd>25 payments a second<.*Price of a unit</dt><dd>49\.50 EUR`, shown)
	for _, c := range []struct{ price, currency, want string }{
		{"49.50", "JPY", "is not an amount of JPY"},
		{"49.5", "", "The unit_price needs currency"},
		{"", "EUR", "The currency needs unit_price"},
		{"49", "EUR1", "must be a code of ISO 4217"},
		{"-5", "EUR", "is not an amount of EUR"},
	} {
		_, shown = b.post("/sales", "key", uuid.NewString(), "name", "x", "stock", "1", "limit", "1",
			"price", c.price, "currency", c.currency)
		require.Contains(t, shown, c.want)
	}
	_, shown = b.post("/sales", "key", uuid.NewString(), "name", "x", "stock", "many", "limit", "1")
	require.Contains(t, shown, "is not a whole number")
	_, shown = b.post("/sales", "key", uuid.NewString(), "name", "", "stock", "1", "limit", "1")
	require.Contains(t, shown, "The name must be 1 to")
}

func TestOrderIsShownAndCancelled(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.OpenPayable(t, 5)
	const user = `<b>user</b>`
	o := d.Attempt(t, id, user, 2, "").Reservation.OrderID
	b := d.as("ann")
	path := "/orders/" + o.String()
	status, shown := b.get(path)
	require.Equal(t, http.StatusNotFound, status)
	require.Contains(t, shown, "give its user as well")
	_, shown = b.get(path + "?user=%3Cb%3Euser%3C/b%3E")
	require.Regexp(t, `(?s)reserved: units taken, entry appended.*its entry waits for a worker.*orders in it`, shown)
	testwork.FulfilAll(t, d.Shop)
	_, shown = b.get("/orders?order=" + o.String())
	require.Regexp(t, `(?s)reserved: units taken.*its entry is finished.*stream in Redis.*recorded: confirmed.*expires, unless it is paid`, shown)
	require.Contains(t, shown, `&lt;b&gt;user&lt;/b&gt;`)
	require.NotContains(t, shown, "<b>user")
	_, shown = b.get("/orders?user=%3Cb%3Euser%3C/b%3E&status=confirmed")
	require.Contains(t, shown, path)
	_, shown = b.get("/orders?sale=" + id.String() + "&status=paid")
	require.Contains(t, shown, "There is no such order in Postgres")
	for query, want := range map[string]string{
		"order=x": "not the id of an order", "sale=x": "not the id of a sale", "user=x&status=nonsense": "no such status",
		"user=" + strings.Repeat("x", 300): "user",
	} {
		_, shown = b.get("/orders?" + query)
		require.Contains(t, shown, want)
	}

	_, shown = b.post(path+"/cancel", "reason", "  ")
	require.Contains(t, shown, "Say why the order is cancelled")
	_, shown = b.post(path+"/cancel", "reason", strings.Repeat("x", reasonMax+1))
	require.Contains(t, shown, "Not done.")
	_, err := ledger.New(d.Shop.Pool).Pay(t.Context(), o, user, "payment-7")
	require.NoError(t, err)
	for range 2 {
		_, shown = b.post(path+"/cancel", "reason", `<i>fraud</i>`)
		require.Contains(t, shown, "The order is cancelled; its units go back to the sale. The refund of its payment is due.")
	}
	require.Regexp(t, `(?s)paid.*cancelled by an operator.*an operator.*&lt;i&gt;fraud&lt;/i&gt;`, shown)
	require.NotContains(t, shown, "Cancel the order")
	require.NotContains(t, shown, "<i>fraud")
}

func TestTargetIsPausedResumedAndReplayed(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.target("shop", "https://ann:secret@shop.example/hook?key=secret")
	b := d.as("ann")
	standing := func(want string) {
		t.Helper()
		query := "SELECT count(*) FROM relay_targets WHERE state || ' ' || position = '" + want + "'"
		require.EqualValues(t, 1, d.Count(t, query))
	}
	_, shown := b.get("/targets")
	require.Contains(t, shown, "webhook · <bdi>https://shop.example/hook?…</bdi>")
	require.NotContains(t, shown, "secret")
	_, shown = b.post("/targets/shop/pause")
	require.Contains(t, shown, "The target is paused")
	standing("paused 0")
	_, shown = b.get("/targets/shop?rows")
	require.NotContains(t, shown, "<html")
	require.Contains(t, shown, "paused")
	_, shown = b.post("/targets/shop/resume")
	require.Contains(t, shown, "The target gets events.")
	d.Shop.Exec(t, "UPDATE relay_targets SET position = 7")
	sale := d.sale("drop", 5)
	for _, c := range []struct{ name, how, place, answer, standing string }{
		{"", "from", "start", "That is not the name of this target", "active 7"},
		{"shop", "from", "yesterday", "There is no such place among the events", "active 7"},
		{"shop", "after", "now", "Write the id of an event", "active 7"},
		{"shop", "after", sale.String() + ".r1", "after position 1 again", "active 1"},
		{"shop", "from", "2020-01-01T00:00:00Z", "after position 0 again", "active 0"},
		{"shop", "from", "now", "skips the events up to position 1", "active 1"},
	} {
		_, shown = b.post("/targets/shop/replay", "name", c.name, "how", c.how, "place", c.place)
		require.Contains(t, shown, c.answer)
		standing(c.standing)
	}
	require.Regexp(t, `an operator acted.*operator=ann action=replay target=shop`, d.log.String())
	for _, path := range []string{"/targets/none", "/targets/none?rows"} {
		status, shown := b.get(path)
		require.Equal(t, http.StatusNotFound, status)
		require.Contains(t, shown, "There is no such target.")
	}
	_, shown = b.post("/targets/none/pause")
	require.Contains(t, shown, "Not done.")
}

func TestLettersAreResolvedInBulk(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	ids := d.park(5)
	b := d.as("ann")
	_, shown := b.get("/letters")
	require.Equal(t, 5, strings.Count(shown, `type="checkbox" name="id"`))
	require.NotContains(t, shown, "<script>document")
	id := func(i int) string { return fmt.Sprint(ids[i]) }
	_, shown = b.get("/letters/" + id(0))
	require.Contains(t, shown, `\x00\x01`, "bytes are quoted")
	require.NotContains(t, shown, "\x00")

	_, shown = b.post("/letters", "do", "replay", "id", id(0), "id", id(1), "id", id(1))
	require.Contains(t, shown, "2 dead letters are in their streams again.")
	_, shown = b.post("/letters", "do", "replay", "id", id(0), "id", id(2))
	require.Contains(t, shown, "One dead letter is in its stream again. 1 failed.")
	require.Contains(t, shown, id(0)+": it was replayed before")
	_, shown = b.post("/letters", "do", "discard", "id", id(3), "reason", " ")
	require.Contains(t, shown, "Say why they are discarded")
	_, shown = b.post("/letters", "do", "discard", "id", id(3), "reason", "a\x00b", "back", id(3))
	require.Contains(t, shown, "Not done.", "a reason without control characters")
	_, shown = b.post("/letters", "do", "discard", "id", id(3), "reason", "<b>broken</b>", "back", id(3))
	require.Contains(t, shown, "One dead letter is discarded.")
	require.Contains(t, shown, "&lt;b&gt;broken&lt;/b&gt;")
	_, shown = b.post("/letters", "do", "discard", "id", id(3), "reason", "again")
	require.Contains(t, shown, "This dead letter was replayed or discarded before")
	for _, fields := range [][]string{{"do", "replay"}, {"do", "eat", "id", id(4)}, {"do", "replay", "id", "x"}} {
		_, shown = b.post("/letters", fields...)
		require.Contains(t, shown, "Nothing was done")
	}
	many := []string{"do", "replay"}
	for i := range bulkMax + 1 {
		many = append(many, "id", fmt.Sprint(i+1000))
	}
	_, shown = b.post("/letters", many...)
	require.Contains(t, shown, "Select at most 100")
	l, err := d.letters.Get(t.Context(), ids[3])
	require.NoError(t, err)
	require.Equal(t, "ann", l.Operator)
}

// awaitCheck waits until no check is running, and returns the page.
func (b *browser) awaitCheck() (page string) {
	b.t.Helper()
	testkit.Eventually(b.t, within, "the end of the check", func() bool {
		_, page = b.get("/audit")
		return !strings.Contains(page, "is running, since")
	})
	return page
}

// Sales are in both servers: who cannot reach Postgres must not be sent to Redis.
func TestActionWithoutPostgresBlamesNoOtherServer(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 5)
	b := d.as("ann")
	d.Dashboard.Catalog.Pool.Close()
	_, shown := b.post("/sales/" + id.String() + "/pause")
	require.Contains(t, shown, "Not done.")
	require.NotContains(t, shown, "Redis does not answer")
	require.EqualValues(t, 1, testutil.ToFloat64(d.metrics.actions.WithLabelValues(actionFailed)))
}

func TestAuditIsRunAndRecorded(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 5)
	d.Buy(t, id, "ann")
	testwork.FulfilAll(t, d.Shop)
	b := d.as("ann")
	_, shown := b.post("/audit/run")
	require.Contains(t, shown, "The audit has begun")
	shown = b.awaitCheck()
	require.Contains(t, shown, "✓ in order")
	require.Contains(t, shown, "✓ S4")
	recorded, err := audit.Latest(t.Context(), d.Shop.Pool)
	require.NoError(t, err)
	require.Equal(t, "ann", recorded.Operator)
	require.Empty(t, recorded.Broken)
	_, shown = b.post("/audit/run", "sale", "x")
	require.Contains(t, shown, "That is not the id of a sale")
	b.post("/audit/run", "sale", uuid.NewString())
	require.Contains(t, b.awaitCheck(), "There is no such sale")
}

func TestReconcileTakesTheDryRunThatWasRead(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 50)
	d.Buy(t, id, "ann")
	testwork.FulfilAll(t, d.Shop)
	// A counter that somebody changed.
	d.Shop.Exec(t, "UPDATE sales SET sold = 7 WHERE id = $1", id)
	b := d.as("ann")
	for _, token := range []string{"", "guessed"} {
		_, shown := b.post("/audit/apply", "token", token)
		require.Contains(t, shown, "Begin with a dry run, and read it.")
	}
	b.post("/audit/dry-run")
	shown := b.awaitCheck()
	require.Contains(t, shown, "recount")
	require.Contains(t, shown, "● not in order")
	require.EqualValues(t, 7, testshop.Sold(t, d.Shop.Pool, id), "a dry run changes nothing")
	token := regexp.MustCompile(`name="token" value="([^"]+)"`).FindStringSubmatch(shown)[1]
	_, shown = b.post("/audit/apply", "token", token[1:]+"A")
	require.Contains(t, shown, "Begin with a dry run, and read it.")
	_, shown = b.post("/audit/apply", "token", token)
	require.Contains(t, shown, "The reconcile has begun")
	require.Contains(t, b.awaitCheck(), "The latest reconcile")
	require.EqualValues(t, 1, testshop.Sold(t, d.Shop.Pool, id))
	_, shown = b.post("/audit/apply", "token", token)
	require.Contains(t, shown, "this is not the latest one", "the form is sent again")
}

func TestOneCheckRunsAtATime(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	first := &check{ID: "a", Kind: checkAudit, Operator: "ann"}
	require.NoError(t, d.checks.begin(first, "", t.Context()))
	defer d.checks.running.Done()
	b := d.as("ada")
	_, shown := b.post("/audit/run")
	require.Contains(t, shown, "The audit of ann is running.")
	require.Contains(t, d.checks.state(), "running a")
}

// A page is shown to some only, so that a test of pages may miss an action that does not exist.
func TestPagesNameActionsOfOperators(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("pages/*.html")
	require.NoError(t, err)
	parts, err := filepath.Glob("pages/layout/*.html")
	require.NoError(t, err)
	named := 0
	for _, page := range append(pages, parts...) {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, found := range regexp.MustCompile(`\.May "([^"]*)"`).FindAllSubmatch(text, -1) {
			named++
			require.NotPanics(t, func() { operators.Action(found[1]).Lowest() }, page)
		}
	}
	require.NotZero(t, named)
}
