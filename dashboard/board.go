package dashboard

import (
	"bytes"
	"fmt"
	"html/template"
	"strconv"
	"strings"
	"sync"
	"time"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/internal/format"
	"stampede/reservation"
)

// fragments are the parts of pages whose rows come and go.
var fragments = []string{"wrong", "troubles", "rebuilds", "sales", "processes", "servers"}

// boards renders snapshots, each once, however many ask for it.
type boards struct {
	parts *template.Template
	// checks changes when the page of checks has something new to show.
	checks  func() string
	journal *journal

	mu     sync.Mutex
	newest *live.Board
	// seenChanges is the version of what was acknowledged in the newest.
	seenChanges int
}

func (d *boards) render(s *fleet.Snapshot) *live.Board {
	d.mu.Lock()
	defer d.mu.Unlock()
	seen, changes := d.journal.seenTroubles()
	if b := d.newest; b != nil && b.Number == s.Number && s.Number > 0 && d.seenChanges == changes {
		return b
	}
	d.seenChanges = changes
	b := &live.Board{
		Number: s.Number, At: s.At, Values: boardValues(s), Points: newestPoints(s), Fragments: make(map[string]string),
	}
	b.Values["check.state"], b.Values["marks"] = d.checks(), strconv.Itoa(d.journal.version())
	for _, name := range fragments {
		b.Fragments[name] = fragmentOf(d.parts, name, &shown{s, seen}, nil)
	}
	for _, sale := range s.Sales {
		b.Fragments["state."+sale.ID.String()] = fragment(d.parts, "state", s, sale)
	}
	d.newest = b
	return b
}

// fragment renders a part without its figures, which are values of their own: it changes when its rows do.
func fragment(parts *template.Template, name string, s *fleet.Snapshot, body any) string {
	return fragmentOf(parts, name, &shown{Snapshot: s}, body)
}

func fragmentOf(parts *template.Template, name string, s *shown, body any) string {
	var b bytes.Buffer
	if err := parts.ExecuteTemplate(&b, name, view{Snapshot: s, Body: body}); err != nil {
		panic(err) // a template is wrong, which the tests of all pages show
	}
	return b.String()
}

// boardValues are all figures of a snapshot, by the names that templates use.
func boardValues(s *fleet.Snapshot) map[string]string {
	v := map[string]string{
		"at":           s.At.UTC().Format(instant),
		"troubles":     count(len(s.Troubles)),
		"dead_letters": count(s.DeadLetters),
		"say":          saying(s),
	}
	r := s.Rates
	rateValues(v, "all", r, r.PurchasesKnown)
	moneyValues(v, s)
	v["all.durable"] = rateText(r.Durable, r.DurableKnown)
	v["all.answer_p50"], v["all.answer_p99"] = latency(r.AnswerP50), latency(r.AnswerP99)
	v["all.durable_p50"], v["all.durable_p99"] = latency(r.DurableP50), latency(r.DurableP99)
	v["all.backlog"], v["all.oldest"] = unknown, unknown
	if r.BacklogKnown {
		v["all.backlog"], v["all.oldest"] = count(r.Backlog), "0 s"
		if r.Backlog > 0 {
			v["all.oldest"] = latency(r.OldestWaiting)
		}
	}
	for _, sale := range s.Sales {
		saleValues(v, sale, s.At)
	}
	for i, p := range s.Processes {
		processValues(v, "process."+strconv.Itoa(i)+".", p, s.At)
	}
	for i, t := range s.Troubles {
		v["trouble."+strconv.Itoa(i)+".since"] = lasting(s.At.Sub(t.Since))
	}
	for i, r := range s.Rebuilds {
		key := "rebuild." + strconv.Itoa(i) + "."
		v[key+"since"] = lasting(s.At.Sub(r.Since))
		v[key+"done"], v[key+"total"] = count(r.SalesDone), unknown
		if r.SalesTotal > 0 {
			v[key+"total"] = count(r.SalesTotal)
		}
		v[key+"width"] = percent(int64(r.SalesDone), int64(r.SalesTotal))
	}
	for i, n := range s.RedisNodes {
		v["redis."+strconv.Itoa(i)+".memory"] = memoryText(n)
	}
	v["postgres.since"], v["redis.since"] = lasting(s.At.Sub(s.Postgres.Since)), lasting(s.At.Sub(s.Redis.Since))
	if s.Audit != nil {
		v["audit.since"] = lasting(s.At.Sub(s.Audit.At))
	}
	return v
}

func rateValues(v map[string]string, scope string, r fleet.Rates, known bool) {
	for name, n := range map[string]float64{
		"offered": r.Offered, "accepted": r.Accepted, "refused": r.Refused, "shed": r.Shed, "failed": r.Failed,
	} {
		v[scope+"."+name] = rateText(n, known)
	}
}

func rateText(n float64, known bool) string {
	if !known {
		return unknown
	}
	return perSecond(n)
}

// moneyValues are the payments of all sales.
func moneyValues(v map[string]string, s *fleet.Snapshot) {
	for name, n := range map[string]float64{
		"reported": s.Payments.Reported, "settled": s.Payments.Settled, "due": s.Payments.Due,
		"unreported": s.Payments.Refused,
	} {
		v["all."+name] = rateText(n, s.Payments.Known)
	}
	unpaidValues(v, "all", s.Unpaid, s.At)
}

// unpaidValues are the orders that wait for money.
func unpaidValues(v map[string]string, scope string, u *fleet.Unpaid, now time.Time) {
	v[scope+".minute"], v[scope+".five"], v[scope+".turn"] = unknown, unknown, unknown
	if u == nil {
		return
	}
	v[scope+".minute"], v[scope+".five"], v[scope+".turn"] = count(u.InMinute), count(u.InFive), "none waits"
	if u.LastTurn.After(now) {
		v[scope+".turn"] = "in " + lasting(u.LastTurn.Sub(now))
	}
}

func saleValues(v map[string]string, s fleet.Sale, now time.Time) {
	key := s.ID.String()
	rateValues(v, key, s.Rates, s.RatesKnown)
	v[key+".state"] = string(s.State)
	v[key+".stock"] = count(s.Stock)
	v[key+".countdown"] = countdown(s, now)
	for name, n := range map[string]int64{"available": s.Available, "held": s.Held, "sold": s.Sold} {
		v[key+"."+name], v[key+"."+name+".share"], v[key+"."+name+".width"] = unknown, unknown, "0%"
		if s.UnitsKnown {
			v[key+"."+name], v[key+"."+name+".share"] = count(n), share(n, s.Stock)
			v[key+"."+name+".width"] = percent(n, s.Stock)
		}
	}
	unpaidValues(v, key, s.Unpaid, now)
	v[key+".settled"], v[key+".due"] = unknown, unknown
	if s.Unpaid != nil {
		v[key+".settled"], v[key+".due"] = perSecond(s.Unpaid.Settled), perSecond(s.Unpaid.Due)
	}
	v[key+".held.x"] = "0%"
	if s.UnitsKnown {
		v[key+".held.x"] = percent(s.Sold, s.Stock)
	}
	if len(s.Items) > 0 {
		v[key+".items"] = unknown
		if s.UnitsKnown {
			v[key+".items"] = leftText(s.Items)
		}
	}
	for i, item := range s.Items {
		at := key + ".item." + strconv.Itoa(i)
		v[at+".stock"], v[at+".available"], v[at+".taken.width"] = count(item.Stock), unknown, "0%"
		if s.UnitsKnown {
			v[at+".available"], v[at+".taken.width"] = count(item.Available), percent(item.Stock-item.Available, item.Stock)
		}
	}
	f := s.Funnel
	for name, n := range map[string]int64{
		"accepted": f.Accepted, "confirmed": f.Confirmed, "paid": f.Paid, "cancelled": f.Cancelled,
		"expired": f.Expired, "rejected": f.Rejected, "voided": f.Voided,
	} {
		at := key + ".orders." + name
		v[at], v[at+".share"], v[at+".width"] = unknown, unknown, "0%"
		if s.FunnelKnown {
			v[at], v[at+".share"], v[at+".width"] = count(n), share(n, f.Accepted), percent(n, f.Accepted)
		}
	}
}

// memoryText is the memory that a server of Redis uses.
func memoryText(n fleet.RedisNode) string {
	if n.MaxBytes == 0 {
		return bytesText(float64(n.UsedBytes)) + ", without a limit"
	}
	return bytesText(float64(n.UsedBytes)) + " of " + bytesText(float64(n.MaxBytes))
}

// countdown says what comes next for a sale, and when.
func countdown(s fleet.Sale, now time.Time) string {
	switch {
	case s.State == reservation.StateEnded && !s.ClosesAt.IsZero() && s.ClosesAt.Before(now):
		return "closed " + lasting(now.Sub(s.ClosesAt)) + " ago"
	case s.State == reservation.StateEnded:
		return "ended"
	case s.State == reservation.StateScheduled || s.OpensAt.After(now):
		return "opens in " + clock(s.OpensAt.Sub(now))
	case !s.ClosesAt.IsZero():
		return "closes in " + clock(s.ClosesAt.Sub(now))
	}
	return "open until it is ended"
}

func processValues(v map[string]string, key string, p fleet.Process, now time.Time) {
	v[key+"since"] = lasting(now.Sub(p.Since))
	for _, name := range []string{"cpu", "memory", "connections", "in_flight", "per_second"} {
		v[key+name] = unknown // the last figures of a process that is gone say nothing of now
	}
	if !p.Up {
		return
	}
	v[key+"memory"] = bytesText(p.MemoryBytes)
	v[key+"connections"] = count(int64(p.Connections))
	v[key+"in_flight"] = count(int64(p.InFlight))
	if p.RatesKnown {
		v[key+"cpu"] = strconv.FormatFloat(100*p.CPU, 'f', 0, 64) + " %"
		v[key+"per_second"] = perSecond(p.PerSecond)
	}
}

// saying is what a screen reader says after a change: what is wrong, and the stock of open sales.
func saying(s *fleet.Snapshot) string {
	var b strings.Builder
	switch n := len(s.Troubles); n {
	case 0:
		b.WriteString("Nothing is wrong.")
	default:
		fmt.Fprintf(&b, "%d things are wrong: ", n)
		if n == 1 {
			b.Reset()
			b.WriteString("One thing is wrong: ")
		}
		for i, t := range s.Troubles {
			if i > 0 {
				b.WriteString("; ")
			}
			b.WriteString(t.Text)
		}
		b.WriteString(".")
	}
	for _, sale := range s.Sales {
		if sale.State == reservation.StateOpen && sale.UnitsKnown {
			fmt.Fprintf(&b, " %s: %s of %s available.", format.Printable(sale.Name), count(sale.Available), count(sale.Stock))
		}
	}
	return b.String()
}
