//go:build system

package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

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

// fullPipe returns both ends of a pipe without room.
func fullPipe(t *testing.T) (reader, writer *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = reader.Close(), writer.Close() })
	room, err := unix.FcntlInt(writer.Fd(), unix.F_GETPIPE_SZ, 0)
	require.NoError(t, err)
	_, err = writer.Write(bytes.Repeat([]byte{'\n'}, room))
	require.NoError(t, err)
	return reader, writer
}

// What reads the output of a process, and what a terminal sends when it closes, decide nothing: each process works on,
// counts the lines that it lost, and stops cleanly.
func TestProcessesDoNotDependOnWhoReadsTheirOutput(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		output func(t *testing.T) *os.File
		stop   []syscall.Signal
		lost   bool // already a few lines
	}{
		"nobody reads a full pipe": {
			output: func(t *testing.T) *os.File {
				t.Helper()
				_, writer := fullPipe(t)
				return writer
			},
			stop: []syscall.Signal{syscall.SIGTERM},
		},
		"the reader has gone": {
			output: func(t *testing.T) *os.File {
				t.Helper()
				reader, writer := fullPipe(t)
				require.NoError(t, reader.Close())
				return writer
			},
			stop: []syscall.Signal{syscall.SIGHUP, syscall.SIGHUP}, lost: true, // as a terminal that closes
		},
		"the disk is full": {
			output: func(t *testing.T) *os.File {
				t.Helper()
				full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
				require.NoError(t, err)
				t.Cleanup(func() { _ = full.Close() })
				return full
			},
			stop: []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP}, lost: true, // as systemd with SendSIGHUP
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The processes must not inherit that SIGHUP is ignored, as in tests that nohup has started.
			hangups := make(chan os.Signal, 1)
			signal.Notify(hangups, syscall.SIGHUP)
			t.Cleanup(func() { signal.Stop(hangups) })
			s := newShop(t)
			hook := newWebhookShop(t)
			s.ends(exitOK, "relay", "add", "shop", hook.url, "--secret-file", hook.secretFile, "--allow-private")
			s.ends(exitOK, "relay", "add", "blocked", "stdout")

			output := c.output(t)
			var processes []*testkit.Cmd
			start := func(p *testkit.Cmd, variable string) (url string) {
				addr := testkit.FreeAddr(t)
				p.Setenv(variable, addr)
				p.UseOutput(output)
				p.Start()
				processes = append(processes, p)
				testkit.Eventually(t, within, variable+" is ready", func() bool {
					status, _ := call(t, http.MethodGet, "http://"+addr+"/readyz", "")
					return status == http.StatusOK
				})
				return "http://" + addr
			}
			url := start(s.ingress(), "STAMPEDE_HTTP_ADDR")
			urls := []string{url, start(s.worker("worker"), "STAMPEDE_METRICS_ADDR")}
			relay := s.relay()
			relay.Setenv("STAMPEDE_DRAIN_TIMEOUT", "1s") // a stop waits so long for the reader of its events
			urls = append(urls, start(relay, "STAMPEDE_METRICS_ADDR"))
			desk := s.command("dashboard")
			desk.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
			desk.Setenv("STAMPEDE_SCRAPE", url+"/metrics")
			urls = append(urls, start(desk, "STAMPEDE_DASHBOARD_ADDR"))

			sale := s.sale(url, 10)
			s.buy(url, sale, "ann")
			testkit.Eventually(t, within, "the order is confirmed, and the shop hears of it", func() bool {
				return hook.counts()["stampede.order.confirmed"] == 1
			})
			for _, url := range urls {
				shown := strings.Join(scrape(t, url), "\n")
				require.Contains(t, shown, "\nstampede_log_lines_lost_total ")
				require.Equal(t, !c.lost, strings.Contains(shown, "\nstampede_log_lines_lost_total 0\n"), url)
			}
			s.buy(url, sale, "bob") // a worker that stops finishes its batch
			for _, p := range processes {
				for _, signal := range c.stop {
					require.NoError(t, syscall.Kill(p.Pid(), signal))
				}
			}
			for _, p := range processes {
				require.Equal(t, exitOK, p.Wait(within).ExitCode())
			}
			s.worker("another").Start()
			s.ends(exitOK, "audit", "--wait=30s")
		})
	}
}

// What was written while nobody read comes when somebody does.
func TestLogComesWhenItIsRead(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	reader, writer := fullPipe(t)
	c, addr := s.ingress(), testkit.FreeAddr(t)
	c.Setenv("STAMPEDE_HTTP_ADDR", addr)
	c.UseOutput(writer)
	c.Start()
	require.NoError(t, writer.Close())
	testkit.Eventually(t, within, "it listens", func() bool {
		conn, err := net.Dial("tcp", addr) //nolint:noctx // it is closed at once
		return err == nil && conn.Close() == nil
	})
	read := make(chan string, 1)
	go func() {
		text, _ := io.ReadAll(reader)
		read <- string(text)
	}()
	require.Equal(t, exitOK, c.Stop().ExitCode())
	require.Contains(t, <-read, `msg="ingress listens"`)
}

// A process that nohup has started ignores SIGHUP.
func TestNohupIsKept(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := s.ingress()
	c.FromShell("trap '' HUP")
	c.Start()
	c.WaitOutput(within, "ingress listens")
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Pid()))
	require.NoError(t, err)
	_, ignored, _ := strings.Cut(string(status), "SigIgn:")
	var signals uint64
	_, err = fmt.Sscanf(ignored, "%x", &signals)
	require.NoError(t, err)
	require.NotZero(t, signals&(1<<(syscall.SIGHUP-1)))
}
