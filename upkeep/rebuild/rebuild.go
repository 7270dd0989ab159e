// Package rebuild rebuilds the stock in Redis from Postgres after Redis lost it, or was set back or
// replaced.
//
// Each worker calls Rebuilder.HealPartition periodically: needs.go finds what has to be rebuilt, and
// proof.go uses what workers have noticed. A rebuild takes a lock (session.go), closes the sale, records what the
// stream still has, raises the epoch, copies the live orders (buyers.go) and opens the sale (steps.go,
// rebuild.go). progress.go logs what it waits for, and notes its progress in Postgres.
package rebuild

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/progress"
	"stampede/internal/telemetry"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// The reasons of rebuilds, as in the event SaleRebuilt, the log and the metrics.
const (
	// ReasonServer: the Redis server is not the verified one: it was restarted, replaced or emptied.
	ReasonServer = "server"
	// ReasonUnverified: no server was ever verified for the partition.
	ReasonUnverified = "unverified"
	// ReasonSaleLost: the verified server lacks a sale.
	ReasonSaleLost = "sale-lost"
	// ReasonUnfinished: the epochs or the shards of a sale differ in Redis and Postgres, as after an interrupted
	// rebuild.
	ReasonUnfinished = "unfinished"
	// ReasonSetBack: Postgres has an order at a place that Redis has not given out, or a live one that Redis does
	// not hold.
	ReasonSetBack = "set-back"
	// ReasonRefused: Postgres refused an order that Redis had accepted.
	ReasonRefused = "refused"
	// ReasonByHand: an operator started it.
	ReasonByHand = "by-hand"
	// ReasonReconciled: reconcile started it, because Redis and Postgres differed.
	ReasonReconciled = "reconciled"
)

var (
	// ErrRunning is returned while another process rebuilds the partition.
	ErrRunning = errors.New("another rebuild is running")
	// ErrServerUnverified is returned for the rebuild of a single sale with an unverified Redis server: other sales may
	// be lost as well, so the partition has to be rebuilt.
	ErrServerUnverified = errors.New("the whole partition has to be rebuilt: its Redis server is not the verified one")
)

// triesMax bounds the tries of a rebuild during which Redis is lost again.
const triesMax = 5

// Config configures a Rebuilder. The first four fields have no default.
type Config struct {
	Catalog *catalog.Catalog
	Logger  *slog.Logger
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
}

// Rebuilder rebuilds the stock of sales in Redis from Postgres. Meanwhile the sales are closed: buyers receive 503 and
// retry. After a crash at any point the unfinished sales stay closed, and the next rebuild starts from the beginning.
//
// A lock of Postgres for each partition allows one rebuild of it at a time in all processes. Correctness does not
// depend on it: of two concurrent rebuilds of a sale, only the one that closed it last can raise its epoch or open it
// (decision 18). Partitions are rebuilt at the same time, at most rebuildsMax of them by one process.
// It is safe for concurrent use.
type Rebuilder struct {
	finder
	metrics  *metrics
	attempts attempts
	running  chan struct{} // holds a token for each rebuild
}

// New returns a Rebuilder. It sends nothing to Redis or Postgres.
func New(config Config) (*Rebuilder, error) {
	config.Logger = cmp.Or(config.Logger, slog.Default())
	m, err := newMetrics(config.Registerer)
	if err != nil {
		return nil, err
	}
	r := &Rebuilder{
		finder:  finder{config: config, Ledger: ledger.New(config.Catalog.Pool)},
		metrics: m, running: make(chan struct{}, rebuildsMax),
	}
	r.logged.missed.Interval, r.logged.delayed.Interval = proofsLoggedEvery, proofsLoggedEvery
	return r, nil
}

type metrics struct {
	rebuilds *prometheus.CounterVec
	seconds  prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	rebuilds, err1 := telemetry.RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_rebuilds_total",
		Help: "Finished rebuilds of stock in Redis, by reason: server, unverified, sale-lost, unfinished, set-back, " +
			"refused, by-hand or reconciled.",
	}, []string{"reason"}))
	seconds, err2 := telemetry.RegisterOnce(reg, prometheus.NewHistogram(telemetry.Native(prometheus.HistogramOpts{
		Name:    "stampede_rebuild_duration_seconds",
		Help:    "How long a finished rebuild took. Its sales were closed for no longer.",
		Buckets: prometheus.ExponentialBuckets(0.01, 2, 14),
	})))
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	for _, reason := range []string{
		ReasonServer, ReasonUnverified, ReasonSaleLost, ReasonUnfinished, ReasonSetBack, ReasonRefused, ReasonByHand,
		ReasonReconciled,
	} {
		rebuilds.WithLabelValues(reason) // creates the series: increase() misses the first value of a new one
	}
	return &metrics{rebuilds: rebuilds, seconds: seconds}, nil
}

// Partition rebuilds the stock of all sales of a partition and verifies its current Redis server. Sales that are not
// over come first and are open again while ended sales follow.
//
// Sales with several shards come last, each on its own and without the lock of the partition. Those that cannot be
// rebuilt yet are Report.Unfinished.
//
// Unrecorded orders in the stream are first recorded in Postgres, so the rebuild of an intact server loses none. The
// error is ErrRunning, or one of Redis or Postgres; the report is also valid with an error.
func (r *Rebuilder) Partition(ctx context.Context, partition int, reason string) (Report, error) {
	session, err := r.begin(ctx, partition)
	if err != nil {
		return Report{}, fmt.Errorf("rebuild partition %d: %w", partition, err)
	}
	report, err := r.partition(ctx, session, partition, reason)
	session.end()
	finishErr := r.finishAll(ctx, &report)
	return report, errors.Join(err, finishErr)
}

// Sale rebuilds the stock of one sale, while other sales stay open. The error is ErrRunning,
// reservation.ErrSaleNotFound, ErrServerUnverified, or one of Redis or Postgres.
func (r *Rebuilder) Sale(ctx context.Context, sale uuid.UUID, reason string) (Report, error) {
	return r.saleWith(ctx, sale, reason, 0)
}

// RaiseShards is Sale and raises the number of shards of the sale. The error may also be an *order.InvalidError for a
// number below the present one or above that of the partitions at the sale's creation, or an *IllegalTransitionError.
func (r *Rebuilder) RaiseShards(ctx context.Context, sale uuid.UUID, shards int, reason string) (Report, error) {
	found, err := r.findSale(ctx, sale)
	if err == nil {
		err = found.checkShards(shards)
	}
	if err == nil && shards > found.layout.Shards {
		_, err = catalog.Check(ctx, r.config.Catalog.Pool, catalog.OpShard, sale)
	}
	if err != nil {
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", sale, err)
	}
	return r.saleWith(ctx, sale, reason, shards)
}

func (s *requiredSale) checkShards(shards int) error {
	layout := s.layout
	if shards >= layout.Shards && shards <= layout.Partitions {
		return nil
	}
	return &order.InvalidError{Field: "shards", Reason: fmt.Sprintf(
		"must be %d, as many as the sale has, to %d, the number of partitions at its creation", layout.Shards,
		layout.Partitions)}
}

func (r *Rebuilder) saleWith(ctx context.Context, sale uuid.UUID, reason string, shards int) (Report, error) {
	found, err := r.findSale(ctx, sale)
	if err != nil {
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", sale, err)
	}
	session, err := r.begin(ctx, found.layout.Home)
	if err != nil {
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", sale, err)
	}
	defer session.end()
	return r.sale(ctx, session, found.need(reason), shards)
}

// partition is Partition under the lock.
func (r *Rebuilder) partition(ctx context.Context, s *lockSession, partition int, reason string) (Report, error) {
	b := r.newBuild(s, Need{partition: partition, Reason: reason})
	b.log.Warn(logBegunPartition, r.attempts.logFields(b.need)...)
	return b.finish(b.retryWhileLost(ctx, b.wholePartition))
}

// sale is Sale or RaiseShards under the lock.
func (r *Rebuilder) sale(ctx context.Context, s *lockSession, n Need, shards int) (Report, error) {
	b := r.newBuild(s, n)
	b.shards = shards
	b.log = b.log.With("sale", n.Sale)
	b.log.Warn(logBegunSale, r.attempts.logFields(b.need)...)
	return b.finish(b.retryWhileLost(ctx, func(ctx context.Context) error { return b.oneSale(ctx, n.Sale) }))
}

// build is one rebuild.
type build struct {
	*Rebuilder
	need      Need
	partition int // of the need
	shards    int // that a sale has from then on; 0 for as many as before
	session   *lockSession
	token     string // of the current try
	step      atomic.Pointer[step]
	line      *progress.Line // of the command, if it is one
	log       *slog.Logger
	began     time.Time
	report    Report
	// salesDone of salesTotal are rebuilt in this try; 0 before they are counted.
	salesDone, salesTotal atomic.Int64
}

func (r *Rebuilder) newBuild(s *lockSession, n Need) *build {
	b := &build{
		Rebuilder: r, need: n, partition: n.partition, session: s, token: reservation.NewRebuildToken(),
		log: r.config.Logger.With("partition", n.partition, "reason", n.Reason), began: time.Now(),
	}
	b.at("begin")
	return b
}

// retryWhileLost calls do again if Redis was lost meanwhile, at most triesMax times.
func (b *build) retryWhileLost(ctx context.Context, do func(context.Context) error) error {
	b.line = progress.From(ctx)
	defer b.note(ctx)()
	defer b.watch(ctx)()
	for try := 1; ; try++ {
		b.token = reservation.NewRebuildToken()
		b.report = Report{Partition: b.partition, Reason: b.need.Reason, Tries: try}
		b.salesDone.Store(0)
		b.salesTotal.Store(0)
		err := do(ctx)
		if !errors.Is(err, reservation.ErrServerChanged) || try == triesMax {
			return err
		}
		b.log.Warn("restarting the rebuild", "error", err)
	}
}

func (b *build) finish(err error) (Report, error) {
	took := time.Since(b.began)
	b.report.Seconds = took.Seconds()
	if b.attempts.note(b.need, err) && !errors.Is(err, context.Canceled) {
		b.log.Error(logFailed, "error", err)
	}
	switch {
	case err != nil && b.need.Sale != uuid.Nil:
		return b.report, fmt.Errorf("rebuild sale=%s: %w", b.need.Sale, err)
	case err != nil:
		return b.report, fmt.Errorf("rebuild partition %d: %w", b.partition, err)
	}
	b.metrics.rebuilds.WithLabelValues(b.need.Reason).Inc()
	b.metrics.seconds.Observe(took.Seconds())
	units, orders := b.report.held()
	b.log.Warn("rebuilt the stock from Postgres", "took", took, "sales", len(b.report.Sales), "orders", orders,
		"units_held", units,
		"drained_confirmed", b.report.Drained.Confirmed, "drained_rejected", b.report.Drained.Rejected,
		"drained_voided", b.report.Drained.Voided, "tries", b.report.Tries)
	return b.report, nil
}

// HealPartition rebuilds what has to be rebuilt in a partition, unless another process does. Tried is true if it began
// a rebuild. Postgres is read before Redis: required is its answer.
func (r *Rebuilder) HealPartition(
	ctx context.Context, partition int, required *Required,
) (tried bool, err error) {
	found, err := r.findNeeds(ctx, partition, required)
	if err == nil {
		r.attempts.keep(partition, found)
	}
	isSharded := func(n Need) bool { return n.sharded }
	if own := slices.DeleteFunc(slices.Clone(found), isSharded); len(own) > 0 {
		tried, err = r.healOwn(ctx, partition, required.withEnded, own[0])
	}
	failed := []error{err}
	for _, n := range found {
		if !n.sharded || ctx.Err() != nil {
			continue
		}
		began, err := r.healSharded(ctx, n)
		tried, failed = tried || began, append(failed, err)
	}
	if ctx.Err() != nil {
		return tried, ctx.Err()
	}
	return tried, errors.Join(failed...)
}

// healOwn rebuilds the partition, or its sales that have one shard.
func (r *Rebuilder) healOwn(ctx context.Context, partition int, withEnded bool, first Need) (tried bool, err error) {
	session, err := r.begin(ctx, partition)
	if errors.Is(err, ErrRunning) {
		r.logRival(ctx, first)
		return false, nil // it may rebuild the same
	} else if err != nil {
		return false, err
	}
	report, tried, err := r.healLocked(ctx, session, partition, withEnded)
	session.end()
	finishErr := r.finishAll(ctx, &report)
	return tried, errors.Join(err, finishErr)
}

// healLocked is healOwn under the lock. It returns the report of the partition if it has rebuilt that.
func (r *Rebuilder) healLocked(
	ctx context.Context, session *lockSession, partition int, withEnded bool,
) (report Report, tried bool, err error) {
	// Another process may have rebuilt it just before. With the lock this result is final.
	required, err := r.Required(ctx, withEnded)
	if err != nil {
		return Report{}, false, err
	}
	found, err := r.findNeeds(ctx, partition, required)
	failed := []error{err}
	for _, n := range found {
		switch {
		case n.sharded:
			continue
		case n.Sale == uuid.Nil:
			report, err = r.partition(ctx, session, n.partition, n.Reason)
		default:
			_, err = r.sale(ctx, session, n, 0)
		}
		tried, failed = true, append(failed, err)
		if ctx.Err() != nil {
			return report, true, ctx.Err()
		}
	}
	return report, tried, errors.Join(failed...)
}

// healSharded rebuilds a sale with several shards. It is no error that the sale has to wait for another rebuild or for
// another of its servers: a later check finds it again.
func (r *Rebuilder) healSharded(ctx context.Context, n Need) (tried bool, err error) {
	report, err := r.Finish(ctx, n.Sale, n.Reason)
	switch {
	case errors.Is(err, ErrRunning):
		r.logRival(ctx, n)
		return false, nil
	case errors.Is(err, ErrServerUnverified):
		return false, nil
	}
	return report.Tries > 0, err
}

// finishAll rebuilds the sales with several shards that the rebuild of a partition has closed. It adds them to that
// rebuild's report.
func (r *Rebuilder) finishAll(ctx context.Context, whole *Report) error {
	closed := whole.Unfinished
	whole.Unfinished = nil
	var failed []error
	for _, sale := range closed {
		report, err := r.Finish(ctx, sale, whole.Reason)
		whole.add(report)
		if err == nil {
			continue
		}
		whole.Unfinished = append(whole.Unfinished, sale)
		if !errors.Is(err, ErrRunning) && !errors.Is(err, ErrServerUnverified) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// Finish is Sale for a sale with several shards that may have been rebuilt since its need was noticed: then it returns
// an empty report. The error is ErrServerUnverified also if a server of the sale does not answer.
func (r *Rebuilder) Finish(ctx context.Context, sale uuid.UUID, reason string) (Report, error) {
	found, err := r.findSale(ctx, sale)
	if err == nil {
		err = r.askServers(ctx, found.layout)
	}
	var session *lockSession
	if err == nil {
		session, err = r.begin(ctx, found.layout.Home)
	}
	if err != nil {
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", sale, err)
	}
	defer session.end()
	// Another process may have rebuilt it just before. With the lock this result is final.
	var needs []Need
	if found, err = r.findSale(ctx, sale); err == nil {
		needs, err = r.needsAmong(ctx, found.shards(), map[bool]int64{})
	}
	switch {
	case err != nil:
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", sale, err)
	case len(needs) == 0:
		r.attempts.note(found.need(reason), nil)
		return Report{}, nil
	}
	return r.sale(ctx, session, found.need(reason), 0)
}
