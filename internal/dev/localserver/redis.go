package localserver

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/redis/go-redis/v9"
)

// RedisOptions configures a private Redis.
type RedisOptions struct {
	// Settings add to or replace the defaults, as in redis.conf ("maxmemory": "50mb").
	Settings map[string]string
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
