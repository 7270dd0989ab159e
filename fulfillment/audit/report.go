package audit

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/google/uuid"

	"stampede/internal/figure"
)

// Report is what an audit found.
type Report struct {
	// Promises are those of docs/architecture.md that can be audited, in their order.
	Promises []Promise     `json:"promises"`
	Sales    []SaleFigures `json:"sales"`
	// Streams is how many streams were looked at, and EntriesWaiting how many entries of them were
	// not done with when the wait was over.
	Streams        int   `json:"streams"`
	EntriesWaiting int64 `json:"entries_waiting"`
	// Guards is how many constraints and indexes the migrations make.
	Guards int `json:"guards"`
	// Moved is true if units moved while it was looked, so that what was found may have been on its way.
	Moved bool `json:"changed_meanwhile"`
}

// Promise is one promise with what breaks it.
type Promise struct {
	Name string `json:"name"`
	Says string `json:"says"`
	// Found counts all findings; the first ones of each check are in Findings. The promise is kept if it is 0.
	Found    int64     `json:"found"`
	Findings []Finding `json:"findings,omitempty"`
	// Unchecked tells why some checks of the promise could not be made.
	Unchecked []string `json:"unchecked,omitempty"`
}

// Kept tells whether everything was looked at and nothing was found that breaks the promise.
func (p Promise) Kept() bool { return p.Found == 0 && len(p.Unchecked) == 0 }

// Finding is one thing that breaks a promise.
type Finding struct {
	Sale  *uuid.UUID `json:"sale_id,omitempty"`
	Order *uuid.UUID `json:"order_id,omitempty"`
	User  string     `json:"user_id,omitempty"`
	What  string     `json:"what"`
	// LastEvent is that of the order, or of the sale where no order is named, with its version or revision.
	LastEvent string `json:"last_event,omitempty"`
	// Remedy is what mends it; it is empty where that goes with what mends other findings.
	Remedy Remedy `json:"remedy,omitempty"`
	// Key is the key of Redis to be set aside.
	Key string `json:"key,omitempty"`
}

// Remedy is what mends a difference.
type Remedy string

// The remedies. The first ones are what Reconcile does, and the last ones are for others to do.
const (
	// remedyRelease: Redis is told, as of other ended orders, that the units of this one come back.
	remedyRelease Remedy = "release"
	// remedyAside: a key of Redis that holds something else than it should is renamed.
	remedyAside Remedy = "set-aside"
	// remedyForget: a release is forgotten whose order has not ended.
	remedyForget Remedy = "forget"
	// remedyAppend: the event of an accepted order is appended to its stream again.
	remedyAppend Remedy = "append"
	// remedyRecount: the sale's counter is counted anew.
	remedyRecount Remedy = "recount"
	// remedyRebuild: the sale's stock in Redis is made anew from Postgres.
	RemedyRebuild Remedy = "rebuild"

	// remedyWorker: it is on its way, and a worker sees to it.
	remedyWorker Remedy = "worker"
	// remedyProjections: RebuildProjections.
	remedyProjections Remedy = "projections"
	// remedyDLQ: an operator replays or discards the dead letter.
	remedyDLQ Remedy = "dlq"
	// remedyGuard: an operator runs the SQL that the finding tells.
	remedyGuard Remedy = "guard"
	// remedyOperator: nothing that was recorded tells what would be right.
	remedyOperator Remedy = "operator"
)

// SaleFigures are what the promises are held against, of one sale.
type SaleFigures struct {
	SaleID uuid.UUID `json:"sale_id"`
	Name   string    `json:"name"`
	Stock  int64     `json:"stock"`
	// Sold is the sale's counter; LiveUnits, of LiveOrders, and ReplayedUnits must be the same.
	Sold       int64 `json:"sold"`
	Orders     int64 `json:"orders"`
	LiveOrders int64 `json:"live_orders"`
	LiveUnits  int64 `json:"live_units"`
	// UnpaidUnits are those of LiveUnits whose orders still have to be paid. The API and the text count them as
	// held, and not as sold.
	UnpaidUnits int64 `json:"unpaid_units"`
	Rejected    int64 `json:"rejected"`
	// Voided are orders that came to Postgres after the stock was made anew without them, and Lost are places
	// whose orders nobody knows since then: Redis took them along.
	Voided        int64 `json:"voided"`
	Lost          int64 `json:"lost_with_redis"`
	Events        int64 `json:"events"`
	ReplayedUnits int64 `json:"replayed_units"`
	// Buyers are the reservations that Redis holds.
	Buyers int64 `json:"buyers"`
	// InRedis is false if Redis does not have the sale; Available, Held and Places are 0 then.
	InRedis   bool  `json:"in_redis"`
	Available int64 `json:"available"`
	// Held is the units that were accepted and have no order in Postgres yet, and those of ended orders that
	// Redis has not been told of. UnpaidUnits come on top.
	Held int64 `json:"held"`
	// Places is how many reservations the sale has had.
	Places int64 `json:"places"`
}

// shown are the units that are held and sold in the meaning of the API: held by orders that are not final,
// and sold by those that are.
func (s SaleFigures) shown() (held, sold int64) {
	return s.Held + s.UnpaidUnits, s.Sold - s.UnpaidUnits
}

func newAuditReport() Report {
	return Report{Promises: []Promise{
		{Name: "S1", Says: "nothing is oversold"},
		{Name: "S2", Says: "one live order per buyer and sale"},
		{Name: "S3", Says: "every accepted order has an end"},
		{Name: "S4", Says: "stock = available + held + sold"},
		{Name: "S5", Says: "nothing is lost or doubled"},
		{Name: "S7", Says: "Redis is whole and up to date"},
		{Name: "DB", Says: "Postgres refuses what must not be"},
	}}
}

func (r *Report) Promise(name string) *Promise {
	for i := range r.Promises {
		if r.Promises[i].Name == name {
			return &r.Promises[i]
		}
	}
	panic("no promise " + name)
}

func (r *Report) add(promise string, f Finding) {
	p := r.Promise(promise)
	if p.Found++; len(p.Findings) < findingsShown {
		p.Findings = append(p.Findings, f)
	}
}

// Broken tells whether any promise is broken.
func (r Report) Broken() bool {
	return slices.ContainsFunc(r.Promises, func(p Promise) bool { return p.Found > 0 })
}

// Unchecked tells whether any check could not be made.
func (r Report) Unchecked() bool {
	return slices.ContainsFunc(r.Promises, func(p Promise) bool { return len(p.Unchecked) > 0 })
}

// total is the sum of all sales.
func (r Report) total() SaleFigures {
	var t SaleFigures
	for _, s := range r.Sales {
		t.Stock += s.Stock
		t.Sold += s.Sold
		t.Orders += s.Orders
		t.LiveOrders += s.LiveOrders
		t.LiveUnits += s.LiveUnits
		t.UnpaidUnits += s.UnpaidUnits
		t.Rejected += s.Rejected
		t.Voided += s.Voided
		t.Lost += s.Lost
		t.Events += s.Events
		t.ReplayedUnits += s.ReplayedUnits
		t.Buyers += s.Buyers
		t.Available += s.Available
		t.Held += s.Held
		t.Places += s.Places
	}
	return t
}

// Figures tells in a line what the promise of that name was held against.
func (r Report) Figures(promise string) string {
	t := r.total()
	n := figure.Count[int64]
	switch promise {
	case "S1":
		if t.UnpaidUnits > 0 {
			return fmt.Sprintf("%s units sold and %s to be paid, of %s", n(t.LiveUnits-t.UnpaidUnits), n(t.UnpaidUnits), n(t.Stock))
		}
		return fmt.Sprintf("%s units sold of %s", n(t.LiveUnits), n(t.Stock))
	case "S2":
		return fmt.Sprintf("%s live orders, %s rejected", n(t.LiveOrders), n(t.Rejected))
	case "S3":
		return fmt.Sprintf("%s buyers in Redis, %s orders in Postgres, %s entries waiting in %s",
			n(t.Buyers), n(t.Orders), n(r.EntriesWaiting), plural(int64(r.Streams), "stream"))
	case "S4":
		held, sold := t.shown()
		replayed := n(t.ReplayedUnits) + " sold"
		if t.UnpaidUnits > 0 {
			replayed += " or to be paid"
		}
		return fmt.Sprintf("%s = %s + %s + %s; the events replayed come to %s", n(t.Stock), n(t.Available), n(held), n(sold), replayed)
	case "S5":
		figures := fmt.Sprintf("%s events of %s orders, %s places given out", n(t.Events), n(t.Orders), n(t.Places))
		if t.Voided > 0 || t.Lost > 0 {
			figures += fmt.Sprintf("; %s voided, %s more lost with Redis", plural(t.Voided, "order"), n(t.Lost))
		}
		return figures
	case "S7":
		there := int64(0)
		for _, s := range r.Sales {
			if s.InRedis {
				there++
			}
		}
		return fmt.Sprintf("%s of %s in Redis", n(there), plural(int64(len(r.Sales)), "sale"))
	case "DB":
		return fmt.Sprintf("%s of %s constraints and indexes hold", n(int64(r.Guards)-r.Promise(promise).Found), n(int64(r.Guards)))
	}
	return ""
}

// WriteText writes the report for people: a line for each promise with the figures that prove it,
// and below it what breaks it.
func (r Report) WriteText(w io.Writer) error {
	out := bufio.NewWriter(w)
	for _, p := range r.Promises {
		verdict := "kept"
		if p.Found > 0 {
			verdict = "BROKEN"
		} else if !p.Kept() {
			verdict = "UNKNOWN"
		}
		fmt.Fprintf(out, "%s  %-34s %-7s %s\n", p.Name, p.Says, verdict, r.Figures(p.Name))
		if p.Name == "S4" {
			r.writeEquations(out)
		}
		for _, f := range p.Findings {
			fmt.Fprintf(out, "      - %s\n", f)
		}
		if more := p.Found - int64(len(p.Findings)); more > 0 {
			fmt.Fprintf(out, "      … and %s more\n", figure.Count(more))
		}
		for _, why := range p.Unchecked {
			fmt.Fprintf(out, "      ? could not look: %s\n", figure.Printable(why))
		}
	}
	if r.Moved {
		fmt.Fprintln(out, "Units moved while it was looked: what was on its way then shows as a difference. Look again when the sale is at rest, or give it time with --wait.")
	}
	return out.Flush()
}

// equationsShown bounds how many sales have a line of their own.
const equationsShown = 20

// writeEquations writes for each sale that its stock is what became of it.
func (r Report) writeEquations(w io.Writer) {
	n := figure.Count[int64]
	for i, s := range r.Sales {
		if i == equationsShown {
			fmt.Fprintf(w, "      … and %s more sales\n", n(int64(len(r.Sales)-equationsShown)))
			return
		}
		is := "="
		held, sold := s.shown()
		if s.Stock != s.Available+held+sold {
			is = "≠"
		}
		fmt.Fprintf(w, "      %s %s %s available + %s held + %s sold   sale %s %s\n", n(s.Stock), is, n(s.Available), n(held), n(sold), s.SaleID, figure.Printable(s.Name))
	}
}

// String names what the finding is about and says what is wrong, safe for a terminal.
func (f Finding) String() string {
	var about []string
	if f.Sale != nil {
		about = append(about, "sale "+f.Sale.String())
	}
	if f.Order != nil {
		about = append(about, "order "+f.Order.String())
	}
	if f.User != "" {
		about = append(about, "user "+figure.Printable(f.User))
	}
	text := figure.Printable(f.What)
	if len(about) > 0 {
		text = strings.Join(about, ", ") + ": " + text
	}
	if f.LastEvent != "" {
		text += " (last event: " + figure.Printable(f.LastEvent) + ")"
	}
	return text
}

func plural(n int64, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return figure.Count(n) + " " + thing
}
