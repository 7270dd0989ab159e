//go:build system

package fleet

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// timesFaster is how much faster alerts are evaluated here, with their windows and delays.
const timesFaster = 10

// notified is what a real Alertmanager has sent.
type notified struct {
	mu     sync.Mutex
	firing []string
}

func (n *notified) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	var sent struct {
		Alerts []struct {
			Status string
			Labels map[string]string
		}
	}
	if json.NewDecoder(r.Body).Decode(&sent) != nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range sent.Alerts {
		if a.Status == "firing" {
			n.firing = append(n.firing, a.Labels["alertname"])
		}
	}
}

// names are the alerts that were sent.
func (n *notified) names() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.firing)
}

// An outage makes one notification, also when it ends: what it explains ends later.
func TestOneNotificationAnOutage(t *testing.T) {
	t.Parallel()
	sent := &notified{}
	receiver := httptest.NewServer(sent)
	t.Cleanup(receiver.Close)
	worker, ingress := newPage(t, ""), newPage(t, "")
	ask := monitor(t, receiver.URL, map[string]string{"worker": worker.URL, "ingress": ingress.URL})
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
	awaitFiring := func(names ...string) {
		t.Helper()
		testkit.Eventually(t, time.Minute, strings.Join(names, ", "), func() bool {
			now := ask(`ALERTS{alertstate="firing"}`)
			return !slices.ContainsFunc(names, func(name string) bool { return !slices.Contains(now, name) }) &&
				(len(names) > 0 || len(now) == 0)
		})
	}
	work(1, 0)
	serve(1)
	testkit.Eventually(t, time.Minute, "scrapes", func() bool { return len(ask(`up == 1`)) == 2 })
	awaitFiring()
	require.Empty(t, sent.names())

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
	require.Equal(t, []string{redisGone.name}, sent.names())

	worker.Close()
	awaitFiring(noWorker.name, targetGone.name)
	testkit.Eventually(t, time.Minute, "the notification", func() bool { return len(sent.names()) > 1 })
	testkit.Eventually(t, time.Minute, "longer than Alertmanager waits", func() bool {
		return len(ask(`count_over_time(ALERTS{alertname="TargetGone",alertstate="firing"}[9s]) > 14`)) > 0
	})
	require.Equal(t, []string{redisGone.name, noWorker.name}, sent.names())
}

var durations = regexp.MustCompile(`(\[|for: |offset |interval: )(\d+)([smd])`)

// monitor runs Prometheus and Alertmanager as they are deployed, and returns what asks the former: for the names of the
// alerts of a query, "" for another series.
func monitor(t *testing.T, receiver string, targets map[string]string) (ask func(expr string) []string) {
	t.Helper()
	folder := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(folder+"/"+name, []byte(text), 0o600))
	}
	rules, err := os.ReadFile(deployed + "/alerts.yml")
	require.NoError(t, err)
	write("alerts.yml", durations.ReplaceAllStringFunc(string(rules), func(found string) string {
		parts := durations.FindStringSubmatch(found)
		n, _ := strconv.Atoi(parts[2]) // digits
		milliseconds := n * map[string]int{"s": 1, "m": 60, "d": 86400}[parts[3]] * 1000 / timesFaster
		return fmt.Sprintf("%s%dms", parts[1], milliseconds)
	}))
	inhibitions, err := os.ReadFile(deployed + "/alertmanager.yml")
	require.NoError(t, err)
	write("alertmanager.yml", fmt.Sprintf(`route: { receiver: shop, group_by: ['...'], group_wait: 3s, group_interval: 1s }
receivers: [{ name: shop, webhook_configs: [{ url: '%s' }] }]
%s`, receiver, inhibitions))
	manager, server := freeAddr(t), freeAddr(t)
	config := "global: { scrape_interval: 500ms, evaluation_interval: 500ms }\nrule_files: [alerts.yml]\n" +
		"alerting: { alertmanagers: [{ static_configs: [{ targets: ['" + manager + "'] }] }] }\nscrape_configs:\n"
	for name, address := range targets {
		config += fmt.Sprintf("  - { job_name: %s, static_configs: [{ targets: ['%s'] }] }\n",
			name, strings.TrimPrefix(address, "http://"))
	}
	write("prometheus.yml", config)
	start(t, "prometheus-alertmanager", "--config.file="+folder+"/alertmanager.yml", "--storage.path="+folder+"/manager",
		"--web.listen-address="+manager, "--cluster.listen-address=", "--log.level=warn")
	start(t, "prometheus", "--config.file="+folder+"/prometheus.yml", "--storage.tsdb.path="+folder+"/data",
		"--web.listen-address="+server, "--log.level=warn")
	return func(expr string) (names []string) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			"http://"+server+"/api/v1/query?query="+url.QueryEscape(expr), nil)
		require.NoError(t, err)
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			return nil // it starts
		}
		defer func() { _ = res.Body.Close() }()
		var answer struct {
			Data struct {
				Result []struct{ Metric map[string]string }
			}
		}
		_ = json.NewDecoder(res.Body).Decode(&answer) // it starts
		for _, series := range answer.Data.Result {
			names = append(names, series.Metric["alertname"])
		}
		return names
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

// start runs a program until the test ends.
func start(t *testing.T, program string, args ...string) {
	t.Helper()
	c := exec.Command(program, args...)
	var output strings.Builder
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
