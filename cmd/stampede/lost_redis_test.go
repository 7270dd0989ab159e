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

// lostShop is a shop with its own Redis, which the test destroys.
type lostShop struct {
	*shop
	server *localserver.Redis
	url    string
	sale   uuid.UUID

	mu       sync.Mutex
	accepted []acceptedOrder
	answers  map[int]int // by HTTP status
	// limit bounds the accepted orders, so that the stock is not sold out early in a slow test. Trying counts the running
	// requests. Changed is broadcast when either changes.
	limit, trying int
	changed       *sync.Cond
	// stop ends the crowd.
	stop    atomic.Bool
	crowd   sync.WaitGroup
	buyers  atomic.Int64
	soldOut atomic.Bool
}

// acceptedOrder is a 202.
type acceptedOrder struct {
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

// open starts buyers that run until the end of the test or endCrowd. Each retries with the same key until the answer is
// final. They wait until allow raises the limit.
func (s *lostShop) open(t *testing.T) {
	t.Helper()
	const connections = 16
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: connections, MaxIdleConnsPerHost: connections}}
	t.Cleanup(func() {
		s.endCrowd()
		client.CloseIdleConnections()
	})
	for range connections {
		s.crowd.Go(func() {
			for !s.stop.Load() {
				user := "buyer-" + strconv.FormatInt(s.buyers.Add(1), 10)
				for !s.stop.Load() && !s.buy(t, client, user) {
				}
			}
		})
	}
}

// buy is one try. It returns true if the answer is final.
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
		return false // the buyer retries
	}
	defer func() { _ = res.Body.Close() }()
	body, _ := io.ReadAll(res.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[res.StatusCode]++
	switch res.StatusCode {
	case http.StatusAccepted:
		o := acceptedOrder{user: user}
		if err := json.Unmarshal(body, &o); err != nil || o.Receipt == "" {
			t.Errorf("%s: %s (%v)", user, body, err)
		}
		s.accepted = append(s.accepted, o)
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

// enter waits until the limit allows a request. It returns false when the crowd ends.
func (s *lostShop) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.accepted)+s.trying >= s.limit && !s.stop.Load() {
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

// allow sets the limit to so many more than the accepted orders, and returns how many those are.
func (s *lostShop) allow(more int) (accepted int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = len(s.accepted) + more
	s.changed.Broadcast()
	return len(s.accepted)
}

// pause stops the crowd and waits for its running requests.
func (s *lostShop) pause() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = 0
	for s.trying > 0 {
		s.changed.Wait()
	}
}

// endCrowd ends the crowd and waits for it.
func (s *lostShop) endCrowd() {
	s.stop.Store(true)
	s.allow(0)
	s.crowd.Wait()
}

// sell waits until more than so many further orders are accepted. The crowd may buy twice as many.
func (s *lostShop) sell(t *testing.T, more int, what string) {
	t.Helper()
	before := s.allow(2 * more)
	testkit.Eventually(t, within, what, func() bool { return s.acceptedCount() > before+more })
}

func (s *lostShop) acceptedCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.accepted)
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

// requireEnds waits until all units are sold and checks that every accepted order has a final state. It returns how
// many were voided.
func (s *lostShop) requireEnds(stock int) (voided int) {
	s.t.Helper()
	s.allow(2 * stock)
	testkit.Eventually(s.t, within, "all units are sold", func() bool {
		return s.count("SELECT sold FROM sales WHERE id = $1", s.sale) == stock
	})
	s.soldOut.Store(false)
	testkit.Eventually(s.t, within, "a buyer gets sold-out", s.soldOut.Load)
	s.endCrowd()
	status, output := s.run("audit", "--wait=60s", "--sale="+s.sale.String())
	require.Equal(s.t, exitOK, status, output)

	ends := map[any]int{}
	orders := map[string]bool{}
	for _, o := range s.accepted {
		var end apiAnswer
		testkit.Eventually(s.t, within, "the order has a final state", func() bool { // "reserved" while Postgres is slow
			end = ask(s.t, http.MethodGet, s.url+"/v1/orders/"+o.Order+"?receipt="+o.Receipt, o.user, "")
			return end.HTTP == http.StatusOK && end.Status != "reserved"
		})
		ends[end.Status]++
		require.False(s.t, orders[o.Order], "one order per buyer")
		orders[o.Order] = true
		recorded := s.count("SELECT count(*) FROM orders WHERE id = $1 AND status = 'confirmed' AND user_id = $2", o.Order,
			o.user)
		switch end.Status {
		case "confirmed":
			require.Equal(s.t, 1, recorded)
		case "voided":
			require.Zero(s.t, recorded)
		default:
			s.t.Errorf("order %s is %v", o.Order, end.Status)
		}
	}
	// A buyer without an answer may hold an order, and gets it by a retry.
	assert.LessOrEqual(s.t, ends["confirmed"], stock)
	assert.GreaterOrEqual(s.t, ends["confirmed"], stock-16)
	s.t.Logf("%d accepted: %v; answers %v; epoch %d", len(s.accepted), ends, s.answers, s.epoch())
	return ends["voided"]
}

// Redis is emptied during a sale, with unread orders and pending ones.
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
		s.sell(t, 200, "orders are accepted")
		first.Freeze()
		second.Freeze()
		s.sell(t, 100, "orders are accepted that are not in Postgres")
		refused := s.refusals()
		require.NoError(t, rdb.FlushAll(t.Context()).Err())
		s.allow(100)
		testkit.Eventually(t, within, "buyers get 503", func() bool { return s.refusals() > refused+10 })
		second.Thaw()
		s.sell(t, 50, "the sale continues")
		require.Equal(t, round+1, s.epoch())
		first.Thaw()
	}
	voided := s.requireEnds(stock)
	require.GreaterOrEqual(t, voided, 150)
	require.Equal(t, 3, s.epoch(), "one rebuild per loss")
	require.LessOrEqual(t, s.count("SELECT count(*) FROM orders WHERE status = 'voided'"), voided+16)
	require.Zero(t, s.count("SELECT count(*) FROM dead_letters"))
	require.Zero(t, s.count("SELECT count(*) FROM orders WHERE status = 'rejected'"))
}

// With appendfsync=always a killed Redis restarts with all acknowledged writes.
func TestKilledRedisVoidsNothing(t *testing.T) {
	t.Parallel()
	const stock = 1500
	s := newLostShop(t, stock)
	worker := s.worker("worker")
	worker.Start()
	s.open(t)
	for round := 1; round <= 2; round++ {
		s.sell(t, 200, "orders are accepted")
		if round == 2 { // with a backlog of unread orders
			s.pause()
			require.True(t, worker.Stop().Success())
			s.sell(t, 200, "a backlog")
		}
		s.server.Kill()
		require.NoError(t, s.server.Restart(t.Context()))
		if round == 2 {
			before, refused := s.acceptedCount(), s.refusals()
			s.allow(100)
			testkit.Eventually(t, within, "buyers get 503", func() bool { return s.refusals() > refused+10 })
			require.LessOrEqual(t, s.acceptedCount(), before+16,
				"nothing is sold before the rebuild, except requests answered before the loss")
			worker = s.worker("worker")
			worker.Start()
		}
		s.sell(t, 50, "the sale continues")
		require.Equal(t, round+1, s.epoch())
	}
	require.Zero(t, s.requireEnds(stock))
	require.Zero(t, s.count("SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
	require.Equal(t, 3, s.epoch())
}

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

	for args, exit := range map[string]int{
		"--sale=" + uuid.Must(uuid.NewV7()).String(): exitFailed,
		"--partition=64": exitUsage,
		"--partition=-1": exitUsage,
		"--partition=0 --sale=" + sale.ID.String(): exitUsage,
		"--sale=nonsense":                          exitUsage,
		fmt.Sprintf("--partitions=%d", 0):          exitUsage,
	} {
		status, output := s.run(append([]string{"rebuild"}, strings.Fields(args)...)...)
		require.Equal(t, exit, status, args+": "+output)
	}
}
