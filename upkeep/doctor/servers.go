package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// Servers returns the servers and their versions: "Redis 7.0.15, PostgreSQL 15.13". A server that does
// not answer has no version.
func Servers(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool) string {
	names := []string{"Redis", "PostgreSQL"}
	if client, isCluster := rdb.(*redis.ClusterClient); isCluster {
		names[0] = clusterName(ctx, client)
	} else if text, err := rdb.Info(ctx, "server").Result(); err == nil {
		names[0] = redisName(parseInfo(text))
	}
	var version string
	if err := pool.QueryRow(ctx, "SHOW server_version").Scan(&version); err == nil {
		version, _, _ = strings.Cut(version, " ") // cut the name of the package
		names[1] += " " + version
	}
	return strings.Join(names, ", ")
}

func redisName(info map[string]string) string {
	if version := info["valkey_version"]; version != "" { // its redis_version is that of the compatible Redis
		return "Valkey " + version
	}
	return "Redis " + info["redis_version"]
}

// clusterName names the versions of the nodes that answer, and the numbers of these nodes.
func clusterName(ctx context.Context, c *redis.ClusterClient) string {
	seen, err := lookAt(ctx, c)
	if err != nil {
		return "Redis"
	}
	var mu sync.Mutex
	var versions []string
	masters, replicas := 0, 0
	seen.each(ctx, func(ctx context.Context, _ string, node *redis.Client) {
		text, err := node.Info(ctx, "server", "replication").Result()
		if err != nil {
			return
		}
		info := parseInfo(text)
		mu.Lock()
		defer mu.Unlock()
		if name := redisName(info); !slices.Contains(versions, name) {
			versions = append(versions, name)
		}
		if info["role"] == "master" {
			masters++
		} else {
			replicas++
		}
	})
	if len(versions) == 0 {
		return "Redis"
	}
	slices.Sort(versions)
	return fmt.Sprintf("%s (cluster; masters: %d, replicas: %d)", strings.Join(versions, " and "), masters, replicas)
}
