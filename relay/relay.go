package relay

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/internal/tracing"
	"stampede/lock"
	"stampede/relay/broker"
	"stampede/relay/target"
	"stampede/reservation"
)

const (
	defaultScan  = time.Second
	defaultLease = 10 * time.Second
	defaultDrain = 10 * time.Second
)

// Config is what a Relay needs.
type Config struct {
	Pool *pgxpool.Pool
	// Redis has the locks of the targets.
	Redis redis.UniversalClient
	Keys  reservation.Keys
	// Name names this process for people.
	Name string
	// Source is the source of all events.
	Source string
	// DrainTimeout is how long a stopping relay waits for the events in flight; 10 s by default.
	DrainTimeout time.Duration
	// Scan is how often the targets are read; a second by default. Lease is how long a dead process keeps its targets;
	// 10 s by default.
	Scan, Lease time.Duration
	// Stdout is where the events for a target stdout go.
	Stdout io.Writer
	// TLS is for receivers of webhooks with certificates of other authorities than those of the system.
	TLS        *tls.Config
	Agent      string
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	// Tracer traces the deliveries of traced events; nil for none.
	Tracer *tracing.Tracer
}

func (c *Config) setDefaults() {
	if c.DrainTimeout == 0 {
		c.DrainTimeout = defaultDrain
	}
	if c.Scan == 0 {
		c.Scan = defaultScan
	}
	if c.Lease == 0 {
		c.Lease = defaultLease
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Stdout == nil {
		c.Stdout = io.Discard
	}
}

// Relay serves as many of the targets as no other process serves.
type Relay struct {
	config  Config
	targets *target.Store
	locker  *lock.Locker
	metrics *metrics
	stdout  *broker.Lines

	mu      sync.Mutex
	serving map[string]struct{}
	outages map[string]*retry.Outage
	// ended has room for one signal: a target is not served any more.
	ended chan struct{}
}

// New returns a Relay, and registers its metrics.
func New(config Config) (*Relay, error) {
	config.setDefaults()
	m, err := newMetrics(config.Registerer)
	if err != nil {
		return nil, err
	}
	return &Relay{
		config: config, targets: target.NewStore(config.Pool), metrics: m,
		stdout:  broker.NewLines(config.Stdout),
		locker:  lock.New(config.Redis, lock.WithPrefix(config.Keys.RelayLocker()), lock.WithLease(config.Lease)),
		serving: map[string]struct{}{}, outages: map[string]*retry.Outage{}, ended: make(chan struct{}, 1),
	}, nil
}

// Run serves targets until ctx is done, and then waits for the events in flight for at most DrainTimeout.
func (r *Relay) Run(ctx context.Context) error {
	var sessions sync.WaitGroup
	outage := retry.Outage{Log: r.config.Logger, Doing: "read the targets of the relay"}
	for ctx.Err() == nil {
		all, err := r.list(ctx)
		if ctx.Err() != nil {
			break
		}
		outage.Note(err)
		if err == nil {
			r.metrics.update(all, time.Now())
		}
		for i := range all {
			if t := &all[i]; t.State == target.Active && r.begin(t.Name) {
				sessions.Go(func() {
					defer r.end(t.Name)
					r.serve(ctx, t.Name)
				})
			}
		}
		select {
		case <-ctx.Done():
		case <-r.ended:
			retry.Pause(r.config.Scan/10, ctx.Done()) // a target that fails at once does not make this spin
		case <-time.After(r.config.Scan):
		}
	}
	sessions.Wait()
	closing, cancel := retry.ForCall(ctx)
	defer cancel()
	_ = r.locker.Close(closing) // what is left ends with its lease
	return nil
}

func (r *Relay) list(ctx context.Context) ([]target.Standing, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	return r.targets.List(ctx)
}

// begin returns false if the target is served already.
func (r *Relay) begin(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, served := r.serving[name]; served {
		return false
	}
	r.serving[name] = struct{}{}
	return true
}

func (r *Relay) end(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.serving, name)
}

// serve serves a target if no other process does, until another one has claimed it, an operator has changed it, an
// error ends the session, or ctx ends.
func (r *Relay) serve(ctx context.Context, name string) {
	outage := r.targetOutage(name)
	key := r.config.Keys.RelayLock(name)
	lease, err := r.locker.TryAcquire(ctx, key)
	if errors.Is(err, lock.ErrBusy) || errors.Is(err, context.Canceled) {
		return
	}
	if err != nil {
		retry.Pause(outage.Failed(fmt.Errorf("lock the target: %w", err)), ctx.Done())
		return
	}
	err = r.deliver(ctx, name)
	releasing, cancel := retry.ForCall(ctx)
	defer cancel()
	_ = lease.Release(releasing) // a lease that was lost is no harm: the fence decides
	switch {
	case err == nil:
	case errors.Is(err, target.ErrStale), errors.Is(err, target.ErrNotFound):
		r.config.Logger.Info("a target is served by another process, or was changed", "target", name)
		outage.Over()
	default:
		retry.Pause(outage.Failed(err), ctx.Done())
	}
	select {
	case r.ended <- struct{}{}:
	default:
	}
}

// targetOutage returns the outage of a target, which only the one session of the target uses.
func (r *Relay) targetOutage(name string) *retry.Outage {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.outages[name] == nil {
		r.outages[name] = &retry.Outage{Log: r.config.Logger.With("target", name), Doing: "serve a target of the relay"}
	}
	return r.outages[name]
}

// deliver claims the target and serves it on a connection of its own.
func (r *Relay) deliver(ctx context.Context, name string) error {
	calling, cancel := retry.ForCall(ctx)
	defer cancel()
	pooled, err := r.config.Pool.Acquire(calling)
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	defer pooled.Release()
	conn := pooled.Conn()
	t, err := target.Claim(calling, conn, name, r.config.Name)
	if err != nil {
		return err
	}
	s, err := r.newSession(t, conn)
	if err != nil {
		return err
	}
	r.metrics.serving.WithLabelValues(name).Set(1)
	defer r.metrics.stop(name)
	return s.run(ctx)
}
