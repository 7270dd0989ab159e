//go:build system

package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation/order"
)

// PromQL's increase() misses a counter that appears with its first event, so an idle process exports every series with
// every label value.
func TestEachSeriesExistsFromFirstScrape(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, ingress := s.serve()
	// Without Redis and Postgres: the series must not depend on the worker's first work.
	worker := s.worker("worker")
	worker.Setenv("STAMPEDE_PARTITIONS", "2")
	worker.Setenv("REDIS_URL", "redis://127.0.0.1:1/0")
	worker.Setenv("DATABASE_URL", "postgres://nobody@127.0.0.1:1/none")
	worker.Start()
	work := "http://" + loggedAddr(worker, "metrics are served")

	for url, series := range map[string]map[string][]string{
		ingress: {
			"stampede_purchases_total{verdict": {
				"reserved", "replayed", "key-reused", "already-purchased", "paused", "ended", "not-open", "over-limit", "sold-out",
				"unknown-item", "invalid", "retired", "unknown-sale", "order-ended", "rate-limited", "overloaded",
				"unavailable", "unknown", "offers-only",
			},
			"stampede_purchase_duration_seconds_count{outcome":                        {"accepted", "refused", "failed"},
			`stampede_http_requests_total{route="POST /v1/sales/:sale/orders",status`: {"2xx", "3xx", "4xx", "5xx"},
			`stampede_http_requests_total{route="unmatched",status`:                   {"2xx", "3xx", "4xx", "5xx"},
			`stampede_rate_limited_total{by="user",calls`:                             {"purchases", "orders", "order-streams"},
			`stampede_rate_limited_total{by="address",calls`: {
				"purchases", "orders", "others",
				"order-streams", "sale-streams", "downloads", "draws",
			},
			`stampede_rate_limit_evictions_total{by="user",calls`:    {"purchases", "orders"},
			`stampede_rate_limit_evictions_total{by="address",calls`: {"purchases", "orders", "others"},
			"stampede_orders_total{outcome":                          {"paid", "cancelled"},
			`stampede_sale_purchases_total{outcome="accepted",sale`:  {"other"},
			`stampede_sale_purchases_total{outcome="refused",sale`:   {"other"},
			`stampede_sale_purchases_total{outcome="shed",sale`:      {"other"},
			`stampede_sale_purchases_total{outcome="failed",sale`:    {"other"},
			"stampede_purchase_wait_seconds_count":                   nil,
			`stampede_script_duration_seconds_count{script`:          {"reserve"},
			"stampede_script_batch_orders_count":                     nil,
			"stampede_event_streams{of":                              {"order", "sale"},
			"stampede_plain_purchases_total":                         nil,
			"stampede_stripe_messages_total{outcome": {
				"kept", "refused", "overloaded", "no-event", "thin-event", "other-type", "test-mode", "unpaid", "free", "no-order",
				"no-refund", "unknown-payment", "archived",
			},
			`stampede_payment_reports_total{by="shop",outcome`: {
				"kept", "anonymous", "unauthorized", "forbidden", "invalid", "unavailable",
			},
			`stampede_payment_reports_total{by="stripe",outcome`: {
				"kept", "anonymous", "unauthorized", "forbidden", "invalid", "unavailable",
			},
			"stampede_outcome_messages_total":        nil,
			"stampede_idle_connections_closed_total": nil,
			"stampede_outcome_lookups_total":         nil,
			"stampede_outcomes_published_total":      nil,
			"stampede_outcomes_dropped_total":        nil,
			"stampede_traces_over_rate_total":        nil,
			"stampede_log_lines_lost_total":          nil,
			"stampede_trace_spans_total{result":      {"exported", "dropped"},
		},
		work: {
			"stampede_orders_total{outcome": {
				"confirmed", "rejected", "voided", "expired", "duplicate",
				"unusable",
			},
			"stampede_locks_total{outcome": {"acquired", "busy", "released", "lost"},
			"stampede_worker_failing{step": {
				"record", "lock", "release", "expire", "rebuild", "retire", "unblock", "held", "name",
				"payments", "draw", "offer", "waitlist", "months",
			},
			"stampede_sessions_ended_total": nil,
			"stampede_sales_retired_total":  nil,
			"stampede_rebuilds_total{reason": {
				"server", "unverified", "sale-lost", "unfinished", "set-back",
				"refused", "by-hand", "reconciled",
			},
			"stampede_entries_acked_total{stream":         s.orderStreams(2),
			"stampede_entries_redelivered_total{stream":   s.orderStreams(2),
			"stampede_entries_claimed_total{stream":       s.orderStreams(2),
			"stampede_entries_taken_total{stream":         s.orderStreams(2),
			"stampede_entries_dead_lettered_total{stream": s.orderStreams(2),
			"stampede_entries_lost_total{stream":          s.orderStreams(2),
			"stampede_entries_trimmed_total{stream":       s.orderStreams(2),
			"stampede_stream_readers{stream":              s.orderStreams(2),
			"stampede_batch_orders_count":                 nil,
			"stampede_batch_duration_seconds_count":       nil,
			"stampede_rebuild_duration_seconds_count":     nil,
			"stampede_accept_to_durable_seconds_count":    nil,
			"stampede_outcomes_published_total":           nil,
			"stampede_outcomes_dropped_total":             nil,
			"stampede_traces_over_rate_total":             nil,
			"stampede_log_lines_lost_total":               nil,
			"stampede_trace_spans_total{result":           {"exported", "dropped"},
		},
	} {
		series[`stampede_payments_total{reason="",state`] = []string{"waiting", "settled", "disputed", "claimed"}
		series[`stampede_payments_total{reason="refunded-outside",state`] = []string{"refunded"}
		for _, reason := range order.RefundReasons() {
			series[`stampede_payments_total{reason="`+string(reason)+`",state`] = []string{
				"refund_due", "refunded", "claimed", "disputed",
			}
		}
		for _, reason := range order.UnclearReasons() {
			series[`stampede_payments_total{reason="`+string(reason)+`",state`] = []string{
				"unclear", "dismissed", "refunded", "disputed",
			}
		}
		shown := scrape(t, url)
		for name, values := range series {
			if values == nil {
				assert.Contains(t, shown, name+" 0")
			}
			var expected, got []string
			for _, value := range values {
				expected = append(expected, name+`="`+value+`"} 0`)
			}
			for _, line := range shown {
				if strings.HasPrefix(line, name+"=") {
					got = append(got, line)
				}
			}
			assert.ElementsMatch(t, expected, got)
		}
		kind, pools := "ingress", []string{
			"postgres others", "postgres duty", "postgres changes", "postgres looks",
			"postgres desk", "redis purchases", "redis guard",
		}
		if url == work {
			kind, pools = "worker", []string{"postgres worker", "redis control", "redis reads"}
		}
		for _, pool := range pools {
			server, name, _ := strings.Cut(pool, " ")
			for _, metric := range []string{"waits_total", "wait_seconds_total", "timeouts_total", "connections_limit"} {
				assert.Contains(t, strings.Join(shown, "\n"),
					"\nstampede_pool_"+metric+`{of="`+kind+`",pool="`+name+`",server="`+server+`"} `)
			}
		}
		// The list above must have every counter.
		for _, line := range shown {
			if metric, ok := strings.CutPrefix(line, "# TYPE stampede_"); ok && strings.HasSuffix(metric, " counter") {
				metric = "stampede_" + strings.TrimSuffix(metric, " counter")
				if pools := strings.HasPrefix(metric, "stampede_pool_"); pools { // they may have been waited for already
					continue
				}
				assert.True(t, listed(series, metric), "%s is not in the list of this test", metric)
			}
		}
	}
}

func listed[V any](series map[string]V, metric string) bool {
	for name := range series {
		if name == metric || strings.HasPrefix(name, metric+"{") {
			return true
		}
	}
	return false
}

// orderStreams returns the streams of the first partitions.
func (s *shop) orderStreams(partitions int) (names []string) {
	for p := range partitions {
		names = append(names, s.keys.Orders(p))
	}
	return names
}

func scrape(t *testing.T, url string) (lines []string) {
	t.Helper()
	status, text := call(t, http.MethodGet, url+"/metrics", "")
	require.Equal(t, http.StatusOK, status, text)
	return strings.Split(text, "\n")
}

// awaitSeries waits until a process shows series that begin with these texts.
func (s *shop) awaitSeries(url string, beginnings ...string) {
	s.t.Helper()
	testkit.Eventually(s.t, within, strings.Join(beginnings, ", "), func() bool {
		text := "\n" + strings.Join(scrape(s.t, url), "\n")
		for _, beginning := range beginnings {
			if !strings.Contains(text, "\n"+beginning) {
				return false
			}
		}
		return true
	})
}
