package reservation

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/internal/telemetry"
	"stampede/lua"
	"stampede/sql"
)

const (
	// guardInterval is how often the servers are compared, and so how long a replaced server may
	// sell.
	guardInterval = time.Second
	// guardDoubtInterval is the interval while a partition is refused or does not answer, so that a
	// restored sale resumes soon.
	guardDoubtInterval = 200 * time.Millisecond
	// guardTimeout bounds one comparison of a partition.
	guardTimeout = 5 * time.Second
	// guardGrace is how long an unverified server counts as a rebuild in progress.
	guardGrace = 5 * time.Second
)

// Guard makes a Store refuse a partition whose Redis server is not the one recorded in Postgres. A
// server that was frozen, replaced and thawed still has a record that says it is verified; only a
// comparison with Postgres shows that it is not. Orders that such a server accepts until then have
// the old epoch and are voided. Every ingress runs one.
type Guard struct {
	Store *Store
	// Redis, if set, is the client of the guard instead of the Store's, so that requests cannot use
	// up its connections.
	Redis  redis.UniversalClient
	Pool   *pgxpool.Pool
	Logger *slog.Logger
	// Age measures how long ago the servers were compared; nil for nothing.
	Age *telemetry.GuardAge
}

// Run compares until ctx is done, and returns nil then. A server that does not answer changes nothing, and delays the
// comparison of no other.
func (g Guard) Run(ctx context.Context) error {
	c := &comparison{Guard: g}
	defer c.running.Wait()
	postgresFails := false
	for {
		due := time.Now().Add(guardInterval)
		recorded, err := g.recorded(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // a stop is not a failure
		}
		if err != nil && !postgresFails {
			g.Logger.Warn("cannot read which Redis servers Postgres names", "error", err)
		}
		if postgresFails = err != nil; !postgresFails {
			g.Age.Guards(slices.Sorted(maps.Keys(recorded)))
		}
		for partition, runID := range recorded {
			c.start(ctx, partition, runID)
		}
		for first := true; first || time.Now().Before(due) && !c.inDoubt(); first = false {
			if !retry.Pause(guardDoubtInterval, ctx.Done()) {
				return nil
			}
		}
	}
}

func (g Guard) redis() redis.UniversalClient {
	if g.Redis != nil {
		return g.Redis
	}
	return g.Store.Redis
}

func (g Guard) recorded(ctx context.Context) (map[int]string, error) {
	ctx, cancel := context.WithTimeout(ctx, guardTimeout)
	defer cancel()
	return VerifiedServers(ctx, g.Pool)
}

// VerifiedServers returns the run id of the verified server of each partition, as Postgres names them.
func VerifiedServers(ctx context.Context, on pg.Querier) (map[int]string, error) {
	rows, _ := on.Query(ctx, sql.ReservationVerifiedServers) // its error comes with the rows
	servers := map[int]string{}
	var partition int
	var runID string
	_, err := pgx.ForEachRow(rows, []any{&partition, &runID}, func() error {
		servers[partition] = runID
		return nil
	})
	return servers, err
}

// comparison is a running Guard. Each partition is compared by itself.
type comparison struct {
	Guard
	running    sync.WaitGroup
	partitions [MaxPartitions]compared
}

// compared is the state of a partition. Its other fields belong to the goroutine that has set busy.
type compared struct {
	busy    atomic.Bool
	failing atomic.Bool // it did not answer
	missing string      // the commands that the Redis user may not run
	refused bool
	since   time.Time // of refused
	logged  bool      // refused was logged as an error
}

// inDoubt is true while a partition is refused or does not answer.
func (c *comparison) inDoubt() bool {
	for p := range c.partitions {
		if c.partitions[p].failing.Load() {
			return true
		}
	}
	return c.Store.refusesAny()
}

// start compares a partition in the background, unless that is in progress.
func (c *comparison) start(ctx context.Context, partition int, runID string) {
	at := &c.partitions[partition]
	if !at.busy.CompareAndSwap(false, true) {
		return
	}
	c.running.Go(func() {
		defer at.busy.Store(false)
		limited, cancel := context.WithTimeout(ctx, guardTimeout)
		defer cancel()
		err := c.compare(limited, at, partition, runID)
		if wasFailing := at.failing.Swap(err != nil); err != nil && !wasFailing && ctx.Err() == nil {
			c.Logger.Warn("cannot compare the Redis server of a partition with the one in Postgres",
				"partition", partition, "error", err)
		}
	})
}

func (c *comparison) compare(ctx context.Context, at *compared, partition int, runID string) error {
	rdb := c.redis()
	state, err := c.Store.inspect(ctx, rdb, partition)
	if err != nil {
		return err
	}
	if state.unverified {
		_, _ = c.Store.admitThrough(ctx, rdb, partition) // for all ingresses
	}
	// A server without a record has no sale, so it cannot sell.
	refused := state.Recorded && (!state.Known || state.RunID != runID)
	c.refuse(at, partition, refused)
	if !refused {
		c.Age.Verified(partition)
	}
	return c.logMissingRights(ctx, at, partition)
}

// logMissingRights logs the commands that a purchase needs and Redis does not allow, if they changed.
// The script itself refuses to sell then (lua/reserve.lua).
func (c *comparison) logMissingRights(ctx context.Context, at *compared, partition int) error {
	commands, err := missingRights(ctx, c.redis(), c.Store.Keys.in(partition, "rights"), sellingRights)
	if err != nil {
		return err
	}
	missing := strings.Join(commands, ", ")
	switch {
	case missing == at.missing:
	case missing == "":
		c.Logger.Info("the Redis user has all permissions for purchases again", "partition", partition)
	default:
		c.Logger.Error("nothing is sold: the Redis user lacks permissions for purchases",
			"partition", partition, "commands", missing)
	}
	at.missing = missing
	return nil
}

// refuse refuses a partition, or admits it again. A rebuild of lost data takes a moment; a longer
// refusal suggests a replaced server and is logged as an error.
func (c *comparison) refuse(at *compared, partition int, yes bool) {
	changed := c.Store.refused[partition].Swap(yes) != yes
	switch {
	case yes && !at.refused:
		at.since, at.logged = time.Now(), false
		c.Store.fences[partition].Store(nil)
		c.Logger.Warn("nothing is sold from this partition: its Redis server is not verified; a rebuild may be in progress",
			"partition", partition)
	case yes && !at.logged && time.Since(at.since) >= guardGrace:
		at.logged = true
		c.Logger.Error("nothing is sold from this partition: its Redis server is still not the one recorded in Postgres",
			"partition", partition, "since", at.since)
	case !yes && changed:
		c.Logger.Info("this partition sells again: its Redis server is the one recorded in Postgres", "partition", partition)
	}
	at.refused = yes
}

// Rights are the commands that the Redis user of a role needs, in the form that lua/rights.lua takes. The files in
// deploy/acl have users with these.
type Rights struct{ everywhere, onCluster []string }

// Groups of commands of the roles.
var (
	// sellingRights are those without which nothing is sold.
	sellingRights = []string{
		"HMGET key f", "HSET key f v", "HGET key f", "XADD key * f v", "TIME", "INFO", "HLEN key", "HSCAN key 0",
		"SMEMBERS key", "EVAL x 1 key", "EVALSHA x 1 key", "SCRIPT LOAD x", "SCRIPT FLUSH", "WATCH key", "UNWATCH", "MULTI",
		"EXEC",
	}
	// clientRights are for connections, and to open and change sales.
	clientRights = []string{"PING", "CLIENT SETNAME x", "SADD key m", "EXISTS key", "XREVRANGE key + -"}
	workRights   = []string{
		"HDEL key f", "HEXISTS key f", "TYPE key", "DEL key", "UNLINK key", "RENAME key key", "RENAMENX key key",
		"PERSIST key", "EXPIRE key 1", "GET key", "SET key v", "COPY key key", "PEXPIRE key 1", "PTTL key",
		"PUBLISH redisson_lock__channel:x m", "PUBSUB NUMSUB redisson_lock__channel:x",
		"SUBSCRIBE redisson_lock__channel:x", "UNSUBSCRIBE redisson_lock__channel:x",
		"XREADGROUP GROUP g c STREAMS key >", "XACK key g 1-0", "XCLAIM key g c 0 1-0", "XAUTOCLAIM key g c 0 0",
		"XPENDING key g", "XTRIM key MINID 1", "XLEN key", "XRANGE key - +", "XGROUP CREATE key g 0",
		"XGROUP DELCONSUMER key g c", "XINFO STREAM key", "XINFO GROUPS key", "XINFO CONSUMERS key g",
	}
	// routeRights are for clients of a cluster; CLUSTER NODES is for doctor, whose warnings each process logs.
	routeRights = []string{"CLUSTER SLOTS", "CLUSTER SHARDS", "CLUSTER NODES", "ASKING"}
	// clusterLockRights: in a cluster, the messages of locks are sharded.
	clusterLockRights = []string{
		"SPUBLISH redisson_lock__channel:x m", "SSUBSCRIBE redisson_lock__channel:x", "SUNSUBSCRIBE redisson_lock__channel:x",
	}
)

// The roles.
var (
	IngressRights = Rights{
		slices.Concat(sellingRights, clientRights, []string{"XREAD STREAMS key 0"}), routeRights,
	}
	WorkerRights = Rights{
		slices.Concat(sellingRights, clientRights, workRights), slices.Concat(routeRights, clusterLockRights),
	}
	OperatorRights = Rights{
		append(slices.Clone(WorkerRights.everywhere), "SISMEMBER key m", "SREM key m"),
		WorkerRights.onCluster,
	}
)

// Missing returns the commands that the role needs and the Redis user may not run on keys of that partition.
func (r Rights) Missing(
	ctx context.Context, rdb redis.Scripter, keys Keys, partition int, onCluster bool,
) ([]string, error) {
	commands := r.everywhere
	if onCluster {
		commands = slices.Concat(commands, r.onCluster)
	}
	return missingRights(ctx, rdb, keys.in(partition, "rights"), commands)
}

func missingRights(ctx context.Context, rdb redis.Scripter, key string, commands []string) ([]string, error) {
	args := make([]any, len(commands))
	for i, c := range commands {
		args[i] = c
	}
	refused, err := lua.Rights.Run(ctx, rdb, []string{key}, args...).StringSlice()
	if redis.HasErrorPrefix(err, "NOPERM") {
		return []string{"EVALSHA of " + key}, nil // a script, or the keys of one
	}
	if err != nil {
		return nil, fmt.Errorf("read the permissions of the Redis user: %w", err)
	}
	for i, command := range refused {
		refused[i] = commandName(command)
	}
	return refused, nil
}

// commandName returns the name of a command in an ACL, without arguments.
func commandName(command string) string {
	words := strings.Fields(command)
	switch words[0] {
	case "CLIENT", "CLUSTER", "CONFIG", "PUBSUB", "SCRIPT", "XGROUP", "XINFO":
		return words[0] + " " + words[1]
	}
	return words[0]
}

// fence is the scripts of lua.Fenced under hashes for one partition on one server in one term as a primary.
// Redis drops loaded scripts with its process, and replicas do not get them. So a server that has
// the hash was verified before a client loaded it there. Any other server answers NOSCRIPT before it
// can make a wrong reservation. The normal path costs nothing extra.
type fence struct {
	scripts lua.Fenced
	// reserve is the hash of the script; made an interface once, because it is an argument of every call.
	reserve any
}

func newFence(serverKey string, server ServerState) *fence {
	// A server that becomes a replica and then a primary again keeps its scripts, but may have lost
	// orders. So the hash includes the replication id, which changes with the term.
	scripts := lua.FencedBy(serverKey + " " + server.RunID + " " + server.ReplicationID)
	return &fence{scripts: scripts, reserve: scripts.Reserve.Hash}
}

// admit loads the scripts of a partition if its server is known, and otherwise returns
// ErrUnverifiedServer. It checks and loads on one connection, so that both reach the same server,
// and loads nothing if the record of the server changed in between (Distrust). It withdraws the
// verification of an unverified server, because the script may be loaded there from a former term.
func (s *Servers) admit(ctx context.Context, partition int) (*fence, error) {
	return s.admitThrough(ctx, s.Redis, partition)
}

func (s *Servers) admitThrough(ctx context.Context, rdb redis.UniversalClient, partition int) (*fence, error) {
	key := s.Keys.Server(partition)
	var f *fence
	// While the slot of a cluster moves, go-redis returns nil without a call of the function.
	err := rdb.Watch(ctx, func(tx *redis.Tx) error {
		state, err := s.ask(ctx, tx, key)
		if err != nil {
			return err
		}
		_, err = tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
			switch {
			case state.unverified:
				s.distrust(ctx, p, partition, "")
			case state.Known && !s.refused[partition].Load():
				f = newFence(key, state)
				for _, script := range f.scripts.All() {
					p.ScriptLoad(ctx, script.Source)
				}
			}
			return nil
		})
		if f == nil {
			return ErrUnverifiedServer // even if distrust failed, as on a replica
		}
		return err
	}, key)
	if err == nil && f == nil {
		err = ErrUnverifiedServer
	}
	if err != nil {
		s.fences[partition].Store(nil)
		return nil, fmt.Errorf("load the scripts of partition %d: %w", partition, err)
	}
	s.fences[partition].Store(f)
	return f, nil
}

// fenced runs a script of the fence of a partition. A repeat of the script must be harmless: it is sent until Redis
// answers, at most tries times.
func (s *Servers) fenced(
	ctx context.Context, partition int, script func(lua.Fenced) lua.FencedScript, key string, args ...any,
) (cmd *redis.Cmd) {
	for try := range tries {
		if try > 0 && !retry.Pause(time.Duration(try)*20*time.Millisecond, ctx.Done()) {
			break
		}
		f := s.fences[partition].Load()
		if f == nil {
			var err error
			if f, err = s.admit(ctx, partition); err != nil {
				cmd = redis.NewCmd(ctx)
				cmd.SetErr(err)
				return cmd
			}
		}
		cmd = s.Redis.EvalSha(ctx, script(f.scripts).Hash, []string{key}, args...)
		if _, temporary := refusal(cmd.Err()); !temporary {
			break
		}
		s.fences[partition].CompareAndSwap(f, nil)
	}
	return cmd
}
