//go:build system

package connect_test

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
)

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
