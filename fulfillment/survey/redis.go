package survey

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
)

// redisServer is what INFO of a server says.
type redisServer struct {
	node string
	up   bool

	usedBytes, maxBytes float64
	// logged is true if the append-only file is on and its last write succeeded.
	logged        bool
	delayedFsyncs float64
}

// readServers reads INFO of the server, or of each master of a cluster. A server that does not answer is not up.
func readServers(ctx context.Context, rdb redis.UniversalClient) []redisServer {
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	var mu sync.Mutex
	var servers []redisServer
	read := func(client *redis.Client) {
		text, err := client.Info(ctx, "memory", "persistence").Result()
		s := serverOf(client.Options().Addr, text, err)
		mu.Lock()
		defer mu.Unlock()
		servers = append(servers, s)
	}
	switch client := rdb.(type) {
	case *redis.Client:
		read(client)
	case *redis.ClusterClient:
		_ = client.ForEachMaster(ctx, func(_ context.Context, master *redis.Client) error {
			read(master)
			return nil
		})
	}
	slices.SortFunc(servers, func(x, y redisServer) int { return strings.Compare(x.node, y.node) })
	// The addresses of a cluster in trouble may name a master twice.
	return slices.CompactFunc(servers, func(x, y redisServer) bool { return x.node == y.node })
}

func serverOf(node, info string, err error) redisServer {
	s := redisServer{node: node}
	if answered := redis.Error(nil); err != nil {
		s.up = errors.As(err, &answered) // it loads its data, or refuses INFO
		return s
	}
	values := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, found := strings.Cut(strings.TrimSpace(line), ":"); found {
			values[name] = value
		}
	}
	number := func(name string) float64 {
		n, _ := strconv.ParseFloat(values[name], 64) // 0 for one that is missing
		return n
	}
	s.up = true
	s.usedBytes, s.maxBytes = number("used_memory"), number("maxmemory")
	s.logged = values["aof_enabled"] == "1" && values["aof_last_write_status"] != "err"
	s.delayedFsyncs = number("aof_delayed_fsync")
	return s
}
