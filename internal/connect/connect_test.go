package connect_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/sql"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var redisClients = map[string]func(string) (redis.UniversalClient, error){
	"stampede-ingress":  connect.Ingress,
	"stampede-control":  connect.Control,
	"stampede-blocking": connect.Blocking,
}

func TestRedisGetsNoUnknownCommands(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	for name, newClient := range redisClients {
		client := open(t, newClient, server.URL)
		require.Equal(t, name, client.ClientGetName(t.Context()).Val())
	}
	info := open(t, connect.Control, server.URL).InfoMap(t.Context(), "stats").Item("Stats", "total_error_replies")
	require.Equal(t, "0", info)
}

func TestRedisClientsReconnect(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	server.Kill()
	for _, newClient := range redisClients {
		client := open(t, newClient, server.URL)
		require.ErrorIs(t, client.Ping(t.Context()).Err(), syscall.ECONNREFUSED)
	}
	require.NoError(t, server.Restart(t.Context()))
	for _, newClient := range redisClients {
		require.NoError(t, open(t, newClient, server.URL).Ping(t.Context()).Err())
	}
}

// The server freezes with an open connection: the slowest kind of outage to detect.
func TestIngressTimesOut(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	client := open(t, connect.Ingress, server.URL)
	require.NoError(t, client.Ping(t.Context()).Err())
	require.NoError(t, syscall.Kill(server.Pid(), syscall.SIGSTOP))

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	begun := time.Now()
	require.ErrorIs(t, client.Ping(ctx).Err(), context.DeadlineExceeded)
	require.Less(t, time.Since(begun), time.Second, "the call must respect its context")

	begun = time.Now()
	err := client.Ping(t.Context()).Err()
	var timeout net.Error
	require.ErrorAs(t, err, &timeout)
	require.True(t, timeout.Timeout())
	require.Less(t, time.Since(begun), 5*time.Second)
}

func TestBlockingDoesNotRetry(t *testing.T) {
	t.Parallel()
	client, err := connect.Blocking("redis://localhost")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	options := client.(*redis.Client).Options()
	require.Zero(t, options.MaxRetries)
	require.Greater(t, options.ReadTimeout, connect.MaxBlock)
}

// Not parallel: the default logger is that of the process.
func TestLogOfGoRedisGoesToSlog(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	t.Cleanup(func() { slog.SetDefault(before) })
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))

	server := testkit.OwnRedis(t)
	server.Kill()
	require.Error(t, open(t, connect.Ingress, server.URL).Ping(t.Context()).Err())
	require.Contains(t, log.String(), "go-redis: ")
}

func TestPostgresPoolReconnects(t *testing.T) {
	t.Parallel()
	server := testkit.OwnPostgres(t)
	server.StopImmediate()
	pool, err := connect.Postgres(t.Context(), server.URL, 2)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.Error(t, pool.Ping(t.Context()))

	require.NoError(t, server.Restart(t.Context()))
	require.NoError(t, pool.Ping(t.Context()))
	server.StopImmediate()
	require.NoError(t, server.Restart(t.Context()))
	testkit.Eventually(t, 30*time.Second, "the pool has dropped its broken connections", func() bool {
		return pool.Ping(t.Context()) == nil
	})
}

// The pool only reads, so no write of it tells that its server takes none.
func TestPostgresPoolFollowsServerThatTakesWrites(t *testing.T) {
	t.Parallel()
	one, two := testkit.OwnPostgres(t), testkit.OwnPostgres(t)
	host := func(url string) string { return strings.TrimPrefix(strings.Split(url, "/")[2], "stampede@") }
	both := strings.Replace(one.URL, host(one.URL), host(one.URL)+","+host(two.URL), 1)
	pool, err := connect.Postgres(t.Context(), both, 2)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	admin := func(url, statement string) {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		for _, s := range []string{statement, "SELECT pg_reload_conf()"} {
			_, err = conn.Exec(t.Context(), s)
			require.NoError(t, err)
		}
		require.NoError(t, conn.Close(t.Context()))
	}
	isOn := func(url string) func() bool {
		return func() bool {
			var port int
			err := pool.QueryRow(t.Context(), "SELECT inet_server_port()").Scan(&port)
			return err == nil && strings.HasSuffix(host(url), ":"+strconv.Itoa(port))
		}
	}
	testkit.Eventually(t, 30*time.Second, "the pool is on the first server", isOn(one.URL))
	admin(one.URL, "ALTER SYSTEM SET default_transaction_read_only = on")
	testkit.Eventually(t, 30*time.Second, "the pool is on the second server", isOn(two.URL))
	admin(one.URL, "ALTER SYSTEM RESET default_transaction_read_only")
	admin(two.URL, "ALTER SYSTEM SET default_transaction_read_only = on")
	testkit.Eventually(t, 30*time.Second, "the pool is on the first server again", isOn(one.URL))
}

func TestPostgresURLOverridesSettings(t *testing.T) {
	t.Parallel()
	for query, want := range map[string][3]string{
		"": {"stampede work", "10s", "UTC"},
		"&application_name=mine&idle_in_transaction_session_timeout=7000&options=-c%20timezone%3DAsia/Tokyo": {
			"mine", "7s", "Asia/Tokyo",
		},
	} {
		pool, err := connect.Postgres(t.Context(), testkit.DatabaseURL(t)+query, 3, connect.Service("work"))
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		got := settings(t, pool, "application_name", "idle_in_transaction_session_timeout", "timezone")
		require.Equal(t, want[:], got)
		require.EqualValues(t, 3, pool.Config().MaxConns)
	}
}

// The session is over TCP, so these are the settings of its socket.
func TestPostgresDetectsLostClients(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	require.Equal(t, []string{"stampede", "5", "1", "5", "10000"}, settings(t, pool,
		"application_name", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout"))
}

// Servers without the setting must still accept connections.
func TestServiceLimitsTransactions(t *testing.T) {
	t.Parallel()
	service, err := connect.Postgres(t.Context(), testkit.DatabaseURL(t), 1, connect.Service("work"))
	require.NoError(t, err)
	t.Cleanup(service.Close)
	var major int
	require.NoError(t, service.QueryRow(t.Context(),
		"SELECT current_setting('server_version_num')::int / 10000").Scan(&major))
	want, wantOther := "12s", "0"
	if major < 17 {
		want, wantOther = "", ""
	}
	require.Equal(t, []string{want}, settings(t, service, "transaction_timeout"))
	require.Equal(t, []string{wantOther}, settings(t, testkit.Pool(t), "transaction_timeout"),
		"no limit for other pools")
}

// settings returns settings of a session, "" for those that the server does not have.
func settings(t *testing.T, pool *pgxpool.Pool, names ...string) []string {
	t.Helper()
	var values []string
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT array_agg(coalesce(current_setting(name, true), '') ORDER BY place) FROM unnest($1::text[]) WITH "+
			"ORDINALITY AS wanted (name, place)",
		names).Scan(&values))
	return values
}

func TestInvalidURLErrorHidesPassword(t *testing.T) {
	t.Parallel()
	const password = "hunter2"
	for _, bad := range []string{
		"", password, "host:6379", "http://host:6379", password + ":x@host:6379",
		"redis://user:" + password + "/x@host:6379", "redis://user:12/" + password + "@host:6379",
		"redis://user:%" + password + "@host:6379", "redis://host:6379/0?" + password + "=1", "redis://host:6379/" + password,
	} {
		for name, newClient := range redisClients {
			_, err := newClient(bad)
			require.ErrorIs(t, err, connect.ErrRedisURL, "%s %s", name, bad)
			require.NotContains(t, err.Error(), password)
		}
	}
	require.ErrorContains(t, connect.ErrRedisURL, "REDIS_URL must look like redis://")

	for _, bad := range []string{
		"", password, "redis://host:6379",
		"postgres://user:" + password + "/x@host:5432/db", "postgres://user:%" + password + "@host/db",
		"postgres://host/db?sslmode=" + password, "host=x port=" + password,
	} {
		_, err := connect.Postgres(t.Context(), bad, 1)
		require.ErrorIs(t, err, sql.ErrDatabaseURL, bad)
		require.NotContains(t, err.Error(), password)
	}
	require.ErrorContains(t, sql.ErrDatabaseURL, "DATABASE_URL must look like postgres://")
	require.False(t, strings.Contains(sql.ErrDatabaseURL.Error(), password))
}

func open(t *testing.T, newClient func(string) (redis.UniversalClient, error), url string) redis.UniversalClient {
	t.Helper()
	client, err := newClient(url)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}
