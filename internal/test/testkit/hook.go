package testkit

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// Hook is a go-redis hook that is called for each single command of a client.
type Hook func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error

// DialHook implements redis.Hook.
func (h Hook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (h Hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return h(next, ctx, cmd) }
}

// ProcessPipelineHook implements redis.Hook.
func (h Hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
