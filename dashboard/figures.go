package dashboard

import (
	"errors"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/internal/format"
	"stampede/ledger/deadletter"
	"stampede/ledger/problems"
	"stampede/relay/target"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// unknown stands where a figure is not known, which is not zero.
const unknown = "–"

// place is where a process is, short: the address in its target.
func place(target string) string {
	if u, err := url.Parse(target); err == nil && u.Host != "" {
		return u.Host
	}
	return target
}

// short is the end of an id, in which ids of the same minute differ.
func short(id uuid.UUID) string { return "…" + id.String()[24:] }

// words says a slug, such as order-expired or refund_due, to people.
func words(slug any) string {
	return strings.NewReplacer("-", " ", "_", " ").Replace(fmt.Sprint(slug))
}

// count is a whole number for people.
func count[N int | int64](n N) string { return format.Count(n) }

// stocksText is the stock of each item: 100 × m, 50 × l.
func stocksText(items []reservation.Item) string {
	lines := make([]string, len(items))
	for i, item := range items {
		lines[i] = count(item.Stock) + " × " + item.Code
	}
	return strings.Join(lines, ", ")
}

// leftText is what is left of each item, first those of which nothing is: gone: s, m · 12 × l, 40 × xl.
func leftText(items []catalog.CountedItem) string {
	var gone, left []string
	for _, item := range items {
		if item.Available == 0 {
			gone = append(gone, item.Code)
		} else {
			left = append(left, count(item.Available)+" × "+item.Code)
		}
	}
	text := strings.Join(left, ", ")
	if gone == nil {
		return text
	}
	return strings.TrimSuffix("gone: "+strings.Join(gone, ", ")+" · "+text, " · ")
}

// perSecond is a rate: whole numbers, and a digit below ten.
func perSecond(n float64) string {
	switch {
	case math.IsNaN(n) || math.IsInf(n, 0):
		return unknown
	case n > 0 && n < 0.05:
		return "<0.1"
	case n < 9.95 && n != math.Trunc(n):
		return strconv.FormatFloat(n, 'f', 1, 64)
	}
	return count(int64(math.Round(n)))
}

// latency is a short time; 0 means that nothing was measured.
func latency(d time.Duration) string {
	ms := float64(d) / float64(time.Millisecond)
	switch {
	case d <= 0:
		return unknown
	case ms < 1:
		return strconv.FormatFloat(ms, 'f', 2, 64) + " ms"
	case ms < 10:
		return strconv.FormatFloat(ms, 'f', 1, 64) + " ms"
	case ms < 1000:
		return strconv.FormatFloat(ms, 'f', 0, 64) + " ms"
	case ms < 60_000:
		return strconv.FormatFloat(ms/1000, 'f', 1, 64) + " s"
	}
	return lasting(d)
}

// lasting is a time in its largest unit.
func lasting(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return count(int64(d/time.Second)) + " s"
	case d < time.Hour:
		return count(int64(d/time.Minute)) + " min"
	case d < 48*time.Hour:
		return count(int64(d/time.Hour)) + " h"
	}
	return count(int64(d/(24*time.Hour))) + " days"
}

// gap is the time between two steps of an order.
func gap(d time.Duration) string {
	if d < 0 {
		return "−" + gap(-d)
	}
	if d == 0 {
		return "0 ms"
	}
	return latency(d)
}

// clock is a countdown: 1:02:03, or 02:03.
func clock(d time.Duration) string {
	s := int64(max(d, 0).Round(time.Second) / time.Second)
	pad := func(n int64) string {
		if n < 10 {
			return "0" + strconv.FormatInt(n, 10)
		}
		return strconv.FormatInt(n, 10)
	}
	switch {
	case s >= 48*3600:
		return count(s/86400) + " days"
	case s >= 3600:
		return strconv.FormatInt(s/3600, 10) + ":" + pad(s/60%60) + ":" + pad(s%60)
	}
	return pad(s/60) + ":" + pad(s%60)
}

func bytesText(n float64) string {
	if n <= 0 {
		return unknown
	}
	return format.Bytes(n)
}

// percent is a share of a whole as SVG takes it.
func percent(part, whole int64) string {
	if whole <= 0 || part <= 0 {
		return "0%"
	}
	return strconv.FormatFloat(math.Min(100*float64(part)/float64(whole), 100), 'f', 2, 64) + "%"
}

// share is percent for people.
func share(part, whole int64) string {
	if whole <= 0 {
		return unknown
	}
	p := 100 * float64(part) / float64(whole)
	if p > 0 && p < 1 {
		return "<1 %"
	}
	return strconv.FormatFloat(p, 'f', 0, 64) + " %"
}

// clockTime returns what shows times in a layout: in UTC, until the script of a page shows them in the browser's zone.
func clockTime(layout, form string) func(time.Time) template.HTML {
	return func(t time.Time) template.HTML {
		if t.IsZero() {
			return unknown
		}
		utc := t.UTC()
		return template.HTML(`<time datetime="` + utc.Format(instant) + `" data-form="` + form + `">` + // of digits only
			utc.Format(layout) + ` UTC</time>`)
	}
}

// instant is a time for scripts and files, in UTC.
const instant = "2006-01-02T15:04:05.000Z"

// The forms of times, by the names that desk.js knows them by.
var (
	moment = clockTime(time.DateTime, "second")
	exact  = clockTime("2006-01-02 15:04:05.000", "exact")
	hourOf = clockTime("15:04", "minute")
)

// eventValue is a value of an event: a time is shown as one.
func eventValue(text string) template.HTML {
	if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
		return moment(t)
	}
	return template.HTML(template.HTMLEscapeString(text))
}

// A refusal is an answer of the dashboard itself to what an operator wants.
type refusal struct{ text, hint string }

func (r *refusal) Error() string { return r.text }

// explanations are for errors that only a dashboard meets. Those of sales and orders are in package problems.
var explanations = []struct {
	err        error
	status     int
	text, hint string
}{
	{target.ErrNotFound, http.StatusNotFound, "There is no such target.", "Look for it in the list."},
	{
		target.ErrPlace, http.StatusUnprocessableEntity, "There is no such place among the events.",
		"Nothing was done. Write start, now, a time such as 2026-11-23T20:00:00Z, or the id of an event.",
	},
	{deadletter.ErrNotFound, http.StatusNotFound, "There is no such dead letter.", "Look for it in the list."},
	{
		deadletter.ErrNotParked, http.StatusConflict, "This dead letter was replayed or discarded before.",
		"Look at it: it says by whom, and what became of it.",
	},
	{
		deadletter.ErrUnreadable, http.StatusConflict, "The stored fields of this dead letter are damaged.",
		"It cannot be replayed. Discard it, and run a dry run of reconcile.",
	},
	{
		audit.ErrRunning, http.StatusConflict,
		"Another process is reconciling.", "Wait for its end, and begin again with a dry run.",
	},
	{rebuild.ErrRunning, http.StatusConflict, "A rebuild is under way.", "Wait for its end, and try again."},
	{
		sql.ErrNotMigrated, http.StatusServiceUnavailable, "The database is of an older version.", "Run stampede migrate up.",
	},
	{
		sql.ErrSchemaAhead, http.StatusServiceUnavailable, "The database is of a newer version.", "Run a newer dashboard.",
	},
}

// explain says to an operator what is wrong and what to do, and which status that is. What cannot be explained stays in
// the log.
func explain(err error) (text, hint string, status int) {
	if own, ok := errors.AsType[*refusal](err); ok {
		return own.text, own.hint, http.StatusUnprocessableEntity
	}
	for _, e := range explanations {
		if errors.Is(err, e.err) {
			return e.text, e.hint, e.status
		}
	}
	if known, found := problems.ForOperators(err); found {
		if known.Kind == problems.Invalid {
			return known.Text, known.Hint, http.StatusUnprocessableEntity
		}
		return known.Text, known.Hint, known.Status
	}
	return "A server does not answer, or something unexpected happened.",
		"Look at the overview for what is wrong, and at the log of the dashboard for details.", http.StatusServiceUnavailable
}
