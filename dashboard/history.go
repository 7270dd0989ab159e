package dashboard

import (
	"encoding/json"
	"io"
	"net/http"
	"time"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/dashboard/session"

	"github.com/google/uuid"
)

// history answers with all points of a chart that are in memory; what follows comes by the stream.
func (d *Dashboard) history(w http.ResponseWriter, r *http.Request, _ *session.Session) {
	scope, sale, ok := scopeOf(w, r)
	if !ok {
		return
	}
	answer := struct {
		At     []int64         `json:"at"`
		Points [][]live.Figure `json:"points"`
	}{At: []int64{}, Points: [][]live.Figure{}}
	for _, p := range d.Fleet.History() {
		point := allPoint(p.Rates)
		if scope != allScope {
			of, known := p.Sales[sale]
			if !known {
				continue
			}
			point = salePoint(of.Rates, of.Known, of.Available, of.Held, of.Sold)
		}
		answer.At, answer.Points = append(answer.At, p.At.UnixMilli()), append(answer.Points, point)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer) // an error is that of the browser
}

// scopeOf reads whose figures are wanted: of all, or of a sale.
func scopeOf(w http.ResponseWriter, r *http.Request) (scope string, sale uuid.UUID, ok bool) {
	scope = r.URL.Query().Get("of")
	sale, err := uuid.Parse(scope)
	if err != nil && scope != allScope {
		writeText(w, http.StatusBadRequest, "of is all, or the id of a sale")
		return "", uuid.Nil, false
	}
	return scope, sale, true
}

// minutes answers with the rows of the table beside the charts, which an open table asks for every few seconds.
func (d *Dashboard) minutes(w http.ResponseWriter, r *http.Request, _ *session.Session) {
	scope, _, ok := scopeOf(w, r)
	if !ok {
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = io.WriteString(w, d.fragment("minuterows", d.Fleet.Snapshot(), tableOf(d.Fleet.History(), scope)))
}

// chart is one drawing: its series are columns of the points of its scope.
type chart struct {
	Name, Title, Unit, Scope string
	// Log has each line of the grid ten times the one below.
	Log    bool
	Series []series
}

// series is one line: its column, and the key of its figure now.
type series struct {
	Key    string `json:"key"`
	Label  string `json:"label"`
	Column int    `json:"column"`
	Live   string `json:"-"`
}

// chartsOf are the charts of the whole, or of a sale with the latencies and the backlog of the whole.
func chartsOf(scope string) []chart {
	of := func(key, label string, column int) series { return series{key, label, column, scope + "." + key} }
	all := func(key, label string, column int) series { return series{key, label, column, allScope + "." + key} }
	rates := chart{"rates", "Purchases per second", "/s", scope, false, []series{
		of("offered", "offered", 0), of("accepted", "accepted", 1), of("refused", "refused", 2), of("shed", "shed", 3),
		of("failed", "failed", 4),
	}}
	latencies := chart{"latency", "Time to the answer, and to Postgres", "ms", allScope, true, []series{
		all("answer_p50", "answer p50", 6), all("answer_p99", "answer p99", 7),
		all("durable_p50", "in Postgres p50", 8), all("durable_p99", "in Postgres p99", 9),
	}}
	backlog := chart{"backlog", "Accepted, and not in Postgres yet", "", allScope, false, []series{
		all("backlog", "orders", 10),
	}}
	oldest := chart{"oldest", "Oldest order that waits", "s", allScope, false, []series{all("oldest", "age", 11)}}
	if scope == allScope {
		durable := chart{"durable", "Orders recorded per second", "/s", scope, false, []series{
			all("accepted", "accepted", 1), all("durable", "in Postgres", 5),
		}}
		return []chart{rates, latencies, durable, backlog}
	}
	units := chart{"units", "Units", "", scope, false, []series{
		of("available", "available", 5), of("held", "held", 6), of("sold", "sold", 7),
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

func tableOf(points []fleet.Point, scope string) table {
	return table{scope, scope != allScope, minutesOf(points, scope)}
}

// minutesOf are the last minutes, the newest first.
func minutesOf(points []fleet.Point, scope string) []minute {
	sale, _ := uuid.Parse(scope)
	var rows []minute
	seconds := 0.0
	for i := len(points) - 1; i >= 0; i-- {
		p := points[i]
		rates, of := p.Rates, fleet.SalePoint{}
		if scope != allScope {
			var known bool
			if of, known = p.Sales[sale]; !known {
				continue
			}
			rates = of.Rates
		}
		if start := p.At.Truncate(time.Minute); len(rows) == 0 || !rows[len(rows)-1].At.Equal(start) {
			rows, seconds = append(rows, minute{
				At: start, Known: of.Known, Available: of.Available, Held: of.Held, Sold: of.Sold,
			}), 0
		}
		row := &rows[len(rows)-1].Rates
		seconds++
		mean := func(sum *float64, n float64) { *sum += (n - *sum) / seconds }
		mean(&row.Offered, rates.Offered)
		mean(&row.Accepted, rates.Accepted)
		mean(&row.Refused, rates.Refused)
		mean(&row.Shed, rates.Shed)
		mean(&row.Failed, rates.Failed)
		mean(&row.Durable, rates.Durable)
		row.AnswerP99, row.DurableP99 = max(row.AnswerP99, rates.AnswerP99), max(row.DurableP99, rates.DurableP99)
		row.BacklogKnown = row.BacklogKnown || rates.BacklogKnown
		row.Backlog, row.OldestWaiting = max(row.Backlog, rates.Backlog), max(row.OldestWaiting, rates.OldestWaiting)
	}
	return rows
}

// Rate and Late format the figures of a row.
func (minute) Rate(n float64) string       { return perSecond(n) }
func (minute) Late(d time.Duration) string { return latency(d) }
