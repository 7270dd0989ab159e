package catalog

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// saleView is a sale in JSON.
type saleView struct {
	ID uuid.UUID `json:"id"`
	reservation.TermsView
	State          reservation.State `json:"state"`
	Available      int64             `json:"available"`
	Held           int64             `json:"held"`
	Sold           int64             `json:"sold"`
	OffersOnly     bool              `json:"offers_only,omitempty"`
	EntriesSaleID  uuid.UUID         `json:"entries_sale_id,omitzero"`
	WaitlistClosed bool              `json:"waitlist_closed,omitempty"`
	Waiting        *int64            `json:"waiting,omitempty"`
	EntryFor       uuid.UUID         `json:"entry_for,omitzero"`
	Items          []CountedItem     `json:"items,omitempty"`
	CreatedAt      order.Instant     `json:"created_at"`
}

// MarshalJSON writes a sale as the HTTP API and the commands show it. Times that are not set are left
// out.
func (s CountedSale) MarshalJSON() ([]byte, error) {
	v := saleView{
		ID: s.ID, TermsView: s.Terms.View(), State: s.State, Available: s.Available, Held: s.Held, Sold: s.Sold,
		OffersOnly: s.OffersOnly, WaitlistClosed: s.WaitlistClosed, EntryFor: s.EntryFor, Items: s.Items,
		CreatedAt: order.Instant(s.CreatedAt),
	}
	if s.OffersOnly { // a waiting list has a route of its own
		v.EntriesSaleID = s.EntriesID
	}
	if s.Waitlist {
		v.Waiting = &s.Waiting
	}
	return json.Marshal(v)
}

// UnmarshalJSON reads what MarshalJSON writes. All else of the sale is zero.
func (s *CountedSale) UnmarshalJSON(text []byte) error {
	var v saleView
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	var items []reservation.Item
	for _, item := range v.Items {
		items = append(items, item.Item)
	}
	*s = CountedSale{
		Sale: reservation.Sale{
			ID: v.ID, Terms: v.Terms(items), OffersOnly: v.OffersOnly, EntriesID: v.EntriesSaleID,
			WaitlistClosed: v.WaitlistClosed, EntryFor: v.EntryFor, CreatedAt: time.Time(v.CreatedAt),
		},
		State: v.State, Available: v.Available, Held: v.Held, Sold: v.Sold, Items: v.Items,
	}
	if v.Waiting != nil {
		s.Waiting = *v.Waiting
	}
	return nil
}

// CountResult is a sale with the count of its units, or with an error if they cannot be counted now.
type CountResult struct {
	CountedSale
	Err error
}

// reader reads sales in Postgres, and counts their units in Redis.
type reader struct{ stores }

// Show returns a sale with the count of its units, or ErrSaleNotFound. Until a required rebuild is
// done the error is ErrUnavailable.
func (c *reader) Show(ctx context.Context, id uuid.UUID) (CountedSale, error) {
	counted, err := c.CountSales(ctx, []uuid.UUID{id})
	switch {
	case err != nil:
		return CountedSale{}, err
	case len(counted) == 0:
		return CountedSale{}, reservation.ErrSaleNotFound
	}
	return counted[0].CountedSale, counted[0].Err
}

// List returns at most limit sales, newest first, and only those older than after unless that is
// uuid.Nil. The sales in which people wait for units of others are left out. If one of them requires
// a rebuild the error is ErrUnavailable.
func (c *reader) List(ctx context.Context, after uuid.UUID, limit int) ([]CountedSale, error) {
	counted, err := c.CountPage(ctx, after, limit)
	if err != nil {
		return nil, err
	}
	sales := make([]CountedSale, len(counted))
	for i, s := range counted {
		if s.Err != nil {
			return nil, s.Err
		}
		sales[i] = s.CountedSale
	}
	return sales, nil
}

// Followed returns the ids of the sales of ReadFollowed.
func (c *reader) Followed(ctx context.Context, active []uuid.UUID, limit int) ([]uuid.UUID, error) {
	page, err := c.ReadFollowed(ctx, active, limit)
	ids := make([]uuid.UUID, len(page.sales))
	for i, s := range page.sales {
		ids[i] = s.ID
	}
	return ids, err
}

// CountSales returns the sales that exist, in no particular order. Its error wraps
// ErrUnavailable, and so does that of a single sale that requires a rebuild.
func (c *reader) CountSales(ctx context.Context, ids []uuid.UUID) ([]CountResult, error) {
	return c.countFound(ctx, ids, uuid.Nil, len(ids))
}

// CountFollowed counts the units of the sales of ReadFollowed, in no particular order, as CountSales does.
func (c *reader) CountFollowed(ctx context.Context, limit int) ([]CountResult, error) {
	ids, err := c.Followed(ctx, nil, limit)
	if err != nil {
		return nil, err
	}
	return c.CountSales(ctx, ids)
}

// CountPage is List with an error for each sale.
func (c *reader) CountPage(ctx context.Context, after uuid.UUID, limit int) ([]CountResult, error) {
	return c.countFound(ctx, nil, after, limit)
}

func (c *reader) countFound(ctx context.Context, ids []uuid.UUID, after uuid.UUID, limit int) ([]CountResult, error) {
	found, err := findSales(ctx, c.Pool, ids, zeronull.UUID(after), limit, true)
	if err != nil {
		return nil, fmt.Errorf("%w: find sales: %w", reservation.ErrUnavailable, err)
	}
	counted, err := c.count(ctx, found)
	if err != nil {
		return nil, fmt.Errorf("%w: count sales: %w", reservation.ErrUnavailable, err)
	}
	return counted, nil
}

// storedSale is a sale with its figures from Postgres.
type storedSale struct {
	reservation.Sale
	publishedRevision int64
	final             int64   // units of orders that are final, if they were counted
	itemsSold         []int64 // of each item, also of orders that are not final
	waiting           int64   // in its waiting list, if units were counted
	retired, archived bool
}

// findSale reads the definition of the sale with this id, if there is one.
func findSale(ctx context.Context, q pg.Querier, id uuid.UUID) ([]storedSale, error) {
	return findSales(ctx, q, []uuid.UUID{id}, zeronull.UUID{}, 1, false)
}

// findSales reads sales, newest first: those with these ids, or all if ids is nil, and only those
// older than after, or all if that is zero. With counted it counts their final units as well.
func findSales(
	ctx context.Context, q pg.Querier, ids []uuid.UUID, after zeronull.UUID, limit int, counted bool,
) ([]storedSale, error) {
	rows, err := q.Query(ctx, sql.CatalogFindSales, ids, after, limit, counted)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, storedRow)
}

func storedRow(row pgx.CollectableRow) (storedSale, error) {
	r, err := pgx.RowToStructByName[struct {
		reservation.SaleRow
		Sold, PublishedRevision, Final int64
		ItemsSold                      []int64
		Waiting                        zeronull.Int8
		Retired, Archived              bool
	}](row)
	s := storedSale{
		Sale: r.Sale(), publishedRevision: r.PublishedRevision, final: r.Final, retired: r.Retired, archived: r.Archived,
	}
	s.Sold, s.itemsSold, s.waiting = r.Sold, r.ItemsSold, int64(r.Waiting)
	return s, err
}

// count asks Redis how many units of each sale are unreserved. Redis is asked after Postgres, so a
// unit in transit counts as held, and never twice. Units on their way between two shards are available.
//
// If Redis lacks a shard of a published sale, or it is closed for a rebuild, the held units are unknown
// and the sale gets an error, unless it has ended. So does a sale whose master of a cluster does not answer. If
// that is true of all published sales, the call fails.
func (c *reader) count(ctx context.Context, sales []storedSale) ([]CountResult, error) {
	asked := make([][]reservation.ShardAnswer, len(sales))
	pipe := c.Store.Redis.Pipeline()
	for i, s := range sales {
		names := []string{"stock", "left", "epoch"}
		if len(s.Items) > 0 { // what is left of each, with what is on its way
			names = append(names, s.Layout().Moves()...)
		}
		for shard := range s.Shards {
			asked[i] = append(asked[i], c.Store.Keys.AskShard(ctx, pipe, s.Layout().Partition(shard), s.ID, len(s.Items),
				names...))
		}
	}
	_, failed := pipe.Exec(ctx)
	now := time.Now()
	published, unanswered := 0, 0
	counted := make([]CountResult, len(sales))
	for i, s := range sales {
		sale := &counted[i].CountedSale
		*sale = CountedSale{
			Sale: s.Sale, State: s.StateAt(now), Sold: s.final, Waiting: s.waiting, Retired: s.retired, Archived: s.archived,
		}
		units, whole, err := countUnits(asked[i], len(s.Items))
		if s.publishedRevision > 0 { // else it is not in Redis
			published++
			if err != nil {
				unanswered++
				counted[i].Err = fmt.Errorf("count sale=%s: %w: %w", s.ID, reservation.ErrUnavailable, err)
				continue
			}
		}
		switch {
		case whole:
			sale.Held = max(0, units.taken-s.final)
		case s.publishedRevision > 0 && sale.State == reservation.StateEnded:
			// Its keys may have been deleted to free memory. An ended sale sells nothing more, so
			// Postgres has all of it.
			sale.Held = s.Sale.Sold - s.final
		case s.publishedRevision > 0:
			counted[i].Err = fmt.Errorf("count sale=%s: %w", s.ID, reservation.ErrLostSale)
		}
		sale.Available = s.Stock - sale.Held - s.final
		sale.Items = countItems(s, units, whole)
	}
	if published > 0 && unanswered == published {
		return nil, failed
	}
	return counted, nil
}

// countItems returns the items with what is left of each in Redis, if all shards are whole. A retired sale has no item
// there.
func countItems(s storedSale, units countedUnits, whole bool) (counted []CountedItem) {
	for item, terms := range s.Sale.Items {
		left := terms.Stock
		if item < len(s.itemsSold) {
			left -= s.itemsSold[item]
		}
		if whole && !units.unknown {
			left = units.left[item]
		}
		counted = append(counted, CountedItem{terms, left})
	}
	return counted
}

// countedUnits are the units that are reserved in all shards of a sale, and what is left of each item there, unless
// that is unknown.
type countedUnits struct {
	taken   int64
	left    []int64
	unknown bool
}

// countUnits counts the units in all shards, and on their way between two. It is not whole if a shard is missing or
// closed. The error is that of the first shard whose server did not answer.
func countUnits(shards []reservation.ShardAnswer, items int) (units countedUnits, whole bool, err error) {
	whole, units.left = true, make([]int64, items)
	for _, answer := range shards {
		shard, err := answer.Hash()
		if err != nil {
			return countedUnits{}, false, err
		}
		if whole = whole && shard.IsOpen(); !whole {
			continue
		}
		units.taken += shard.Stock - shard.Left
		for item := range units.left {
			given, got := shard.Moved(item)
			units.left[item] += shard.Items[item].Left + given - got
			units.unknown = units.unknown || shard.Items[item].Left < 0
		}
	}
	return units, whole, nil
}

// CountedSale is a sale with the count of its units. Invariant: Available + Held + Sold = Stock.
type CountedSale struct {
	reservation.Sale
	// State is Sale.StateAt at the time of the query.
	State reservation.State
	// Available is the number of unreserved units.
	Available int64
	// Items are those of the sale with what is left of each.
	Items []CountedItem
	// Held is the number of units of orders that are accepted and not final.
	Held int64
	// Sold is the number of units of final orders.
	Sold int64
	// Waiting is how many wait in the waiting list, of those that are in Postgres; 0 if the sale has ended.
	Waiting int64
	// Retired is true if Redis has no buyers of the sale any more: Postgres has all of it.
	Retired bool
	// Archived is true if the orders of the sale are no longer in Postgres.
	Archived bool
}

// CountedItem is an item of a sale with its unreserved units.
type CountedItem struct {
	reservation.Item
	Available int64 `json:"available"`
}

// Page holds sales as Postgres had them. It is never changed.
type Page struct{ sales []storedSale }

// ReadFollowed returns the sales to follow if there are more than limit: those whose orders change, wait to be paid or
// have open payments, and those that the caller knows to be active; then open, paused, scheduled and ended ones, each
// the newest first. It costs the same however many orders there are: CountFollowed sums all paid orders of sales with a
// payment window. The error wraps ErrUnavailable.
func (c *reader) ReadFollowed(ctx context.Context, active []uuid.UUID, limit int) (Page, error) {
	rows, _ := c.Pool.Query(ctx, sql.CatalogFollowedSales, limit, active) // its error comes with the rows
	found, err := pgx.CollectRows(rows, storedRow)
	if err != nil {
		return Page{}, fmt.Errorf("%w: find the sales to follow: %w", reservation.ErrUnavailable, err)
	}
	return Page{found}, nil
}

// Sales returns the sales of the page without the count of their units.
func (p Page) Sales() []CountedSale {
	now := time.Now()
	sales := make([]CountedSale, len(p.sales))
	for i, s := range p.sales {
		sales[i] = CountedSale{Sale: s.Sale, State: s.StateAt(now), Retired: s.retired, Archived: s.archived}
	}
	return sales
}

// AwaitsPayment is true for a sale whose orders are final only when they are paid, and whose paid units the caller of
// CountPageOf has to know.
func (s CountedSale) AwaitsPayment() bool { return s.PaymentWindow > 0 && !s.Archived }

// CountPageOf asks Redis for the units of the sales of a page, and returns them in its order. Paid are the paid
// units of the sales that await payments, as of before the call. Postgres is not asked. The error wraps
// ErrUnavailable, and so does that of a single sale that requires a rebuild.
func (c *reader) CountPageOf(ctx context.Context, p Page, paid map[uuid.UUID]int64) ([]CountResult, error) {
	sales := make([]storedSale, len(p.sales))
	for i, s := range p.sales {
		s.final = s.Sold
		if (CountedSale{Sale: s.Sale, Archived: s.archived}).AwaitsPayment() {
			s.final = paid[s.ID]
		}
		sales[i] = s
	}
	if len(sales) == 0 {
		return nil, nil
	}
	counted, err := c.count(ctx, sales)
	if err != nil {
		return nil, fmt.Errorf("%w: count sales: %w", reservation.ErrUnavailable, err)
	}
	return counted, nil
}

// SaleFilter selects sales. Zero members select all.
type SaleFilter struct {
	// Name is a part of the name, in any case.
	Name string
	// State is scheduled, open, paused or ended.
	State reservation.State
}

// FoundSale is what Postgres says of a sale that was searched.
type FoundSale struct {
	ID   uuid.UUID
	Name string
	// State is the one for a buyer.
	State reservation.State
}

// searchMax bounds the sales that a search looks at: no index has them by a part of their names.
const searchMax = 5000

// Search returns at most limit sales that match, newest first, and only those older than after unless that is uuid.Nil.
// next is where the next page begins, or uuid.Nil at the end: a page may be short, or empty, and not be the last.
func (c *reader) Search(
	ctx context.Context, f SaleFilter, after uuid.UUID, limit int,
) (sales []FoundSale, next uuid.UUID, err error) {
	look := limit + 1
	if f != (SaleFilter{}) {
		look = max(searchMax, look)
	}
	rows, _ := c.Pool.Query(ctx, sql.CatalogSearchSales, f.Name, zeronull.Text(f.State), zeronull.UUID(after), look,
		limit+1) // rows carry the error
	type scannedRow struct {
		FoundSale
		Matches bool
		N       int
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[scannedRow])
	if err != nil {
		return nil, uuid.Nil, fmt.Errorf("%w: search sales: %w", reservation.ErrUnavailable, err)
	}
	page, last := pg.ScannedPage(all, limit, look, func(row *scannedRow) (int, bool) { return row.N, row.Matches })
	for i := range page {
		sales = append(sales, page[i].FoundSale)
	}
	if last != nil {
		next = last.ID
	}
	return sales, next, nil
}
