package testkit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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

// poolConnections is small because tests in parallel share the server's 200 connections.
const poolConnections = 8

// templateLock is the advisory lock for creating the template, for test processes that share a server.
const templateLock = 5_077_217_433

var (
	databases sync.Map // testing.TB → func() string, the URL of the test's database
	// templated holds the names of existing templates by the server's URL.
	templated struct {
		sync.Mutex
		name map[string]string
	}
)

// Pool returns a pool on the test's own database, which is migrated. It is closed when the test ends.
func Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return PoolAt(t, DatabaseURL(t), poolConnections)
}

// PoolAt returns a pool of so many connections to the database at the URL. It is closed when the test ends.
func PoolAt(t testing.TB, url string, connections int32, options ...connect.PostgresOption) *pgxpool.Pool {
	t.Helper()
	pool, err := connect.Postgres(t.Context(), url, connections, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// DatabaseURL returns the URL of the test's own database. All calls of a test return the same one. The database
// is dropped when the test ends.
func DatabaseURL(t testing.TB) string {
	t.Helper()
	made, _ := databases.LoadOrStore(t, sync.OnceValues(func() (string, error) { return newDatabase(t) }))
	databaseURL, err := made.(func() (string, error))()
	if err != nil {
		t.Fatalf("create the database of the test: %v", err)
	}
	return databaseURL
}

func newDatabase(t testing.TB) (string, error) {
	t.Cleanup(func() { databases.Delete(t) })
	server := postgresURL(t)
	ctx := context.Background() // the test's own context ends before its cleanups
	template, err := template(ctx, server)
	if err != nil {
		return "", err
	}
	name := "stampede_test_" + strings.ToLower(rand.Text())
	if err := administer(ctx, server, "CREATE DATABASE "+name+" TEMPLATE "+template+" STRATEGY FILE_COPY"); err != nil {
		return "", err
	}
	t.Cleanup(func() {
		if err := administer(ctx, server, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Errorf("drop the database of the test: %v", err)
		}
	})
	return inDatabase(server, name)
}

// template returns the name of a migrated database to copy. Each server has one per schema, named after
// the schema, so that checkouts with different schemas can share a server.
func template(ctx context.Context, server string) (string, error) {
	templated.Lock()
	defer templated.Unlock()
	if name := templated.name[server]; name != "" {
		return name, nil
	}
	fingerprint, err := sql.Fingerprint()
	if err != nil {
		return "", err
	}
	name := "stampede_template_" + fingerprint
	if err := createTemplate(ctx, server, name); err != nil {
		return "", fmt.Errorf("create the template: %w", err)
	}
	if templated.name == nil {
		templated.name = make(map[string]string)
	}
	templated.name[server] = name
	return name, nil
}

// createTemplate creates the template unless it exists. It is renamed once it is complete, so an unfinished
// one of a killed process is created again.
func createTemplate(ctx context.Context, server, name string) (err error) {
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }() // also unlocks
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", templateLock); err != nil {
		return err
	}
	var exists bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)",
		name).Scan(&exists); err != nil || exists {
		return err
	}
	unfinished := name + "_unfinished"
	for _, statement := range []string{
		"DROP DATABASE IF EXISTS " + unfinished + " WITH (FORCE)",
		"CREATE DATABASE " + unfinished,
	} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return err
		}
	}
	unfinishedURL, err := inDatabase(server, unfinished)
	if err != nil {
		return err
	}
	if err := migrate.Up(ctx, unfinishedURL); err != nil {
		return err
	}
	for _, statement := range []string{
		// A template cannot be copied while it has connections.
		"ALTER DATABASE " + unfinished + " WITH ALLOW_CONNECTIONS false",
		"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '" + unfinished + "'",
		"ALTER DATABASE " + unfinished + " RENAME TO " + name,
	} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

func administer(ctx context.Context, server, statement string) (err error) {
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	_, err = conn.Exec(ctx, statement)
	return err
}

// inDatabase returns the URL with the name of another database.
func inDatabase(server, name string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Host == "" {
		return "", sql.ErrDatabaseURL
	}
	u.Path = "/" + name
	return u.String(), nil
}

// fakers are where packages put the library that fakes the clock of a process.
var fakers = []string{
	"/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1",
	"/usr/lib64/faketime/libfaketimeMT.so.1",
}

// ClockedPostgres starts a migrated Postgres for this test only. set sets its clock ahead of that of this machine, or
// behind it. (Redis ends under the library.)
func ClockedPostgres(t testing.TB) (server *localserver.Postgres, set func(ahead time.Duration)) {
	t.Helper()
	var found []string
	for _, pattern := range fakers {
		paths, _ := filepath.Glob(pattern) // the patterns are valid
		found = append(found, paths...)
	}
	if len(found) == 0 {
		t.Fatal("the test needs the package faketime: sh tools/setup.sh")
	}
	offset, err := os.CreateTemp("", "stampede-clock-") // where the user of the server reads it, unlike t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(offset.Name()) })
	_ = offset.Close() // nothing was written
	set = func(ahead time.Duration) {
		t.Helper()
		if err := os.WriteFile(offset.Name(), fmt.Appendf(nil, "%+f\n", ahead.Seconds()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	set(0)
	if err := os.Chmod(offset.Name(), 0o644); err != nil {
		t.Fatal(err)
	}
	server, err = localserver.StartPostgres(t.Context(), localserver.PostgresOptions{Env: []string{
		"LD_PRELOAD=" + found[0], "FAKETIME_TIMESTAMP_FILE=" + offset.Name(), "FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1",
	}})
	if err != nil {
		t.Fatalf("the test needs its own Postgres: %v", err)
	}
	t.Cleanup(server.Stop)
	if err := migrate.Up(t.Context(), server.URL); err != nil {
		t.Fatal(err)
	}
	return server, set
}
