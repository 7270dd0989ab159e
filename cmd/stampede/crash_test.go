//go:build system

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/dev/loadgen"
	"stampede/internal/test/testkit"
	"stampede/reservation"
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

				buyers, verifier := s.crowd(loadgen.Config{
					URLs: []string{url}, Sale: sale, Buyers: crowdSize, Arrivals: loadgen.Evenly(time.Second),
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

	buyers, verifier := s.crowd(loadgen.Config{
		URLs: []string{url1, url2}, Sale: sale, Buyers: crowdSize, Arrivals: loadgen.Evenly(2 * time.Second),
		DoubleClicks: 0.2,
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
	buyers, verifier := s.crowd(loadgen.Config{
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

// byHand is a connection to an ingress on which a test writes and reads when it wants to.
type byHand struct {
	t       *testing.T
	conn    *net.TCPConn
	answers *bufio.Reader
}

func dialByHand(t *testing.T, url string) byHand {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://")) //nolint:noctx // it ends with the test
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return byHand{t, conn.(*net.TCPConn), bufio.NewReader(conn)}
}

// posts sends a call that changes something, as the user and an operator.
func (c byHand) posts(path, user, body string) {
	c.t.Helper()
	_, err := fmt.Fprintf(c.conn, "POST %s HTTP/1.1\r\nHost: shop\r\nX-User-ID: %s\r\nAuthorization: Bearer %s\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, user, adminToken, len(body), body)
	require.NoError(c.t, err)
}

func (c byHand) receives() (status int, body string) {
	c.t.Helper()
	require.NoError(c.t, c.conn.SetReadDeadline(time.Now().Add(within)))
	res, err := http.ReadResponse(c.answers, nil)
	require.NoError(c.t, err)
	text, err := io.ReadAll(res.Body)
	require.NoError(c.t, err)
	require.NoError(c.t, res.Body.Close())
	return res.StatusCode, string(text)
}

// operate changes a sale as an operator.
func operate(t *testing.T, url string, sale uuid.UUID, call, body string) {
	t.Helper()
	c := dialByHand(t, url)
	c.posts("/v1/sales/"+sale.String()+"/"+call, "", body)
	status, answer := c.receives()
	require.Equal(t, http.StatusOK, status, answer)
}

// sum returns the sum of the series of a metrics page that begin so.
func sum(t *testing.T, url, beginning string) (total float64) {
	t.Helper()
	for _, line := range scrape(t, url) {
		if strings.HasPrefix(line, beginning) {
			value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			require.NoError(t, err)
			total += value
		}
	}
	return total
}

// A frozen ingress continues with requests whose clients have gone and were answered by another one, or still wait: it
// must carry none of them out.
func TestFrozenIngressCarriesOutNothingLate(t *testing.T) {
	t.Parallel()
	for _, reader := range []string{"on", "off"} {
		t.Run("plain reader "+reader, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			frozen, stale := s.serve("--plain-reader=" + reader)
			_, url := s.serve()
			warm, paused, soldOut, resumed := s.sale(url, 100), s.sale(url, 100), s.sale(url, 1), s.sale(url, 1)
			orders := func(sale uuid.UUID) string { return "/v1/sales/" + sale.String() + "/orders" }
			operate(t, url, resumed, "pause", "")

			// clients are two of a kind for each sale: one connects to the frozen ingress, and one has bought before.
			var early, late, leave []func()
			var waiting []*byHand
			users := map[uuid.UUID][]string{}
			clients := func(kind string, send *[]func(), leaves func(*net.TCPConn) error) {
				for _, sale := range []uuid.UUID{paused, soldOut} {
					for _, before := range []string{"new", "known"} {
						c, user := new(byHand), kind+"-"+before
						users[sale] = append(users[sale], user)
						if before == "known" {
							*c = dialByHand(t, stale)
							c.posts(orders(warm), user+sale.String(), `{"quantity":1}`)
							status, answer := c.receives()
							require.Equal(t, http.StatusAccepted, status, answer)
						}
						*send = append(*send, func() {
							if before == "new" {
								*c = dialByHand(t, stale)
							}
							c.posts(orders(sale), user, `{"quantity":1}`)
						})
						if leaves == nil {
							waiting = append(waiting, c)
						} else {
							leave = append(leave, func() { assert.NoError(t, leaves(c.conn)) })
						}
					}
				}
			}
			clients("waits", &early, nil)
			clients("closes", &early, (*net.TCPConn).Close)
			clients("half-closes", &early, (*net.TCPConn).CloseWrite)
			clients("resets", &early, func(c *net.TCPConn) error { return errors.Join(c.SetLinger(0), c.Close()) })
			clients("comes-late-and-closes", &late, (*net.TCPConn).Close)
			warmed := sum(t, stale, "stampede_purchases_total")

			frozen.Freeze()
			testkit.Eventually(t, within, "the ingress is frozen", func() bool { return testkit.Stopped(t, frozen.Pid()) })
			operator, patientOperator := dialByHand(t, stale), dialByHand(t, stale)
			operator.posts("/v1/sales/"+resumed.String()+"/resume", "", "")
			patientOperator.posts("/v1/sales/"+warm.String()+"/restock", "", `{"units":7}`)
			for _, send := range early {
				send()
			}
			const most = reservation.DefaultWaitMax
			<-time.After(most + most/10)

			// Meanwhile everybody gets an answer from the other ingress.
			operate(t, url, paused, "pause", "")
			s.buy(url, soldOut, "another")
			for _, sale := range []uuid.UUID{paused, soldOut} {
				for _, user := range users[sale] {
					require.Equal(t, http.StatusConflict, ask(t, http.MethodPost, url+orders(sale), user, "").HTTP, user)
				}
			}
			operate(t, url, paused, "resume", "")
			operate(t, url, soldOut, "restock", `{"units":100}`)
			operate(t, url, resumed, "resume", "")
			operate(t, url, resumed, "pause", "")
			for _, send := range late {
				send()
			}
			for _, leave := range leave {
				leave()
			}
			require.NoError(t, operator.conn.Close())

			frozen.Thaw()
			for _, c := range append(waiting, &patientOperator) {
				status, answer := c.receives()
				assert.Equal(t, http.StatusServiceUnavailable, status, answer)
				assert.NotContains(t, answer, "outcome-unknown")
			}
			all := float64(len(early) + len(late))
			testkit.Eventually(t, within, "all purchases are answered", func() bool {
				return sum(t, stale, "stampede_purchases_total") == warmed+all
			})
			assert.Equal(t, warmed, sum(t, stale, `stampede_purchases_total{verdict="reserved"}`))
			// A busy machine may see its connections to Redis end meanwhile. Nothing is reserved then, too.
			assert.Equal(t, all, sum(t, stale, `stampede_purchases_total{verdict="overloaded"}`)+
				sum(t, stale, `stampede_purchases_total{verdict="unavailable"}`), scrape(t, stale))
			assert.GreaterOrEqual(t, sum(t, stale, "stampede_purchase_wait_seconds_sum"), most.Seconds()*float64(len(early)))
			for sale, state := range map[uuid.UUID]string{paused: "open", soldOut: "open", resumed: "paused"} {
				_, output := s.run("sale", "show", sale.String(), "--output=json")
				assert.Contains(t, output, `"state":"`+state+`"`)
			}
			_, output := s.run("sale", "show", warm.String(), "--output=json")
			assert.Contains(t, output, `"stock":100`)
		})
	}
}
