package fleet

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/reservation"
	"stampede/reservation/catalog"
)

const (
	// roundInterval is the time between two snapshots.
	roundInterval = time.Second
	// roundTimeout bounds what a snapshot waits for: a scrape, a look into Redis, a look into Postgres.
	roundTimeout = 800 * time.Millisecond
)

// Config configures a Fleet.
type Config struct {
	// Pool and Catalog read Postgres, Store and Catalog read Redis. They have no default.
	Pool    *pgxpool.Pool
	Catalog *catalog.Catalog
	Store   *reservation.Store
	// Targets are the URLs of metrics, such as http://worker-1:9090/metrics. The scheme dns+http resolves the host every
	// few seconds and scrapes each of its addresses as a process.
	Targets []string
	Logger  *slog.Logger
}

// Fleet collects snapshots of an installation. It is safe for concurrent use.
type Fleet struct {
	config Config
	newest atomic.Pointer[Snapshot]

	mu      sync.Mutex
	changed chan struct{} // closed with the next snapshot
	history history
}

// New returns a Fleet. It connects to nothing before Run. The error names a target that is no URL.
func New(config Config) (*Fleet, error) {
	if config.Pool == nil || config.Catalog == nil || config.Store == nil {
		return nil, errors.New("a fleet needs Postgres, a catalog and Redis")
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	f := &Fleet{config: config, changed: make(chan struct{})}
	f.newest.Store(&Snapshot{At: time.Now()})
	return f, nil
}

// Run collects until ctx ends, and returns nil then.
func (f *Fleet) Run(ctx context.Context) error {
	ticks := time.NewTicker(roundInterval)
	defer ticks.Stop()
	for {
		f.publish(&Snapshot{At: time.Now()})
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}

// Snapshot returns the newest one. Before the first round it is empty and its Number is 0.
func (f *Fleet) Snapshot() *Snapshot { return f.newest.Load() }

// Next waits for a snapshot with a Number above after and returns it. The error is that of ctx.
func (f *Fleet) Next(ctx context.Context, after uint64) (*Snapshot, error) {
	for {
		f.mu.Lock()
		changed := f.changed
		f.mu.Unlock()
		if s := f.newest.Load(); s.Number > after {
			return s, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// History returns the last fifteen minutes, one point a second, oldest first. The points must not be changed.
func (f *Fleet) History() []Point {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.history.points()
}

// publish makes s the newest snapshot.
func (f *Fleet) publish(s *Snapshot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.Number = f.newest.Load().Number + 1
	f.history.add(pointOf(s))
	f.newest.Store(s)
	close(f.changed)
	f.changed = make(chan struct{})
}
