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
	"stampede/internal/pause"
	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/reservation/order"
	"stampede/sql"
)

var (
	// ErrUnderWay is returned while somebody else rebuilds the projections of the same database.
	ErrUnderWay = errors.New("the projections are being rebuilt by somebody else")
	// ErrDamagedLog is returned when order_events holds what cannot have happened to an order: nothing can be
	// rebuilt from that.
	ErrDamagedLog = errors.New("the log of orders is damaged")
	// ErrTableExtended is returned when somebody has added something to the table orders that another table
	// would not have, as a view that reads it.
	ErrTableExtended = errors.New("the table orders has something that a new one would not have")
)

const (
	// changesPerTurn is how many notes of changed orders one transaction takes, and changesLeft at how many
	// the tables may be swapped, in which time nobody can write orders.
	changesPerTurn, changesLeft = 10_000, 200
	// turnsMax bounds how often it is tried to come so far before.
	turnsMax = 100

	// lockPatienceMin and lockPatienceMax are how long a lock that keeps buyers waiting is waited for. The second is
	// longer than a second, after which Postgres makes an autovacuum give way.
	lockPatienceMin, lockPatienceMax = 100 * time.Millisecond, 1500 * time.Millisecond
)

// Report tells what a rebuild of the projections did.
type Report struct {
	// Orders is how many rows the new table was filled with, and Changes how many changes of orders came meanwhile.
	Orders  int64 `json:"orders"`
	Changes int64 `json:"changes_meanwhile"`
	// Recounted are the sales whose counters were wrong.
	Recounted []Recount `json:"recounted"`
	// Took is how long it took in all, and Held for how long nobody could read or write orders. JSON has nanoseconds.
	Took time.Duration `json:"took_ns"`
	Held time.Duration `json:"held_ns"`
}

// Recount is a sale whose counter was put right.
type Recount struct {
	Sale uuid.UUID `json:"sale_id"`
	// Was and Is are sales.sold before and after.
	Was int64 `json:"was"`
	Is  int64 `json:"is"`
}

// Rebuild makes the table orders and the counters of sales anew from order_events, while orders
// are recorded, paid and cancelled. The new table is made beside the old one, catches up with what changes
// meanwhile, and takes its place in one short transaction. Broken off, it leaves the old table in place, or
// the new one, and what is left over does no harm and goes with the next rebuild.
//
// Where it has to wait for a lock it gives up soon and tries again, because buyers would wait behind it:
// for as long as ctx lasts. It needs a connection of the pool, and the rights of the tables' owner.
//
// The error may be ErrProjectionsUnderWay, and wrap ErrDamagedLog or ErrTableExtended.
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
		return ErrUnderWay
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

// cleanUp leaves nothing behind, if it can within a moment: the next rebuild does it as well.
func (p *projector) cleanUp(ctx context.Context) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	err := p.underLocks(ctx, "clear away", func(tx pgx.Tx) error { return pg.Run(ctx, tx.Conn(), sql.ProjectionEnd) })
	if err != nil {
		p.log.Warn("a rebuild of the projections that was broken off left tables behind, which the next one clears away",
			"error", err)
	}
}

// prepare readies the session for the rebuild.
func (p *projector) prepare(ctx context.Context) error {
	if err := p.conn.Run(ctx, sql.ProjectionPrepare); err != nil {
		return err
	}
	// Triggers hold the lock only for as long as it takes to see that it is free.
	return p.conn.Lock(ctx, pg.ProjectionAliveLock)
}

// checkTable makes sure that a new table can be all that the old one is.
func (p *projector) checkTable(ctx context.Context) error {
	found, err := texts(ctx, p.conn, sql.ProjectionObstacles)
	if err == nil && len(found) > 0 {
		err = fmt.Errorf("%w: %s", ErrTableExtended, strings.Join(found, ", "))
	}
	return err
}

// damagedShown bounds how many histories that cannot happen are named; the rest is counted.
const damagedShown = 10

// checkLog holds every order's history against the steps that reservation/transition.go knows.
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
		if whole && canHappen(types) && !endsReserved(types) {
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

// canHappen tells whether an order can have had these events, the first of its life at the beginning.
func canHappen(types []order.EventType) bool {
	var status order.Status // of an order of which nothing has happened yet
	for _, event := range types {
		var ok bool
		if status, ok = status.After(event); !ok {
			return false
		}
	}
	return true
}

// endsReserved tells whether an order was reserved, and nothing became of it. That is recorded in one step with what
// does, so an event is lost, and the row of an order that may be live would be.
func endsReserved(types []order.EventType) bool {
	return types[len(types)-1] == order.EventReserved
}

// build makes the new table all that the old one is, but for what changed in the meantime.
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

// catchUp makes some orders anew that have changed, and returns how many changes that were.
//
// They are taken in their order and made from one snapshot. So of two live orders of one user, after each
// other, the first one is never made after the second, and orders_one_live_per_user holds all the time.
func (p *projector) catchUp(ctx context.Context) (taken int, err error) {
	err = pgx.BeginTxFunc(ctx, p.conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		taken, err = p.remake(ctx, tx)
		return err
	})
	return taken, err
}

func (p *projector) remake(ctx context.Context, tx pgx.Tx) (taken int, err error) {
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

// swap puts the new table in the place of the old one.
//
// The one lock that it needs is that on orders: who writes orders and their events takes it first, or all
// locks of one statement before any row, so nobody is in the middle once it is granted. Who waits for it
// finds the new table by its name, and so do statements that were prepared before.
func (p *projector) swap(ctx context.Context) error {
	wanted, err := texts(ctx, p.conn, sql.ProjectionShape)
	if err != nil {
		return err
	}
	return p.underLocks(ctx, "swap the tables", func(tx pgx.Tx) error {
		// A rebuild of Redis looks at orders in a snapshot, to which the rows of the new table would be missing.
		if err := pg.LockUntilCommit(ctx, tx, pg.RebuildLock); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "LOCK TABLE orders IN ACCESS EXCLUSIVE MODE"); err != nil {
			return err
		}
		began := time.Now()
		for {
			if taken, err := p.remake(ctx, tx); err != nil {
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
		if missing := lacking(wanted, got); len(missing) > 0 {
			return fmt.Errorf("%w: %s", ErrTableExtended, strings.Join(missing, "; "))
		}
		crashpoint.Hit(crashpoint.ProjectionsSwap)
		p.report.Held = time.Since(began)
		return nil
	})
}

// lacking are the texts of which only one side has one.
func lacking(wanted, got []string) (missing []string) {
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

// underLocks runs a transaction that takes locks for which all buyers may have to wait, as those do who wait
// for a lock behind it: so it does not wait for long, but tries again.
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
		// Nothing is done: whoever was behind goes on for a while.
		if !pause.For(max(outage.Failed(err), 3*patience), ctx.Done()) {
			return ctx.Err()
		}
	}
}

// isLockTaken tells whether a lock could not be had in time, or was given up against a deadlock.
func isLockTaken(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "55P03" || pgErr.Code == "40P01")
}

func texts(ctx context.Context, from pg.Querier, query string) ([]string, error) {
	rows, _ := from.Query(ctx, query) // its error comes with the rows
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// RecountSales puts the counters of the sale, or of all if it is nil, right where they are wrong, and has note
// write down each of them, unless that is nil. A sale that is right is not locked.
func RecountSales(ctx context.Context, on pg.Transactor, sale *uuid.UUID,
	note func(pgx.Tx, Recount) error,
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
		case errors.Is(err, pgx.ErrNoRows): // somebody was faster
		case err != nil:
			failed = append(failed, fmt.Errorf("recount sale=%s: %w", m.Sale, ledger.OfConstraint(err)))
		default:
			recounted = append(recounted, count)
		}
	}
	return recounted, errors.Join(failed...)
}
