//go:build system

package connect_test

import (
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
)

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

// The session is over TCP, so these are the settings of its socket.
func TestPostgresDetectsLostClients(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	require.Equal(t, []string{"stampede", "5", "1", "5", "10000"}, settings(t, pool,
		"application_name", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout"))
}
