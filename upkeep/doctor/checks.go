package doctor

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"stampede/reservation"
)

// check is a setting of a server that may be wrong. S has what the server answered.
type check[S any] struct {
	severity Severity
	// when reports whether it is wrong. What and mend show the detail in place of {}.
	when            func(S) (detail string, wrong bool)
	what, why, mend string
}

// run returns a finding for each check that fails. They have the server and the node of the first argument.
func run[S any](where Finding, answers S, checks []check[S]) (all []Finding) {
	for _, c := range checks {
		detail, wrong := c.when(answers)
		if !wrong {
			continue
		}
		f := where
		f.Severity, f.Why = c.severity, c.why
		f.What, f.Mend = strings.ReplaceAll(c.what, "{}", detail), strings.ReplaceAll(c.mend, "{}", detail)
		all = append(all, f)
	}
	return all
}

func (r redisServer) run(groups ...[]check[redisServer]) (all []Finding) {
	for _, checks := range groups {
		all = append(all, run(Finding{Server: "redis", Node: r.node}, r, checks)...)
	}
	return all
}

// ofMasters are the checks of a server of its own, and of a master of a cluster.
var ofMasters = []check[redisServer]{
	{
		Unsafe, func(r redisServer) (string, bool) {
			return net.JoinHostPort(r.info["master_host"], r.info["master_port"]), r.info["role"] != "master"
		},
		"the server is a replica", "a replica refuses writes, and its data may be old",
		"set REDIS_URL to its primary, {}; if Sentinels name this server, wait for the end of their failover",
	},
	{
		Unsafe, func(r redisServer) (string, bool) { return strings.Join(r.missing, ", "), len(r.missing) > 0 },
		"the user is not allowed, or the server lacks, {}",
		"a script without a permission writes nothing: nothing is sold, or units are not released and orders stay in " +
			"the stream",
		"ACL SETUSER of the user in REDIS_URL with these commands, the keys " + reservation.DefaultPrefix +
			":* and the channels redisson_lock__channel:*",
	},
	refusesWrites("MISCONF", "check the server's log and its disk: it is probably full; orders need the AOF only, so CONFIG "+
		"SET save \"\" does without snapshots"),
	refusesWrites("OOM", "raise maxmemory; workers free memory as they record orders"),
	refusesWrites("NOREPLICAS", "start the replicas again, or lower min-replicas-to-write"),
	refusesWrites("", "check the server's log and its disk"),
	{
		Warning, func(r redisServer) (string, bool) {
			attached := r.info["connected_slaves"]
			waits, known := r.config["min-replicas-to-write"]
			return "", attached != "" && attached != "0" && (!known || waits == "0")
		},
		"replicas are attached, and the server does not wait for them",
		"replication is asynchronous: a failover loses the accepted orders that the replica had not seen",
		"set min-replicas-to-write 1, which narrows the gap, and treat an automatic failover as a loss of Redis",
	},
	{
		Warning, func(r redisServer) (string, bool) { return strings.Join(r.moving, ", "), len(r.moving) > 0 },
		"slots are being moved: {}",
		"a partition in one of them sells nothing while its keys are in two places (TRYAGAIN), for ever if the move " +
			"was given up",
		"wait until it has ended, or finish it: redis-cli --cluster fix",
	},
}

// refusesWrites is the check of a write as a purchase makes it, which Redis refused with this code; "" is for all codes
// that no other check reports.
func refusesWrites(code, mend string) check[redisServer] {
	return check[redisServer]{
		Unsafe, func(r redisServer) (string, bool) {
			if r.refusal == nil {
				return "", false
			}
			refused := reservation.RefusalCode(r.refusal)
			switch refused {
			case "READONLY", "NOPERM", "MOVED": // reported with the role and the rights, or the partition has just moved
				return "", false
			case "MISCONF", "OOM", "NOREPLICAS":
			default:
				refused = ""
			}
			return r.refusal.Error(), refused == code
		},
		"the server refuses writes: {}", "nothing is sold, and accepted orders are not confirmed, until it takes writes again",
		mend,
	}
}

// ofRedis are the checks of each server, because a replica may replace its master.
var ofRedis = []check[redisServer]{
	{
		Unsafe, func(r redisServer) (string, bool) {
			text := r.info["redis_version"]
			major, _, _ := strings.Cut(text, ".")
			n, err := strconv.Atoi(major)
			return strconv.Quote(text), err != nil || n < 7
		},
		"version {}", "the scripts need commands of Redis 7.0", "run Redis 7.0 or later, or Valkey",
	},
	{
		Unchecked, func(r redisServer) (string, bool) { return "", r.info["maxmemory_policy"] == "" },
		"maxmemory-policy could not be read",
		"a server that evicts may drop the stock, the buyers or the stream of a running sale",
		"make sure that it is noeviction",
	},
	{
		Unsafe, func(r redisServer) (string, bool) {
			policy := r.info["maxmemory_policy"]
			return policy, policy != "" && policy != "noeviction"
		},
		"maxmemory-policy is {}",
		"when memory runs out, the server may drop the stock, the buyers or the stream of a running sale: units are " +
			"sold twice, accepted orders are lost",
		"CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
	},
	{
		Warning, func(r redisServer) (string, bool) { return "", r.info["maxmemory"] == "0" },
		"maxmemory is not set",
		"the server grows until the system kills it; with a limit it refuses new orders and keeps the others",
		fmt.Sprintf("set maxmemory: about %d bytes for each unit on sale, and memory for the rewrite of the AOF", bytesPerUnit),
	},
	{
		Unsafe, func(r redisServer) (string, bool) { return "", r.info["aof_enabled"] != "1" },
		"appendonly is no",
		"a crash of Redis loses every accepted order that is not yet in Postgres, and the sale with it",
		"CONFIG SET appendonly yes and CONFIG SET appendfsync always, and the same in redis.conf",
	},
	appendFsync(Unchecked, func(_ string, known bool) bool { return !known },
		"appendfsync could not be read (CONFIG GET is refused)", "unless it is always, a power loss loses accepted orders",
		"ask the operator of the server for its value"),
	appendFsync(Warning, func(fsync string, _ bool) bool { return fsync == "everysec" }, "appendfsync is {}",
		"a power loss loses the accepted orders of the last second, and more while the disk stalls", syncAlways),
	appendFsync(Unsafe, func(fsync string, known bool) bool { return known && fsync != "everysec" && fsync != "always" },
		"appendfsync is {}",
		"a power loss loses all accepted orders that the system had not written, about 30 seconds of them", syncAlways),
	{
		Unsafe, func(r redisServer) (string, bool) { return "", r.config["no-appendfsync-on-rewrite"] == "yes" },
		"no-appendfsync-on-rewrite is yes",
		"while the AOF is rewritten nothing is synced, so a power loss then loses as much as appendfsync no",
		"CONFIG SET no-appendfsync-on-rewrite no, and the same in redis.conf",
	},
	{
		Unsafe, func(r redisServer) (string, bool) {
			status := r.info["aof_last_write_status"]
			return "", status != "" && status != "ok"
		},
		"the last write to the AOF failed",
		"the server refuses writes until it succeeds again, and a crash loses what was not written",
		"check the disk of the server: it is probably full",
	},
	{
		Warning, func(r redisServer) (string, bool) {
			s, err := strconv.Atoi(r.config["timeout"])
			return r.config["timeout"], err == nil && s != 0 && s < 30
		},
		"timeout is {} s",
		"the server closes connections after a short idle time, so clients have to reconnect between two rushes",
		"CONFIG SET timeout 0, or at least 30",
	},
}

const syncAlways = "CONFIG SET appendfsync always, and the same in redis.conf; reservations are batched, so it costs little"

// appendFsync is a check of the value of appendfsync. Without an AOF it has none.
func appendFsync(
	severity Severity, wrong func(fsync string, known bool) bool, what, why, mend string,
) check[redisServer] {
	return check[redisServer]{severity, func(r redisServer) (string, bool) {
		fsync, known := r.config["appendfsync"]
		return fsync, r.info["aof_enabled"] == "1" && wrong(fsync, known)
	}, what, why, mend}
}

// ofClusterNodes are the checks of how a node treats a lost master.
var ofClusterNodes = []check[redisServer]{
	{
		Warning, func(r redisServer) (string, bool) { return "", r.config["cluster-require-full-coverage"] == "yes" },
		"cluster-require-full-coverage is yes", "one lost master stops the sales of all others",
		"CONFIG SET cluster-require-full-coverage no, and the same in redis.conf",
	},
	{
		Warning, func(r redisServer) (string, bool) {
			ms, err := strconv.Atoi(r.config["cluster-node-timeout"])
			return r.config["cluster-node-timeout"], err == nil && ms > 5000
		},
		"cluster-node-timeout is {} ms", "nothing is sold from the partitions of a lost master for that long and some seconds",
		"CONFIG SET cluster-node-timeout 2000 to 5000, and the same in redis.conf",
	},
}

const (
	// oldestPostgres is the oldest supported version.
	oldestPostgres = 15
	// shortestTimeout is about how long a service waits for Postgres.
	shortestTimeout = 10 * time.Second
)

// ofPostgres are the checks of the settings of Postgres.
var ofPostgres = []check[postgresServer]{
	{
		Unsafe, func(p postgresServer) (string, bool) {
			version := p.settings["server_version_num"]
			n, err := strconv.Atoi(version)
			return strconv.Quote(version), err != nil || n/10000 < oldestPostgres
		},
		"version {}", fmt.Sprintf("Stampede needs Postgres %d or later", oldestPostgres), "run a later version",
	},
	{
		Unsafe, func(p postgresServer) (string, bool) { return "", p.recovery },
		"the server is a standby", "it accepts no writes, so no order is ever confirmed", "set DATABASE_URL to the primary",
	},
	{
		Unsafe, func(p postgresServer) (string, bool) {
			const name = "default_transaction_read_only"
			return p.sources[name], !p.recovery && p.settings[name] == "on"
		},
		"the server takes no writes: default_transaction_read_only is on ({})",
		"orders wait in Redis, and payments and cancellations are refused; all goes on by itself when it takes writes again",
		"find out who set it, and why: a full disk, or a switch-over after which DATABASE_URL has to name another server. " +
			"Then " + resetWhereSet("default_transaction_read_only"),
	},
	{
		Unsafe, func(p postgresServer) (string, bool) {
			role := p.settings["session_replication_role"]
			return role, role != "origin"
		},
		"session_replication_role is {}", "triggers and foreign keys do not work", resetWhereSet("session_replication_role"),
	},
	isOff("fsync", "a power loss can destroy the database"),
	isOff("full_page_writes", "a power loss in the middle of writing a page can destroy the page"),
	isOff("synchronous_commit",
		"a crash of Postgres loses orders that were acknowledged as written, and they are no longer in a stream"),
	{
		Warning, func(p postgresServer) (string, bool) { return "", p.settings["public_create"] == "on" },
		"every role may create objects in the schema of Stampede",
		"its processes, and functions with the rights of the tables' owner, can find those in place of others",
		"REVOKE CREATE ON SCHEMA … FROM PUBLIC",
	},
	isShort("statement_timeout", startsAgain),
	isShort("lock_timeout", startsAgain),
	isShort("transaction_timeout", endsOthers),
	isShort("idle_session_timeout", endsOthers),
	isShort("idle_in_transaction_session_timeout", endsOthers),
}

const (
	startsAgain = "a batch of orders that waits for a lock or a slow disk is cancelled and starts again"
	endsOthers  = "it ends what people do by other means, such as a restore, and all of Stampede's if DATABASE_URL sets " +
		"it: otherwise its sessions have their own limit"
)

func isOff(name, why string) check[postgresServer] {
	return check[postgresServer]{
		Unsafe, func(p postgresServer) (string, bool) { return "", p.settings[name] == "off" },
		name + " is off", why, fmt.Sprintf("ALTER SYSTEM SET %s = on; SELECT pg_reload_conf();", name),
	}
}

// isShort checks a limit in milliseconds.
func isShort(name, why string) check[postgresServer] {
	return check[postgresServer]{
		Warning, func(p postgresServer) (string, bool) {
			ms, err := strconv.Atoi(p.settings[name])
			return p.settings[name], err == nil && ms > 0 && time.Duration(ms)*time.Millisecond < shortestTimeout
		},
		name + " is {} ms", why,
		fmt.Sprintf("ALTER ROLE … SET %s = '30s' for the roles of Stampede; look into DATABASE_URL, too", name),
	}
}

func resetWhereSet(name string) string {
	return fmt.Sprintf("reset it where it was set: ALTER SYSTEM RESET %[1]s; SELECT pg_reload_conf(); "+
		"or ALTER DATABASE … or ALTER ROLE … RESET %[1]s", name)
}
