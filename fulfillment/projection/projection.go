package projection

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/fulfillment/ledger"
	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/reservation/order"
	"stampede/sql"
)

var (
	// ErrRunning is returned while another process rebuilds the projections of the same database.
	ErrRunning = errors.New("another process is rebuilding the projections")
	// ErrDamagedLog is returned when order_events holds an impossible history, from which nothing can be rebuilt.
	ErrDamagedLog = errors.New("the log of orders is damaged")
)

// Report is the result of a rebuild of the projections.
type Report struct {
	// Orders counts the orders in the log, and Replaced the rows that differed from it.
	Orders   int64 `json:"orders"`
	Replaced int64 `json:"replaced"`
	// Recounted holds the sales whose counters were wrong.
	Recounted []Recount `json:"recounted"`
	// Took is the duration of the rebuild.
	Took time.Duration `json:"took_ns"`
}

// Recount is a sale whose counter was corrected.
type Recount struct {
	Sale uuid.UUID `json:"sale_id"`
	// Was and Is are sales.sold before and after.
	Was int64 `json:"was"`
	Is  int64 `json:"is"`
}

// Rebuild makes the rows of orders and the counters of sales those of order_events, month by month, while orders are
// recorded, paid and cancelled. A row is written in the transaction of its event, so in one snapshot only wrong rows
// differ from the log. Only these are locked and replaced, in one transaction for each month. Archived months have no
// tables and are left out.
//
// It needs one connection of the pool. The error may be ErrRunning, and wrap ErrDamagedLog: then no row is changed.
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
		progress.Step(ctx, "checking the log")
		progress.At(ctx, int64(i), int64(len(months)), "months")
		if err := p.checkLog(ctx, p.conn, m); err != nil {
			return err
		}
	}
	for i, m := range months {
		progress.Step(ctx, "comparing orders with the log")
		progress.At(ctx, int64(i), int64(len(months)), "months")
		err := pg.InTransaction(ctx, p.conn, pgx.TxOptions{}, func(tx pgx.Tx) error {
			return p.replaceWrong(ctx, tx, m)
		})
		if err != nil {
			return err
		}
	}
	progress.Step(ctx, "counting what is sold")
	p.report.Recounted, err = RecountSales(ctx, p.conn, nil, nil)
	return err
}

// replaceWrong replaces the rows of a month that differ from the log.
func (p *projector) replaceWrong(ctx context.Context, tx pgx.Tx, m month) error {
	compare := strings.Replace(sql.ProjectionCompare, "{{replay}}", sql.ProjectionReplay, 1)
	wrong, err := tx.Exec(ctx, compare, m.First, m.Until)
	if err != nil || wrong.RowsAffected() == 0 {
		return err
	}
	if _, err := tx.Exec(ctx, sql.ProjectionWithdraw, m.First, m.Until); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.ProjectionsWithdrawn)
	replace := strings.Replace(sql.ProjectionReplace, "{{replay}}", sql.ProjectionReplay, 1)
	if _, err := tx.Exec(ctx, replace, m.First, m.Until); err != nil {
		return fmt.Errorf("replace %d orders: %w", wrong.RowsAffected(), err)
	}
	crashpoint.Hit(crashpoint.ProjectionsReplaced)
	if _, err := tx.Exec(ctx, "TRUNCATE wrong_orders"); err != nil {
		return err
	}
	p.report.Replaced += wrong.RowsAffected()
	return nil
}

// RebuildSale is Rebuild for one sale, in a transaction that has locked it.
func RebuildSale(ctx context.Context, tx pgx.Tx, sale uuid.UUID) (replaced int64, err error) {
	var p projector
	if err := pg.Run(ctx, tx.Conn(), sql.ProjectionTable); err != nil {
		return 0, err
	}
	only := month{First: sale, Until: after(sale)}
	if err := p.checkLog(ctx, tx, only); err != nil {
		return 0, err
	}
	if err := p.replaceWrong(ctx, tx, only); err != nil {
		return 0, err
	}
	err = tx.QueryRow(ctx, sql.ProjectionRecount, sale, 0).Scan(new(int64), new(int64))
	if errors.Is(err, pgx.ErrNoRows) { // the counter was right
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

// damagedShown bounds how many impossible histories are named; the rest is counted.
const damagedShown = 10

// checkLog checks the history of every order of the month against the transitions of order/transition.go, and counts
// the orders.
func (p *projector) checkLog(ctx context.Context, on pg.Querier, m month) error {
	rows, _ := on.Query(ctx, sql.ProjectionHistories, m.First, m.Until) // its error comes with the rows
	var (
		types   []order.EventType
		whole   bool
		orders  int64
		example uuid.UUID
		damaged []string
		total   int64
	)
	_, err := pgx.ForEachRow(rows, []any{&types, &whole, &orders, &example}, func() error {
		p.report.Orders += orders
		if whole && IsPossible(types) {
			return nil
		}
		if total += orders; len(damaged) < damagedShown {
			damaged = append(damaged, fmt.Sprintf("order %s (%d like it) has %v", example, orders, types))
		}
		return nil
	})
	if err == nil && total > 0 {
		err = fmt.Errorf("%w: %d orders: %s", ErrDamagedLog, total, strings.Join(damaged, "; "))
	}
	return err
}

// IsPossible reports whether an order can have this history. Its first event is the outcome of its reservation.
func IsPossible(types []order.EventType) bool {
	status := order.StatusReserved
	for _, event := range types {
		var ok bool
		if status, ok = status.After(event); !ok {
			return false
		}
	}
	return true
}

// RecountSales corrects the wrong counters of the sale, or of all if it is nil. It calls note for each correction,
// unless note is nil. Correct sales are not locked.
func RecountSales(
	ctx context.Context, on pg.Transactor, sale *uuid.UUID, note func(pgx.Tx, Recount) error,
) ([]Recount, error) {
	type miscounted struct {
		Sale         uuid.UUID
		LastSequence int64
	}
	rows, _ := on.Query(ctx, sql.ProjectionMiscounted, sale) // its error comes with the rows
	wrong, err := pgx.CollectRows(rows, pgx.RowToStructByPos[miscounted])
	if err != nil {
		return nil, fmt.Errorf("count: %w", err)
	}
	recounted := []Recount{}
	var failed []error
	for _, m := range wrong {
		count := Recount{Sale: m.Sale}
		err := pg.InTransaction(ctx, on, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, sql.CatalogLockSale, m.Sale); err != nil {
				return err
			}
			err := tx.QueryRow(ctx, sql.ProjectionRecount, m.Sale, m.LastSequence).Scan(&count.Was, &count.Is)
			if err == nil && note != nil {
				err = note(tx, count)
			}
			return err
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows): // corrected meanwhile
		case err != nil:
			failed = append(failed, fmt.Errorf("recount sale=%s: %w", m.Sale, ledger.TranslateError(err)))
		default:
			recounted = append(recounted, count)
		}
	}
	return recounted, errors.Join(failed...)
}
