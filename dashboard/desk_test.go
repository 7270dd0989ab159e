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
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/operators"
	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/relay/target"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestMain(m *testing.M) { testkit.Main(m) }

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
		Fleet: d.fleet, Catalog: d.Shop.Catalog,
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

func (b *browser) cookie() string {
	b.t.Helper()
	at, err := url.Parse(b.desk.url)
	require.NoError(b.t, err)
	for _, c := range b.Jar.Cookies(at) {
		return c.Value
	}
	return ""
}

func TestNothingIsShownWithoutLogin(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("secret sale", 5)
	d.show(id)
	b := d.browser()
	for _, path := range []string{
		"/", "/sales", "/sales/" + id.String(), "/orders?user=x", "/orders/" + id.String(), "/letters", "/letters/1",
		"/audit", "/docs/operations", "/none",
	} {
		_, page := b.get(path)
		require.Contains(t, page, "Your operator's token", path)
		require.NotContains(t, page, "secret sale", path)
	}
	status, _ := b.do(http.MethodHead, "/", nil, nil)
	require.Equal(t, http.StatusOK, status)
	require.Zero(t, testutil.ToFloat64(d.metrics.actions.WithLabelValues(actionDenied)), "nothing was to be done")
	for _, path := range []string{"/live", "/history?of=all", "/minutes?of=all"} {
		status, _ := b.get(path)
		require.Equal(t, http.StatusUnauthorized, status)
	}
	for _, path := range []string{"/sales/" + id.String() + "/pause", "/audit/run", "/letters", "/logout"} {
		_, page := b.post(path)
		require.Contains(t, page, "Your session is over", path)
	}
	require.EqualValues(t, "open", d.shown(id).State)
	for path, want := range map[string]string{
		"/livez": "ok", "/metrics": "stampede_dashboard_watchers 0",
	} {
		status, text := b.get(path)
		require.Equal(t, http.StatusOK, status)
		require.Contains(t, text, want)
	}
}

func TestLoginMakesNewSession(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.browser()
	// What the browser had before is not the session: nobody can plant one.
	status, _ := b.do(http.MethodGet, "/", nil, map[string]string{"Cookie": cookie + "=planted"})
	require.Equal(t, http.StatusOK, status)
	_, page := b.post("/login", "token", " ann ", "next", "/letters?status=all")
	require.Contains(t, page, "Dead letters · Stampede")
	first := b.cookie()
	require.Greater(t, len(first), 40)
	_, page = b.post("/login", "token", "ann")
	require.Contains(t, page, "Overview · Stampede")
	second := b.cookie()
	require.NotEqual(t, first, second)
	status, page = d.browser().do(http.MethodGet, "/", nil, map[string]string{"Cookie": cookie + "=" + first})
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, page, "Your operator's token", "the session before it is over")
	_, page = b.post("/logout")
	require.Contains(t, page, "Your operator's token")
	_, page = d.browser().do(http.MethodGet, "/", nil, map[string]string{"Cookie": cookie + "=" + second})
	require.Contains(t, page, "Your operator's token")
	require.NotContains(t, d.log.String(), second, "no session is in the log")
}

func TestCookieIsKeptFromScriptsAndOtherSites(t *testing.T) {
	t.Parallel()
	d := openDesk(t, behindProxy)
	for scheme, want := range map[string]string{
		"http":  "stampede-session=X; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict",
		"https": "__Host-stampede-session=X; Path=/; Max-Age=43200; HttpOnly; Secure; SameSite=Strict",
	} {
		b := d.browser()
		b.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.url+"/login", strings.NewReader("token=ann"))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("X-Forwarded-Proto", scheme)
		answer, err := b.Do(r)
		require.NoError(t, err)
		_ = answer.Body.Close()
		require.Equal(t, http.StatusSeeOther, answer.StatusCode)
		name, rest, _ := strings.Cut(answer.Header.Get("Set-Cookie"), "=")
		_, rest, _ = strings.Cut(rest, ";")
		require.Equal(t, want, name+"=X;"+rest)
	}
}

func behindProxy(c *Config) { c.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")} }

func TestLoginLeadsNowhereElse(t *testing.T) {
	t.Parallel()
	for next, want := range map[string]string{
		"":                        "/",
		"/audit?sale=1":           "/audit?sale=1",
		"//evil.example/x":        "/",
		"https://evil.example/":   "/",
		"/\\evil.example":         "/",
		"\\\\evil.example":        "/",
		"/%2fevil.example":        "/",
		"javascript:alert(1)":     "/",
		"/x\r\nSet-Cookie: a=b":   "/",
		"evil.example":            "/",
		"http:/evil.example":      "/",
		"/a/../..//evil.example/": "/a/../..//evil.example/",
	} {
		require.Equal(t, want, localPath(next), next)
	}
}

func TestLoginsAreLimited(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.browser()
	var status int
	for i := range loginBurst + 1 {
		status, _ = b.post("/login", "token", fmt.Sprint("guess-", i))
	}
	require.Equal(t, http.StatusTooManyRequests, status)
	status, page := b.post("/login", "token", "ann")
	require.Equal(t, http.StatusTooManyRequests, status, "the right token, too: else it could be guessed")
	require.Contains(t, page, "Too many logins")
	require.Empty(t, b.cookie())
	require.EqualValues(t, loginBurst, testutil.ToFloat64(d.metrics.logins.WithLabelValues(loginRefused)))
	require.NotContains(t, d.log.String(), "guess-", "no token is in the log")
}

// Guesses of one client behind a proxy that writes ports lock nobody else out, nor do those of many clients.
func TestLoginsAreLimitedByAddressBehindProxy(t *testing.T) {
	t.Parallel()
	d := openDesk(t, behindProxy)
	login := func(from, token string) int {
		status, _ := d.browser().do(http.MethodPost, "/login", strings.NewReader("token="+token),
			map[string]string{"Content-Type": "application/x-www-form-urlencoded", "X-Forwarded-For": from})
		return status
	}
	for i := range loginBurst {
		require.Equal(t, http.StatusUnauthorized, login(fmt.Sprint("203.0.113.5:", 50000+i), "guess"))
	}
	require.Equal(t, http.StatusTooManyRequests, login("203.0.113.5:1", "ann"))
	for i := range 100 {
		require.Equal(t, http.StatusUnauthorized, login(fmt.Sprint("192.0.2.", i), "guess"))
	}
	require.Equal(t, http.StatusOK, login("203.0.113.5, 198.51.100.7:50002", "ann"), "the redirection was followed")
}

func TestForeignFormsAreRefused(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 5)
	b := d.as("ada")
	for _, headers := range []map[string]string{
		{"Origin": "https://evil.example"},
		{"Origin": "null"},
		{"Sec-Fetch-Site": "cross-site"},
		{"Sec-Fetch-Site": "same-site"},
		{"Sec-Fetch-Site": "cross-site", "Origin": d.url},
	} {
		headers["Content-Type"] = "application/x-www-form-urlencoded"
		for _, path := range []string{"/sales/" + id.String() + "/pause", "/login", "/logout"} {
			status, page := b.do(http.MethodPost, path, strings.NewReader("token=ada"), headers)
			require.Equal(t, http.StatusForbidden, status, "%v", headers)
			require.Contains(t, page, "another origin")
		}
	}
	require.EqualValues(t, "open", d.shown(id).State)
	_, page := b.get("/")
	require.Contains(t, page, "Log out")
}

// A name of another domain that leads to this machine is not this dashboard.
func TestForeignHostIsRefused(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	for host, want := range map[string]int{
		"evil.example:8090": http.StatusMisdirectedRequest, "evil.example": http.StatusMisdirectedRequest,
		"localhost:8090": http.StatusOK, "127.0.0.1": http.StatusOK, "[::1]:8090": http.StatusOK,
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, d.url+"/login", nil)
		require.NoError(t, err)
		r.Host = host
		answer, err := d.browser().Do(r)
		require.NoError(t, err)
		_ = answer.Body.Close()
		require.Equal(t, want, answer.StatusCode, host)
	}
}

func TestHeadersOfEveryAnswer(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("ann")
	for _, path := range []string{
		"/", "/login", "/none", "/live?x", "/history?of=all", "/assets/desk.css", "/assets/none", "/livez",
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodHead, d.url+path, nil)
		require.NoError(t, err)
		if path == "/live?x" {
			r.Method = http.MethodGet
			r.Header.Set("Cookie", cookie+"=none")
			b = d.browser()
		}
		answer, err := b.Do(r)
		require.NoError(t, err)
		_ = answer.Body.Close()
		require.Contains(t, answer.Header.Get("Content-Security-Policy"), "default-src 'none'", path)
		require.NotContains(t, answer.Header.Get("Content-Security-Policy"), "unsafe", path)
		require.Contains(t, answer.Header.Get("Content-Security-Policy"), "frame-ancestors 'none'", path)
		require.Equal(t, "nosniff", answer.Header.Get("X-Content-Type-Options"), path)
		require.Equal(t, "no-store", answer.Header.Get("Cache-Control"), path)
	}
}

func TestHugeFormIsRefused(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("ada")
	for _, path := range []string{"/letters", "/audit/run", "/orders/" + d.sale("x", 1).String() + "/cancel"} {
		status, page := b.post(path, "reason", strings.Repeat("x", 2*maxFormBytes))
		require.Equal(t, http.StatusBadRequest, status)
		require.Contains(t, page, "too large")
	}
	status, _ := d.browser().post("/login", "token", strings.Repeat("x", 2*maxFormBytes))
	require.Equal(t, http.StatusBadRequest, status)
}

// An operator learns that a change was recorded, or may have been, whatever kept it from being shown.
func TestRecordedChangeIsExplainedFirst(t *testing.T) {
	t.Parallel()
	for _, change := range []error{catalog.ErrNotInForce, catalog.ErrRestockUndecided, pg.ErrChangeUnknown} {
		want, _, _ := explain(change)
		for _, cause := range []error{
			reservation.ErrSaleNotFound, reservation.ErrUnavailable, reservation.ErrOutcomeUnknown, reservation.ErrOverloaded,
		} {
			text, _, _ := explain(fmt.Errorf("%w: %w", change, cause))
			require.Equal(t, want, text, "%v: %v", change, cause)
		}
	}
}
