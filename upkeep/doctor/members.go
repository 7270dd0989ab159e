package doctor

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const clusterSlots = 16384

// nodeTimeout bounds what one node of a cluster is asked.
const nodeTimeout = time.Second

// view is a cluster as one of its nodes sees it: its masters, each with its replicas and slots. It is nil if no node
// shows it, because an ACL forbids that.
type view []redis.ClusterShard

// uncovered returns the slots that no working master has.
func (v view) uncovered() (missing []redis.SlotRange) {
	var covered [clusterSlots]bool
	for _, shard := range v {
		for _, n := range shard.Nodes {
			if n.Role != "master" || hasFailed(n) {
				continue
			}
			for _, r := range shard.Slots {
				for slot := max(0, r.Start); slot <= min(r.End, clusterSlots-1); slot++ {
					covered[slot] = true
				}
			}
		}
	}
	for slot, is := range covered {
		switch last := len(missing) - 1; {
		case is:
		case last >= 0 && missing[last].End == int64(slot)-1:
			missing[last].End = int64(slot)
		default:
			missing = append(missing, redis.SlotRange{Start: int64(slot), End: int64(slot)})
		}
	}
	return missing
}

// hasFailed is true if the majority of the masters agree that the node has failed.
func hasFailed(n redis.Node) bool { return n.Health == "fail" || n.Health == "failed" }

// addresses returns the address of each node by its id. A node may have two ports: it is the one for TLS if that of
// another node is in use.
func (v view) addresses(inUse map[string]*redis.Options) map[string]string {
	secure := false
	at := func(n redis.Node, port int64) string {
		host := n.Endpoint
		if host == "" || host == "?" {
			host = n.IP
		}
		return net.JoinHostPort(host, strconv.FormatInt(port, 10))
	}
	for _, shard := range v {
		for _, n := range shard.Nodes {
			secure = secure || n.TLSPort > 0 && inUse[at(n, n.TLSPort)] != nil
		}
	}
	addrs := map[string]string{}
	for _, shard := range v {
		for _, n := range shard.Nodes {
			if addrs[n.ID] = at(n, n.Port); secure || n.Port == 0 {
				addrs[n.ID] = at(n, n.TLSPort)
			}
		}
	}
	return addrs
}

// seenCluster is a cluster with the options of a client for each of its nodes, by address.
type seenCluster struct {
	view
	addrs map[string]string // by the id of a node of the view
	nodes map[string]*redis.Options
}

// lookAt asks all nodes that the client knows how they see the cluster. It takes the view that misses the fewest slots,
// because a node that was cut off or frozen misses others. It adds nodes that the client does not know, as new
// replicas. It fails if no node answers the client.
func lookAt(ctx context.Context, c *redis.ClusterClient) (seenCluster, error) {
	seen := seenCluster{nodes: map[string]*redis.Options{}}
	var mu sync.Mutex
	fewest := int64(clusterSlots + 1)
	err := c.ForEachShard(ctx, func(ctx context.Context, node *redis.Client) error {
		ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
		defer cancel()
		shards, err := node.ClusterShards(ctx).Result()
		mu.Lock()
		defer mu.Unlock()
		seen.nodes[node.Options().Addr] = node.Options()
		var missing int64
		for _, r := range view(shards).uncovered() {
			missing += r.End - r.Start + 1
		}
		if err == nil && missing < fewest {
			seen.view, fewest = shards, missing
		}
		return nil
	})
	if err != nil {
		return seenCluster{}, err
	}
	seen.addrs = seen.view.addresses(seen.nodes)
	for _, options := range seen.nodes {
		for _, addr := range seen.addrs {
			if seen.nodes[addr] == nil {
				o := *options
				o.Addr = addr
				seen.nodes[addr] = &o
			}
		}
		break // they differ in the address only
	}
	return seen, nil
}

// each calls do for each node, at the same time, with a time-out for each.
func (s seenCluster) each(ctx context.Context, do func(ctx context.Context, addr string, node *redis.Client)) {
	var asking sync.WaitGroup
	for addr, options := range s.nodes {
		asking.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
			defer cancel()
			o := *options
			node := redis.NewClient(&o)
			defer func() { _ = node.Close() }()
			do(ctx, addr, node)
		})
	}
	asking.Wait()
}

func rangeText(r redis.SlotRange) string {
	if r.Start == r.End {
		return strconv.FormatInt(r.Start, 10)
	}
	return fmt.Sprintf("%d-%d", r.Start, r.End)
}
