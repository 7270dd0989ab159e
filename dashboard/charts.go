package dashboard

import (
	"context"
	"encoding/json"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/dashboard/session"
	"stampede/reservation"
)

// feed answers the requests of the script of a page.
type feed struct {
	*site
	hub *live.Hub
	// stopping ends the streams.
	stopping context.Context
}

// follow is the one stream of a page.
func (d feed) follow(w http.ResponseWriter, r *http.Request, s *session.Session) {
	done, ok := s.OpenStream()
	if !ok {
		writeText(w, http.StatusTooManyRequests, "You have too many open pages.")
		return
	}
	defer done()
	if err := d.hub.Serve(d.stopping, w, r, s.Alive); err != nil {
		writeText(w, http.StatusServiceUnavailable, err.Error())
	}
}

// history answers with all points and marks of a chart that are in memory; the points that follow come by the stream.
func (d feed) history(w http.ResponseWriter, r *http.Request, _ *session.Session) {
	scope, sale, ok := readScope(w, r)
	if !ok {
		return
	}
	answer := struct {
		At     []int64         `json:"at"`
		Points [][]live.Figure `json:"points"`
		Marks  []mark          `json:"marks"`
	}{At: []int64{}, Points: [][]live.Figure{}, Marks: d.marks(r.Context(), sale)}
	for _, p := range d.Fleet.History() {
		point := allPoint(p.Rates)
		if scope != allScope {
			s, known := p.Sales[sale]
			if !known {
				continue
			}
			point = salePoint(s.Rates, s.Known, s.Available, s.Held, s.Sold)
		}
		answer.At, answer.Points = append(answer.At, p.At.UnixMilli()), append(answer.Points, point)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer) // an error is that of the browser
}

// readScope reads whose figures are wanted: of all, or of a sale.
func readScope(w http.ResponseWriter, r *http.Request) (scope string, sale uuid.UUID, ok bool) {
	scope = r.URL.Query().Get("of")
	sale, err := uuid.Parse(scope)
	if err != nil && scope != allScope {
		writeText(w, http.StatusBadRequest, "of is all, or the id of a sale")
		return "", uuid.Nil, false
	}
	return scope, sale, true
}

// minutes answers with the rows of the table beside the charts, which an open table asks for every few seconds.
func (d feed) minutes(w http.ResponseWriter, r *http.Request, _ *session.Session) {
	scope, _, ok := readScope(w, r)
	if !ok {
		return
	}
	rows := fragment(d.parts, "minuterows", d.Fleet.Snapshot(), newTable(d.Fleet.History(), scope))
	writeHTML(w, http.StatusOK, []byte(rows))
}

// The charts have columns in this order; desk.js knows them by the same numbers.
const allScope = "all"

func allPoint(r fleet.Rates) []live.Figure {
	backlog, oldest := live.Figure(math.NaN()), live.Figure(math.NaN())
	if r.BacklogKnown {
		backlog, oldest = live.Figure(r.Backlog), live.Figure(r.OldestWaiting.Seconds())
	}
	durable := live.Figure(math.NaN())
	if r.DurableKnown {
		durable = live.Figure(r.Durable)
	}
	return append(ratePoint(r, r.PurchasesKnown), durable, measured(r.AnswerP50), measured(r.AnswerP99),
		measured(r.DurableP50), measured(r.DurableP99), backlog, oldest)
}

func ratePoint(r fleet.Rates, known bool) []live.Figure {
	point := []live.Figure{
		live.Figure(r.Offered), live.Figure(r.Accepted), live.Figure(r.Refused), live.Figure(r.Shed), live.Figure(r.Failed),
	}
	return unlessKnown(point, known)
}

// unlessKnown replaces figures that are not known.
func unlessKnown(point []live.Figure, known bool) []live.Figure {
	for i := range point {
		if !known {
			point[i] = live.Figure(math.NaN())
		}
	}
	return point
}

// measured is in milliseconds, not known if nothing was measured.
func measured(d time.Duration) live.Figure {
	if d <= 0 {
		return live.Figure(math.NaN())
	}
	return live.Figure(float64(d) / float64(time.Millisecond))
}

func salePoint(r fleet.Rates, known bool, available, held, sold int64) []live.Figure {
	units := []live.Figure{live.Figure(available), live.Figure(held), live.Figure(sold)}
	return append(ratePoint(r, r.PurchasesKnown), unlessKnown(units, known)...)
}

// newestPoints are the newest points: of the whole, and of the sales that sell.
func newestPoints(s *fleet.Snapshot) map[string][]live.Figure {
	points := map[string][]live.Figure{allScope: allPoint(s.Rates)}
	for _, sale := range s.Sales {
		if sale.State != reservation.StateEnded || sale.Rates.Offered > 0 {
			points[sale.ID.String()] = salePoint(sale.Rates, sale.UnitsKnown, sale.Available, sale.Held, sale.Sold)
		}
	}
	return points
}

// chart is one drawing: its series are columns of the points of its scope.
type chart struct {
	Name, Title, Unit, Scope string
	// Log has each line of the grid ten times the one below.
	Log    bool
	Series []series
	// Fit leaves the first line above the chart while all others would be flat below it.
	Fit bool
}

// series is one line: its column, and the key of its figure now.
type series struct {
	Key    string `json:"key"`
	Label  string `json:"label"`
	Column int    `json:"column"`
	Live   string `json:"-"`
}

// scopeCharts are the charts of the whole, or of a sale, and then the latencies and the backlog of the whole.
func scopeCharts(scope string) []chart {
	own := func(key, label string, column int) series { return series{key, label, column, scope + "." + key} }
	all := func(key, label string, column int) series { return series{key, label, column, allScope + "." + key} }
	rates := chart{Name: "rates", Title: "Purchases per second", Unit: "/s", Scope: scope, Series: []series{
		own("offered", "offered", 0), own("accepted", "accepted", 1), own("refused", "refused", 2), own("shed", "shed", 3),
		own("failed", "failed", 4),
	}}
	latencies := chart{
		Name: "latency", Title: "Time to the answer, and to Postgres", Unit: "ms", Scope: allScope, Log: true,
		Series: []series{
			all("answer_p50", "answer p50", 6), all("answer_p99", "answer p99", 7),
			all("durable_p50", "in Postgres p50", 8), all("durable_p99", "in Postgres p99", 9),
		},
	}
	backlog := chart{Name: "backlog", Title: "Accepted, and not in Postgres yet", Scope: allScope, Series: []series{
		all("backlog", "orders", 10),
	}}
	oldest := chart{Name: "oldest", Title: "Oldest order that waits", Unit: "s", Scope: allScope, Series: []series{
		all("oldest", "age", 11),
	}}
	if scope == allScope {
		durable := chart{Name: "durable", Title: "Orders recorded per second", Unit: "/s", Scope: scope, Series: []series{
			all("accepted", "accepted", 1), all("durable", "in Postgres", 5),
		}}
		return []chart{rates, latencies, durable, backlog}
	}
	for _, c := range []*chart{&latencies, &backlog, &oldest} {
		c.Title += " (all sales)"
	}
	units := chart{Name: "units", Title: "Units", Scope: scope, Fit: true, Series: []series{
		own("available", "available", 5), own("held", "held", 6), own("sold", "sold", 7),
	}}
	return []chart{rates, units, latencies, backlog, oldest}
}

// Spec is what the script needs of a chart.
func (c chart) Spec() (string, error) {
	text, err := json.Marshal(c.Series)
	return string(text), err
}

// minute is a row of the table that stands for the charts.
type minute struct {
	At    time.Time
	Rates fleet.Rates // means, the worst of latencies and backlogs
	Known bool
	// Available, Held and Sold are those of a sale at the end of the minute.
	Available, Held, Sold int64
}

// table is what stands for the charts.
type table struct {
	Scope string
	// Units is true for that of a sale.
	Units bool
	Rows  []minute
}

func newTable(points []fleet.Point, scope string) table {
	return table{scope, scope != allScope, minutes(points, scope)}
}

// minutes are the last minutes, the newest first.
func minutes(points []fleet.Point, scope string) []minute {
	sale, _ := uuid.Parse(scope)
	var rows []minute
	purchases, durable := 0.0, 0.0 // seconds in which they are known
	for _, p := range slices.Backward(points) {
		rates, units := p.Rates, fleet.SalePoint{}
		if scope != allScope {
			var known bool
			if units, known = p.Sales[sale]; !known {
				continue
			}
			rates = units.Rates
		}
		if start := p.At.Truncate(time.Minute); len(rows) == 0 || !rows[len(rows)-1].At.Equal(start) {
			rows, purchases, durable = append(rows, minute{
				At: start, Known: units.Known, Available: units.Available, Held: units.Held, Sold: units.Sold,
			}), 0, 0
		}
		row := &rows[len(rows)-1].Rates
		mean := func(sum *float64, n, seconds float64) { *sum += (n - *sum) / seconds }
		if rates.PurchasesKnown {
			row.PurchasesKnown = true
			purchases++
			mean(&row.Offered, rates.Offered, purchases)
			mean(&row.Accepted, rates.Accepted, purchases)
			mean(&row.Refused, rates.Refused, purchases)
			mean(&row.Shed, rates.Shed, purchases)
			mean(&row.Failed, rates.Failed, purchases)
		}
		if rates.DurableKnown {
			row.DurableKnown = true
			durable++
			mean(&row.Durable, rates.Durable, durable)
		}
		row.AnswerP99, row.DurableP99 = max(row.AnswerP99, rates.AnswerP99), max(row.DurableP99, rates.DurableP99)
		row.BacklogKnown = row.BacklogKnown || rates.BacklogKnown
		row.Backlog, row.OldestWaiting = max(row.Backlog, rates.Backlog), max(row.OldestWaiting, rates.OldestWaiting)
	}
	return rows
}

// Rate, Durable and Late format the figures of a row.
func (m minute) Rate(n float64) string { return rateText(n, m.Rates.PurchasesKnown) }

func (m minute) Durable() string           { return rateText(m.Rates.Durable, m.Rates.DurableKnown) }
func (minute) Late(d time.Duration) string { return latency(d) }
