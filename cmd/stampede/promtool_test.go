//go:build system

package main

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// promtool returns the program, without which the tests of metrics and alerts fail: nothing is skipped.
func promtool(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("promtool")
	require.NoError(t, err, "promtool is missing: `sh tools/setup.sh` installs it, and so does the package prometheus")
	return path
}

// scrapes starts an ingress, a worker and a relay, lets an order pass through them, and returns their metrics
// and their URLs.
func (s *shop) scrapes() (lines map[string][]string, urls map[string]string) {
	t := s.t
	t.Helper()
	_, ingress := s.serve()
	worker := s.worker("worker")
	worker.Start()
	status, output := s.run("relay", "add", "lines", "stdout", "--from=start")
	require.Equal(t, exitOK, status, output)
	relay := s.relay()
	relay.Start()
	sale := s.sale(ingress, 10)
	require.Equal(t, 202, ask(t, "POST", ingress+"/v1/sales/"+sale.String()+"/orders", "ann", "").HTTP)
	relay.WaitOutput(within, "stampede.order.confirmed")
	work := "http://" + loggedAddr(worker, "metrics are served")
	s.awaitSeries(work, "stampede_sale_units{", "stampede_sales_shut ", "stampede_workers_alive ", "stampede_redis_up{",
		"stampede_postgres_up 1", "stampede_audit_promise_broken{")
	relaying := "http://" + loggedAddr(relay, "metrics are served")
	s.awaitSeries(relaying, "stampede_relay_lag_seconds{")
	urls = map[string]string{"ingress": ingress, "worker": work, "relay": relaying}
	lines = map[string][]string{}
	for process, url := range urls {
		lines[process] = scrape(t, url)
	}
	return lines, urls
}

// The names, types, units and help texts follow the conventions of Prometheus.
func TestMetricsFollowConventions(t *testing.T) {
	t.Parallel()
	check := func(lines []string) ([]byte, error) {
		c := exec.CommandContext(t.Context(), promtool(t), "check", "metrics")
		c.Stdin = strings.NewReader(strings.Join(lines, "\n"))
		return c.CombinedOutput()
	}
	scraped, _ := newShop(t).scrapes()
	for process, lines := range scraped {
		output, err := check(lines)
		require.NoError(t, err, "%s: %s", process, output)
		require.Empty(t, bytes.TrimSpace(output), process)
	}
	_, err := check([]string{"# TYPE stampede_things counter", "stampede_things 1", ""})
	require.Error(t, err, "promtool finds faults")
}
