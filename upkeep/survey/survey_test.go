package survey_test

import (
	"context"
	"crypto/rand"
	"errors"
	"math"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/upkeep/audit"
	"stampede/upkeep/survey"
)

func TestMain(m *testing.M) { testwork.Main(m) }

// gauges returns the series of a registry as name{label values} and value.
func gauges(t testing.TB, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	found := map[string]float64{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, label := range m.GetLabel() {
				labels = append(labels, label.GetValue())
			}
			name := strings.TrimPrefix(family.GetName(), "stampede_")
			if len(labels) > 0 {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			found[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return found
}

type running struct {
	*testshop.Shop
	survey   *survey.Survey
	registry *prometheus.Registry
	shut     atomic.Int64 // below 0: unknown
}

func start(t *testing.T, changes ...func(*running)) *running {
	t.Helper()
	r := &running{Shop: testshop.NewShop(t), registry: prometheus.NewRegistry()}
	for _, change := range changes {
		change(r)
	}
	var err error
	r.survey, err = survey.New(survey.Config{
		Catalog: r.Next(t, r.Rdb).Catalog, Logger: testkit.Logger(t), Registerer: r.registry,
		Interval: 10 * time.Millisecond,
		Shut: func(context.Context) (int, error) {
			if n := r.shut.Load(); n >= 0 {
				return int(n), nil
			}
			return 0, errors.New("unknown")
		},
	})
	require.NoError(t, err)
	require.Empty(t, gauges(t, r.registry), "nothing is known yet")
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.survey.Run(ctx)
	}()
	t.Cleanup(func() { stop(); <-ended })
	return r
}

// shows waits until the gauges have these values; a negative one is absent.
func (r *running) shows(t *testing.T, want map[string]float64) {
	t.Helper()
	testkit.Eventually(t, testshop.Soon, "the gauges", func() bool {
		found := gauges(t, r.registry)
		for name, value := range want {
			if got, known := found[name]; known != (value >= 0) || known && got != value {
				return false
			}
		}
		return true
	})
}

// The clock of Redis is compared with that of Postgres, whatever that of this process says.
func TestSurveyComparesClocks(t *testing.T) {
	t.Parallel()
	var set func(time.Duration)
	r := start(t, func(r *running) { r.Shop, set = testshop.OnClockedPostgres(t) })
	shows := func(what string, is func(ahead float64) bool) {
		testkit.Eventually(t, testshop.Soon, what, func() bool {
			for name, value := range gauges(t, r.registry) {
				if strings.HasPrefix(name, "redis_clock_ahead_seconds{") {
					return is(value)
				}
			}
			return false
		})
	}
	shows("they agree", func(ahead float64) bool { return math.Abs(ahead) < 0.1 })
	set(7 * time.Second)
	shows("Redis is behind", func(ahead float64) bool { return ahead < -6.5 && ahead > -7.1 })
	set(-7 * time.Second)
	shows("Redis is ahead", func(ahead float64) bool { return ahead > 6.5 && ahead < 7.1 })
}

func TestSurveyShowsWhatIsShared(t *testing.T) {
	t.Parallel()
	r := start(t)
	sale := r.OpenPayable(t, 50)
	of := func(kind string) string { return "sale_units{" + kind + "," + sale.String() + "}" }
	r.Crowd(t, sale, 7)
	r.shows(t, map[string]float64{
		of("stock"): 50, of("available"): 43, of("held"): 7, of("sold"): 0, "postgres_up": 1,
		"dead_letters_parked": 0, "sales_shut": 0, "audit_promise_broken{S1}": 0, "audit_promise_broken{DB}": 0,
		"audit_promise_broken{D1}": -1,
		"workers_alive":            -1,
	})
	testkit.Eventually(t, testshop.Soon, "without an audit, since there is a sale", func() bool {
		return math.Abs(float64(time.Now().Unix())-gauges(t, r.registry)["audit_timestamp_seconds"]) < 600
	})
	_, err := r.Pool.Exec(t.Context(), `INSERT INTO dead_letters (stream, entry_id, fields, reason, deliveries, status)
		SELECT 's', n || '-0', '[]', 'why', 1, CASE n WHEN 3 THEN 'discarded' ELSE 'parked' END FROM generate_series(1, 3) AS n`)
	require.NoError(t, err)
	for _, report := range []audit.Report{ // the newest counts
		{Promises: []audit.Promise{{Name: "S1", Found: 2}}},
		{Promises: []audit.Promise{{Name: "S4", Found: 2}, {Name: "D5", Found: 1}}},
	} {
		require.NoError(t, audit.Record(t.Context(), r.Pool, report, "ann"))
	}
	_, err = r.Pool.Exec(t.Context(), "UPDATE audits SET at = to_timestamp(1e9)")
	require.NoError(t, err)
	r.shut.Store(3)
	r.survey.NoteWorkers(2, time.Minute)
	r.shows(t, map[string]float64{
		"dead_letters_parked": 2, "sales_shut": 3, "audit_promise_broken{S1}": 0, "audit_promise_broken{S4}": 1,
		"audit_promise_broken{D4}": -1, "audit_promise_broken{D5}": 1, "audit_timestamp_seconds": 1e9, "workers_alive": 2,
	})
}

// The series of currencies are bounded, whatever was reported; the ages are those of the oldest.
func TestSurveyShowsMoney(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.shows(t, map[string]float64{
		"payments_waiting": 0, "payments_waiting_age_seconds": 0, "refunds_due{other}": 0, "refunds_due_age_seconds": 0,
		"refunds_due{none}": -1, "payments_unclear": 0, "payments_unclear_age_seconds": 0, "payments_disputed": 0,
		"payments_disputed_age_seconds": 0,
	})
	for reference, reports := range map[string]string{
		"waits": "(1, 'PaymentReceived', NULL::bigint, NULL)",
		"none":  "(1, 'PaymentReceived', NULL::bigint, NULL), (2, 'PaymentRefundDue', NULL, NULL)",
		"asks":  "(1, 'PaymentReceived', NULL::bigint, NULL), (2, 'PaymentUnclear', NULL, NULL)",
		"over":  "(1, 'PaymentReceived', 7, 'EUR'), (2, 'PaymentUnclear', 7, 'EUR'), (3, 'PaymentDismissed', 7, 'EUR')",
		"bank":  "(1, 'PaymentReceived', 7, 'EUR'), (2, 'PaymentSettled', 7, 'EUR'), (3, 'PaymentDisputed', 7, 'EUR')",
		"back":  "(1, 'PaymentReceived', 7, 'EUR'), (2, 'PaymentRefundDue', 7, 'EUR'), (3, 'PaymentRefunded', 7, 'EUR')",
	} {
		require.NoError(t, r.Exec(t, `INSERT INTO payment_events (reference, version, type, amount, currency, occurred_at)
			SELECT $1 || n, e.*, now() - interval '1 hour' FROM generate_series(1, 3) AS n, (VALUES `+reports+`) AS e`, reference))
	}
	require.NoError(t, r.Exec(t, `INSERT INTO payment_events (reference, version, type) VALUES ('late', 1, 'PaymentUnclear')`))
	require.NoError(t, r.Exec(t, `INSERT INTO payment_events (reference, version, type, amount, currency, occurred_at)
		SELECT c || n, 2, 'PaymentRefundDue', 5, c, now() - interval '1 day' FROM generate_series(1, 12) AS n,
			(SELECT 'A' || chr(64 + i) || 'A' AS c, i FROM generate_series(1, 12) AS i) AS codes WHERE n <= i`))
	r.shows(t, map[string]float64{
		"payments_waiting": 3, "refunds_due{none}": 3, "refunds_due{ALA}": 12, "refunds_due_amount{ALA}": 60,
		"refunds_due{AAA}": -1, "refunds_due_amount{other}": -1, "refunds_due{EUR}": -1,
		"payments_unclear": 4, "payments_disputed": 3,
	})
	found := gauges(t, r.registry)
	for _, state := range []string{"waiting", "unclear", "disputed"} {
		require.InDelta(t, 3600, found["payments_"+state+"_age_seconds"], 600)
	}
	require.InDelta(t, 86400, found["refunds_due_age_seconds"], 600)
	require.Less(t, len(found), 66)
	var due float64
	for name, value := range found {
		if strings.HasPrefix(name, "refunds_due{") {
			due += value
		}
	}
	require.Equal(t, 3+78.0, due, "other has the rest")
}

// An old value would say that all is well.
func TestUnreadableValuesAreAbsent(t *testing.T) {
	t.Parallel()
	r := start(t)
	sale := r.Open(t, 50)
	stock := "sale_units{stock," + sale.String() + "}"
	r.shows(t, map[string]float64{stock: 50, "postgres_up": 1, "dead_letters_parked": 0, "sales_shut": 0})
	r.shut.Store(-1)
	r.shows(t, map[string]float64{stock: 50, "dead_letters_parked": 0, "sales_shut": -1})
	_, err := r.Pool.Exec(t.Context(), "ALTER TABLE dead_letters RENAME TO away; ALTER TABLE sales RENAME TO gone")
	require.NoError(t, err)
	r.shows(t, map[string]float64{
		stock: -1, "dead_letters_parked": -1, "payments_waiting": -1, "refunds_due{other}": -1,
		"audit_timestamp_seconds": -1, "audit_promise_broken{S1}": -1, "postgres_up": 0,
	})
	_, err = r.Pool.Exec(t.Context(), "ALTER TABLE away RENAME TO dead_letters; ALTER TABLE gone RENAME TO sales")
	require.NoError(t, err)
	r.shut.Store(0)
	r.shows(t, map[string]float64{stock: 50, "postgres_up": 1, "dead_letters_parked": 0, "sales_shut": 0})

	// A sale that Redis has lost has no known units.
	require.NoError(t, r.Rdb.Del(t.Context(), r.Keys.Sale(0, sale)).Err())
	r.shows(t, map[string]float64{stock: 50, "sale_units{available," + sale.String() + "}": -1})
}

func TestSalesThatSellHaveUnits(t *testing.T) {
	t.Parallel()
	r := start(t)
	selling := r.Open(t, 1)
	_, err := r.Pool.Exec(t.Context(), "UPDATE sales SET opens_at = now() + interval '1 day' WHERE id <> $1", selling)
	require.NoError(t, err)
	var newest uuid.UUID
	for range 50 {
		newest = r.Open(t, 1)
	}
	_, err = r.Pool.Exec(t.Context(), "UPDATE sales SET opens_at = now() + interval '1 day' WHERE id <> $1", selling)
	require.NoError(t, err)
	r.shows(t, map[string]float64{
		"sale_units{stock," + selling.String() + "}": 1, "sale_units{stock," + newest.String() + "}": 1,
	})
}

// Each server tells how much it is used, what waits, and what it refused.
func TestServersAreMeasured(t *testing.T) {
	t.Parallel()
	r := start(t)
	sale := r.Open(t, 1)
	r.HoldSale(t, sale)
	waiting, stop := context.WithCancel(t.Context())
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		_, _ = r.Pool.Exec(waiting, "UPDATE sales SET name = name WHERE id = $1", sale)
	}()
	t.Cleanup(func() { stop(); <-waited })
	node := "{" + addr(t, r) + "}"
	for _, positive := range []string{
		"redis_up" + node, "redis_ping_seconds" + node, "redis_memory_used_bytes" + node, "redis_cpu_seconds_total" + node,
		"redis_main_thread_cpu_seconds_total" + node, "redis_clients" + node, "redis_clients_max" + node,
		"postgres_ping_seconds", "postgres_connections{active}", "postgres_connections{idle in transaction}",
		"postgres_connections_max", "postgres_locks_waiting", "postgres_oldest_transaction_seconds",
	} {
		testkit.Eventually(t, testshop.Soon, positive, func() bool { return gauges(t, r.registry)[positive] > 0 })
	}
	shown := gauges(t, r.registry)
	for _, counter := range []string{
		"redis_connections_rejected_total" + node, "redis_keys_evicted_total" + node, "redis_clients_blocked" + node,
		"redis_aof_delayed_fsyncs_total" + node, "redis_aof_pending_fsyncs" + node, "postgres_deadlocks_total",
	} {
		require.Contains(t, shown, counter)
	}
}

func addr(t *testing.T, r *running) string {
	t.Helper()
	client, ok := r.Rdb.(*redis.Client)
	require.True(t, ok)
	return client.Options().Addr
}

// A provider may refuse to tell. Then the server is up, and the rest is unknown, not 0.
func TestServersThatTellLittleShowLittle(t *testing.T) {
	t.Parallel()
	r := start(t, func(r *running) {
		name := "mute_" + strings.ToLower(rand.Text())
		operator := r.Rdb
		require.NoError(t, operator.Do(t.Context(), "ACL", "SETUSER", name, "on", "nopass", "~*", "&*", "+@all",
			"-info").Err())
		t.Cleanup(func() { operator.Do(context.WithoutCancel(t.Context()), "ACL", "DELUSER", name) })
		options := *operator.(*redis.Client).Options()
		options.Username, options.Password = name, "any"
		mute := redis.NewClient(&options)
		t.Cleanup(func() { _ = mute.Close() })
		r.Rdb = mute

		_, err := r.Pool.Exec(t.Context(), "CREATE ROLE "+name+" LOGIN; GRANT SELECT ON dead_letters, audits, sales, open_payments TO "+name+
			"; REVOKE SELECT ON pg_locks FROM PUBLIC")
		require.NoError(t, err)
		at, err := url.Parse(testkit.DatabaseURL(t))
		require.NoError(t, err)
		at.User = url.UserPassword(name, "any")
		r.Pool = testkit.PoolAt(t, at.String(), 2)
	})
	r.shows(t, map[string]float64{"redis_up{" + addr(t, r) + "}": 1, "postgres_up": 1, "dead_letters_parked": 0})
	for name := range gauges(t, r.registry) {
		require.False(t, strings.HasPrefix(name, "redis_") && !strings.HasPrefix(name, "redis_up"), name)
		require.False(t, strings.HasPrefix(name, "postgres_") && name != "postgres_up", name)
	}
}

// The state of draws and lists is shown, and that events wait which no relay delivers.
func TestSurveyShowsDrawsAndRelay(t *testing.T) {
	t.Parallel()
	r := start(t)
	goods, entries := r.Open(t, 5), r.Open(t, 50)
	draw := func(kind string) string { return kind + "{" + goods.String() + "," }
	r.shows(t, map[string]float64{"relay_unserved_seconds": 0})
	require.NoError(t, r.Exec(t, `INSERT INTO draws (sale_id, entries_id, kind, freeze_seconds)
		VALUES ($1, $2, 'draw', 60)`, goods, entries))
	require.NoError(t, r.Exec(t, `UPDATE sales SET closes_at = now() - interval '5 seconds', state = 'ended'
		WHERE id = $1`, entries))
	r.shows(t, map[string]float64{
		"draw_state{" + goods.String() + ",freezing}": 1, "draw_late_seconds{" + goods.String() + ",freeze}": 0,
		draw("offers") + "open}": 0, "offer_oldest_seconds{" + goods.String() + "}": 0,
		"waitlist_waiting{" + goods.String() + "}": -1,
	})
	require.InDelta(t, 175, gauges(t, r.registry)["draw_left_seconds{"+goods.String()+"}"], 30)
	require.NoError(t, r.Exec(t, "UPDATE draws SET kind = 'waitlist'"))
	r.shows(t, map[string]float64{
		"waitlist_waiting{" + goods.String() + "}": 0, "draw_state{" + goods.String() + ",freezing}": -1,
		"draw_late_seconds{" + goods.String() + ",freeze}": -1, "draw_left_seconds{" + goods.String() + "}": -1,
	})

	require.NoError(t, r.Exec(t, `INSERT INTO relay_targets (name, url, secrets, allow_private, position, fence)
		SELECT n, 'https://shop', '{}', false, 0, 1 FROM unnest(ARRAY['shop', 'search']) AS n`))
	unserved := func(is func(seconds float64) bool) {
		t.Helper()
		testkit.Eventually(t, testshop.Soon, "the time without a relay", func() bool {
			seconds, known := gauges(t, r.registry)["relay_unserved_seconds"]
			return known && is(seconds)
		})
	}
	unserved(func(seconds float64) bool { return seconds > 0 && seconds < 600 })
	lock := r.Keys.RelayLock("shop")
	require.NoError(t, r.Rdb.HSet(t.Context(), lock, "owner", 1).Err())
	unserved(func(seconds float64) bool { return seconds == 0 })
	require.NoError(t, r.Rdb.Del(t.Context(), lock).Err())
	unserved(func(seconds float64) bool { return seconds > 0 })
	// A relay that works without its lock, as after an outage of Redis, has delivered, or waits after a failure.
	require.NoError(t, r.Exec(t, `UPDATE relay_targets SET retry_at = now() + interval '1 hour',
		position = CASE name WHEN 'shop' THEN 0 ELSE 1e9 END`))
	unserved(func(seconds float64) bool { return seconds == 0 })
	require.NoError(t, r.Exec(t, "UPDATE relay_targets SET retry_at = NULL"))
	unserved(func(seconds float64) bool { return seconds > 0 })
	require.NoError(t, r.Exec(t, "UPDATE relay_targets SET state = 'paused' WHERE name = 'shop'"))
	unserved(func(seconds float64) bool { return seconds == 0 })
}
