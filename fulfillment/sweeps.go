package fulfillment

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/fulfillment/metrics"
	"stampede/fulfillment/offers"
	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
	"stampede/upkeep/rebuild"
	"stampede/upkeep/retire"
)

// awaitPostgres waits until Postgres answers, checks its schema, and returns how many partitions to
// serve: the partitions of new sales, and of sales created when there were more.
func (w *Worker) awaitPostgres(ctx context.Context) (partitions int, err error) {
	outage := retry.Outage{Log: w.config.Logger, Doing: "read the schema's version from Postgres"}
	for {
		partitions, err = w.checkPostgres(ctx)
		if err == nil || sql.IsUnfit(err) {
			outage.Over()
			return partitions, err
		}
		if ctx.Err() != nil || !retry.Pause(outage.Failed(err), ctx.Done()) {
			return 0, ctx.Err()
		}
	}
}

func (w *Worker) checkPostgres(ctx context.Context) (partitions int, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	if err := sql.Check(ctx, w.config.Catalog.Pool); err != nil {
		return 0, err
	}
	return w.countPartitions(ctx)
}

// countPartitions returns the number of partitions of new and older sales.
func (w *Worker) countPartitions(ctx context.Context) (int, error) {
	return rebuild.CountPartitions(ctx, w.config.Catalog.Pool, w.config.Catalog.Store.Keys)
}

// sweep publishes operators' changes that Redis does not have yet, until ctx is done. It also notices
// that sales have more partitions, which ingresses with a new setting cause.
func (w *Worker) sweep(ctx context.Context) {
	publishing := retry.Outage{Log: w.config.Logger, Doing: "publish changed sales to Redis"}
	counting := retry.Outage{Log: w.config.Logger, Doing: "read the number of partitions from Postgres"}
	for w.nextSweep(ctx) {
		published, publishErr := w.publishPending(ctx)
		partitions, countErr := w.countPartitions(ctx)
		if ctx.Err() != nil {
			return
		}
		w.postgresAway.Store(countErr != nil)
		publishing.Note(publishErr)
		counting.Note(countErr)
		if published > 0 {
			w.config.Logger.Info("published changed sales to Redis", "sales", published)
		}
		if before := int(w.partitions.Load()); countErr == nil && partitions > before {
			w.config.Logger.Info("sales have more partitions", "partitions", partitions, "before", before)
			counting.Note(w.setPartitions(partitions))
		}
	}
}

func (w *Worker) publishPending(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	return w.config.Catalog.PublishPending(ctx)
}

// sweepOrders expires unpaid orders, releases the units of ended ones and decides about payments that wait, until ctx
// is done. All workers do so, each on rows that no other has locked. Expiry continues while Redis is slow or away.
func (w *Worker) sweepOrders(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { w.expireOrders(ctx) })
	all.Go(func() { w.releaseUnits(ctx) })
	all.Go(func() { w.decidePayments(ctx) })
	all.Wait()
}

// expireOrders ends overdue orders until ctx is done.
func (w *Worker) expireOrders(ctx context.Context) {
	e := ledger.NewExpirer(w.ledger, w.config.Logger)
	expiring := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepExpire,
		"expire orders that were not paid in time")
	for w.nextSweep(ctx) {
		expired, err := ledger.SweepSales(ctx, e.ExpireSome)
		if expired > 0 {
			w.metrics.Orders.WithLabelValues(string(order.StatusExpired)).Add(float64(expired))
			w.config.Logger.Info("expired orders that were not paid in time", "orders", expired)
			select {
			case w.ended <- struct{}{}: // somebody may wait for their units
			default:
			}
		}
		w.metrics.OrdersAside.Set(float64(len(e.Quarantined)))
		if ctx.Err() != nil {
			return
		}
		expiring.Note(err)
	}
}

// nextSweep waits until the next sweep; it returns false if ctx has ended.
func (w *Worker) nextSweep(ctx context.Context) bool {
	return retry.Pause(retry.Delay(1, w.config.SweepInterval, w.config.SweepInterval), ctx.Done())
}

// releaseInterval bounds the time from the end of an order to the return of its units, for which somebody may wait.
const releaseInterval = time.Second

// nextRelease waits until the next sweep for releases, but not if orders have just expired; it returns false if ctx has
// ended.
func (w *Worker) nextRelease(ctx context.Context) bool {
	wait := min(w.config.SweepInterval, releaseInterval)
	waiting, stop := context.WithTimeout(ctx, retry.Delay(1, wait, wait))
	defer stop()
	select {
	case <-w.ended:
	case <-waiting.Done():
	}
	return ctx.Err() == nil
}

// releaseUnits releases the units of ended orders in Redis until ctx is done.
func (w *Worker) releaseUnits(ctx context.Context) {
	releasing := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepRelease, "release the units of ended orders")
	for w.nextRelease(ctx) {
		released, err := w.ledger.SweepReleases(ctx, w.config.Catalog.Store)
		if released > 0 {
			w.config.Logger.Info("released the units of ended orders", "orders", released)
		}
		pending, refused := w.ledger.PendingReleases(ctx)
		if ctx.Err() != nil {
			return
		}
		if refused == nil || errors.Is(refused, ledger.ErrRefused) {
			w.metrics.Releases.Set(float64(pending))
		}
		releasing.Note(retry.Join(err, refused))
	}
}

// decidePayments decides about payments that were reported before their orders were in Postgres, until ctx is done.
func (w *Worker) decidePayments(ctx context.Context) {
	deciding := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepPayments,
		"decide about payments that wait for their orders")
	for w.nextSweep(ctx) {
		decided, err := w.ledger.SweepPayments(ctx, (&arrivals{worker: w, oldest: map[int]waitingAge{}}).mayArrive)
		if decided > 0 {
			w.config.Logger.Info("decided about payments that waited for their orders", "payments", decided)
		}
		if ctx.Err() != nil {
			return
		}
		deciding.Note(err)
	}
}

// arrivals tells for one sweep which orders may still come to Postgres. It asks each partition once.
type arrivals struct {
	worker *Worker
	oldest map[int]waitingAge
}

// waitingAge is how long the oldest entry of a stream has waited for a worker.
type waitingAge struct {
	time.Duration
	err error
}

// mayArrive reports whether an order, whose money was reported so long ago, may be in a stream or in a dead letter. An
// order is accepted before it is paid: it is in no stream in which every entry is younger. Entries must be younger than
// half of that time: both are measured as ages, each by one server, so only a clock that is set in between counts. An
// entry leaves its stream when it is in Postgres or a dead letter, so these are looked at later. Money for an order in
// an archive that does not say what became of its payments waits for `stampede sale archive`, which reads that from the
// file.
func (a *arrivals) mayArrive(ctx context.Context, id uuid.UUID, ago time.Duration) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	rows, _ := a.worker.config.Catalog.Pool.Query(ctx, sql.PaymentSalesOfOrder, id) // its error comes with the rows
	sales, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
		ID                 uuid.UUID
		Partitions, Shards int
	}])
	if err != nil {
		return false, err
	}
	for _, sale := range sales {
		layout := reservation.LayoutOf(sale.ID, sale.Partitions, sale.Shards)
		for shard := range layout.Shards {
			if age := a.oldestIn(ctx, layout.Partition(shard)); age.err != nil || age.Duration >= ago/2 {
				return true, age.err
			}
		}
	}
	var isForgotten, isParked bool
	err = a.worker.config.Catalog.Pool.QueryRow(ctx, sql.PaymentIsForgotten, id).Scan(&isForgotten)
	if err != nil || isForgotten {
		return isForgotten, err
	}
	err = a.worker.config.Catalog.Pool.QueryRow(ctx, sql.PaymentIsParked, id, ago.Seconds()).Scan(&isParked)
	return isParked, err
}

func (a *arrivals) oldestIn(ctx context.Context, partition int) waitingAge {
	age, known := a.oldest[partition]
	if !known {
		ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
		defer cancel()
		// A clock of Postgres that is ahead takes money that has just been reported for old.
		_, err := a.worker.config.Catalog.Store.Times(ctx, a.worker.config.Catalog.Pool, partition)
		if err == nil {
			key := a.worker.config.Catalog.Store.Keys.Orders(partition)
			var backlog stream.Backlog
			backlog, err = stream.ReadBacklog(ctx, a.worker.config.Catalog.Store.Redis, key, reservation.Group)
			age.Duration = backlog.OldestWaitingAge
		}
		age.err = err
		a.oldest[partition] = age
	}
	return age
}

// offerInterval bounds the time from a unit's return to its offer.
const offerInterval = 500 * time.Millisecond

// drawUnits brings draws on, and offers their units, until ctx is done.
func (w *Worker) drawUnits(ctx context.Context) {
	o := offers.New(offers.Config{Catalog: w.config.Catalog, Logger: w.config.Logger})
	preparing := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepDraw, "freeze and rank the entries of draws")
	offering := func(step, doing string, offer func(context.Context) (int, error)) {
		trouble := metrics.NewTrouble(w.config.Logger, w.metrics, step, doing)
		wait := min(w.config.SweepInterval, offerInterval)
		for retry.Pause(retry.Delay(1, wait, wait), ctx.Done()) {
			offered, err := offer(ctx)
			if offered > 0 {
				w.config.Logger.Info("offered units by rank", "ranks", offered)
			}
			if ctx.Err() != nil {
				return
			}
			trouble.Note(err)
		}
	}
	var all sync.WaitGroup
	all.Go(func() {
		for w.nextSweep(ctx) {
			err := o.Prepare(ctx)
			if ctx.Err() != nil {
				return
			}
			preparing.Note(err)
		}
	})
	all.Go(func() { offering(metrics.StepOffer, "offer units by rank", o.Offer) })
	all.Go(func() { offering(metrics.StepWaitlist, "offer units to those who wait", o.OfferWaiting) })
	all.Wait()
}

// retireSales lets sales that are over leave Redis until ctx is done.
func (w *Worker) retireSales(ctx context.Context) {
	if w.config.RetireAfter == 0 {
		return
	}
	retirer := retire.New(retire.Config{
		Catalog: w.config.Catalog,
		After:   w.config.RetireAfter, Logger: w.config.Logger,
	})
	retiring := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepRetire, "let ended sales leave Redis")
	for w.nextSweep(ctx) {
		retired, err := retirer.Sweep(ctx)
		w.metrics.Retired.Add(float64(retired))
		if ctx.Err() != nil {
			return
		}
		retiring.Note(err)
	}
}

// monthsInterval is how often a worker makes sure that the tables of the next month exist.
const monthsInterval = time.Hour

// makeMonths creates the tables of the next month ahead, until ctx is done. A new sale creates the tables of its month
// if they are missing, but waits for other changes of these tables.
func (w *Worker) makeMonths(ctx context.Context) {
	making := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepMonths,
		"create the tables for orders of the next month")
	for {
		err := w.makeNextMonths(ctx)
		if ctx.Err() != nil {
			return
		}
		delay := monthsInterval
		if err != nil {
			delay = making.Failed(err)
		} else {
			making.Over()
		}
		if !retry.Pause(delay, ctx.Done()) {
			return
		}
	}
}

func (w *Worker) makeNextMonths(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	if _, err := w.config.Catalog.Pool.Exec(ctx, sql.WorkerMakeMonths); err != nil {
		return err
	}
	var taken *string
	err := w.config.Catalog.Pool.QueryRow(ctx, sql.WorkerMonthsInDefault).Scan(&taken)
	if err == nil && taken != nil {
		err = fmt.Errorf("a DEFAULT partition has orders of that month, or many others: %s (stampede doctor says how to "+
			"remove it)", *taken)
	}
	return err
}

const (
	// blockersInterval is how often a worker looks for sessions that block others.
	blockersInterval = time.Second
	// A blocking session of our role is ended after it has waited for its client for so long: in the
	// middle of a batch, and between two statements.
	silentInBatchMax      = 5 * time.Second
	silentBetweenQueryMax = 10 * time.Second
	// blockerNamedAfter is when a blocking session that is not ended is named in the log.
	blockerNamedAfter = 5 * time.Second
	// blockerForgottenAfter is how long a session that blocks no other is remembered.
	blockerForgottenAfter = 10 * time.Second
)

// Log texts about sessions that block others.
const (
	endedSession = "ended a database session that held a lock and whose client was silent"
	namedSession = "a database session holds a lock that other sessions wait for"
)

// endBlockers ends sessions of our role that block others while they wait for vanished clients,
// until ctx is done. A worker or an ingress whose machine has crashed or hangs leaves the row of a sale
// or of an order locked, and Postgres does not end a session in the middle of a batch. Nothing is
// lost: uncommitted work is redelivered.
func (w *Worker) endBlockers(ctx context.Context) {
	looking := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepUnblock,
		"look for database sessions that block others")
	found := newBlockers(w.config.Catalog.Pool, w.config.Logger)
	for retry.Pause(blockersInterval, ctx.Done()) {
		ended, err := found.endSilent(ctx)
		w.metrics.EndedSessions.Add(float64(ended))
		if ctx.Err() != nil {
			return
		}
		looking.Note(err)
	}
}

// blockerKey changes as soon as the session receives something from its client.
type blockerKey struct {
	pid                         int32
	started, queried, changedAt int64
}

func newBlockerKey(b *pg.Activity) blockerKey {
	return blockerKey{
		b.PID, b.BackendStart.UnixMicro(), time.Time(b.QueryStart).UnixMicro(), time.Time(b.StateChange).UnixMicro(),
	}
}

// blockers holds the sessions that blocked others within blockerForgottenAfter.
type blockers struct {
	pool *pgxpool.Pool
	log  *slog.Logger
	seen map[blockerKey]*blockerSeen
}

func newBlockers(pool *pgxpool.Pool, log *slog.Logger) *blockers {
	return &blockers{pool, log, make(map[blockerKey]*blockerSeen)}
}

// blockerSeen is when a session was seen. silent is when it was first seen waiting for its client.
type blockerSeen struct {
	first, last, silent time.Time
	named               bool
}

// endSilent ends the blocking sessions that were silent for too long, and returns their number.
func (l *blockers) endSilent(ctx context.Context) (ended int, err error) {
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	found, err := pg.Blockers(ctx, l.pool)
	if err != nil {
		return 0, err
	}
	now := time.Now()
	for _, b := range found {
		seen := l.note(&b, now)
		switch {
		case seen.silent.IsZero() || now.Sub(seen.silent) < silentMax(&b):
			l.name(&b, seen)
		default:
			gone, err := l.end(ctx, &b, now.Sub(seen.silent))
			if err != nil {
				return ended, err
			}
			if gone {
				ended++
			}
		}
	}
	for key, seen := range l.seen {
		if now.Sub(seen.last) > blockerForgottenAfter {
			delete(l.seen, key)
		}
	}
	return ended, nil
}

func (l *blockers) note(b *pg.Activity, now time.Time) *blockerSeen {
	seen, known := l.seen[newBlockerKey(b)]
	if !known {
		seen = &blockerSeen{first: now}
		l.seen[newBlockerKey(b)] = seen
	}
	seen.last = now
	if b.Silent && seen.silent.IsZero() {
		seen.silent = now
	}
	return seen
}

func silentMax(b *pg.Activity) time.Duration {
	if b.State == "active" {
		return silentInBatchMax
	}
	return silentBetweenQueryMax
}

// name logs, once, a session that blocks others for blockerNamedAfter.
func (l *blockers) name(b *pg.Activity, seen *blockerSeen) {
	if waited := seen.last.Sub(seen.first); !seen.named && waited >= blockerNamedAfter {
		seen.named = true
		l.log.Warn(namedSession, append(attributes(b), "others_wait_for", waited)...)
	}
}

func (l *blockers) end(ctx context.Context, b *pg.Activity, silent time.Duration) (gone bool, err error) {
	gone, err = b.Terminate(ctx, l.pool)
	if gone {
		l.log.Warn(endedSession, append(attributes(b), "silent_for", silent)...)
	}
	return gone, err
}

func attributes(b *pg.Activity) []any {
	return []any{
		"pid", b.PID, "application", b.Application, "client", b.Client, "role", b.Role, "state", b.State,
		"transaction_began", time.Time(b.XactStart), "query_began", time.Time(b.QueryStart), "query", b.Query,
	}
}
