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

	"stampede/internal/test/testkit"
)

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
