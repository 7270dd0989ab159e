package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// This file lists orders, and shows one with its log.

// scanMax bounds the orders that a page with a status looks at: no index has the orders of a sale by status. A page may
// therefore be short, or empty, and not be the last.
const scanMax = 5000

// placedRow is an order as the ledger's queries return it to operators.
type placedRow struct {
	orderRow
	Sequence, Epoch int64
}

func (r *placedRow) placed() order.Placed {
	return order.Placed{Order: r.order(), Sequence: r.Sequence, Epoch: r.Epoch}
}

func scanPlaced(row pgx.CollectableRow) (order.Placed, error) {
	r, err := pgx.RowToStructByName[placedRow](row)
	return r.placed(), err
}

// ListOrders returns at most limit orders from Postgres that match, newest first, older than the order before unless
// that is uuid.Nil. next is where the next page begins, or uuid.Nil at the end. It returns order.ErrTooWide for a
// filter without a user and a sale, which would read all orders.
func (l *Reader) ListOrders(
	ctx context.Context, filter order.Filter, before uuid.UUID, limit int,
) (orders []order.Placed, next uuid.UUID, err error) {
	query, args := sql.LedgerListOfUser, []any{filter.User}
	switch {
	case filter.User == "" && filter.Sale == uuid.Nil:
		return nil, uuid.Nil, order.ErrTooWide
	case filter.User == "":
		query, args = sql.LedgerListOfSale, []any{filter.Sale}
	case filter.Sale != uuid.Nil:
		query = sql.LedgerListOfUserInSale
	}
	scan := scanned(filter, limit)
	args = append(args, zeronull.UUID(before), scan, limit+1, zeronull.Text(filter.Status))
	if query == sql.LedgerListOfUserInSale {
		args = append(args, filter.Sale)
	}
	rows, _ := l.pool.Query(ctx, query, args...) // rows carry the error
	orders, last, err := collectPage(rows, filter, limit, scan)
	if err != nil {
		return nil, uuid.Nil, fmt.Errorf("list orders of user=%s sale=%s: %w", filter.User, filter.Sale, err)
	}
	return orders, last.ID, nil
}

// ListByPrefix returns at most limit orders from Postgres of the users whose ids begin with the user of the filter: by
// user, in the order of bytes, and of each user the newest first. They come after the order last, unless that is zero.
// next is the last order of the page, zero at the end.
func (l *Reader) ListByPrefix(
	ctx context.Context, filter order.Filter, last order.Order, limit int,
) (orders []order.Placed, next order.Order, err error) {
	if filter.User == "" {
		return nil, next, order.ErrTooWide
	}
	// Postgres plans each page for its parameters: a sale has orders in one month.
	scan := scanned(filter, limit)
	rows, _ := l.pool.Query(ctx, sql.LedgerListOfPrefix, pgx.QueryExecModeCacheDescribe, max(filter.User, last.UserID),
		filter.User+string(utf8.MaxRune), zeronull.UUID(last.ID), scan, limit+1, zeronull.Text(filter.Status),
		zeronull.UUID(filter.Sale)) // rows carry the error
	orders, end, err := collectPage(rows, filter, limit, scan)
	if err != nil {
		return nil, next, fmt.Errorf("list orders of users that begin with %s: %w", filter.User, err)
	}
	return orders, end.Order, nil
}

// scanned is how many orders a page looks at: one more than it shows tells whether there is a next page.
func scanned(filter order.Filter, limit int) int {
	if filter.Status != "" {
		return max(scanMax, limit+1)
	}
	return limit + 1
}

// collectPage reads a page, and the order after which the next one begins, which is zero at the end.
func collectPage(
	rows pgx.Rows, filter order.Filter, limit, scan int,
) (orders []order.Placed, last order.Placed, err error) {
	type scannedRow struct {
		placedRow
		N int
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[scannedRow])
	if err != nil {
		return nil, last, err
	}
	page, end := pg.ScannedPage(found, limit, scan, func(row *scannedRow) (int, bool) {
		return row.N, filter.Status == "" || row.Status == filter.Status
	})
	orders = make([]order.Placed, len(page))
	for i := range page {
		orders[i] = page[i].placed()
	}
	if end != nil {
		last = end.placed()
	}
	return orders, last, nil
}

// History returns the order as it is in Postgres, with its log, of one moment. It returns order.ErrNotFound, and
// order.ErrArchived if the orders of its sale were archived.
func (l *Reader) History(ctx context.Context, id uuid.UUID) (order.Placed, []order.Logged, error) {
	known := knownToAll.sales([]uuid.UUID{id})
	for _, group := range known {
		if o, log, err := l.historyIn(ctx, group.sale, id); !errors.Is(err, order.ErrNotFound) {
			return o, log, err
		}
	}
	others, err := findOtherSales(ctx, l.pool, []uuid.UUID{id}, known)
	if err != nil {
		return order.Placed{}, nil, fmt.Errorf("find order %s: %w", id, err)
	}
	for _, group := range others {
		o, log, err := l.historyIn(ctx, group.sale, id)
		if err == nil {
			knownToAll.add(group.sale)
		}
		if !errors.Is(err, order.ErrNotFound) {
			return o, log, err
		}
	}
	return order.Placed{}, nil, l.missing(ctx, id)
}

func (l *Reader) historyIn(ctx context.Context, sale, id uuid.UUID) (order.Placed, []order.Logged, error) {
	rows, _ := l.pool.Query(ctx, sql.LedgerFindHistory, sale, id) // rows carry the error
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[struct {
		placedRow
		EventVersion int
		EventType    order.EventType
		EventAt      time.Time
		EventData    []byte
	}])
	switch {
	case err != nil:
		return order.Placed{}, nil, fmt.Errorf("find order %s: %w", id, err)
	case len(found) == 0:
		return order.Placed{}, nil, order.ErrNotFound
	}
	var log []order.Logged
	for _, row := range found {
		if row.EventVersion > 0 {
			log = append(log, order.Logged{
				Version: row.EventVersion, Type: row.EventType, OccurredAt: row.EventAt.UTC(), Data: row.EventData,
			})
		}
	}
	return found[0].placed(), log, nil
}

// missing returns why no table has the order: order.ErrArchived if its sale may be one whose orders were archived, else
// order.ErrNotFound.
func (l *Reader) missing(ctx context.Context, id uuid.UUID) error {
	err := l.pool.QueryRow(ctx, sql.LedgerArchivedSale, id).Scan(new(uuid.UUID))
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("order %s: %w", id, order.ErrNotFound)
	case err != nil:
		return fmt.Errorf("find order %s: %w", id, err)
	}
	return fmt.Errorf("order %s: %w", id, order.ErrArchived)
}

// exportPage is how many orders one query of Export reads.
const exportPage = 2000

// Span bounds the orders of an export; zero values bound nothing.
type Span struct {
	// Since and Until: reserved from Since to before Until.
	Since, Until time.Time
	// ChangedAfter and ChangedTo: changed by an event after the one position, and up to the other, which has to be
	// settled: no open transaction may have one up to it. ChangedTo is zero for orders that never changed, too.
	ChangedAfter, ChangedTo int64
}

// Export calls each with every order that matches: changed ones once, in the order of their last changes, else those
// of a user newest first, and all others sale by sale, in the order in which they were made. It reads page by page, so
// it needs little memory, waits for a slow reader, and keeps no transaction open: each order is as it was when its page
// was read.
func (l *Reader) Export(ctx context.Context, filter order.Filter, span Span, each func(order.Placed) error) error {
	next := l.exportAll(filter, span)
	switch {
	case span.ChangedTo > 0:
		next = l.exportChanged(filter, span)
	case filter.User != "":
		next = l.exportUser(filter, span)
	}
	for {
		page, more, err := next(ctx)
		if err != nil {
			return fmt.Errorf("export orders: %w", err)
		}
		for _, o := range page {
			if err := each(o); err != nil {
				return err
			}
		}
		if !more {
			return nil
		}
	}
}

// nextPage returns the next page of an export, and whether others may follow.
type nextPage func(context.Context) (page []order.Placed, more bool, err error)

// exportAll reads sale by sale, so that each query reads one month in the order of its key.
func (l *Reader) exportAll(filter order.Filter, span Span) nextPage {
	sale, after := filter.Sale, uuid.Nil
	nextSale := func(ctx context.Context) error {
		err := l.pool.QueryRow(ctx, sql.LedgerNextSale, sale).Scan(&sale)
		after = uuid.Nil
		return err
	}
	return func(ctx context.Context) ([]order.Placed, bool, error) {
		if sale == uuid.Nil {
			if err := nextSale(ctx); errors.Is(err, pgx.ErrNoRows) {
				return nil, false, nil
			} else if err != nil {
				return nil, false, err
			}
		}
		// Postgres plans each page for its parameters: a plan for all pages may sort the orders of the sale for each of them.
		// The rows carry the error.
		rows, _ := l.pool.Query(ctx, sql.LedgerExportOrders, pgx.QueryExecModeCacheDescribe, sale, after, exportPage,
			zeronull.Text(filter.Status), zeronull.Timestamptz(span.Since), zeronull.Timestamptz(span.Until))
		page, err := pgx.CollectRows(rows, scanPlaced)
		switch {
		case err != nil:
			return nil, false, err
		case len(page) == exportPage:
			after = page[len(page)-1].ID
			return page, true, nil
		case filter.Sale != uuid.Nil:
			return page, false, nil
		}
		err = nextSale(ctx)
		if errors.Is(err, pgx.ErrNoRows) {
			return page, false, nil
		}
		return page, err == nil, err
	}
}

// exportUser uses the indexes of a user's orders, which are few.
func (l *Reader) exportUser(filter order.Filter, span Span) nextPage {
	before := uuid.Nil
	return func(ctx context.Context) (page []order.Placed, more bool, err error) {
		page, before, err = l.ListOrders(ctx, filter, before, exportPage)
		page = slices.DeleteFunc(page, func(o order.Placed) bool {
			at := o.ReservedAt
			return at.Before(span.Since) || !span.Until.IsZero() && !at.Before(span.Until)
		})
		return page, before != uuid.Nil, err
	}
}

// exportChanged reads exportPage events at a time.
func (l *Reader) exportChanged(filter order.Filter, span Span) nextPage {
	after := span.ChangedAfter
	return func(ctx context.Context) (page []order.Placed, more bool, err error) {
		to := span.ChangedTo
		err = l.pool.QueryRow(ctx, sql.LedgerChangesPage, after, to, exportPage-1).Scan(&to)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return nil, false, err
		}
		rows, _ := l.pool.Query(ctx, sql.LedgerExportChanges, pgx.QueryExecModeCacheDescribe, after, to, span.ChangedTo,
			zeronull.UUID(filter.Sale), zeronull.Text(filter.User), zeronull.Text(filter.Status),
			zeronull.Timestamptz(span.Since), zeronull.Timestamptz(span.Until)) // rows carry the error
		page, err = pgx.CollectRows(rows, scanPlaced)
		after = to
		return page, err == nil && after < span.ChangedTo, err
	}
}
