package survey

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/redisinfo"
	"stampede/internal/telemetry"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/upkeep/audit"
)

type descs struct {
	parked, units, workers, shut, auditAt, broken, postgresUp *prometheus.Desc

	unserved, drawState, drawLate, drawLeft, listWaiting, offers, oldestOffer *prometheus.Desc

	waiting, waitingAge, unclear, unclearAge, disputed, disputedAge, refunds, refundsAmount, refundsAge *prometheus.Desc

	connections, connectionsMax, oldest, locksWaiting, deadlocks, postgresPing *prometheus.Desc

	redisUp, redisPing, redisAhead, usedRatio, logged *prometheus.Desc
	redis                                             []redisFigure
}

// redisFigure is a metric that a server of Redis tells: the sum of some numbers of INFO.
type redisFigure struct {
	desc    *prometheus.Desc
	kind    prometheus.ValueType
	numbers []string
}

func newDescs() descs {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		help += " Use max; absent while unknown."
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return descs{
		parked: desc("stampede_dead_letters_parked", "Dead letters that wait for an operator, counted up to 10000."),
		units: desc("stampede_sale_units",
			"Units of 50 sales by kind, of those where something happens first: stock = available + held + sold. A sale that "+
				"awaits a rebuild has only its stock.", "sale", "kind"),
		workers: desc("stampede_workers_alive", "Workers that have announced themselves in the streams."),
		shut:    desc("stampede_sales_shut", "Open sales that sell nothing until Redis is rebuilt."),
		auditAt: desc("stampede_audit_timestamp_seconds",
			"When the newest recorded audit of all sales was made, in seconds since 1970; without one, when the oldest "+
				"sale was created that is not retired."),
		broken: desc("stampede_audit_promise_broken", "1 if the newest recorded audit found the promise broken, else 0.",
			"promise"),
		waiting:    desc("stampede_payments_waiting", "Payments that wait for their orders, counted up to 10000."),
		waitingAge: desc("stampede_payments_waiting_age_seconds", "Age of the oldest payment that waits; 0: none does."),
		unclear: desc("stampede_payments_unclear",
			"Payments whose reports do not fit together, and that wait for somebody to look, counted up to 10000."),
		unclearAge: desc("stampede_payments_unclear_age_seconds", "Age of the oldest unclear payment; 0: none is."),
		disputed: desc("stampede_payments_disputed",
			"Payments whose payers ask the bank for the money, counted up to 10000."),
		disputedAge: desc("stampede_payments_disputed_age_seconds", "Age of the oldest disputed payment; 0: none is."),
		refunds: desc("stampede_refunds_due", "Payments whose refund is due, by currency, counted up to 10000 in each: none if they "+
			"have no amount, and other beyond the 10 most frequent ones.", "currency"),
		refundsAmount: desc("stampede_refunds_due_amount",
			"Sum of the oldest 10000 payments whose refund is due, in minor units of the currency (ISO 4217).", "currency"),
		refundsAge: desc("stampede_refunds_due_age_seconds", "Age of the oldest refund that is due; 0: none is."),
		unserved: desc("stampede_relay_unserved_seconds",
			"For how long an event has waited for a target while no relay serves any; 0: one does, or nothing waits."),
		drawState: desc("stampede_draw_state",
			"1 for the present state of 50 draws whose sales are not over, the void and late ones first.", "sale", "state"),
		drawLate: desc("stampede_draw_late_seconds",
			"For how long a draw has waited for its next step beyond the time that it takes; 0: it is in time.", "sale", "step"),
		drawLeft: desc("stampede_draw_left_seconds",
			"Time until a draw is void without its next step; absent without such a time.", "sale"),
		listWaiting: desc("stampede_waitlist_waiting",
			"Entries of the 50 longest waiting lists that had no turn.", "sale"),
		offers: desc("stampede_offers",
			"What became of the latest 20 turns of each item of a draw or a waiting list: offers that are open, expired, or "+
				"answered.", "sale", "state"),
		oldestOffer: desc("stampede_offer_oldest_seconds",
			"Age of the oldest offer of stampede_offers that is open; 0: none is.", "sale"),
		postgresUp: prometheus.NewDesc("stampede_postgres_up",
			"1 if Postgres answered the last look of this worker and takes writes, else 0. Use min.", nil, nil),
		redisUp: prometheus.NewDesc("stampede_redis_up",
			"1 if the server of Redis, or master of a cluster, answered the last look of this worker, else 0. Use min by (node).",
			[]string{"node"}, nil),
		connections: desc("stampede_postgres_connections",
			"Connections of clients to the server of Postgres by state; other: those whose state it does not tell, too.", "state"),
		connectionsMax: desc("stampede_postgres_connections_max", "Connections that Postgres allows (max_connections)."),
		oldest: desc("stampede_postgres_oldest_transaction_seconds",
			"Age of the oldest open transaction, of those that Postgres tells this worker."),
		locksWaiting: desc("stampede_postgres_locks_waiting", "Locks in Postgres that sessions wait for."),
		deadlocks:    desc("stampede_postgres_deadlocks_total", "Deadlocks in the database of Postgres since its statistics began."),
		postgresPing: desc("stampede_postgres_ping_seconds",
			"Round trip of a statement without work to Postgres, the wait of this worker for a connection included."),
		redisPing: desc("stampede_redis_ping_seconds",
			"Round trip of a PING, the wait of this worker for a connection included.", "node"),
		redisAhead: desc("stampede_redis_clock_ahead_seconds",
			"By how much the clock of the server of Redis is ahead of that of Postgres at least, below 0: behind it. What the "+
				"round trips may have added is taken off.", "node"),
		usedRatio: desc("stampede_redis_memory_used_ratio", "Used memory by maxmemory, 1 is full; 0 without a maxmemory.", "node"),
		logged: desc("stampede_redis_aof_ok",
			"1 if the append-only file is on and its last write succeeded, else 0.", "node"),
		redis: newRedisFigures(desc),
	}
}

func newRedisFigures(desc func(name, help string, labels ...string) *prometheus.Desc) (figures []redisFigure) {
	add := func(kind prometheus.ValueType, name, help string, numbers ...string) {
		figures = append(figures, redisFigure{desc(name, help, "node"), kind, numbers})
	}
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	add(gauge, "stampede_redis_memory_used_bytes", "Memory that the server of Redis uses.", "used_memory")
	add(gauge, "stampede_redis_memory_max_bytes", "Memory that it may use (maxmemory); 0: unlimited.", "maxmemory")
	add(counter, "stampede_redis_cpu_seconds_total", "CPU time of the server of Redis, all threads.",
		"used_cpu_sys", "used_cpu_user")
	add(counter, "stampede_redis_main_thread_cpu_seconds_total",
		"CPU time of the thread of Redis that runs commands. It is saturated at a rate of 1.",
		"used_cpu_sys_main_thread", "used_cpu_user_main_thread")
	add(gauge, "stampede_redis_clients", "Connections of clients to Redis.", "connected_clients")
	add(gauge, "stampede_redis_clients_max", "Connections that Redis allows (maxclients).", "maxclients")
	add(gauge, "stampede_redis_clients_blocked",
		"Connections to Redis that wait in a blocking command, as workers do for entries.", "blocked_clients")
	add(counter, "stampede_redis_connections_rejected_total",
		"Connections that Redis refused because of maxclients.", "rejected_connections")
	add(counter, "stampede_redis_keys_evicted_total",
		"Keys that Redis deleted because of maxmemory. There must be none.", "evicted_keys")
	add(gauge, "stampede_redis_aof_pending_fsyncs",
		"Syncs of the append-only file that wait or run.", "aof_pending_bio_fsync")
	add(counter, "stampede_redis_aof_delayed_fsyncs_total",
		"Syncs of the append-only file that the disk delayed since the server started, with appendfsync everysec.",
		"aof_delayed_fsync")
	return figures
}

// Describe implements prometheus.Collector.
func (s *Survey) Describe(out chan<- *prometheus.Desc) {
	d := s.descs
	for _, desc := range []*prometheus.Desc{
		d.parked, d.waiting, d.waitingAge, d.unclear, d.unclearAge, d.disputed, d.disputedAge, d.refunds, d.refundsAmount,
		d.refundsAge, d.units, d.workers, d.shut, d.auditAt, d.broken, d.postgresUp,
		d.unserved, d.drawState, d.drawLate, d.drawLeft, d.listWaiting, d.offers, d.oldestOffer,
		d.connections, d.connectionsMax, d.oldest, d.locksWaiting, d.deadlocks, d.postgresPing,
		d.redisUp, d.redisPing, d.redisAhead, d.usedRatio, d.logged,
	} {
		out <- desc
	}
	for _, figure := range d.redis {
		out <- figure.desc
	}
}

// Collect implements prometheus.Collector.
func (s *Survey) Collect(out chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	if up, ok := s.postgresUp.valid(now); ok {
		gauge(s.descs.postgresUp, telemetry.OneIf(up))
	}
	if found, ok := s.postgres.valid(now); ok {
		gauge(s.descs.parked, float64(found.Parked))
		gauge(s.descs.waiting, float64(found.Waiting))
		gauge(s.descs.waitingAge, found.WaitingSeconds)
		gauge(s.descs.unclear, float64(found.Unclear))
		gauge(s.descs.unclearAge, found.UnclearSeconds)
		gauge(s.descs.disputed, float64(found.Disputed))
		gauge(s.descs.disputedAge, found.DisputedSeconds)
		if found.At != nil {
			gauge(s.descs.auditAt, *found.At)
		}
		for _, promise := range audit.PromiseNames(found.Broken) {
			gauge(s.descs.broken, telemetry.OneIf(slices.Contains(found.Broken, promise)), promise)
		}
	}
	if refunds, ok := s.refunds.valid(now); ok {
		s.collectRefunds(refunds, now, gauge)
	}
	if p, ok := s.server.valid(now); ok {
		gauge(s.descs.connections, float64(p.Active), "active")
		gauge(s.descs.connections, float64(p.Idle), "idle")
		gauge(s.descs.connections, float64(p.InTransaction), "idle in transaction")
		gauge(s.descs.connections, float64(p.Connections-p.Active-p.Idle-p.InTransaction), "other")
		gauge(s.descs.connectionsMax, float64(p.ConnectionsMax))
		gauge(s.descs.oldest, p.OldestSeconds)
		gauge(s.descs.locksWaiting, float64(p.LocksWaiting))
		gauge(s.descs.postgresPing, p.Ping.Seconds())
		out <- prometheus.MustNewConstMetric(s.descs.deadlocks, prometheus.CounterValue, float64(p.Deadlocks))
	}
	if units, ok := s.units.valid(now); ok {
		for _, u := range units {
			s.collectUnits(u, gauge)
		}
	}
	if watched, ok := s.draws.valid(now); ok {
		for i := range watched {
			s.collectDraw(&watched[i], gauge)
		}
	}
	if unserved, ok := s.unserved.valid(now); ok {
		gauge(s.descs.unserved, unserved.Seconds())
	}
	if alive, ok := s.workers.valid(now); ok {
		gauge(s.descs.workers, float64(alive))
	}
	if shut, ok := s.shut.valid(now); ok {
		gauge(s.descs.shut, float64(shut))
	}
	if servers, ok := s.servers.valid(now); ok {
		postgres, told := s.server.valid(now)
		for _, server := range servers {
			s.collectServer(out, server, gauge)
			if told && server.Clock != nil {
				gauge(s.descs.redisAhead, server.Clock.Ahead(postgres.Clock).Seconds(), server.Name)
			}
		}
	}
}

func (s *Survey) collectRefunds(
	due []ledger.RefundsDue, now time.Time, gauge func(*prometheus.Desc, float64, ...string),
) {
	due = slices.Clone(due)
	slices.SortFunc(due, func(a, b ledger.RefundsDue) int { return cmp.Compare(b.Payments, a.Payments) })
	age, others := 0.0, int64(0)
	for i, one := range due {
		age = max(age, now.Sub(one.Since).Seconds())
		switch {
		case i >= currenciesMax:
			others += one.Payments
		case one.Currency == "":
			gauge(s.descs.refunds, float64(one.Payments), "none")
		default:
			gauge(s.descs.refunds, float64(one.Payments), one.Currency)
			gauge(s.descs.refundsAmount, float64(one.Amount), one.Currency)
		}
	}
	gauge(s.descs.refunds, float64(others), "other")
	gauge(s.descs.refundsAge, age)
}

func (s *Survey) collectDraw(w *draws.Watched, gauge func(*prometheus.Desc, float64, ...string)) {
	sale := w.SaleID.String()
	if w.Kind == draws.ByPlace {
		gauge(s.descs.listWaiting, float64(w.Waiting), sale)
	} else {
		gauge(s.descs.drawState, 1, sale, string(w.State))
	}
	if step, late, until := w.Next(); step != "" {
		gauge(s.descs.drawLate, late.Seconds(), sale, string(step))
		if !until.IsZero() {
			gauge(s.descs.drawLeft, until.Sub(w.At).Seconds(), sale)
		}
	}
	gauge(s.descs.offers, float64(w.Offers.Open), sale, "open")
	gauge(s.descs.offers, float64(w.Offers.Expired), sale, "expired")
	gauge(s.descs.offers, float64(w.Offers.Answered), sale, "answered")
	gauge(s.descs.oldestOffer, w.Offers.Oldest.Seconds(), sale)
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
	gauge(s.descs.redisUp, telemetry.OneIf(r.Up()), r.Name)
	if r.Err != nil {
		return
	}
	gauge(s.descs.redisPing, r.Ping.Seconds(), r.Name)
	if most, told := r.Sum("maxmemory"); told {
		gauge(s.descs.usedRatio, float64(r.UsedBytes)/cmp.Or(most, math.Inf(1)), r.Name)
	}
	if _, told := r.Sum("aof_enabled"); told {
		gauge(s.descs.logged, telemetry.OneIf(r.LogOn && !r.LogFails), r.Name)
	}
	for _, figure := range s.descs.redis {
		if sum, told := r.Sum(figure.numbers...); told {
			out <- prometheus.MustNewConstMetric(figure.desc, figure.kind, sum, r.Name)
		}
	}
}
