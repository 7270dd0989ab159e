package crowd

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"stampede/internal/figure"
)

// Latencies summarizes the latencies of one kind of answer, each counted from the buyer's due time.
type Latencies struct {
	Count               int64
	P50, P99, P999, Max time.Duration
}

// Report summarizes a crowd. Rates are per second, between the first and the last answer of their kind.
type Report struct {
	Buyers       int           `json:"buyers"`
	Over         time.Duration `json:"-"`             // the time over which they were due
	Took         time.Duration `json:"-"`             // until the last answer
	Quantity     int64         `json:"quantity"`      // units per order
	Clicks       int           `json:"clicks"`        // answered or abandoned
	SecondClicks int           `json:"second_clicks"` // of them

	Accepted      int       `json:"accepted"` // orders
	AcceptedRate  float64   `json:"accepted_per_second"`
	FirstAccepted time.Time `json:"-"`
	LastAccepted  time.Time `json:"-"`
	Replayed      int       `json:"replayed"` // answers with Idempotency-Replayed

	Rejected     int     `json:"rejected"` // refusals
	RejectedRate float64 `json:"rejected_per_second"`
	SoldOut      int     `json:"sold_out"` // of them
	Already      int     `json:"already_purchased"`
	NotOnSale    int     `json:"not_on_sale"`

	// Failures counts clicks without a valid final answer, and Retries repeated tries, both by problem.
	Failures map[string]int `json:"failures"`
	Retries  map[string]int `json:"retries"`

	Winners Latencies `json:"winners_ms"`
	Losers  Latencies `json:"losers_ms"`

	// Durable is nil if it was not measured.
	Durable *Durable `json:"-"`
}

// offeredRate is how many buyers a second were due.
func (r Report) offeredRate() float64 { return rate(r.Buyers, r.Over) }

// WriteText prints the report as text.
func (r Report) WriteText(w io.Writer) error {
	var text bytes.Buffer
	if err := r.writeTables(&text); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) { // a table pads its empty cells
		if _, err := fmt.Fprintln(w, strings.TrimRight(line, " \n")); err != nil {
			return err
		}
	}
	return nil
}

func (r Report) writeTables(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(format string, a ...any) { _, _ = fmt.Fprintf(t, format+"\n", a...) } // Flush returns the error
	line("crowd\t%s buyers\t%s/s offered\t%s double clicks, last answer after %.1f s",
		figure.Count(r.Buyers), figure.Count(int(r.offeredRate())), figure.Count(r.SecondClicks), r.Took.Seconds())
	line("accepted\t%s orders\t%s\t%s answers replayed", figure.Count(r.Accepted), perSecond(r.AcceptedRate),
		figure.Count(r.Replayed))
	line("rejected\t%s answers\t%s\t%s", figure.Count(r.Rejected), perSecond(r.RejectedRate), counts(map[string]int{
		"sold-out": r.SoldOut, "already-purchased": r.Already, "not on sale": r.NotOnSale,
	}))
	if r.Durable != nil {
		line("durable\t%s orders\t%s\t%s", figure.Count(r.Durable.Orders), perSecond(r.Durable.Rate), r.Durable.remark(r))
	}
	line("retried\t%s tries\t\t%s", figure.Count(total(r.Retries)), counts(r.Retries))
	line("failed\t%s clicks\t\t%s", figure.Count(total(r.Failures)), counts(r.Failures))
	if err := t.Flush(); err != nil {
		return err
	}
	if r.Winners.Count+r.Losers.Count == 0 {
		return nil
	}
	return r.writeLatencies(w)
}

func (r Report) writeLatencies(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(t, "\nlatency, ms\tp50\tp99\tp99.9\tmax\t")
	for _, row := range []struct {
		name string
		l    Latencies
	}{{"winners", r.Winners}, {"losers", r.Losers}} {
		if row.l.Count == 0 {
			continue
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t\n", row.name, ms(row.l.P50), ms(row.l.P99), ms(row.l.P999), ms(row.l.Max))
	}
	return t.Flush()
}

func ms(d time.Duration) string {
	return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', 2, 64)
}

func perSecond(n float64) string {
	if n == 0 {
		return "-"
	}
	return figure.Count(int(n+0.5)) + "/s"
}

// counts lists the nonzero counts, the largest first.
func counts(found map[string]int) string {
	names := slices.SortedFunc(maps.Keys(found), func(a, b string) int {
		if found[a] != found[b] {
			return found[b] - found[a]
		}
		return strings.Compare(a, b)
	})
	var parts []string
	for _, name := range names {
		if found[name] > 0 {
			parts = append(parts, name+" "+figure.Count(found[name]))
		}
	}
	return strings.Join(parts, ", ")
}
