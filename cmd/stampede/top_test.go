//go:build system

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testkit"
	"stampede/ledger/draws"
	"stampede/reservation"
)

// snapshot runs top once.
func (s *shop) snapshot(targets ...string) fleet.Snapshot {
	s.t.Helper()
	c := s.command("top", "--output=json", "--scrape="+strings.Join(targets, ","))
	c.Start()
	require.Equal(s.t, exitOK, c.Wait(within).ExitCode(), c.Output())
	var found fleet.Snapshot
	require.NoError(s.t, json.Unmarshal([]byte(c.Output()), &found), c.Output())
	var times struct {
		Rates struct {
			AnswerP50  float64 `json:"answer_p50_seconds"`
			AnswerP99  float64 `json:"answer_p99_seconds"`
			DurableP99 float64 `json:"durable_p99_seconds"`
		}
	}
	require.NoError(s.t, json.Unmarshal([]byte(c.Output()), &times))
	seconds := func(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }
	found.Rates.AnswerP50, found.Rates.AnswerP99 = seconds(times.Rates.AnswerP50), seconds(times.Rates.AnswerP99)
	found.Rates.DurableP99 = seconds(times.Rates.DurableP99)
	return found
}

// buying buys through the ingresses in turn until the test ends.
func buying(t *testing.T, sale uuid.UUID, urls ...string) {
	t.Helper()
	stop := make(chan struct{})
	var buyers sync.WaitGroup
	t.Cleanup(func() {
		close(stop)
		buyers.Wait()
	})
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for _, url := range urls {
		buyers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(10 * time.Millisecond):
				}
				r, err := http.NewRequest(http.MethodPost, url+"/v1/sales/"+sale.String()+"/orders", strings.NewReader("{}"))
				if err != nil {
					t.Error(err)
					return
				}
				r.Header.Set("X-User-ID", fmt.Sprintf("user-%d-%s", n, url))
				r.Header.Set("Content-Type", "application/json")
				if res, err := client.Do(r); err == nil { // one of the ingresses is killed
					_ = res.Body.Close()
				}
			}
		})
	}
}

// Real ingresses and a real worker are summed, and a killed one is shown as gone.
func TestTopSumsRealProcesses(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, one := s.serve()
	victim, two := s.serve()
	worker := s.worker("w")
	worker.Start()
	sale := s.sale(one, 1_000_000)
	targets := []string{one + "/metrics", two + "/metrics", "http://" + loggedAddr(worker, "metrics") + "/metrics"}
	buying(t, sale, one, two)
	var found fleet.Snapshot
	testkit.Eventually(t, 2*within, "both ingresses sell, and the worker records", func() bool {
		found = s.snapshot(targets...)
		p := found.Processes
		if len(found.Sales) == 0 || !found.Sales[0].UnitsKnown || found.Sales[0].Sold == 0 || !found.Rates.BacklogKnown {
			return false // nothing is recorded yet, or a server did not answer in time
		}
		// A purchase is counted twice, and a scrape may find one of the counters ahead.
		apart := math.Abs(found.Sales[0].Rates.Offered/found.Rates.Offered - 1)
		return p[0].PerSecond > 0 && p[1].PerSecond > 0 && p[2].PerSecond > 0 && apart < 0.3
	})
	require.InEpsilon(t, found.Processes[0].PerSecond+found.Processes[1].PerSecond, found.Rates.Accepted, 1e-6)
	require.InEpsilon(t, found.Processes[2].PerSecond, found.Rates.Durable, 1e-6)
	require.Positive(t, found.Rates.AnswerP99)
	require.GreaterOrEqual(t, found.Rates.AnswerP99, found.Rates.AnswerP50)
	require.Positive(t, found.Rates.DurableP99)
	require.True(t, found.Sales[0].RatesKnown)
	require.Equal(t, []string{"ingress", "ingress", "worker"},
		[]string{found.Processes[0].Kind, found.Processes[1].Kind, found.Processes[2].Kind})
	require.Len(t, found.Processes[2].Readers, 1)
	for _, p := range found.Processes {
		require.Positive(t, p.MemoryBytes, p.Target)
		require.NotEmpty(t, p.Version, p.Target)
	}
	shown := found.Sales[0]
	require.Equal(t, shown.Stock, shown.Available+shown.Held+shown.Sold)
	require.Positive(t, shown.Sold)

	victim.Kill()
	worker.Kill()
	found = s.snapshot(targets...)
	require.False(t, found.Processes[1].Up)
	require.NotEmpty(t, found.Processes[1].Error)
	require.Zero(t, found.Processes[1].PerSecond)
	require.False(t, found.Rates.BacklogKnown, "nobody knows")
	var troubles []string
	for _, trouble := range found.Troubles {
		troubles = append(troubles, trouble.Runbook)
	}
	require.Equal(t, []string{"no-worker"}, troubles)
	require.Len(t, found.Troubles[0].Consequences, 2, "which of the targets that are gone was the worker is not known")
	require.True(t, found.Rates.PurchasesKnown)
	require.False(t, found.Rates.DurableKnown, "nobody knows")
}

// terminal is a pseudo-terminal of that size, and what was written to it.
type terminal struct {
	screen *os.File
	mu     sync.Mutex
	text   strings.Builder
}

func newTerminal(t *testing.T, columns, rows uint16) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	screen, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetWinsize(int(screen.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows}))
	terminal := &terminal{screen: screen}
	var reading sync.WaitGroup
	reading.Go(func() {
		part := make([]byte, 4096)
		for {
			n, err := master.Read(part)
			terminal.mu.Lock()
			terminal.text.Write(part[:n])
			terminal.mu.Unlock()
			if err != nil {
				return // the last process has closed it
			}
		}
	})
	t.Cleanup(func() {
		_ = screen.Close()
		reading.Wait()
		_ = master.Close()
	})
	return terminal
}

func (s *terminal) written() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

var attributes = regexp.MustCompile("\x1b\\[[0-9;]*[mKJ]")

// frames are the whole screens that were drawn, without attributes.
func (s *terminal) frames() (frames []string) {
	parts := strings.Split(s.written(), goHome)
	for _, part := range parts[1:max(1, len(parts)-1)] {
		frames = append(frames, attributes.ReplaceAllString(part, ""))
	}
	return frames
}

func TestTopDrawsInPlaceAndRestoresTerminal(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	sale := s.sale(url, 100)
	const hostile = "evil\x1b[2J\u202e"
	_, err := s.pool.Exec(t.Context(), "UPDATE sales SET name = $2 WHERE id = $1", sale, hostile+strings.Repeat("界", 60))
	require.NoError(t, err)
	for signal, colored := range map[unix.Signal]bool{unix.SIGINT: true, unix.SIGTERM: false} {
		screen := newTerminal(t, 80, 24)
		c := s.command("top", "--scrape="+url+"/metrics,http://127.0.0.1:1/metrics")
		c.UseTerminal(screen.screen)
		if !colored {
			c.Setenv("NO_COLOR", "1")
		}
		c.Start()
		testkit.Eventually(t, within, "the sale and its ingress are drawn twice", func() bool {
			found := 0
			for _, frame := range screen.frames() {
				if strings.Contains(frame, "evil") && strings.Contains(frame, "ingress") && strings.Contains(frame, "100") {
					found++
				}
			}
			return found >= 2
		})
		require.NoError(t, unix.Kill(c.Pid(), signal))
		require.Equal(t, exitOK, c.Wait(within).ExitCode(), c.Output())
		testkit.Eventually(t, within, "the terminal is restored", func() bool {
			return strings.HasSuffix(screen.written(), leaveScreen)
		})
		text := screen.written()
		require.True(t, strings.HasPrefix(text, enterScreen))
		require.NotContains(t, text, "\x1b[2J")
		require.NotContains(t, text, "\u202e")
		require.Equal(t, colored, strings.Contains(text, "\x1b[32m"))
		for _, frame := range screen.frames() {
			lines := strings.Split(strings.TrimRight(frame, "\r\n"), "\n")
			require.LessOrEqual(t, len(lines), 24)
			for _, line := range lines {
				require.LessOrEqual(t, textWidth(strings.Trim(line, "\r")), 80, line)
			}
		}
	}
}

func TestTopRefusesFaultyTarget(t *testing.T) {
	t.Parallel()
	status, output := newShop(t).run("top", "--once", "--scrape=http://127.0.0.1:1/metrics,ftp://ann:secret@host/")
	assert.Equal(t, exitUsage, status)
	assert.Contains(t, output, "--scrape: target 2")
	assert.NotContains(t, output, "secret")
}

// crowded is a snapshot with more than a screen holds.
func crowded() *fleet.Snapshot {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	s := &fleet.Snapshot{
		At: now, Postgres: fleet.Server{Reachable: true}, Redis: fleet.Server{Since: now.Add(-90 * time.Second)},
		Rates: fleet.Rates{
			PurchasesKnown: true, Offered: 12_345, Accepted: 9.4, Shed: 1e6,
			BacklogKnown: true, Backlog: 77, OldestWaiting: time.Minute,
		},
		Audit: &fleet.Audit{At: now.Add(-3 * time.Hour)},
	}
	for i := range 40 {
		s.Sales = append(s.Sales, fleet.Sale{
			Terms: reservation.Terms{Name: fmt.Sprintf("sale %d %s", i, strings.Repeat("🎉", i))}, State: reservation.StateOpen,
			Stock: 1000, Available: 900, Held: 99, Sold: 1, UnitsKnown: i != 1, RatesKnown: true,
		})
		s.Processes = append(s.Processes, fleet.Process{Target: fmt.Sprintf("http://worker-%d:9090/metrics", i), Up: i != 1})
		s.Troubles = append(s.Troubles, fleet.Trouble{Severity: fleet.Warning, Text: strings.Repeat("trouble ", 40)})
	}
	s.Sales[0].Shut = "a rebuild"
	s.Sales[3].OffersOnly, s.Sales[4].OffersOnly, s.Sales[4].DrawState = true, true, draws.Void
	s.Troubles[0] = fleet.Trouble{
		Severity: fleet.Critical, Text: "nobody works", Since: now.Add(-time.Hour), Runbook: "no-worker",
		Consequences: []fleet.Trouble{{Severity: fleet.Warning, Text: "orders wait", Since: now}},
	}
	s.Pending = []fleet.Pending{{
		Trouble: fleet.Trouble{Severity: fleet.Warning, Text: "units wait", Since: now}, Due: now.Add(5 * time.Minute),
	}}
	s.Rebuilds = []fleet.Rebuild{{Partition: 3, Reason: "server", Since: now, Step: "close", SalesDone: 2, SalesTotal: 5}}
	return s
}

func TestTopFitsScreen(t *testing.T) {
	t.Parallel()
	for _, size := range [][2]int{{40, 10}, {80, 24}, {200, 60}, {80, 0}, {20, 5}, {1, 1}} {
		view := topView{width: size[0], height: size[1]}
		text := view.text(crowded())
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		if size[1] > 0 {
			assert.LessOrEqual(t, len(lines), size[1], size)
		}
		for _, line := range lines {
			assert.LessOrEqual(t, textWidth(line), size[0], line)
		}
	}
	text := topView{width: 80, height: 24}.text(crowded())
	for _, want := range []string{
		"Redis GONE 90s", "processes 39 of 40", "audit 3h ago", "CRIT  60m nobody works  runbook.md#no-worker", "more",
		"WARN   0s └ orders wait", "recorded unknown",
		"REBUILD partition 3 (server) for 0s: close, 2 of 5 sales", "shed 1.0M", "12,345: accepted 9.4",
		"backlog 77, oldest 60 s", "not selling",
	} {
		assert.Contains(t, text, want)
	}
	troubled := crowded()
	troubled.Processes[2].NotReady, troubled.Processes[3].Failing = "Redis does not answer", []string{"record"}
	troubled.Processes[4].Idle = "others read all partitions: ann"
	wide := topView{width: 120}.text(troubled)
	assert.Contains(t, wide, "└ reads nothing: others read all partitions: ann")
	assert.Contains(t, wide, "└ not ready: Redis does not answer")
	assert.Contains(t, wide, "└ fails: record")
	assert.Contains(t, wide, "SEEN   0s units wait  warning if it lasts for 5m0s")
	assert.NotContains(t, topView{width: 120, live: true}.text(troubled), "SEEN")
	assert.Contains(t, wide, "worker-39:9090")
	assert.Contains(t, wide, "offers only")
	assert.Contains(t, wide, "draw: void")
	assert.Regexp(t, `sale 1 .* \?{8,} +\? +\? +\?`, wide, "units that are not known are no zeros")
	assert.Regexp(t, `sale 2 .*█▒▒·{10,} +900 +99 +1`, wide)
}

// TestTopOnCluster: the figures of all masters are one, and a master that is gone hides none of the others.
func TestTopOnCluster(t *testing.T) {
	t.Parallel()
	s, cluster, operator := newShopOnCluster(t)
	_, ingress := s.serve()
	targets := []string{ingress}
	for _, name := range []string{"one", "two"} {
		worker := s.worker(name)
		worker.Start()
		targets = append(targets, "http://"+loggedAddr(worker, "metrics are served"))
	}
	sharded := s.createSale(ingress, reservation.Terms{Name: "sharded", Stock: 1000, Shards: 4})
	whole := s.sale(ingress, 1000)
	for s.keys.Partition(whole) != onFirstMaster {
		whole = s.sale(ingress, 1000)
	}
	hold, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = hold.Rollback(context.Background()) })
	_, err = hold.Exec(t.Context(), "SELECT FROM sales FOR UPDATE") // so that orders wait
	require.NoError(t, err)
	const orders = 40
	for i := range orders {
		s.buy(ingress, sharded, fmt.Sprint("user-", i))
	}
	var found fleet.Snapshot
	look := func(id uuid.UUID) fleet.Sale {
		return found.Sales[slices.IndexFunc(found.Sales, func(sale fleet.Sale) bool { return sale.ID == id })]
	}
	testkit.Eventually(t, within, "all orders wait, in all partitions, each of which is read", func() bool {
		found = s.snapshot(targets...)
		var streams []string
		for _, p := range found.Processes {
			streams = append(streams, p.Readers...)
		}
		slices.Sort(streams)
		return found.Rates.Backlog == orders && look(sharded).Held == orders && len(found.RedisNodes) == 3 &&
			slices.Equal(s.orderStreams(4), streams)
	})
	require.EqualValues(t, 1000-orders, look(sharded).Available)
	var masters []string
	for _, node := range found.RedisNodes {
		masters = append(masters, node.Name)
		require.True(t, node.Reachable)
		require.Positive(t, node.UsedBytes)
		require.Positive(t, node.MaxBytes)
		s.awaitSeries(targets[1], fmt.Sprintf("stampede_redis_up{node=%q} 1", node.Name),
			fmt.Sprintf("stampede_redis_memory_used_bytes{node=%q} ", node.Name))
	}
	s.awaitSeries(targets[2], fmt.Sprintf("stampede_sale_units{kind=%q,sale=%q} %d", "held", sharded, orders))
	require.NoError(t, hold.Rollback(t.Context()))

	lost := operator.Master(operator.Slot(s.keys.Orders(onLastMaster)))
	gone := cluster.Nodes[lost].Addr()
	require.Contains(t, masters, gone)
	cluster.Nodes[operator.Replica(lost)].Freeze()
	cluster.Nodes[lost].Freeze()
	testkit.Eventually(t, within, "the lost master is shown, and the others are not lost", func() bool {
		found = s.snapshot(targets...)
		return found.Redis.Reachable && look(whole).UnitsKnown && len(found.RedisNodes) == 3 &&
			slices.ContainsFunc(found.RedisNodes, func(n fleet.RedisNode) bool { return n.Name == gone && !n.Reachable })
	})
	require.False(t, look(sharded).UnitsKnown)
	require.True(t, slices.ContainsFunc(found.Troubles, func(trouble fleet.Trouble) bool {
		return trouble.Severity == fleet.Critical && strings.Contains(trouble.Text, gone)
	}), found.Troubles)
	var beginnings []string
	for _, node := range masters {
		up := 1
		if node == gone {
			up = 0
		}
		beginnings = append(beginnings, fmt.Sprintf("stampede_redis_up{node=%q} %d", node, up))
	}
	beginnings = append(beginnings, fmt.Sprintf("stampede_sale_units{kind=%q,sale=%q} ", "available", whole))
	s.awaitSeries(targets[1], beginnings...)
}

// One snapshot says what the page says: what is a trouble only once it has lasted, and units that are counted after
// orders.
func TestTopOnceWaitsForWhatThePageNeeds(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	lonely := testkit.OwnRedis(t)
	cut := s.ingress()
	cut.Setenv("REDIS_URL", lonely.URL)
	cut.Start()
	cutURL := "http://" + loggedAddr(cut, "ingress listens")
	const sales = 6
	var sale uuid.UUID
	for range sales {
		sale = s.createSale(url, reservation.Terms{Name: "shirts", Stock: 10, PaymentWindow: time.Hour})
		s.buy(url, sale, "ann")
	}
	lonely.Kill()
	testkit.Eventually(t, within, "an ingress is not ready", func() bool { return sum(t, cutURL, "stampede_ready{") == 0 })

	status, output := s.run("top", "--once", "--scrape="+url+"/metrics,"+cutURL+"/metrics")
	require.Equal(t, exitOK, status, output)
	require.Regexp(t, "WARN +[0-9]+s An ingress takes no purchases: "+cutURL, output)
	require.NotContains(t, output, "?", "units")
	require.Equal(t, sales, strings.Count(output, "shirts"))

	buying(t, sale, cutURL)
	status, output = s.run("top", "--once", "--scrape="+url+"/metrics,"+cutURL+"/metrics")
	require.Equal(t, exitOK, status, output)
	require.Regexp(t, "WARN .* An ingress takes no purchases: "+cutURL+".*\nCRIT .* └ Purchases fail", output)
}
