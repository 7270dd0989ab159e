// Package survey looks at what all workers share (dead letters, payments, units, audits, Redis servers) every few
// seconds, for gauges that are the same in each worker. A scrape costs no query. What cannot be read is absent: an old
// value would say that all is well.
package survey

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/internal/redisinfo"
	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
)

const (
	// salesMax bounds the sales with gauges, and currenciesMax the currencies.
	salesMax, currenciesMax = 50, 10
	// share: at most one part in share of the time is spent on summing refunds, counting who waits, and counting units, of
	// which paid ones are counted in Postgres.
	share = 20
	// pauseMax bounds the pause that follows from it.
	pauseMax = time.Minute
	// validLooks is how many looks may be missed before a result is not shown any more.
	validLooks = 3
)

// Config configures a Survey. Only Interval has a default.
type Config struct {
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
	refunds  seen[[]ledger.RefundsDue]
	units    seen[[]saleUnits]
	draws    seen[[]draws.Watched]
	unserved seen[time.Duration]
	shut     seen[int]
	workers  seen[int]
	servers  seen[[]redisinfo.Server]
	// server is how Postgres is.
	server seen[postgresServer]
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

	Waiting, Unclear, Disputed                      int64
	WaitingSeconds, UnclearSeconds, DisputedSeconds float64

	At     *float64
	Broken []string
}

// postgresServer is a row of the query, and how long a statement without work took to be answered.
type postgresServer struct {
	Active, Idle, InTransaction, Connections, ConnectionsMax int64

	OldestSeconds           float64
	LocksWaiting, Deadlocks int64

	Ping  time.Duration  `db:"-"`
	Clock clocks.Reading `db:"-"`
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
			set(s, &s.servers, redisinfo.Masters(limited, s.config.Catalog.Store.Redis), nil, s.config.Interval)
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
		set(s, &s.server, postgresServer{}, err, pause)
		set(s, &s.refunds, nil, err, pause)
		set(s, &s.units, nil, err, pause)
		set(s, &s.draws, nil, err, pause)
		set(s, &s.unserved, 0, err, pause)
		set(s, &s.shut, 0, err, pause)
		return pause
	}
	server, err := within(ctx, s.askServer)
	s.note("look at the server of Postgres", err)
	set(s, &s.server, server, err, pause)
	began := time.Now()
	refunds, err := within(ctx, ledger.New(s.config.Catalog.Pool).RefundsDue)
	s.note("sum the refunds that are due", err)
	refundsErr := err
	watched, watchedErr := within(ctx, func(ctx context.Context) ([]draws.Watched, error) {
		return draws.New(s.config.Catalog.Pool).Watch(ctx, salesMax)
	})
	s.note("look at the draws", watchedErr)
	units, err := within(ctx, s.countUnits)
	if s.note("count the units of the followed sales", err); err == nil {
		pause = min(max(pause, share*time.Since(began)), max(pause, pauseMax))
	}
	set(s, &s.units, units, err, pause)
	set(s, &s.refunds, refunds, refundsErr, pause)
	set(s, &s.draws, watched, watchedErr, pause)
	unserved, err := within(ctx, func(ctx context.Context) (time.Duration, error) {
		return Unserved(ctx, s.config.Catalog.Pool, s.config.Catalog.Store.Redis, s.config.Catalog.Store.Keys)
	})
	s.note("look for a relay", err)
	set(s, &s.unserved, unserved, err, pause)
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
	rows, _ := s.config.Catalog.Pool.Query(ctx, sql.SurveyLook) // its error comes with the row
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[postgresLook])
	if err == nil {
		err = pg.Writable(ctx, s.config.Catalog.Pool)
	}
	return found, err
}

func (s *Survey) askServer(ctx context.Context) (postgresServer, error) {
	began := time.Now()
	clock, err := pg.ReadClock(ctx, s.config.Catalog.Pool)
	if err != nil {
		return postgresServer{}, err
	}
	ping := time.Since(began)
	rows, _ := s.config.Catalog.Pool.Query(ctx, sql.SurveyServer) // its error comes with the row
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[postgresServer])
	found.Ping, found.Clock = ping, clock
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

// valid returns the result, and false if there is none or it is too old.
func (r seen[T]) valid(now time.Time) (value T, ok bool) { return r.value, now.Before(r.until) }

// Unserved returns for how long an event has waited for an active target of the relay while no process has the lock of
// one: 0 if one has, or nothing waits. It asks the servers, so it needs no relay.
func Unserved(
	ctx context.Context, pool *pgxpool.Pool, rdb redis.UniversalClient, keys reservation.Keys,
) (time.Duration, error) {
	rows, _ := pool.Query(ctx, sql.SurveyRelayTargets) // its error comes with the rows
	var locks []string
	var name string
	var waited, longest float64
	_, err := pgx.ForEachRow(rows, []any{&name, &waited}, func() error {
		locks, longest = append(locks, keys.RelayLock(name)), max(longest, waited)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("look at the targets of the relay: %w", err)
	}
	if longest == 0 {
		return 0, nil
	}
	held, err := rdb.Exists(ctx, locks...).Result() // they are in one slot
	switch {
	case err != nil:
		return 0, fmt.Errorf("look for the locks of the relay: %w", err)
	case held > 0:
		return 0, nil
	}
	return time.Duration(longest * float64(time.Second)), nil
}
