//go:build system

package fleet

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testmonitor"
)

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
