//go:build system

package fleet

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testmonitor"
)

// alertCases say, of each alert with its severity, with which series it fires within 14 minutes, and with which it is
// silent: name = a value each 15 seconds; and the next. With whole it fires without a label of one process or
// node, so that it takes part in the inhibitions; with part it does not.
var alertCases = map[string]struct{ fires, silent, whole, part []string }{
	"PurchasesShed critical": {
		fires: []string{
			`stampede_purchases_total{verdict="overloaded"} = 0+50x60; ` +
				`stampede_purchases_total{verdict="reserved"} = 0+1000x60`,
		},
		silent: []string{
			`stampede_purchases_total{verdict="overloaded"} = 0+5x60; ` +
				`stampede_purchases_total{verdict="reserved"} = 0+1000x60; ` +
				`stampede_purchases_total{verdict="rate-limited"} = 0+900x60`,
		},
	},
	"PurchasesFail critical": {
		fires: []string{
			`stampede_purchases_total{verdict="unknown"} = 0+50x60; ` +
				`stampede_purchases_total{verdict="reserved"} = 0+1000x60`,
		},
		silent: []string{
			`stampede_purchases_total{verdict="unavailable"} = 0+5x60; ` +
				`stampede_purchases_total{verdict="sold-out"} = 0+1000x60`,
		},
	},
	"NoIngress critical": {
		fires: []string{
			`stampede_ready{process="ingress",job="a",instance="1"} = 1x4 _x60`,
			`stampede_ready{process="ingress",job="a",instance="1",reason="Redis does not answer"} = 0x60; ` +
				`stampede_ready{process="ingress",job="a",instance="2",reason="Redis does not answer"} = 0x60`,
		},
		silent: []string{
			`stampede_ready{process="ingress",job="a",instance="1",reason="Redis does not answer"} = 0x60; ` +
				`stampede_ready{process="ingress",job="a",instance="2"} = 1x60`,
		},
		whole: []string{`stampede_ready{process="ingress",job="a",instance="1",reason="Redis does not answer"} = 0x60`},
		part:  []string{`stampede_ready{process="ingress",job="a",instance="1"} = 1x4 _x60`},
	},
	"IngressNotReady warning": {
		fires: []string{
			`stampede_ready{process="ingress",job="a",instance="1",reason="Redis does not answer"} = 0x60; ` +
				`stampede_ready{process="ingress",job="a",instance="2"} = 1x60`,
			`stampede_ready{process="ingress",job="a",instance="1",reason="Redis does not answer"} = 0x54 stale; ` +
				`stampede_ready{process="ingress",job="a",instance="1",reason="Redis refuses writes"} = _x55 0x9`,
		},
		silent: []string{`stampede_ready{process="ingress",job="a",instance="1"} = 1x60`},
	},
	"BacklogGrows warning": {
		fires: []string{
			`stampede_stream_waiting_orders{stream="a",instance="1"} = 1000+100x60; ` +
				`stampede_stream_waiting_orders{stream="a",instance="2"} = 1000+100x60`,
		},
		silent: []string{
			`stampede_stream_waiting_orders{stream="a",instance="1"} = 9000-100x60; ` +
				`stampede_stream_waiting_orders{stream="b",instance="1"} = 0x60`,
		},
	},
	"OrderWaits critical": {
		fires:  []string{`stampede_stream_oldest_entry_age_seconds{stream="a"} = 0+15x60`},
		silent: []string{`stampede_stream_oldest_entry_age_seconds{stream="a"} = 29x60`},
	},
	"NoWorker critical": {
		fires: []string{`stampede_stream_readers{stream="a",instance="1"} = 1x4 0x60`, `up{job="any"} = 0x60`},
		silent: []string{
			`stampede_stream_readers{stream="a",instance="1"} = 0x60; ` +
				`stampede_stream_readers{stream="a",instance="2"} = 1x60`,
		},
	},
	"StepFails warning": {
		fires: []string{
			`stampede_worker_failing{step="record"} = 1x60`,
			`stampede_worker_failing{step="record",job="w",instance="1"} = 1x60; ` +
				`stampede_postgres_up{job="w",instance="1"} = 1x60; stampede_postgres_up{job="w",instance="2"} = 0x60`,
		},
		silent: []string{
			`stampede_worker_failing{step="record"} = 0x2 1x2 0x60`,
			`stampede_worker_failing{step="record",job="w",instance="1"} = 1x60; ` +
				`stampede_postgres_up{job="w",instance="1"} = 0x60; stampede_postgres_up{job="w",instance="2"} = 1x60`,
			`stampede_worker_failing{step="record",job="w",instance="1"} = 1x60; ` +
				`stampede_redis_up{node="r:1",job="w",instance="1"} = 0x60`,
		},
	},
	"DeadLetterParked warning": {
		fires:  []string{`stampede_dead_letters_parked{instance="1"} = 0x4 2x60`},
		silent: []string{`stampede_dead_letters_parked{instance="1"} = 0x60`},
	},
	"OrderRejected critical": {
		fires: []string{`stampede_orders_total{outcome="rejected"} = 0x20 1x40`},
		silent: []string{
			`stampede_orders_total{outcome="rejected"} = 7x60; stampede_orders_total{outcome="confirmed"} = 0+9x60`,
		},
	},
	"OrderVoided critical": {
		fires: []string{`stampede_orders_total{outcome="voided"} = 0x20 3x40`},
		silent: []string{
			`stampede_orders_total{outcome="voided"} = 7x60`,
			`stampede_orders_total{outcome="voided"} = 7x4 stale _x14 7x60`,
			`stampede_orders_total{outcome="voided"} = 7x30 stale _x4 0x30`,
		},
	},
	"StockRebuilt warning": {
		fires: []string{
			`stampede_rebuilds_total{reason="server",instance="1"} = 0x40 1x20; ` +
				`stampede_rebuilds_total{reason="by-hand",instance="1"} = 2x60`,
			`stampede_rebuilds_total{reason="sale-lost",instance="1"} = _x40 1x20`,
		},
		silent: []string{
			`stampede_rebuilds_total{reason="server",instance="1"} = 1x60; ` +
				`stampede_rebuilds_total{reason="by-hand",instance="1"} = 0x40 1x20; ` +
				`stampede_rebuilds_total{reason="server",instance="2"} = _x40 0x20`,
			`stampede_rebuilds_total{reason="server",instance="1"} = 3x4 stale _x14 3x60`, // ten minutes after a gap
			`stampede_rebuilds_total{reason="server",instance="1"} = 3x30 _x4 0x30`,       // a restart
		},
	},
	"SaleShut critical": {
		fires:  []string{`stampede_sales_shut{instance="1"} = 0x4 2x60`},
		silent: []string{`stampede_sales_shut{instance="1"} = 0x60`},
	},
	"RedisMemory warning": {
		fires: []string{`stampede_redis_memory_used_ratio{node="r:1"} = 0.85x60`},
		silent: []string{
			`stampede_redis_memory_used_ratio{node="r:1"} = 0.79x60`,
			`stampede_redis_memory_used_ratio{node="r:1"} = 0.97x60`,
		},
	},
	"RedisMemory critical": {
		fires:  []string{`stampede_redis_memory_used_ratio{node="r:1"} = 0.97x60`},
		silent: []string{`stampede_redis_memory_used_ratio{node="r:1"} = 0.94x60`},
	},
	"RedisSync critical": {
		fires:  []string{`stampede_redis_aof_ok{node="r:1"} = 1x4 0x60`},
		silent: []string{`stampede_redis_aof_ok{node="r:1"} = 1x60`},
	},
	"RedisSync warning": {
		fires:  []string{`stampede_redis_aof_delayed_fsyncs_total{node="r:1"} = 0x50 5x30`},
		silent: []string{`stampede_redis_aof_delayed_fsyncs_total{node="r:1"} = 5x60`},
	},
	"AuditOld warning": {
		fires:  []string{`stampede_audit_timestamp_seconds{instance="1"} = -90000x60`},
		silent: []string{`stampede_audit_timestamp_seconds{instance="1"} = -80000x60`},
	},
	"PromiseBroken critical": {
		fires:  []string{`stampede_audit_promise_broken{promise="S4"} = 1x60`},
		silent: []string{`stampede_audit_promise_broken{promise="S4"} = 0x60`},
	},
	"TargetGone warning": {
		fires: []string{
			`up{job="default/pods",instance="10.0.0.1:8080"} = 1x8 0x60; ` +
				`stampede_ready{job="default/pods",instance="10.0.0.1:8080",process="relay",reason="a"} = 0x4 stale; ` +
				`stampede_ready{job="default/pods",instance="10.0.0.1:8080",process="relay"} = _x4 1x3 stale`,
			`up{job="any",instance="lb:8080"} = 1x60; stampede_build_info{job="any",instance="lb:8080"} = 1x60; ` +
				`process_start_time_seconds{job="any",instance="lb:8080"} = 1+1x60`,
		},
		silent: []string{
			`up{job="default/pods",instance="10.0.0.1:8080"} = 1x60; ` +
				`stampede_build_info{job="default/pods",instance="10.0.0.1:8080"} = 1x60; ` +
				`stampede_ready{job="default/pods",instance="10.0.0.1:8080",process="relay"} = 1x60; ` +
				`process_start_time_seconds{job="default/pods",instance="10.0.0.1:8080"} = 1x20 2x40; ` +
				`up{job="default/pods",instance="10.0.0.9:80"} = 0x60; ` +
				`up{job="a pod that was removed",instance="10.0.0.2:8080"} = 1x8 _x60; ` +
				`stampede_ready{job="a pod that was removed",instance="10.0.0.2:8080",process="relay"} = 1x8 _x60`,
			`up{job="any",instance="10.0.0.1:8080"} = 1x8 0x9 1x60; ` + // it came back
				`stampede_ready{job="any",instance="10.0.0.1:8080",process="relay"} = 1x8 stale _x8 1x60`,
		},
	},
	"PostgresGone critical": {
		fires:  []string{`stampede_postgres_up{instance="1"} = 1x4 0x60; stampede_postgres_up{instance="2"} = 1x60`},
		silent: []string{`stampede_postgres_up{instance="1"} = 1x60`},
		whole:  []string{`stampede_postgres_up{instance="1"} = 0x60; stampede_postgres_up{instance="2"} = 0x60`},
		part:   []string{`stampede_postgres_up{instance="1"} = 0x60; stampede_postgres_up{instance="2"} = 1x60`},
	},
	"RedisGone critical": {
		fires: []string{
			`stampede_redis_up{node="r:1"} = 1x4 0x60`, `stampede_stream_reachable{stream="a"} = 0x60`,
			`stampede_redis_up{node="r:1"} = 1x4 0x40 1x20`, // its consequences may last
		},
		silent: []string{
			`stampede_redis_up{node="r:1"} = 1x60; stampede_stream_reachable{stream="a"} = 1x60`,
			`stampede_redis_up{node="r:1"} = 0x20 1x60`, // more than five minutes ago
		},
		whole: []string{
			`stampede_redis_up{node="r:1"} = 0x60; stampede_redis_up{node="r:2"} = 0x60`,
			`stampede_stream_reachable{stream="a"} = 0x60`,
		},
		part: []string{
			`stampede_redis_up{node="r:1"} = 0x60; stampede_redis_up{node="r:2"} = 1x60; ` +
				`stampede_stream_reachable{stream="a"} = 0x60; stampede_stream_reachable{stream="b"} = 1x60`,
			`stampede_redis_up{node="r:1",instance="1"} = 0x60; stampede_redis_up{node="r:1",instance="2"} = 1x60`,
		},
	},
	"NoRelay critical": {
		fires:  []string{`stampede_relay_unserved_seconds{instance="1"} = 0x50 1+15x9`},
		silent: []string{`stampede_relay_unserved_seconds{instance="1"} = 0+15x20 0x40`},
	},
	"RelayLags warning": {
		fires: []string{
			`stampede_relay_lag_seconds{target="shop"} = 0+15x60`,
			`stampede_relay_target_state{target="shop",state="disabled"} = 1x60`,
			`stampede_relay_failing{target="shop"} = 6x60`,
			`stampede_relay_held_seconds{target="shop"} = 31x60`,
		},
		silent: []string{
			`stampede_relay_lag_seconds{target="shop"} = 59x60; ` +
				`stampede_relay_target_state{target="shop",state="disabled"} = 0x60`,
		},
	},
	"ClocksApart warning": {
		fires: []string{
			`stampede_clock_ahead_seconds{instance="1"} = -1.5x60; stampede_clock_ahead_seconds{instance="2"} = 0x60`,
			`stampede_redis_clock_ahead_seconds{instance="1",node="r:1"} = 2x60`,
		},
		silent: []string{
			`stampede_clock_ahead_seconds{instance="1"} = 0.9x60; stampede_clock_ahead_seconds{instance="2"} = -0.9x60; ` +
				`stampede_redis_clock_ahead_seconds{instance="1",node="r:1"} = -0.5x60`,
		},
	},
	"OperatorsFileFaulty warning": {
		fires: []string{
			`stampede_operators_file_current{instance="1"} = 0x60; stampede_operators_file_current{instance="2"} = 1x60`,
		},
		silent: []string{`stampede_operators_file_current{instance="1"} = 1x60`},
	},
	"KeySetFaulty critical": {
		fires: []string{
			`stampede_key_set_current{instance="1"} = 0x60; stampede_key_set_keys{instance="1",state="usable"} = 0x60; ` +
				`stampede_key_set_keys{instance="1",state="ignored"} = 3x60`,
		},
		silent: []string{
			`stampede_key_set_current{instance="1"} = 0x60; stampede_key_set_keys{instance="1",state="usable"} = 0x60; ` +
				`stampede_key_set_current{instance="2"} = 0x60; stampede_key_set_keys{instance="2",state="usable"} = 1x60`,
			// Without a URL.
			`stampede_key_set_current{instance="1"} = 1x60; stampede_key_set_keys{instance="1",state="usable"} = 0x60`,
		},
	},
	"KeySetFaulty warning": {
		fires:  []string{`stampede_key_set_current{instance="1"} = 0x60; stampede_key_set_current{instance="2"} = 1x60`},
		silent: []string{`stampede_key_set_current{instance="1"} = 1x10 0x4 1x46`},
	},
	"ReceiptsRefused critical": {
		fires: []string{
			`stampede_receipt_secret_info{instance="1",fingerprint="a"} = 1x60; ` +
				`stampede_receipt_secret_info{instance="2",fingerprint="b"} = 1x60`,
		},
		silent: []string{
			`stampede_receipt_secret_info{instance="1",fingerprint="a"} = 1x60; ` +
				`stampede_receipt_secret_info{instance="2",fingerprint="a"} = 1x60`,
		},
	},
	"GuardOld warning": {
		fires: []string{`stampede_guard_age_seconds{of="ingress",instance="i:1"} = 0+15x60`},
		silent: []string{
			`stampede_guard_age_seconds{of="ingress",instance="i:1"} = 10x60`,
			`stampede_guard_age_seconds{of="ingress",job="i",instance="1"} = 0+15x60; ` +
				`stampede_ready{process="ingress",job="i",instance="1",reason="Redis does not answer"} = 0x60`,
			`stampede_guard_age_seconds{of="worker",job="w",instance="1"} = 0+15x60; ` +
				`stampede_postgres_up{job="w",instance="1"} = 0x60`,
		},
	},
	"EntryLost critical": {
		fires:  []string{`stampede_entries_lost_total{stream="a"} = 0x20 1x40`},
		silent: []string{`stampede_entries_lost_total{stream="a"} = 4x60`},
	},
	"OrderSetAside warning": {
		fires:  []string{`stampede_orders_set_aside{instance="1"} = 1x60`},
		silent: []string{`stampede_orders_set_aside{instance="1"} = 0x60`},
	},
	"PaymentsRefused critical": {
		fires: []string{
			`stampede_payment_reports_total{by="shop",outcome="unauthorized"} = 0+75x60; ` +
				`stampede_payment_reports_total{by="shop",outcome="kept"} = 0+75x60`,
			`stampede_payment_reports_total{by="stripe",outcome="invalid"} = 0+10x60; ` +
				`stampede_payment_reports_total{by="shop",outcome="kept"} = 0+75x60`,
			`stampede_payments_total{state="refund_due",reason="amount-mismatch"} = 0+10x60; ` +
				`stampede_payments_total{state="settled",reason=""} = 0+75x60`,
			// In the last minute, after a gap, in a process that has restarted.
			`stampede_payment_reports_total{by="shop",outcome="unauthorized",instance="1"} = 9000x10 _x40 0+75x9; ` +
				`stampede_payment_reports_total{by="shop",outcome="kept",instance="1"} = 9000x10 _x40 0x9`,
		},
		silent: []string{
			`stampede_payment_reports_total{by="shop",outcome="anonymous"} = 0+75x60; ` +
				`stampede_payment_reports_total{by="shop",outcome="unauthorized"} = 0+10x60; ` + // strangers
				`stampede_payment_reports_total{by="shop",outcome="kept"} = 0+75x60; ` +
				`stampede_payments_total{state="refund_due",reason="order-cancelled"} = 0+75x60; ` +
				`stampede_payments_total{state="refund_due",reason="order-expired"} = 0+2x60; ` +
				`stampede_payments_total{state="claimed",reason="order-expired"} = 0+75x60; ` +
				`stampede_payments_total{state="settled",reason=""} = 0+75x60`,
			`stampede_payment_reports_total{by="shop",outcome="unauthorized"} = 0x40 1x20; ` + // too few
				`stampede_payments_total{state="refund_due",reason="order-expired"} = 0x20 1x20 2x20`,
			`stampede_payment_reports_total{by="shop",outcome="unauthorized"} = 9000x20 _x30 9000x10`, // a gap
		},
	},
	"DrawWaits critical": {
		fires: []string{
			`stampede_draw_late_seconds{sale="a",step="freeze",instance="1"} = 0x50 1+15x9`,
			`stampede_draw_late_seconds{sale="a",step="freeze",instance="1"} = 0x10 _x40 1+15x9`, // after a gap
		},
		silent: []string{`stampede_draw_late_seconds{sale="a",step="freeze",instance="1"} = 0+15x10 0x50`},
	},
	"DrawVoid critical": {
		fires: []string{`stampede_draw_state{sale="a",state="void",instance="1"} = _x50 1x10`},
		silent: []string{
			`stampede_draw_state{sale="a",state="void",instance="1"} = 1x10 stale; ` + // it was ended
				`stampede_draw_state{sale="b",state="frozen",instance="1"} = 1x60`,
		},
	},
	"OffersUnanswered warning": {
		fires: []string{
			`stampede_offers{sale="a",state="expired",instance="1"} = 6x60; ` +
				`stampede_offers{sale="a",state="answered",instance="1"} = 4x60`,
		},
		silent: []string{
			`stampede_offers{sale="a",state="expired",instance="1"} = 5x60; ` +
				`stampede_offers{sale="a",state="answered",instance="1"} = 4x60`,
			`stampede_offers{sale="a",state="expired",instance="1"} = 5x60; ` +
				`stampede_offers{sale="a",state="answered",instance="1"} = 15x60`,
		},
	},
	"RefundDue warning": {
		fires:  []string{`stampede_refunds_due_age_seconds{instance="1"} = 86300+15x60`},
		silent: []string{`stampede_refunds_due_age_seconds{instance="1"} = 80000+15x60`},
	},
	"PaymentWaits warning": {
		fires:  []string{`stampede_payments_waiting_age_seconds{instance="1"} = 800+15x60`},
		silent: []string{`stampede_payments_waiting_age_seconds{instance="1"} = 0+15x60`},
	},
	"PaymentUnclear warning": {
		fires:  []string{`stampede_payments_unclear_age_seconds{instance="1"} = 3500+15x60`},
		silent: []string{`stampede_payments_unclear_age_seconds{instance="1"} = 0+15x60`},
	},
	"PaymentDisputed warning": {
		fires:  []string{`stampede_payments_disputed{instance="1"} = 0x20 1x40`},
		silent: []string{`stampede_payments_disputed{instance="1"} = 0x60`},
	},
	"ReleasesWait warning": {
		fires:  []string{`stampede_releases_pending{instance="1"} = 3x60`},
		silent: []string{`stampede_releases_pending{instance="1"} = 0x20 3x10 0x30`},
	},
}

func TestAlertsFireAsTested(t *testing.T) {
	t.Parallel()
	rules, err := filepath.Abs(deployed + "/alerts.yml")
	require.NoError(t, err)
	text := "rule_files: [" + rules + "]\nevaluation_interval: 15s\ntests:\n"
	for _, r := range alertRules(t) {
		name := r.Alert + " " + r.Labels["severity"]
		cases := alertCases[name]
		require.NotEmpty(t, cases.fires, name)
		require.NotEmpty(t, cases.silent, name)
		add := func(input, samples, labels string) {
			text += "  - interval: 15s\n    input_series:\n"
			for one := range strings.SplitSeq(input, "; ") {
				name, values, _ := strings.Cut(one, " = ")
				text += fmt.Sprintf("      - { series: '%s', values: '%s' }\n", name, values)
			}
			text += fmt.Sprintf("    promql_expr_test: [{ eval_time: 14m, exp_samples: [%s], expr: "+
				"'count(ALERTS{alertname=\"%s\",alertstate=\"firing\",severity=\"%s\"%s}) > 0' }]\n",
				samples, r.Alert, r.Labels["severity"], labels)
		}
		const fired, ofAll = "{ labels: '{}', value: 1 }", `,instance="",node="",stream="",process=""`
		for _, input := range cases.fires {
			add(input, fired, "")
		}
		for _, input := range cases.silent {
			add(input, "", "")
		}
		for _, input := range cases.whole {
			add(input, fired, ofAll)
		}
		for _, input := range cases.part {
			add(input, "", ofAll)
		}
	}
	file := t.TempDir() + "/test.yml"
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	output, err := exec.CommandContext(t.Context(), "promtool", "test", "rules", file).CombinedOutput()
	require.NoError(t, err, "%s (`sh tools/setup.sh` installs promtool)", output)
}

// timesFaster is how much faster alerts are evaluated here, with their windows and delays.
const timesFaster = 10

// An outage makes one notification, also when it ends: what it explains ends later.
func TestOneNotificationAnOutage(t *testing.T) {
	t.Parallel()
	worker, ingress := newPage(t, ""), newPage(t, "")
	monitor := testmonitor.Start(t, testmonitor.Options{
		Faster: timesFaster, Scrape: 500 * time.Millisecond, GroupWait: 3 * time.Second,
		Targets: map[string]string{
			"worker": strings.TrimPrefix(worker.URL, "http://"), "ingress": strings.TrimPrefix(ingress.URL, "http://"),
		},
	})
	ask := monitor.Ask
	sent := func() []string { return alertNames(monitor.Sent()) }
	work := func(redis, shut int) {
		worker.set(fmt.Sprintf(`stampede_ready{process="worker",reason=""} 1
stampede_stream_readers{stream="a"} %d
stampede_redis_up{node="r:1"} %d
stampede_sales_shut %d
stampede_postgres_up 1
`, redis, redis, shut))
	}
	serve := func(ready int) {
		ingress.set(fmt.Sprintf("stampede_ready{process=\"ingress\",reason=\"\"} %d\n", ready))
	}
	awaitFiring := func(wanted ...string) {
		t.Helper()
		testkit.Eventually(t, time.Minute, strings.Join(wanted, ", "), func() bool {
			now := alertNames(monitor.Firing())
			return !slices.ContainsFunc(wanted, func(name string) bool { return !slices.Contains(now, name) }) &&
				(len(wanted) > 0 || len(now) == 0)
		})
	}
	work(1, 0)
	serve(1)
	testkit.Eventually(t, time.Minute, "scrapes", func() bool { return len(ask(`up == 1`)) == 2 })
	awaitFiring()
	require.Empty(t, sent())

	work(0, 2)
	serve(0)
	awaitFiring(redisGone.name, saleShut.name, noIngress.name, noWorker.name)
	work(1, 2) // the rebuild takes time
	serve(1)
	testkit.Eventually(t, time.Minute, "Redis is back, and the sale is shut", func() bool {
		return len(ask(`min_over_time(stampede_redis_up[7s]) == 1`)) > 0
	})
	work(1, 0)
	awaitFiring()
	require.Equal(t, []string{redisGone.name}, sent())

	worker.Close()
	awaitFiring(noWorker.name, targetGone.name)
	testkit.Eventually(t, time.Minute, "the notification", func() bool { return len(sent()) > 1 })
	testkit.Eventually(t, time.Minute, "longer than Alertmanager waits", func() bool {
		return len(ask(`count_over_time(ALERTS{alertname="TargetGone",alertstate="firing"}[9s]) > 14`)) > 0
	})
	require.Equal(t, []string{redisGone.name, noWorker.name}, sent())
}

// alertNames are the names of alerts, without their severities.
func alertNames(alerts []testmonitor.Alert) (names []string) {
	for _, a := range alerts {
		names = append(names, a.Labels["alertname"])
	}
	return names
}
