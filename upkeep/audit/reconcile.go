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
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/internal/retry"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/projection"
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
	r.conn, err = pg.Begin(ctx, r.Catalog.Pool, pg.ReconcileLock, 0)
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
	l := newSnapshot(Config{Catalog: r.Catalog, Sale: r.Sale}, r.conn.Conn)
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

// remedyOrder is the order of repairs. Accepted orders that Postgres lacks come before a rebuild,
// which reads only Postgres and the stream.
var remedyOrder = []Remedy{
	remedyPersist, remedyAside, remedyAppend, remedyForget, remedyRelease, remedyRecount, RemedyRebuild,
	remedyWorker, remedyProjections, remedyDLQ, remedyGuard, remedyUnknownSale, remedyPayment,
	remedyDraw, remedyOperator,
}

// says are the texts of Remedy.Says.
var says = map[Remedy]string{
	remedyPersist: "remove the time limit (TTL) of the key of Redis",
	remedyAside:   "rename the key of Redis, which has a wrong type",
	remedyAppend:  "append the event of the accepted order to its stream again, for a worker to record",
	remedyForget:  "delete the release: the order has not ended",
	remedyRelease: "release the units of the ended order",
	remedyRecount: "recount the units of the sale's live orders",
	RemedyRebuild: "rebuild the stock of the sale in Redis from Postgres",
	remedyWorker:  "nothing: a worker will resolve it",
	remedyProjections: "for you: run `stampede projections rebuild`, then reconcile again; until then nothing else of " +
		"the sale is repaired",
	remedyDLQ:   "for you: run `stampede dlq show`, then replay or discard the dead letter",
	remedyGuard: "for you: run the SQL of the finding; until then Postgres may accept rows that break a promise",
	remedyUnknownSale: "for you: delete its keys in Redis, which ends it; if Postgres was restored, create it again, with " +
		"another id",
	remedyPayment: "for you: compare `stampede payment show` with the payment provider, and correct payment_events",
	remedyDraw: "for you: run `stampede sale pause`, so that nothing more is offered; compare the draw with a backup, and " +
		"with the events that the relay sent",
	remedyOperator: "for you: no record shows what would be right; `stampede rebuild --sale` makes Redis follow " +
		"Postgres",
}

// Says describes the remedy for operators.
func (r Remedy) Says() string { return says[r] }

// saleDifferences are the differences of one sale with one remedy.
type saleDifferences struct {
	SaleID             zeronull.UUID // zero for differences of no sale
	Remedy             Remedy
	Count              int64
	Partitions, Shards int
	// Blocked: the rows of the sale's orders differ from the log, so they cannot be a base for
	// repairs.
	Blocked bool
}

func (d *saleDifferences) sale() uuid.UUID { return uuid.UUID(d.SaleID) }

// layout returns where the sale is in Redis.
func (d *saleDifferences) layout() reservation.Layout {
	return reservation.LayoutOf(d.sale(), d.Partitions, d.Shards)
}

// repair repairs and counts differences; those with other remedies are only counted. Failures go to the report.
func (r *reconciler) repair(ctx context.Context, d saleDifferences) {
	count := r.counts[d.Remedy]
	if count == nil {
		count = &RemedyReport{Remedy: d.Remedy, Says: d.Remedy.Says()}
		r.counts[d.Remedy] = count
	}
	count.Found += d.Count
	if r.DryRun || d.Blocked {
		return
	}
	var err error
	switch d.Remedy {
	case remedyPersist:
		err = r.persist(ctx)
	case remedyAside:
		err = r.setAside(ctx)
	case remedyAppend:
		err = r.eachPage(ctx, d, r.append)
	case remedyForget:
		err = r.eachPage(ctx, d, r.forget)
	case remedyRelease:
		err = r.eachPage(ctx, d, r.release)
	case remedyRecount:
		err = r.recount(ctx, d)
	case RemedyRebuild:
		err = r.rebuild(ctx, d)
	default:
		return
	}
	if err != nil {
		r.report.Failures = append(r.report.Failures, fmt.Sprintf("%s of sale %s: %v", d.Remedy, d.sale(), err))
		return
	}
	count.Mended += d.Count
}

// difference is an order to repair, and its reservation if it has one.
type difference struct {
	N          int64
	OrderID    uuid.UUID
	UserID     string
	Quantity   int64
	Lines      order.Lines
	Shard      int // the one that has the reservation
	Epoch      int64
	ReservedAt time.Time
}

// eachPage calls do with the differences, a page at a time.
func (r *reconciler) eachPage(
	ctx context.Context, d saleDifferences, do func(context.Context, saleDifferences, []difference) error,
) error {
	for after := int64(0); ; {
		rows, _ := r.conn.Query( // its error comes with the rows
			ctx, sql.ReconcilePage, d.sale(), d.Remedy, after, repairsPerTurn)
		page, err := pgx.CollectRows(rows, pgx.RowToStructByName[difference])
		if err != nil || len(page) == 0 {
			return err
		}
		if err := do(ctx, d, page); err != nil {
			return err
		}
		after = page[len(page)-1].N
	}
}

// append appends events to the streams of their shards again and records which.
func (r *reconciler) append(ctx context.Context, d saleDifferences, page []difference) error {
	ofShard := map[int][]order.OrderReserved{}
	for _, p := range page {
		ofShard[p.Shard] = append(ofShard[p.Shard], order.OrderReserved{
			OrderID: p.OrderID, SaleID: d.sale(), UserID: p.UserID, Quantity: p.Quantity, Lines: p.Lines,
			Epoch: p.Epoch, ReservedAt: p.ReservedAt,
		})
	}
	var orders []uuid.UUID
	var failed error
	for shard, events := range ofShard {
		appended, err := r.appendTo(ctx, d.layout().Partition(shard), d.sale(), events)
		failed = errors.Join(failed, err)
		orders = append(orders, appended...)
	}
	return errors.Join(failed, r.note(ctx, r.conn, d.sale(), "appended", orders))
}

// appendTo appends events of a sale to the stream of a partition and returns which.
func (r *reconciler) appendTo(
	ctx context.Context, partition int, sale uuid.UUID, events []order.OrderReserved,
) (orders []uuid.UUID, err error) {
	limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	appended, err := r.Catalog.Store.AppendReserved(limited, partition, sale, events)
	for i := range appended {
		if appended[i] {
			orders = append(orders, events[i].OrderID)
		}
	}
	return orders, err
}

// release enqueues releases, which workers apply.
func (r *reconciler) release(ctx context.Context, d saleDifferences, page []difference) error {
	return r.changeOrders(ctx, d.sale(), "released", sql.ReconcileRelease, page)
}

// forget deletes releases.
func (r *reconciler) forget(ctx context.Context, d saleDifferences, page []difference) error {
	return r.changeOrders(ctx, d.sale(), "forgotten", sql.ReconcileForget, page)
}

// changeOrders runs a query that changes orders of a sale and returns their ids, and records them.
func (r *reconciler) changeOrders(ctx context.Context, sale uuid.UUID, did, query string, page []difference) error {
	orders := make([]uuid.UUID, len(page))
	for i, p := range page {
		orders[i] = p.OrderID
	}
	return pg.InTransaction(ctx, r.conn, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sql.ReconcileLockOrders, sale, orders); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, query, sale, orders) // its error comes with the rows
		changed, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		if err != nil {
			return err
		}
		return r.note(ctx, tx, sale, did, changed)
	})
}

func (r *reconciler) recount(ctx context.Context, d saleDifferences) error {
	sale := d.sale()
	_, err := projection.RecountSales(ctx, r.conn, &sale, nil, func(tx pgx.Tx, count projection.Recount) error {
		_, err := tx.Exec(ctx, sql.ReconcileNote, d.sale(), map[string]any{"recounted": map[string]int64{
			"was": count.Was, "is": count.Is, "last_sequence_was": count.LastWas, "last_sequence_is": count.LastIs,
		}})
		return err
	})
	return err
}

// rebuild rebuilds the stock of a sale, or all of its partitions whose servers are unverified, with the other sales in
// them. A rebuild records its own event.
func (r *reconciler) rebuild(ctx context.Context, d saleDifferences) error {
	if slices.Contains(r.rebuilt, d.sale()) {
		return nil
	}
	_, err := r.Rebuilder.Sale(ctx, d.sale(), rebuild.ReasonReconciled)
	if !errors.Is(err, rebuild.ErrServerUnverified) || r.Sale != uuid.Nil {
		return err
	}
	var failed error
	layout := d.layout()
	for shard := range layout.Shards {
		failed = errors.Join(failed, r.rebuildUnverified(ctx, layout.Partition(shard)))
	}
	// The last of these rebuilds also rebuilds a sale with several shards.
	if slices.Contains(r.rebuilt, d.sale()) {
		return nil
	} else if failed != nil {
		return failed
	}
	_, err = r.Rebuilder.Sale(ctx, d.sale(), rebuild.ReasonReconciled)
	return err
}

// rebuildUnverified rebuilds a partition, unless its server is verified.
func (r *reconciler) rebuildUnverified(ctx context.Context, partition int) error {
	limited, cancel := retry.ForCall(ctx)
	server, err := r.Catalog.Store.Inspect(limited, partition)
	cancel()
	if err != nil || server.Known {
		return err
	}
	report, err := r.Rebuilder.Partition(ctx, partition, rebuild.ReasonReconciled)
	for _, sale := range report.Sales {
		r.rebuilt = append(r.rebuilt, sale.ID)
	}
	return err
}

// note records the repairs, if any, as an event of the sale.
func (r *reconciler) note(ctx context.Context, on executor, sale uuid.UUID, did string, orders []uuid.UUID) error {
	if len(orders) == 0 {
		return nil
	}
	_, err := on.Exec(ctx, sql.ReconcileNote, sale, map[string]any{did: orders})
	return err
}

// executor is a connection or a transaction.
type executor interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
}
