package doctor

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// The URL must fit the kind of the server.

// sentinelAsServer is the finding for redis:// with the address of a Sentinel, whose INFO names the masters.
func sentinelAsServer(rdb redis.UniversalClient, info map[string]string) Finding {
	names := []string{}
	for field, value := range info {
		if _, isMaster := strings.CutPrefix(field, "master"); !isMaster {
			continue
		}
		if name, found := strings.CutPrefix(value, "name="); found {
			name, _, _ = strings.Cut(name, ",")
			names = append(names, name)
		}
	}
	slices.Sort(names)
	if len(names) == 0 {
		names = append(names, "MASTER-NAME")
	}
	return Finding{
		Severity: Unsafe, Server: "redis", What: "REDIS_URL names a Sentinel",
		Why: "a Sentinel holds no data: nothing is sold",
		Mend: "set REDIS_URL to redis+sentinel://" + rdb.(*redis.Client).Options().Addr + "/" + strings.Join(names, " or ") +
			"/0, with the addresses of the other Sentinels behind commas",
	}
}

// clusterAsServer is the finding for redis:// with the address of a node of a cluster.
func clusterAsServer(ctx context.Context, rdb redis.UniversalClient) Finding {
	own := rdb.(*redis.Client).Options()
	addrs := []string{}
	if shards, err := rdb.ClusterShards(ctx).Result(); err == nil {
		addrs = slices.AppendSeq(addrs, maps.Values(view(shards).addresses(map[string]*redis.Options{own.Addr: own})))
	}
	if len(addrs) == 0 {
		addrs = append(addrs, own.Addr)
	}
	slices.Sort(addrs)
	return Finding{
		Severity: Unsafe, Server: "redis", What: "REDIS_URL names a node of a cluster",
		Why:  "stampede takes it for a server of its own; commands for keys of other nodes fail with MOVED",
		Mend: "set REDIS_URL to redis+cluster://" + strings.Join(addrs, ",") + ", with the same user and password",
	}
}

// serverAsCluster is the finding for redis+cluster:// with the address of a server without cluster mode.
func serverAsCluster(c *redis.ClusterClient) Finding {
	return Finding{
		Severity: Unsafe, Server: "redis", What: "REDIS_URL is of a cluster, and its server has cluster mode off",
		Why: "no command is sent, and nothing is sold",
		Mend: "set REDIS_URL to redis://" + c.Options().Addrs[0] + "/0, with the same user and password, or to the nodes " +
			"of a cluster",
	}
}
