package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/format"
	"stampede/reservation"
	"stampede/sql"
)

// Redis checks the server behind rdb, or each node of a cluster. It fails only if no server answers.
func Redis(ctx context.Context, rdb redis.UniversalClient, rights reservation.Rights) ([]Finding, error) {
	if client, isCluster := rdb.(*redis.ClusterClient); isCluster {
		return checkCluster(ctx, client, rights)
	}
	text, err := rdb.Info(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("read INFO of Redis: %w", err)
	}
	info := parseInfo(text)
	switch {
	case info["redis_mode"] == "sentinel":
		return []Finding{sentinelAsServer(rdb, info)}, nil
	case info["redis_mode"] == "cluster" || info["cluster_enabled"] == "1":
		return []Finding{clusterAsServer(ctx, rdb)}, nil
	}
	r, err := readServer(ctx, rdb, info)
	if err == nil {
		r.missing, err = rights.Missing(ctx, rdb, doctorKeys, 0, false)
		r.refusal = reservation.TryWrite(ctx, rdb, doctorKeys, 0)
	}
	if err != nil {
		return nil, err
	}
	return r.run(ofMasters, ofRedis), nil
}

// doctorKeys are keys of the partitions. The prefix does not matter for their slots.
var doctorKeys = reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: reservation.MaxPartitions}

// readServer adds the settings that are not in INFO.
func readServer(ctx context.Context, rdb redis.UniversalClient, info map[string]string) (redisServer, error) {
	r := redisServer{info: info, config: make(map[string]string)}
	for _, name := range []string{
		"appendfsync", "no-appendfsync-on-rewrite", "min-replicas-to-write", "timeout", "cluster-require-full-coverage",
		"cluster-node-timeout",
	} {
		// Managed servers forbid CONFIG. Settings that are not in INFO are then unchecked.
		if got, err := rdb.ConfigGet(ctx, name).Result(); err == nil {
			r.config[name] = got[name]
		}
	}
	return r, ctx.Err()
}

// redisServer holds the values that a server reports. Unknown settings are absent.
type redisServer struct {
	// node is the address of a node of a cluster; empty for a server of its own.
	node         string
	info, config map[string]string
	missing      []string // commands that the user may not run or the server lacks
	refusal      error    // of a write as a purchase makes it
	moving       []string // the slots of a node of a cluster that move from it or to it
}

func parseInfo(text string) map[string]string {
	info := make(map[string]string)
	for line := range strings.Lines(text) {
		if name, value, found := strings.Cut(strings.TrimSpace(line), ":"); found {
			info[name] = value
		}
	}
	return info
}

// bytesPerUnit is the memory of an accepted order in Redis until a worker has written it, if each order has one unit.
const bytesPerUnit = 500

// Memory checks that Redis has room for the orders of all units on sale, or of one sale unless it is uuid.Nil. In a
// cluster it checks each master, with the sales of its partitions. It fails if a server does not answer, or with
// reservation.ErrSaleNotFound.
func Memory(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool, sale uuid.UUID) ([]Finding, error) {
	units, err := unitsByPartition(ctx, pool, sale)
	if err != nil {
		return nil, err
	}
	client, isCluster := rdb.(*redis.ClusterClient)
	if !isCluster {
		var all int64
		for _, n := range units {
			all += n
		}
		text, err := rdb.Info(ctx, "memory").Result()
		if err != nil {
			return nil, fmt.Errorf("read INFO of Redis: %w", err)
		}
		return roomFor(all, "", parseInfo(text)), nil
	}
	seen, err := lookAt(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("read INFO of Redis: %w", err)
	}
	var found []Finding
	var failed []error
	var mu sync.Mutex
	partitions := partitionsByMaster(ctx, client)
	seen.each(ctx, func(ctx context.Context, addr string, node *redis.Client) {
		var there int64
		for _, p := range partitions[addr] {
			there += units[p]
		}
		if there == 0 {
			return
		}
		text, err := node.Info(ctx, "memory").Result()
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			failed = append(failed, fmt.Errorf("read INFO of Redis %s: %w", addr, err))
			return
		}
		found = append(found, roomFor(there, addr, parseInfo(text))...)
	})
	slices.SortFunc(found, func(a, b Finding) int { return cmp.Compare(a.Node, b.Node) })
	return found, errors.Join(failed...)
}

// unitsByPartition returns the units on sale, of all sales or of one.
func unitsByPartition(ctx context.Context, pool *pgxpool.Pool, sale uuid.UUID) (map[int]int64, error) {
	rows, _ := pool.Query(ctx, sql.DoctorUnitsOnSale, // its error comes with the rows
		uuid.NullUUID{UUID: sale, Valid: sale != uuid.Nil})
	var id uuid.UUID
	var partitions, shards int
	var left int64
	units, sales := map[int]int64{}, 0
	_, err := pgx.ForEachRow(rows, []any{&id, &partitions, &shards, &left}, func() error {
		sales++
		layout := reservation.LayoutOf(id, max(1, partitions), min(shards, partitions))
		for shard := range layout.Shards { // as if their buyers came evenly
			units[layout.Partition(shard)] += layout.Share(left, shard)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the units on sale from Postgres: %w", err)
	}
	if sale != uuid.Nil && sales == 0 {
		return nil, fmt.Errorf("sale=%s: %w", sale, reservation.ErrSaleNotFound)
	}
	return units, nil
}

// roomFor compares the memory that the units need with the limit of the server, or of a node of a cluster.
func roomFor(units int64, node string, info map[string]string) []Finding {
	limit, whose := number(info["maxmemory"]), "maxmemory"
	if limit == 0 {
		limit, whose = number(info["total_system_memory"]), "the memory of the machine"
	}
	used := number(info["used_memory"])
	need := used + units*bytesPerUnit
	if units == 0 || limit == 0 || need <= limit {
		return nil
	}
	return []Finding{{
		Severity: Unsafe, Server: "redis", Node: node,
		What: fmt.Sprintf("%s units are on sale, which take about %s; of %s, %s, %s are left", format.Count(units),
			bytesText(units*bytesPerUnit), whose, bytesText(limit), bytesText(max(0, limit-used))),
		Why: "when memory runs out the server refuses new orders, and the sale stops before it is sold out",
		Mend: fmt.Sprintf("set maxmemory to at least %s (CONFIG SET maxmemory %dmb, and the same in redis.conf) on a "+
			"machine with that much memory, or put fewer units on sale", bytesText(need), (need+1<<20-1)>>20),
	}}
}

// number is 0 for a missing value.
func number(text string) int64 {
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

// bytesText formats bytes: an mb of redis.conf is a MiB.
func bytesText(n int64) string { return format.Bytes(float64(n)) }
