package testkit

import (
	"bytes"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
)

// ClusterOperator changes a cluster as its operators do. It belongs to one goroutine.
type ClusterOperator struct {
	t       testing.TB
	cluster *localserver.Cluster
	clients []*redis.Client // of the nodes, in their order
	ids     []string
}

// Operate returns an operator, whose connections end with the test. All nodes must answer.
func Operate(t testing.TB, cluster *localserver.Cluster) *ClusterOperator {
	t.Helper()
	o := &ClusterOperator{t: t, cluster: cluster}
	for _, node := range cluster.Nodes {
		client := redis.NewClient(&redis.Options{
			Addr: node.Addr(), DialerRetries: 1, MaxRetries: -1, ReadTimeout: time.Second, WriteTimeout: 10 * time.Second,
		})
		t.Cleanup(func() { _ = client.Close() })
		id, err := client.ClusterMyID(t.Context()).Result()
		if err != nil {
			t.Fatal(err)
		}
		o.clients, o.ids = append(o.clients, client), append(o.ids, id)
	}
	return o
}

// Client is a client of one node.
func (o *ClusterOperator) Client(node int) *redis.Client { return o.clients[node] }

// Slot is the slot of a key.
func (o *ClusterOperator) Slot(key string) int {
	o.t.Helper()
	slot, err := o.clients[0].ClusterKeySlot(o.t.Context(), key).Result()
	if err != nil {
		o.t.Fatal(err)
	}
	return int(slot)
}

// Master is the node that serves a slot, as one of the other masters sees it. It waits until there is one.
func (o *ClusterOperator) Master(slot int) (node int) {
	o.t.Helper()
	Eventually(o.t, 30*time.Second, "a master of the slot", func() bool {
		for _, client := range o.clients {
			shards, err := client.ClusterShards(o.t.Context()).Result()
			if err != nil {
				continue
			}
			for _, shard := range shards {
				for _, r := range shard.Slots {
					if r.Start <= int64(slot) && int64(slot) <= r.End {
						node = o.masterIn(shard)
						return node >= 0 && o.isMaster(node)
					}
				}
			}
		}
		return false
	})
	return node
}

func (o *ClusterOperator) masterIn(shard redis.ClusterShard) (node int) {
	for _, n := range shard.Nodes {
		if n.Role == "master" && n.Health == "online" {
			return slices.Index(o.ids, n.ID)
		}
	}
	return -1
}

func (o *ClusterOperator) isMaster(node int) bool {
	role, err := o.clients[node].Do(o.t.Context(), "ROLE").Slice()
	return err == nil && role[0] == "master"
}

// Replica is a node that replicates a master.
func (o *ClusterOperator) Replica(master int) (node int) {
	o.t.Helper()
	Eventually(o.t, 30*time.Second, "a replica in sync", func() bool {
		for i, client := range o.clients {
			role, err := client.Do(o.t.Context(), "ROLE").Slice()
			if err != nil || role[0] != "slave" {
				continue
			}
			_, port, err := net.SplitHostPort(o.cluster.Nodes[master].Addr())
			if err == nil && role[3] == "connected" && port == portText(role[2]) {
				node = i
				return true
			}
		}
		return false
	})
	return node
}

func portText(v any) string {
	n, _ := v.(int64)
	return (&net.TCPAddr{Port: int(n)}).String()[1:]
}

// MoveSlot moves a slot to another master key by key, as redis-cli does, and calls between after each key.
func (o *ClusterOperator) MoveSlot(slot, from, to int, between func()) {
	o.t.Helper()
	ctx := o.t.Context()
	host, port, err := net.SplitHostPort(o.cluster.Nodes[to].Addr())
	must := func(err error) {
		o.t.Helper()
		if err != nil {
			o.t.Fatalf("move slot %d: %v", slot, err)
		}
	}
	must(err)
	must(o.clients[to].Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", o.ids[from]).Err())
	must(o.clients[from].Do(ctx, "CLUSTER", "SETSLOT", slot, "MIGRATING", o.ids[to]).Err())
	for {
		keys, err := o.clients[from].ClusterGetKeysInSlot(ctx, slot, 1).Result()
		must(err)
		if len(keys) == 0 {
			break
		}
		must(o.clients[from].Migrate(ctx, host, port, keys[0], 0, 5*time.Second).Err())
		between()
	}
	o.own(slot, slot, from, to)
}

// MoveSlots moves a range of slots to another master. Only the slots of keys are moved key by key.
func (o *ClusterOperator) MoveSlots(first, last, from, to int) {
	o.t.Helper()
	empty := first
	for slot := first; slot <= last; slot++ {
		n, err := o.clients[from].ClusterCountKeysInSlot(o.t.Context(), slot).Result()
		if err != nil {
			o.t.Fatal(err)
		}
		if n == 0 {
			continue
		}
		o.own(empty, slot-1, from, to)
		o.MoveSlot(slot, from, to, func() {})
		empty = slot + 1
	}
	o.own(empty, last, from, to)
}

// own assigns slots without keys to a master: there first, then at the other masters. A slot that is imported gets a
// new epoch, so that it overrides what the former master announces.
func (o *ClusterOperator) own(first, last, from, to int) {
	o.t.Helper()
	assign := func(node int, imported bool) error {
		ctx := o.t.Context()
		pipe := o.clients[node].Pipeline()
		for slot := first; slot <= last; slot++ {
			if imported {
				pipe.Do(ctx, "CLUSTER", "SETSLOT", slot, "IMPORTING", o.ids[from])
			}
			pipe.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", o.ids[to])
		}
		if pipe.Len() == 0 {
			return nil
		}
		_, err := pipe.Exec(ctx)
		return err
	}
	errs := []error{assign(to, true)}
	for node := range o.clients {
		if node != to && o.isMaster(node) {
			errs = append(errs, assign(node, false))
		}
	}
	if err := errors.Join(errs...); err != nil {
		o.t.Fatalf("assign slots %d to %d: %v", first, last, err)
	}
}

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
