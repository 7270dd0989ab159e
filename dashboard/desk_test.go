package dashboard

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/operators"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/relay/target"
	"stampede/reservation"
	"stampede/reservation/order"
)

// within bounds each wait of a test.
const within = 60 * time.Second

// hostile is a name that breaks out of HTML, of attributes, and of its line.
const hostile = `<script>document.title="X"</script>"><img src=x onerror=alert(1)> ` + "\u202egnp.exe"

// fakeFleet shows what a test says.
type fakeFleet struct {
	mu      sync.Mutex
	now     *fleet.Snapshot
	more    chan struct{}
	history []fleet.Point
}

func (f *fakeFleet) Snapshot() *fleet.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now
}

func (f *fakeFleet) History() []fleet.Point {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.history
}

func (f *fakeFleet) Next(ctx context.Context, after uint64) (*fleet.Snapshot, error) {
	for {
		f.mu.Lock()
		now, more := f.now, f.more
		f.mu.Unlock()
		if now.Number > after {
			return now, nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// publish makes another snapshot the newest.
func (f *fakeFleet) publish(change func(*fleet.Snapshot)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := *f.now
	next.Number++
	next.At = time.Now()
	change(&next)
	f.now = &next
	close(f.more)
	f.more = make(chan struct{})
}

// testDesk is a running dashboard on real servers, with a fleet that the test makes.
type testDesk struct {
	*Dashboard
	*testshop.Shop
	t       testing.TB
	url     string
	letters *deadletter.Store
	fleet   *fakeFleet
	file    string // of operators
	log     *syncBuffer
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func line(name, role string) string {
	hash := sha256.Sum256([]byte(name))
	return name + " " + role + " " + hex.EncodeToString(hash[:]) + "\n"
}

// openDesk starts a dashboard. The tokens of its operators are their names.
func openDesk(t testing.TB, change ...func(*Config)) *testDesk {
	t.Helper()
	d := &testDesk{
		Shop: testshop.NewShop(t), t: t, log: &syncBuffer{},
		fleet: &fakeFleet{now: &fleet.Snapshot{Number: 1, At: time.Now()}, more: make(chan struct{})},
		file:  filepath.Join(t.TempDir(), "operators"),
	}
	d.operators(line("vic", "viewer") + line("cas", "cashier") + line("ann", "operator") + line("ada", "admin"))
	logger := slog.New(slog.NewTextHandler(d.log, nil))
	registry, err := operators.New(operators.Config{File: d.file, AdminToken: "root-token", Logger: logger})
	require.NoError(t, err)
	config := Config{
		Fleet: d.fleet, Pool: d.Shop.Pool, Redis: d.Rdb, Keys: d.Shop.Keys, Store: d.Shop.Store, Catalog: d.Shop.Catalog,
		Operators: registry, Metrics: prometheus.NewRegistry(), Logger: logger,
	}
	for _, c := range change {
		c(&config)
	}
	d.Dashboard, err = New(config)
	require.NoError(t, err)
	d.letters = deadletter.NewStore(d.Shop.Pool, d.Rdb, d.Shop.Store)
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	d.url = "http://" + listener.Addr().String()
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = d.Serve(ctx, listener) })
	running.Go(func() { registry.Run(ctx) })
	t.Cleanup(func() { stop(); running.Wait() })
	return d
}

func (d *testDesk) operators(text string) {
	d.t.Helper()
	next := d.file + ".new"
	require.NoError(d.t, os.WriteFile(next, []byte(text), 0o600))
	require.NoError(d.t, os.Rename(next, d.file))
}

// browser is a client with cookies.
type browser struct {
	*http.Client
	t    testing.TB
	desk *testDesk
}

func (d *testDesk) browser() *browser {
	jar, err := cookiejar.New(nil)
	require.NoError(d.t, err)
	transport := &http.Transport{}
	d.t.Cleanup(transport.CloseIdleConnections)
	return &browser{&http.Client{Jar: jar, Transport: transport}, d.t, d}
}

// as returns a browser that is logged in.
func (d *testDesk) as(token string) *browser {
	d.t.Helper()
	b := d.browser()
	_, page := b.post("/login", "token", token)
	require.Contains(d.t, page, "Log out")
	return b
}

func (b *browser) get(path string) (status int, page string) {
	b.t.Helper()
	return b.do(http.MethodGet, path, nil, nil)
}

// post sends a form as a page of the dashboard does, and follows to the page behind it.
func (b *browser) post(path string, fields ...string) (status int, page string) {
	b.t.Helper()
	form := url.Values{}
	for i := 0; i < len(fields); i += 2 {
		form.Add(fields[i], fields[i+1])
	}
	return b.do(http.MethodPost, path, strings.NewReader(form.Encode()), map[string]string{
		"Content-Type": "application/x-www-form-urlencoded", "Origin": b.desk.url, "Sec-Fetch-Site": "same-origin",
	})
}

func (b *browser) do(method, path string, body io.Reader, headers map[string]string) (status int, page string) {
	b.t.Helper()
	r, err := http.NewRequestWithContext(b.t.Context(), method, b.desk.url+path, body)
	require.NoError(b.t, err)
	for name, value := range headers {
		r.Header.Set(name, value)
	}
	answer, err := b.Do(r)
	require.NoError(b.t, err)
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	require.NoError(b.t, err)
	return answer.StatusCode, string(text)
}

// show has the fleet show the sale as it is.
func (d *testDesk) show(id uuid.UUID) {
	d.t.Helper()
	d.fleet.publish(func(s *fleet.Snapshot) { s.Sales = []fleet.Sale{countedSale(d.shown(id))} })
}

func (d *testDesk) sale(name string, stock int64) uuid.UUID {
	d.t.Helper()
	sale, err := d.Shop.Catalog.Create(d.t.Context(), reservation.Terms{Name: name, Stock: stock, PerOrderLimit: 10})
	require.NoError(d.t, err)
	return sale.ID
}

// report reports money, and returns what became of it.
func (d *testDesk) report(m order.Money) order.Payment {
	d.t.Helper()
	p, err := ledger.New(d.Shop.Pool).Report(d.t.Context(), m)
	require.NoError(d.t, err)
	return p
}

// target adds a target of the relay.
func (d *testDesk) target(name, url string) {
	d.t.Helper()
	to, err := target.ParseAddress(url)
	require.NoError(d.t, err)
	require.NoError(d.t, target.NewStore(d.Shop.Pool).Add(d.t.Context(), name, to, nil, true, 0))
}

// park stores dead letters that no worker could read, with bytes that are no text.
func (d *testDesk) park(n int) (ids []int64) {
	d.t.Helper()
	for range n {
		entry := testwork.AppendUnreadable(d.t, d.Shop)
		require.NoError(d.t, d.letters.Park(d.t.Context(), entry, fmt.Errorf("unreadable: %q", hostile)))
	}
	rows, err := d.letters.List(d.t.Context(), deadletter.StatusParked, n)
	require.NoError(d.t, err)
	for _, l := range rows {
		ids = append(ids, l.ID)
	}
	return ids
}
