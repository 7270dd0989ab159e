package rebuild

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/fulfillment/ledger"
	"stampede/internal/telemetry"
	"stampede/reservation"
)

// Why stock in Redis is made anew: the reason of the event SaleRebuilt, of the log and of the metrics.
const (
	// RebuildServer: the Redis server is not the one on which the stock was: it was restarted, replaced or emptied.
	RebuildServer = "server"
	// RebuildUnverified: it was never noted on which server the stock is.
	RebuildUnverified = "unvouched"
	// RebuildLost: the server lacks a sale.
	RebuildLost = "sale-lost"
	// RebuildUnfinished: a sale has another epoch there than in Postgres, as a rebuild leaves it that was broken off.
	RebuildUnfinished = "unfinished"
	// RebuildSetBack: Postgres has an order at a place of a sale that Redis has not given out, or a live one that Redis
	// does not hold.
	RebuildSetBack = "set-back"
	// RebuildRefused: Postgres has refused an order that Redis had accepted.
	RebuildRefused = "refused"
	// RebuildByHand: an operator asked for it.
	RebuildByHand = "by-hand"
	// RebuildReconciled: Redis and Postgres differed, and an operator had them reconciled.
	RebuildReconciled = "reconciled"
)

var (
	// ErrRunning is returned while another process rebuilds. It will see to what is to be done, or
	// leave it to be found again.
	ErrRunning = errors.New("a rebuild is under way")
	// ErrServerUnverified is returned for the rebuild of a single sale on a Redis server of which more may be
	// lost: its partition has to be rebuilt.
	ErrServerUnverified = errors.New("the whole partition has to be rebuilt: its Redis server is not the one that it " +
		"was on")
)

// rebuildTries is how often a rebuild is begun anew because Redis was lost meanwhile, before it is given up.
const rebuildTries = 5

// Config configures a Rebuilder. The first four fields have no default.
type Config struct {
	Pool  *pgxpool.Pool
	Redis redis.UniversalClient
	Keys  reservation.Keys
	Store *reservation.Store

	Logger *slog.Logger
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
}

// Rebuilder makes the stock of sales in Redis anew from Postgres. While it does, the sale is closed:
// buyers are told to come again, and nobody is refused for good. It may be broken off at any instant: what it
// has not finished stays closed, and the next rebuild starts from the beginning.
//
// One rebuild runs at a time, in all processes together; a lock of Postgres sees to that. Nothing rests on
// it: of two rebuilds of a sale that are under way at once, only the one that has begun last can raise its epoch
// or open it (decision 18). It is safe for concurrent use.
type Rebuilder struct {
	config  Config
	Ledger  *ledger.Ledger
	metrics *rebuildMetrics
	trouble rebuildTrouble

	// What a worker learns of its orders that shows that Redis lacks some.
	refused   refusals
	Witnesses witnesses
	said      said
}

// New returns a Rebuilder. It does not talk to Redis or Postgres yet.
func New(config Config) (*Rebuilder, error) {
	config.Logger = cmp.Or(config.Logger, slog.Default())
	metrics, err := newRebuildMetrics(config.Registerer)
	if err != nil {
		return nil, err
	}
	r := &Rebuilder{config: config, Ledger: ledger.New(config.Pool), metrics: metrics}
	r.said.missed.Interval, r.said.putOff.Interval = proofsSaid, proofsSaid
	return r, nil
}

type rebuildMetrics struct {
	rebuilds *prometheus.CounterVec
	seconds  prometheus.Histogram
}

func newRebuildMetrics(reg prometheus.Registerer) (*rebuildMetrics, error) {
	rebuilds, err1 := telemetry.RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_rebuilds_total",
		Help: "Rebuilds of stock in Redis that were finished, by why: server, unvouched, sale-lost, unfinished, set-back, " +
			"refused, by-hand or reconciled.",
	}, []string{"reason"}))
	seconds, err2 := telemetry.RegisterOnce(reg, prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "stampede_rebuild_seconds", Help: "How long a finished rebuild took. Its sales were closed for no longer.",
		Buckets: prometheus.ExponentialBuckets(0.01, 2, 14),
	}))
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	for _, reason := range []string{
		RebuildServer, RebuildUnverified, RebuildLost, RebuildUnfinished, RebuildSetBack, RebuildRefused, RebuildByHand,
		RebuildReconciled,
	} {
		rebuilds.WithLabelValues(reason) // is there before the first, which increase() would miss otherwise
	}
	return &rebuildMetrics{rebuilds: rebuilds, seconds: seconds}, nil
}

// Partition makes the stock of all sales of a partition anew, and verifies the Redis server that
// has it now: sales that are not over first, which are open from then on, and those that have ended after them.
//
// Before anything of Redis is given up, what is in the stream and not in Postgres yet is recorded there, so
// that a server that lost nothing loses nothing by this. The error is ErrRunning, or one of Redis or Postgres;
// the report says what was done all the same.
func (r *Rebuilder) Partition(ctx context.Context, partition int, reason string) (Report, error) {
	session, err := r.begin(ctx)
	if err != nil {
		return Report{}, fmt.Errorf("rebuild partition %d: %w", partition, err)
	}
	defer session.Close()
	return r.partition(ctx, session, partition, reason)
}

// Sale makes the stock of one sale anew; the other ones go on. The error is ErrRunning,
// reservation.ErrSaleNotFound, ErrServerUnverified, or one of Redis or Postgres.
func (r *Rebuilder) Sale(ctx context.Context, sale uuid.UUID, reason string) (Report, error) {
	session, err := r.begin(ctx)
	if err != nil {
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", sale, err)
	}
	defer session.Close()
	return r.sale(ctx, session, sale, reason)
}

// partition is Partition under the lock.
func (r *Rebuilder) partition(ctx context.Context, s *Session, partition int, reason string) (Report, error) {
	b := r.newBuild(s, Need{partition: partition, Reason: reason})
	b.log.Warn(rebuildingPart, r.trouble.before(b.of)...)
	return b.finish(b.inTries(ctx, b.wholePartition))
}

// sale is Sale under the lock.
func (r *Rebuilder) sale(ctx context.Context, s *Session, id uuid.UUID, reason string) (Report, error) {
	sale, err := r.findSale(ctx, id)
	if err != nil {
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", id, err)
	}
	b := r.newBuild(s, Need{sale.partition, id, reason})
	b.log = b.log.With("sale", id)
	b.log.Warn(rebuildingSale, r.trouble.before(b.of)...)
	return b.finish(b.inTries(ctx, func(ctx context.Context) error { return b.oneSale(ctx, id) }))
}

// build is one rebuild.
type build struct {
	*Rebuilder
	of        Need
	partition int // of it
	session   *Session
	Token     string // of the try that is under way
	step      atomic.Pointer[rebuildStep]
	log       *slog.Logger
	began     time.Time
	report    Report
}

func (r *Rebuilder) newBuild(s *Session, n Need) *build {
	b := &build{
		Rebuilder: r, of: n, partition: n.partition, session: s, Token: reservation.NewRebuildToken(),
		log: r.config.Logger.With("partition", n.partition, "reason", n.Reason), began: time.Now(),
	}
	b.at("begin")
	return b
}

// inTries begins anew for as long as Redis is lost meanwhile.
func (b *build) inTries(ctx context.Context, do func(context.Context) error) error {
	defer b.watch(ctx)()
	for try := 1; ; try++ {
		b.Token = reservation.NewRebuildToken()
		b.report = Report{Partition: b.partition, Reason: b.of.Reason, Tries: try}
		err := do(ctx)
		if !errors.Is(err, reservation.ErrServerChanged) || try == rebuildTries {
			return err
		}
		b.log.Warn("beginning the rebuild anew", "error", err)
	}
}

func (b *build) finish(err error) (Report, error) {
	took := time.Since(b.began)
	b.report.Seconds = took.Seconds()
	if b.trouble.note(b.of, err) && !errors.Is(err, context.Canceled) {
		b.log.Error(rebuildFailed, "error", err)
	}
	if err != nil {
		return b.report, fmt.Errorf("rebuild partition %d: %w", b.partition, err)
	}
	b.metrics.rebuilds.WithLabelValues(b.of.Reason).Inc()
	b.metrics.seconds.Observe(took.Seconds())
	units, orders := b.report.held()
	b.log.Warn("rebuilt the stock from Postgres", "took", took, "sales", len(b.report.Sales), "orders", orders,
		"units_held", units,
		"drained_confirmed", b.report.Drained.Confirmed, "drained_rejected", b.report.Drained.Rejected,
		"drained_voided", b.report.Drained.Voided, "tries", b.report.Tries)
	return b.report, nil
}
