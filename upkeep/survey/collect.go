package survey

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/redisinfo"
	"stampede/upkeep/audit"
)

type descs struct {
	parked, units, workers, shut, auditAt, broken, moving, postgresUp *prometheus.Desc

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
			"Units of the newest 50 sales by kind: stock = available + held + sold. A sale that awaits a rebuild has only its "+
				"stock.", "sale", "kind"),
		workers: desc("stampede_workers_alive", "Workers that have announced themselves in the streams."),
		shut:    desc("stampede_sales_shut", "Sales that are not over and sell nothing until Redis is rebuilt."),
		auditAt: desc("stampede_audit_timestamp_seconds",
			"When the newest recorded audit of all sales was made, in seconds since 1970; 0 if there is none."),
		broken: desc("stampede_audit_promise_broken", "1 if the newest recorded audit found the promise broken, else 0.",
			"promise"),
		moving: desc("stampede_audit_moving",
			"1 if units moved during the newest recorded audit, so that what it found may have been on its way, else 0."),
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
		d.parked, d.units, d.workers, d.shut, d.auditAt, d.broken, d.moving, d.postgresUp,
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
		gauge(s.descs.auditAt, found.At)
		gauge(s.descs.moving, number(found.Moving))
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
