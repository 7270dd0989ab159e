package fleet

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation/catalog"
)

func TestMain(m *testing.M) {
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: names.dial}
	testwork.Main(m)
}

// page is a process whose metrics the test writes.
type page struct {
	*httptest.Server
	text   atomic.Pointer[string]
	handle atomic.Pointer[http.HandlerFunc] // if set, it answers instead
}

func newPage(t testing.TB, text string) *page {
	t.Helper()
	return newPageAt(t, "127.0.0.1:0", text)
}

func newPageAt(t testing.TB, addr, text string) *page {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", addr)
	require.NoError(t, err)
	p := &page{}
	p.set(text)
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if handle := p.handle.Load(); handle != nil {
			(*handle)(w, r)
			return
		}
		_, _ = w.Write([]byte(*p.text.Load()))
	}))
	_ = p.Listener.Close() // its own
	p.Listener = listener
	p.Start()
	t.Cleanup(func() {
		p.CloseClientConnections()
		p.Close()
	})
	return p
}

func (p *page) set(text string) { p.text.Store(&text) }

func (p *page) answer(handle http.HandlerFunc) { p.handle.Store(&handle) }

func (p *page) target() string { return p.URL + "/metrics" }

// ingressPage are the metrics of an ingress that has answered so many purchases.
func ingressPage(start, reserved, soldOut, overloaded, unavailable int) string {
	return fmt.Sprintf(`# HELP process_start_time_seconds Start.
# TYPE process_start_time_seconds gauge
process_start_time_seconds %d
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 1.5
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 1.048576e+06
# TYPE stampede_build_info gauge
stampede_build_info{go_version="go1.26",version="v1.2.3"} 1
# TYPE stampede_http_requests_in_flight gauge
stampede_http_requests_in_flight 3
# TYPE stampede_purchases_total counter
stampede_purchases_total{verdict="reserved"} %d
stampede_purchases_total{verdict="sold-out"} %d
stampede_purchases_total{verdict="overloaded"} %d
stampede_purchases_total{verdict="unavailable"} %d
`, start, reserved, soldOut, overloaded, unavailable)
}

// workerPage are the metrics of a worker.
func workerPage(start, confirmed int, waiting, oldest float64, reads string) string {
	var text strings.Builder
	fmt.Fprintf(&text, `# TYPE process_start_time_seconds gauge
process_start_time_seconds %d
# TYPE stampede_build_info gauge
stampede_build_info{version="v1.2.3"} 1
# TYPE stampede_worker_failing gauge
stampede_worker_failing{step="record"} 0
# TYPE stampede_orders_total counter
stampede_orders_total{outcome="confirmed"} %d
`, start, confirmed)
	for _, metric := range []string{"waiting_orders", "oldest_entry_age_seconds", "reachable", "readers"} {
		fmt.Fprintf(&text, "# TYPE stampede_stream_%s gauge\n", metric)
		for _, stream := range []string{"a", "b"} {
			value := map[string]float64{"waiting_orders": waiting, "oldest_entry_age_seconds": oldest, "reachable": 1}[metric]
			if metric == "readers" && stream == reads {
				value = 1
			}
			fmt.Fprintf(&text, "stampede_stream_%s{stream=%q} %v\n", metric, stream, value)
		}
	}
	return text.String()
}

// newFleet returns a fleet of a shop with its own database and keys, which the test plays round by round.
func newFleet(t testing.TB, targets ...string) (*Fleet, *testshop.Shop) {
	t.Helper()
	s := testshop.NewShop(t)
	return fleetOf(t, s.Pool, s, targets...), s
}

func fleetOf(t testing.TB, pool *pgxpool.Pool, s *testshop.Shop, targets ...string) *Fleet {
	t.Helper()
	f, err := New(Config{
		Catalog: catalog.New(pool, s.Store), Targets: targets, Logger: testkit.Logger(t),
	})
	require.NoError(t, err)
	t.Cleanup(f.close)
	return f
}

// play plays rounds until the snapshot is as wanted, and returns it.
func (f *Fleet) play(t testing.TB, what string, wanted func(s *Snapshot) bool) *Snapshot {
	t.Helper()
	testkit.Eventually(t, time.Minute, what, func() bool {
		f.round(context.Background())
		return wanted(f.Snapshot())
	})
	return f.Snapshot()
}

// running runs the fleet until the test ends.
func running(t testing.TB, f *Fleet) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() { _ = f.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		ended.Wait()
	})
}

// counting counts the statements of a pool.
type counting struct{ statements atomic.Int64 }

// TraceQueryStart implements pgx.QueryTracer.
func (c *counting) TraceQueryStart(
	ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData,
) context.Context {
	c.statements.Add(1)
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (c *counting) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// countedPool is a pool on the test's database whose statements are counted.
func countedPool(t testing.TB) (*pgxpool.Pool, *counting) {
	t.Helper()
	config, err := pgxpool.ParseConfig(testkit.DatabaseURL(t))
	require.NoError(t, err)
	count := &counting{}
	config.ConnConfig.Tracer, config.MaxConns = count, 2
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool, count
}

// troubleNames are the names of the troubles that have no cause among them.
func troubleNames(s *Snapshot) (names []string) {
	for _, trouble := range s.Troubles {
		names = append(names, trouble.Name)
	}
	return names
}

// names is the name server of these tests.
var names = &nameServer{addrs: map[string][]netip.Addr{}}

type nameServer struct {
	mu    sync.Mutex
	addrs map[string][]netip.Addr // by name with a dot at its end
}

// dial connects a resolver that has one question.
func (n *nameServer) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	server, err := new(net.ListenConfig).ListenPacket(ctx, "udp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	_ = server.SetDeadline(time.Now().Add(resolveInterval))
	go func() {
		defer func() { _ = server.Close() }()
		question := make([]byte, 512)
		if size, from, err := server.ReadFrom(question); err == nil {
			_, _ = server.WriteTo(n.answer(question[:size]), from)
		}
	}()
	return new(net.Dialer).DialContext(ctx, "udp", server.LocalAddr().String())
}

func (n *nameServer) answer(question []byte) (answer []byte) {
	var m dnsmessage.Message
	if m.Unpack(question) != nil || len(m.Questions) != 1 {
		return nil
	}
	m.Response, m.Additionals = true, nil
	asked := m.Questions[0]
	n.mu.Lock()
	defer n.mu.Unlock()
	addrs, known := n.addrs[asked.Name.String()]
	if !known {
		m.RCode = dnsmessage.RCodeNameError
	}
	for _, addr := range addrs {
		if asked.Type == dnsmessage.TypeA {
			m.Answers = append(m.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: asked.Name, Class: asked.Class}, Body: &dnsmessage.AResource{A: addr.As4()},
			})
		}
	}
	answer, _ = m.Pack()
	return answer
}

func (n *nameServer) set(name string, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.addrs[name] = nil
	for _, addr := range addrs {
		n.addrs[name] = append(n.addrs[name], netip.MustParseAddr(addr))
	}
}

// BenchmarkRound is a round of a fleet of ten processes, with real pages of stampede dev (ingress and worker in one
// process), and with its looks into Redis and Postgres. What one takes is the share of a core that a fleet uses.
func BenchmarkRound(b *testing.B) {
	text, err := os.ReadFile("testdata/page.txt")
	require.NoError(b, err)
	var targets []string
	for range 10 {
		targets = append(targets, newPage(b, string(text)).target())
	}
	f, s := newFleet(b, targets...)
	for range 20 {
		s.Open(b, 1000)
	}
	for range 5 {
		f.round(context.Background())
	}
	began := cpuTime(b)
	for b.Loop() {
		f.round(context.Background())
	}
	b.ReportMetric(float64((cpuTime(b)-began).Microseconds())/1000/float64(b.N), "cpu-ms/round")
	require.True(b, f.Snapshot().Processes[9].Up)
}

// cpuTime is that of this process so far, with the pages that it serves to itself.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// BenchmarkRead is the parse of one page: of the metrics that are wanted, and for comparison of all of them.
func BenchmarkRead(b *testing.B) {
	text, err := os.ReadFile("testdata/page.txt")
	require.NoError(b, err)
	b.Run("wanted", func(b *testing.B) {
		for b.Loop() {
			_, err := read(text)
			require.NoError(b, err)
		}
	})
	b.Run("all", func(b *testing.B) {
		for b.Loop() {
			parser := expfmt.NewTextParser(model.UTF8Validation)
			_, err := parser.TextToMetricFamilies(bytes.NewReader(text))
			require.NoError(b, err)
		}
	})
}

// Nobody has to wait for what a trouble explains.
func TestConsequencesOfTroublesAreNotPending(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	f.processes[0].last.notReady, f.processes[0].last.guardAge = "Redis is away", 2*guardAgeMax
	f.processes[0].last.releases = 1
	f.troubles.update(f, s, r)
	require.Len(t, s.Pending, 2)
	s.Redis = Server{Error: "refused", Since: noon}
	f.troubles.update(f, s, r)
	require.Empty(t, s.Pending)
}

func TestWhatOneProcessMissesIsNotPendingTwice(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	f.processes[0].url = "one"
	f.processes[0].last.postgresGone, f.processes[0].last.failing = true, []string{"record"}
	pending := func(second float64) (names []string) {
		s.At = at(second)
		f.troubles.update(f, s, r)
		for _, p := range s.Pending {
			names = append(names, p.Name)
		}
		return names
	}
	require.Equal(t, []string{postgresGone.name, stepFails.name}, pending(0))
	require.Empty(t, pending(delayedStep.Seconds()), "the cause is shown")
	f.records.readOnly = true
	require.Empty(t, pending(delayedStep.Seconds()+1))
	require.Equal(t, []string{postgresGone.name}, troubleNames(s), "it is one, not that of each process")
}

// The paid units of a sale are known a look after the sale.
func TestSettledSnapshotHasAllUnits(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	for range 6 {
		s.OpenPayable(t, 10)
	}
	settled := f.play(t, "it is settled", func(x *Snapshot) bool {
		return len(x.Sales) > 0 && x.IsSettled(x.At.Add(time.Hour))
	})
	for _, sale := range settled.Sales {
		require.True(t, sale.UnitsKnown)
	}
}

// One look tells of events that no relay delivers, which is the last that is asked.
func TestSettledSnapshotHasLookedAtAll(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	s.Open(t, 10)
	s.Exec(t, `INSERT INTO relay_targets (name, url, secrets, allow_private, position, fence)
		VALUES ('shop', 'https://shop', '{}', false, 0, 1)`)
	settled := f.play(t, "it is settled", func(x *Snapshot) bool { return x.Number > 0 && x.IsSettled(x.At) })
	var pending []string
	for _, p := range settled.Pending {
		pending = append(pending, p.Name)
	}
	require.Contains(t, pending, noRelay.name)
}

const deployed = "../../deploy/prometheus"

// rule is an alert of deploy/prometheus/alerts.yml.
type rule struct {
	Alert, Expr         string
	Hold                string `yaml:"keep_firing_for"`
	Labels, Annotations map[string]string
}

func alertRules(t *testing.T) []rule {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	readYAML(t, "/alerts.yml", &file)
	require.Len(t, file.Groups, 1)
	return file.Groups[0].Rules
}

func readYAML(t *testing.T, name string, to any) {
	t.Helper()
	text, err := os.ReadFile(deployed + name)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, to))
}

// The pages, the alerts, their inhibitions and the runbook name the same troubles, in the same words.
func TestTroublesAreThoseOfAlertsAndRunbook(t *testing.T) {
	t.Parallel()
	var shown, alerts, sections, headings []string
	for _, k := range kinds {
		shown = append(shown, fmt.Sprintf("%s, %s: %s", k.name, k.severity, k.summary))
		sections = append(sections, k.runbook())
	}
	for _, r := range alertRules(t) {
		alerts = append(alerts, fmt.Sprintf("%s, %s: %s", r.Alert, r.Labels["severity"], r.Annotations["summary"]))
		anchor := (&kind{name: r.Alert}).runbook()
		require.Equal(t, `{{ or $externalLabels.runbook "docs/runbook.md" }}#`+anchor, r.Annotations["runbook_url"])
		require.NotEmpty(t, r.Annotations["description"], r.Alert)
		if strings.Contains(r.Expr, "increase(") {
			require.Contains(t, r.Expr, fmt.Sprintf("[%.0fm]", holdEnds.Minutes()), "the page shows it as long")
		}
	}
	require.ElementsMatch(t, shown, alerts)

	runbook, err := os.ReadFile("../../docs/runbook.md")
	require.NoError(t, err)
	withAlerts, _, _ := strings.Cut(string(runbook), "\n## Without an alert\n")
	for line := range strings.Lines(withAlerts) {
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			headings = append(headings, strings.ReplaceAll(strings.ToLower(strings.TrimSpace(heading)), " ", "-"))
		}
	}
	slices.Sort(sections)
	require.ElementsMatch(t, slices.Compact(sections), headings)
}

func TestInhibitionsAreTheCauses(t *testing.T) {
	t.Parallel()
	// Only the outage of a whole server explains others, and not that ingresses are gone: the labels tell.
	whole := map[*kind]string{postgresGone: ` instance=""`, redisGone: ` node="" stream=""`}
	held := map[string]time.Duration{}
	for _, r := range alertRules(t) {
		held[r.Alert+" "+r.Labels["severity"]], _ = time.ParseDuration(r.Hold) // none is 0
	}
	wanted := map[string][]string{}
	explains := func(cause *kind, of *kind, target string) {
		require.Equal(t, Critical, cause.severity, "%s hides no worse trouble", cause.name)
		source := fmt.Sprintf("alertname=%q severity=%q%s", cause.name, cause.severity, whole[cause])
		wanted[source] = append(wanted[source], target)
		// A consequence is not sent when its cause ends: it lasts, and what counts over a minute lasts for that.
		longer := held[cause.name+" critical"] - held[fmt.Sprintf("%s %s", of.name, of.severity)]
		require.GreaterOrEqual(t, longer, 90*time.Second, "%s because of %s", of.name, cause.name)
	}
	for _, k := range kinds {
		for _, cause := range k.causes {
			explains(cause, k, k.name)
		}
	}
	for reason, causes := range rebuiltAfter {
		for _, cause := range causes {
			explains(cause, stockRebuilt, stockRebuilt.name+` reason="`+reason+`"`)
		}
	}
	for _, part := range []string{"ingress", "worker", "relay"} {
		for _, cause := range (&Process{Kind: part}).missedAs() {
			explains(cause, targetGone, targetGone.name+` process="`+part+`"`)
		}
	}
	var file struct {
		Rules []struct {
			Source []string `yaml:"source_matchers"`
			Target []string `yaml:"target_matchers"`
		} `yaml:"inhibit_rules"`
	}
	readYAML(t, "/alertmanager.yml", &file)
	found := map[string][]string{}
	for _, r := range file.Rules {
		names, ok := strings.CutPrefix(r.Target[0], `alertname=~"`)
		require.True(t, ok)
		targets := strings.Split(strings.TrimSuffix(names, `"`), "|")
		if slices.Contains(targets, noIngress.name) {
			require.Equal(t, []string{`process=""`}, r.Target[1:])
		} else if len(r.Target) > 1 {
			targets = []string{strings.Join(append(targets, r.Target[1:]...), " ")}
		}
		source := strings.Join(r.Source, " ")
		found[source] = append(found[source], targets...)
	}
	require.Equal(t, wanted, found)
}
