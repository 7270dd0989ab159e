package localserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
)

// RedisOptions configures a private Redis.
type RedisOptions struct {
	// Settings add to or replace the defaults, as in redis.conf ("maxmemory": "50mb").
	Settings map[string]string
	// Env adds to the environment of the server ("LD_PRELOAD=…").
	Env []string
}

// Redis is a private Redis server that syncs every write before it answers, and does not evict. Its
// methods are safe for concurrent use.
type Redis struct {
	URL    string
	server *server
}

// StartRedis starts a private Redis and waits until it serves. The server outlives ctx.
func StartRedis(ctx context.Context, o RedisOptions) (*Redis, error) {
	binary, found := findRedis()
	if !found {
		return nil, notInstalled(redisPrograms)
	}
	s, err := newServer("Redis", binary, syscall.SIGTERM)
	if err != nil {
		return nil, err
	}
	s.args = func(port int) []string { return redisArgs(port, o.Settings) }
	s.env = o.Env
	if err := s.start(ctx, freePort); err != nil {
		return nil, err
	}
	r := &Redis{server: s}
	r.URL = "redis://" + r.Addr()
	return r, nil
}

// Addr is the host and the port of the server.
func (r *Redis) Addr() string { return loopback(r.server.port) }

func redisArgs(port int, override map[string]string) []string {
	settings := map[string]string{
		"port":             strconv.Itoa(port),
		"bind":             "127.0.0.1",
		"protected-mode":   "yes",
		"appendonly":       "yes",
		"appendfsync":      "always",
		"save":             "", // the append-only file has everything
		"maxmemory":        "1gb",
		"maxmemory-policy": "noeviction",
	}
	maps.Copy(settings, override)
	var args []string
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "--"+name, settings[name])
	}
	return args
}

// Stop stops the server and removes its data.
func (r *Redis) Stop() { r.server.stop(syscall.SIGTERM) }

// Kill ends the server by SIGKILL and waits for its end. The data stays for Restart.
func (r *Redis) Kill() { r.server.interrupt(syscall.SIGKILL) }

// Freeze suspends the server by SIGSTOP: connections stay open and the kernel accepts new ones, but requests wait. A
// frozen server can be thawed, killed, stopped and restarted.
func (r *Redis) Freeze() { r.server.signal(syscall.SIGSTOP) }

// Thaw resumes a frozen server by SIGCONT.
func (r *Redis) Thaw() { r.server.signal(syscall.SIGCONT) }

// Restart starts the server on the same port and data. A running server is stopped cleanly first.
func (r *Redis) Restart(ctx context.Context) error { return r.server.restart(ctx) }

// Pid is the process id of the server, 0 while it is down.
func (r *Redis) Pid() int { return r.server.pid() }

const (
	sentinelMaster = "mymaster"
	sentinelCount  = 3
)

// Sentinels is a private Redis with a replica, watched by three Sentinels, which replace a master that does not answer
// for a second. Its methods are safe for concurrent use.
type Sentinels struct {
	// URL names the Sentinels.
	URL string
	// Nodes are the first master and its replica. A failover changes the roles.
	Nodes [2]*Redis

	watchers []*server
}

// StartSentinels starts all of them and waits until they serve. The servers outlive ctx. After an error none runs.
func StartSentinels(ctx context.Context) (_ *Sentinels, err error) {
	s := &Sentinels{}
	defer func() {
		if err != nil {
			s.Stop()
		}
	}()
	if s.Nodes[0], err = StartRedis(ctx, RedisOptions{}); err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(s.Nodes[0].Addr())
	if err != nil {
		return nil, err
	}
	if s.Nodes[1], err = StartRedis(ctx, RedisOptions{Settings: map[string]string{
		"replicaof": host + " " + port, "repl-diskless-sync-delay": "0",
	}}); err != nil {
		return nil, err
	}
	addrs := make([]string, sentinelCount)
	for i := range addrs {
		watcher, err := startSentinel(ctx, host, port)
		if err != nil {
			return nil, err
		}
		s.watchers = append(s.watchers, watcher)
		addrs[i] = loopback(watcher.port)
	}
	s.URL = "redis+sentinel://" + strings.Join(addrs, ",") + "/" + sentinelMaster + "/0"
	return s, nil
}

// InSync is true if the node is a replica that is in sync with its master, and the Sentinels know it.
func (s *Sentinels) InSync(ctx context.Context, node *Redis) bool {
	client := redis.NewClient(&redis.Options{Addr: node.Addr()})
	defer func() { _ = client.Close() }()
	if !strings.Contains(client.Info(ctx, "replication").Val(), "master_link_status:up") {
		return false
	}
	for _, watcher := range s.watchers {
		sentinel := redis.NewSentinelClient(&redis.Options{Addr: loopback(watcher.port)})
		replicas, err := sentinel.Replicas(ctx, sentinelMaster).Result()
		_ = sentinel.Close()
		if err != nil || !slices.ContainsFunc(replicas, func(replica map[string]string) bool {
			return net.JoinHostPort(replica["ip"], replica["port"]) == node.Addr() && replica["flags"] == "slave"
		}) {
			return false
		}
	}
	return true
}

// WatcherURLs are the URLs of the Sentinels themselves.
func (s *Sentinels) WatcherURLs() []string {
	urls := make([]string, len(s.watchers))
	for i, watcher := range s.watchers {
		urls[i] = "redis://" + loopback(watcher.port)
	}
	return urls
}

// startSentinel starts one Sentinel.
func startSentinel(ctx context.Context, masterHost, masterPort string) (*server, error) {
	binary, _ := findRedis() // the master runs
	s, err := newServer("Redis Sentinel", binary, syscall.SIGTERM)
	if err != nil {
		return nil, err
	}
	config := filepath.Join(s.folder.path, "sentinel.conf")
	text := fmt.Sprintf("bind 127.0.0.1\n"+
		"sentinel monitor %[1]s %[2]s %[3]s %[4]d\n"+
		"sentinel down-after-milliseconds %[1]s 1000\n"+
		"sentinel failover-timeout %[1]s 5000\n",
		sentinelMaster, masterHost, masterPort, sentinelCount/2+1)
	if err = os.WriteFile(config, []byte(text), 0o600); err == nil {
		err = s.account.own(config) // a Sentinel writes what it learns there
	}
	if err != nil {
		s.folder.remove()
		return nil, err
	}
	s.readyMark = sentinelReadyMark
	s.args = func(port int) []string { return []string{config, "--sentinel", "--port", fmt.Sprint(port)} }
	return s, s.start(ctx, freePort)
}

// Stop stops all servers and removes their data.
func (s *Sentinels) Stop() {
	for _, watcher := range s.watchers {
		watcher.stop(syscall.SIGKILL)
	}
	for _, node := range s.Nodes {
		if node != nil {
			node.Stop()
		}
	}
}

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
