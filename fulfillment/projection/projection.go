package projection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/fulfillment/ledger"
	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/reservation/order"
	"stampede/sql"
)

var (
	// ErrRunning is returned while another process rebuilds the projections of the same database.
	ErrRunning = errors.New("another process is rebuilding the projections")
	// ErrDamagedLog is returned when order_events holds an impossible history, from which nothing can be rebuilt.
	ErrDamagedLog = errors.New("the log of orders is damaged")
	// ErrTableExtended is returned when the table orders has additions that the new table would lack, for example a view.
	ErrTableExtended = errors.New("the table orders has additions that a new table would lack")
)

const (
	// changesPerTurn bounds the changes of orders that one transaction takes. When at most changesLeft remain, the tables
	// are swapped, which blocks writers of orders.
	changesPerTurn, changesLeft = 10_000, 200
	// turnsMax bounds the turns before the swap.
	turnsMax = 100

	// lockPatienceMin and lockPatienceMax bound the wait for a lock that blocks buyers. The latter is above one second,
	// after which Postgres cancels an autovacuum that holds it.
	lockPatienceMin, lockPatienceMax = 100 * time.Millisecond, 1500 * time.Millisecond
)

// Report is the result of a rebuild of the projections.
type Report struct {
	// Orders counts the rows that first filled the new table, and Changes the changes of orders during the rebuild.
	Orders  int64 `json:"orders"`
	Changes int64 `json:"changes_meanwhile"`
	// Recounted holds the sales whose counters were wrong.
	Recounted []Recount `json:"recounted"`
	// Took is the duration of the rebuild, and Held the time in which orders could not be read or written.
	Took time.Duration `json:"took_ns"`
	Held time.Duration `json:"held_ns"`
}

// Recount is a sale whose counter was corrected.
type Recount struct {
	Sale uuid.UUID `json:"sale_id"`
	// Was and Is are sales.sold before and after.
	Was int64 `json:"was"`
	Is  int64 `json:"is"`
}

// Rebuild rebuilds the table orders and the counters of sales from order_events, while orders are recorded, paid and
// cancelled. The new table is filled beside the old one, catches up with changes, and replaces it in one short
// transaction. A rebuild that is interrupted leaves one complete table; the next one removes the leftovers.
//
// Buyers wait behind its locks, so it waits for a lock only briefly and retries until ctx ends. It needs one connection
// of the pool, and the rights of the tables' owner.
//
// The error may be ErrRunning, and wrap ErrDamagedLog or ErrTableExtended.
func Rebuild(ctx context.Context, pool *pgxpool.Pool, logger *slog.Logger) (Report, error) {
	began := time.Now()
	p := projector{log: logger}
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
	log    *slog.Logger
	report Report
}

func (p *projector) run(ctx context.Context, pool *pgxpool.Pool) (err error) {
	p.conn, err = pg.Begin(ctx, pool, pg.ProjectionLock, 0)
	if errors.Is(err, pg.ErrLockHeld) {
		return ErrRunning
	} else if err != nil {
		return err
	}
	defer p.conn.End()
	if err := p.prepare(ctx); err != nil {
		return err
	}
	if err := p.checkTable(ctx); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			p.cleanUp(ctx)
		}
	}()
	if err := p.underLocks(ctx, "make a new table",
		func(tx pgx.Tx) error { return pg.Run(ctx, tx.Conn(), sql.ProjectionBegin) }); err != nil {
		return err
	}
	if err := p.checkLog(ctx); err != nil {
		return err
	}
	if err := p.underLocks(ctx, "watch orders",
		func(tx pgx.Tx) error { return pg.Run(ctx, tx.Conn(), sql.ProjectionWatch) }); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.ProjectionsWatch)
	if err := p.build(ctx); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.ProjectionsBuilt)
	if err := p.swap(ctx); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.ProjectionsSwapped)
	if err := p.underLocks(ctx, "drop the old table",
		func(tx pgx.Tx) error { return pg.Run(ctx, tx.Conn(), sql.ProjectionEnd) }); err != nil {
		return err
	}
	p.report.Recounted, err = RecountSales(ctx, p.conn, nil, nil)
	return err
}

// cleanUp removes the leftovers if it can quickly. The next rebuild does so as well.
func (p *projector) cleanUp(ctx context.Context) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	err := p.underLocks(ctx, "remove the leftovers",
		func(tx pgx.Tx) error { return pg.Run(ctx, tx.Conn(), sql.ProjectionEnd) })
	if err != nil {
		p.log.Warn(
			"an interrupted rebuild of the projections left tables behind; the next rebuild removes them", "error", err,
		)
	}
}

// prepare readies the session for the rebuild.
func (p *projector) prepare(ctx context.Context) error {
	if err := p.conn.Run(ctx, sql.ProjectionPrepare); err != nil {
		return err
	}
	// The triggers only test whether this lock is free.
	return p.conn.Lock(ctx, pg.ProjectionAliveLock)
}

// checkTable checks that a new table can have everything that the old one has.
func (p *projector) checkTable(ctx context.Context) error {
	found, err := texts(ctx, p.conn, sql.ProjectionObstacles)
	if err == nil && len(found) > 0 {
		err = fmt.Errorf("%w: %s", ErrTableExtended, strings.Join(found, ", "))
	}
	return err
}

// damagedShown bounds how many impossible histories are named; the rest is counted.
const damagedShown = 10

// checkLog checks every order's history against the transitions of order/transition.go.
func (p *projector) checkLog(ctx context.Context) error {
	rows, _ := p.conn.Query(ctx, sql.ProjectionHistories) // its error comes with the rows
	var (
		types   []order.EventType
		whole   bool
		orders  int64
		example uuid.UUID
		damaged []string
		total   int64
	)
	_, err := pgx.ForEachRow(rows, []any{&types, &whole, &orders, &example}, func() error {
		if whole && isPossible(types) {
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

// isPossible reports whether an order can have this history. Its first event is the outcome of its reservation.
func isPossible(types []order.EventType) bool {
	status := order.StatusReserved
	for _, event := range types {
		var ok bool
		if status, ok = status.After(event); !ok {
			return false
		}
	}
	return true
}

// build fills the new table and catches up with changes.
func (p *projector) build(ctx context.Context) error {
	tag, err := p.conn.Exec(ctx, sql.ProjectionFill, nil)
	if err != nil {
		return fmt.Errorf("fill the new table: %w", err)
	}
	p.report.Orders = tag.RowsAffected()
	crashpoint.Hit(crashpoint.ProjectionsFilled)
	statements, err := texts(ctx, p.conn, sql.ProjectionCopyDefinition)
	if err != nil {
		return err
	}
	for _, statement := range append(statements, "ANALYZE orders_next") {
		if _, err := p.conn.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	for range turnsMax {
		taken, err := p.catchUp(ctx)
		if err != nil || taken <= changesLeft {
			return err
		}
	}
	return nil
}

// catchUp rebuilds some orders that have changed, and returns the number of changes.
//
// Changes are taken in their order and read from one snapshot: of two successive live orders of one user, the first
// is never rebuilt after the second, so orders_one_live_per_user always holds.
func (p *projector) catchUp(ctx context.Context) (taken int, err error) {
	err = pgx.BeginTxFunc(ctx, p.conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		taken, err = p.takeChanges(ctx, tx)
		return err
	})
	return taken, err
}

// takeChanges copies the orders of the next changes again, and returns the number of changes.
func (p *projector) takeChanges(ctx context.Context, tx pgx.Tx) (taken int, err error) {
	rows, _ := tx.Query(ctx, sql.ProjectionTakeChanges, changesPerTurn) // its error comes with the rows
	orders, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil || len(orders) == 0 {
		return 0, err
	}
	if _, err := tx.Exec(ctx, sql.ProjectionRemove, orders); err != nil {
		return 0, err
	}
	if _, err := tx.Exec(ctx, sql.ProjectionFill, orders); err != nil {
		return 0, fmt.Errorf("catch up with %d changes: %w", len(orders), err)
	}
	p.report.Changes += int64(len(orders))
	return len(orders), nil
}

// swap replaces the old table with the new one.
//
// The lock on orders suffices: every writer of orders and their events takes it before any row, so no write is
// half done once it is granted. Statements that wait for it, or were prepared before, find the new table by name.
func (p *projector) swap(ctx context.Context) error {
	wanted, err := texts(ctx, p.conn, sql.ProjectionShape)
	if err != nil {
		return err
	}
	return p.underLocks(ctx, "swap the tables", func(tx pgx.Tx) error {
		// A rebuild of Redis reads orders in a snapshot, in which the new table has no rows.
		if err := pg.LockUntilCommit(ctx, tx, pg.RebuildLock); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "LOCK TABLE orders IN ACCESS EXCLUSIVE MODE"); err != nil {
			return err
		}
		began := time.Now()
		for {
			if taken, err := p.takeChanges(ctx, tx); err != nil {
				return err
			} else if taken == 0 {
				break
			}
		}
		renames, err := texts(ctx, tx, sql.ProjectionRename)
		if err != nil {
			return err
		}
		for _, statement := range renames {
			if _, err := tx.Exec(ctx, statement); err != nil {
				return fmt.Errorf("%s: %w", statement, err)
			}
		}
		got, err := texts(ctx, tx, sql.ProjectionShape)
		if err != nil {
			return err
		}
		if missing := differences(wanted, got); len(missing) > 0 {
			return fmt.Errorf("%w: %s", ErrTableExtended, strings.Join(missing, "; "))
		}
		crashpoint.Hit(crashpoint.ProjectionsSwap)
		p.report.Held = time.Since(began)
		return nil
	})
}

// differences lists the texts that only one side has.
func differences(wanted, got []string) (missing []string) {
	for _, text := range wanted {
		if !slices.Contains(got, text) {
			missing = append(missing, "the new table lacks "+text)
		}
	}
	for _, text := range got {
		if !slices.Contains(wanted, text) {
			missing = append(missing, "the old table lacks "+text)
		}
	}
	return missing
}

// underLocks runs a transaction that takes locks behind which all buyers may wait: it waits for them only briefly, and
// retries.
func (p *projector) underLocks(ctx context.Context, doing string, do func(pgx.Tx) error) error {
	outage := retry.Outage{Log: p.log, Doing: doing}
	for patience := lockPatienceMin; ; patience = min(2*patience, lockPatienceMax) {
		err := pgx.BeginTxFunc(ctx, p.conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", patience.Milliseconds())); err != nil {
				return err
			}
			return do(tx)
		})
		if !isLockTaken(err) {
			outage.Over()
			if err != nil {
				return fmt.Errorf("%s: %w", doing, err)
			}
			return nil
		}
		// Let the statements behind this one continue.
		if !retry.Pause(max(outage.Failed(err), 3*patience), ctx.Done()) {
			return ctx.Err()
		}
	}
}

// isLockTaken reports whether the wait for a lock timed out or was ended by the deadlock detector.
func isLockTaken(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "55P03" || pgErr.Code == "40P01")
}

func texts(ctx context.Context, from pg.Querier, query string) ([]string, error) {
	rows, _ := from.Query(ctx, query) // its error comes with the rows
	return pgx.CollectRows(rows, pgx.RowTo[string])
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
		err := pgx.BeginTxFunc(ctx, on, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
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
