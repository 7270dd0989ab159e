package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// within is how long a test waits for something that must happen, on a busy machine.
const within = 60 * time.Second

// pollPause leaves most of a user's rate limit to the page.
const pollPause = 300 * time.Millisecond

var (
	program     = flag.String("stampede", "../../bin/stampede", "the program stampede, built from these sources")
	screenshots = flag.String("screenshots", "", "a folder for screenshots of the page")
)

// shared is what all tests use: one "stampede dev" and one Chromium. Each test has a sale, a shop with an origin, and a
// profile of the browser of its own.
var shared struct {
	dev     *dev
	browser context.Context
	mu      sync.Mutex
	free    []net.Listener // of shops, whose origins dev knows
}

const shopsMax = 16

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := runAll(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func runAll(m *testing.M) (code int, err error) {
	chromium, err := findChromium()
	if err != nil {
		return 1, err
	}
	var origins []string
	for range shopsMax {
		l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			return 1, err
		}
		defer func() { _ = l.Close() }()
		shared.free = append(shared.free, l)
		origins = append(origins, "http://"+l.Addr().String())
	}
	if shared.dev, err = startDev(context.Background(), *program, strings.Join(origins, ",")); err != nil {
		return 1, fmt.Errorf("%w; task build builds the program", err)
	}
	defer shared.dev.stop()
	profile, err := os.MkdirTemp("", "shop-chromium-")
	if err != nil {
		return 1, err
	}
	defer func() { _ = os.RemoveAll(profile) }()
	allocator, closeAllocator := chromedp.NewExecAllocator(context.Background(),
		chromedp.ExecPath(chromium), chromedp.UserDataDir(profile), chromedp.Headless, chromedp.NoFirstRun,
		chromedp.DisableGPU, chromedp.NoSandbox, // root has no sandbox, and all pages are ours
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true))
	defer closeAllocator()
	browser, closeBrowser := chromedp.NewContext(allocator)
	defer closeBrowser()
	if err := chromedp.Do(browser); err != nil {
		return 1, fmt.Errorf("start %s: %w", chromium, err)
	}
	shared.browser = browser
	return m.Run(), nil
}

// findChromium never skips: a test that did not run looks like one that passed.
func findChromium() (string, error) {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("the tests of the shop need Chromium: sh tools/setup.sh chromium")
}

// rig is a shop with a sale, behind a network that a test can disturb.
type rig struct {
	t       *testing.T
	origin  string
	sale    string
	suffix  string // of all names: each test has buyers of its own
	shop    *shop
	network *network
}

func newRig(t *testing.T, stock int, opensIn, window time.Duration) *rig {
	t.Helper()
	sale, err := shared.dev.createSale(t.Context(), stock, opensIn, window)
	require.NoError(t, err)
	return newRigOf(t, sale)
}

func newRigOf(t *testing.T, sale string) *rig {
	t.Helper()
	shared.mu.Lock()
	require.NotEmpty(t, shared.free, "raise shopsMax")
	listener := shared.free[0]
	shared.free = shared.free[1:]
	shared.mu.Unlock()
	r := &rig{t: t, origin: "http://" + listener.Addr().String(), sale: sale, network: newNetwork(t)}
	r.suffix = "-" + sale[len(sale)-12:]
	var err error
	r.shop, err = newShop(shopConfig{
		API: r.network.url, Sale: sale, Secret: shared.dev.secret, Origin: r.origin,
	})
	require.NoError(t, err)
	server := &http.Server{Handler: r.shop.handler(), ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close(); r.shop.close() })
	return r
}

// call makes a call of the API as a user, not through the disturbed network. It waits while there are too many.
func (r *rig) call(user, method, path, body string) (status int, answer map[string]any) {
	r.t.Helper()
	r.eventually("the call is within the rate limit", func() bool {
		status, answer = r.callOnce(user, method, path, body)
		return status != http.StatusTooManyRequests
	})
	return status, answer
}

func (r *rig) callOnce(user, method, path, body string) (status int, answer map[string]any) {
	r.t.Helper()
	ask, err := http.NewRequestWithContext(r.t.Context(), method, shared.dev.api+path, strings.NewReader(body))
	require.NoError(r.t, err)
	ask.Header.Set("Authorization", "Bearer "+r.token(user))
	if body != "" {
		ask.Header.Set("Content-Type", "application/json")
	}
	got, err := http.DefaultClient.Do(ask)
	require.NoError(r.t, err)
	defer func() { _ = got.Body.Close() }()
	require.NoError(r.t, json.NewDecoder(got.Body).Decode(&answer))
	return got.StatusCode, answer
}

func (r *rig) token(user string) string {
	r.t.Helper()
	token, err := r.shop.token(user + r.suffix)
	require.NoError(r.t, err)
	return token
}

// buyAs buys without a browser.
func (r *rig) buyAs(user string) (status int) {
	r.t.Helper()
	status, _ = r.call(user, http.MethodPost, "/v1/sales/"+r.sale+"/orders", "")
	return status
}

// orders are the user's orders in Postgres.
func (r *rig) orders(user string) []map[string]any {
	r.t.Helper()
	_, answer := r.call(user, http.MethodGet, "/v1/orders", "")
	var orders []map[string]any
	for _, o := range answer["orders"].([]any) {
		orders = append(orders, o.(map[string]any))
	}
	return orders
}

// onlyOrder waits until the user's one order is in Postgres.
func (r *rig) onlyOrder(user string) map[string]any {
	r.t.Helper()
	r.eventually("the order is in Postgres", func() bool { return len(r.orders(user)) > 0 })
	orders := r.orders(user)
	require.Len(r.t, orders, 1)
	return orders[0]
}

func (r *rig) eventually(what string, holds func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(within); !holds(); {
		require.True(r.t, time.Now().Before(deadline), "not seen within %s: %s", within, what)
		select {
		case <-time.After(pollPause):
		case <-r.t.Context().Done():
		}
	}
}

// network is a proxy between the browser and the API.
type network struct {
	url   string
	proxy *httputil.ReverseProxy

	mu   sync.Mutex
	seen []*http.Request // purchases
	// before is called with each request, and may wait; it returns true if it has answered.
	before func(w http.ResponseWriter, r *http.Request) bool
	cut    context.CancelFunc // ends all streams
	alive  context.Context
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	api, err := url.Parse(shared.dev.api)
	require.NoError(t, err)
	n := &network{proxy: &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(api) }, FlushInterval: -1,
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}}
	n.restore()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n.url = "http://" + listener.Addr().String()
	server := &http.Server{Handler: n, ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { n.cutStreams(); _ = server.Close() })
	return n
}

func (n *network) restore() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.alive, n.cut = context.WithCancel(context.Background())
}

// cutStreams breaks all connections with a stream, as a phone in a tunnel does.
func (n *network) cutStreams() {
	n.mu.Lock()
	n.cut()
	n.mu.Unlock()
	n.restore()
}

func (n *network) disturb(before func(w http.ResponseWriter, r *http.Request) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.before = before
}

func isPurchase(r *http.Request) bool {
	return r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/orders")
}

func isOrderStream(r *http.Request) bool {
	return strings.HasPrefix(r.URL.Path, "/v1/orders/") && strings.HasSuffix(r.URL.Path, "/events")
}

func (n *network) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	if isPurchase(r) {
		n.seen = append(n.seen, r.Clone(context.Background()))
	}
	before, alive := n.before, n.alive
	n.mu.Unlock()
	if before != nil && before(w, r) {
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(alive, cancel)()
	n.proxy.ServeHTTP(w, r.WithContext(ctx))
}

// keys are the idempotency keys of the purchases so far.
func (n *network) keys() (keys []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.seen {
		keys = append(keys, r.Header.Get("Idempotency-Key"))
	}
	return keys
}

// tab is a tab of the browser, with a profile of its own.
type tab struct {
	t   *testing.T
	ctx context.Context

	mu sync.Mutex
	// errors are what a developer would see in red, except for answers that are not successes, which Chromium logs too.
	errors, refusals []string
	// expected is in messages that are no errors to this test.
	expected string
}

func openTab(t *testing.T) *tab {
	t.Helper()
	return newTab(t, shared.browser, chromedp.WithNewBrowserContext())
}

// beside opens another tab with the same profile.
func (b *tab) beside() *tab {
	b.t.Helper()
	return newTab(b.t, b.ctx)
}

func newTab(t *testing.T, parent context.Context, options ...chromedp.ContextOption) *tab {
	t.Helper()
	ctx, closeTab := chromedp.NewContext(parent, options...)
	b := &tab{t: t, ctx: ctx}
	// This starts the tab, which ends with the context of its first call: no other call may come before.
	messages := chromedp.Console(ctx)
	var reading sync.WaitGroup
	reading.Go(func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			b.take(m)
		}
	})
	t.Cleanup(func() {
		closeTab()
		reading.Wait()
		require.Empty(t, b.errors, "errors of the page")
	})
	b.resize(1000)
	return b
}

func (b *tab) take(m chromedp.ConsoleMessage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m.Source == "network" || b.expected != "" && strings.Contains(m.Text, b.expected) {
		b.refusals = append(b.refusals, m.String()+" "+m.URL)
	} else {
		b.errors = append(b.errors, m.Source+" "+m.String())
	}
}

func (b *tab) resize(width int64) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, within)
	defer cancel()
	_, err := chromedp.Call(ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{
		Width: width, Height: 900, DeviceScaleFactor: 1, Mobile: width < 500,
	})
	require.NoError(b.t, err)
}

func (b *tab) run(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, within)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.fail(err)
	}
}

// evaluate returns the value of an expression; of a promise, what it comes to.
func evaluate[T any](b *tab, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, within)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		b.fail(err)
	}
	return value
}

// fail shows what the page looked like.
func (b *tab) fail(err error) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
	defer cancel()
	text, _ := chromedp.Run(ctx, chromedp.Evaluate[string](`document.body.innerText`))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.t.Fatalf("%v; the page says:\n%s\nerrors: %q, refusals: %q", err, text, b.errors, b.refusals)
}

// isCleanBut checks that nothing was red in the console, except for refusals by URLs that end like this.
func (b *tab) isCleanBut(end string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	refusals := slices.DeleteFunc(slices.Clone(b.refusals), func(r string) bool { return strings.HasSuffix(r, end) })
	require.Empty(b.t, append(refusals, b.errors...), "the console")
}

func (b *tab) text(selector string) string {
	b.t.Helper()
	return evaluate[string](b, fmt.Sprintf(`document.querySelector(%q).innerText`, selector))
}

// shows waits until the element is visible with this text in it.
func (b *tab) shows(selector, want string) {
	b.t.Helper()
	b.until(fmt.Sprintf(`(e => e && e.checkVisibility() && e.innerText.includes(%q))(document.querySelector(%q))`,
		want, selector), selector+" shows "+want)
}

func (b *tab) until(expression, what string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, within)
	defer cancel()
	var err error
	// A page that is being loaded has no answer yet.
	for ctx.Err() == nil {
		var holds bool
		holds, err = chromedp.Run(ctx, chromedp.Evaluate[bool](`Boolean(`+expression+`)`))
		if err == nil && holds {
			return
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	b.fail(fmt.Errorf("not seen within %s: %s (%w)", within, what, err))
}

func (b *tab) click(selector string) {
	b.t.Helper()
	b.until(fmt.Sprintf(`(e => e && e.checkVisibility() && !e.disabled)(document.querySelector(%q))`, selector),
		selector+" can be clicked")
	b.run(chromedp.Click(chromedp.CSS(selector)))
}

// signIn opens the shop as a buyer.
func (b *tab) signIn(r *rig, user string) {
	b.t.Helper()
	b.run(chromedp.Navigate(r.origin))
	b.until(`document.querySelector("#name").checkVisibility()`, "the form to sign in")
	b.run(chromedp.SendKeys(chromedp.CSS("#name"), user+r.suffix+"\r"))
	b.shows("#account-name", user)
}

// screenshot stores a picture of the whole page in each width and scheme, if a folder is given.
func (b *tab) screenshot(name string) {
	b.t.Helper()
	if *screenshots == "" {
		return
	}
	ctx, cancel := context.WithTimeout(b.ctx, 2*within)
	defer cancel()
	for _, scheme := range []string{"light", "dark"} {
		for _, width := range []int64{360, 768, 1280} {
			b.resize(width)
			_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
				Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
			})
			require.NoError(b.t, err)
			picture, err := chromedp.Run(ctx, chromedp.FullScreenshot(100))
			require.NoError(b.t, err)
			file := filepath.Join(*screenshots, fmt.Sprintf("%s-%s-%d.png", name, scheme, width))
			require.NoError(b.t, os.WriteFile(file, picture, 0o600))
		}
	}
	b.resize(1000)
}
