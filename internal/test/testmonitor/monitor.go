// Package testmonitor runs a real Prometheus and a real Alertmanager with the rules of deploy/prometheus, for tests
// that want to see which alerts fire, and what people are told of them.
package testmonitor

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// Options configure a Monitor.
type Options struct {
	// Faster is how much shorter the windows and delays of alerts are than deployed. What they compare with, such as the
	// age of an order, is as deployed.
	Faster int
	// EndsFaster is how much shorter they fire after their cause (keep_firing_for). Default Faster.
	EndsFaster int
	// Scrape is the pause between two scrapes.
	Scrape time.Duration
	// GroupWait is how long Alertmanager waits for the cause of an alert before it sends the alert.
	GroupWait time.Duration
	// Targets are the addresses of the processes by the name of their job.
	Targets map[string]string
}

// Alert is an alert that fires, or that was sent.
type Alert struct {
	Labels, Annotations map[string]string
}

// Name is the name of the alert and its severity.
func (a Alert) Name() string { return a.Labels["alertname"] + " " + a.Labels["severity"] }

// Section is the section of the runbook to which the alert leads.
func (a Alert) Section() string {
	_, section, _ := strings.Cut(a.Annotations["runbook_url"], "#")
	return section
}

// Monitor is a Prometheus and its Alertmanager.
type Monitor struct {
	t                   testing.TB
	prometheus, manager string // their addresses

	mu   sync.Mutex
	sent []Alert
}

// Start starts both, until the test ends.
func Start(t testing.TB, o Options) *Monitor {
	t.Helper()
	m := &Monitor{t: t, prometheus: testkit.FreeAddr(t), manager: testkit.FreeAddr(t)}
	receiver := httptest.NewServer(http.HandlerFunc(m.receive))
	t.Cleanup(receiver.Close)
	folder := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600))
	}
	write("alerts.yml", faster(deployed(t, "alerts.yml"), o.Faster, cmp.Or(o.EndsFaster, o.Faster)))
	write("alertmanager.yml", fmt.Sprintf(`route: { receiver: shop, group_by: ['...'], group_wait: %s, group_interval: 1s }
receivers: [{ name: shop, webhook_configs: [{ url: '%s' }] }]
%s`, o.GroupWait, receiver.URL, deployed(t, "alertmanager.yml")))
	config := fmt.Sprintf(`global: { scrape_interval: %[1]s, scrape_timeout: %[1]s }
rule_files: [alerts.yml]
alerting: { alertmanagers: [{ static_configs: [{ targets: ['%[2]s'] }] }] }
scrape_configs:
`, o.Scrape, m.manager)
	for _, job := range slices.Sorted(maps.Keys(o.Targets)) {
		config += fmt.Sprintf("  - { job_name: %s, static_configs: [{ targets: ['%s'] }] }\n", job, o.Targets[job])
	}
	write("prometheus.yml", config)
	run(t, "prometheus-alertmanager", "--config.file="+folder+"/alertmanager.yml", "--storage.path="+folder+"/manager",
		"--web.listen-address="+m.manager, "--cluster.listen-address=", "--log.level=warn")
	run(t, "prometheus", "--config.file="+folder+"/prometheus.yml", "--storage.tsdb.path="+folder+"/data",
		"--web.listen-address="+m.prometheus, "--log.level=warn")
	return m
}

// deployed is a file of deploy/prometheus.
func deployed(t testing.TB, name string) string {
	t.Helper()
	_, here, _, _ := runtime.Caller(0)
	text, err := os.ReadFile(filepath.Join(filepath.Dir(here), "../../../deploy/prometheus", name))
	require.NoError(t, err)
	return string(text)
}

var durations = regexp.MustCompile(`(\[|for: |offset |interval: )(\d+)([smd])`)

// faster is the text of rules with shorter durations.
func faster(rules string, times, endTimes int) (text string) {
	for line := range strings.Lines(rules) {
		by := times
		if strings.Contains(line, "keep_firing_for: ") {
			by = endTimes
		}
		text += durations.ReplaceAllStringFunc(line, func(found string) string {
			parts := durations.FindStringSubmatch(found)
			n, _ := strconv.Atoi(parts[2]) // digits
			milliseconds := n * map[string]int{"s": 1, "m": 60, "d": 86400}[parts[3]] * 1000 / by
			return fmt.Sprintf("%s%dms", parts[1], milliseconds)
		})
	}
	return text
}

// receive is the webhook that is told of alerts.
func (m *Monitor) receive(_ http.ResponseWriter, r *http.Request) {
	var told struct {
		Alerts []struct {
			Alert
			Status string
		}
	}
	if json.NewDecoder(r.Body).Decode(&told) != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range told.Alerts {
		if a.Status == "firing" {
			m.sent = append(m.sent, a.Alert)
		}
	}
}

// Sent are the alerts that people were told, in that order.
func (m *Monitor) Sent() []Alert {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.sent)
}

// Active are the alerts that Alertmanager tells, or will: none is a consequence of another.
func (m *Monitor) Active() (active []Alert) {
	_ = m.get(m.manager, "/api/v2/alerts?active=true&inhibited=false&silenced=false", &active) // it starts
	return active
}

// Ask returns the labels of the series of a query, none while Prometheus starts.
func (m *Monitor) Ask(expr string) (series []map[string]string) {
	var answer struct {
		Data struct {
			Result []struct{ Metric map[string]string }
		}
	}
	_ = m.get(m.prometheus, "/api/v1/query?query="+url.QueryEscape(expr), &answer) // it starts
	for _, one := range answer.Data.Result {
		series = append(series, one.Metric)
	}
	return series
}

// Firing are the alerts that fire, consequences included, and Pending those that will if their cause lasts.
func (m *Monitor) Firing() []Alert  { return m.alerts("firing") }
func (m *Monitor) Pending() []Alert { return m.alerts("pending") }

func (m *Monitor) alerts(state string) (found []Alert) {
	var answer struct {
		Data struct {
			Alerts []struct {
				Alert
				State string
			}
		}
	}
	_ = m.get(m.prometheus, "/api/v1/alerts", &answer) // it starts
	for _, a := range answer.Data.Alerts {
		if a.State == state {
			found = append(found, a.Alert)
		}
	}
	return found
}

func (m *Monitor) get(addr, path string, into any) error {
	m.t.Helper()
	r, err := http.NewRequestWithContext(m.t.Context(), http.MethodGet, "http://"+addr+path, nil)
	require.NoError(m.t, err)
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	return json.NewDecoder(res.Body).Decode(into)
}

// run runs a program until the test ends.
func run(t testing.TB, program string, args ...string) {
	t.Helper()
	c := exec.Command(program, args...)
	var output bytes.Buffer
	c.Stdout, c.Stderr = &output, &output
	require.NoError(t, c.Start(), "`sh tools/setup.sh` installs it")
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			t.Log(output.String())
		}
	})
}
