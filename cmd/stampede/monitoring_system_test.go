//go:build system

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/docs"
	"stampede/internal/test/testkit"
	"stampede/ledger"
	"stampede/reservation/order"
)

var (
	metricName = regexp.MustCompile(`\b(stampede|go|process)_[a-z0-9_]+\b`)
	ofSeries   = regexp.MustCompile(`_(bucket|sum|count)$`)
	grouping   = regexp.MustCompile(`\b(by|on|without) \([^)]*\)`)
	matchers   = regexp.MustCompile(`\{[^}]*\}`)
)

// namesIn returns the metrics that a query names.
func namesIn(expr string) []string {
	expr = matchers.ReplaceAllString(grouping.ReplaceAllString(expr, ""), "")
	return metricName.FindAllString(expr, -1)
}

// Each metric that a panel, a rule, or a page names is one that a process really has, and Prometheus answers each
// query. The queries without an answer are those about what does not happen here.
func TestMonitoringNamesMetricsThatExist(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	addresses := map[string]string{}
	shown := map[string]bool{"go_sched_latencies_seconds": false}
	scraped, urls := s.scrapes()
	for process, lines := range scraped {
		addresses[process] = strings.TrimPrefix(urls[process], "http://")
		for _, line := range lines {
			if series, ok := strings.CutPrefix(line, "# TYPE "); ok {
				name, _, _ := strings.Cut(series, " ")
				shown[name] = true
			}
		}
	}
	queries := map[string]string{}
	for _, r := range alerts(t) {
		queries[r.Alert+" "+r.Labels["severity"]] = r.Expr
	}
	panels := map[string]string{}
	for title, board := range dashboards(t) {
		for _, p := range board {
			for i, target := range p.Targets {
				panels[fmt.Sprintf("%s: %s %d", title, p.Title, i)] = target.Expr
			}
		}
	}
	maps.Copy(queries, panels)
	for where, expr := range queries {
		for _, name := range namesIn(expr) {
			assert.True(t, shown[name] || shown[ofSeries.ReplaceAllString(name, "")], "%s names %s", where, name)
		}
	}
	for _, page := range []string{"runbook.md", "operations.md", "payments.md", "capacity.md"} {
		text, err := os.ReadFile("../../docs/" + page)
		require.NoError(t, err)
		// Roles of Postgres, and a name of metadata at Stripe.
		others := regexp.MustCompile(`stampede_(migrator|ingress|worker|relay|desk|reader|order)\b`)
		text = others.ReplaceAll(text, []byte("no metric"))
		for _, name := range regexp.MustCompile("`[^`]*stampede_[^`]*`").FindAllString(string(text), -1) {
			for _, name := range namesIn(name) {
				// A pattern is no name.
				isKnown := strings.HasSuffix(name, "_") || shown[ofSeries.ReplaceAllString(name, "")] || shown[name]
				assert.True(t, isKnown, "docs/%s names %s", page, name)
			}
		}
	}

	prometheus := startPrometheus(t, addresses)
	var silent []string
	for _, where := range slices.Sorted(maps.Keys(queries)) {
		_, isPanel := panels[where]
		testkit.Eventually(t, within, "an answer to "+where, func() bool {
			series, err := prometheus.ask(t, queries[where])
			require.NoError(t, err, where)
			if isPanel && series == 0 && slices.Contains(quietPanels, where) {
				silent = append(silent, where)
				return true
			}
			return series > 0 || !isPanel
		})
	}
	t.Log("without data:", silent)
}

var (
	runbookCommand = regexp.MustCompile("(?m)^\\$ (.+)$|`((?:stampede|redis-cli|docker|kubectl|systemctl|curl|psql) [^`]+)`")
	word           = regexp.MustCompile(`'[^']*'|\S+`)
)

// The commands of the runbook's sections are those of the program, or of redis-cli, and need only the settings of the
// shell with which the page begins. tools/compose and tools/deploy test what makes that shell.
func TestCommandsOfRunbookRun(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/runbook.md")
	require.NoError(t, err)
	s := newShop(t)
	sale, orders := s.recorded("ann")
	s.ends(exitOK, "relay", "add", "lines", "stdout")
	_, err = ledger.New(s.pool).Report(t.Context(), order.Money{Reference: "pi_2"}) // its refund is due
	require.NoError(t, err)
	_, err = ledger.New(s.pool).Report(t.Context(), order.Money{Reference: "pi_9", Unclear: order.UnclearOrder})
	require.NoError(t, err)
	_, err = s.pool.Exec(t.Context(), "INSERT INTO dead_letters (stream, entry_id, fields, reason, deliveries) "+
		"VALUES ($1, '1-1', '[]', 'rubbish', 1)", s.keys.Orders(0))
	require.NoError(t, err)
	ids := strings.NewReplacer("SALE", sale.String(), "ORDER", orders["ann"].String(), "NAME", "lines", "ID", "1",
		"REFERENCE", "pi_9", "DIR", t.TempDir(), "--wait 1m", "--wait 1ms")
	ran := map[string]bool{}
	for _, found := range runbookCommand.FindAllStringSubmatch(string(text), -1) {
		command := ids.Replace(strings.ReplaceAll(found[1]+found[2], "\n", " "))
		args := word.FindAllString(command, -1)
		if ran[command] || args[0] == "redis-cli" {
			continue
		}
		ran[command] = true
		require.Equal(t, "stampede", args[0], "%s: it runs in one of the three ways only", command)
		for i := range args {
			args[i] = strings.Trim(args[i], "'")
		}
		status, output := s.run(args[1:]...)
		assert.NotEqual(t, exitUsage, status, "%s: %s", command, output)
		assert.NotContains(t, output, "not found", command)
	}
	assert.Greater(t, len(ran), 20)
}

// quietPanels show what does not happen in the test.
var quietPanels = []string{
	"Stampede: the fleet: Rebuilds and lost entries 0", "Stampede: the minute: Verdicts 0",
}

type prometheusServer struct{ url string }

// startPrometheus runs the Prometheus of the package that promtool is from, with the alerts.
func startPrometheus(t *testing.T, targets map[string]string) prometheusServer {
	t.Helper()
	program, err := exec.LookPath("prometheus")
	require.NoError(t, err, "prometheus is missing: `sh tools/setup.sh` installs it")
	folder := t.TempDir()
	rules, err := filepath.Abs(deployed + "/prometheus/alerts.yml")
	require.NoError(t, err)
	config := "global: { scrape_interval: 1s, evaluation_interval: 1s }\nrule_files: [" + rules + "]\nscrape_configs:\n"
	for process, address := range targets {
		config += fmt.Sprintf("  - { job_name: stampede-%s, static_configs: [{ targets: ['%s'] }] }\n", process, address)
	}
	require.NoError(t, os.WriteFile(folder+"/prometheus.yml", []byte(config), 0o600))
	address := testkit.FreeAddr(t)
	c := exec.Command(program, "--config.file="+folder+"/prometheus.yml", "--storage.tsdb.path="+folder+"/data",
		"--web.listen-address="+address, "--log.level=warn")
	var output strings.Builder
	c.Stdout, c.Stderr = &output, &output
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			t.Log(output.String())
		}
	})
	p := prometheusServer{"http://" + address}
	testkit.Eventually(t, within, "Prometheus scrapes", func() bool {
		series, err := p.ask(t, `count_over_time(up[1m]) > 3`)
		return err == nil && series == len(targets)
	})
	return p
}

// ask returns how many series a query answers.
func (p prometheusServer) ask(t *testing.T, expr string) (series int, err error) {
	t.Helper()
	expr = strings.NewReplacer("$__rate_interval", "30s", "$sale", ".*").Replace(expr)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
		p.url+"/api/v1/query?query="+url.QueryEscape(expr), nil)
	require.NoError(t, err)
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	var answer struct {
		Error string
		Data  struct{ Result []any }
	}
	if err := json.NewDecoder(res.Body).Decode(&answer); err != nil {
		return 0, err
	}
	if answer.Error != "" {
		return 0, fmt.Errorf("%s: %s", expr, answer.Error)
	}
	return len(answer.Data.Result), nil
}

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
	_, err := ledger.New(s.pool).Report(t.Context(), order.Money{Reference: "pi_1", Amount: 4900, Currency: "EUR"})
	require.NoError(t, err)
	relay.WaitOutput(within, "stampede.payment.refund_due")
	work := "http://" + loggedAddr(worker, "metrics are served")
	s.drawAndList(ingress)
	s.awaitSeries(work, "stampede_draw_left_seconds{", "stampede_waitlist_waiting{", "stampede_relay_unserved_seconds ",
		"stampede_sale_units{", "stampede_sales_shut ", "stampede_workers_alive ", "stampede_redis_up{",
		"stampede_postgres_up 1", `stampede_refunds_due_amount{currency="EUR"} 4900`,
		"stampede_audit_promise_broken{", "stampede_audit_timestamp_seconds ",
		"stampede_redis_ping_seconds{", "stampede_postgres_connections{", `stampede_ready{process="worker",reason=""} 1`)
	relaying := "http://" + loggedAddr(relay, "metrics are served")
	s.awaitSeries(relaying, "stampede_relay_lag_seconds{", `stampede_ready{process="relay",reason=""} 1`)
	desk := s.command("dashboard", "--addr=127.0.0.1:0")
	desk.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	desk.Start()
	urls = map[string]string{
		"ingress": ingress, "worker": work, "relay": relaying,
		"dashboard": "http://" + loggedAddr(desk, "dashboard listens"),
	}
	s.awaitSeries(urls["dashboard"], `stampede_ready{process="dashboard",reason=""} 1`)
	lines = map[string][]string{}
	for process, url := range urls {
		s.awaitSeries(url, "stampede_clock_ahead_seconds ")
		lines[process] = scrape(t, url)
	}
	return lines, urls
}

// drawAndList makes a draw that waits for the secret of a party, and a waiting list in which somebody waits.
func (s *shop) drawAndList(ingress string) {
	s.t.Helper()
	created := func(args ...string) string {
		status, output := s.run(append([]string{"sale", "create", "--output=json"}, args...)...)
		require.Equal(s.t, exitOK, status, output)
		var sale struct{ ID string }
		require.NoError(s.t, json.Unmarshal([]byte(output), &sale), output)
		return sale.ID
	}
	goods := created("--name=Air One", "--stock=5")
	entries := created("--name=entries", "--stock=50", "--closes-at="+time.Now().Add(15*time.Second).Format(time.RFC3339))
	s.ends(exitOK, "draw", "create", goods, "--entries="+entries, "--freeze=10m",
		fmt.Sprintf("--party=notary:%x", sha256.Sum256([]byte("secret"))))
	list := created("--name=Air Two", "--stock=1", "--payment-window=10m", "--waitlist")
	require.Equal(s.t, 202, ask(s.t, "POST", ingress+"/v1/sales/"+list+"/orders", "ann", "").HTTP)
	require.Equal(s.t, 202, ask(s.t, "POST", ingress+"/v1/sales/"+list+"/waitlist", "bob", "").HTTP)
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
			line := "`" + name + "`"
			if len(labels) > 0 {
				line += " {" + strings.Join(slices.Sorted(maps.Keys(labels)), ", ") + "}"
			}
			if family.GetType() == dto.MetricType_HISTOGRAM {
				line += ", histogram"
			}
			line += ": " + family.GetHelp()
			shownBy[line] = append(shownBy[line], process)
		}
	}
	sections := map[string]string{}
	for _, line := range slices.Sorted(maps.Keys(shownBy)) {
		sections[strings.Join(shownBy[line], ", ")] += docs.Item("", line)
	}
	page := "# Metrics\n\n" + docs.Written + "\nNames in `_total` are counters; the others are gauges, if not marked.\n"
	for _, processes := range slices.Sorted(maps.Keys(sections)) {
		page += "\n## " + processes + "\n\n" + sections[processes]
	}
	return page
}
