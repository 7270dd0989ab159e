package localserver

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/redis/go-redis/v9"
)

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
