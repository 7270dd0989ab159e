//go:build system && upgrade

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/retry"
	"stampede/internal/test/testkit"
)

// balancer passes requests on to the ingresses that are ready, in turns, as deploy/haproxy.cfg does: it asks each for
// /readyz, sends a request that reached no ingress to another one, and answers 502 if a connection breaks later.
type balancer struct {
	url    string
	client *http.Client

	mu       sync.Mutex
	backends []*balanced
	next     int
	killed   map[string]bool
	// lost are requests that no ingress answered although none was killed.
	lost []string
	// broken counts the 502 of killed ingresses.
	broken int
	// accepted counts 202 by version, failed the answers from 500 on by version and body.
	accepted, failed map[string]int
}

// balanced is an ingress.
type balanced struct {
	url, version string
	ready        bool
}

const checkInterval = 50 * time.Millisecond

func newBalancer(t *testing.T) *balancer {
	t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}
	b := &balancer{
		client: &http.Client{Transport: transport}, killed: map[string]bool{}, accepted: map[string]int{},
		failed: map[string]int{},
	}
	server := httptest.NewServer(b)
	b.url = server.URL
	ctx, stop := context.WithCancel(context.Background())
	var checking sync.WaitGroup
	checking.Go(func() {
		for retry.Pause(checkInterval, ctx.Done()) {
			b.check(ctx)
		}
	})
	t.Cleanup(func() {
		stop()
		checking.Wait()
		server.Close()
		transport.CloseIdleConnections()
	})
	return b
}

func (b *balancer) check(ctx context.Context) {
	for _, backend := range b.all() {
		ready := b.isReady(ctx, backend.url)
		b.mu.Lock()
		backend.ready = ready
		b.mu.Unlock()
	}
}

func (b *balancer) isReady(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/readyz", nil)
	if err != nil {
		return false
	}
	res, err := b.client.Do(r)
	if err != nil {
		return false
	}
	_, _ = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
	return res.StatusCode == http.StatusOK
}

func (b *balancer) all() []*balanced {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]*balanced(nil), b.backends...)
}

func (b *balancer) add(url, version string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.backends = append(b.backends, &balanced{url: url, version: version})
}

// remove forgets an ingress that has ended.
func (b *balancer) remove(url string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, backend := range b.backends {
		if backend.url == url {
			b.backends = append(b.backends[:i:i], b.backends[i+1:]...)
			return
		}
	}
}

// willKill notes that the requests of an ingress may break from now on.
func (b *balancer) willKill(url string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.killed[url] = true
}

// choose returns the next ingress that is ready and was not tried.
func (b *balancer) choose(tried map[string]bool) (balanced, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for range b.backends {
		b.next++
		if c := b.backends[b.next%len(b.backends)]; c.ready && !tried[c.url] {
			return *c, true
		}
	}
	return balanced{}, false
}

func (b *balancer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	tried := map[string]bool{}
	for {
		backend, found := b.choose(tried)
		if !found {
			b.lose("no ingress was ready: " + r.Method + " " + r.URL.Path)
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		tried[backend.url] = true
		to := backend.url + r.URL.RequestURI()
		request, err := http.NewRequestWithContext(r.Context(), r.Method, to, bytes.NewReader(body))
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		request.Header = r.Header.Clone()
		answer, err := b.client.Do(request)
		if opening := (*net.OpError)(nil); errors.As(err, &opening) && opening.Op == "dial" {
			continue // it never reached an ingress
		}
		if err == nil {
			err = b.pass(w, answer, backend)
		}
		if err != nil {
			b.breaks(backend, err)
			w.WriteHeader(http.StatusBadGateway)
		}
		return
	}
}

func (b *balancer) pass(w http.ResponseWriter, answer *http.Response, backend balanced) error {
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil {
		return err
	}
	b.mu.Lock()
	if answer.StatusCode == http.StatusAccepted {
		b.accepted[backend.version]++
	} else if answer.StatusCode >= http.StatusInternalServerError {
		b.failed[backend.version+": "+string(body)]++
	}
	b.mu.Unlock()
	maps.Copy(w.Header(), answer.Header)
	w.WriteHeader(answer.StatusCode)
	_, _ = w.Write(body)
	return nil
}

func (b *balancer) breaks(backend balanced, err error) {
	b.mu.Lock()
	killed := b.killed[backend.url]
	if killed {
		b.broken++
	}
	b.mu.Unlock()
	if !killed {
		b.lose(backend.version + ": " + err.Error())
	}
}

func (b *balancer) lose(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lost = append(b.lost, what)
}

// acceptedBy is how many orders the ingresses of a version have accepted.
func (b *balancer) acceptedBy(version string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.accepted[version]
}

// sellItems sells baskets through an ingress of the new version while a worker of the old one, which does not know
// items, reads the stream. Remove it when the old version knows them.
func (u *upgrade) sellItems() {
	t := u.t
	const baskets = 5
	u.run(u.new, "migrate", "up") // a rollout begins with it
	worker := u.work(u.old, "worker")
	ingress := u.ingress(u.new)
	shirts := u.createSale(`{"name":"shirts","per_order_limit":3,"items":[{"code":"m","name":"M","stock":12},` +
		`{"code":"l","name":"L","stock":12}]}`)
	plain := u.createSale(`{"name":"plain","stock":12}`)
	bought := make([]upgradedOrder, baskets)
	for i := range bought {
		require.Equal(t, http.StatusAccepted, u.buy(shirts, i, `{"items":{"m":2,"l":1}}`, &bought[i]))
		require.Equal(t, http.StatusAccepted, u.buy(plain, i, "", &upgradedOrder{}))
	}
	parked := func(replays int) int {
		return u.count("SELECT count(*) FROM dead_letters WHERE status = 'parked' AND replays = $1", replays)
	}
	testkit.Eventually(t, within, "the old worker has made dead letters of the baskets, and recorded the others",
		func() bool { return parked(0) == baskets && u.confirmed(worker) == baskets })
	require.Equal(t, baskets, u.count("SELECT count(*) FROM order_events"), "no row of a basket")

	// An ingress of the old version sells nothing of the sale.
	u.remove(u.urls[ingress])
	oldIngress := u.ingress(u.old)
	for body, problem := range map[string]string{
		"": "quantity-over-limit", `{"quantity":1}`: "quantity-over-limit", `{"items":{"m":1}}`: "invalid-request",
	} {
		var refused upgradedOrder
		u.buy(shirts, baskets, body, &refused)
		require.Equal(t, "/problems/"+problem, refused.Type, body)
	}
	u.remove(u.urls[oldIngress])
	u.add(u.urls[ingress], u.new.name)

	letters := u.runJSON(exitOK, "dlq", "list")
	require.Len(t, letters, baskets)
	replay := func(letter map[string]any) { u.run(u.new, "dlq", "replay", fmt.Sprint(letter["id"])) }
	replay(letters[0])
	testkit.Eventually(t, within, "the old worker makes a dead letter again", func() bool { return parked(1) == 1 })
	u.replaceWorker(worker, u.old, u.new, "worker")
	for _, letter := range letters {
		replay(letter)
	}
	for i, b := range bought {
		testkit.Eventually(t, within, "the new worker records each basket", func() bool {
			var shown upgradedOrder
			status := u.send(t.Context(), http.MethodGet, "/v1/orders/"+b.Order, u.bearer(userOf(i)), "", &shown)
			return status == http.StatusOK && shown.Status == "confirmed" &&
				assert.Equal(t, map[string]int{"m": 2, "l": 1}, shown.Items)
		})
	}
	require.Zero(t, u.count("SELECT count(*) FROM dead_letters WHERE status = 'parked'"))
	require.NotContains(t, u.run(u.new, "audit", "--wait=60s"), "BROKEN")
}

func userOf(i int) string { return "buyer-" + strconv.Itoa(i) }

func (u *upgrade) buy(sale uuid.UUID, buyer int, body string, into *upgradedOrder) int {
	path := "/v1/sales/" + sale.String() + "/orders"
	return u.send(u.t.Context(), http.MethodPost, path, u.bearer(userOf(buyer)), body, into)
}
