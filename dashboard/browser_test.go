//go:build browser

package dashboard

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testbrowser"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestBrowser(t *testing.T) {
	b := testbrowser.Start(t)
	for name, test := range map[string]func(*testing.T, *testbrowser.Browser){
		"EveryPageKeepsItsLayout": everyPageKeepsItsLayout, "TimesAreLocal": timesAreLocal,
		"OrdersAreFound": ordersAreFound, "TargetIsReplayed": targetIsReplayed, "RefundIsNoted": refundIsNoted,
		"BadgeFollows": badgeFollows, "MarksFollow": marksFollow, "TableFollowsTheCharts": tableFollowsTheCharts,
		"DrawIsFollowed": drawIsFollowed, "ChartsShareTheirTime": chartsShareTheirTime,
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t, b) })
	}
}

func logIn(d *testDesk, b *testbrowser.Tab, token string) {
	b.Go(d.url + "/login")
	b.Until(`document.activeElement.id === "token"`, "the focus on the token")
	b.Type(token)
	b.Type("\r")
	b.Shows(".who", "Log out")
}

// Nothing lies on anything else or sticks out, on any page, with everything wrong and the worst of names.
func everyPageKeepsItsLayout(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	sizes := d.sizes()
	d.basket(sizes, "ann", map[string]int64{"m": 4, "l": 1})
	testwork.FulfilAll(t, d.Shop)
	sale := d.fill()
	b := browser.Open(t)
	b.Go(d.url + "/login")
	b.CheckLayout("login")
	logIn(d, b, "ada")
	var paid uuid.UUID
	const settled = "SELECT order_id FROM payments WHERE state = 'settled'"
	require.NoError(t, d.Shop.Pool.QueryRow(t.Context(), settled).Scan(&paid))
	b.Shows("#troubles", "seconds")
	b.Until(`document.querySelectorAll("path.l-accepted").length > 0`, "charts")
	b.CheckLayout("overview")
	var items []reservation.Item
	for n := range order.MaxItems {
		items = append(items, reservation.Item{Code: fmt.Sprint("size-", n), Name: fmt.Sprint("Size ", n), Stock: 9})
	}
	many, err := d.Shop.Catalog.Create(t.Context(), reservation.Terms{
		Name: "many", Stock: 9 * int64(len(items)), PerOrderLimit: 5, Items: items,
	})
	require.NoError(t, err)
	b.Go(d.url + "/sales/" + many.ID.String())
	b.CheckLayout("many")
	require.Less(t, testbrowser.Evaluate[int](b, "document.documentElement.scrollHeight"), 3000)
	for name, path := range map[string]string{
		"found": "/find?q=user-", "items": "/sales/" + sizes.String(), "baskets": "/orders?sale=" + sizes.String(),
		"sale": "/sales/" + sale.String(), "sales": "/sales", "orders": "/orders?sale=" + sale.String(),
		"order": "/orders/" + paid.String(), "refunds": "/refunds", "targets": "/targets",
		"target": "/targets/warehouse", "letters": "/letters", "letter": "/letters/1", "audit": "/audit",
		"runbook": "/docs/operations", "error": "/none",
	} {
		if name == "error" {
			b.Expect("404")
		}
		b.Go(d.url + path)
		b.CheckLayout(name)
	}
}

// Times are those of the browser's zone, and the UTC of each is its title, also of rows that come later.
func timesAreLocal(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	sale := d.fill()
	b := browser.Open(t)
	b.Zone("Asia/Kolkata") // half an hour from any other
	logIn(d, b, "ada")
	const shown = `[...document.querySelectorAll("main time, footer time")].map((e) => ` +
		`[e.dateTime, e.textContent, e.title].join("|"))`
	requireLocal := func() {
		t.Helper()
		b.Until(`((all) => all.length && all.every((e) => e.title))([...document.querySelectorAll("time")])`, "the script")
		for _, text := range testbrowser.Evaluate[[]string](b, shown) {
			parts := strings.Split(text, "|")
			at, err := time.Parse(instant, parts[0])
			require.NoError(t, err)
			require.Contains(t, at.Add(330*time.Minute).Format("2006-01-02 15:04:05.000"), parts[1])
			require.Equal(t, at.Format(time.DateTime)+" UTC", parts[2])
		}
		require.Zero(t, testbrowser.Evaluate[int](b, `[...document.querySelectorAll("main *, footer *")].filter((e) =>
			!e.closest("time") && [...e.childNodes].some((n) => n.nodeType === 3 && /\d UTC|\(UTC/.test(n.data))).length`))
	}
	requireLocal()
	b.Shows("footer", "in Asia/Calcutta")
	b.Go(d.url + "/sales/" + sale.String())
	b.Click("details.table > summary")
	requireLocal()
	for _, path := range []string{"/orders?sale=" + sale.String(), "/refunds", "/letters", "/targets", "/audit"} {
		b.Go(d.url + path)
		requireLocal()
	}
	b.Go(d.url + "/sales")
	b.Click("details.create > summary")
	b.Shows("label[for=n-opens]", "Asia/Calcutta")
	testbrowser.Evaluate[bool](b, `(["name", "stock", "opens"].forEach((name, i) =>
		document.querySelector("[name=" + name + "]").value = ["drop", "5", "2099-01-02T03:04"][i]), true)`)
	b.Click("details.create button")
	b.Shows(".banner.good", "The sale drop is created")
	require.EqualValues(t, 1, d.Count(t, "SELECT count(*) FROM sales WHERE opens_at = '2099-01-01 21:34Z'"))
}

// Orders are found by the beginning of their user, in a sale, by status, page after page.
func ordersAreFound(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	sale := d.sale("日本限定スニーカー", 500)
	for i := range ordersOnPage + 10 {
		d.Buy(t, sale, fmt.Sprintf("ann-%03d", i))
	}
	testwork.FulfilAll(t, d.Shop)
	d.show(sale)
	b := browser.Open(t)
	logIn(d, b, "vic")
	b.Go(d.url + "/orders")
	b.Click("#q-user")
	b.Type("ann-\r")
	b.Shows("[aria-label=Found] tbody tr:first-child", "ann-000")
	b.Shows("[aria-label=Found] tbody tr:last-child", fmt.Sprintf("ann-%03d", ordersOnPage-1))
	b.Click("[aria-label=Found] p a")
	b.Shows("[aria-label=Found] tbody tr:first-child", fmt.Sprintf("ann-%03d", ordersOnPage))
	b.Until(`document.querySelectorAll("[aria-label=Found] tbody tr").length === 10`, "the rest")
	b.Click("[name=begins]")
	b.Click("#q-user")
	b.Type("\r")
	b.Shows("[aria-label=Found]", "There is no such order") // of a user of this name
}

// A target is paused, resumed and, by its name, replayed.
func targetIsReplayed(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	d.target("shop", "https://ann:secret@shop.example/hook?key=secret")
	repeat(t, func() { d.fleet.publish(func(*fleet.Snapshot) {}) })
	b := browser.Open(t)
	logIn(d, b, "ann")
	b.Click("nav a[href='/targets']")
	b.Shows("tbody", "https://shop.example/hook?…")
	b.Click("tbody a")
	b.Click("form[action$=pause] button")
	b.Shows(".badge", "paused")
	b.Click("form[action$=resume] button")
	b.Shows(".badge", "active")
	d.Shop.Exec(t, "UPDATE relay_targets SET position = 4711")
	b.Shows("td[data-th=Position]", "4,711") // by itself
	for _, try := range []struct{ name, answer, position string }{
		{"sho", "That is not the name of this target", "4,711"}, {"shop", "after position 0", "0"},
	} {
		b.Click(".danger summary")
		b.Until(`document.querySelector(".danger").open`, "the form")
		b.Click("#place")
		b.Until(`document.activeElement.id === "place"`, "the focus")
		b.Type("start\t" + try.name + "\r")
		b.Shows("main > .banner", try.answer)
		b.Shows("td[data-th=Position]", try.position)
	}
}

// A cashier notes the refund of one payment among others, on the page of refunds and on that of an order.
func refundIsNoted(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	sale := d.sale("drop", 5)
	bought := d.Buy(t, sale, "ann")
	testwork.FulfilAll(t, d.Shop)
	for _, reference := range []string{"pi_paid", "pi_1", "pi_2", "pi_3"} {
		d.report(order.Money{Reference: reference, OrderID: bought, Amount: 4900, Currency: "EUR"})
	}
	b := browser.Open(t)
	logIn(d, b, "cas")
	b.Click("nav a[href='/refunds']")
	b.Shows("[aria-label='Due in all sales']", "147.00 EUR 3 due")
	b.Click("[aria-label='Select pi_2']")
	b.Click("#refund-refund_due")
	b.Type("re_2\r")
	b.Shows(".banner.good", "The payment pi_2 is refunded: 49.00 EUR.")
	b.Until(`[...document.querySelectorAll("tbody th code")].map((e) => e.textContent).join() === "pi_1,pi_3"`, "the rest")
	b.Click("tbody td[data-th=Order] a")
	b.Click("[aria-label='Select pi_3']")
	b.Click("#refund-")
	b.Type("re_3\r")
	b.Shows(".banner.good", "The payment pi_3 is refunded")
	b.Shows("tbody", "re_3")
	require.EqualValues(t, 1, d.Count(t, "SELECT count(*) FROM payments WHERE state = 'refund_due'"))
}

// An open page tells of a sale that it is sold out, and that it sells nothing.
func badgeFollows(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	sale := d.sale("drop", 5)
	b := browser.Open(t)
	d.show(sale)
	repeat(t, func() { d.fleet.publish(func(*fleet.Snapshot) {}) })
	logIn(d, b, "vic")
	for _, page := range []string{"/", "/sales/" + sale.String()} {
		change := func(available int64, shut string) {
			d.fleet.publish(func(s *fleet.Snapshot) {
				s.Redis.Reachable = true
				s.Sales = slices.Clone(s.Sales)
				s.Sales[0].Available, s.Sales[0].Held, s.Sales[0].Shut = available, 5-available, shut
			})
		}
		change(5, "")
		b.Go(d.url + page)
		b.Shows(".badge.open", "open")
		change(0, "")
		b.Shows(".badge.sold-out", "sold out")
		change(0, "its Redis server does not answer")
		b.Shows(".badge.not-selling", "not selling")
	}
}

// A chart marks what changed it while the page is open, and says it at the pointer.
func marksFollow(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	sale := d.sale("drop", 5)
	d.show(sale)
	b := browser.Open(t)
	logIn(d, b, "vic")
	b.Until(`document.querySelectorAll("path.l-accepted").length > 0`, "charts")
	_, err := d.Shop.Catalog.Pause(t.Context(), sale)
	require.NoError(t, err)
	d.fleet.publish(func(s *fleet.Snapshot) {
		s.Sales = slices.Clone(s.Sales)
		s.Sales[0].State = reservation.StatePaused
	})
	repeat(t, func() { d.fleet.publish(func(*fleet.Snapshot) {}) })
	b.Until(`[...document.querySelectorAll(".chart .tick")].some((e) => e.textContent === "❚❚")`, "a mark")
}

// All charts show the figures of one time: that to which a trouble leads, then that at the pointer. What is sold of a
// million is seen.
func chartsShareTheirTime(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	sale := d.fill()
	began := time.Now().Add(-7 * time.Minute).Truncate(time.Second)
	b := browser.Open(t)
	b.Zone("Asia/Kolkata")
	logIn(d, b, "ann")
	b.Go(fmt.Sprintf("%s/?at=%d#h-charts", d.url, began.UnixMilli()))
	const times = `[...document.querySelectorAll(".readout text:first-of-type")].map((e) => e.textContent)`
	b.Until(times+`.length === 4`, "the time in each chart")
	shown := testbrowser.Evaluate[[]string](b, times)
	at, err := time.Parse(time.TimeOnly, shown[0])
	require.NoError(t, err)
	local := began.UTC().Add(330 * time.Minute)
	require.InDelta(t, local.Second()+60*local.Minute(), at.Second()+60*at.Minute(), 2, "%v", shown)
	b.Until(`document.querySelector("input[value='900']").checked`, "a span that has it")
	b.Until(`[...document.querySelectorAll(".chart .tick.middle")].some((e) => /^\d\d:\d\d:\d\d$/.test(e.textContent))`, "times")
	b.Until(`((svg) => {
		const box = svg.getBoundingClientRect();
		svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 9}));
		return true;
	})(document.querySelector(".plot svg"))`, "the pointer")
	b.Until(times+`.every((e) => e !== "`+shown[0]+`") && new Set(`+times+`).size === 1`, "one time, at the pointer")
	require.Len(t, testbrowser.Evaluate[[]string](b, times), 4)

	d.fleet.mu.Lock()
	d.fleet.history = nil
	for i := range 300 {
		d.fleet.history = append(d.fleet.history, fleet.Point{
			At: time.Now().Add(time.Duration(i-300) * time.Second),
			Sales: map[uuid.UUID]fleet.SalePoint{
				sale: {Available: int64(1_000_000 - i), Sold: int64(i), Known: true},
			},
		})
	}
	d.fleet.mu.Unlock()
	b.Go(d.url + "/sales/" + sale.String())
	const units = `document.querySelector("[data-chart=units]")`
	b.Until(`[...`+units+`.querySelectorAll(".tick")].some((e) => e.textContent === "↑ available")`, "what is above")
	b.Until(`[...`+units+`.querySelectorAll(".tick.end")].some((e) => e.textContent === "500")`, "a scale for what is sold")
	b.Until(`!`+units+`.querySelector("path.l-available")`, "no flat line")
}

// The table beside the charts of a sale follows while it is open, and asks for nothing while it is not.
func tableFollowsTheCharts(t *testing.T, browser *testbrowser.Browser) {
	d := openDesk(t)
	sale := d.fill()
	b := browser.Open(t)
	logIn(d, b, "vic")
	sell := func(available int64) {
		now := time.Now()
		d.fleet.mu.Lock()
		d.fleet.history = append(d.fleet.history, fleet.Point{At: now, Sales: map[uuid.UUID]fleet.SalePoint{
			sale: {Available: available, Known: true},
		}})
		d.fleet.mu.Unlock()
		d.fleet.publish(func(s *fleet.Snapshot) { s.At = now })
	}
	b.Go(d.url + "/sales/" + sale.String())
	b.Until(`document.querySelectorAll("path.l-available").length > 0`, "charts")
	const asked = `performance.getEntriesByType("resource").filter((e) => e.name.includes("/minutes")).length`
	testkit.Eventually(t, within, "a path", func() bool { // after the stream is open
		sell(617)
		return testbrowser.Evaluate[bool](b, `Boolean(document.querySelector("path.l-available").getAttribute("d"))`)
	})
	require.Zero(t, testbrowser.Evaluate[int](b, asked), "nobody sees the table")
	b.Click("details.table > summary")
	b.Shows("details.table tbody tr:first-child", "617")
	repeat(t, func() { sell(615) })
	b.Shows("details.table tbody tr:first-child", "615")
	require.True(t, testbrowser.Evaluate[bool](b, asked+` <= 2 + performance.now() / 5000`), "not with each point")
	b.CheckLayout("table")
}

// repeat calls do again and again, as a fleet looks, until the test ends.
func repeat(t *testing.T, do func()) {
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-tick.C:
				do()
			case <-stop:
				tick.Stop()
				return
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-ended })
}

// fill makes a sale with orders and dead letters, and a fleet in trouble. It returns the sale.
func (d *testDesk) fill() uuid.UUID {
	t := d.t
	sale, err := d.Shop.Catalog.Create(catalog.WithOperator(t.Context(), "ada"), reservation.Terms{
		Name: hostile, Stock: 1000, PerOrderLimit: 2, PaymentWindow: 10 * time.Minute, PaymentGrace: 90 * time.Second,
		PaymentsPerSecond: 25, UnitPrice: order.MaxUnitPrice, Currency: "EUR",
	})
	require.NoError(t, err)
	id := sale.ID
	for i := range 20 {
		d.Ask(t, id, fmt.Sprintf("user-%d@example.com", i))
	}
	testwork.FulfilAll(t, d.Shop)
	_, err = d.Shop.Catalog.Restock(catalog.WithOperator(t.Context(), "ann"), id, 250, "key")
	require.NoError(t, err)
	d.refunds(id)
	d.park(3)
	d.target("warehouse", "https://warehouse.shop.example/"+strings.Repeat("a-long-path/", 9)+"hook")
	d.Shop.Exec(t, `UPDATE relay_targets SET failures = 7, last_error_at = now(), retry_at = now() + interval '1 minute',
		last_error = 'Post "https://warehouse.shop.example": context deadline exceeded (Client.Timeout exceeded)'`)
	counted, err := d.Shop.Catalog.Show(t.Context(), id)
	require.NoError(t, err)
	now := time.Now()
	rich := countedSale(counted)
	rich.Available, rich.Held, rich.Sold, rich.ClosesAt = 630, 120, 500, now.Add(754*time.Second)
	rich.RatesKnown = true
	rich.Rates = fleet.Rates{PurchasesKnown: true, Offered: 12345, Accepted: 912.4, Refused: 11234, Shed: 187, Failed: 1.6}
	rich.FunnelKnown, rich.Funnel = true, fleet.Funnel{
		Accepted: 620, Confirmed: 118, Paid: 471, Cancelled: 12, Expired: 16, Rejected: 2, Voided: 1,
	}
	sales := []fleet.Sale{rich}
	names := []string{
		"Sneaker drop", "限定スニーカー発売記念セール・東京秋葉原店先行抽選販売", strings.Repeat("longest-name-", 15), "한정판 운동화", "双十一限时抢购",
	}
	for i := range 49 {
		s := countedSale(counted)
		s.ID, s.Name = uuid.New(), fmt.Sprintf("%s %d", names[i%len(names)], i+1)
		s.State = []reservation.State{
			reservation.StateOpen, reservation.StateScheduled, reservation.StatePaused, reservation.StateOpen,
			reservation.StateEnded,
		}[i%5]
		switch i {
		case 0:
			s.Shut, s.UnitsKnown = "its stock is rebuilt: the Redis server was replaced", false
		case 3:
			s.Available, s.Held, s.Sold = 0, 50, 1200
		case 5:
			for n := range int64(order.MaxItems) {
				item := reservation.Item{Code: fmt.Sprintf("%s-%02d", strings.Repeat("w", 29), n), Stock: 100}
				s.Items = append(s.Items, catalog.CountedItem{Item: item, Available: n % 2 * order.MaxPerOrder})
			}
		}
		if s.State == reservation.StateScheduled {
			s.OpensAt = now.Add(time.Hour)
		}
		sales = append(sales, s)
	}
	all := rich.Rates
	all.DurableKnown = true
	all.Durable, all.AnswerP50, all.AnswerP99 = 905, 640*time.Microsecond, 4200*time.Microsecond
	all.DurableP50, all.DurableP99 = 11*time.Millisecond, 1400*time.Millisecond
	all.Backlog, all.OldestWaiting, all.BacklogKnown = 1234, 32*time.Second, true
	for i := range 900 {
		r, selling := all, rich.Rates
		f := float64(i%300) / 300
		r.Offered, r.Accepted, r.Refused = 12000*f, 900*f*(1-f)*4, 11000*f
		selling.Offered, selling.Accepted, selling.Refused = r.Offered, r.Accepted, r.Refused
		r.AnswerP99 = time.Duration(float64(2*time.Millisecond) * (1 + f))
		d.fleet.history = append(d.fleet.history, fleet.Point{
			At: now.Add(time.Duration(i-900) * time.Second), Rates: r,
			Sales: map[uuid.UUID]fleet.SalePoint{id: {
				Rates: selling, Available: int64(1250 - 620*f), Held: int64(120 * f), Sold: int64(500 * f),
				Known: i < 700 || i > 740,
			}},
		})
	}
	d.fleet.publish(func(s *fleet.Snapshot) {
		s.Sales, s.SalesRead, s.SalesAt, s.Rates, s.DeadLetters = sales, true, now, all, 3
		s.Postgres = fleet.Server{Reachable: true, Since: now.Add(-90 * time.Minute)}
		s.Redis = fleet.Server{
			Since: now.Add(-42 * time.Second), Error: "dial tcp 10.0.3.7:6379: connect: connection refused",
		}
		s.RedisNodes = []fleet.RedisNode{
			{Name: "10.0.3.6:6379", Server: fleet.Server{Reachable: true, Since: now}, UsedBytes: 29e8, MaxBytes: 40e8},
			{Name: "10.0.3.7:6379", Server: fleet.Server{Since: now, Error: "connection refused"}},
		}
		s.Processes = []fleet.Process{
			{
				Target: "http://ingress-1.shop.internal:8080/metrics", Kind: "ingress", Up: true, Since: now.Add(-time.Hour),
				LastSeen: now, Version: "v1.4.0", RatesKnown: true, CPU: .93, MemoryBytes: 184e6, Connections: 9312, InFlight: 312,
				InFlightLimit: 4096, PerSecond: 12345,
			},
			{
				Target: "http://ingress-2.shop.internal:8080/metrics", Kind: "ingress", Since: now.Add(-75 * time.Second),
				LastSeen: now.Add(-75 * time.Second), Error: "connection refused", Version: "v1.4.0",
			},
			{
				Target: "http://worker-1.shop.internal:9090/metrics", Kind: "worker", Up: true, Since: now.Add(-49 * time.Hour),
				LastSeen: now, Version: "v1.4.0", RatesKnown: true, CPU: .21, MemoryBytes: 61e6, PerSecond: 905,
				Readers: []string{d.Shop.Keys.Orders(0)}, Failing: []string{"release"},
			},
			{Target: "http://worker-2.shop.internal:9090/metrics", Since: now.Add(-3 * time.Second), Error: "no such host"},
		}
		s.Troubles = []fleet.Trouble{
			{
				Severity: fleet.Critical, Text: "An accepted order waits for 32 seconds to be recorded",
				Since: now.Add(-40 * time.Second), Runbook: "order-waits",
				Consequences: []fleet.Trouble{{Severity: fleet.Warning, Text: "A step fails", Runbook: "step-fails"}},
			},
			{Severity: fleet.Critical, Text: "http://ingress-2.shop.internal:8080/metrics does not answer", Since: now.Add(-75 * time.Second), Runbook: "target-gone"},
			{
				Severity: fleet.Warning, Text: "3 dead letters are parked",
				Since: now.Add(-26 * time.Hour), Runbook: "dead-letter-parked",
			},
		}
		s.Rebuilds = []fleet.Rebuild{{
			Partition: 1, Reason: "server", Since: now.Add(-9 * time.Second), Step: "copying the buyers",
			SalesDone: 3, SalesTotal: 11,
		}}
		s.Audit = &fleet.Audit{At: now.Add(-26 * time.Hour), Operator: "ann", Broken: []string{"S4"}}
	})
	return id
}

// refunds reports 300 payments of an order of the sale, of which the first settles it, and of other currencies.
func (d *testDesk) refunds(sale uuid.UUID) {
	var bought uuid.UUID
	const first = "SELECT id FROM orders WHERE sale_id = $1 LIMIT 1"
	require.NoError(d.t, d.Shop.Pool.QueryRow(d.t.Context(), first, sale).Scan(&bought))
	for i := range 300 {
		m := order.Money{Reference: fmt.Sprintf("pi_%03d", i), OrderID: bought, Amount: order.MaxUnitPrice, Currency: "EUR"}
		switch i % 10 {
		case 3:
			m.Reference += strings.Repeat("x", 248)
		case 5:
			m.OrderID, m.Amount, m.Currency = uuid.Nil, math.MaxInt32, "KWD"
			m.Unreadable = strings.Repeat("限定スニーカー発売記念セール", 8)
		case 7:
			m.OrderID, m.Amount, m.Currency, m.Unreadable = uuid.Nil, 0, "", hostile
		case 9:
			m.Amount, m.Currency = 4900, "JPY"
		}
		d.report(m)
		switch i % 50 {
		case 0, 13: // it cannot be a repeat
			m.OrderID, m.Amount, m.Currency = sale, order.MaxUnitPrice, "JPY"
			d.report(m)
		case 1:
			_, err := ledger.New(d.Shop.Pool).Disputed(d.t.Context(), order.Dispute{
				ID: "dp_" + m.Reference, Reference: m.Reference, State: order.DisputeOpen,
			})
			require.NoError(d.t, err)
		}
	}
}
