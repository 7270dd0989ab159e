package lock_test

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

// Kinds of calls to Redis.
const (
	acquireCalls = iota
	releaseCalls
	renewalCalls
	forceCalls
	otherCalls
)

// callCounter counts the answered calls of one client, and can replace Redis.
type callCounter struct {
	hashes []string // of the scripts

	mu    sync.Mutex
	count [otherCalls + 1]int
	// sizes are the numbers of keys of each renewal.
	sizes []int
	// instead replaces Redis for each command, if it is set.
	instead func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error
}

// countCalls counts from now on. It does not count go-redis's retries, and loads the scripts so
// that none is sent twice.
func countCalls(t *testing.T, rdb *redis.Client) *callCounter {
	t.Helper()
	c := &callCounter{}
	for _, script := range []*redis.Script{lua.LockAcquire, lua.LockRelease, lua.LockRenew, lua.LockForce} {
		hash, err := script.Load(t.Context(), rdb).Result()
		require.NoError(t, err)
		c.hashes = append(c.hashes, hash)
	}
	rdb.AddHook(testkit.Hook(c.process))
	return c
}

func (c *callCounter) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	kind := otherCalls
	if args := cmd.Args(); len(args) > 2 && args[0] == "evalsha" {
		kind = slices.Index(c.hashes, args[1].(string))
	}
	c.mu.Lock()
	instead := c.instead
	c.mu.Unlock()
	var err error
	if instead != nil {
		err = instead(kind, next, ctx, cmd)
	} else {
		err = next(ctx, cmd)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count[kind]++
	if kind == renewalCalls {
		c.sizes = append(c.sizes, cmd.Args()[2].(int))
	}
	return err
}

// answer makes f answer each command; nil restores Redis.
func (c *callCounter) answer(f func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.instead = f
}

func (c *callCounter) calls(kind int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count[kind]
}

func (c *callCounter) all() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	sum := 0
	for _, n := range c.count {
		sum += n
	}
	return sum
}

// renewedKeys returns the number of keys of each renewal.
func (c *callCounter) renewedKeys() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.sizes)
}
