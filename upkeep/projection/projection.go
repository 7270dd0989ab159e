// Package projection rebuilds the orders and the counters of sales from the log of events in
// Postgres, beside those in use, and swaps them in while sales continue.
package projection

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/crashpoint"
	"stampede/internal/format"
	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/sql"
)

var (
	// ErrRunning is returned while another process rebuilds the projections of the same database.
	ErrRunning = errors.New("another process is rebuilding the projections")
	// ErrDamagedLog is returned for sales of which order_events holds an impossible history.
	ErrDamagedLog = errors.New("the log of orders is damaged")
)

// Report is the result of a rebuild of the projections.
type Report struct {
	// Orders counts the orders in the log, and Replaced the rows that differed from it.
	Orders   int64 `json:"orders"`
	Replaced int64 `json:"replaced"`
	// Recounted holds the sales whose counters were wrong.
	Recounted []Recount `json:"recounted"`
	// Damaged holds the sales whose rows stay as they are, because no rows follow from their log.
	Damaged []Damage `json:"damaged,omitempty"`
	// Took is the duration of the rebuild.
	Took time.Duration `json:"took_ns"`
}

// Recount is a sale whose counters were corrected.
type Recount struct {
	Sale uuid.UUID `json:"sale_id"`
	// Was and Is are sales.sold before and after, LastWas and LastIs sales.last_sequence.
	Was     int64 `json:"was"`
	Is      int64 `json:"is"`
	LastWas int64 `json:"last_sequence_was"`
	LastIs  int64 `json:"last_sequence_is"`
}

// Damage is a sale whose log is damaged.
type Damage struct {
	Sale uuid.UUID `json:"sale_id"`
	// Orders counts the orders with a damaged log.
	Orders int64 `json:"orders"`
	// Example is one of them, and what is wrong with it.
	Example string `json:"example"`
}

// Rebuild makes the rows of orders and the counters of sales those of order_events, month by month, while orders are
// recorded, paid and cancelled. A row is written in the transaction of its event, so in one snapshot only wrong rows
// differ from the log. Only these are locked and replaced, in one transaction for each sale. Archived months have no
// tables and are left out.
//
// It needs one connection of the pool. The error may be ErrRunning. It wraps ErrDamagedLog if the log of some sales is
// damaged: their rows stay as they are, all others are rebuilt.
func Rebuild(ctx context.Context, pool *pgxpool.Pool) (Report, error) {
	began := time.Now()
	var p projector
	err := p.run(ctx, pool)
	p.report.Took = time.Since(began)
	if err != nil {
		return p.report, fmt.Errorf("rebuild the projections: %w", err)
	}
	return p.report, nil
}

// projector is one rebuild.
type projector struct {
	conn   pg.Session
	report Report
}

// month is a part of the tables orders and order_events: the sales from First to before Until.
type month struct{ First, Until uuid.UUID }

// only is the part with one sale.
func only(sale uuid.UUID) month { return month{First: sale, Until: after(sale)} }

func (p *projector) run(ctx context.Context, pool *pgxpool.Pool) (err error) {
	p.conn, err = pg.Begin(ctx, pool, pg.ProjectionLock, 0)
	if errors.Is(err, pg.ErrLockHeld) {
		return ErrRunning
	} else if err != nil {
		return err
	}
	defer p.conn.End()
	if err := p.conn.Run(ctx, sql.ProjectionTable); err != nil {
		return err
	}
	rows, _ := p.conn.Query(ctx, sql.ProjectionMonths) // its error comes with the rows
	months, err := pgx.CollectRows(rows, pgx.RowToStructByName[month])
	if err != nil {
		return err
	}
	for i, m := range months {
		progress.Step(ctx, "comparing orders with the log")
		progress.At(ctx, int64(i), int64(len(months)), "months")
		if err := p.rebuildMonth(ctx, m); err != nil {
			return err
		}
	}
	progress.Step(ctx, "counting what is sold")
	var damaged []uuid.UUID
	for _, d := range p.report.Damaged {
		damaged = append(damaged, d.Sale)
	}
	p.report.Recounted, err = RecountSales(ctx, p.conn, nil, damaged, nil)
	return errors.Join(p.report.damage(), err)
}

// rebuildMonth replaces the wrong rows of a month, sale by sale.
func (p *projector) rebuildMonth(ctx context.Context, m month) error {
	var orders int64
	if err := p.conn.QueryRow(ctx, sql.ProjectionOrders, m.First, m.Until).Scan(&orders); err != nil {
		return err
	}
	p.report.Orders += orders
	wrong, err := findWrong(ctx, p.conn, m)
	if err != nil {
		return err
	}
	for _, w := range wrong {
		if p.report.noteDamage(w) {
			continue
		}
		err := pg.InTransaction(ctx, p.conn, pgx.TxOptions{}, func(tx pgx.Tx) error { return replaceWrong(ctx, tx, w) })
		switch {
		case err == nil:
			p.report.Replaced += w.Orders
		case ledger.FaultOf(err) == ledger.BadData: // such as two live orders of one user
			p.report.Damaged = append(p.report.Damaged, Damage{w.SaleID, w.Orders, err.Error()})
		default:
			return err
		}
	}
	_, err = p.conn.Exec(ctx, "TRUNCATE wrong_orders")
	return err
}

// wrongSale is a sale with orders that differ from the log: Damaged of them have a damaged one.
type wrongSale struct {
	SaleID          uuid.UUID
	Orders, Damaged int64
	Example         zeronull.Text
}

// findWrong notes the orders that differ from the log.
func findWrong(ctx context.Context, on pg.Querier, m month) ([]wrongSale, error) {
	const ofMonth = "sale_id >= $1 AND sale_id < $2"
	compare := strings.Replace(sql.ProjectionCompare, "{{differences}}", Differences(ofMonth), 1)
	noted, _ := on.Query(ctx, compare, m.First, m.Until) // its error comes with the rows
	if noted.Close(); noted.Err() != nil {
		return nil, fmt.Errorf("compare orders with the log: %w", noted.Err())
	}
	rows, _ := on.Query(ctx, sql.ProjectionWrongSales) // its error comes with the rows
	return pgx.CollectRows(rows, pgx.RowToStructByName[wrongSale])
}

// replaceWrong replaces the noted rows of a sale, whose log is not damaged.
func replaceWrong(ctx context.Context, tx pgx.Tx, w wrongSale) error {
	m := only(w.SaleID)
	if _, err := tx.Exec(ctx, sql.ProjectionWithdraw, m.First, m.Until); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.ProjectionsWithdrawn)
	replace := strings.Replace(sql.ProjectionReplace, "{{replay}}",
		Replayed("order_events WHERE sale_id >= $1 AND sale_id < $2"), 1)
	if _, err := tx.Exec(ctx, replace, m.First, m.Until); err != nil {
		return fmt.Errorf("replace %d orders: %w", w.Orders, err)
	}
	crashpoint.Hit(crashpoint.ProjectionsReplaced)
	return nil
}

// Replayed returns the query for the orders as the log has them, whose events are a table, with a condition of sale_id.
func Replayed(events string) string {
	return strings.NewReplacer("{{events}}", events, "{{histories}}", histories).Replace(sql.ProjectionReplay)
}

// histories are the rows of a VALUES list.
var histories = func() string {
	all := order.Histories()
	var rows []string
	for _, history := range slices.Sorted(maps.Keys(all)) {
		rows = append(rows, fmt.Sprintf("('%s', '%s')", history, all[history]))
	}
	return strings.Join(rows, ", ")
}()

// Differences returns the query for the orders that differ from their log, of the sales that the condition of sale_id
// selects.
func Differences(sales string) string {
	return strings.NewReplacer("{{replay}}", Replayed("order_events WHERE "+sales), "{{sales}}", sales).
		Replace(sql.ProjectionDifferences)
}

// Counted fills a query for the counters that follow from the orders of the sales that the condition of sale_id
// selects.
func Counted(query, sales string) string {
	return strings.Replace(query, "{{counted}}", strings.Replace(sql.ProjectionCounted, "{{sales}}", sales, 1), 1)
}

// RebuildSale is Rebuild for one sale, in a transaction that has locked it.
func RebuildSale(ctx context.Context, tx pgx.Tx, sale uuid.UUID) (replaced int64, err error) {
	var p projector
	if err := pg.Run(ctx, tx.Conn(), sql.ProjectionTable); err != nil {
		return 0, err
	}
	wrong, err := findWrong(ctx, tx, only(sale))
	if err != nil {
		return 0, err
	}
	for _, w := range wrong {
		if p.report.noteDamage(w) {
			break
		}
		if err := replaceWrong(ctx, tx, w); err != nil {
			return 0, err
		}
		p.report.Replaced += w.Orders
	}
	if err := p.report.damage(); err != nil {
		return 0, err
	}
	_, err = recount(ctx, tx, sale)
	if errors.Is(err, pgx.ErrNoRows) { // the counters were right
		err = nil
	}
	return p.report.Replaced, err
}

// after returns the next higher id.
func after(id uuid.UUID) uuid.UUID {
	for i := len(id) - 1; i >= 0; i-- {
		if id[i]++; id[i] != 0 {
			break
		}
	}
	return id
}

// noteDamage notes the sale if its log is damaged, and reports whether it is.
func (r *Report) noteDamage(w wrongSale) bool {
	if w.Damaged > 0 {
		r.Damaged = append(r.Damaged, Damage{w.SaleID, w.Damaged, string(w.Example)})
	}
	return w.Damaged > 0
}

// damagedShown bounds how many sales an error names.
const damagedShown = 10

// damage returns an ErrDamagedLog that names damaged sales, if there are any.
func (r *Report) damage() error {
	if len(r.Damaged) == 0 {
		return nil
	}
	var named []string
	for _, d := range r.Damaged[:min(len(r.Damaged), damagedShown)] {
		named = append(named, fmt.Sprintf("sale %s (%s of its orders): %s", d.Sale, format.Count(d.Orders), d.Example))
	}
	return fmt.Errorf("%w in %d of the sales, whose rows stay as they are until order_events is corrected, for example "+
		"from a backup: %s", ErrDamagedLog, len(r.Damaged), strings.Join(named, "; "))
}

// RecountSales corrects the wrong counters of the sale, or of all but some if it is nil. It calls note for each
// correction, unless note is nil. Correct sales are not locked.
func RecountSales(
	ctx context.Context, on pg.Transactor, sale *uuid.UUID, but []uuid.UUID, note func(pgx.Tx, Recount) error,
) ([]Recount, error) {
	const all = "$1::uuid IS NULL OR sale_id = $1"
	rows, _ := on.Query(ctx, Counted(sql.ProjectionMiscounted, all), sale) // its error comes with the rows
	wrong, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("count: %w", err)
	}
	recounted := []Recount{}
	var failed []error
	for _, id := range wrong {
		if slices.Contains(but, id) {
			continue
		}
		var count Recount
		err := pg.InTransaction(ctx, on, pgx.TxOptions{}, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, sql.CatalogLockItems, id)
			if err == nil {
				_, err = tx.Exec(ctx, sql.CatalogLockSale, id)
			}
			if err == nil {
				count, err = recount(ctx, tx, id)
			}
			if err == nil && note != nil {
				err = note(tx, count)
			}
			return err
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows): // corrected meanwhile
		case err != nil:
			failed = append(failed, fmt.Errorf("recount sale=%s: %w", id, ledger.TranslateError(err)))
		default:
			recounted = append(recounted, count)
		}
	}
	return recounted, errors.Join(failed...)
}

// recount corrects the counters of a sale that the transaction has locked, and those of its items. It returns
// pgx.ErrNoRows if they are right.
func recount(ctx context.Context, tx pgx.Tx, sale uuid.UUID) (Recount, error) {
	r := Recount{Sale: sale}
	items, err := tx.Exec(ctx, sql.ProjectionRecountItems, sale)
	if err != nil {
		return r, err
	}
	err = tx.QueryRow(ctx, Counted(sql.ProjectionRecount, "sale_id = $1"), sale, items.RowsAffected() > 0).
		Scan(&r.Was, &r.Is, &r.LastWas, &r.LastIs)
	return r, err
}
