// Package doctor finds settings of Redis and Postgres under which Stampede cannot keep its promises, and keys of
// buyers' tokens that cannot be used, and how to correct them. It measures how long both servers make buyers and orders
// wait.
package doctor

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/keyset"
)

// Severity is what a finding means for the promises.
type Severity string

const (
	// Unsafe: a promise does not hold under this setting.
	Unsafe Severity = "unsafe"
	// Warning: the promises hold, with a limit that should be a decision.
	Warning Severity = "warning"
	// Unchecked: the setting could not be read.
	Unchecked Severity = "unchecked"
	// Away: the server does not answer, so it was not checked.
	Away Severity = "away"
	// Measured: nothing is wrong; What is how fast the server is, and Why what that costs.
	Measured Severity = "measured"
)

// Finding is one problem.
type Finding struct {
	Severity Severity `json:"severity"`
	// Server is "redis", "postgres" or "key set".
	Server string `json:"server"`
	// Node has the addresses of the nodes of a cluster that it is about; empty for a server of its own and for the
	// whole cluster.
	Node string `json:"node,omitempty"`
	What string `json:"what"`
	Why  string `json:"why"`
	Mend string `json:"mend,omitempty"`
	// Speed is set if it was measured.
	Speed *Speed `json:"speed,omitempty"`
}

// Where names the server, and the nodes of a cluster.
func (f Finding) Where() string {
	if f.Node == "" {
		return f.Server
	}
	return f.Server + " " + f.Node
}

// Any reports whether there is a finding of that severity.
func Any(findings []Finding, severity Severity) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == severity })
}

// WriteText prints the findings as text.
func WriteText(w io.Writer, findings []Finding) error {
	isWrong := func(f Finding) bool { return f.Severity != Measured }
	if !slices.ContainsFunc(findings, isWrong) {
		if _, err := fmt.Fprintln(w, "The settings of Redis and Postgres keep every promise."); err != nil {
			return err
		}
	}
	for _, f := range findings {
		then := "why:  " + f.Why + "\n           mend: " + f.Mend
		if !isWrong(f) {
			then = "cost: " + f.Why
		}
		if _, err := fmt.Fprintf(w, "%-9s  %s: %s\n           %s\n", f.Severity, f.Where(), f.What, then); err != nil {
			return err
		}
	}
	return nil
}

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

// ignoredShown bounds the keys that a finding names.
const ignoredShown = 10

// KeySet fetches the key set that verifies the tokens of buyers, as an ingress does, and finds keys that cannot be
// used.
func KeySet(ctx context.Context, url string) []Finding {
	keys, err := keyset.Fetch(ctx, url)
	switch {
	case keys == nil:
		return []Finding{{
			Severity: Away, Server: "key set", What: err.Error(),
			Why:  "an ingress that starts now can identify no buyer, and refuses all of them until it has a key",
			Mend: "repair the way to the provider, or correct STAMPEDE_JWKS_URL",
		}}
	case err != nil:
		return []Finding{{
			Severity: Unsafe, Server: "key set", What: err.Error() + ": " + shown(keys.Ignored),
			Why:  "no token of a buyer can be verified",
			Mend: "have the provider publish a public RSA key of 2048 bits or more, of P-256, P-384, P-521 or Ed25519, for sig",
		}}
	case len(keys.Ignored) == 0:
		return nil
	}
	return []Finding{{
		Severity: Warning, Server: "key set",
		What: fmt.Sprintf("%d of %d keys cannot be used: %s", len(keys.Ignored), len(keys.Ignored)+keys.Len(),
			shown(keys.Ignored)),
		Why:  "tokens that they sign are refused",
		Mend: "nothing if the provider signs no tokens of buyers with them; else have it publish them correctly",
	}}
}

func shown(ignored []string) string {
	more := ""
	if n := len(ignored) - ignoredShown; n > 0 {
		more = fmt.Sprintf("; and %d more", n)
	}
	return strings.Join(ignored[:min(len(ignored), ignoredShown)], "; ") + more
}
