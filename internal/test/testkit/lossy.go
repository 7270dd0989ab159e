package testkit

import (
	"bytes"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// Proxy listens until the test ends, and returns its address. For each connection it dials the target and calls
// forward, after which it closes both.
func Proxy(t testing.TB, target string, forward func(client, server net.Conn)) (addr string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var tasks sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	tasks.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				_ = client.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, client, server)
			mu.Unlock()
			tasks.Go(func() {
				forward(client, server)
				_, _ = client.Close(), server.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		mu.Lock()
		for _, conn := range conns {
			_ = conn.Close()
		}
		mu.Unlock()
		tasks.Wait()
	})
	return listener.Addr().String()
}

// LossyProxy is a proxy between a client and Redis. It forwards every request and can drop the answers to
// scripts: Redis has then executed what failed for the client.
type LossyProxy struct{ toLose atomic.Int32 }

// RedisThroughProxy returns a client whose answers can be dropped, and one for the same Redis whose answers are not.
// Its retries are go-redis's default. The Redis is the test's own: on a shared one the answer that is dropped could
// be that another test has flushed the scripts.
func RedisThroughProxy(t testing.TB) (p *LossyProxy, lossy, direct *redis.Client) {
	t.Helper()
	own := OwnRedis(t)
	clientOptions, err := redis.ParseURL(own.URL)
	require.NoError(t, err)
	p = &LossyProxy{}
	clientOptions.Addr = Proxy(t, clientOptions.Addr, p.forward)
	lossy = redis.NewClient(clientOptions)
	t.Cleanup(func() { _ = lossy.Close() })
	return p, lossy, Client(t, own.URL)
}

// Lose drops the answers to the next n scripts.
func (p *LossyProxy) Lose(n int32) { p.toLose.Store(n) }

// RequireLost fails the test unless as many answers were dropped as Lose set.
func (p *LossyProxy) RequireLost(t testing.TB) {
	t.Helper()
	require.LessOrEqual(t, p.toLose.Load(), int32(0), "not all answers were dropped, so the test shows nothing")
}

// forward forwards one connection. The client waits for each answer before its next request, so an answer
// belongs to the latest request.
func (p *LossyProxy) forward(client, server net.Conn) {
	var script atomic.Bool
	var requests sync.WaitGroup
	requests.Go(func() {
		pump(server, client, func(request []byte) bool {
			script.Store(bytes.Contains(request, []byte("evalsha")))
			return true
		})
		_ = server.Close()
	})
	pump(client, server, func([]byte) bool {
		return !script.Load() || p.toLose.Add(-1) < 0
	})
	_ = client.Close()
	requests.Wait()
}

// pump copies until one end is closed or pass returns false.
func pump(to io.Writer, from io.Reader, pass func([]byte) bool) {
	buffer := make([]byte, 1<<16)
	for {
		n, err := from.Read(buffer)
		if err != nil || !pass(buffer[:n]) {
			return
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}
