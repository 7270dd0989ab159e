// Package connect creates clients of Redis and Postgres with the limits of each kind of use. All of them
// connect on first use, and reconnect after an outage.
package connect

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/tracing"
	"stampede/sql"
)

// Pools are the pools of connections of an ingress, a worker or a relay, as a prometheus.Collector. Register it once it
// has all of them.
type Pools struct {
	postgres map[string]*pgxpool.Pool
	redis    map[string]redis.UniversalClient

	connections, limit, waits, waitSeconds, timeouts *prometheus.Desc
}

// NewPools returns a collector without pools.
func NewPools(of string) *Pools {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, append([]string{"server", "pool"}, labels...), prometheus.Labels{"of": of})
	}
	return &Pools{
		postgres: map[string]*pgxpool.Pool{}, redis: map[string]redis.UniversalClient{},
		connections: desc("stampede_pool_connections",
			"Connections of a pool to Postgres or Redis by state: used, idle, or being opened (opening; of Postgres only).",
			"state"),
		limit: desc("stampede_pool_connections_limit",
			"Connections that a pool may have; of a cluster for each node."),
		waits:       desc("stampede_pool_waits_total", "Times that a connection was not free at once."),
		waitSeconds: desc("stampede_pool_wait_seconds_total", "Time spent waiting for a free connection."),
		timeouts:    desc("stampede_pool_timeouts_total", "Waits for a free connection that were given up."),
	}
}

// Postgres adds a pool of Postgres.
func (p *Pools) Postgres(name string, pool *pgxpool.Pool) { p.postgres[name] = pool }

// Redis adds a client of Redis.
func (p *Pools) Redis(name string, client redis.UniversalClient) { p.redis[name] = client }

// Register registers the collector.
func (p *Pools) Register(reg prometheus.Registerer) error {
	if err := reg.Register(p); err != nil {
		return fmt.Errorf("register the metrics of pools: %w", err)
	}
	return nil
}

// Describe implements prometheus.Collector.
func (p *Pools) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{p.connections, p.limit, p.waits, p.waitSeconds, p.timeouts} {
		out <- desc
	}
}

// Collect implements prometheus.Collector.
func (p *Pools) Collect(out chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	counter := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, value, labels...)
	}
	for name, pool := range p.postgres {
		s := pool.Stat()
		gauge(p.connections, float64(s.AcquiredConns()), "postgres", name, "used")
		gauge(p.connections, float64(s.IdleConns()), "postgres", name, "idle")
		gauge(p.connections, float64(s.ConstructingConns()), "postgres", name, "opening")
		gauge(p.limit, float64(s.MaxConns()), "postgres", name)
		counter(p.waits, float64(s.EmptyAcquireCount()), "postgres", name)
		counter(p.waitSeconds, s.EmptyAcquireWaitTime().Seconds(), "postgres", name)
		counter(p.timeouts, float64(s.CanceledAcquireCount()), "postgres", name)
	}
	for name, client := range p.redis {
		s := client.PoolStats()
		gauge(p.connections, float64(s.TotalConns)-float64(s.IdleConns), "redis", name, "used")
		gauge(p.connections, float64(s.IdleConns), "redis", name, "idle")
		gauge(p.limit, float64(poolSize(client)), "redis", name)
		counter(p.waits, float64(s.WaitCount), "redis", name)
		counter(p.waitSeconds, float64(s.WaitDurationNs)/1e9, "redis", name)
		counter(p.timeouts, float64(s.Timeouts), "redis", name)
	}
}

// poolSize is how many connections a client may have, to each node of a cluster.
func poolSize(client redis.UniversalClient) int {
	switch client := client.(type) {
	case *redis.Client:
		return client.Options().PoolSize
	case *redis.ClusterClient:
		return client.Options().PoolSize
	}
	return 0
}

const (
	postgresDial = 3 * time.Second

	// The client notices a vanished server as soon as pg/prepare_session.sql has the server notice a vanished client.
	keepaliveIdle     = 5 * time.Second
	keepaliveInterval = time.Second
	keepaliveCount    = 5

	// serviceTransactionMS, in milliseconds, bounds a whole transaction of a service in PostgreSQL 17 and
	// later. A service cancels its own transactions earlier, after ten seconds at most.
	serviceTransactionMS = "12000"
	// readOnlySessionMax is how long a session with a server that takes no writes is used. The next one may be with
	// another server: behind the same name, or of several hosts.
	readOnlySessionMax = time.Second
)

// PostgresOption changes the configuration of a pool.
type PostgresOption func(*pgxpool.Config)

// Service is for the pool of a service with short transactions only. Its sessions are named "stampede <name>", and
// PostgreSQL 17 and later end its long transactions.
func Service(name string) PostgresOption {
	return func(config *pgxpool.Config) {
		Named(name)(config)
		sql.PrepareSessions(&config.ConnConfig.Config, serviceTransactionMS)
	}
}

// Named is for the pool of a service that also runs audits, whose transactions are long.
func Named(name string) PostgresOption {
	return func(config *pgxpool.Config) {
		setDefault(config.ConnConfig.RuntimeParams, "application_name", "stampede "+name)
	}
}

// Traced makes spans of the statements of traced requests and orders.
func Traced(tracer *tracing.Tracer) PostgresOption {
	return func(config *pgxpool.Config) { tracer.Postgres(config.ConnConfig, sql.NameOf) }
}

// Postgres returns a pool of at most maxConns connections, or sql.ErrDatabaseURL. Settings in the URL
// override those of this package.
func Postgres(
	ctx context.Context, databaseURL string, maxConns int32, options ...PostgresOption,
) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(databaseURL)
	if databaseURL == "" || err != nil {
		return nil, sql.ErrDatabaseURL
	}
	config.MaxConns = maxConns
	config.MinConns = 0
	config.ConnConfig.ConnectTimeout = postgresDial
	config.ConnConfig.DialFunc = dial
	config.AfterConnect, config.PrepareConn = noteBegin, keep
	sql.PrepareSessions(&config.ConnConfig.Config, "")
	for _, option := range options {
		option(config)
	}
	setDefault(config.ConnConfig.RuntimeParams, "application_name", "stampede")
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open Postgres: %w", err)
	}
	return pool, nil
}

const beganAt = "stampede.began_at"

func noteBegin(_ context.Context, conn *pgx.Conn) error {
	conn.PgConn().CustomData()[beganAt] = time.Now()
	return nil
}

// keep reports whether the pool goes on with a session. It gives up a session whose server, at its last answer, took no
// writes. So a pool that only reads also finds the server that took over.
func keep(_ context.Context, conn *pgx.Conn) (bool, error) {
	began, _ := conn.PgConn().CustomData()[beganAt].(time.Time)
	session := conn.PgConn()
	readOnly := session.ParameterStatus("default_transaction_read_only") == "on" ||
		session.ParameterStatus("in_hot_standby") == "on"
	return !readOnly || time.Since(began) < readOnlySessionMax, nil
}

// dial uses the same keepalives as the server, so that the client detects a vanished server.
func dial(ctx context.Context, network, addr string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: postgresDial, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: keepaliveIdle, Interval: keepaliveInterval, Count: keepaliveCount,
	}}
	return dialer.DialContext(ctx, network, addr)
}

func setDefault(params map[string]string, name, value string) {
	if _, given := params[name]; !given {
		params[name] = value
	}
}
