package fleet

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"

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
		Pool: pool, Catalog: catalog.New(pool, s.Store), Store: s.Store, Targets: targets, Logger: testkit.Logger(t),
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
