package reservation

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"stampede/lua"
)

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
	routeRights = []string{"CLUSTER SLOTS", "CLUSTER SHARDS", "ASKING"}
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
		append(slices.Clone(WorkerRights.everywhere), "SISMEMBER key m", "SREM key m"), WorkerRights.onCluster,
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
		refused[i] = nameOf(command)
	}
	return refused, nil
}

// nameOf returns the name of a command in an ACL, without arguments.
func nameOf(command string) string {
	words := strings.Fields(command)
	switch words[0] {
	case "CLIENT", "CLUSTER", "CONFIG", "PUBSUB", "SCRIPT", "XGROUP", "XINFO":
		return words[0] + " " + words[1]
	}
	return words[0]
}
