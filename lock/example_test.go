package lock_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/internal/localserver"
	"stampede/lock"
)

func ExampleLocker_TryEach() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()

	locker := lock.New(rdb)
	defer locker.Close(ctx)
	ann, bob, cid := "{example}:ann", "{example}:bob", "{example}:cid"

	first, _, err := locker.TryEach(ctx, []string{ann, bob}, lock.For(10*time.Second))
	if err != nil {
		fmt.Println(err)
		return
	}
	second, busy, err := locker.TryEach(ctx, []string{bob, cid}, lock.For(10*time.Second))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("first: ", first.Keys())
	fmt.Println("second:", second.Keys(), "busy:", busy)

	// With the context of a lease, what it calls may take the same locks once more.
	deeper, busy, err := locker.TryEach(first.Context(ctx), []string{ann}, lock.For(10*time.Second))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("deeper:", deeper.Keys(), "busy:", busy)

	// Redis loses a lock, and its holder hears of it.
	rdb.Del(ctx, cid)
	for _, lease := range []*lock.Lease{deeper, second, first} {
		if err := lease.Release(ctx); errors.Is(err, lock.ErrLost) {
			fmt.Println(err)
		}
	}
	// Output:
	// first:  [{example}:ann {example}:bob]
	// second: [{example}:cid] busy: [{example}:bob]
	// deeper: [{example}:ann] busy: []
	// lock lost: {example}:cid
}

// exampleRedis is the Redis that the tests are given, or one of the example's own.
func exampleRedis(ctx context.Context) (*redis.Client, func()) {
	url, stop := os.Getenv("REDIS_URL"), func() {}
	if url == "" {
		server, err := localserver.StartRedis(ctx, localserver.RedisOptions{})
		if err != nil {
			panic(err)
		}
		url, stop = server.URL, server.Stop
	}
	options, err := redis.ParseURL(url)
	if err != nil {
		panic(err)
	}
	rdb := redis.NewClient(options)
	return rdb, func() { _ = rdb.Close(); stop() }
}
