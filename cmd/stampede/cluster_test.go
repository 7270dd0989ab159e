//go:build system

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
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// Partitions on different masters of a cluster of three, by the slots of their hash tags.
const (
	onLastMaster  = 0
	onFirstMaster = 3
)

// clusterShop has two workers and an ingress on a cluster, and crowds that buy two sales: one on the master that the
// test destroys, and one on another.
type clusterShop struct {
	*shop
	cluster        *localserver.Cluster
	operator       *testkit.ClusterOperator
	first, second  *testkit.Cmd // workers
	hurt, unharmed *rush
}

const (
	clusterStock = 200_000               // more than the crowds buy
	clusterPace  = 20 * time.Millisecond // so that the crowds leave CPU time to the servers
)

// newShopOnCluster returns a shop with four partitions on a cluster of its own.
func newShopOnCluster(t *testing.T) (*shop, *localserver.Cluster, *testkit.ClusterOperator) {
	t.Helper()
	s, cluster := newShop(t), testkit.OwnCluster(t)
	s.keys.Partitions, s.redisURL = 4, cluster.URL
	return s, cluster, testkit.Operate(t, cluster)
}

func newClusterShop(t *testing.T) *clusterShop {
	t.Helper()
	s := &clusterShop{}
	s.shop, s.cluster, s.operator = newShopOnCluster(t)
	_, url := s.serve()
	s.hurt, s.unharmed = s.rushOn(url, onLastMaster), s.rushOn(url, onFirstMaster)
	require.NotEqual(t, s.master(onLastMaster), s.master(onFirstMaster))
	s.first, s.second = s.worker("first"), s.worker("second")
	for _, worker := range []*testkit.Cmd{s.first, s.second} {
		worker.Setenv("STAMPEDE_MIN_IDLE", "3s") // a slow machine is not a dead worker
		worker.Start()
	}
	for _, r := range []*rush{s.hurt, s.unharmed} {
		r.pace = clusterPace
		r.open(t)
	}
	return s
}

// rushOn creates a sale in a partition.
func (s *clusterShop) rushOn(url string, partition int) *rush {
	s.t.Helper()
	for {
		if sale := s.sale(url, clusterStock); s.keys.Partition(sale) == partition {
			return newRush(s.shop, url, sale)
		}
	}
}

func (s *clusterShop) slot(partition int) int {
	s.t.Helper()
	return s.operator.Slot(s.keys.Orders(partition))
}

// master is the node of a partition.
func (s *clusterShop) master(partition int) int {
	s.t.Helper()
	return s.operator.Master(s.slot(partition))
}

// sell lets both crowds buy.
func (s *clusterShop) sell(what string) {
	s.t.Helper()
	s.unharmed.allow(clusterStock)
	s.hurt.sell(s.t, 200, what)
}

// survive hurts the partition on the last master while both crowds buy, and waits until its sale continues. Meanwhile
// the other sale goes on, without a rebuild.
func (s *clusterShop) survive(what string, harm func()) {
	s.t.Helper()
	s.sell("orders are accepted before: " + what)
	s.hurt.allow(clusterStock)
	epoch := s.hurt.epoch()
	refused := s.hurt.refusals()
	s.hurt.measure()
	s.unharmed.measure()
	other := s.unharmed.acceptedCount()
	harm()
	testkit.Eventually(s.t, within, "buyers of the hurt sale get 503: "+what, func() bool {
		return s.hurt.refusals() > refused
	})
	testkit.Eventually(s.t, within, "a rebuild: "+what, func() bool { return s.hurt.epoch() > epoch })
	require.Greater(s.t, s.unharmed.acceptedCount(), other, "the other sale goes on: %s", what)
	s.sell("the hurt sale continues: " + what)
	s.t.Logf("%s: dark for %v, the other sale for %v", what, s.hurt.measured(), s.unharmed.measured())
	require.Equal(s.t, 1, s.unharmed.epoch(), "the other sale is not rebuilt: %s", what)
}

// requireKept checks that every accepted order of both sales has a truthful end, and returns how many were voided.
func (s *clusterShop) requireKept() (voided int) {
	s.t.Helper()
	s.hurt.endCrowd()
	s.unharmed.endCrowd()
	s.ends(exitOK, "audit", "--wait=60s")
	require.Zero(s.t, s.unharmed.requireTruth()["voided"], "orders of the sale whose master was not hurt")
	return s.hurt.requireTruth()["voided"]
}

func TestClusterLosesMasters(t *testing.T) {
	t.Parallel()
	s := newClusterShop(t)
	var old int
	s.survive("kill -9 of a master", func() {
		old = s.master(onLastMaster)
		s.cluster.Nodes[old].Kill()
	})
	require.NoError(t, s.cluster.Nodes[old].Restart(t.Context()))
	s.operator.Replica(s.master(onLastMaster)) // the old master, in sync

	s.survive("a master frozen beyond the node time-out", func() {
		old = s.master(onLastMaster)
		s.cluster.Nodes[old].Freeze()
	})
	s.cluster.Nodes[old].Thaw()
	s.operator.Replica(s.master(onLastMaster))
	s.sell("the sale continues after the thaw")

	s.survive("replication cut before the kill", func() {
		old = s.master(onLastMaster)
		replica := s.operator.Client(s.operator.Replica(old))
		s.first.Freeze()
		s.second.Freeze()
		require.NoError(t, replica.ConfigSet(t.Context(), "masteruser", "nobody").Err())
		require.NoError(t, replica.ConfigSet(t.Context(), "masterauth", "wrong").Err())
		require.NoError(t, s.operator.Client(old).Do(t.Context(), "CLIENT", "KILL", "TYPE", "replica").Err())
		s.hurt.sell(t, 100, "orders are accepted that no replica has")
		s.cluster.Nodes[old].Kill()
		s.first.Thaw()
		s.second.Thaw()
	})
	require.Positive(t, s.requireKept(), "voided orders")
}

func TestClusterMovesSlots(t *testing.T) {
	t.Parallel()
	s := newClusterShop(t)
	s.survive("a slot moved key by key", func() {
		s.operator.MoveSlot(s.slot(onLastMaster), s.master(onLastMaster), s.master(onFirstMaster), func() {
			asked := s.hurt.answered()
			testkit.Eventually(t, within, "answers between two keys", func() bool { return s.hurt.answered() > asked+10 })
		})
	})
	s.survive("a quarter of the slots moved", func() {
		const quarter = 4096
		slot := s.slot(onLastMaster)
		first := slot - slot%quarter
		from := s.master(onLastMaster)
		s.operator.MoveSlots(first, first+quarter-1, from, s.master(1))
	})
	require.Zero(t, s.requireKept(), "voided orders")
}

// TestSentinelReplacesMasters kills the master, and the one that replaced it when the first is its replica.
func TestSentinelReplacesMasters(t *testing.T) {
	t.Parallel()
	sentinels := testkit.OwnSentinels(t)
	s := newShop(t)
	s.redisURL = sentinels.URL
	_, url := s.serve()
	r := newRush(s, url, s.sale(url, clusterStock))
	r.pace = clusterPace
	s.worker("worker").Start()
	r.open(t)
	for i, master := range sentinels.Nodes {
		replica := sentinels.Nodes[1-i]
		testkit.Eventually(t, within, "the other node is a replica in sync", func() bool {
			return sentinels.InSync(t.Context(), replica)
		})
		r.sell(t, 200, "orders are accepted before a failover")
		r.allow(clusterStock)
		epoch := r.epoch()
		r.measure()
		master.Kill()
		testkit.Eventually(t, within, "a rebuild", func() bool { return r.epoch() > epoch })
		r.sell(t, 200, "the sale continues")
		t.Logf("failover %d: dark for %v", i+1, r.measured())
		require.NoError(t, master.Restart(t.Context()))
	}
	r.endCrowd()
	s.ends(exitOK, "audit", "--wait=60s")
	r.requireTruth()
}

// TestClusterSellsShardsToTheLastUnit: a master with a shard of the sale dies while the crowd buys.
func TestClusterSellsShardsToTheLastUnit(t *testing.T) {
	t.Parallel()
	const stock = 2000
	sellShards(t, reservation.Terms{Name: "sharded", Stock: stock, Shards: 4})
}

// TestClusterSellsItemsInShardsToTheLastUnit: the same of a sale with items, one of which is rare.
func TestClusterSellsItemsInShardsToTheLastUnit(t *testing.T) {
	t.Parallel()
	sellShards(t, reservation.Terms{Name: "sharded", Stock: 1005, Shards: 4, Items: []reservation.Item{
		{Code: "s", Name: "S", Stock: 5}, {Code: "m", Name: "M", Stock: 600}, {Code: "l", Name: "L", Stock: 400},
	}})
}

func sellShards(t *testing.T, terms reservation.Terms) {
	t.Helper()
	s, cluster, operator := newShopOnCluster(t)
	_, url := s.serve()
	stock := int(terms.Stock)
	r := newRush(s, url, s.createSale(url, terms))
	for _, item := range terms.Items {
		r.items = append(r.items, item.Code)
	}
	for _, name := range []string{"first", "second"} {
		worker := s.worker(name)
		worker.Setenv("STAMPEDE_MIN_IDLE", "3s")
		worker.Start()
	}
	r.open(t)
	r.sell(t, stock/4, "orders are accepted before the kill")
	epoch := r.epoch()
	r.allow(stock)
	cluster.Nodes[operator.Master(operator.Slot(s.keys.Orders(onLastMaster)))].Kill()
	testkit.Eventually(t, within, "a rebuild of the whole sale", func() bool { return r.epoch() > epoch })
	require.Zero(t, r.requireEnds(stock), "voided orders: the replicas had all")
}

// rush is a crowd that buys one sale at an ingress while its servers are destroyed.
type rush struct {
	*shop
	url   string
	sale  uuid.UUID
	items []string // their codes; each buyer wants a unit of one

	mu       sync.Mutex
	accepted []acceptedOrder
	answers  map[int]int // by HTTP status
	// longest is the longest time between two accepted orders since measure was called.
	longest      time.Duration
	lastAccepted time.Time
	// limit bounds the accepted orders, so that the stock is not sold out early in a slow test. Trying counts the running
	// requests. Changed is broadcast when either changes.
	limit, trying int
	changed       *sync.Cond
	// stop ends the crowd.
	stop atomic.Bool
	// pace is the pause of each buyer between two requests.
	pace    time.Duration
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

func newRush(s *shop, url string, sale uuid.UUID) *rush {
	r := &rush{shop: s, url: url, sale: sale, answers: map[int]int{}}
	r.changed = sync.NewCond(&r.mu)
	return r
}

// open starts buyers that run until the end of the test or endCrowd. Each retries with the same key until the answer is
// final. They wait until allow raises the limit.
func (s *rush) open(t *testing.T) {
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
				n := s.buyers.Add(1)
				user, body := "buyer-"+strconv.FormatInt(n, 10), ""
				if len(s.items) > 0 {
					body = fmt.Sprintf(`{"items":{%q:1}}`, s.items[n%int64(len(s.items))])
				}
				for !s.stop.Load() && !s.buy(t, client, user, body) {
					<-time.After(s.pace)
				}
				<-time.After(s.pace)
			}
		})
	}
}

// buy is one try. It returns true if the answer is final.
func (s *rush) buy(t *testing.T, client *http.Client, user, order string) bool {
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/v1/sales/"+s.sale.String()+"/orders",
		strings.NewReader(order))
	if err != nil {
		t.Error(err)
		return true
	}
	r.Header.Set("X-User-ID", user)
	r.Header.Set("Idempotency-Key", "only")
	if order != "" {
		r.Header.Set("Content-Type", "application/json")
	}
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
		now := time.Now()
		s.longest, s.lastAccepted = max(s.longest, now.Sub(s.lastAccepted)), now
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
func (s *rush) enter() bool {
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

func (s *rush) exit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trying--
	s.changed.Broadcast()
}

// allow sets the limit to so many more than the accepted orders, and returns how many those are.
func (s *rush) allow(more int) (accepted int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = len(s.accepted) + more
	s.changed.Broadcast()
	return len(s.accepted)
}

// pause stops the crowd and waits for its running requests.
func (s *rush) pause() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = 0
	for s.trying > 0 {
		s.changed.Wait()
	}
}

// endCrowd ends the crowd and waits for it.
func (s *rush) endCrowd() {
	s.stop.Store(true)
	s.allow(0)
	s.crowd.Wait()
}

// sell waits until more than so many further orders are accepted. The crowd may buy twice as many.
func (s *rush) sell(t *testing.T, more int, what string) {
	t.Helper()
	before := s.allow(2 * more)
	testkit.Eventually(t, within, what, func() bool { return s.acceptedCount() > before+more })
}

// measure begins to measure the longest time between two accepted orders. The crowd must not be limited.
func (s *rush) measure() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.longest, s.lastAccepted = 0, time.Now()
}

// measured is the longest time between two accepted orders since measure.
func (s *rush) measured() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.longest.Round(time.Millisecond)
}

func (s *rush) acceptedCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.accepted)
}

// answered is the number of all answers.
func (s *rush) answered() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, count := range s.answers {
		n += count
	}
	return n
}

func (s *rush) refusals() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answers[http.StatusServiceUnavailable]
}

func (s *rush) epoch() int { return s.count("SELECT epoch FROM sales WHERE id = $1", s.sale) }

// requireEnds waits until all units are sold and checks that every accepted order has a final state. It returns how
// many were voided.
func (s *rush) requireEnds(stock int) (voided int) {
	s.t.Helper()
	s.allow(2 * stock)
	testkit.Eventually(s.t, within, "all units are sold", func() bool {
		return s.count("SELECT sold FROM sales WHERE id = $1", s.sale) == stock
	})
	s.soldOut.Store(false)
	testkit.Eventually(s.t, within, "a buyer gets sold-out", s.soldOut.Load)
	s.endCrowd()
	s.ends(exitOK, "audit", "--wait=60s", "--sale="+s.sale.String())

	ends := s.requireTruth()
	// A buyer without an answer may hold an order, and gets it by a retry.
	assert.LessOrEqual(s.t, ends["confirmed"], stock)
	assert.GreaterOrEqual(s.t, ends["confirmed"], stock-16)
	return ends["voided"]
}

// requireTruth checks, after the end of the crowd and a clean audit, that every accepted order has a final state, which
// its buyer is told. It counts the states.
func (s *rush) requireTruth() (ends map[string]int) {
	s.t.Helper()
	rows, err := s.pool.Query(s.t.Context(), "SELECT id::text, user_id FROM orders WHERE sale_id = $1 AND "+
		"status = 'confirmed'", s.sale)
	require.NoError(s.t, err)
	confirmed := map[string]string{} // order → user
	var id, user string
	_, err = pgx.ForEachRow(rows, []any{&id, &user}, func() error {
		confirmed[id] = user
		return nil
	})
	require.NoError(s.t, err)
	ends = map[string]int{}
	orders := map[string]bool{}
	for _, o := range s.accepted {
		require.False(s.t, orders[o.Order], "one order per buyer")
		orders[o.Order] = true
		if user, recorded := confirmed[o.Order]; recorded {
			require.Equal(s.t, o.user, user)
			ends["confirmed"]++
			continue
		}
		end := ask(s.t, http.MethodGet, s.url+"/v1/orders/"+o.Order+"?receipt="+o.Receipt, o.user, "")
		require.Equal(s.t, "voided", end.Status, "order %s: %+v", o.Order, end)
		ends["voided"]++
	}
	s.t.Logf("%d accepted: %v; answers %v; epoch %d", len(s.accepted), ends, s.answers, s.epoch())
	return ends
}
