package growth

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"stampede/bench/rig"
	"stampede/internal/retry"
)

// redisMemory is the memory that Redis uses in bytes (used_memory).
func redisMemory(ctx context.Context, rdb redis.UniversalClient) (int64, error) {
	return rig.InfoNumber(ctx, rdb, "Memory", "used_memory")
}

// idleRedisMemory is the same after Redis has freed what it can, without the buffers of this process's
// connections. The processes that used Redis must have ended.
func idleRedisMemory(ctx context.Context, rdb redis.UniversalClient) (int64, error) {
	for {
		clients, err := rig.InfoNumber(ctx, rdb, "Clients", "connected_clients")
		if err != nil {
			return 0, err
		}
		if clients <= int64(rdb.PoolStats().TotalConns) {
			break
		}
		if !retry.Pause(pollInterval, ctx.Done()) {
			return 0, ctx.Err()
		}
	}
	// The slow log keeps the arguments of slow commands.
	for _, command := range [][]any{{"slowlog", "reset"}, {"memory", "purge"}} {
		if err := rdb.Do(ctx, command...).Err(); err != nil {
			return 0, err
		}
	}
	held, err := redisMemory(ctx, rdb)
	if err != nil {
		return 0, err
	}
	lent, err := lentToClients(ctx, rdb)
	return held - lent, err
}

// lentToClients is the memory of all client connections in Redis, including ours. Their buffers grow
// and shrink.
func lentToClients(ctx context.Context, rdb redis.UniversalClient) (int64, error) {
	list, err := rdb.ClientList(ctx).Result()
	if err != nil {
		return 0, err
	}
	var sum int64
	for client := range strings.Lines(list) {
		_, rest, _ := strings.Cut(client, " tot-mem=")
		value, _, _ := strings.Cut(rest, " ")
		bytes, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("CLIENT LIST: tot-mem: %w", err)
		}
		sum += bytes
	}
	return sum, nil
}
