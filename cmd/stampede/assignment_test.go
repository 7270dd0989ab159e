//go:build system

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/dev/loadgen"
	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// sharedShop is a shop with its own Redis, an ingress, and workers that share its partitions.
type sharedShop struct {
	*shop
	rdb     redis.UniversalClient
	url     string
	workers map[string]*testkit.Cmd
	minIdle time.Duration
}

func newSharedShop(t *testing.T, partitions, workers int, minIdle time.Duration) *sharedShop {
	t.Helper()
	s := &sharedShop{shop: newShop(t), workers: map[string]*testkit.Cmd{}, minIdle: minIdle}
	s.redisURL, s.keys.Partitions = testkit.OwnRedis(t).URL, partitions
	var err error
	s.rdb, err = connect.Control(s.redisURL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.rdb.Close() })
	_, s.url = s.serve()
	for i := range workers {
		s.join(fmt.Sprintf("worker-%d", i))
	}
	s.awaitReaders()
	return s
}

// join starts a worker.
func (s *sharedShop) join(name string) {
	c := s.worker(name)
	c.Setenv("STAMPEDE_MIN_IDLE", s.minIdle.String())
	c.Start()
	s.workers[name] = c
}

func (s *sharedShop) names() (names []string) {
	for name := range s.workers {
		names = append(names, name)
	}
	return names
}

// share returns the partitions of which a worker is the reader.
func (s *sharedShop) share(worker string) (partitions []int) {
	for p := range s.keys.Partitions {
		if stream.First(s.keys.Orders(p), s.names()) == worker {
			partitions = append(partitions, p)
		}
	}
	return partitions
}

// busiest returns the worker with the most partitions.
func (s *sharedShop) busiest() string {
	return slices.MaxFunc(s.names(), func(x, y string) int { return len(s.share(x)) - len(s.share(y)) })
}

// blocked returns how many connections wait in a blocking read.
func (s *sharedShop) blocked() (n int) {
	s.t.Helper()
	list, err := s.rdb.ClientList(s.t.Context()).Result()
	require.NoError(s.t, err)
	for line := range strings.Lines(list) {
		if strings.Contains(line, "cmd=xreadgroup") && strings.Contains(line, " flags=b ") {
			n++
		}
	}
	return n
}

// read returns the partitions that a worker reads, by its metrics.
func (s *sharedShop) read(worker string) (partitions []int) {
	s.t.Helper()
	shown := scrape(s.t, "http://"+loggedAddr(s.workers[worker], "metrics are served"))
	for p := range s.keys.Partitions {
		if slices.Contains(shown, fmt.Sprintf(`stampede_stream_readers{stream="%s"} 1`, s.keys.Orders(p))) {
			partitions = append(partitions, p)
		}
	}
	return partitions
}

// awaitReaders waits until each partition is read by the worker that comes first, and by no other.
func (s *sharedShop) awaitReaders() {
	s.t.Helper()
	for name := range s.workers {
		testkit.Eventually(s.t, within, name+" reads its share", func() bool {
			return slices.Equal(s.read(name), s.share(name))
		})
	}
	testkit.Eventually(s.t, within, "each partition has one connection that waits", func() bool {
		return s.blocked() == s.keys.Partitions
	})
}

// lose ends a worker, and requires that the others read its partitions within --min-idle.
func (s *sharedShop) lose(worker string, how func(*testkit.Cmd)) *testkit.Cmd {
	s.t.Helper()
	how(s.workers[worker])
	lost, began := s.workers[worker], time.Now()
	delete(s.workers, worker)
	for name := range s.workers {
		testkit.Eventually(s.t, within, name+" reads its part of the lost share", func() bool {
			return slices.Equal(s.read(name), s.share(name))
		})
	}
	assert.Less(s.t, time.Since(began), s.minIdle)
	return lost
}

// saleIn creates a sale in a partition.
func (s *sharedShop) saleIn(partition int, stock int64) uuid.UUID {
	s.t.Helper()
	for {
		if sale := s.sale(s.url, stock); s.keys.Partition(sale) == partition {
			return sale
		}
	}
}

// load sells a sale in each of the partitions while during runs, and requires that every accepted order reaches
// Postgres once.
func (s *sharedShop) load(partitions []int, stock int, over time.Duration, during func()) {
	s.t.Helper()
	var running sync.WaitGroup
	var checks []func()
	for _, p := range partitions {
		sale := s.saleIn(p, int64(stock))
		buyers, verifier := s.crowd(loadgen.Config{
			URLs: []string{s.url}, Sale: sale, Buyers: stock, Arrivals: loadgen.Evenly(over), DoubleClicks: 0.05,
		})
		running.Go(func() { buyers.Run(s.t.Context()) })
		checks = append(checks, func() { s.requireKept(buyers, verifier, sale, stock) })
	}
	during()
	running.Wait()
	for _, check := range checks {
		check()
	}
}

func TestWorkersReadEachPartitionOverOneConnection(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 8, 4, 4*time.Second)
	for range 20 {
		assert.LessOrEqual(t, s.blocked(), 8)
	}
}

// A worker that is killed or hangs in the middle of a sale has successors within --min-idle, and what it has read is
// recorded once.
func TestPartitionsOfLostWorkerGetNewReaders(t *testing.T) {
	t.Parallel()
	for how, lose := range map[string]func(*testkit.Cmd){"killed": (*testkit.Cmd).Kill, "hanging": (*testkit.Cmd).Freeze} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			s := newSharedShop(t, 8, 4, 4*time.Second)
			victim := s.busiest()
			partitions := s.share(victim)
			var lost *testkit.Cmd
			s.load(partitions, 200, 8*time.Second, func() {
				testkit.Eventually(t, within, "the sale has begun", func() bool {
					return s.rdb.XLen(t.Context(), s.keys.Orders(partitions[0])).Val() > 0
				})
				lost = s.lose(victim, lose)
			})
			if how == "hanging" {
				lost.Thaw()
				s.workers[victim] = lost
				s.awaitReaders()
			}
		})
	}
}

// A worker that stops has handed its partitions over when it ends, and no order waits for --min-idle or a good part of
// it.
func TestWorkersJoinAndStopWithoutGap(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 4, 2, 40*time.Second)
	s.load([]int{0, 1, 2, 3}, 300, 25*time.Second, func() {
		s.join("worker-2")
		s.join("worker-3")
		s.awaitReaders()
		leaver := s.busiest()
		assert.Zero(t, s.workers[leaver].Stop().ExitCode())
		delete(s.workers, leaver)
		for name := range s.workers {
			assert.Equal(t, s.share(name), s.read(name), "%s has taken over", name)
		}
		s.awaitReaders()
	})
	var longest time.Duration
	require.NoError(t, s.pool.QueryRow(t.Context(),
		"SELECT max(occurred_at - reserved_at) FROM order_events WHERE reserved_at IS NOT NULL").Scan(&longest))
	assert.Less(t, longest, s.minIdle/10, "from the reservation to the commit")
}

func TestIdleWorkersHoldNoBlockingConnection(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 1, 3, 4*time.Second)
	s.lose(s.busiest(), (*testkit.Cmd).Kill)
	s.awaitReaders()
}

// The estimate of the orders that wait is that of the worker that reads the partition now, not of one that has read it
// while that was frozen.
func TestBacklogIsTheEstimateOfItsReader(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 1, 2, 4*time.Second)
	sale, key := s.saleIn(0, 1000), s.keys.Orders(0)
	first := s.busiest()
	frozen := s.workers[first]
	hold := (&testshop.Shop{Pool: s.pool}).HoldSale
	waiting := func(of *testkit.Cmd, orders float64) {
		t.Helper()
		url := "http://" + loggedAddr(of, "metrics are served")
		testkit.Eventually(t, within, fmt.Sprintf("%g orders wait", orders), func() bool {
			return sum(t, url, `stampede_stream_waiting_orders{group="fulfillment",stream="`+key) == orders
		})
	}

	s.lose(first, (*testkit.Cmd).Freeze)
	successor := s.workers[s.busiest()]
	const many = 100
	held := hold(t, sale)
	var buyers sync.WaitGroup
	for i := range many {
		buyers.Go(func() { assert.NoError(t, s.tryBuy(s.url, sale, fmt.Sprintf("ann-%d", i))) })
	}
	buyers.Wait()
	require.Less(t, s.rdb.XLen(t.Context(), key).Val(), int64(many), "entries hold several orders")
	waiting(successor, many)
	frozen.Thaw()
	s.workers[first] = frozen
	testkit.Eventually(t, within, "the thawed worker reads again", func() bool {
		return slices.Equal(s.read(first), s.share(first))
	})
	require.NoError(t, held.Rollback(t.Context()))
	for _, worker := range s.workers {
		waiting(worker, 0)
	}
	s.awaitReaders()
	hold(t, sale)
	s.buy(s.url, sale, "bob")
	for _, worker := range s.workers {
		waiting(worker, 1)
	}
}

// docs/bench/payments.md has figures of a larger crowd.
var (
	paceLimit   = flag.Int("pace.limit", 50, "payments that the fake provider takes in a second")
	paceWinners = flag.Int("pace.winners", 600, "buyers who win a unit and pay")
	paceWindow  = flag.Duration("pace.window", 10*time.Second, "payment window")
)

// lateEvery is of how many payments one arrives after the window.
const lateEvery = 100

// provider is a fake payment provider. It begins so many payments a second and answers 429 to others. Its webhooks come
// in another order, some of them several times, and some after the payment window.
type provider struct {
	limit    int
	late     time.Duration
	shop     func(report []byte) error
	webhooks errgroup.Group

	mu sync.Mutex
	// starts has the times at which buyers first came, and begun those of payments.
	starts, begun []time.Time
	refused       int
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	now := time.Now()
	if r.URL.Query().Get("try") == "0" {
		p.starts = append(p.starts, now)
	}
	n := len(p.begun)
	refused := n >= p.limit && now.Sub(p.begun[n-p.limit]) < time.Second
	if refused {
		p.refused++
	} else {
		p.begun = append(p.begun, now)
	}
	p.mu.Unlock()
	if refused {
		w.WriteHeader(http.StatusTooManyRequests)
		return
	}
	id := r.URL.Query().Get("order")
	report := fmt.Appendf(nil, `{"order_id":%q,"reference":"ch_%s","amount":1290,"currency":"EUR"}`, id, id)
	send := func(after time.Duration) {
		p.webhooks.Go(func() error {
			retry.Pause(after, nil)
			return p.shop(report)
		})
	}
	if n%lateEvery == 0 {
		send(p.late)
		return
	}
	send(rand.N(500 * time.Millisecond))
	for range n % 3 {
		send(rand.N(3 * time.Second))
	}
}

// busiest is the most buyers who start to pay in any ten seconds.
func (p *provider) busiest() (most int) {
	first := 0
	for last, at := range p.starts {
		for at.Sub(p.starts[first]) >= 10*time.Second {
			first++
		}
		most = max(most, last-first+1)
	}
	return most
}

// Turns follow each other across the shards of a sale, crashes of its workers, and hand-overs of its partitions.
func TestPaceOutlivesCrashesOfWorkers(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 4, 2, 3*time.Second)
	r := newRush(s.shop, s.url, s.createSale(s.url, reservation.Terms{
		Name: "test", Stock: 2000, Shards: 4, PaymentWindow: time.Hour,
		PaymentsPerSecond: 2, // the turns are soon minutes ahead of the clock, however slow the machine is
	}))
	r.open(t)
	for range 4 {
		r.sell(t, 100, "orders are accepted")
		r.allow(200)
		victim := s.busiest()
		s.workers[victim].Kill()
		r.sell(t, 50, "orders are accepted without it")
		s.join(victim)
	}
	r.endCrowd()
	s.ends(exitOK, "audit", "--wait=60s", "--sale="+r.sale.String())
	orders := s.count("SELECT count(*) FROM orders")
	require.GreaterOrEqual(t, orders, r.acceptedCount())
	require.Equal(t, orders-1, s.count(`SELECT count(*) FROM (
			SELECT due - lag(due) OVER one_by_one AS gap, row_number() OVER one_by_one AS n
			FROM orders WINDOW one_by_one AS (ORDER BY due)
		) AS turns WHERE gap = interval '500 ms' OR gap > interval '500 ms' AND n <= 100`))
}

// A sale with a pace asks no more of a payment provider than that takes, and no order expires whose money is in time.
// Without a pace a part of the winners cannot pay within the window.
func TestPaceKeepsLimitOfProvider(t *testing.T) {
	t.Parallel()
	for name, pace := range map[string]int{"pace": *paceLimit, "none": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			_, url := s.serve()
			s.worker("worker").Start()
			sale := s.createSale(url, reservation.Terms{
				Name: "test", Stock: int64(*paceWinners), PaymentWindow: *paceWindow, PaymentsPerSecond: int64(pace),
				UnitPrice: 1290, Currency: "EUR",
			})
			client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 100, MaxIdleConnsPerHost: 100}}
			t.Cleanup(client.CloseIdleConnections)
			post := func(to string, body []byte, into any, header ...string) (status int, err error) {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, to, bytes.NewReader(body))
				if err != nil {
					return 0, err
				}
				r.Header.Set("Content-Type", "application/json")
				for i := 0; i < len(header); i += 2 {
					r.Header.Set(header[i], header[i+1])
				}
				answer, err := client.Do(r)
				if err != nil {
					return 0, err
				}
				defer func() { _ = answer.Body.Close() }()
				if into != nil {
					err = json.NewDecoder(answer.Body).Decode(into)
				}
				return answer.StatusCode, err
			}
			p := &provider{limit: *paceLimit, late: *paceWindow + 3*time.Second, shop: func(report []byte) error {
				status, err := post(url+"/v1/payments", report, nil, "Authorization", "Bearer "+adminToken)
				if err == nil && status != http.StatusOK {
					err = fmt.Errorf("HTTP %d for %s", status, report)
				}
				return err
			}}
			at := httptest.NewServer(p)
			t.Cleanup(at.Close)
			var buyers errgroup.Group
			for n := range *paceWinners {
				buyers.Go(func() error {
					var o order.View
					status, err := post(url+"/v1/sales/"+sale.String()+"/orders", nil, &o, "X-User-ID", fmt.Sprint("buyer-", n),
						"Prefer", "wait=30")
					if err != nil || status != http.StatusCreated {
						return fmt.Errorf("buy: HTTP %d %+v: %w", status, o, err)
					}
					if pace > 0 {
						turn, err := time.Parse(time.RFC3339, o.PayFrom)
						if err != nil {
							return err
						}
						retry.Pause(time.Until(turn), t.Context().Done())
					}
					until, err := time.Parse(time.RFC3339, o.ExpiresAt)
					for try := 0; err == nil && time.Now().Before(until); try++ {
						status, err = post(fmt.Sprintf("%s/?order=%s&try=%d", at.URL, o.OrderID, try), nil, nil)
						if status == http.StatusOK {
							break
						}
						retry.Pause(500*time.Millisecond+rand.N(time.Second), t.Context().Done())
					}
					return err
				})
			}
			require.NoError(t, buyers.Wait())
			require.NoError(t, p.webhooks.Wait())
			testkit.Eventually(t, within, "each order is paid or expired", func() bool {
				return s.count("SELECT count(*) FROM orders WHERE status IN ('paid', 'expired')") == *paceWinners
			})
			expired := s.count("SELECT count(*) FROM orders WHERE status = 'expired'")
			late := (len(p.begun) + lateEvery - 1) / lateEvery
			t.Logf("%s: %d of %d orders expired, %d of them paid too late; %d starts in the busiest 10 s; %d answers 429", name,
				expired, *paceWinners, late, p.busiest(), p.refused)
			if pace > 0 {
				assert.Equal(t, late, expired, "nobody's order expires whose money is in time")
				assert.LessOrEqual(t, p.busiest(), pace*11)
			} else {
				assert.Greater(t, expired, late)
			}
			assert.Equal(t, len(p.begun), s.count("SELECT count(*) FROM payments"))
			assert.Equal(t, *paceWinners-expired, s.count("SELECT count(*) FROM payments WHERE state = 'settled'"))
			assert.Equal(t, len(p.begun)-(*paceWinners-expired),
				s.count("SELECT count(*) FROM payments WHERE state = 'refund_due' AND reason = 'order-expired'"))
			s.ends(exitOK, "audit", "--wait=30s", "--sale="+sale.String())
		})
	}
}
