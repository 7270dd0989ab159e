package reservation

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"stampede/lua"
)

// sellingCommands are required to sell, in the form that lua/rights.lua takes.
var sellingCommands = []string{
	"HMGET key f", "HSET key f v", "HGET key f", "XADD key * f v", "TIME", "INFO", "HLEN key", "HSCAN key 0",
	"SMEMBERS key",
	"SCRIPT LOAD x", "SCRIPT FLUSH", "WATCH key", "UNWATCH", "MULTI", "EXEC", "PING",
}

// otherCommands are required by workers, locks and rebuilds.
var otherCommands = []string{
	"HDEL key f", "HEXISTS key f", "EXISTS key", "TYPE key", "DEL key", "UNLINK key", "RENAME key key", "RENAMENX key key",
	"PERSIST key", "EXPIRE key 1", "SADD key m",
	"GET key", "SET key v", "COPY key key", "PEXPIRE key 1", "PTTL key", "PUBLISH redisson_lock__channel:x m",
	"PUBSUB NUMSUB redisson_lock__channel:x", "SUBSCRIBE redisson_lock__channel:x", "UNSUBSCRIBE redisson_lock__channel:x",
	"XREAD STREAMS key 0", "XREADGROUP GROUP g c STREAMS key >", "XACK key g 1-0", "XCLAIM key g c 0 1-0",
	"XPENDING key g", "XTRIM key MINID 1",
	"XLEN key", "XRANGE key - +", "XREVRANGE key + -", "XGROUP CREATE key g 0", "XGROUP DELCONSUMER key g c",
	"XINFO STREAM key", "XINFO GROUPS key", "XINFO CONSUMERS key g",
}

// MissingRights returns the commands that Stampede needs and the Redis user may not run on keys with
// that prefix.
func MissingRights(ctx context.Context, rdb redis.Scripter, prefix string) ([]string, error) {
	return missingRights(ctx, rdb, Keys{Prefix: prefix}.in(0, "rights"), slices.Concat(sellingCommands, otherCommands))
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
	case "SCRIPT", "PUBSUB", "XGROUP", "XINFO":
		return words[0] + " " + words[1]
	}
	return words[0]
}
