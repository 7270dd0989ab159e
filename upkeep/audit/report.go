package audit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/format"
	"stampede/sql"
)

// Report is what an audit found.
type Report struct {
	// Promises are the promises of the README that can be audited, in order.
	Promises []Promise     `json:"promises"`
	Sales    []SaleFigures `json:"sales"`
	// Payments are the sums of the payments by currency.
	Payments []PaymentFigures `json:"payments"`
	// Draws are the draws and waiting lists. Without any, Promises has none of theirs: D1 to D6.
	Draws []DrawFigures `json:"draws,omitempty"`
	// Streams is how many streams were checked, and EntriesWaiting how many of their entries were
	// unfinished after the wait.
	Streams        int   `json:"streams"`
	EntriesWaiting int64 `json:"entries_waiting"`
	// Guards is how many constraints and indexes the migrations make.
	Guards int `json:"guards"`
	// Moved is true if units moved during the look, so that findings may be in transit.
	Moved bool `json:"changed_meanwhile"`
}

// Promise is one promise with its violations.
type Promise struct {
	Name string `json:"name"`
	Says string `json:"says"`
	// Found counts all findings; the first ones of each check are in Findings. The promise is kept if it is 0.
	Found    int64     `json:"found"`
	Findings []Finding `json:"findings,omitempty"`
	// Unchecked holds the reasons why some checks of the promise could not be made.
	Unchecked []string `json:"unchecked,omitempty"`
}

// Kept reports whether everything was checked and no violation was found.
func (p Promise) Kept() bool { return p.Found == 0 && len(p.Unchecked) == 0 }

// Finding is one violation of a promise.
type Finding struct {
	Sale  *uuid.UUID `json:"sale_id,omitempty"`
	Order *uuid.UUID `json:"order_id,omitempty"`
	User  string     `json:"user_id,omitempty"`
	What  string     `json:"what"`
	// LastEvent is the last event of the order, or of the sale where no order is named, with its version or revision.
	LastEvent string `json:"last_event,omitempty"`
	// Remedy is its repair. It is empty if the repair of other findings includes it.
	Remedy Remedy `json:"remedy,omitempty"`
	// Key is the key of Redis to repair.
	Key string `json:"key,omitempty"`
}

// Remedy is the repair of a difference.
type Remedy string

// The remedies. Reconcile applies the first group. The others need a worker or an operator.
const (
	// remedyRelease: the units of an ended order are released.
	remedyRelease Remedy = "release"
	// remedyPersist: the time limit of a key of Redis is removed.
	remedyPersist Remedy = "persist"
	// remedyAside: a key of Redis with a wrong type is renamed.
	remedyAside Remedy = "set-aside"
	// remedyForget: the release of an order that has not ended is deleted.
	remedyForget Remedy = "forget"
	// remedyAppend: the event of an accepted order is appended to its stream again.
	remedyAppend Remedy = "append"
	// remedyRecount: the sale's counter is recounted.
	remedyRecount Remedy = "recount"
	// remedyRebuild: the sale's stock in Redis is rebuilt from Postgres.
	RemedyRebuild Remedy = "rebuild"

	// remedyWorker: a worker will resolve it.
	remedyWorker Remedy = "worker"
	// remedyProjections: an operator rebuilds the projections.
	remedyProjections Remedy = "projections"
	// remedyDLQ: an operator replays or discards the dead letter.
	remedyDLQ Remedy = "dlq"
	// remedyGuard: an operator runs the SQL of the finding.
	remedyGuard Remedy = "guard"
	// remedyUnknownSale: an operator creates the sale again, and deletes the keys of this one.
	remedyUnknownSale Remedy = "unknown-sale"
	// remedyPayment: an operator compares the payment with the payment provider.
	remedyPayment Remedy = "payment"
	// remedyDraw: an operator stops the offers, and compares the draw with what the world was told.
	remedyDraw Remedy = "draw"
	// remedyOperator: the records do not show what is right.
	remedyOperator Remedy = "operator"
)

// SaleFigures are the figures of one sale.
type SaleFigures struct {
	SaleID uuid.UUID `json:"sale_id"`
	Name   string    `json:"name"`
	// Entries is true if its orders are the entries of a draw, or places in a waiting list: no stock.
	Entries bool `json:"entries,omitempty"`
	// Shards is how many shards share the stock, 0 if there is one.
	Shards int   `json:"shards,omitempty"`
	Stock  int64 `json:"stock"`
	// Sold is the sale's counter; LiveUnits, of LiveOrders, and ReplayedUnits must be the same.
	Sold       int64 `json:"sold"`
	Orders     int64 `json:"orders"`
	LiveOrders int64 `json:"live_orders"`
	LiveUnits  int64 `json:"live_units"`
	// UnpaidUnits are the part of LiveUnits whose orders await payment. The API and the text count them as held.
	UnpaidUnits int64 `json:"unpaid_units"`
	Rejected    int64 `json:"rejected"`
	// Voided counts orders that reached Postgres after the stock was rebuilt without them, and Lost
	// places whose orders were lost with Redis.
	Voided        int64 `json:"voided"`
	Lost          int64 `json:"lost_with_redis"`
	Events        int64 `json:"events"`
	ReplayedUnits int64 `json:"replayed_units"`
	// Buyers counts the reservations in Redis.
	Buyers int64 `json:"buyers"`
	// InRedis is false if Redis does not have the sale, or not all of its shards; Available, Held and Places are 0 then.
	InRedis   bool  `json:"in_redis"`
	Available int64 `json:"available"`
	// OnTheWay counts the available units that one shard has given to another, which has not got them yet.
	OnTheWay int64 `json:"on_the_way,omitempty"`
	// Held counts the accepted units without an order in Postgres yet, and the units of ended orders
	// that Redis has not released yet. UnpaidUnits are not included.
	Held int64 `json:"held"`
	// Places counts all reservations that the sale has had.
	Places int64 `json:"places"`
	// Items are the units of each item of the sale, if it has any.
	Items []ItemFigures `json:"items,omitempty"`
}

// ItemFigures are the units of an item. Those of orders that await payment count as held.
type ItemFigures struct {
	Code      string `json:"code"`
	Stock     int64  `json:"stock"`
	Available int64  `json:"available"`
	Held      int64  `json:"held"`
	Sold      int64  `json:"sold"`
}

// PaymentFigures are the payments of a currency. Sums are in its minor units.
type PaymentFigures struct {
	// Currency is empty for payments without one.
	Currency string `json:"currency"`
	Payments int64  `json:"payments"`
	// Reported is the sum of what was reported, and what follows is what became of it.
	Reported          int64 `json:"reported"`
	Settled           int64 `json:"settled"`
	SettledPayments   int64 `json:"settled_payments"`
	RefundDue         int64 `json:"refund_due"`
	RefundDuePayments int64 `json:"refund_due_payments"`
	Refunded          int64 `json:"refunded"`
	RefundedPayments  int64 `json:"refunded_payments"`
	Waiting           int64 `json:"waiting"`
	WaitingPayments   int64 `json:"waiting_payments"`
	// Unclear is what people have to look at, or have looked at.
	Unclear          int64 `json:"unclear"`
	UnclearPayments  int64 `json:"unclear_payments"`
	Disputed         int64 `json:"disputed"`
	DisputedPayments int64 `json:"disputed_payments"`
}

// shown returns the units that the API shows as held and as sold. Unpaid orders count as held.
func (s SaleFigures) shown() (held, sold int64) {
	return s.Held + s.UnpaidUnits, s.Sold - s.UnpaidUnits
}

func newReport() Report {
	return Report{Promises: []Promise{
		{Name: "S1", Says: "nothing is oversold"},
		{Name: "S2", Says: "one live order per buyer and sale"},
		{Name: "S3", Says: "every accepted order has an end"},
		{Name: "S4", Says: "stock = available + held + sold"},
		{Name: "S5", Says: "nothing is lost or doubled"},
		{Name: "S7", Says: "Redis is whole and up to date"},
		{Name: "S8", Says: "no money is lost"},
		{Name: "D1", Says: "each entry is in the frozen list"},
		{Name: "D2", Says: "one entry per person"},
		{Name: "D3", Says: "the list is public before its seed"},
		{Name: "D4", Says: "ranks follow from list and seed"},
		{Name: "D5", Says: "units are offered by rank"},
		{Name: "D6", Says: "offered + sold ≤ stock"},
		{Name: "DB", Says: "Postgres has all its guards"},
	}}
}

// PromiseNames are the names of the promises that each audit checks, in their order, and of those of draws the broken
// ones.
func PromiseNames(broken []string) (names []string) {
	for _, p := range newReport().Promises {
		if !p.ofDraws() || slices.Contains(broken, p.Name) {
			names = append(names, p.Name)
		}
	}
	return names
}

// Promise returns a promise by its name, such as S1.
func (r *Report) Promise(name string) *Promise {
	for i := range r.Promises {
		if r.Promises[i].Name == name {
			return &r.Promises[i]
		}
	}
	panic("no promise " + name)
}

// has reports whether a promise is in the report: those of draws are only if there is one.
func (r *Report) has(name string) bool {
	return slices.ContainsFunc(r.Promises, func(p Promise) bool { return p.Name == name })
}

func (r *Report) add(promise string, f Finding) {
	p := r.Promise(promise)
	if p.Found++; len(p.Findings) < findingsShown {
		p.Findings = append(p.Findings, f)
	}
}

// Broken reports whether any promise is broken.
func (r Report) Broken() bool {
	return slices.ContainsFunc(r.Promises, func(p Promise) bool { return p.Found > 0 })
}

// Unchecked reports whether any check could not be made.
func (r Report) Unchecked() bool {
	return slices.ContainsFunc(r.Promises, func(p Promise) bool { return len(p.Unchecked) > 0 })
}

// total is the sum of all sales. Entries have orders, and no units.
func (r Report) total() SaleFigures {
	var t SaleFigures
	for _, s := range r.Sales {
		if !s.Entries {
			t.Stock += s.Stock
			t.Sold += s.Sold
			t.LiveUnits += s.LiveUnits
			t.UnpaidUnits += s.UnpaidUnits
			t.ReplayedUnits += s.ReplayedUnits
			t.Available += s.Available
			t.Held += s.Held
		}
		t.Orders += s.Orders
		t.LiveOrders += s.LiveOrders
		t.Rejected += s.Rejected
		t.Voided += s.Voided
		t.Lost += s.Lost
		t.Events += s.Events
		t.Buyers += s.Buyers
		t.Places += s.Places
	}
	return t
}

// Figures returns a line with the figures of that promise.
func (r Report) Figures(promise string) string {
	t := r.total()
	n := format.Count[int64]
	switch promise {
	case "S1":
		if t.UnpaidUnits > 0 {
			return fmt.Sprintf("%s units sold and %s to be paid, of %s", n(t.LiveUnits-t.UnpaidUnits), n(t.UnpaidUnits),
				n(t.Stock))
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
		return fmt.Sprintf("%s = %s + %s + %s; the events replayed come to %s", n(t.Stock), n(t.Available), n(held), n(sold),
			replayed)
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
	case "S8":
		var t PaymentFigures
		for _, p := range r.Payments {
			t.Payments += p.Payments
			t.SettledPayments += p.SettledPayments
			t.RefundDuePayments += p.RefundDuePayments
			t.RefundedPayments += p.RefundedPayments
			t.WaitingPayments += p.WaitingPayments
			t.UnclearPayments += p.UnclearPayments
			t.DisputedPayments += p.DisputedPayments
		}
		figures := fmt.Sprintf("%s = %s settled + %s due for refund + %s refunded + %s waiting", plural(t.Payments, "payment"),
			n(t.SettledPayments), n(t.RefundDuePayments), n(t.RefundedPayments), n(t.WaitingPayments))
		if t.UnclearPayments > 0 { // few shops ever have one
			figures += fmt.Sprintf(" + %s unclear", n(t.UnclearPayments))
		}
		if t.DisputedPayments > 0 {
			figures += fmt.Sprintf(" + %s disputed", n(t.DisputedPayments))
		}
		return figures
	case "D1", "D2", "D3", "D4", "D5", "D6":
		return r.figuresOfDraws(promise)
	case "DB":
		return fmt.Sprintf("%s of %s constraints and indexes hold", n(int64(r.Guards)-r.Promise(promise).Found),
			n(int64(r.Guards)))
	}
	return ""
}

// WriteText writes the report for operators: a line with figures for each promise, and below it the
// violations.
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
		switch p.Name {
		case "S4":
			r.writeEquations(out)
		case "S8":
			r.writeSums(out)
		case "D5":
			for _, d := range r.Draws {
				for _, entry := range d.Late {
					fmt.Fprintf(out, "      the entry %s came to Postgres late, and had its turn after later places\n", entry)
				}
			}
		}
		for _, f := range p.Findings {
			fmt.Fprintf(out, "      - %s\n", f)
		}
		if more := p.Found - int64(len(p.Findings)); more > 0 {
			fmt.Fprintf(out, "      … and %s more\n", format.Count(more))
		}
		for _, why := range p.Unchecked {
			fmt.Fprintf(out, "      ? not checked: %s\n", format.Printable(why))
		}
	}
	if r.Moved {
		fmt.Fprintln(out,
			"Units moved during the audit: units in transit show as differences. Audit again when the sale is at rest, or wait "+
				"with --wait.")
	}
	return out.Flush()
}

// equationsShown bounds the sales with a line of their own.
const equationsShown = 20

// writeEquations writes for each sale how its stock is divided.
func (r Report) writeEquations(w io.Writer) {
	n := format.Count[int64]
	for i, s := range r.Sales {
		if i == equationsShown {
			fmt.Fprintf(w, "      … and %s more sales\n", n(int64(len(r.Sales)-equationsShown)))
			return
		}
		held, sold := s.shown()
		over := ""
		if s.Shards > 0 {
			over = fmt.Sprintf(", over %d shards", s.Shards)
		}
		if s.OnTheWay > 0 {
			over += fmt.Sprintf(", %s on their way", plural(s.OnTheWay, "unit"))
		}
		units := equation(s.Stock, s.Available, held, sold)
		if s.Entries {
			units = n(s.LiveOrders) + " live as entries"
		}
		fmt.Fprintf(w, "      %s   sale %s %s%s\n", units, s.SaleID, format.Printable(s.Name), over)
		for _, i := range s.Items {
			fmt.Fprintf(w, "        %s   %s\n", equation(i.Stock, i.Available, i.Held, i.Sold), format.Printable(i.Code))
		}
	}
}

func equation(stock, available, held, sold int64) string {
	n, is := format.Count[int64], "="
	if stock != available+held+sold {
		is = "≠"
	}
	return fmt.Sprintf("%s %s %s available + %s held + %s sold", n(stock), is, n(available), n(held), n(sold))
}

// writeSums writes what became of the money in each currency.
func (r Report) writeSums(w io.Writer) {
	n := format.Count[int64]
	for _, p := range r.Payments {
		if p.Currency == "" {
			continue
		}
		is := "="
		if p.Reported != p.Settled+p.RefundDue+p.Refunded+p.Waiting+p.Unclear+p.Disputed {
			is = "≠"
		}
		rest := ""
		for _, sum := range []struct{ payments, amount int64 }{
			{p.UnclearPayments, p.Unclear}, {p.DisputedPayments, p.Disputed},
		} {
			if sum.payments > 0 {
				rest += " + " + n(sum.amount)
			}
		}
		fmt.Fprintf(w, "      %s %s %s + %s + %s + %s%s in minor units of %s\n", n(p.Reported), is, n(p.Settled),
			n(p.RefundDue), n(p.Refunded), n(p.Waiting), rest, format.Printable(p.Currency))
	}
}

// String describes the finding, safe for a terminal.
func (f Finding) String() string {
	var about []string
	if f.Sale != nil {
		about = append(about, "sale "+f.Sale.String())
	}
	if f.Order != nil {
		about = append(about, "order "+f.Order.String())
	}
	if f.User != "" {
		about = append(about, "user "+format.Printable(f.User))
	}
	text := format.Printable(f.What)
	if len(about) > 0 {
		text = strings.Join(about, ", ") + ": " + text
	}
	if f.LastEvent != "" {
		text += " (last event: " + format.Printable(f.LastEvent) + ")"
	}
	return text
}

func plural(n int64, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return format.Count(n) + " " + thing
}

// Recorded is the verdict of a whole audit, as Record stored it.
type Recorded struct {
	At time.Time
	// Operator is who ran it.
	Operator string
	// Broken and Unchecked are names of promises, such as S4, in their order.
	Broken, Unchecked []string
}

// ofPostgres are the promises that are checked in one snapshot of Postgres, where nothing is on its way.
var ofPostgres = []string{"S1", "S2", "S8", "D1", "D2", "D3", "D4", "D5", "D6", "DB"}

// Record stores the verdict of an audit of all sales, with the time of Postgres. The newest 1000 verdicts are kept.
// What was found between Redis and Postgres while units moved may have been on its way: it is recorded as unchecked, so
// that nobody takes it for broken, unless the verdict before had it broken.
func Record(ctx context.Context, pool *pgxpool.Pool, report Report, operator string) error {
	before, err := Latest(ctx, pool)
	if err != nil {
		return err
	}
	broken, unchecked := []string{}, []string{}
	for _, p := range report.Promises {
		isBroken := p.Found > 0 && (!report.Moved || slices.Contains(ofPostgres, p.Name) ||
			before != nil && slices.Contains(before.Broken, p.Name))
		if isBroken {
			broken = append(broken, p.Name)
		}
		if len(p.Unchecked) > 0 || p.Found > 0 && !isBroken {
			unchecked = append(unchecked, p.Name)
		}
	}
	_, err = pool.Exec(ctx, sql.AuditRecord, zeronull.Text(operator), broken, unchecked)
	if err != nil {
		return fmt.Errorf("record the audit: %w", err)
	}
	return nil
}

// Latest returns the newest recorded audit, nil if there is none.
func Latest(ctx context.Context, pool *pgxpool.Pool) (*Recorded, error) {
	rows, _ := pool.Query(ctx, sql.AuditLatest) // its error comes with the row
	recorded, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[Recorded])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the newest audit: %w", err)
	}
	return recorded, nil
}
