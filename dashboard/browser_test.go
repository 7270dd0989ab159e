//go:build browser

package dashboard

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testbrowser"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

func TestBrowser(t *testing.T) {
	b := testbrowser.Start(t)
	for name, test := range map[string]func(*testing.T, *testbrowser.Browser){
		"EveryPageKeepsItsLayout": everyPageKeepsItsLayout, "TableFollowsTheCharts": tableFollowsTheCharts,
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
	sale := d.fill()
	b := browser.Open(t)
	b.Go(d.url + "/login")
	b.CheckLayout("login")
	logIn(d, b, "ada")
	var order uuid.UUID
	require.NoError(t, d.Shop.Pool.QueryRow(t.Context(), "SELECT id FROM orders LIMIT 1").Scan(&order))
	b.Shows("#troubles", "seconds")
	b.Until(`document.querySelectorAll("path.l-accepted").length > 0`, "charts")
	b.CheckLayout("overview")
	for name, path := range map[string]string{
		"sale": "/sales/" + sale.String(), "sales": "/sales", "orders": "/orders?sale=" + sale.String(),
		"order": "/orders/" + order.String(), "letters": "/letters", "letter": "/letters/1", "audit": "/audit",
		"runbook": "/docs/operations", "error": "/none",
	} {
		if name == "error" {
			b.Expect("404")
		}
		b.Go(d.url + path)
		b.CheckLayout(name)
	}
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
	sell(617)
	b.Until(`document.querySelector("path.l-available").getAttribute("d")`, "a path")
	require.Zero(t, testbrowser.Evaluate[int](b, asked), "nobody sees the table")
	b.Click("details.table > summary")
	b.Shows("details.table tbody tr:first-child", "617")
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-tick.C:
				sell(615)
			case <-stop:
				tick.Stop()
				return
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-ended })
	b.Shows("details.table tbody tr:first-child", "615")
	require.True(t, testbrowser.Evaluate[bool](b, asked+` <= 2 + performance.now() / 5000`), "not with each point")
	b.CheckLayout("table")
}

// fill makes a sale with orders and dead letters, and a fleet in trouble. It returns the sale.
func (d *testDesk) fill() uuid.UUID {
	t := d.t
	sale, err := d.Shop.Catalog.Create(catalog.WithOperator(t.Context(), "ada"), reservation.Terms{
		Name: hostile, Stock: 1000, PerOrderLimit: 2, PaymentWindow: 10 * time.Minute,
	})
	require.NoError(t, err)
	id := sale.ID
	for i := range 20 {
		d.Ask(t, id, fmt.Sprintf("user-%d@example.com", i))
	}
	testwork.FulfilAll(t, d.Shop)
	_, err = d.Shop.Catalog.Restock(catalog.WithOperator(t.Context(), "ann"), id, 250, "key")
	require.NoError(t, err)
	d.park(3)
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
	for i, state := range []reservation.State{
		reservation.StateScheduled, reservation.StatePaused, reservation.StateEnded, reservation.StateOpen,
	} {
		s := countedSale(counted)
		s.ID, s.Name, s.State, s.OpensAt = uuid.New(), fmt.Sprintf("Sneaker drop %d", i+1), state, now.Add(time.Hour)
		if state == reservation.StateOpen {
			s.OpensAt, s.Shut, s.UnitsKnown = time.Time{}, "its stock is rebuilt: the Redis server was replaced", false
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
				Readers: []string{"stampede:{0}:orders", "stampede:{1}:orders"}, Failing: []string{"release"},
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
