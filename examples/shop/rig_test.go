//go:build browser

package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testbrowser"
)

// within is how long a test waits for something that must happen, on a busy machine.
const within = 60 * time.Second

// pollPause leaves most of a user's rate limit to the page.
const pollPause = 300 * time.Millisecond

var program = flag.String("stampede", "../../bin/stampede", "the program stampede, built from these sources")

// shared is what all tests use: one "stampede dev" and one Chromium. Each test has a sale, a shop with an origin, and a
// profile of the browser of its own.
var shared struct {
	dev     *dev
	browser *testbrowser.Browser
	mu      sync.Mutex
	free    []net.Listener // of shops, whose origins dev knows
}

const shopsMax = 30

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
	browser, stop, err := testbrowser.Launch()
	if err != nil {
		return 1, err
	}
	defer stop()
	shared.browser = browser
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
	return m.Run(), nil
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
	return newPacedRig(t, stock, 0, opensIn, window)
}

// newPacedRig is newRig with a number of buyers who get their turn to pay in a second.
func newPacedRig(t *testing.T, stock, pace int, opensIn, window time.Duration, sizes ...size) *rig {
	t.Helper()
	sale, err := shared.dev.createSale(t.Context(), stock, pace, opensIn, window, sizes...)
	require.NoError(t, err)
	return rigOf(t, sale)
}

// rigOf is a rig that shows a sale.
func rigOf(t *testing.T, sale string) *rig {
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
		API: r.network.url, Sale: sale, Secret: shared.dev.secret, Cashier: shared.dev.cashier, Origin: r.origin,
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

// cancel cancels the user's one order by the API.
func (r *rig) cancel(user string) {
	r.t.Helper()
	status, answer := r.call(user, http.MethodPost, "/v1/orders/"+r.onlyOrder(user)["order_id"].(string)+"/cancel", "")
	require.Equal(r.t, http.StatusOK, status, answer)
}

// operate pauses, resumes or ends the sale.
func (r *rig) operate(what string) {
	r.t.Helper()
	path := "/v1/sales/" + r.sale + "/" + what
	require.NoError(r.t, shared.dev.ask(r.t.Context(), http.MethodPost, path, shared.dev.admin, nil, nil))
}

// payByPhone reports money for the user's one order, not through the disturbed network.
func (r *rig) payByPhone(user string) {
	r.t.Helper()
	o := r.onlyOrder(user)
	report := map[string]any{
		"order_id": o["order_id"], "reference": "phone " + r.suffix, "amount": o["amount"], "currency": o["currency"],
	}
	require.NoError(r.t, r.shop.call(r.t.Context(), http.MethodPost, "/v1/payments", report, nil))
}

// payments are what Stampede knows of the money for the user's one order, as "state reason".
func (r *rig) payments(user string) (known []string) {
	r.t.Helper()
	var found struct {
		Payments []struct{ State, Reason string }
	}
	path := "/v1/admin/payments?order=" + r.onlyOrder(user)["order_id"].(string)
	require.NoError(r.t, r.shop.call(r.t.Context(), http.MethodGet, path, nil, &found))
	for _, p := range found.Payments {
		known = append(known, p.State+" "+p.Reason)
	}
	return known
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

// holdPurchases lets no purchase through until release.
func (n *network) holdPurchases() (release func()) {
	released := make(chan struct{})
	n.disturb(func(_ http.ResponseWriter, r *http.Request) bool {
		if isPurchase(r) {
			<-released
		}
		return false
	})
	return func() { close(released) }
}

// looks counts calls about a draw.
type looks struct{ draw, proof, leaves atomic.Int32 }

// countDraw counts the calls about a draw from the freeze on, and refuses to give the list once.
func (n *network) countDraw() *looks {
	seen := &looks{}
	n.disturb(func(w http.ResponseWriter, r *http.Request) bool {
		switch r.Method + " " + path.Base(r.URL.Path) {
		case "GET draw":
			if seen.proof.Load() > 0 {
				seen.draw.Add(1)
			}
		case "GET proof":
			seen.proof.Add(1)
		case "GET leaves":
			if seen.leaves.Add(1) == 1 {
				w.Header().Set("Access-Control-Allow-Origin", "*")
				w.WriteHeader(http.StatusServiceUnavailable)
				return true
			}
		}
		return false
	})
	return seen
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

// openAs opens the shop in a new tab, as a buyer. The console may have messages with the expected texts.
func (r *rig) openAs(user string, expected ...string) *testbrowser.Tab {
	r.t.Helper()
	b := shared.browser.Open(r.t, expected...)
	b.Go(r.origin)
	b.Until(`document.querySelector("#name").checkVisibility()`, "the form to sign in")
	b.Run(chromedp.SendKeys(chromedp.CSS("#name"), user+r.suffix+"\r"))
	b.Shows("#account-name", user)
	return b
}
