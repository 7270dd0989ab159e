package doctor

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/reservation"
)

// Redis checks the server behind rdb. It fails only if the server does not answer.
func Redis(ctx context.Context, rdb redis.UniversalClient) ([]Finding, error) {
	text, err := rdb.Info(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("read INFO of Redis: %w", err)
	}
	r := redisServer{info: parseInfo(text), config: make(map[string]string)}
	for _, name := range []string{"appendfsync", "no-appendfsync-on-rewrite", "min-replicas-to-write", "timeout"} {
		// Managed servers forbid CONFIG. Settings that are not in INFO are then unchecked.
		if got, err := rdb.ConfigGet(ctx, name).Result(); err == nil {
			r.config[name] = got[name]
		}
	}
	if r.missing, err = reservation.MissingRights(ctx, rdb, reservation.DefaultPrefix); err != nil {
		return nil, err
	}
	return r.findings(), nil
}

// redisServer holds the values that a server reports. Unknown settings are absent.
type redisServer struct {
	info, config map[string]string
	missing      []string // commands that the user may not run or the server lacks
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

func (r redisServer) findings() []Finding {
	var all []Finding
	for _, check := range []func(redisServer) *Finding{
		serverVersion, role, rights, cluster, policy, memory, appendOnly, appendFsync, rewriteFsync, appendStatus, replicas,
		idleTimeout,
	} {
		if f := check(r); f != nil {
			f.Server = "redis"
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
		Why:  "a replica refuses writes, and its data may be old",
		Mend: "set REDIS_URL to the primary",
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

func cluster(r redisServer) *Finding {
	if r.info["redis_mode"] != "cluster" && r.info["cluster_enabled"] != "1" {
		return nil
	}
	return &Finding{
		Severity: Unsafe, What: "cluster mode is on",
		Why:  "Stampede uses one server; commands for keys of other nodes fail with MOVED",
		Mend: "set REDIS_URL to a server without cluster mode",
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
