//go:build system

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/dev/crowd"
	"stampede/internal/test/testkit"
)

// If a worker dies at any of these points, every accepted order is in Postgres exactly once, whether
// another worker takes over or the worker restarts under its own name.
func TestKilledWorkerLosesAndDuplicatesNoOrder(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.BeforePersist, crashpoint.AfterCommit, crashpoint.BeforeAck} {
		for name, successor := range map[string]string{
			"another worker takes over": "second",
			"same worker restarts":      "first",
		} {
			t.Run(point+"/"+name, func(t *testing.T) {
				t.Parallel()
				const stock, crowdSize = 300, 900
				s := newShop(t)
				_, url := s.serve()
				sale := s.sale(url, stock)
				victim := s.worker("first")
				victim.Setenv(crashpoint.Env, point+":3")
				victim.Start()

				buyers, verifier := s.crowd(crowd.Config{
					URLs: []string{url}, Sale: sale, Buyers: crowdSize, Over: time.Second,
					DoubleClicks: 0.1,
				})
				var running sync.WaitGroup
				running.Go(func() { buyers.Run(t.Context()) })
				victim.WaitKilled(within)
				s.worker(successor).Start()
				running.Wait()
				s.requireKept(buyers, verifier, sale, stock)
			})
		}
	}
}

// Buyers of a killed ingress retry at another one with the same key, and get at most one order each.
func TestKilledIngressLosesAndDuplicatesNoOrder(t *testing.T) {
	t.Parallel()
	const stock, crowdSize = 600, 1500
	s := newShop(t)
	victim, url1 := s.serve()
	_, url2 := s.serve()
	sale := s.sale(url2, stock)
	s.worker("worker").Start()

	buyers, verifier := s.crowd(crowd.Config{
		URLs: []string{url1, url2}, Sale: sale, Buyers: crowdSize, Over: 2 * time.Second, DoubleClicks: 0.2,
	})
	var running sync.WaitGroup
	running.Go(func() { buyers.Run(t.Context()) })
	testkit.Eventually(t, within, "the middle of the sale", func() bool { return buyers.Progress().Accepted > stock/3 })
	victim.Kill()
	running.Wait()
	require.NotEmpty(t, buyers.Report().Retries, "the crash must cause retries")
	s.requireKept(buyers, verifier, sale, stock)
}

func TestTenThousandBuyersOnAHundredUnits(t *testing.T) {
	t.Parallel()
	const stock, crowdSize = 100, 10_000
	s := newShop(t)
	_, url := s.serve()
	sale := s.sale(url, stock)
	s.worker("worker").Start()
	buyers, verifier := s.crowd(crowd.Config{
		URLs: []string{url}, Sale: sale, Buyers: crowdSize, DoubleClicks: 0.05,
		Connections: 1000, TryTimeout: 20 * time.Second,
	})
	buyers.Run(t.Context())
	s.requireKept(buyers, verifier, sale, stock)
}

// shoppers send requests to ingresses that are restarted, and count requests without an answer.
type shoppers struct {
	path    string
	targets [2]atomic.Pointer[string]
	stop    chan struct{}

	answered, refused atomic.Int64

	mu   sync.Mutex
	lost []string
}

// visit opens a connection and sends up to so many requests on it, one after the other.
func (s *shoppers) visit(user string, requests int) {
	address := *s.targets[len(user)%2].Load()
	conn, err := net.DialTimeout("tcp", address, within)
	if err != nil {
		s.refused.Add(1)
		if !errors.Is(err, syscall.ECONNREFUSED) {
			s.lose(err)
		}
		return
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(within))
	answers := bufio.NewReader(conn)
	for range requests {
		if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: shop\r\nX-User-ID: %s\r\nContent-Length: 0\r\n\r\n", s.path,
			user); err != nil {
			s.lose(err)
			return
		}
		res, err := http.ReadResponse(answers, nil)
		if err != nil {
			s.lose(err)
			return
		}
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		s.answered.Add(1)
		if res.Close {
			return
		}
	}
}

func (s *shoppers) lose(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = append(s.lost, err.Error())
}

func (s *shoppers) isOver() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

// Ingresses are replaced one after the other, without a load balancer.
func TestRollingRestartAnswersEveryRequest(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		stopDelay string
		requests  int
	}{
		// Without a delay a client could reuse a connection at the moment when it is closed.
		"one request per connection, without a delay": {"0s", 1},

		"kept connections": {"300ms", 1_000_000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			start := func() (*testkit.Cmd, string) {
				c, url := s.serve("--stop-delay=" + test.stopDelay)
				return c, strings.TrimPrefix(url, "http://")
			}
			var running [2]*testkit.Cmd
			clients := shoppers{stop: make(chan struct{})}
			for i := range running {
				var address string
				running[i], address = start()
				clients.targets[i].Store(&address)
			}
			clients.path = "/v1/sales/" + s.sale("http://"+*clients.targets[0].Load(), 1).String() + "/orders"

			var shopping sync.WaitGroup
			for i := range 16 {
				shopping.Go(func() {
					for n := i; !clients.isOver(); n++ {
						clients.visit(strings.Repeat("u", 1+n%2), test.requests)
					}
				})
			}
			defer shopping.Wait()
			end := sync.OnceFunc(func() { close(clients.stop) })
			defer end()
			for round := range 6 {
				before := clients.answered.Load()
				testkit.Eventually(t, within, "requests are answered", func() bool { return clients.answered.Load() > before+200 })
				require.Zero(t, running[round%2].Stop().ExitCode())
				var address string
				running[round%2], address = start()
				clients.targets[round%2].Store(&address)
			}
			end()
			// Kept connections end with the ingresses.
			for _, c := range running {
				assert.Zero(t, c.Stop().ExitCode())
			}
			shopping.Wait()
			t.Logf("%d answered, %d refused", clients.answered.Load(), clients.refused.Load())
			assert.Empty(t, clients.lost, "requests without an answer, of %d", clients.answered.Load())
		})
	}
}

// Idle connections of clients leave files for new clients, Redis and Postgres.
func TestIdleConnectionsLeaveFileDescriptors(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := s.command("serve")
	c.LimitFiles(200)
	c.Setenv("STAMPEDE_AUTH", "header")
	c.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	c.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
	c.Start()
	addr := loggedAddr(c, "ingress listens")
	require.Contains(t, c.WaitOutput(within, "ingress listens"), "connections_max=100")

	// 30 s: an idle connection is closed after a minute.
	idle := func() {
		conn, err := net.Dial("tcp", addr) //nolint:noctx // it ends with the test
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		require.NoError(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
		_, err = fmt.Fprint(conn, "GET /livez HTTP/1.1\r\nHost: shop\r\n\r\n")
		require.NoError(t, err)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err, "a new connection is not served")
		_, _ = io.Copy(io.Discard, res.Body)
		require.Equal(t, http.StatusOK, res.StatusCode)
	}
	for range 300 {
		idle()
	}
	url := "http://" + addr
	assert.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, url+"/v1/sales/"+s.sale(url, 1).String()+"/orders", "ann",
		"").HTTP)
	idle()

	var closed, open int
	for _, line := range scrape(t, url) {
		_, _ = fmt.Sscanf(line, "stampede_idle_connections_closed_total %d", &closed)
		_, _ = fmt.Sscanf(line, "stampede_connections %d", &open)
	}
	assert.Greater(t, closed, 200)
	assert.LessOrEqual(t, open, 100)
	assert.NotContains(t, strings.ToLower(c.Output()), "too many open files")
}
