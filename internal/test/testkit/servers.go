package testkit

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/reservation"
	"stampede/sql"
	"stampede/sql/migrate"
)

// private holds the servers that this process started for all its tests.
var private struct {
	mu       sync.Mutex
	redis    *localserver.Redis
	postgres *localserver.Postgres
	// redisOptions are set before the first test.
	redisOptions localserver.RedisOptions
}

func stopServers() {
	private.mu.Lock()
	defer private.mu.Unlock()
	(&localserver.Pair{Redis: private.redis, Postgres: private.postgres}).Stop()
}

// EnvRedis and EnvPostgres give test processes the servers that they share (internal/test/testservers).
const (
	EnvRedis    = "STAMPEDE_TEST_REDIS_URL"
	EnvPostgres = "STAMPEDE_TEST_DATABASE_URL"
)

// given returns the URL of a server that runs for these tests. Go caches the result of a package by the variables that
// it reads with os.Getenv: the address of a private server differs in each run and must not be one of them, but PATH,
// which decides its version, must be.
func given(private, public string) string {
	if url, found := syscall.Getenv(private); found && os.Getenv("PATH") != "" {
		return url
	}
	return os.Getenv(public)
}

// RedisURL returns the URL of the Redis that all tests share.
func RedisURL(t testing.TB) string {
	t.Helper()
	if url := given(EnvRedis, "REDIS_URL"); url != "" && private.redisOptions.Settings == nil {
		return url
	}
	private.mu.Lock()
	defer private.mu.Unlock()
	if private.redis == nil {
		server, err := localserver.StartRedis(context.Background(), private.redisOptions)
		if err != nil {
			t.Fatalf("the tests need Redis: %v", err)
		}
		private.redis = server
	}
	return private.redis.URL
}

// postgresURL returns the URL of the Postgres for the databases of tests.
func postgresURL(t testing.TB) string {
	t.Helper()
	if url := given(EnvPostgres, "DATABASE_URL"); url != "" {
		return url
	}
	private.mu.Lock()
	defer private.mu.Unlock()
	if private.postgres == nil {
		server, err := localserver.StartPostgres(context.Background(), localserver.PostgresOptions{})
		if err != nil {
			t.Fatalf("the tests need Postgres: %v", err)
		}
		private.postgres = server
	}
	return private.postgres.URL
}

// Redis returns a control client on the shared server, which is closed when the test ends.
func Redis(t testing.TB) redis.UniversalClient {
	t.Helper()
	return Control(t, RedisURL(t))
}

// Control returns a control client of the server at the URL, which is closed when the test ends.
func Control(t testing.TB, url string) redis.UniversalClient {
	t.Helper()
	return client(t, connect.Control, url)
}

// Blocking returns a blocking client of the server at the URL, which is closed when the test ends.
func Blocking(t testing.TB, url string) redis.UniversalClient {
	t.Helper()
	return client(t, connect.Blocking, url)
}

func client[C redis.UniversalClient](t testing.TB, connect func(url string) (C, error), url string) C {
	t.Helper()
	rdb, err := connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// Client returns a client of the server at the URL, which is closed when the test ends.
func Client(t testing.TB, url string) *redis.Client {
	t.Helper()
	o, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	o.DialerRetries = 1 // as the clients of package connect: otherwise a refused call takes most of CallTimeout
	client := redis.NewClient(o)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// Keys returns keys with the test's own prefix, in one partition. They are deleted when the test ends.
func Keys(t testing.TB) reservation.Keys {
	t.Helper()
	keys := reservation.Keys{Prefix: "test-" + rand.Text(), Partitions: 1}
	client := Redis(t)
	t.Cleanup(func() { deleteKeys(t, client, keys.Prefix) })
	return keys
}

// deleteKeys deletes the keys with a prefix, on all masters of a cluster.
func deleteKeys(t testing.TB, client redis.UniversalClient, prefix string) {
	ctx := context.Background()
	var err error
	switch client := client.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, func(ctx context.Context, master *redis.Client) error {
			return deleteKeysOn(ctx, master, prefix)
		})
	case *redis.Client:
		err = deleteKeysOn(ctx, client, prefix)
	}
	if err != nil {
		t.Errorf("delete the keys of the test: %v", err)
	}
}

func deleteKeysOn(ctx context.Context, client *redis.Client, prefix string) error {
	const page = 1000
	pipe := client.Pipeline()
	found := client.Scan(ctx, 0, prefix+":*", page).Iterator()
	for found.Next(ctx) {
		pipe.Unlink(ctx, found.Val())
	}
	if err := found.Err(); err != nil || pipe.Len() == 0 {
		return err
	}
	_, err := pipe.Exec(ctx)
	return err
}

// VerifyServer marks the running server as verified for a partition, as a worker does after a rebuild. It is for
// tests that restart Redis without a loss and run no worker.
func VerifyServer(t testing.TB, pool *pgxpool.Pool, store *reservation.Store, partition int) {
	t.Helper()
	ctx := t.Context()
	var state reservation.ServerState
	Eventually(t, 30*time.Second, "Redis returns its identity", func() bool {
		var err error
		state, err = store.Inspect(ctx, partition)
		return err == nil
	})
	if _, err := pool.Exec(ctx, sql.RebuildSaveServer, partition, state.RunID, state.ReplicationID); err != nil {
		t.Fatal(err)
	}
	token := reservation.NewRebuildToken()
	if err := errors.Join(store.DistrustFor(ctx, partition, token),
		store.MarkVerified(ctx, partition, state, token)); err != nil {
		t.Fatal(err)
	}
}

// OwnRedis starts a Redis for this test only, which it may kill and restart.
func OwnRedis(t testing.TB) *localserver.Redis {
	t.Helper()
	server, err := localserver.StartRedis(t.Context(), localserver.RedisOptions{})
	if err != nil {
		t.Fatalf("the test needs its own Redis: %v", err)
	}
	t.Cleanup(server.Stop)
	return server
}

// OwnPostgres starts a migrated Postgres for this test only, which it may stop and restart.
func OwnPostgres(t testing.TB) *localserver.Postgres {
	t.Helper()
	server, err := localserver.StartPostgres(t.Context(), localserver.PostgresOptions{})
	if err != nil {
		t.Fatalf("the test needs its own Postgres: %v", err)
	}
	t.Cleanup(server.Stop)
	if err := migrate.Up(t.Context(), server.URL); err != nil {
		t.Fatal(err)
	}
	return server
}

// OwnCluster starts a Redis Cluster of three masters, each with one replica, for this test only.
func OwnCluster(t testing.TB) *localserver.Cluster {
	t.Helper()
	cluster, err := localserver.StartCluster(t.Context(), localserver.ClusterOptions{Masters: 3, Replicas: 1})
	if err != nil {
		t.Fatalf("the test needs its own Redis Cluster: %v", err)
	}
	t.Cleanup(cluster.Stop)
	return cluster
}

// OwnSentinels starts a Redis with a replica and three Sentinels for this test only.
func OwnSentinels(t testing.TB) *localserver.Sentinels {
	t.Helper()
	sentinels, err := localserver.StartSentinels(t.Context())
	if err != nil {
		t.Fatalf("the test needs its own Redis with Sentinels: %v", err)
	}
	t.Cleanup(sentinels.Stop)
	return sentinels
}
