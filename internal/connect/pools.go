package connect

import (
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
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
