package localserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
)

const (
	clusterSlots = 16384
	// joinWithin bounds how long the nodes of a cluster may take to agree, and joinLook how often they are asked.
	joinWithin = 30 * time.Second
	joinLook   = 20 * time.Millisecond
)

// ClusterOptions configures a private cluster.
type ClusterOptions struct {
	// Masters is the number of masters, which have equal shares of the slots; Replicas the number for each of them.
	Masters, Replicas int
	// Certificate and Key are files in PEM. With them the URL is for TLS.
	Certificate, Key string
}

// Cluster is a private Redis Cluster. A master that does not answer for two seconds is replaced by one of its
// replicas, and slots without a master do not stop the others. Its methods are safe for concurrent use.
type Cluster struct {
	// URL names all nodes.
	URL string
	// Nodes are the masters, in the order of their slots, and then the replicas: node Masters + r×Masters + m is a
	// replica of master m. A failover changes the roles.
	Nodes []*Redis
}

// StartCluster starts a cluster and waits until every node serves and every replica is in sync. The servers outlive
// ctx. After an error none runs.
func StartCluster(ctx context.Context, o ClusterOptions) (_ *Cluster, err error) {
	c := &Cluster{Nodes: make([]*Redis, o.Masters*(1+o.Replicas))}
	defer func() {
		if err != nil {
			c.Stop()
		}
	}()
	buses, addrs := make([]int, len(c.Nodes)), make([]string, len(c.Nodes))
	starting, startCtx := errgroup.WithContext(ctx)
	for i := range c.Nodes {
		starting.Go(func() (err error) {
			c.Nodes[i], buses[i], addrs[i], err = startNode(startCtx, o)
			return err
		})
	}
	if err := starting.Wait(); err != nil {
		return nil, err
	}
	clients := make([]*redis.Client, len(c.Nodes))
	for i, node := range c.Nodes {
		clients[i] = redis.NewClient(&redis.Options{Addr: node.Addr()})
		defer func() { _ = clients[i].Close() }()
	}
	if err := formCluster(ctx, clients, buses, o.Masters); err != nil {
		return nil, fmt.Errorf("form a Redis Cluster: %w", err)
	}
	scheme := "redis"
	if o.Certificate != "" {
		scheme = "rediss"
	}
	c.URL = scheme + "+cluster://" + strings.Join(addrs, ",")
	return c, nil
}

// startNode starts a node without slots. Its bus is the port for the other nodes, and addr is for clients. StartRedis
// tries other ports for itself if one is taken, and startNode others for the bus.
func startNode(ctx context.Context, o ClusterOptions) (node *Redis, bus int, addr string, err error) {
	err = errPortTaken
	for tries := 0; tries < portTries && errors.Is(err, errPortTaken); tries++ {
		node, bus, addr, err = tryNode(ctx, o)
	}
	return node, bus, addr, err
}

func tryNode(ctx context.Context, o ClusterOptions) (node *Redis, bus int, addr string, err error) {
	bus, err = freePort()
	if err != nil {
		return nil, 0, "", err
	}
	settings := map[string]string{
		"cluster-enabled":               "yes",
		"cluster-port":                  strconv.Itoa(bus),
		"cluster-node-timeout":          "2000",
		"cluster-require-full-coverage": "no",
		"repl-diskless-sync-delay":      "0",
	}
	if o.Certificate != "" {
		port, err := freePort()
		if err != nil {
			return nil, 0, "", err
		}
		settings["tls-port"], settings["tls-cluster"] = strconv.Itoa(port), "yes"
		settings["tls-cert-file"], settings["tls-key-file"] = o.Certificate, o.Key
		settings["tls-ca-cert-file"], settings["tls-auth-clients"] = o.Certificate, "no"
		addr = loopback(port)
	}
	node, err = StartRedis(ctx, RedisOptions{Settings: settings})
	if err == nil && addr == "" {
		addr = node.Addr()
	}
	return node, bus, addr, err
}

// formCluster gives the slots to the first nodes and makes the others their replicas.
func formCluster(ctx context.Context, nodes []*redis.Client, buses []int, masters int) error {
	ctx, cancel := context.WithTimeout(ctx, joinWithin)
	defer cancel()
	for m, node := range nodes[:masters] {
		if err := node.ClusterAddSlotsRange(ctx, m*clusterSlots/masters, (m+1)*clusterSlots/masters-1).Err(); err != nil {
			return err
		}
	}
	for i, node := range nodes[1:] {
		host, port, err := net.SplitHostPort(node.Options().Addr)
		if err != nil {
			return err
		}
		if err := nodes[0].Do(ctx, "CLUSTER", "MEET", host, port, buses[i+1]).Err(); err != nil {
			return err
		}
	}
	if err := awaitEach(ctx, nodes, func(node *redis.Client) bool {
		return strings.Contains(node.ClusterInfo(ctx).Val(), fmt.Sprintf("cluster_known_nodes:%d\r", len(nodes)))
	}); err != nil {
		return err
	}
	for i, node := range nodes[masters:] {
		id, err := nodes[i%masters].ClusterMyID(ctx).Result()
		if err != nil {
			return err
		}
		if err := node.ClusterReplicate(ctx, id).Err(); err != nil {
			return err
		}
	}
	return awaitEach(ctx, nodes, func(node *redis.Client) bool {
		info := node.Info(ctx, "replication").Val()
		return strings.Contains(node.ClusterInfo(ctx).Val(), "cluster_state:ok") &&
			knowsAll(ctx, node, masters, len(nodes)) &&
			(strings.Contains(info, "role:master") || strings.Contains(info, "master_link_status:up"))
	})
}

// knowsAll reports whether the node knows all masters, which nodes are their replicas, and who has each slot. A
// cluster_state of ok does not say the last: such a node serves its own slots without the others.
func knowsAll(ctx context.Context, node *redis.Client, masters, nodes int) bool {
	shards, err := node.ClusterShards(ctx).Result()
	if err != nil || len(shards) != masters {
		return false
	}
	slots := 0
	for _, shard := range shards {
		if len(shard.Nodes) != nodes/masters {
			return false
		}
		for _, known := range shard.Slots {
			slots += int(known.End-known.Start) + 1
		}
	}
	return slots == clusterSlots
}

// awaitEach waits until the condition holds for each node.
func awaitEach(ctx context.Context, nodes []*redis.Client, holds func(*redis.Client) bool) error {
	for _, node := range nodes {
		for !holds(node) {
			select {
			case <-time.After(joinLook):
			case <-ctx.Done():
				return errors.Join(errors.New("the nodes do not agree"), ctx.Err())
			}
		}
	}
	return nil
}

// watch returns nil when ctx ends, or an error when a majority of the nodes has ended: developers may kill some.
func (c *Cluster) watch(ctx context.Context) error {
	ended := make(chan error, len(c.Nodes))
	for _, node := range c.Nodes {
		go func() { ended <- node.server.watch(ctx) }()
	}
	most := len(c.Nodes)/2 + 1
	for range c.Nodes {
		if err := <-ended; err != nil {
			if most--; most == 0 {
				return err
			}
		}
	}
	return nil
}

// Stop stops all nodes and removes their data.
func (c *Cluster) Stop() {
	var stopping errgroup.Group
	for _, node := range c.Nodes {
		if node != nil {
			stopping.Go(func() error {
				node.Stop()
				return nil
			})
		}
	}
	_ = stopping.Wait() // always nil
}
