//go:build system

package main

import (
	"bytes"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/docs"
)

// promtool returns the program, without which the tests of metrics and alerts fail: nothing is skipped.
func promtool(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("promtool")
	require.NoError(t, err, "promtool is missing: `sh tools/setup.sh` installs it, and so does the package prometheus")
	return path
}

// scrapes starts an ingress, a worker, a relay and a dashboard, lets an order pass through them, and returns their
// metrics and their URLs.
func (s *shop) scrapes() (lines map[string][]string, urls map[string]string) {
	t := s.t
	t.Helper()
	_, ingress := s.serve()
	worker := s.worker("worker")
	worker.Start()
	s.ends(exitOK, "relay", "add", "lines", "stdout", "--from=start")
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
	desk := s.command("dashboard", "--addr=127.0.0.1:0")
	desk.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	desk.Start()
	urls = map[string]string{
		"ingress": ingress, "worker": work, "relay": relaying,
		"dashboard": "http://" + loggedAddr(desk, "dashboard listens"),
	}
	lines = map[string][]string{}
	for process, url := range urls {
		lines[process] = scrape(t, url)
	}
	return lines, urls
}

// The names, types, units and help texts follow the conventions of Prometheus, and are those of the page.
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
	requirePage(t, docs.MetricsPage, metricsPage(t, scraped))
	_, err := check([]string{"# TYPE stampede_things counter", "stampede_things 1", ""})
	require.Error(t, err, "promtool finds faults")
}

// metricsPage lists the metrics of processes by the processes that have them.
func metricsPage(t *testing.T, scraped map[string][]string) string {
	t.Helper()
	shownBy := map[string][]string{}
	for _, process := range slices.Sorted(maps.Keys(scraped)) {
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(strings.Join(scraped[process], "\n")))
		require.NoError(t, err)
		for name, family := range families {
			if !strings.HasPrefix(name, "stampede_") {
				continue
			}
			labels := map[string]bool{}
			for _, series := range family.GetMetric() {
				for _, label := range series.GetLabel() {
					labels[label.GetName()] = true
				}
			}
			line := "- `" + name + "`"
			if len(labels) > 0 {
				line += " {" + strings.Join(slices.Sorted(maps.Keys(labels)), ", ") + "}"
			}
			if family.GetType() == dto.MetricType_HISTOGRAM {
				line += ", histogram"
			}
			line += ": " + family.GetHelp() + "\n"
			shownBy[line] = append(shownBy[line], process)
		}
	}
	sections := map[string]string{}
	for _, line := range slices.Sorted(maps.Keys(shownBy)) {
		sections[strings.Join(shownBy[line], ", ")] += line
	}
	page := "# Metrics\n\n" + docs.Written + " Names in `_total` are counters; the others are gauges, if not marked.\n"
	for _, processes := range slices.Sorted(maps.Keys(sections)) {
		page += "\n## " + processes + "\n\n" + sections[processes]
	}
	return page
}
