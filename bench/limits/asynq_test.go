package limits

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/reservation/order"
)

const (
	// asynqDatabase is the Redis database of asynq alone: its keys have no prefix.
	asynqDatabase = 1
	// asynqPool is the number of asynq's connections: with AOF always, more concurrent calls make Redis
	// faster.
	asynqPool = 64

	taskOrder  = "order"
	taskOrders = "orders" // grouped by asynq
	// asynqGroupMax is how many orders asynq puts into one task.
	asynqGroupMax = 500
	// asynqGrace is how long a group waits for more, the minimum of asynq; asynq also looks at groups
	// this often.
	asynqGrace = time.Second
)

func asynqRedis(url string) (asynq.RedisClientOpt, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return asynq.RedisClientOpt{}, err
	}
	return asynq.RedisClientOpt{Addr: o.Addr, DB: asynqDatabase, PoolSize: asynqPool}, nil
}

// consumeAsynq runs several asynq servers in one process: each fetches its tasks one by one, and waits
// for Redis's disk each time.
func consumeAsynq(ctx context.Context, c consumer, ready func()) error {
	opt, err := asynqRedis(c.RedisURL)
	if err != nil {
		return err
	}
	mux := asynq.NewServeMux()
	mux.HandleFunc(taskOrder, func(ctx context.Context, task *asynq.Task) error {
		var j job
		if err := json.Unmarshal(task.Payload(), &j); err != nil {
			return err
		}
		return c.record(ctx, j.event())
	})
	mux.HandleFunc(taskOrders, func(ctx context.Context, task *asynq.Task) error {
		var events []order.OrderReserved
		for line := range bytes.Lines(task.Payload()) {
			var j job
			if err := json.Unmarshal(line, &j); err != nil {
				return err
			}
			events = append(events, j.event())
		}
		return c.recordAll(ctx, events)
	})
	config := asynq.Config{
		Concurrency: c.Handlers, TaskCheckInterval: 5 * time.Millisecond, LogLevel: asynq.ErrorLevel,
		BaseContext: func() context.Context { return context.WithoutCancel(ctx) },
	}
	if c.Groups > 0 {
		config.GroupAggregator = asynq.GroupAggregatorFunc(joinTasks)
		config.GroupMaxSize, config.GroupGracePeriod, config.GroupMaxDelay = asynqGroupMax, asynqGrace, asynqGrace
	}
	for range c.Servers {
		server := asynq.NewServer(opt, config)
		if err := server.Start(mux); err != nil {
			return err
		}
		defer server.Shutdown()
	}
	ready()
	<-ctx.Done()
	return nil
}

// joinTasks makes one task of those in a group: their payloads, one per line.
func joinTasks(_ string, tasks []*asynq.Task) *asynq.Task {
	var lines []byte
	for _, task := range tasks {
		lines = append(append(lines, task.Payload()...), '\n')
	}
	return asynq.NewTask(taskOrders, lines)
}

// fillAsynq enqueues one task per order, and spreads them over the groups, if any.
func fillAsynq(b *testing.B, redisURL string, orders []job, groups int) {
	b.Helper()
	opt, err := asynqRedis(redisURL)
	require.NoError(b, err)
	client := asynq.NewClient(opt)
	var enqueuing errgroup.Group
	var next atomic.Int64
	for range asynqPool {
		enqueuing.Go(func() error {
			for i := next.Add(1) - 1; i < int64(len(orders)); i = next.Add(1) - 1 {
				payload, err := json.Marshal(orders[i])
				if err != nil {
					return err
				}
				var options []asynq.Option
				if groups > 0 {
					options = append(options, asynq.Group(fmt.Sprint(i%int64(groups))))
				}
				if _, err := client.Enqueue(asynq.NewTask(taskOrder, payload), options...); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(b, errors.Join(enqueuing.Wait(), client.Close()))
}

// forgetAsynq deletes what a turn has left in Redis.
func forgetAsynq(b *testing.B, redisURL string) {
	b.Helper()
	o, err := redis.ParseURL(redisURL)
	require.NoError(b, err)
	o.DB = asynqDatabase
	client := redis.NewClient(o)
	require.NoError(b, errors.Join(client.FlushDB(context.Background()).Err(), client.Close()))
}
