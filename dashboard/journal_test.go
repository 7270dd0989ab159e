package dashboard

import (
	"encoding/csv"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testwork"
	"stampede/reservation"
)

// noted are the events of a journal.
func (j *journal) noted() (lines []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.events {
		lines = append(lines, e.Kind+": "+e.What)
	}
	return lines
}

func TestJournalNotesWhatChanges(t *testing.T) {
	t.Parallel()
	now := time.Now()
	sale := fleet.Sale{ID: uuid.New(), Terms: reservation.Terms{Name: "drop"}, State: reservation.StateOpen}
	first := fleet.Process{Target: "http://one:8080/metrics", Kind: "ingress", Version: "v1", Up: true, Started: now}
	late := fleet.Trouble{Key: "order-waits ", Severity: fleet.Critical, Text: "an order has waited for 31s", Since: now}
	steps := []struct {
		change func(*fleet.Snapshot)
		want   []string
	}{
		{func(s *fleet.Snapshot) {
			s.Sales, s.Processes = []fleet.Sale{sale}, []fleet.Process{first}
		}, nil}, // what was so before is no event
		{func(s *fleet.Snapshot) {
			s.Sales = []fleet.Sale{{ID: sale.ID, Terms: reservation.Terms{Name: "drop"}, State: reservation.StatePaused}}
		}, []string{"sale: drop is paused"}},
		{func(s *fleet.Snapshot) {
			s.Sales = []fleet.Sale{{ID: uuid.New(), State: reservation.StateEnded}, sale}
		}, []string{"sale: drop is open"}},
		{func(s *fleet.Snapshot) {
			s.Troubles = []fleet.Trouble{late}
		}, []string{"critical: begins: an order has waited for 31s"}},
		{func(s *fleet.Snapshot) { // its text changes, and it is the same
			later := late
			later.Text = "an order has waited for 40s"
			s.Troubles = []fleet.Trouble{later}
		}, nil},
		{func(s *fleet.Snapshot) {
			s.Troubles, s.At = nil, now.Add(90*time.Second)
		}, []string{"critical: has ended after 1 min: an order has waited for 40s"}},
		{func(s *fleet.Snapshot) {
			s.Rebuilds = []fleet.Rebuild{
				{Partition: 1, Reason: "server", Since: now}, {Sale: sale.ID, Reason: "asked", Since: now},
			}
		}, []string{
			"rebuild: the rebuild of partition 1 begins: Redis was restarted, replaced or emptied",
			"rebuild: the rebuild of a sale begins: asked",
		}},
		{func(s *fleet.Snapshot) { // it goes on
			s.Rebuilds = []fleet.Rebuild{{Partition: 1, Reason: "server", Since: now, SalesDone: 7}}
		}, []string{"rebuild: the rebuild of a sale has ended"}},
		{func(s *fleet.Snapshot) { s.Processes[0].Up = false }, nil}, // which is a trouble
		{func(s *fleet.Snapshot) {
			s.Processes[0].Up, s.Processes[0].Started, s.Processes[0].Version = true, now.Add(time.Second), "v2"
		}, []string{"restart: ingress one:8080 has started v2"}},
		{func(s *fleet.Snapshot) { // one that runs for long is only seen late
			old := fleet.Process{Target: "http://two:8080/metrics", Kind: "worker", Up: true, Started: s.At.Add(-time.Hour)}
			fresh := fleet.Process{Target: "http://three:8080/metrics", Kind: "relay", Up: true, Started: s.At}
			s.Processes = append(s.Processes, old, fresh)
		}, []string{"restart: relay three:8080 has started "}},
	}
	j, before := &journal{}, &fleet.Snapshot{}
	for i, step := range steps {
		after := *before
		after.Number, after.At = before.Number+1, now
		after.Processes = append([]fleet.Process{}, before.Processes...)
		step.change(&after)
		seen := len(j.noted())
		j.observe(before, &after)
		require.Equal(t, step.want, append([]string(nil), j.noted()[seen:]...), "step %d", i)
		before = &after
	}
	for range journalMax + 1 {
		j.add(event{Mark: "↻"})
	}
	require.Len(t, j.noted(), journalMax, "the newest")
	require.Greater(t, j.version(), journalMax)
}

// What Postgres records too is said once. It does not record that the time of a sale was over.
func TestJournalKnowsWhatIsRecorded(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, c := range []struct {
		was, became reservation.State
		closes      time.Time
		want        bool
	}{
		{reservation.StateOpen, reservation.StatePaused, time.Time{}, true},
		{reservation.StatePaused, reservation.StateOpen, time.Time{}, true},
		{reservation.StateOpen, reservation.StateEnded, time.Time{}, true},
		{reservation.StateOpen, reservation.StateEnded, now.Add(time.Hour), true},
		{reservation.StateOpen, reservation.StateEnded, now, false},
		{reservation.StatePaused, reservation.StateEnded, now, false},
	} {
		sale := fleet.Sale{ID: uuid.New(), State: c.was, Terms: reservation.Terms{ClosesAt: c.closes}}
		before, after := &fleet.Snapshot{Sales: []fleet.Sale{sale}}, &fleet.Snapshot{At: now, Sales: []fleet.Sale{sale}}
		after.Sales[0].State = c.became
		j := &journal{}
		j.observe(before, after)
		require.Len(t, j.events, 1)
		require.Equal(t, c.want, j.events[0].Recorded, "%v", c)
	}
	j := &journal{}
	j.add(event{Kind: "action"})
	require.Zero(t, j.version(), "charts have nothing new")
}

// A timeline has what the dashboard has seen, what its operators did or tried, and what others did to sales, in order,
// once.
func TestTimelineIsDownloaded(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	const formula = `=HYPERLINK("http://evil.example")`
	id := d.sale(formula, 5)
	d.show(id)
	b := d.as("ann")
	b.post("/sales/" + id.String() + "/pause")
	b.post("/sales/"+id.String()+"/restock", "units", "x")
	b.post("/targets/" + strings.Repeat("x", 5000) + "%0A/pause")
	testkit.Eventually(t, within, "the first look", func() bool { return len(d.journal.noted()) >= 3 })
	d.show(id)
	testkit.Eventually(t, within, "the pause as it was seen", func() bool {
		return slices.Contains(d.journal.noted(), "sale: "+formula+" is paused")
	})
	b.post("/sales/" + id.String() + "/resume") // and again, faster than anybody looks
	b.post("/sales/" + id.String() + "/pause")
	_, history := b.get("/history?of=" + id.String())
	signs := regexp.MustCompile(`"sign":"([^"]+)"`).FindAllString(history, -1)
	require.Equal(t, []string{`"sign":"❚❚"`, `"sign":"▶"`, `"sign":"❚❚"`}, signs)
	_, history = b.get("/history?of=" + uuid.NewString())
	require.NotContains(t, history, "sign")

	long := time.Now().Add(-2 * changesAge) // before what Postgres is asked for
	d.journal.add(event{At: long, Kind: "sale", What: "an old sale is paused", Recorded: true})
	status, text := d.as("vic").get("/timeline")
	require.Equal(t, 200, status)
	rows, err := csv.NewReader(strings.NewReader(text)).ReadAll()
	require.NoError(t, err)
	require.Equal(t, []string{"time", "kind", "what", "operator", "sale"}, rows[0])
	seen, last := "", ""
	for _, row := range rows[1:] {
		require.GreaterOrEqual(t, row[0], last)
		last = row[0]
		seen += strings.Join(row[1:], "|") + "\n"
	}
	require.Contains(t, seen, "dashboard|began to watch||\n")
	require.Contains(t, seen, "sale|an old sale is paused||\n")
	require.Contains(t, seen, "sale|'"+formula+" paused, stock 5|ann|"+id.String())
	require.Equal(t, 2, strings.Count(seen, formula+" paused"), "with its operator, and not also as seen")
	require.NotContains(t, seen, formula+" is paused||")
	require.Contains(t, seen, "action|pause sale "+id.String()+": The sale is paused")
	require.Contains(t, seen, "action|pause target "+strings.Repeat("x", 2400))
	require.NotContains(t, seen, strings.Repeat("x", subjectMax))
	require.Contains(t, seen, "action|restock sale "+id.String()+": not done: Restock takes a whole number")
}

// Who has seen a trouble is shown to all, until it ends; if it comes back, nobody has seen it.
func TestTroubleIsAcknowledged(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	trouble := fleet.Trouble{
		Key: `SaleShut "<b>`, Severity: fleet.Critical, Text: "<b>shut", Runbook: "sale-shut", Since: time.Now(),
	}
	old := fleet.Trouble{Key: "AuditOld ", Severity: fleet.Warning, Text: "old", Since: time.Now().Add(-time.Hour)}
	b := d.as("ann")
	set := func(troubles ...fleet.Trouble) {
		d.fleet.publish(func(s *fleet.Snapshot) { s.Troubles = troubles })
		testkit.Eventually(t, within, "the journal", func() bool {
			d.journal.mu.Lock()
			defer d.journal.mu.Unlock()
			return len(d.journal.open) == len(troubles)
		})
	}
	set(trouble, old)
	_, shown := b.get("/")
	require.Equal(t, 2, strings.Count(shown, `<form method="post" action="/troubles" class="ack">`))
	require.Equal(t, 1, strings.Count(shown, fmt.Sprintf(`href="/?at=%d#h-charts"`, trouble.Since.UnixMilli())))
	require.Equal(t, 1, strings.Count(shown, "?at="), "the charts do not reach back to the other")
	require.Contains(t, shown, `<a class="state bad" href="/#troubles">● 2 wrong</a>`)
	status, _ := d.as("cas").post("/troubles", "trouble", trouble.Key)
	require.Equal(t, http.StatusForbidden, status)
	_, shown = b.post("/troubles", "trouble", "none")
	require.Contains(t, shown, "That is over.")
	_, shown = b.post("/troubles", "trouble", trouble.Key)
	require.Contains(t, shown, "You are shown as the one who has seen it: &lt;b&gt;shut.")
	_, shown = d.as("vic").get("/")
	require.Contains(t, shown, "seen by <bdi>ann</bdi>")
	require.Contains(t, shown, `<a class="state bad" href="/#troubles">▲ 2 wrong</a>`, "what is critical is seen")
	b.post("/troubles", "trouble", old.Key)
	_, shown = b.get("/")
	require.Contains(t, shown, `<a class="state warn" href="/#troubles">▲ 2 wrong, seen</a>`)
	require.Contains(t, strings.Join(d.journal.noted(), "\n"), "acknowledge trouble AuditOld")

	set(old)
	set(trouble, old)
	_, shown = b.get("/")
	require.Equal(t, 1, strings.Count(shown, "seen by"))
}

// sizes creates a sale with items.
func (d *testDesk) sizes() uuid.UUID {
	d.t.Helper()
	sale, err := d.Shop.Catalog.Create(d.t.Context(), reservation.Terms{
		Name: "shirts", Stock: 12, PerOrderLimit: 5, PaymentWindow: time.Hour, Currency: "EUR", Items: []reservation.Item{
			{Code: "m", Name: "Medium <b>", Stock: 4, UnitPrice: 1290},
			{Code: "l", Name: "Large", Stock: 8, UnitPrice: 1490, PerOrderLimit: 2},
		},
	})
	require.NoError(d.t, err)
	return sale.ID
}

// basket buys items for a user.
func (d *testDesk) basket(sale uuid.UUID, user string, items map[string]int64) (id uuid.UUID) {
	d.t.Helper()
	answer, err := d.Reserve(d.t.Context(), reservation.Request{Sale: sale, User: user, Items: items})
	require.NoError(d.t, err)
	require.Equal(d.t, reservation.Reserved, answer.Verdict)
	return answer.Reservation.OrderID
}

func TestItemsAreShown(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sizes()
	o := d.basket(id, "ann", map[string]int64{"m": 1, "l": 2})
	b := d.as("vic")
	page := "/sales/" + id.String()
	_, shown := b.get(page)
	require.Regexp(t, `Medium &lt;b&gt;</bdi>.*<code>m</code>.*s-taken" height="10" rx="3" width="25.00%".*`+
		`item.0.available">3<.*item.0.stock">4<.*12\.90 EUR`, shown)
	require.Contains(t, shown, `<dt>items</dt><dd><bdi>4 × m, 8 × l</bdi>`)
	require.Regexp(t, `Large.*<code>l</code>, 2 an order<.*width="25.00%".*item.1.available">6<.*`+
		`item.1.stock">8<.*14\.90 EUR`, shown)

	// They follow as the figures of the sale do.
	d.show(id)
	f := b.follow("")
	first, ok := f.next()
	require.True(t, ok)
	require.Equal(t, "3", first.data.V[id.String()+".item.0.available"])
	require.Equal(t, "3 × m, 6 × l", first.data.V[id.String()+".items"])
	_, shown = b.get("/")
	require.Contains(t, shown, `<span class="sub left"><span data-live="`+id.String()+`.items">3 × m, 6 × l<`)
	d.basket(id, "bob", map[string]int64{"m": 3})
	d.show(id)
	second, ok := f.next()
	require.True(t, ok)
	require.Equal(t, []string{"0", "100.00%"}, []string{
		second.data.V[id.String()+".item.0.available"], second.data.V[id.String()+".item.0.taken.width"],
	})
	require.NotContains(t, second.data.V, id.String()+".item.1.available")
	require.Equal(t, "gone: m · 6 × l", second.data.V[id.String()+".items"])
	_, shown = b.get("/sales")
	require.Contains(t, shown, `<span class="sub left"><span>gone: m · 6 × l</span>`)
	d.fleet.publish(func(s *fleet.Snapshot) {
		sale := s.Sales[0]
		sale.UnitsKnown = false
		s.Sales = []fleet.Sale{sale}
	})
	_, shown = b.get(page)
	require.Contains(t, shown, `item.0.available">–<`)
	_, shown = b.get("/")
	require.Contains(t, shown, `.items">–<`)

	_, shown = b.get("/orders/" + o.String() + "?user=ann")
	require.Contains(t, shown, `<dd>3<span class="sub">1 × m, 2 × l</span></dd>`)
	testwork.FulfilAll(t, d.Shop)
	_, shown = b.get("/orders/" + o.String())
	require.Contains(t, shown, `<dd>3<span class="sub">1 × m, 2 × l</span></dd>`)
	require.Contains(t, shown, "42.70 EUR")
	_, shown = b.get("/orders?sale=" + id.String())
	require.Contains(t, shown, `3<span class="sub">3 × m</span></td>`)
}

func TestRestockFormOfItemsTakesEffectOnce(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sizes()
	d.basket(id, "ann", map[string]int64{"m": 3, "l": 1})
	b := d.as("ann")
	page := "/sales/" + id.String()
	_, shown := b.get(page)
	require.Equal(t, 2, strings.Count(shown, `name="units.`))
	require.NotContains(t, shown, `name="units"`)
	key := regexp.MustCompile(`name="key" value="([^"]+)"`).FindStringSubmatch(shown)[1]
	for range 2 {
		_, shown = b.post(page+"/restock", "key", key, "units.m", " 20 ", "units.l", "")
		require.Contains(t, shown, "20 units of m were added: its stock is 24.")
	}
	for _, units := range []string{"", "0", "x", "1.5", "99999999999999999999"} {
		_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units.m", units)
		require.Contains(t, shown, "Restock takes a whole number of units", units)
	}
	_, shown = b.post(page+"/restock", "key", "chosen", "units.m", "5")
	require.Contains(t, shown, "The form is damaged")
	_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units.m", "-22", "units.l", "-1")
	require.Contains(t, shown, "So many units cannot be removed: 3 × m are taken")
	_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units.m", "-1", "units.l", "-2")
	require.Contains(t, shown, "1 units of m were removed: its stock is 23. 2 units of l were removed: its stock is 6.")
	require.Equal(t, []int64{23, 6}, []int64{d.shown(id).Items[0].Stock, d.shown(id).Items[1].Stock})
	change := details([]byte(`{"item_units": {"m": 20, "l": -3}, "item_taken": {"l": 2}}`))
	require.Equal(t, []detail{
		{Name: "item taken", Value: "2 × l"}, {Name: "item units", Value: "20 × m, -3 × l"},
	}, change)
	change = details([]byte(`{"items": [{"code": "m", "name": "Medium", "stock": 20}], "item_names": {"m": "Medium"}}`))
	require.Equal(t, []detail{{Name: "item names", Value: `{"m": "Medium"}`}}, change)
}
