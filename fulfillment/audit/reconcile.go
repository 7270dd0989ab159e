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

	"stampede/fulfillment/deadletter"
	"stampede/fulfillment/rebuild"
	"stampede/fulfillment/stream"
	"stampede/internal/pause"
	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
)

// ErrReconcileUnderWay is returned while somebody else reconciles the same database.
var ErrReconcileUnderWay = errors.New("somebody else is reconciling")

const (
	// repairsPerTurn is how many orders one repair mends, and its event names.
	repairsPerTurn = 500
	// reconcilePause is for how long what is on its way has time to arrive, between two looks.
	reconcilePause = time.Second
)

// ReconcileConfig says what to reconcile. Explain and Logger may be left out.
type ReconcileConfig struct {
	Pool    *pgxpool.Pool
	Redis   redis.UniversalClient
	Keys    reservation.Keys
	Store   *reservation.Store
	Catalog *catalog.Catalog
	// Rebuilder makes the stock of a sale anew where nothing less helps.
	Rebuilder *rebuild.Rebuilder
	// Sale is the sale to reconcile; uuid.Nil for all.
	Sale uuid.UUID
	// DryRun is true if nothing is to be changed.
	DryRun bool
	// Explain is given each difference before anything is done about it.
	Explain func(Finding) error
	// Pause is how long to wait between the two looks; one second if it is 0.
	Pause  time.Duration
	Logger *slog.Logger
}

// ReconcileReport is what a reconcile found and did.
type ReconcileReport struct {
	DryRun   bool           `json:"dry_run"`
	Remedies []RemedyReport `json:"remedies"`
	// Failures are repairs that failed, in words.
	Failures []string `json:"failures,omitempty"`
	// Unchecked tells which promises could not be checked wholly, and why. Differences there were not looked for.
	Unchecked []string `json:"unchecked,omitempty"`
	// Remaining is how many differences are left that no worker will see to: somebody else has to, or it failed, or it
	// was not to be done.
	Remaining int64 `json:"remaining"`
}

// RemedyReport is what became of the differences with one remedy.
type RemedyReport struct {
	Remedy Remedy `json:"remedy"`
	Says   string `json:"says"`
	// Found counts the differences, and Mended those that were mended; the rest of them remains.
	Found  int64 `json:"found"`
	Mended int64 `json:"mended"`
}

// Reconcile finds the differences between Redis and Postgres that Audit finds and mends them, each by the way that
// leads there anyway: units come back as those of cancelled orders do, an accepted order that is lost
// is recorded from its event, counters are counted, and stock in Redis is made anew from Postgres. Each
// repair is an event of its sale. What it cannot mend it tells.
//
// It may run beside a sale: a difference counts only if the very same one is there at two looks, one after the other, and
// what still waits in a stream, as a dead letter, or to be given back is none. With DryRun it changes nothing.
//
// It needs two connections of the pool, and one more for a rebuild. The error may be ErrReconcileUnderWay, or
// reservation.ErrSaleNotFound; repairs that failed are in the report, and it may be called again.
func Reconcile(ctx context.Context, c ReconcileConfig) (ReconcileReport, error) {
	stream.OrElse(&c.Pause, reconcilePause)
	stream.OrElse(&c.Logger, slog.Default())
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
	// rebuilt are the partitions of which all sales were rebuilt.
	rebuilt []int
}

func (r *reconciler) run(ctx context.Context) (err error) {
	r.conn, err = pg.Begin(ctx, r.Pool, pg.ReconcileLock, 0)
	if errors.Is(err, pg.ErrLockHeld) {
		return ErrReconcileUnderWay
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
	for _, t := range todo {
		r.mend(ctx, t)
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if !r.DryRun && r.mended() {
		// Repairs are revisions of their sales. What cannot be told now, a worker tells.
		if _, err := r.Catalog.PublishPending(ctx); err != nil {
			r.Logger.Warn("a worker will tell Redis of the repairs", "error", err)
		}
	}
	r.sum()
	return nil
}

// find looks twice, and returns what is to be done: for each sale what comes first is first.
func (r *reconciler) find(ctx context.Context) ([]saleDifferences, error) {
	if err := r.conn.Run(ctx, sql.ReconcileTables); err != nil {
		return nil, err
	}
	for look := 1; look <= 2; look++ {
		if look > 1 && !pause.For(r.Pause, ctx.Done()) {
			return nil, ctx.Err()
		}
		if found, err := r.look(ctx, look); err != nil || found == 0 {
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

// look writes the differences of a look to a table, and returns how many there are.
func (r *reconciler) look(ctx context.Context, number int) (found int64, err error) {
	l := newLook(Config{Pool: r.Pool, Redis: r.Redis, Keys: r.Keys, Sale: r.Sale}, r.conn.Conn)
	if err := l.selectSales(ctx); err != nil {
		return 0, err
	}
	err = l.take(ctx, func(ctx context.Context, tx pgx.Tx) error {
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

// mended tells whether anything was.
func (r *reconciler) mended() bool {
	for _, c := range r.counts {
		if c.Mended > 0 {
			return true
		}
	}
	return false
}

// sum makes the report of what was counted.
func (r *reconciler) sum() {
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
