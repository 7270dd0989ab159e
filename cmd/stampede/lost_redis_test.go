package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/localserver"
	"stampede/internal/testkit"
)

// lostShop is a shop whose Redis is its own, and is lost.
type lostShop struct {
	*shop
	server *localserver.Redis
	url    string
	sale   uuid.UUID

	mu       sync.Mutex
	promises []promise
	answers  map[int]int // how often each HTTP status was answered
	// room is up to how many promises the crowd may come, so that the stock lasts however slow the test is, and
	// trying how many of it ask at this moment. A change of these is told to changed.
	room, trying int
	changed      *sync.Cond
	// stop ends the crowd.
	stop    atomic.Bool
	coming  sync.WaitGroup
	buyers  atomic.Int64
	soldOut atomic.Bool
}

// promise is a 202.
type promise struct {
	user    string
	Order   string `json:"order_id"`
	Receipt string `json:"receipt"`
}

func newLostShop(t *testing.T, stock int64) *lostShop {
	t.Helper()
	server := testkit.OwnRedis(t)
	s := &lostShop{shop: newShop(t), server: server, answers: map[int]int{}}
	s.changed = sync.NewCond(&s.mu)
	s.redisURL = server.URL
	_, s.url = s.serve()
	s.sale = s.shop.sale(s.url, stock)
	return s
}

// open lets buyers come, until the end of the test or of leave. Each goes on with the same key until the answer is
// one. They find no room at first: see letIn.
func (s *lostShop) open(t *testing.T) {
	t.Helper()
	const atOnce = 16
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: atOnce, MaxIdleConnsPerHost: atOnce}}
	t.Cleanup(func() {
		s.leave()
		client.CloseIdleConnections()
	})
	for range atOnce {
		s.coming.Go(func() {
			for !s.stop.Load() {
				user := "buyer-" + strconv.FormatInt(s.buyers.Add(1), 10)
				for !s.stop.Load() && !s.buy(t, client, user) {
				}
			}
		})
	}
}

// buy is one try. It is true if it was answered for good.
func (s *lostShop) buy(t *testing.T, client *http.Client, user string) bool {
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/v1/sales/"+s.sale.String()+"/orders", nil)
	if err != nil {
		t.Error(err)
		return true
	}
	r.Header.Set("X-User-ID", user)
	r.Header.Set("Idempotency-Key", "only")
	if !s.enter() {
		return true
	}
	defer s.exit()
	res, err := client.Do(r)
	if err != nil {
		return false // it tries again
	}
	defer func() { _ = res.Body.Close() }()
	body, _ := io.ReadAll(res.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[res.StatusCode]++
	switch res.StatusCode {
	case http.StatusAccepted:
		p := promise{user: user}
		if err := json.Unmarshal(body, &p); err != nil || p.Receipt == "" {
			t.Errorf("%s: %s (%v)", user, body, err)
		}
		s.promises = append(s.promises, p)
		return true
	case http.StatusConflict:
		if !strings.Contains(string(body), "sold-out") {
			t.Errorf("%s: %s", user, body)
		}
		s.soldOut.Store(true)
		return true
	case http.StatusServiceUnavailable:
		return false
	}
	t.Errorf("%s: %d %s", user, res.StatusCode, body)
	return true
}

// enter waits for room. It is false when the crowd is to leave.
func (s *lostShop) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.promises)+s.trying >= s.room && !s.stop.Load() {
		s.changed.Wait()
	}
	if s.stop.Load() {
		return false
	}
	s.trying++
	return true
}

func (s *lostShop) exit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trying--
	s.changed.Broadcast()
}

// letIn makes room for so many promises more than there are, and returns how many there are.
func (s *lostShop) letIn(more int) (promises int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.room = len(s.promises) + more
	s.changed.Broadcast()
	return len(s.promises)
}

// keepOut returns when nobody asks, and nobody can.
func (s *lostShop) keepOut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.room = 0
	for s.trying > 0 {
		s.changed.Wait()
	}
}

// leave ends the crowd.
func (s *lostShop) leave() {
	s.stop.Store(true)
	s.letIn(0)
	s.coming.Wait()
}

// sell waits until more than so many orders are accepted, and leaves the crowd room for as many again.
func (s *lostShop) sell(t *testing.T, more int, what string) {
	t.Helper()
	before := s.letIn(2 * more)
	testkit.Eventually(t, within, what, func() bool { return s.accepted() > before+more })
}

func (s *lostShop) accepted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.promises)
}

func (s *lostShop) refusals() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answers[http.StatusServiceUnavailable]
}

func (s *lostShop) count(query string, args ...any) (n int) {
	s.t.Helper()
	require.NoError(s.t, s.pool.QueryRow(s.t.Context(), query, args...).Scan(&n))
	return n
}

func (s *lostShop) epoch() int { return s.count("SELECT epoch FROM sales WHERE id = $1", s.sale) }

// requireEnds waits until all units are sold and checks that every promise has its end. It returns
// how many were voided.
func (s *lostShop) requireEnds(stock int) (voided int) {
	s.t.Helper()
	s.letIn(2 * stock)
	testkit.Eventually(s.t, within, "all units are sold", func() bool {
		return s.count("SELECT sold FROM sales WHERE id = $1", s.sale) == stock
	})
	s.soldOut.Store(false)
	testkit.Eventually(s.t, within, "a buyer hears that it is sold out", s.soldOut.Load)
	s.leave()
	status, output := s.run("audit", "--wait=60s", "--sale="+s.sale.String())
	require.Equal(s.t, exitOK, status, output)

	ends := map[any]int{}
	orders := map[string]bool{}
	for _, p := range s.promises {
		var end said
		testkit.Eventually(s.t, within, "its end is told", func() bool { // "reserved" while Postgres is slow to answer
			end = ask(s.t, http.MethodGet, s.url+"/v1/orders/"+p.Order+"?receipt="+p.Receipt, p.user, "")
			return end.HTTP == http.StatusOK && end.Status != "reserved"
		})
		ends[end.Status]++
		require.False(s.t, orders[p.Order], "one buyer, one order")
		orders[p.Order] = true
		recorded := s.count("SELECT count(*) FROM orders WHERE id = $1 AND status = 'confirmed' AND user_id = $2", p.Order,
			p.user)
		switch end.Status {
		case "confirmed":
			require.Equal(s.t, 1, recorded)
		case "voided":
			require.Zero(s.t, recorded)
		default:
			s.t.Errorf("order %s is %v", p.Order, end.Status)
		}
	}
	// A buyer who was never answered may hold an order, and finds it by the same request.
	assert.LessOrEqual(s.t, ends["confirmed"], stock)
	assert.GreaterOrEqual(s.t, ends["confirmed"], stock-16)
	s.t.Logf("%d promises: %v; answers %v; epoch %d", len(s.promises), ends, s.answers, s.epoch())
	return ends["voided"]
}

// Redis is emptied in the middle of a sale, with orders that no worker has read, and some that workers have in hand.
func TestSaleContinuesAfterRedisIsEmptied(t *testing.T) {
	t.Parallel()
	const stock = 1500
	s := newLostShop(t, stock)
	first, second := s.worker("first"), s.worker("second")
	first.Start()
	second.Start()
	s.open(t)
	rdb, err := connect.Control(s.server.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	for round := 1; round <= 2; round++ {
		s.sell(t, 200, "the sale is under way")
		first.Freeze()
		second.Freeze()
		s.sell(t, 100, "orders are accepted that are not in Postgres")
		refused := s.refusals()
		require.NoError(t, rdb.FlushAll(t.Context()).Err())
		s.letIn(100)
		testkit.Eventually(t, within, "buyers are put off", func() bool { return s.refusals() > refused+10 })
		second.Thaw()
		s.sell(t, 50, "the sale goes on")
		require.Equal(t, round+1, s.epoch())
		first.Thaw()
	}
	voided := s.requireEnds(stock)
	require.GreaterOrEqual(t, voided, 150)
	require.Equal(t, 3, s.epoch(), "it was rebuilt for each loss and no more")
	require.LessOrEqual(t, s.count("SELECT count(*) FROM orders WHERE status = 'voided'"), voided+16)
	require.Zero(t, s.count("SELECT count(*) FROM dead_letters"))
	require.Zero(t, s.count("SELECT count(*) FROM orders WHERE status = 'rejected'"))
}

// With appendfsync always a Redis that is killed comes back with all that it was asked to keep.
func TestKilledRedisVoidsNothing(t *testing.T) {
	t.Parallel()
	const stock = 1500
	s := newLostShop(t, stock)
	worker := s.worker("worker")
	worker.Start()
	s.open(t)
	for round := 1; round <= 2; round++ {
		s.sell(t, 200, "the sale is under way")
		if round == 2 { // with a backlog that nobody reads
			s.keepOut()
			require.True(t, worker.Stop().Success())
			s.sell(t, 200, "a backlog")
		}
		s.server.Kill()
		require.NoError(t, s.server.Restart(t.Context()))
		if round == 2 {
			before, refused := s.accepted(), s.refusals()
			s.letIn(100)
			testkit.Eventually(t, within, "buyers are put off", func() bool { return s.refusals() > refused+10 })
			require.LessOrEqual(t, s.accepted(), before+16,
				"nobody sells before the rebuild; some were answered before the loss")
			worker = s.worker("worker")
			worker.Start()
		}
		s.sell(t, 50, "the sale goes on")
		require.Equal(t, round+1, s.epoch())
	}
	require.Zero(t, s.requireEnds(stock))
	require.Zero(t, s.count("SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
	require.Equal(t, 3, s.epoch())
}

// By hand, with reports for people and for programs.
func TestRebuildCommand(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	status, output := s.run("sale", "create", "--name=test", "--stock=10", "--json")
	require.Equal(t, exitOK, status, output)
	var sale struct{ ID uuid.UUID }
	require.NoError(t, json.Unmarshal([]byte(output), &sale), output)
	_, url := s.serve()
	require.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, url+"/v1/sales/"+sale.ID.String()+"/orders", "ann",
		"").HTTP)

	status, output = s.run("rebuild")
	require.Equal(t, exitOK, status, output)
	require.Contains(t, output, "partition 0 was rebuilt in ")
	require.Contains(t, output, "confirmed now: 1")
	require.Regexp(t, sale.ID.String()+` +2 +10 +9 +1 +1 +1 `, output)
	status, output = s.run("rebuild", "--sale="+sale.ID.String(), "--json", "--log-level=error")
	require.Equal(t, exitOK, status, output)
	var report struct {
		Reason string
		Sales  []struct {
			ID          uuid.UUID
			Epoch, Left int64
		}
	}
	require.NoError(t, json.Unmarshal([]byte(output), &report), output)
	require.Equal(t, "by-hand", report.Reason)
	require.Len(t, report.Sales, 1)
	require.EqualValues(t, 3, report.Sales[0].Epoch)
	require.EqualValues(t, 9, report.Sales[0].Left)
	status, output = s.run("rebuild", "--partition=0")
	require.Equal(t, exitOK, status, output)
	status, output = s.run("audit", "--wait=0s")
	require.Equal(t, exitFailed, status, "no worker has handled the entry: "+output)
	s.worker("worker").Start()
	status, output = s.run("audit", "--wait=30s")
	require.Equal(t, exitOK, status, output)

	for args, want := range map[string]int{
		"--sale=" + uuid.Must(uuid.NewV7()).String(): exitFailed,
		"--partition=64": exitUsage,
		"--partition=-1": exitUsage,
		"--partition=0 --sale=" + sale.ID.String(): exitUsage,
		"--sale=nonsense":                          exitUsage,
		fmt.Sprintf("--partitions=%d", 0):          exitUsage,
	} {
		status, output := s.run(append([]string{"rebuild"}, strings.Fields(args)...)...)
		require.Equal(t, want, status, args+": "+output)
	}
}
