package lock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/internal/dev/localserver"
	"stampede/lock"
)

// The lease is renewed until its release, however long the work takes.
func ExampleLocker_Acquire() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)

	lease, err := locker.Acquire(ctx, "{example}:invoice")
	if err != nil {
		log.Fatal(err)
	}
	defer func() {
		if err := lease.Release(ctx); err != nil {
			log.Print(err) // the lock was lost, or Redis is unavailable and the lock ends by itself
		}
	}()
	fmt.Println(lease.Keys(), lease.Err())
	// Output: [{example}:invoice] <nil>
}

// A context with a deadline bounds the wait.
func ExampleLocker_Acquire_waitingForSomeTime() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)

	lease, err := locker.Acquire(ctx, "{example}:invoice", lock.For(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
	patient, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	_, err = locker.Acquire(patient, "{example}:invoice")
	fmt.Println(errors.Is(err, lock.ErrBusy), errors.Is(err, context.DeadlineExceeded))
	fmt.Println(lease.Release(ctx))
	// Output:
	// true true
	// <nil>
}

// Look shows operators who holds a lock and for how long.
func ExampleLocker_Look() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)

	lease, err := locker.TryAcquire(ctx, "{example}:invoice", lock.For(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
	now, err := locker.Look(ctx, "{example}:invoice")
	fmt.Println(now.Held(), now.Mine, now.Depth, now.Left > 50*time.Second, err)
	fmt.Println(lease.Release(ctx))
	now, err = locker.Look(ctx, "{example}:invoice")
	fmt.Println(now.Held(), err)
	// Output:
	// true true 1 true <nil>
	// <nil>
	// false <nil>
}

func ExampleLocker_TryAcquire() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)

	first, err := locker.TryAcquire(ctx, "{example}:invoice")
	if err != nil {
		log.Fatal(err)
	}
	_, err = locker.TryAcquire(ctx, "{example}:invoice")
	fmt.Println(errors.Is(err, lock.ErrBusy), err)
	fmt.Println(first.Release(ctx))
	// Output:
	// true lock busy: {example}:invoice
	// <nil>
}

// A function called by Do reenters the lock through its context.
func ExampleLocker_Do() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)

	write := func(ctx context.Context) error {
		return locker.Do(ctx, "{example}:invoice", func(context.Context) error {
			fmt.Println("writing")
			return nil
		})
	}
	err := locker.Do(ctx, "{example}:invoice", func(ctx context.Context) error {
		fmt.Println("alone")
		return write(ctx)
	})
	fmt.Println(err)
	// Output:
	// alone
	// writing
	// <nil>
}

func ExampleLocker_AcquireAll() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)

	transfer, err := locker.AcquireAll(ctx, []string{"{example}:account:1", "{example}:account:2"})
	if err != nil {
		log.Fatal(err)
	}
	_, err = locker.TryAcquire(ctx, "{example}:account:2")
	fmt.Println(err)
	fmt.Println(transfer.Release(ctx))
	// Output:
	// lock busy: {example}:account:2
	// <nil>
}

// A worker locks those users of a batch that no other worker has locked.
func ExampleLocker_TryEach() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)
	ann, bob, cid := "{example}:ann", "{example}:bob", "{example}:cid"

	first, _, err := locker.TryEach(ctx, []string{ann, bob}, lock.For(10*time.Second))
	if err != nil {
		log.Fatal(err)
	}
	second, busy, err := locker.TryEach(ctx, []string{bob, cid}, lock.For(10*time.Second))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("first: ", first.Keys())
	fmt.Println("second:", second.Keys(), "busy:", busy)

	// Redis loses a lock. The release reports it.
	rdb.Del(ctx, cid)
	for _, lease := range []*lock.Lease{second, first} {
		fmt.Println(lease.Release(ctx))
	}
	// Output:
	// first:  [{example}:ann {example}:bob]
	// second: [{example}:cid] busy: [{example}:bob]
	// lock lost: {example}:cid
	// <nil>
}

// The context of a lease ends when the lock is lost, here because the lease was too short.
func ExampleLease_Context() {
	ctx := context.Background()
	rdb, stop := exampleRedis(ctx)
	defer stop()
	locker := lock.New(rdb)
	defer closeExample(ctx, locker)

	lease, err := locker.Acquire(ctx, "{example}:invoice", lock.For(time.Second))
	if err != nil {
		log.Fatal(err)
	}
	working := lease.Context(ctx)
	<-working.Done() // longer than the lease
	fmt.Println(context.Cause(working))
	fmt.Println(lease.Err())
	fmt.Println(errors.Is(lease.Release(ctx), lock.ErrLost))
	// Output:
	// lock lost: {example}:invoice
	// lock lost: {example}:invoice
	// true
}

// A lock on three servers works while one of them is away.
func ExampleMulti() {
	ctx := context.Background()
	var nodes []*lock.Locker
	for range 3 {
		rdb, stop := startExampleRedis(ctx)
		defer stop()
		locker := lock.New(rdb)
		defer closeExample(ctx, locker)
		nodes = append(nodes, locker)
	}
	multi, err := lock.NewMulti(nodes)
	if err != nil {
		log.Fatal(err)
	}
	err = multi.Do(ctx, "invoice", func(ctx context.Context) error {
		fmt.Println("alone")
		return nil
	})
	fmt.Println(err)
	// Output:
	// alone
	// <nil>
}

func closeExample(ctx context.Context, locker *lock.Locker) {
	if err := locker.Close(ctx); err != nil {
		log.Fatal(err)
	}
}

// exampleRedis connects to the Redis of the tests, or starts one.
func exampleRedis(ctx context.Context) (*redis.Client, func()) {
	if url := os.Getenv("REDIS_URL"); url != "" {
		return exampleClient(url, func() {})
	}
	return startExampleRedis(ctx)
}

func startExampleRedis(ctx context.Context) (*redis.Client, func()) {
	server, err := localserver.StartRedis(ctx, localserver.RedisOptions{})
	if err != nil {
		log.Fatal(err)
	}
	return exampleClient(server.URL, server.Stop)
}

func exampleClient(url string, stop func()) (*redis.Client, func()) {
	options, err := redis.ParseURL(url)
	if err != nil {
		log.Fatal(err)
	}
	rdb := redis.NewClient(options)
	return rdb, func() { _ = rdb.Close(); stop() }
}
