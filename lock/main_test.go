package lock_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
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
// It waits for the lock of KEY in the Redis of REDIS_URL, prints "held token=N", and runs the
// commands on its standard input; see run. The watchdog renews the lease, of LOCK_LEASE or 30s.
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
	h := &holderProcess{lease: lease, token: lease.Token(key)}
	if url := os.Getenv("DATABASE_URL"); url != "" {
		if h.database, err = pgx.Connect(ctx, url); err != nil {
			return err
		}
	}
	held := lease.Context(ctx)
	context.AfterFunc(held, func() { fmt.Println("ended:", context.Cause(held)) })
	fmt.Printf("held token=%d\n", h.token)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		fmt.Printf("%s: %s\n", lines.Text(), h.run(ctx, lines.Text()))
	}
	<-ctx.Done()
	return nil
}

// holderProcess is the part of a test that runs in the process of command.
type holderProcess struct {
	lease    *lock.Lease
	token    int64
	database *pgx.Conn // with the row of fencedRow; nil without DATABASE_URL
}

// run runs the command in the first word of a line and returns the result in one line:
//
//	look     asks the lease whether it is still held
//	write    like look, and writes to the database if the lease is held
//	blind    writes without asking, as a holder that stalls between the check and the write
//	release  releases the lock
func (h *holderProcess) run(ctx context.Context, line string) string {
	said := func(err error, good string) string {
		switch {
		case errors.Is(err, lock.ErrLost):
			return "lost"
		case err != nil:
			return err.Error()
		}
		return good
	}
	verb, _, _ := strings.Cut(line, " ")
	switch verb {
	case "look":
		return said(h.lease.Err(), "held")
	case "write":
		if err := h.lease.Err(); err != nil {
			return said(err, "")
		}
		fallthrough
	case "blind":
		written, err := writeFenced(ctx, h.database, h.token)
		if err == nil && !written {
			return "refused"
		}
		return said(err, "written")
	case "release":
		return said(h.lease.Release(ctx), "released")
	}
	return "what?"
}

// fencedRow creates a row whose fence is the largest token that wrote to it.
const fencedRow = `CREATE TABLE fenced (fence bigint NOT NULL, writes int NOT NULL); INSERT INTO fenced VALUES (0, 0)`

// writeFenced reports whether the row accepted a write with this token.
func writeFenced(ctx context.Context, database interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}, token int64,
) (bool, error) {
	tag, err := database.Exec(ctx, `UPDATE fenced SET fence = $1, writes = writes + 1 WHERE fence <= $1`, token)
	return tag.RowsAffected() == 1, err
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
