//go:build system

package localserver_test

import (
	"context"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
)

func TestRedisKeepsWritesAfterSIGKILL(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	client := redisAt(t, server.URL)
	for name, want := range map[string]string{
		"appendonly": "yes", "appendfsync": "always",
		"maxmemory-policy": "noeviction", "save": "", "maxmemory": "1073741824", "bind": "127.0.0.1",
	} {
		assert.Equal(t, want, client.ConfigGet(t.Context(), name).Val()[name], name)
	}
	require.NoError(t, client.Set(t.Context(), "kept", "yes", 0).Err())

	before := server.Pid()
	server.Kill()
	require.Zero(t, server.Pid())
	require.False(t, listens(t, server.URL))
	require.NoError(t, server.Restart(t.Context()))
	require.NotEqual(t, before, server.Pid())
	require.Equal(t, "yes", client.Get(t.Context(), "kept").Val())

	require.NoError(t, server.Restart(t.Context()), "restart of a running server")
	require.Equal(t, "yes", client.Get(t.Context(), "kept").Val())
}

func TestFrozenRedisAnswersAfterThaw(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	client := redisAt(t, server.URL)
	require.NoError(t, client.Ping(t.Context()).Err())

	server.Freeze()
	require.True(t, listens(t, server.URL), "the kernel accepts connections")
	answered := make(chan error, 1)
	go func() { answered <- client.Set(t.Context(), "asked", "while frozen", 0).Err() }()
	select {
	case err := <-answered:
		t.Fatalf("a frozen server answered: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	server.Thaw()
	require.NoError(t, <-answered)

	server.Freeze()
	require.NoError(t, server.Restart(t.Context()), "clean restart of a frozen server")
	require.Equal(t, "while frozen", client.Get(t.Context(), "asked").Val())
	server.Freeze()
	server.Kill()
	require.Zero(t, server.Pid())
	server.Freeze()
	server.Thaw()
}

func TestPostgresKeepsCommitsAfterImmediateStop(t *testing.T) {
	t.Parallel()
	server, err := localserver.StartPostgres(t.Context(), localserver.PostgresOptions{})
	require.NoError(t, err)
	t.Cleanup(server.Stop)
	var fsync, commit string
	query(t, server.URL, "SELECT current_setting('fsync'), current_setting('synchronous_commit')", &fsync, &commit)
	assert.Equal(t, "on", fsync)
	assert.Equal(t, "on", commit)
	query(t, server.URL, "CREATE TABLE kept AS SELECT 1")

	server.StopImmediate()
	require.Zero(t, server.Pid())
	require.False(t, listens(t, server.URL))
	require.NoError(t, server.Restart(t.Context()))
	var rows int
	query(t, server.URL, "SELECT count(*) FROM kept", &rows)
	require.Equal(t, 1, rows)
}

// Clients that learn the cluster from any of its nodes would otherwise ask the wrong one.
func TestEachNodeOfANewClusterKnowsAllSlots(t *testing.T) {
	t.Parallel()
	var starting errgroup.Group // together, so that the nodes are slow to meet
	for range 8 {
		starting.Go(func() error {
			cluster, err := localserver.StartCluster(t.Context(), localserver.ClusterOptions{Masters: 3})
			if err != nil {
				return err
			}
			defer cluster.Stop()
			for i, node := range cluster.Nodes {
				ranges, err := redisAt(t, node.URL).ClusterSlots(t.Context()).Result()
				if err != nil {
					return err
				}
				slots := 0
				for _, known := range ranges {
					slots += known.End - known.Start + 1
				}
				assert.Equal(t, 16384, slots, "slots that node %d knows", i)
			}
			return nil
		})
	}
	require.NoError(t, starting.Wait())
}

func TestWatchReturnsEndedServer(t *testing.T) {
	t.Parallel()
	pair, err := localserver.Provide(t.Context(), localserver.Wanted{})
	require.NoError(t, err)
	t.Cleanup(pair.Stop)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, pair.Watch(ctx), "ctx has ended")
	require.NoError(t, syscall.Kill(pair.Redis.Pid(), syscall.SIGKILL))
	require.EqualError(t, pair.Watch(t.Context()), "the private Redis ended unexpectedly (signal: killed)")
	require.NoError(t, pair.Redis.Restart(t.Context()))
	require.NoError(t, syscall.Kill(pair.Postgres.Pid(), syscall.SIGKILL))
	require.EqualError(t, pair.Watch(t.Context()), "the private Postgres ended unexpectedly (signal: killed)")
}

func TestSweepKeepsFoldersInUse(t *testing.T) {
	t.Setenv("TMPDIR", tempFolder(t))
	first, err := localserver.StartRedis(t.Context(), localserver.RedisOptions{})
	require.NoError(t, err)
	t.Cleanup(first.Stop)
	second, err := localserver.StartRedis(t.Context(), localserver.RedisOptions{})
	require.NoError(t, err)
	t.Cleanup(second.Stop)
	require.NoError(t, first.Restart(t.Context()), "its folder must exist")
}

func TestConcurrentFirstStartsOfPostgres(t *testing.T) {
	temp := tempFolder(t)
	t.Setenv("TMPDIR", temp)
	var starting sync.WaitGroup
	for range 3 {
		starting.Go(func() {
			server, err := localserver.StartPostgres(context.Background(), localserver.PostgresOptions{})
			if assert.NoError(t, err) {
				server.Stop()
			}
		})
	}
	starting.Wait()
	kept, err := filepath.Glob(filepath.Join(temp, "*", "*"))
	require.NoError(t, err)
	require.Len(t, kept, 1, "only the template")
}

func TestStartErrorContainsOutput(t *testing.T) {
	temp := tempFolder(t)
	t.Setenv("TMPDIR", temp)
	_, err := localserver.StartRedis(t.Context(),
		localserver.RedisOptions{Settings: map[string]string{"maxmemory-policy": "nonsense"}})
	require.ErrorContains(t, err, "Redis ended instead of starting")
	require.ErrorContains(t, err, "maxmemory-policy")

	_, err = localserver.StartPostgres(t.Context(),
		localserver.PostgresOptions{Settings: map[string]string{"nonsense": "1"}})
	require.ErrorContains(t, err, "Postgres ended instead of starting")
	require.ErrorContains(t, err, `unrecognized configuration parameter "nonsense"`)
	require.Empty(t, serverFolders(t, temp))
}

func TestStartEndsWithContext(t *testing.T) {
	t.Setenv("TMPDIR", tempFolder(t))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := localserver.StartRedis(ctx, localserver.RedisOptions{})
	require.ErrorIs(t, err, context.Canceled)
	_, err = localserver.StartPostgres(ctx, localserver.PostgresOptions{})
	require.ErrorIs(t, err, context.Canceled)
}

func TestProvideKeepsGivenURLs(t *testing.T) {
	t.Parallel()
	pair, err := localserver.Provide(t.Context(), localserver.Wanted{
		RedisURL: "redis://elsewhere", DatabaseURL: "postgres://elsewhere",
	})
	require.NoError(t, err)
	require.Equal(t, &localserver.Pair{RedisURL: "redis://elsewhere", DatabaseURL: "postgres://elsewhere"}, pair)
	pair.Stop()
}

func TestRestartAfterStopFails(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	server.Stop()
	server.Stop()
	require.ErrorContains(t, server.Restart(t.Context()), "was stopped")
}

// tempFolder returns a folder for TMPDIR that, unlike t.TempDir, the account of the servers can enter.
func tempFolder(t *testing.T) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "localserver-test-")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(folder)) })
	require.NoError(t, os.Chmod(folder, 0o755))
	return folder
}

// serverFolders returns the folders of all servers, running or not.
func serverFolders(t *testing.T, temp string) []string {
	t.Helper()
	locks, err := filepath.Glob(filepath.Join(temp, "*", "*.lock"))
	require.NoError(t, err)
	for i, lock := range locks {
		locks[i] = strings.TrimSuffix(lock, ".lock")
		require.DirExists(t, locks[i])
	}
	return locks
}

func redisAt(t *testing.T, redisURL string) redis.UniversalClient {
	t.Helper()
	client := testkit.Control(t, redisURL)
	return client
}

// query runs a statement on a new connection and scans its row into row, if given.
func query(t *testing.T, databaseURL, statement string, row ...any) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), databaseURL)
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(context.Background())) }()
	if len(row) == 0 {
		_, err = conn.Exec(t.Context(), statement)
	} else {
		err = conn.QueryRow(t.Context(), statement).Scan(row...)
	}
	require.NoError(t, err)
}

func listens(t *testing.T, serverURL string) bool {
	t.Helper()
	u, err := url.Parse(serverURL)
	require.NoError(t, err)
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		return false
	}
	return assert.NoError(t, conn.Close())
}
