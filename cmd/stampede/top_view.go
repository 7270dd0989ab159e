package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"

	"stampede/dashboard/fleet"
	"stampede/internal/format"
)

// topView draws a snapshot for a terminal. Lines are cut to width.
type topView struct {
	width  int
	height int // 0 for any number of lines
	color  bool
	live   bool
}

// styles are the attributes of a text.
type style string

const (
	plain  style = ""
	bold   style = "1"
	dim    style = "2"
	red    style = "1;31"
	yellow style = "33"
	green  style = "32"
)

// span is a text in one style. It has no control characters.
type span struct {
	style style
	text  string
}

type topLine []span

func (l *topLine) add(s style, format string, a ...any) {
	*l = append(*l, span{s, fmt.Sprintf(format, a...)})
}

// frame is the snapshot in the place of the one before.
func (v topView) frame(s *fleet.Snapshot) string {
	return goHome + strings.ReplaceAll(v.text(s), "\n", clearLine+"\r\n") + clearBelow
}

func (v topView) text(s *fleet.Snapshot) string {
	sections := [][]topLine{{v.head(s)}, v.troubles(s), v.rates(s), v.sales(s), v.processes(s)}
	lines := v.fit(sections)
	var text strings.Builder
	for i, line := range lines {
		v.write(&text, line)
		if !v.live || i < len(lines)-1 { // a last line feed would scroll the screen
			text.WriteByte('\n')
		}
	}
	if v.live {
		text.WriteString(clearLine)
	}
	return text.String()
}

// fit joins the sections, and leaves out the last lines of the longest ones if they are too many.
func (v topView) fit(sections [][]topLine) (lines []topLine) {
	total := 0
	for _, section := range sections {
		total += len(section)
	}
	cut := make([]int, len(sections))
	for v.height > 0 && total > v.height {
		longest := 0
		for i := range sections {
			if len(sections[i]) > len(sections[longest]) {
				longest = i
			}
		}
		kept := len(sections[longest]) - 1
		if kept < 2 {
			break // the screen is too low for anything
		}
		sections[longest] = sections[longest][:kept]
		cut[longest]++
		total--
	}
	for i, section := range sections {
		if cut[i] > 0 {
			section[len(section)-1] = topLine{{dim, fmt.Sprintf("  … %d more", cut[i]+1)}}
		}
		lines = append(lines, section...)
	}
	if v.height > 0 && len(lines) > v.height {
		lines = lines[:v.height]
	}
	return lines
}

// write writes a line, cut to the width.
func (v topView) write(to *strings.Builder, line topLine) {
	left := v.width
	for _, part := range line {
		text, used := cutTo(part.text, left)
		left -= used
		if text == "" {
			continue
		}
		if v.color && part.style != plain {
			fmt.Fprintf(to, "\x1b[%sm%s\x1b[0m", part.style, text)
		} else {
			to.WriteString(text)
		}
	}
}

func (v topView) head(s *fleet.Snapshot) topLine {
	var l topLine
	l.add(bold, "stampede")
	l.add(plain, " %s", s.At.Local().Format(time.TimeOnly))
	server := func(name string, found fleet.Server) {
		l.add(plain, "  %s ", name)
		if found.Reachable {
			l.add(green, "ok")
		} else {
			l.add(red, "GONE %s", ago(s.At, found.Since))
		}
	}
	server("Postgres", s.Postgres)
	server("Redis", s.Redis)
	if n := len(s.RedisNodes); n > 1 && s.Redis.Reachable {
		answer := 0
		for _, node := range s.RedisNodes {
			if node.Reachable {
				answer++
			}
		}
		l.add(okIf(answer == n), " (%d of %d)", answer, n)
	}
	up := 0
	for i := range s.Processes {
		if s.Processes[i].Up {
			up++
		}
	}
	l.add(plain, "  processes ")
	l.add(okIf(up == len(s.Processes)), "%d of %d", up, len(s.Processes))
	switch {
	case s.Audit == nil:
	case len(s.Audit.Broken) > 0:
		l.add(red, "  audit BROKEN")
	case len(s.Audit.Unchecked) > 0:
		l.add(yellow, "  audit %s ago, not %s", ago(s.At, s.Audit.At), strings.Join(s.Audit.Unchecked, ", "))
	default:
		l.add(plain, "  audit %s ago", ago(s.At, s.Audit.At))
	}
	return l
}

func (v topView) troubles(s *fleet.Snapshot) (lines []topLine) {
	lines = append(lines, nil)
	for _, r := range s.Rebuilds {
		var l topLine
		what := fmt.Sprintf("partition %d", r.Partition)
		if r.Sale != uuid.Nil {
			what = "sale " + r.Sale.String()
		}
		l.add(yellow, "REBUILD")
		l.add(plain, " %s (%s) for %s: %s, %d of %d sales", what, printable(r.Reason), ago(s.At, r.Since), printable(r.Step),
			r.SalesDone, r.SalesTotal)
		lines = append(lines, l)
	}
	trouble := func(t fleet.Trouble, before string) {
		how, word := yellow, "WARN"
		if t.Severity == fleet.Critical {
			how, word = red, "CRIT"
		}
		var l topLine
		l.add(how, "%s", word)
		l.add(dim, " %4s ", ago(s.At, t.Since))
		text := before + printable(t.Text)
		if runbook := "  runbook.md#" + t.Runbook; v.width >= textWidth(text)+textWidth(runbook)+10 {
			l.add(plain, "%s", text)
			l.add(dim, "%s", runbook)
		} else {
			l.add(plain, "%s", text)
		}
		lines = append(lines, l)
	}
	for _, t := range s.Troubles {
		trouble(t, "")
		for _, consequence := range t.Consequences {
			trouble(consequence, "└ ")
		}
	}
	pending := s.Pending
	if v.live { // they come by themselves
		pending = nil
	}
	if len(s.Troubles)+len(pending) == 0 {
		lines = append(lines, topLine{{green, "Nothing is wrong."}})
	}
	for _, p := range pending {
		var l topLine
		l.add(dim, "SEEN %4s ", ago(s.At, p.Since))
		l.add(plain, "%s", printable(p.Text))
		l.add(dim, "  %s if it lasts for %v", p.Severity, p.Due.Sub(p.Since))
		lines = append(lines, l)
	}
	return lines
}

func (v topView) rates(s *fleet.Snapshot) []topLine {
	r := &s.Rates
	var purchases, answers, orders topLine
	purchases.add(dim, "purchases/s ")
	if r.PurchasesKnown {
		purchases.add(plain, "%s: accepted %s, refused %s", rate(r.Offered), rate(r.Accepted), rate(r.Refused))
		purchases.add(plain, ", ")
		purchases.add(badIf(r.Shed > 0), "shed %s", rate(r.Shed))
		purchases.add(plain, ", ")
		purchases.add(badIf(r.Failed > 0), "failed %s", rate(r.Failed))
	} else {
		purchases.add(yellow, "unknown")
	}
	answers.add(dim, "answers     ")
	if r.AnswerP99 > 0 {
		answers.add(plain, "p50 %s, p99 %s", took(r.AnswerP50), took(r.AnswerP99))
	} else {
		answers.add(dim, "none measured")
	}
	orders.add(dim, "orders      ")
	if r.DurableKnown {
		orders.add(plain, "%s/s recorded", rate(r.Durable))
	} else {
		orders.add(yellow, "recorded unknown")
	}
	if r.DurableP99 > 0 {
		orders.add(plain, " (p50 %s p99 %s after accepted)", took(r.DurableP50), took(r.DurableP99))
	}
	if r.BacklogKnown {
		orders.add(plain, ", backlog %s", format.Count(r.Backlog))
		if r.Backlog > 0 {
			orders.add(plain, ", oldest %s", took(r.OldestWaiting))
		}
	} else {
		orders.add(yellow, ", backlog unknown")
	}
	if s.Postgres.Reachable {
		orders.add(plain, ", dead letters ")
		orders.add(badIf(s.DeadLetters > 0), "%s", format.Count(s.DeadLetters))
	}
	return []topLine{nil, purchases, answers, orders, paymentsLine(s)}
}

// paymentsLine is the line of what is paid.
func paymentsLine(s *fleet.Snapshot) (l topLine) {
	l.add(dim, "payments/s  ")
	if p := s.Payments; p.Known {
		l.add(plain, "reported %s, settled %s, ", rate(p.Reported), rate(p.Settled))
		l.add(badIf(p.Refused > 0), "refused %s", rate(p.Refused))
		l.add(plain, ", refunds due %s", rate(p.Due))
	} else {
		l.add(yellow, "unknown")
	}
	if u := s.Unpaid; u != nil {
		l.add(plain, "; unpaid: %s end in 1 min, %s in 5", format.Count(u.InMinute), format.Count(u.InFive))
		if u.LastTurn.After(s.At) {
			l.add(plain, ", last turn in %s", ago(u.LastTurn, s.At))
		}
	}
	return l
}

func (v topView) sales(s *fleet.Snapshot) []topLine {
	const figures = "%9s %9s %9s %7s %7s"
	wide := max(24, v.width-49) // what is left of the line
	bar := min(24, wide/3)
	name := wide - bar - 15
	lines := []topLine{nil, {{dim, fmt.Sprintf("%-*s  %-14s %-*s "+figures,
		name, "SALE", "STATE", bar, "", "AVAILABLE", "HELD", "SOLD", "OFFER/S", "TAKEN/S")}}}
	if !s.SalesRead {
		lines = append(lines, topLine{{yellow, "  as of " + s.SalesAt.Local().Format(time.TimeOnly)}})
	}
	for i := range s.Sales {
		sale := &s.Sales[i]
		var l topLine
		state, how := sale.Status(), plain
		switch {
		case sale.Shut != "":
			how = red
		case sale.DrawState != "":
			state = "draw: " + string(sale.DrawState)
		case sale.OffersOnly:
			state = "offers only"
		}
		l.add(plain, "%s  ", padded(printable(sale.Name), name))
		l.add(how, "%-14s ", state)
		units := []any{"?", "?", "?"}
		if sale.UnitsKnown {
			for at, n := range []int64{sale.Available, sale.Held, sale.Sold} {
				units[at] = format.Count(n)
			}
			l = append(l, stockBar(sale, bar)...)
		} else {
			l.add(dim, "%-*s", bar, strings.Repeat("?", bar))
		}
		rates := []any{"-", "-"}
		if sale.RatesKnown {
			rates = []any{rate(sale.Rates.Offered), rate(sale.Rates.Accepted)}
		}
		l.add(plain, " "+figures, slices.Concat(units, rates)...)
		lines = append(lines, l)
	}
	if len(s.Sales) == 0 {
		lines = append(lines, topLine{{dim, "  none"}})
	}
	return lines
}

// stockBar draws the stock: sold, held and available units. What is not zero has at least one place.
func stockBar(sale *fleet.Sale, width int) []span {
	parts := []int64{sale.Sold, sale.Held, sale.Available}
	cells := make([]int, len(parts))
	used := 0
	for i, n := range parts[:2] {
		if sale.Stock > 0 {
			cells[i] = int(math.Round(float64(n) / float64(sale.Stock) * float64(width)))
		}
		if n > 0 {
			cells[i] = max(1, cells[i])
		}
		cells[i] = min(cells[i], width-used)
		used += cells[i]
	}
	if sale.Available > 0 && used == width && width > 1 {
		cells[slices.Index(cells, max(cells[0], cells[1]))]--
		used--
	}
	return []span{
		{green, strings.Repeat("█", cells[0])},
		{yellow, strings.Repeat("▒", cells[1])},
		{dim, strings.Repeat("·", width-used)},
	}
}

func (v topView) processes(s *fleet.Snapshot) []topLine {
	const figures = "%-16s %5s %7s %6s %7s"
	name := max(10, v.width-48)
	lines := []topLine{nil, {{
		dim, fmt.Sprintf("%-*s  "+figures, name, "PROCESS", "KIND", "CPU", "MEMORY", "CONNS", "/S"),
	}}}
	for i := range s.Processes {
		p := &s.Processes[i]
		var l topLine
		target := strings.TrimSuffix(strings.TrimPrefix(printable(p.Target), "http://"), "/metrics")
		l.add(plain, "%s  ", padded(target, name))
		if !p.Up {
			l.add(red, "%s gone %s", p.Kind, ago(s.At, p.Since))
			if p.Error != "" {
				l.add(plain, ": %s", printable(p.Error))
			}
			lines = append(lines, l)
			continue
		}
		cpu, perSecond := "-", "-"
		if p.RatesKnown {
			cpu, perSecond = fmt.Sprintf("%.2f", p.CPU), rate(p.PerSecond)
		}
		kind := p.Kind
		if len(kind) > 16 {
			kind = strings.ReplaceAll(kind, ", ", ",")[:16]
		}
		l.add(plain, figures,
			kind, cpu, format.Bytes(p.MemoryBytes), rate(p.Connections), perSecond)
		lines = append(lines, l)
		if p.NotReady != "" {
			lines = append(lines, topLine{{red, "  └ not ready: " + printable(p.NotReady)}})
		}
		if p.Idle != "" {
			lines = append(lines, topLine{{dim, "  └ reads nothing: " + printable(p.Idle)}})
		}
		if len(p.Failing) > 0 {
			lines = append(lines, topLine{{red, "  └ fails: " + strings.Join(p.Failing, ", ")}})
		}
	}
	if len(s.Processes) == 0 {
		lines = append(lines, topLine{{dim, "  none: name their metrics with --scrape"}})
	}
	return lines
}

func okIf(ok bool) style {
	if ok {
		return green
	}
	return red
}

func badIf(bad bool) style {
	if bad {
		return red
	}
	return plain
}

// rate formats a figure in at most seven places.
func rate(perSecond float64) string {
	switch {
	case perSecond >= 999_500:
		return fmt.Sprintf("%.1fM", perSecond/1e6)
	case perSecond > 0 && perSecond < 9.95:
		return fmt.Sprintf("%.1f", perSecond)
	}
	return format.Count(int64(math.Round(perSecond)))
}

func took(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d >= time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d >= 10*time.Millisecond:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
}

// ago says how long ago a time is, in at most four places.
func ago(now, then time.Time) string {
	d := max(0, now.Sub(then))
	switch {
	case d < 100*time.Second:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 100*time.Minute:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 72*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// textWidth is how many places a text takes.
func textWidth(text string) (places int) {
	for _, r := range text {
		places += runeWidth(r)
	}
	return places
}

// cutTo cuts a text to so many places, and returns how many it takes.
func cutTo(text string, most int) (string, int) {
	places := 0
	for at, r := range text {
		w := runeWidth(r)
		if places+w > most {
			return text[:at], places
		}
		places += w
	}
	return text, places
}

// padded cuts a text to so many places, or fills it up.
func padded(text string, places int) string {
	if textWidth(text) > places && places > 1 {
		text, _ = cutTo(text, places-1)
		text += "…"
	}
	text, used := cutTo(text, places)
	return text + strings.Repeat(" ", max(0, places-used))
}

// runeWidth is 2 for characters of East Asia and emoji, which take two places, and 0 for marks, which take none.
func runeWidth(r rune) int {
	switch {
	case unicode.In(r, unicode.Mn, unicode.Me):
		return 0
	case r >= 0x1100 && r <= 0x115f, r >= 0x2e80 && r <= 0xa4cf, r >= 0xac00 && r <= 0xd7a3, r >= 0xf900 && r <= 0xfaff,
		r >= 0xfe30 && r <= 0xfe6f, r >= 0xff00 && r <= 0xff60, r >= 0xffe0 && r <= 0xffe6, r >= 0x1f300 && r <= 0x1faff,
		r >= 0x20000 && r <= 0x3fffd:
		return 2
	}
	return 1
}
