package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/figure"
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
	return r.findings(), nil
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

// findings checks a server of its own, or a master of a cluster.
func (r redisServer) findings() []Finding {
	return append(r.run(role, rights, writes, replicas, movingSlots), r.durable()...)
}

// durable checks what a replica needs as well, because it may replace its master.
func (r redisServer) durable() []Finding {
	return r.run(serverVersion, policy, memory, appendOnly, appendFsync, rewriteFsync, appendStatus, idleTimeout)
}

func (r redisServer) run(checks ...func(redisServer) *Finding) (all []Finding) {
	for _, check := range checks {
		if f := check(r); f != nil {
			f.Server, f.Node = "redis", r.node
			all = append(all, *f)
		}
	}
	return all
}

func serverVersion(r redisServer) *Finding {
	text := r.info["redis_version"]
	major, _, _ := strings.Cut(text, ".")
	if n, err := strconv.Atoi(major); err == nil && n >= 7 {
		return nil
	}
	return &Finding{
		Severity: Unsafe, What: fmt.Sprintf("version %q", text),
		Why:  "the scripts need commands of Redis 7.0",
		Mend: "run Redis 7.0 or later, or Valkey",
	}
}

func role(r redisServer) *Finding {
	if r.info["role"] == "master" {
		return nil
	}
	return &Finding{
		Severity: Unsafe, What: "the server is a replica",
		Why: "a replica refuses writes, and its data may be old",
		Mend: "set REDIS_URL to its primary, " + net.JoinHostPort(r.info["master_host"], r.info["master_port"]) +
			"; if Sentinels name this server, wait for the end of their failover",
	}
}

func rights(r redisServer) *Finding {
	if len(r.missing) == 0 {
		return nil
	}
	return &Finding{
		Severity: Unsafe, What: "the user is not allowed, or the server lacks, " + strings.Join(r.missing, ", "),
		Why: "a script without a permission writes nothing: nothing is sold, or units are not released and orders stay in " +
			"the stream",
		Mend: "ACL SETUSER of the user in REDIS_URL with these commands, the keys " + reservation.DefaultPrefix +
			":* and the channels redisson_lock__channel:*",
	}
}

// writes tries what the settings promise.
func writes(r redisServer) *Finding {
	mend := "check the server's log and its disk"
	switch reservation.RefusalCode(r.refusal) {
	case "READONLY", "NOPERM", "MOVED": // reported by role and rights, or the partition has just moved
		return nil
	case "MISCONF":
		mend += ": it is probably full; orders need the AOF only, so CONFIG SET save \"\" does without snapshots"
	case "OOM":
		mend = "raise maxmemory; workers free memory as they record orders"
	case "NOREPLICAS":
		mend = "start the replicas again, or lower min-replicas-to-write"
	}
	if r.refusal == nil {
		return nil
	}
	return &Finding{
		Severity: Unsafe, What: "the server refuses writes: " + r.refusal.Error(),
		Why:  "nothing is sold, and accepted orders are not confirmed, until it takes writes again",
		Mend: mend,
	}
}

func policy(r redisServer) *Finding {
	switch p := r.info["maxmemory_policy"]; p {
	case "noeviction":
		return nil
	case "":
		return &Finding{
			Severity: Unchecked, What: "maxmemory-policy could not be read",
			Why:  "a server that evicts may drop the stock, the buyers or the stream of a running sale",
			Mend: "make sure that it is noeviction",
		}
	default:
		return &Finding{
			Severity: Unsafe, What: "maxmemory-policy is " + p,
			Why: "when memory runs out, the server may drop the stock, the buyers or the stream of a running sale: units are " +
				"sold twice, accepted orders are lost",
			Mend: "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
		}
	}
}

func memory(r redisServer) *Finding {
	if r.info["maxmemory"] != "0" {
		return nil
	}
	return &Finding{
		Severity: Warning, What: "maxmemory is not set",
		Why: "the server grows until the system kills it; with a limit it refuses new orders and keeps the others",
		Mend: fmt.Sprintf("set maxmemory: about %d bytes for each unit on sale, and memory for the rewrite of the AOF",
			bytesPerUnit),
	}
}

func appendOnly(r redisServer) *Finding {
	if r.info["aof_enabled"] == "1" {
		return nil
	}
	return &Finding{
		Severity: Unsafe, What: "appendonly is no",
		Why:  "a crash of Redis loses every accepted order that is not yet in Postgres, and the sale with it",
		Mend: "CONFIG SET appendonly yes and CONFIG SET appendfsync always, and the same in redis.conf",
	}
}

func appendFsync(r redisServer) *Finding {
	if r.info["aof_enabled"] != "1" {
		return nil // reported by appendOnly
	}
	const mend = "CONFIG SET appendfsync always, and the same in redis.conf; reservations are batched, so it " +
		"costs little"
	fsync, known := r.config["appendfsync"]
	switch {
	case !known:
		return &Finding{
			Severity: Unchecked, What: "appendfsync could not be read (CONFIG GET is refused)",
			Why:  "unless it is always, a power loss loses accepted orders",
			Mend: "ask the operator of the server for its value",
		}
	case fsync == "always":
		return nil
	case fsync == "everysec":
		return &Finding{
			Severity: Warning, What: "appendfsync is everysec",
			Why:  "a power loss loses the accepted orders of the last second, and more while the disk stalls",
			Mend: mend,
		}
	default:
		return &Finding{
			Severity: Unsafe, What: "appendfsync is " + fsync,
			Why:  "a power loss loses all accepted orders that the system had not written, about 30 seconds of them",
			Mend: mend,
		}
	}
}

func rewriteFsync(r redisServer) *Finding {
	if r.config["no-appendfsync-on-rewrite"] != "yes" {
		return nil
	}
	return &Finding{
		Severity: Unsafe, What: "no-appendfsync-on-rewrite is yes",
		Why:  "while the AOF is rewritten nothing is synced, so a power loss then loses as much as appendfsync no",
		Mend: "CONFIG SET no-appendfsync-on-rewrite no, and the same in redis.conf",
	}
}

func appendStatus(r redisServer) *Finding {
	if status := r.info["aof_last_write_status"]; status == "" || status == "ok" {
		return nil
	}
	return &Finding{
		Severity: Unsafe, What: "the last write to the AOF failed",
		Why:  "the server refuses writes until it succeeds again, and a crash loses what was not written",
		Mend: "check the disk of the server: it is probably full",
	}
}

func replicas(r redisServer) *Finding {
	if n := r.info["connected_slaves"]; n == "" || n == "0" {
		return nil
	}
	if n, known := r.config["min-replicas-to-write"]; known && n != "0" {
		return nil
	}
	return &Finding{
		Severity: Warning, What: "replicas are attached, and the server does not wait for them",
		Why:  "replication is asynchronous: a failover loses the accepted orders that the replica had not seen",
		Mend: "set min-replicas-to-write 1, which narrows the gap, and treat an automatic failover as a loss of Redis",
	}
}

func idleTimeout(r redisServer) *Finding {
	const shortest = 30 * time.Second
	s, err := strconv.Atoi(r.config["timeout"])
	if err != nil || s == 0 || time.Duration(s)*time.Second >= shortest {
		return nil
	}
	return &Finding{
		Severity: Warning, What: fmt.Sprintf("timeout is %d s", s),
		Why: "the server closes connections after a short idle time, so clients have to reconnect between two " +
			"rushes",
		Mend: "CONFIG SET timeout 0, or at least 30",
	}
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
		What: fmt.Sprintf("%s units are on sale, which take about %s; of %s, %s, %s are left", figure.Count(units),
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
func bytesText(n int64) string { return figure.Bytes(float64(n)) }
