package connect_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

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
