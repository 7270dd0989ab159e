package loadgen

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"stampede/internal/format"
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
	Began        time.Time     `json:"-"`             // when the first buyer was due
	Took         time.Duration `json:"-"`             // from then until the last answer
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
	// Late is how long after buyers were due they were sent, which the latencies include, and CPUMost the share of its
	// cores that this process used in its busiest second.
	Late    Latencies `json:"late_ms"`
	CPUMost float64   `json:"load_cpu_most"`

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
		format.Count(r.Buyers), format.Count(int(r.offeredRate())), format.Count(r.SecondClicks), r.Took.Seconds())
	line("accepted\t%s orders\t%s\t%s answers replayed", format.Count(r.Accepted), perSecond(r.AcceptedRate),
		format.Count(r.Replayed))
	line("rejected\t%s answers\t%s\t%s", format.Count(r.Rejected), perSecond(r.RejectedRate), counts(map[string]int{
		"sold-out": r.SoldOut, "already-purchased": r.Already, "not on sale": r.NotOnSale,
	}))
	if r.Durable != nil {
		line("durable\t%s orders\t%s\t%s", format.Count(r.Durable.Orders), perSecond(r.Durable.Rate), r.Durable.remark(r))
	}
	line("retried\t%s tries\t\t%s", format.Count(total(r.Retries)), counts(r.Retries))
	line("failed\t%s clicks\t\t%s", format.Count(total(r.Failures)), counts(r.Failures))
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
	}{{"winners", r.Winners}, {"losers", r.Losers}, {"sent late", r.Late}} {
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
	return format.Count(int(n+0.5)) + "/s"
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
			parts = append(parts, name+" "+format.Count(found[name]))
		}
	}
	return strings.Join(parts, ", ")
}

// MarshalJSON returns the latencies in milliseconds.
func (l Latencies) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Count int64   `json:"count"`
		P50   float64 `json:"p50"`
		P99   float64 `json:"p99"`
		P999  float64 `json:"p999"`
		Max   float64 `json:"max"`
	}{l.Count, millis(l.P50), millis(l.P99), millis(l.P999), millis(l.Max)})
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

type durableView struct {
	Orders int     `json:"orders"`
	Rate   float64 `json:"per_second"`
	// LagMS is how long after the last acceptance the last order was durable.
	LagMS int64 `json:"lag_ms"`
}

// MarshalJSON returns the report as one object: rates per second, times in seconds, latencies in milliseconds.
func (r Report) MarshalJSON() ([]byte, error) {
	var durable *durableView
	if r.Durable != nil {
		lag := max(0, r.Durable.LastAt.Sub(r.LastAccepted).Milliseconds())
		if r.Accepted == 0 || r.Durable.Orders == 0 {
			lag = 0
		}
		durable = &durableView{r.Durable.Orders, r.Durable.Rate, lag}
	}
	if r.Failures == nil {
		r.Failures = map[string]int{}
	}
	if r.Retries == nil {
		r.Retries = map[string]int{}
	}
	type fields Report // without this method
	return json.Marshal(struct {
		fields
		OfferedRate float64      `json:"offered_per_second"`
		Seconds     float64      `json:"seconds"`
		Durable     *durableView `json:"durable,omitempty"`
	}{fields(r), r.offeredRate(), r.Took.Seconds(), durable})
}

// String returns the progress in one line, without the time.
func (p Progress) String() string {
	line := fmt.Sprintf("%s of %s buyers due  accepted %s  rejected %s",
		format.Count(p.Due), format.Count(p.Buyers), format.Count(p.Accepted), format.Count(p.Rejected))
	if p.Retries > 0 {
		line += "  retried " + format.Count(p.Retries)
	}
	if p.Failed > 0 {
		line += "  failed " + format.Count(p.Failed)
	}
	return line
}

// Done is closed when Run has returned.
func (c *Crowd) Done() <-chan struct{} { return c.done }

// ShowProgress prints the progress once a second while the crowd runs: on a terminal in one line that is
// overwritten, elsewhere one line each. It returns when Run does, or when ctx ends.
func (c *Crowd) ShowProgress(ctx context.Context, w io.Writer, terminal bool) {
	const eraseLine = "\r\x1b[K"
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-c.done:
			if terminal {
				_, _ = io.WriteString(w, eraseLine)
			}
			return
		case <-ctx.Done():
			return
		}
		p := c.Progress()
		line := fmt.Sprintf("%5.1f s  %s", p.Elapsed.Seconds(), p)
		if terminal {
			_, _ = io.WriteString(w, eraseLine+line)
		} else {
			_, _ = io.WriteString(w, line+"\n")
		}
	}
}

// Want is what a report must not exceed.
type Want struct {
	Name string
	// Limit is a time.Duration in nanoseconds, or a share of the clicks for "failed".
	Limit float64
}

// UnmarshalText reads a want such as p99=250ms, durable=10s or failed=0.1%.
func (w *Want) UnmarshalText(text []byte) (err error) {
	*w, err = parseWant(string(text))
	return err
}

func parseWant(text string) (Want, error) {
	name, value, _ := strings.Cut(text, "=")
	switch {
	case name == WantFailed:
		percent, isPercent := strings.CutSuffix(value, "%")
		share, err := strconv.ParseFloat(percent, 64)
		if isPercent {
			share /= 100
		}
		if err != nil || !(share >= 0 && share < 1) {
			return Want{}, fmt.Errorf("%q: want a share of the clicks, such as failed=0 or failed=0.1%%", text)
		}
		return Want{name, share}, nil
	case !slices.ContainsFunc(wantedTimes, func(w wantedTime) bool { return w.name == name }):
		return Want{}, fmt.Errorf("%q: want one of %s", text, strings.Join(wantNames(), ", "))
	}
	limit, err := time.ParseDuration(value)
	if err != nil || limit <= 0 {
		return Want{}, fmt.Errorf("%q: want a time above zero, such as %s=250ms", text, name)
	}
	return Want{name, float64(limit)}, nil
}

// Judgement is a want, and what was measured.
type Judgement struct {
	Want     string `json:"want"`
	Measured bool   `json:"measured"`
	Met      bool   `json:"met"`
	// Text is a sentence for people, such as "p99 of accepted orders 41 ms, wanted 250 ms".
	Text string `json:"text"`
}

// Judge compares the report with the wants.
func (r Report) Judge(wants []Want) (all []Judgement) {
	for _, w := range wants {
		all = append(all, w.judge(r))
	}
	return all
}

func (w Want) judge(r Report) Judgement {
	if w.Name == WantFailed {
		share := float64(total(r.Failures)) / float64(max(r.Clicks, 1))
		return Judgement{w.Name, r.Clicks > 0, share <= w.Limit, fmt.Sprintf("%s of %s clicks failed, wanted at most %s%%",
			format.Count(total(r.Failures)), format.Count(r.Clicks), strconv.FormatFloat(100*w.Limit, 'f', -1, 64))}
	}
	wanted := wantedTimes[slices.IndexFunc(wantedTimes, func(t wantedTime) bool { return t.name == w.Name })]
	limit := time.Duration(w.Limit)
	took, measured := wanted.of(r)
	if !measured {
		return Judgement{w.Name, false, false, fmt.Sprintf("%s not measured, wanted %v", wanted.what, limit)}
	}
	text := fmt.Sprintf("%s %v, wanted %v", wanted.what, took.Round(time.Millisecond), limit)
	if took > limit && r.CPUMost >= tooBusy {
		text += fmt.Sprintf("; the load itself used %.0f %% of its cores: send it from more or larger machines", 100*r.CPUMost)
		return Judgement{w.Name, false, false, text}
	}
	return Judgement{w.Name, true, took <= limit, text}
}

// tooBusy is the share of its cores from which on the load may itself be what makes buyers wait.
const tooBusy = 0.9

// WantFailed is the want of the share of clicks without a valid answer.
const WantFailed = "failed"

type wantedTime struct {
	name, what string
	// of returns the time of a report; ok is false if it has none.
	of func(Report) (took time.Duration, ok bool)
}

// wantedTimes are the times that may be wanted.
var wantedTimes = slices.Concat(
	wantedLatencies("", "accepted orders", func(r Report) Latencies { return r.Winners }),
	wantedLatencies("refused-", "refusals", func(r Report) Latencies { return r.Losers }),
	[]wantedTime{{"durable", "from the first click until the last order was in Postgres", Report.durableAfter}},
)

func wantedLatencies(prefix, of string, in func(Report) Latencies) (all []wantedTime) {
	for name, figure := range map[string]func(Latencies) time.Duration{
		"p50": func(l Latencies) time.Duration { return l.P50 },
		"p99": func(l Latencies) time.Duration { return l.P99 },
		"max": func(l Latencies) time.Duration { return l.Max },
	} {
		all = append(all, wantedTime{prefix + name, name + " of " + of, func(r Report) (time.Duration, bool) {
			return figure(in(r)), in(r).Count > 0
		}})
	}
	return all
}

func wantNames() []string {
	names := []string{WantFailed}
	for _, w := range wantedTimes {
		names = append(names, w.name)
	}
	slices.Sort(names)
	return names
}
