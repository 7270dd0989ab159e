package dashboard

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/dashboard/fleet"
	"stampede/dashboard/session"
	"stampede/internal/format"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
)

const (
	// journalMax bounds what is in memory, changesMax and changesAge the changes of sales in a timeline.
	journalMax = 5000
	changesMax = 1000
	changesAge = 24 * time.Hour
	// marksMax bounds the marks of a chart, of the newest marksAge.
	marksMax = 100
	marksAge = 15 * time.Minute
	// marksWait is how long charts wait for the marks that Postgres has.
	marksWait = 500 * time.Millisecond
	// marksKept is how long marks are not read again, if no new one is known.
	marksKept = time.Second
	rebuilt   = "✓"
	// freshStart is how old a process may be at first sight that has just started.
	freshStart = time.Minute
)

// event is something that happened to the installation.
type event struct {
	At       time.Time
	Kind     string
	What     string
	Sale     uuid.UUID // nil for all
	Operator string
	// Mark is its sign on the charts, "" if it has none.
	Mark string
	// Recorded is true for what Postgres has, too, with its operator.
	Recorded bool
}

// journal is what this dashboard has seen happen since it started, and what its operators have done.
type journal struct {
	mu     sync.Mutex
	events []event
	marked int // those with a mark, also when they are no longer in memory
	// open are the troubles that last, by what tells them apart.
	open map[string]fleet.Trouble
	// seen has, by their keys, who has acknowledged those of them that were; seenChanges counts its changes.
	seen        map[string]string
	seenChanges int

	// recent is what charts were told last, at what version.
	recent struct {
		mu      sync.Mutex
		at      time.Time
		version int
		events  []event
	}
}

func (j *journal) add(e event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if e.Mark != "" {
		j.marked++
	}
	j.events = append(j.events, e)
	j.events = j.events[max(0, len(j.events)-journalMax):]
}

// version changes with each event that has a mark.
func (j *journal) version() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.marked
}

// follow notes what changes from snapshot to snapshot, until ctx is done.
func (j *journal) follow(ctx context.Context, seen Fleet) error {
	before := &fleet.Snapshot{}
	j.add(event{At: time.Now(), Kind: "dashboard", What: "began to watch"})
	for ctx.Err() == nil {
		now, err := seen.Next(ctx, before.Number)
		switch {
		case err == nil:
			j.observe(before, now)
			before = now
		case ctx.Err() == nil:
			return fmt.Errorf("dashboard: %w", err)
		}
	}
	return nil
}

// observe notes what has changed between two snapshots.
func (j *journal) observe(before, now *fleet.Snapshot) {
	j.observeTroubles(now)
	for _, sale := range now.Sales {
		i := slices.IndexFunc(before.Sales, func(s fleet.Sale) bool { return s.ID == sale.ID })
		if i < 0 || before.Sales[i].State == sale.State {
			continue
		}
		became := sale.State
		recorded := became == reservation.StatePaused || before.Sales[i].State == reservation.StatePaused
		if became == reservation.StateEnded { // unless its time was over, which nobody records
			recorded = sale.ClosesAt.IsZero() || now.At.Before(sale.ClosesAt)
		}
		j.add(event{
			At: now.At, Kind: "sale", What: format.Printable(sale.Name) + " is " + string(became), Sale: sale.ID,
			Mark: marks[string(became)], Recorded: recorded,
		})
	}
	same := func(r fleet.Rebuild) func(fleet.Rebuild) bool {
		return func(s fleet.Rebuild) bool {
			return s.Partition == r.Partition && s.Sale == r.Sale && s.Since.Equal(r.Since)
		}
	}
	for _, r := range now.Rebuilds {
		if !slices.ContainsFunc(before.Rebuilds, same(r)) {
			j.add(event{At: r.Since, Kind: "rebuild", What: rebuildOf(r) + " begins: " + r.Because(), Sale: r.Sale, Mark: "⟳"})
		}
	}
	for _, r := range before.Rebuilds {
		if !slices.ContainsFunc(now.Rebuilds, same(r)) {
			j.add(event{At: now.At, Kind: "rebuild", What: rebuildOf(r) + " has ended", Sale: r.Sale, Mark: rebuilt})
		}
	}
	for _, p := range now.Processes {
		i := slices.IndexFunc(before.Processes, func(q fleet.Process) bool { return q.Target == p.Target })
		started := i < 0 && before.Number > 0 && now.At.Sub(p.Started) < freshStart
		if i >= 0 {
			was := before.Processes[i].Started
			started = !was.IsZero() && !was.Equal(p.Started)
		}
		if p.Up && started {
			j.add(event{
				At: p.Started, Kind: "restart", What: p.Kind + " " + place(p.Target) + " has started " + p.Version, Mark: "↻",
			})
		}
	}
}

func rebuildOf(r fleet.Rebuild) string {
	if r.Sale == uuid.Nil {
		return fmt.Sprintf("the rebuild of partition %d", r.Partition)
	}
	return "the rebuild of a sale"
}

// observeTroubles notes those that began and ended. Their texts have figures that change.
func (j *journal) observeTroubles(now *fleet.Snapshot) {
	last := make(map[string]fleet.Trouble, len(now.Troubles))
	for _, t := range now.AllTroubles() {
		last[t.Key] = t
		if _, known := j.open[t.Key]; !known {
			j.add(event{At: t.Since, Kind: string(t.Severity), What: "begins: " + t.Text})
		}
	}
	for key, t := range j.open {
		if _, lasts := last[key]; !lasts {
			j.add(event{
				At: now.At, Kind: string(t.Severity), What: "has ended after " + lasting(now.At.Sub(t.Since)) + ": " + t.Text,
			})
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.open = last
	seen := maps.Clone(j.seen)
	maps.DeleteFunc(seen, func(key, _ string) bool { _, lasts := last[key]; return !lasts })
	if len(seen) < len(j.seen) {
		j.seen, j.seenChanges = seen, j.seenChanges+1
	}
}

// acknowledge notes that somebody has seen a trouble, and is at it. It holds until the trouble ends. It returns false
// if there is no such trouble.
func (j *journal) acknowledge(key, operator string) (t fleet.Trouble, lasts bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if t, lasts = j.open[key]; lasts {
		j.seen = maps.Clone(j.seen)
		if j.seen == nil {
			j.seen = map[string]string{}
		}
		j.seen[key] = operator
		j.seenChanges++
	}
	return t, lasts
}

// seenTroubles are who has acknowledged which troubles, and how often that has changed. The map is never changed.
func (j *journal) seenTroubles() (map[string]string, int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.seen, j.seenChanges
}

// acknowledged is the action of the form beside a trouble.
func (d *site) acknowledged(_ context.Context, r *http.Request, operator string) (action, error) {
	key := r.PostForm.Get("trouble")
	return action{"acknowledge", []any{"trouble", key}, "/#troubles", func() (string, error) {
		t, lasts := d.journal.acknowledge(key, operator)
		if !lasts {
			return "", &refusal{"That is over.", "Nothing was done."}
		}
		return "You are shown as the one who has seen it: " + t.Text + ".", nil
	}}, nil
}

// mark is an event on a chart.
type mark struct {
	At   int64  `json:"at"` // in milliseconds since 1970
	Sign string `json:"sign"`
	Text string `json:"text"`
}

// changeMarks are the signs of recorded changes.
var changeMarks = map[string]string{
	"paused": marks[string(reservation.StatePaused)], "resumed": marks[string(reservation.StateOpen)],
	"ended": marks[string(reservation.StateEnded)], "rebuilt": rebuilt,
}

// happened is what is known, oldest first: the journal and, while Postgres answers, the newest changes of sales since a
// time, by whoever made them.
func (d feed) happened(ctx context.Context, since time.Time) []event {
	d.journal.mu.Lock()
	all := slices.Clone(d.journal.events)
	d.journal.mu.Unlock()
	rows, _ := d.Catalog.Pool.Query(ctx, sql.FleetTimeline, changesMax, since) // its error comes with the rows
	changes, err := pgx.CollectRows(rows, pgx.RowToStructByName[struct {
		SaleID uuid.UUID
		Name   string
		catalog.Change
	}])
	if err == nil {
		from := since
		if len(changes) == changesMax { // older ones were left out
			from = changes[0].OccurredAt
		}
		all = slices.DeleteFunc(all, func(e event) bool { return e.Recorded && !e.At.Before(from) })
	} else {
		all = append(all, event{At: time.Now(), Kind: "dashboard", What: "has no answer from Postgres: changes may lack"})
	}
	for _, c := range changes {
		what := format.Printable(c.Name) + " " + c.Change.Name()
		for _, m := range details(c.Data) {
			what += ", " + m.Name + " " + m.Value
		}
		all = append(all, event{
			At: c.OccurredAt, Kind: "sale", What: what, Sale: c.SaleID, Operator: c.Operator, Mark: changeMarks[c.Change.Name()],
		})
	}
	slices.SortStableFunc(all, func(a, b event) int { return a.At.Compare(b.At) })
	return all
}

// marks are the newest ones of a sale, or of all, oldest first. Equal ones of the same second are one.
func (d feed) marks(ctx context.Context, sale uuid.UUID) []mark {
	found, since := []mark{}, time.Now().Add(-marksAge)
	for _, e := range d.recent(ctx, since) {
		isHere := sale == uuid.Nil || e.Sale == uuid.Nil || e.Sale == sale
		if e.Mark == "" || !isHere || e.At.Before(since) {
			continue
		}
		at := e.At.UnixMilli()
		if n := len(found); n == 0 || found[n-1].Sign != e.Mark || at-found[n-1].At > time.Second.Milliseconds() {
			found = append(found, mark{at, e.Mark, e.What})
		}
	}
	return found[max(0, len(found)-marksMax):]
}

// recent is what happened, read once for all open pages: they ask at the same time when there is a new mark.
func (d feed) recent(ctx context.Context, since time.Time) []event {
	r := &d.journal.recent
	r.mu.Lock()
	defer r.mu.Unlock()
	if version := d.journal.version(); version != r.version || time.Since(r.at) > marksKept {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), marksWait)
		defer cancel()
		r.events, r.version, r.at = d.happened(ctx, since), version, time.Now()
	}
	return r.events
}

// timeline answers with all that is known, as CSV.
func (d feed) timeline(w http.ResponseWriter, r *http.Request, _ *session.Session) {
	ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
	defer cancel()
	all := d.happened(ctx, time.Now().Add(-changesAge))
	file := newFile(w, "timeline", "time", "kind", "what", "operator", "sale")
	for _, e := range all {
		file.row(e.At.UTC().Format(instant), e.Kind, e.What, format.Printable(e.Operator), idText(e.Sale))
	}
	file.Flush()
}
