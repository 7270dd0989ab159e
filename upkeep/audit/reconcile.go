package audit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/internal/retry"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
	"stampede/upkeep/rebuild"
)

// ErrRunning is returned while another process reconciles the same database.
var ErrRunning = errors.New("another process is reconciling")

const (
	// repairsPerTurn is how many orders one repair covers, and its event names.
	repairsPerTurn = 500
	// reconcilePause is the time between two looks, in which data in transit can arrive.
	reconcilePause = time.Second
)

// ReconcileConfig says what to reconcile. Explain and Logger may be left out.
type ReconcileConfig struct {
	Pool    *pgxpool.Pool
	Redis   redis.UniversalClient
	Keys    reservation.Keys
	Store   *reservation.Store
	Catalog *catalog.Catalog
	// Rebuilder rebuilds the stock of a sale if no smaller repair helps.
	Rebuilder *rebuild.Rebuilder
	// Sale is the sale to reconcile; uuid.Nil for all.
	Sale uuid.UUID
	// DryRun changes nothing.
	DryRun bool
	// Explain is called with each difference before its repair.
	Explain func(Finding) error
	// Pause is how long to wait between the two looks; one second if it is 0.
	Pause  time.Duration
	Logger *slog.Logger
}

// ReconcileReport is what a reconcile found and did.
type ReconcileReport struct {
	DryRun   bool           `json:"dry_run"`
	Remedies []RemedyReport `json:"remedies"`
	// Failures describes the repairs that failed.
	Failures []string `json:"failures,omitempty"`
	// Unchecked names the promises that could not be checked completely, and why.
	Unchecked []string `json:"unchecked,omitempty"`
	// Remaining counts the differences that are left and that no worker resolves: they need an
	// operator, their repair failed, or DryRun was set.
	Remaining int64 `json:"remaining"`
}

// RemedyReport counts the differences with one remedy.
type RemedyReport struct {
	Remedy Remedy `json:"remedy"`
	Says   string `json:"says"`
	// Found counts the differences, and Mended the repaired ones.
	Found  int64 `json:"found"`
	Mended int64 `json:"mended"`
}

// Reconcile finds the differences that Run finds and repairs them through the regular paths: units
// are released like those of cancelled orders, a lost accepted order is recorded from its event, counters
// are recounted, and stock in Redis is rebuilt from Postgres. Each repair is an event of its sale.
// Other differences are reported.
//
// It may run during a sale: a difference counts only if two successive looks find it, and unread
// entries, dead letters and pending releases do not count. With DryRun it changes nothing.
//
// It needs two connections of the pool, and one more for a rebuild. The error may be ErrRunning, or
// reservation.ErrSaleNotFound; repairs that failed are in the report, and Reconcile may be called again.
func Reconcile(ctx context.Context, c ReconcileConfig) (ReconcileReport, error) {
	c.Pause = cmp.Or(c.Pause, reconcilePause)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	r := reconciler{ReconcileConfig: c, report: ReconcileReport{DryRun: c.DryRun}, counts: map[Remedy]*RemedyReport{}}
	if err := r.run(ctx); err != nil {
		return r.report, fmt.Errorf("reconcile: %w", err)
	}
	return r.report, nil
}

// reconciler is one reconcile.
type reconciler struct {
	ReconcileConfig
	conn   pg.Session
	report ReconcileReport
	counts map[Remedy]*RemedyReport
	// rebuilt are the sales that were rebuilt with a whole partition.
	rebuilt []uuid.UUID
}

func (r *reconciler) run(ctx context.Context) (err error) {
	r.conn, err = pg.Begin(ctx, r.Pool, pg.ReconcileLock, 0)
	if errors.Is(err, pg.ErrLockHeld) {
		return ErrRunning
	} else if err != nil {
		return err
	}
	defer r.conn.End()
	todo, err := r.find(ctx)
	if err != nil {
		return err
	}
	if err := r.explain(ctx); err != nil {
		return err
	}
	for i, t := range todo {
		progress.Step(ctx, "repairing")
		progress.At(ctx, int64(i), int64(len(todo)), "kinds of differences")
		r.repair(ctx, t)
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if !r.DryRun && r.repairedAny() {
		// Repairs are revisions of their sales. A worker publishes what cannot be published now.
		if _, err := r.Catalog.PublishPending(ctx); err != nil {
			r.Logger.Warn("could not publish the repairs to Redis: a worker will", "error", err)
		}
	}
	r.fillReport()
	return nil
}

// find looks twice and returns the lasting differences in the order of their repair.
func (r *reconciler) find(ctx context.Context) ([]saleDifferences, error) {
	if err := r.conn.Run(ctx, sql.ReconcileTables); err != nil {
		return nil, err
	}
	for pass := 1; pass <= 2; pass++ {
		if pass > 1 && !retry.Pause(r.Pause, ctx.Done()) {
			return nil, ctx.Err()
		}
		if found, err := r.look(ctx, pass); err != nil || found == 0 {
			return nil, err
		}
	}
	if _, err := r.conn.Exec(ctx, sql.ReconcileCompare); err != nil {
		return nil, fmt.Errorf("compare: %w", err)
	}
	rows, _ := r.conn.Query(ctx, sql.ReconcileCounts) // its error comes with the rows
	todo, err := pgx.CollectRows(rows, pgx.RowToStructByName[saleDifferences])
	slices.SortStableFunc(todo, func(a, b saleDifferences) int {
		return slices.Index(remedyOrder, a.Remedy) - slices.Index(remedyOrder, b.Remedy)
	})
	return todo, err
}

// look writes the differences of one look to a table and returns their number.
func (r *reconciler) look(ctx context.Context, number int) (found int64, err error) {
	l := newLook(Config{Pool: r.Pool, Redis: r.Redis, Keys: r.Keys, Sale: r.Sale}, r.conn.Conn)
	if err := l.selectSales(ctx); err != nil {
		return 0, err
	}
	err = l.compare(ctx, func(ctx context.Context, tx pgx.Tx) error {
		for _, f := range l.noted {
			same := cmp.Or(f.Key, deadletter.Storable(f.What))
			_, err := tx.Exec(ctx, sql.ReconcileAddFinding,
				number, f.Sale, f.Order, zeronull.Text(deadletter.Storable(f.User)), deadletter.Storable(f.What), f.Remedy, same)
			if err != nil {
				return err
			}
			found++
		}
		return l.eachCheck(ctx, tx, func(ctx context.Context, tx pgx.Tx, c check) error {
			tag, err := tx.Exec(ctx, c.within(sql.ReconcileAddCheck), number)
			found += tag.RowsAffected()
			return err
		})
	})
	for _, p := range l.report.Promises {
		for _, why := range p.Unchecked {
			if text := p.Name + ": " + why; !slices.Contains(r.report.Unchecked, text) {
				r.report.Unchecked = append(r.report.Unchecked, text)
			}
		}
	}
	return found, err
}

func (r *reconciler) explain(ctx context.Context) error {
	if r.Explain == nil {
		return nil
	}
	rows, _ := r.conn.Query(ctx, sql.ReconcileExplain) // its error comes with the rows
	defer rows.Close()
	for rows.Next() {
		f, err := pgx.RowToStructByName[findingRow](rows)
		if err == nil {
			err = r.Explain(f.finding())
		}
		if err != nil {
			return err
		}
	}
	return rows.Err()
}

// repairedAny reports whether anything was repaired.
func (r *reconciler) repairedAny() bool {
	for _, c := range r.counts {
		if c.Mended > 0 {
			return true
		}
	}
	return false
}

// fillReport fills the report from the counts.
func (r *reconciler) fillReport() {
	r.report.Remedies = []RemedyReport{}
	for _, remedy := range remedyOrder {
		c, found := r.counts[remedy]
		if !found {
			continue
		}
		r.report.Remedies = append(r.report.Remedies, *c)
		if remedy != remedyWorker {
			r.report.Remaining += c.Found - c.Mended
		}
	}
}
