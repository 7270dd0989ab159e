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

// A timeline has what the desk has seen, what its operators did or tried, and what others did to sales, in order, once.
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
