package lock_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/lock"
)

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.WithCommand(command), testkit.WithRedisInMemory())
}

// command is a process that holds a lock:
//
//	hold KEY
//
// It waits for the lock of KEY in the Redis of REDIS_URL, prints "held token=N", and answers the
// commands on its standard input with the error of the lease (look) or of its release (release).
// The watchdog renews the lease, of LOCK_LEASE or 30s.
// When the lease ends, it prints "ended: " and the cause of its context. It does not end with its
// standard input but by a signal, and releases nothing then.
func command() int {
	if len(os.Args) != 3 || os.Args[1] != "hold" {
		fmt.Fprintln(os.Stderr, "usage: hold KEY")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runHolder(ctx, os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runHolder(ctx context.Context, key string) error {
	options, err := redis.ParseURL(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	var opts []lock.Option
	if length := os.Getenv("LOCK_LEASE"); length != "" {
		d, err := time.ParseDuration(length)
		if err != nil {
			return err
		}
		opts = append(opts, lock.WithLease(d))
	}
	lease, err := lock.New(redis.NewClient(options), opts...).Acquire(ctx, key)
	if err != nil {
		return err
	}
	held := lease.Context(ctx)
	context.AfterFunc(held, func() { fmt.Println("ended:", context.Cause(held)) })
	fmt.Printf("held token=%d\n", lease.Token(key))
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		err := lease.Err()
		if lines.Text() == "release" {
			err = lease.Release(ctx)
		}
		fmt.Printf("%s: %v\n", lines.Text(), err)
	}
	<-ctx.Done()
	return nil
}

// startCluster returns a client of a Redis Cluster of n nodes without replicas.
func startCluster(t *testing.T, n int) *redis.ClusterClient {
	t.Helper()
	t.Parallel()
	cluster, err := localserver.StartCluster(t.Context(), localserver.ClusterOptions{Masters: n})
	require.NoError(t, err)
	t.Cleanup(cluster.Stop)
	addrs := make([]string, n)
	for i, node := range cluster.Nodes {
		addrs[i] = node.Addr()
	}
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() { _ = client.Close() })
	return client
}
