package doctor

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/reservation"
)

// checkCluster checks each node, and the cluster as a whole. It fails only if no node answers.
func checkCluster(
	ctx context.Context, c *redis.ClusterClient, rights reservation.Rights,
) ([]Finding, error) {
	seen, err := lookAt(ctx, c)
	var nodes []nodeAnswers
	if err == nil {
		nodes, err = readNodes(ctx, c, seen, rights)
	}
	if err != nil && strings.Contains(err.Error(), "cluster support disabled") {
		return []Finding{serverAsCluster(c)}, nil
	} else if err != nil {
		return nil, fmt.Errorf("read INFO of Redis: %w", err)
	}
	found := seen.findings()
	for _, n := range nodes {
		found = append(found, n.run(ofClusterNodes)...)
	}
	failed := seen.failed()
	for _, n := range nodes {
		switch {
		case n.err != nil && !failed[n.node]:
			found = append(found, Finding{
				Severity: Away, Server: "redis", Node: n.node, What: n.err.Error(),
				Why:  "while a master does not answer, nothing is sold from its partitions",
				Mend: "start the node, or wait until a replica has replaced it",
			})
		case n.err != nil: // its failure is a finding of the cluster
		case n.info["role"] == "master":
			found = append(found, n.run(ofMasters, ofRedis)...)
		default:
			found = append(found, n.run(ofRedis)...)
		}
	}
	return merged(found), nil
}

// merged joins the nodes with the same finding.
func merged(found []Finding) (all []Finding) {
	at := map[Finding]int{}
	for _, f := range found {
		same := f
		same.Node = ""
		if i, known := at[same]; known {
			all[i].Node += ", " + f.Node
			continue
		}
		at[same] = len(all)
		all = append(all, f)
	}
	return all
}

// nodeAnswers are what a node of a cluster answered.
type nodeAnswers struct {
	redisServer
	err error
}

// readNodes returns the answers of all nodes, sorted by address. It fails if none answers.
func readNodes(
	ctx context.Context, c *redis.ClusterClient, seen seenCluster, rights reservation.Rights,
) ([]nodeAnswers, error) {
	var mu sync.Mutex
	var nodes []nodeAnswers
	partitions := partitionsByMaster(ctx, c)
	seen.each(ctx, func(ctx context.Context, addr string, node *redis.Client) {
		n := nodeAnswers{}
		n.redisServer, n.err = readNode(ctx, node, partitions[addr], rights)
		n.node = addr
		mu.Lock()
		defer mu.Unlock()
		nodes = append(nodes, n)
	})
	slices.SortFunc(nodes, func(a, b nodeAnswers) int { return cmp.Compare(a.node, b.node) })
	var err error
	for _, n := range nodes {
		if err = n.err; err == nil {
			break
		}
	}
	return nodes, err
}

// readNode reads one node. Partitions are the partitions of a master.
func readNode(
	ctx context.Context, node *redis.Client, partitions []int, rights reservation.Rights,
) (redisServer, error) {
	text, err := node.Info(ctx).Result()
	if err != nil {
		return redisServer{}, fmt.Errorf("read INFO of Redis: %w", err)
	}
	r, err := readServer(ctx, node, parseInfo(text))
	if err != nil || r.info["role"] != "master" || len(partitions) == 0 {
		return r, err
	}
	r.missing, err = rights.Missing(ctx, node, doctorKeys, partitions[0], true)
	if redis.HasErrorPrefix(err, "MOVED") {
		err = nil // the partition has just moved
	}
	r.refusal = reservation.TryWrite(ctx, node, doctorKeys, partitions[0])
	if known, err := node.ClusterNodes(ctx).Result(); err == nil { // a missing right is a finding of its own
		r.moving = movingIn(known)
	}
	return r, err
}

// movingIn returns the slots that move, of the line about the node that answered CLUSTER NODES.
func movingIn(known string) (slots []string) {
	for line := range strings.Lines(known) {
		fields := strings.Fields(line)
		if len(fields) < 8 || !slices.Contains(strings.Split(fields[2], ","), "myself") {
			continue
		}
		for _, field := range fields[8:] {
			slot, to, migrates := strings.Cut(strings.Trim(field, "[]"), "->-")
			if migrates {
				slots = append(slots, slot+" to "+to)
			} else if slot, from, imports := strings.Cut(slot, "-<-"); imports {
				slots = append(slots, slot+" from "+from)
			}
		}
	}
	return slots
}

// partitionsByMaster returns which partitions lie on each master, by its address.
func partitionsByMaster(ctx context.Context, c *redis.ClusterClient) map[string][]int {
	on := map[string][]int{}
	for p := range doctorKeys.Partitions {
		if master, err := c.MasterForKey(ctx, doctorKeys.Server(p)); err == nil {
			addr := master.Options().Addr
			on[addr] = append(on[addr], p)
		}
	}
	return on
}

// failed returns the addresses of the nodes that have failed.
func (s seenCluster) failed() map[string]bool {
	failed := map[string]bool{}
	for _, shard := range s.view {
		for _, n := range shard.Nodes {
			failed[s.addrs[n.ID]] = hasFailed(n)
		}
	}
	return failed
}

// findings checks the cluster as its nodes see it.
func (s seenCluster) findings() (all []Finding) {
	add := func(severity Severity, node, what, why, mend string) {
		all = append(all, Finding{Severity: severity, Server: "redis", Node: node, What: what, Why: why, Mend: mend})
	}
	if s.view == nil {
		add(Unchecked, "", "the cluster does not show its nodes (CLUSTER SHARDS is refused)",
			"slots without a master, and masters without a replica, are not found", "allow CLUSTER SHARDS to the user in REDIS_URL")
		return all
	}
	if missing := s.uncovered(); len(missing) > 0 {
		texts := make([]string, len(missing))
		for i, r := range missing {
			texts[i] = rangeText(r)
		}
		add(Unsafe, "", "slots have no master: "+strings.Join(texts, ", "), "nothing is sold from their partitions",
			"start the master again, or promote a replica of it (CLUSTER FAILOVER TAKEOVER); slots that no node has: "+
				"redis-cli --cluster fix")
	}
	masters := 0
	for _, shard := range s.view {
		var master string
		replicas := 0
		for _, n := range shard.Nodes {
			addr := s.addrs[n.ID]
			switch {
			case hasFailed(n):
				add(Warning, addr, "the node has failed", "a master that lost its replicas has none to replace it",
					"start the node, or remove it (CLUSTER FORGET)")
			case n.Role == "master":
				master = addr
			default:
				replicas++
			}
		}
		if master == "" || len(shard.Slots) == 0 {
			continue
		}
		if masters++; replicas == 0 {
			add(Warning, master, "the master has no replica", "if it is lost, nothing is sold from its partitions until it is back",
				"add a replica (redis-cli --cluster add-node … --cluster-slave)")
		}
	}
	if masters < 3 {
		add(Warning, "", fmt.Sprintf("working masters with slots: %d", masters),
			"a replica needs the votes of a majority of the masters: with fewer than three it does not replace a lost one",
			"spread the slots over at least three masters")
	}
	return all
}

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
