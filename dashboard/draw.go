package dashboard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/draw"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// ranksRead bounds the ranks that a look at a draw reads, of all items together: of more it reads some, evenly
	// spaced.
	ranksRead = 5000
	// drawKept is how long open pages are shown what another one has read: a look may take a tenth of a second.
	drawKept = 2 * time.Second
	// turnsShown is how many of the latest turns are listed.
	turnsShown = 12
)

// drawLink leads from the page of a sale to its draw, or to its waiting list.
type drawLink struct {
	// SaleID is the sale that is drawn, Name its name.
	SaleID            uuid.UUID
	Kind              draws.Kind
	Name, EntriesName string
	// Entered is how many entries Postgres has that were not cancelled, and Waiting how many of those in a waiting list
	// had no turn.
	Entered, Waiting int64
	// WaitingItems are those who wait for each item; nil without items.
	WaitingItems []int64
	// EntriesEnded is true if nobody can enter any more, also before the end that fixes the round.
	EntriesEnded bool
	// LetterWaits is true while the list cannot be frozen because a dead letter of the entries is parked.
	LetterWaits bool
}

// drawOf returns nil for a sale that has neither a draw nor a waiting list, and is not the entries of one.
func (d *site) drawOf(ctx context.Context, sale uuid.UUID) (*drawLink, error) {
	rows, _ := d.Catalog.Pool.Query(ctx, sql.DashboardDrawOf, sale) // its error comes with the rows
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[drawLink])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return found, err
}

// IsList is true for a waiting list.
func (l *drawLink) IsList() bool { return l.Kind == draws.ByPlace }

// drawPage is the body of the page of a draw, or of a waiting list.
type drawPage struct {
	draws.Draw
	Link *drawLink
	Now  time.Time
	// Path is that of the page, from which an open one asks for its parts again.
	Path string
	// NoWorker is true if none runs.
	NoWorker bool

	Maps []rankMap
	// Turns is how many ranks had theirs, and Waiting how many have not.
	Turns, Waiting int64
	// Outcomes and Reasons count the ranks that were read, which are all unless Sampled is set.
	Outcomes []tally
	Reasons  []tally
	Sampled  bool
	Pace     *pace
	Latest   []turn
}

// tally is how many ranks there are of a kind.
type tally struct {
	outcome
	Text string
	N    int64
}

// turn is a rank that had its turn.
type turn struct {
	Item                     int
	Turns, Step, Rank, Place int64
	OfferedAt                time.Time
	EntryID, OrderID         zeronull.UUID
	Reason                   draw.Reason
	Status                   order.Status
	Code                     string `db:"-"`
}

// Entry and Order are the entry of the rank, and the order that was made of its offer.
func (t turn) Entry() uuid.UUID { return uuid.UUID(t.EntryID) }
func (t turn) Order() uuid.UUID { return uuid.UUID(t.OrderID) }

// Outcome is what became of it.
func (t turn) Outcome() outcome {
	switch {
	case t.Reason != "":
		return rankSkipped
	case t.Status == order.StatusPaid:
		return rankPaid
	case t.Status == "" || t.Status == order.StatusConfirmed: // the order may not be recorded yet
		return rankOffered
	}
	return rankEnded
}

// reasons say why a rank was skipped.
var reasons = map[draw.Reason]string{
	draw.SkippedHolder: "the entrant had an order of the sale", draw.SkippedCancelled: "the entry was cancelled",
}

// Why says why it was skipped, "" if it was not.
func (t turn) Why() string { return reasons[t.Reason] }

// drawPages are the pages of draws and waiting lists.
type drawPages struct {
	*site
	draws *draws.Store
	// seen has the newest looks, by sale, for whoever gets it.
	seen chan map[uuid.UUID]*drawPage
}

func newDrawPages(d *site) drawPages {
	pages := drawPages{d, draws.New(d.Catalog.Pool), make(chan map[uuid.UUID]*drawPage, 1)}
	pages.seen <- map[uuid.UUID]*drawPage{}
	return pages
}

// show shows the draw of a sale; its entries lead there.
func (d drawPages) show(ctx context.Context, r *http.Request) (page, error) {
	id, err := saleID(r)
	if err != nil {
		return page{}, err
	}
	link, err := d.drawOf(ctx, id)
	switch {
	case err != nil:
		return page{}, err
	case link == nil:
		return page{}, reservation.ErrSaleNotFound
	case link.SaleID != id:
		return page{moved: "/sales/" + link.SaleID.String() + "/draw"}, nil
	}
	again := r.URL.Query().Has("rows")
	p, err := d.read(ctx, link, again)
	switch {
	case err != nil:
		return page{}, err
	case again:
		return page{part: "draw", body: p}, nil
	}
	title := "Draw of " + link.Name
	if p.Link.IsList() {
		title = "Waiting list of " + link.Name
	}
	return page{template: "draw", title: title, body: p}, nil
}

// read reads a draw, once for all pages that ask again.
func (d drawPages) read(ctx context.Context, link *drawLink, again bool) (*drawPage, error) {
	var seen map[uuid.UUID]*drawPage
	select {
	case seen = <-d.seen:
		defer func() { d.seen <- seen }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	maps.DeleteFunc(seen, func(_ uuid.UUID, p *drawPage) bool { return time.Since(p.Now) > drawKept })
	if p, ok := seen[link.SaleID]; ok && again {
		return p, nil
	}
	p := &drawPage{
		Link: link, Now: time.Now(), Path: "/sales/" + link.SaleID.String() + "/draw",
		NoWorker: d.Fleet.Snapshot().NoWorker(),
	}
	var err error
	if p.Draw, err = d.draws.Find(ctx, link.SaleID); err != nil {
		return nil, err
	}
	p.Turns = p.Offered + p.Skipped
	p.Waiting = p.Entries - p.Turns
	if link.IsList() {
		p.Waiting = link.Waiting
	}
	if link.IsList() || !p.RankedAt.IsZero() {
		err = d.readTurns(ctx, p)
	}
	if err == nil {
		seen[link.SaleID] = p
	}
	return p, err
}

// readTurns fills in what became of the ranks.
func (d drawPages) readTurns(ctx context.Context, p *drawPage) error {
	letters, entries := p.Letters(), p.ItemEntries
	codes := make([]string, len(letters))
	for i, item := range p.Items {
		codes[i] = item.Code
	}
	rows, _ := d.Catalog.Pool.Query(ctx, sql.DashboardDrawRanks, p.SaleID, letters, ranksRead/len(letters), turnsShown)
	turns, err := pgx.CollectRows(rows, pgx.RowToStructByName[turn]) // which has the error of the query
	if err != nil {
		return err
	}
	of := make([][]turn, len(letters))
	for _, t := range turns {
		t.Code = codes[t.Item]
		of[t.Item] = append(of[t.Item], t)
		if t.Rank >= t.Turns-turnsShown {
			p.Latest = append(p.Latest, t)
		}
		p.Sampled = p.Sampled || t.Step > 1
	}
	slices.SortFunc(p.Latest, func(a, b turn) int {
		return cmp.Or(b.OfferedAt.Compare(a.OfferedAt), cmp.Compare(b.Rank, a.Rank))
	})
	p.Latest = p.Latest[:min(len(p.Latest), turnsShown)]
	for i, item := range of {
		total := p.Waiting
		if p.Link.WaitingItems != nil {
			total = p.Link.WaitingItems[i]
		}
		if p.Link.IsList() && len(item) > 0 {
			total += item[0].Turns
		} else if !p.Link.IsList() {
			total = entries[i]
		}
		p.Maps = append(p.Maps, newRankMap(codes[i], item, total, cellsMax/len(letters)))
	}
	p.count(of)
	p.Pace = newPace(of)
	return nil
}

// count fills in the tallies.
func (p *drawPage) count(of [][]turn) {
	var outcomes [rankWaiting + 1]int64
	why := map[draw.Reason]int64{}
	for _, item := range of {
		for _, t := range sampled(item) {
			outcomes[t.Outcome()] += t.Step
			if t.Reason != "" {
				why[t.Reason] += t.Step
			}
		}
	}
	outcomes[rankWaiting] = p.Waiting
	for o, n := range outcomes {
		p.Outcomes = append(p.Outcomes, tally{outcome(o), outcome(o).String(), n})
	}
	for reason, n := range why {
		p.Reasons = append(p.Reasons, tally{rankSkipped, reasons[reason], n})
	}
	slices.SortFunc(p.Reasons, func(a, b tally) int { return cmp.Compare(b.N, a.N) })
}

// sampled are the turns that are evenly spaced, without the latest ones between them.
func sampled(turns []turn) []turn {
	return slices.DeleteFunc(slices.Clone(turns), func(t turn) bool { return t.Rank%t.Step != 0 })
}

// RoundAt is the time of the round that gives the seed, as the rule has it now.
func (p *drawPage) RoundAt() time.Time { return draw.RoundTime(p.Round()) }

// In is the time from now to another one, and Ahead whether it is to come.
func (p *drawPage) In(t time.Time) string  { return clock(t.Sub(p.Now)) }
func (p *drawPage) Ahead(t time.Time) bool { return t.After(p.Now) }

// Chain is the chain of drand whose rounds are seeds.
func (*drawPage) Chain() string { return draw.QuicknetChain }

// drawStep is a step of a draw. Rest is true for one that is to come, whose time may be unknown.
type drawStep struct {
	What string
	At   time.Time
	Rest bool
}

// Steps are those that were, and those that come.
func (p *drawPage) Steps() []drawStep {
	steps := []drawStep{
		{"The draw was created", p.CreatedAt, false},
		{"The entries end", p.ClosesAt, p.State == draws.Entering},
		{"The list is frozen: " + count(p.Entries) + " entries", p.FrozenAt, p.FrozenAt.IsZero()},
		{"The seed is known", p.SeededAt, p.SeededAt.IsZero()},
		{"The entries are ranked, and offers begin", p.RankedAt, p.RankedAt.IsZero()},
	}
	if p.FrozenAt.IsZero() {
		steps[2].What = "The list is frozen"
	}
	if p.SeededAt.IsZero() && len(p.Rounds) > 0 {
		steps[3].At = p.RoundAt()
	}
	if p.State == draws.Void {
		steps = slices.DeleteFunc(steps, func(s drawStep) bool { return s.Rest })
		steps = append(steps, drawStep{"The draw is void", p.VoidedAt, false})
	}
	return steps
}

// outcome is what became of a rank.
type outcome int

// The outcomes, in the order in which they are told.
const (
	rankPaid outcome = iota
	rankOffered
	rankEnded
	rankSkipped
	rankWaiting
)

// outcomeLooks are the class, the name and the shape of each outcome: shapes tell them apart without colours. A shape
// is a part of an SVG path in a cell of 10 by 10.
var outcomeLooks = [...]struct{ class, name, shape string }{
	{"o-paid", "paid", "m1 1h8v8h-8z"},
	{"o-offered", "offered, not paid", "m1 1h8v8h-8zm2 2v4h4v-4z"},
	{"o-ended", "expired or cancelled", "m1 4h8v3h-8z"},
	{"o-skipped", "skipped", "m6 1h3l-5 8h-3z"},
	{"o-waiting", "waiting", "m4 4h2v2h-2z"},
}

func (o outcome) String() string { return outcomeLooks[o].name }

// Class and Shape are for templates.
func (o outcome) Class() string { return outcomeLooks[o].class }
func (o outcome) Shape() string { return "M0 0" + outcomeLooks[o].shape }

const (
	// cellsMax bounds the cells of the maps of a page, and cellsAcross those of a row.
	cellsMax    = 600
	cellsAcross = 50
	// cellSize is the side of a cell.
	cellSize = 10
)

// rankMap shows the ranks of an item in their order, row by row.
type rankMap struct {
	// Code is that of the item; empty in a sale without items.
	Code string
	// Total is how many ranks there are, Shown how many of them the map has, and PerCell how many each cell.
	Total, Shown, PerCell int64
	Width, Height         int
	Paths                 []rankPath
}

// rankPath draws all cells with the same outcome.
type rankPath struct {
	outcome
	D string
}

// newRankMap makes a map of at most so many cells. It has all ranks, or, if there are more, those that had their turn
// and as many after them. A cell of many ranks shows what became of most of those that had their turn.
func newRankMap(code string, turns []turn, total int64, cells int) rankMap {
	cells = max(cells/cellsAcross, 1) * cellsAcross
	had := int64(0)
	if len(turns) > 0 {
		had = turns[0].Turns
	}
	m := rankMap{Code: code, Total: total, Shown: min(total, max(int64(cells), 2*had)), Width: cellsAcross * cellSize}
	m.PerCell = max((m.Shown+int64(cells)-1)/int64(cells), 1)
	found := make([][rankWaiting]int, (m.Shown+m.PerCell-1)/m.PerCell)
	for _, t := range sampled(turns) {
		found[t.Rank/m.PerCell][t.Outcome()]++
	}
	var paths [rankWaiting + 1]strings.Builder
	for cell, of := range found {
		most := rankWaiting
		for o, n := range of {
			if n > 0 && (most == rankWaiting || n > of[most]) {
				most = outcome(o)
			}
		}
		x, y := cell%cellsAcross*cellSize, cell/cellsAcross*cellSize
		fmt.Fprintf(&paths[most], "M%d %d%s", x, y, outcomeLooks[most].shape)
	}
	m.Height = (len(found) + cellsAcross - 1) / cellsAcross * cellSize
	for o := range paths {
		if paths[o].Len() > 0 {
			m.Paths = append(m.Paths, rankPath{outcome(o), paths[o].String()})
		}
	}
	return m
}

// pace is a chart of the turns by second.
type pace struct {
	From, To time.Time
	// Most is the highest rate of a second, and Each how long a bar is.
	Most             float64
	Each             time.Duration
	Offered, Skipped string // paths in 100 by 100 units
}

// barsMax bounds the bars of a chart.
const barsMax = 120

// newPace returns nil without turns.
func newPace(of [][]turn) *pace {
	var all []turn
	for _, turns := range of {
		all = append(all, sampled(turns)...)
	}
	if len(all) == 0 {
		return nil
	}
	early := func(a, b turn) int { return a.OfferedAt.Compare(b.OfferedAt) }
	p := &pace{From: slices.MinFunc(all, early).OfferedAt.Truncate(time.Second), To: slices.MaxFunc(all, early).OfferedAt}
	for p.Each = time.Second; p.To.Sub(p.From) >= barsMax*p.Each; {
		p.Each *= 2
	}
	type bar struct{ offered, skipped float64 }
	bars := make([]bar, max(p.To.Sub(p.From)/p.Each+1, barsMin))
	for _, t := range all {
		b, rate := &bars[t.OfferedAt.Sub(p.From)/p.Each], float64(t.Step)/p.Each.Seconds()
		if t.Reason == "" {
			b.offered += rate
		} else {
			b.skipped += rate
		}
		p.Most = max(p.Most, b.offered+b.skipped)
	}
	p.To = p.From.Add(time.Duration(len(bars)) * p.Each)
	var given, passed strings.Builder
	width, height := 100/float64(len(bars)), 100/p.Most
	for i, b := range bars {
		x, mid := float64(i)*width, 100-b.offered*height
		if b.offered > 0 {
			fmt.Fprintf(&given, "M%.2f 100V%.2fh%.2fV100z", x, mid, width*.9)
		}
		if b.skipped > 0 {
			fmt.Fprintf(&passed, "M%.2f %.2fV%.2fh%.2fV%.2fz", x, mid, mid-b.skipped*height, width*.9, mid)
		}
	}
	p.Offered, p.Skipped = given.String(), passed.String()
	return p
}

// barsMin keeps the bar of a single second from filling the chart.
const barsMin = 30

// MostText is the highest rate.
func (p *pace) MostText() string { return perSecond(p.Most) }
