//go:build system && upgrade

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"stampede/internal/retry"
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
