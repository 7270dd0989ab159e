//go:build system

package connect_test

import (
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
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
	pool := testkit.PoolAt(t, server.URL, 2)
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
	pool := testkit.PoolAt(t, both, 2)
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

// TestClusterSurvivesMasterKill kills the master of a key: its replica takes over, and each client finds it.
func TestClusterSurvivesMasterKill(t *testing.T) {
	t.Parallel()
	cluster := testkit.OwnCluster(t)
	const key = "{kept}:key"
	for name, newClient := range redisClients {
		client := open(t, newClient, cluster.URL)
		require.NoError(t, client.Set(t.Context(), key, name, 0).Err())
		require.Equal(t, name, client.Get(t.Context(), key).Val())
	}
	master, err := open(t, connect.Control, cluster.URL).(*redis.ClusterClient).MasterForKey(t.Context(), key)
	require.NoError(t, err)
	testkit.Eventually(t, 30*time.Second, "the replica has the write", func() bool {
		return master.Wait(t.Context(), 1, time.Second).Val() == 1
	})
	for _, node := range cluster.Nodes {
		if node.Addr() == master.Options().Addr {
			node.Kill()
		}
	}
	for name, newClient := range redisClients {
		client := open(t, newClient, cluster.URL)
		testkit.Eventually(t, 30*time.Second, name+" writes to the promoted replica", func() bool {
			return client.Set(t.Context(), key, name, 0).Err() == nil
		})
	}
}

func TestSentinelSurvivesMasterKill(t *testing.T) {
	t.Parallel()
	sentinels := testkit.OwnSentinels(t)
	for name, newClient := range redisClients {
		client := open(t, newClient, sentinels.URL)
		require.NoError(t, client.Set(t.Context(), "key", name, 0).Err())
		require.Equal(t, name, client.ClientGetName(t.Context()).Val())
	}
	client := open(t, connect.Ingress, sentinels.URL)
	require.Equal(t, "mymaster", client.(*redis.Client).Options().Addr, "its name in metrics")
	testkit.Eventually(t, 30*time.Second, "the replica has the write", func() bool {
		return client.(*redis.Client).Wait(t.Context(), 1, time.Second).Val() == 1
	})
	sentinels.Nodes[0].Kill()
	testkit.Eventually(t, 30*time.Second, "a write to the promoted replica", func() bool {
		return client.Set(t.Context(), "key", "after", 0).Err() == nil
	})
	require.Contains(t, client.Info(t.Context(), "replication").Val(), "role:master")
}

// TestClusterClientSendsNoUnknownCommands: an ACL may forbid COMMAND.
func TestClusterClientSendsNoUnknownCommands(t *testing.T) {
	t.Parallel()
	cluster := testkit.OwnCluster(t)
	for name, newClient := range redisClients {
		client := open(t, newClient, cluster.URL)
		require.NoError(t, client.Set(t.Context(), "key", name, 0).Err())
		_, err := client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			p.Get(t.Context(), "key")
			p.Get(t.Context(), "other")
			return nil
		})
		require.ErrorIs(t, err, redis.Nil)
	}
	for _, node := range cluster.Nodes {
		client := open(t, connect.Control, node.URL)
		calls := client.Info(t.Context(), "commandstats").Val()
		require.NotContains(t, calls, "cmdstat_command")
		require.NotContains(t, calls, "cmdstat_client|setinfo")
	}
}

func TestUsersOfClusterAndSentinels(t *testing.T) {
	t.Parallel()
	cluster := testkit.OwnCluster(t)
	for _, node := range cluster.Nodes {
		require.NoError(t, open(t, connect.Control, node.URL).ACLSetUser(t.Context(),
			"buyer", "on", ">p@ss/word", "~*", "&*", "+@all").Err())
	}
	as := func(url, user string) string { return strings.Replace(url, "://", "://"+user+"@", 1) }
	who := func(url string) (string, error) {
		return open(t, connect.Ingress, url).Do(t.Context(), "ACL", "WHOAMI").Text()
	}
	name, err := who(as(cluster.URL, "buyer:p%40ss%2Fword"))
	require.NoError(t, err)
	require.Equal(t, "buyer", name)
	_, err = who(as(cluster.URL, "buyer:wrong"))
	require.ErrorContains(t, err, "WRONGPASS")

	sentinels := testkit.OwnSentinels(t)
	for _, node := range sentinels.Nodes {
		require.NoError(t, open(t, connect.Control, node.URL).ACLSetUser(t.Context(),
			"buyer", "on", ">p@ss/word", "~*", "&*", "+@all").Err())
	}
	for _, url := range sentinels.WatcherURLs() {
		watcher := open(t, connect.Control, url)
		require.NoError(t, watcher.ACLSetUser(t.Context(), "looker", "on", ">look&see", "~*", "&*", "+@all").Err())
		require.NoError(t, watcher.ACLSetUser(t.Context(), "default", "off").Err())
	}
	url := as(sentinels.URL, "buyer:p%40ss%2Fword")
	name, err = who(url + "?sentinel_username=looker&sentinel_password=look%26see")
	require.NoError(t, err)
	require.Equal(t, "buyer", name)
	_, err = who(url)
	require.Error(t, err, "the Sentinels' user is another one")
}
