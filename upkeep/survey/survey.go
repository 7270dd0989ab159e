// Package survey looks at what all workers share (dead letters, units, audits, Redis servers) every few seconds, for
// gauges that are the same in each worker. A scrape costs no query. What cannot be read is absent: an old value would
// say that all is well.
package survey

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/pg"
	"stampede/internal/redisinfo"
	"stampede/internal/retry"
	"stampede/reservation/catalog"
	"stampede/sql"
	"stampede/upkeep/audit"
)

const (
	// salesMax bounds the sales with gauges.
	salesMax = 50
	// share: at most one part in share of the time is spent on counting units. Paid ones are counted in Postgres.
	share = 20
	// pauseMax bounds the pause that follows from it.
	pauseMax = time.Minute
	// validLooks is how many looks may be missed before a result is not shown any more.
	validLooks = 3
)

// Config configures a Survey. Only Interval has a default.
type Config struct {
	Pool    *pgxpool.Pool
	Redis   redis.UniversalClient
	Catalog *catalog.Catalog
	// Shut counts the sales that sell nothing until a rebuild.
	Shut   func(ctx context.Context) (int, error)
	Logger *slog.Logger
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
	// Interval is the pause between two looks. Default 5 s.
	Interval time.Duration
}

// Survey looks while Run runs, and shows what it saw last. It is safe for concurrent use.
type Survey struct {
	config Config
	descs  descs
	asking retry.Outage

	mu       sync.Mutex
	postgres seen[postgresLook]
	units    seen[[]saleUnits]
	shut     seen[int]
	workers  seen[int]
	servers  seen[[]redisinfo.Server]
	// postgresUp is whether Postgres answered the last look, and takes writes.
	postgresUp seen[bool]
}

// seen is a result that is valid until a time.
type seen[T any] struct {
	value T
	until time.Time
}

// postgresLook is a row of the query.
type postgresLook struct {
	Parked int64
	At     *float64
	Broken []string
}

// saleUnits are the units of a sale. Only the stock is known while it awaits a rebuild.
type saleUnits struct {
	id                           uuid.UUID
	stock, available, held, sold int64
	known                        bool
}

// New registers the metrics.
func New(config Config) (*Survey, error) {
	config.Interval = cmp.Or(config.Interval, 5*time.Second)
	s := &Survey{
		config: config, descs: newDescs(),
		asking: retry.Outage{Log: config.Logger, Doing: "read dead letters and audits for the metrics"},
	}
	if config.Registerer != nil {
		if err := config.Registerer.Register(s); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return s, nil
}

// Run looks until ctx is done. Redis is asked apart, so that neither server delays the look at the other.
func (s *Survey) Run(ctx context.Context) {
	if s.config.Registerer == nil {
		return
	}
	var looking sync.WaitGroup
	looking.Go(func() {
		s.every(ctx, func() time.Duration {
			limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
			defer cancel()
			set(s, &s.servers, redisinfo.Masters(limited, s.config.Redis), nil, s.config.Interval)
			return s.config.Interval
		})
	})
	looking.Go(func() { s.every(ctx, func() time.Duration { return s.lookInPostgres(ctx) }) })
	looking.Wait()
}

// every looks until ctx is done. A look returns how long to pause after it.
func (s *Survey) every(ctx context.Context, look func() (pause time.Duration)) {
	for {
		if pause := look(); !retry.Pause(retry.Delay(1, pause, pause), ctx.Done()) {
			return
		}
	}
}

// NoteWorkers says how many workers are alive, this one included. It is called again after interval.
func (s *Survey) NoteWorkers(alive int, interval time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.workers = seen[int]{alive, time.Now().Add(validLooks * (interval + lookTimeout))}
}

// lookTimeout bounds each part of a look.
const lookTimeout = 5 * time.Second

// lookInPostgres makes one query at a time, so that it takes one connection.
func (s *Survey) lookInPostgres(ctx context.Context) (pause time.Duration) {
	pause = s.config.Interval
	found, err := within(ctx, s.askPostgres)
	if ctx.Err() != nil {
		return pause
	}
	set(s, &s.postgresUp, err == nil, nil, pause)
	if errors.Is(err, pg.ErrReadOnly) {
		err = nil // it can be read
	}
	s.asking.Note(err)
	set(s, &s.postgres, found, err, pause)
	if err != nil {
		set(s, &s.units, nil, err, pause)
		set(s, &s.shut, 0, err, pause)
		return pause
	}
	began := time.Now()
	units, err := within(ctx, s.countUnits)
	if s.note("count the units of the followed sales", err); err == nil {
		pause = min(max(pause, share*time.Since(began)), max(pause, pauseMax))
	}
	set(s, &s.units, units, err, pause)
	shut, err := within(ctx, s.config.Shut)
	s.note("look for sales that await a rebuild", err)
	set(s, &s.shut, shut, err, pause)
	return pause
}

func within[T any](ctx context.Context, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	return ask(ctx)
}

// note logs for the details only: the worker itself reports servers that do not answer, and sales that need a rebuild.
func (s *Survey) note(doing string, err error) {
	if err != nil {
		s.config.Logger.Debug("cannot "+doing, "error", err)
	}
}

// set stores a result until validLooks looks were missed, or forgets the last one because of an error.
func set[T any](s *Survey, result *seen[T], value T, err error, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		*result = seen[T]{}
		return
	}
	*result = seen[T]{value, time.Now().Add(validLooks * (pause + lookTimeout))}
}

func (s *Survey) askPostgres(ctx context.Context) (postgresLook, error) {
	rows, _ := s.config.Pool.Query(ctx, sql.SurveyLook) // its error comes with the row
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[postgresLook])
	if err == nil {
		err = pg.Writable(ctx, s.config.Pool)
	}
	return found, err
}

func (s *Survey) countUnits(ctx context.Context) ([]saleUnits, error) {
	counted, err := s.config.Catalog.CountFollowed(ctx, salesMax)
	if err != nil {
		return nil, err
	}
	units := make([]saleUnits, len(counted))
	for i, c := range counted {
		units[i] = saleUnits{c.ID, c.Stock, c.Available, c.Held, c.Sold, c.Err == nil}
	}
	return units, nil
}

type descs struct {
	parked, units, workers, shut, auditAt, broken, postgresUp *prometheus.Desc

	redisUp, usedBytes, maxBytes, usedRatio, logged, delayedFsyncs *prometheus.Desc
}

func newDescs() descs {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		help += " Use max; absent while unknown."
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return descs{
		parked: desc("stampede_dead_letters_parked", "Dead letters that wait for an operator, counted up to 10000."),
		units: desc("stampede_sale_units",
			"Units of 50 sales by kind, of those that sell first: stock = available + held + sold. A sale that awaits a "+
				"rebuild has only its stock.", "sale", "kind"),
		workers: desc("stampede_workers_alive", "Workers that have announced themselves in the streams."),
		shut:    desc("stampede_sales_shut", "Sales that are not over and sell nothing until Redis is rebuilt."),
		auditAt: desc("stampede_audit_timestamp_seconds",
			"When the newest recorded audit of all sales was made, in seconds since 1970; without one, when the oldest "+
				"sale was created that is not retired."),
		broken: desc("stampede_audit_promise_broken", "1 if the newest recorded audit found the promise broken, else 0.",
			"promise"),
		postgresUp: prometheus.NewDesc("stampede_postgres_up",
			"1 if Postgres answered the last look of this worker and takes writes, else 0. Use min.", nil, nil),
		redisUp: prometheus.NewDesc("stampede_redis_up",
			"1 if the server of Redis, or master of a cluster, answered the last look of this worker, else 0. Use min by (node).",
			[]string{"node"}, nil),
		usedBytes: desc("stampede_redis_memory_used_bytes", "Memory that the server of Redis uses.", "node"),
		maxBytes:  desc("stampede_redis_memory_max_bytes", "Memory that it may use (maxmemory); 0: unlimited.", "node"),
		usedRatio: desc("stampede_redis_memory_used_ratio", "Used memory by maxmemory, 1 is full; 0 without a maxmemory.", "node"),
		logged: desc("stampede_redis_aof_ok",
			"1 if the append-only file is on and its last write succeeded, else 0.", "node"),
		delayedFsyncs: desc("stampede_redis_aof_delayed_fsyncs_total",
			"Syncs of the append-only file that the disk delayed since the server started, with appendfsync everysec.", "node"),
	}
}

// Describe implements prometheus.Collector.
func (s *Survey) Describe(out chan<- *prometheus.Desc) {
	d := s.descs
	for _, desc := range []*prometheus.Desc{
		d.parked, d.units, d.workers, d.shut, d.auditAt, d.broken, d.postgresUp,
		d.redisUp, d.usedBytes, d.maxBytes, d.usedRatio, d.logged, d.delayedFsyncs,
	} {
		out <- desc
	}
}

// valid returns the result, and false if there is none or it is too old.
func (r seen[T]) valid(now time.Time) (value T, ok bool) { return r.value, now.Before(r.until) }

// Collect implements prometheus.Collector.
func (s *Survey) Collect(out chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	if up, ok := s.postgresUp.valid(now); ok {
		gauge(s.descs.postgresUp, number(up))
	}
	if found, ok := s.postgres.valid(now); ok {
		gauge(s.descs.parked, float64(found.Parked))
		if found.At != nil {
			gauge(s.descs.auditAt, *found.At)
		}
		for _, promise := range audit.PromiseNames() {
			gauge(s.descs.broken, number(slices.Contains(found.Broken, promise)), promise)
		}
	}
	if units, ok := s.units.valid(now); ok {
		for _, u := range units {
			s.collectUnits(u, gauge)
		}
	}
	if alive, ok := s.workers.valid(now); ok {
		gauge(s.descs.workers, float64(alive))
	}
	if shut, ok := s.shut.valid(now); ok {
		gauge(s.descs.shut, float64(shut))
	}
	if servers, ok := s.servers.valid(now); ok {
		for _, server := range servers {
			s.collectServer(out, server, gauge)
		}
	}
}

func (s *Survey) collectUnits(u saleUnits, gauge func(*prometheus.Desc, float64, ...string)) {
	sale := u.id.String()
	gauge(s.descs.units, float64(u.stock), sale, "stock")
	if u.known {
		gauge(s.descs.units, float64(u.available), sale, "available")
		gauge(s.descs.units, float64(u.held), sale, "held")
		gauge(s.descs.units, float64(u.sold), sale, "sold")
	}
}

func (s *Survey) collectServer(
	out chan<- prometheus.Metric, r redisinfo.Server, gauge func(*prometheus.Desc, float64, ...string),
) {
	gauge(s.descs.redisUp, number(r.Up()), r.Name)
	if r.Err != nil {
		return
	}
	used, most, ratio := float64(r.UsedBytes), float64(r.MaxBytes), 0.0
	if most > 0 {
		ratio = used / most
	}
	gauge(s.descs.usedBytes, used, r.Name)
	gauge(s.descs.maxBytes, most, r.Name)
	gauge(s.descs.usedRatio, ratio, r.Name)
	gauge(s.descs.logged, number(r.LogOn && !r.LogFails), r.Name)
	out <- prometheus.MustNewConstMetric(s.descs.delayedFsyncs, prometheus.CounterValue, float64(r.DelayedSyncs), r.Name)
}

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
