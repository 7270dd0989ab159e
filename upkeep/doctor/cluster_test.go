//go:build system

package doctor_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/format"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/upkeep/doctor"
)

func control(t *testing.T, url string) redis.UniversalClient {
	t.Helper()
	rdb := testkit.Control(t, url)
	return rdb
}

// located returns severity, nodes and text of each finding.
func located(t *testing.T, rdb redis.UniversalClient) []string {
	t.Helper()
	findings, err := doctor.Redis(t.Context(), rdb, reservation.OperatorRights)
	require.NoError(t, err)
	all := []string{}
	for _, f := range findings {
		require.NotEmpty(t, f.Why)
		require.NotEmpty(t, f.Mend)
		all = append(all, strings.Join([]string{string(f.Severity), f.Where(), f.What}, ": "))
	}
	return all
}

// eachMember calls do with a client of each node.
func eachMember(t *testing.T, c *localserver.Cluster, do func(addr string, node redis.UniversalClient)) {
	t.Helper()
	for _, node := range c.Nodes {
		do(node.Addr(), control(t, node.URL))
	}
}

func setAll(t *testing.T, c *localserver.Cluster, name, value string) {
	t.Helper()
	eachMember(t, c, func(_ string, node redis.UniversalClient) {
		require.NoError(t, node.ConfigSet(t.Context(), name, value).Err())
	})
}

func addresses(nodes ...*localserver.Redis) []string {
	var all []string
	for _, node := range nodes {
		all = append(all, node.Addr())
	}
	slices.Sort(all)
	return all
}

// The steps follow each other on one cluster.
func TestClusterIsCheckedNodeByNode(t *testing.T) {
	t.Parallel()
	cluster := testkit.OwnCluster(t)
	rdb := control(t, cluster.URL)
	pool := testkit.Pool(t)
	masters := strings.Join(addresses(cluster.Nodes[:3]...), ", ")
	everyNode := addresses(cluster.Nodes...)
	first := cluster.Nodes[0]
	names := regexp.MustCompile(`^(Redis|Valkey) \d+\.\d+\.\d+ \(cluster; masters: 3, replicas: 3\), PostgreSQL \d`)
	testkit.Eventually(t, 30*time.Second, "the cluster names its new replicas", func() bool {
		return names.MatchString(doctor.Servers(t.Context(), rdb, pool))
	})

	const noWait = ": replicas are attached, and the server does not wait for them"
	testkit.Eventually(t, 30*time.Second, "each master knows its replica, and all nodes agree", func() bool {
		return slices.Equal([]string{"warning: redis " + masters + noWait}, located(t, rdb))
	})
	setAll(t, cluster, "min-replicas-to-write", "1")
	testkit.Eventually(t, 30*time.Second, "all nodes know all replicas", func() bool { return len(located(t, rdb)) == 0 })

	// REDIS_URL names one node.
	findings, err := doctor.Redis(t.Context(), control(t, first.URL), reservation.OperatorRights)
	require.NoError(t, err)
	require.Equal(t, []string{"unsafe: REDIS_URL names a node of a cluster"}, summaries(findings))
	require.Contains(t, findings[0].Mend, "redis+cluster://"+strings.Join(everyNode, ",")+",")

	// A move of a slot is begun, and given up.
	for id, state := range map[int]string{0: "MIGRATING", 1: "IMPORTING"} {
		other := control(t, cluster.Nodes[1-id].URL).Do(t.Context(), "CLUSTER", "MYID").Val()
		at := control(t, cluster.Nodes[id].URL)
		require.NoError(t, at.Do(t.Context(), "CLUSTER", "SETSLOT", 77, state, other).Err())
		moving := located(t, rdb)
		require.Len(t, moving, 1)
		require.Regexp(t, `^warning: redis `+cluster.Nodes[id].Addr()+
			`: slots are being moved: 77 (to|from) [0-9a-f]{40}$`, moving[0])
		require.NoError(t, at.Do(t.Context(), "CLUSTER", "SETSLOT", 77, "STABLE").Err())
	}

	setAll(t, cluster, "cluster-require-full-coverage", "yes")
	node := control(t, first.URL)
	require.NoError(t, node.ConfigSet(t.Context(), "appendfsync", "everysec").Err())
	require.NoError(t, node.ConfigSet(t.Context(), "cluster-node-timeout", "15000").Err())
	require.NoError(t, node.ACLSetUser(t.Context(), "default", "-hset").Err())
	replica := control(t, cluster.Nodes[5].URL)
	require.NoError(t, replica.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err())
	require.ElementsMatch(t, []string{
		"warning: redis " + strings.Join(everyNode, ", ") + ": cluster-require-full-coverage is yes",
		"warning: redis " + first.Addr() + ": cluster-node-timeout is 15000 ms",
		"warning: redis " + first.Addr() + ": appendfsync is everysec",
		"unsafe: redis " + first.Addr() + ": the user is not allowed, or the server lacks, HSET",
		"unsafe: redis " + cluster.Nodes[5].Addr() + ": maxmemory-policy is allkeys-lru",
	}, located(t, rdb))
	setAll(t, cluster, "cluster-require-full-coverage", "no")
	setAll(t, cluster, "cluster-node-timeout", "2000")
	setAll(t, cluster, "appendfsync", "always")
	setAll(t, cluster, "maxmemory-policy", "noeviction")
	require.NoError(t, node.ACLSetUser(t.Context(), "default", "+hset").Err())
	require.Empty(t, located(t, rdb))

	requireMemoryPerMaster(t, cluster, rdb)
	var measured []string
	for _, f := range doctor.Speeds(t.Context(), rdb, pool) {
		measured = append(measured, f.Node)
	}
	require.ElementsMatch(t, append(addresses(cluster.Nodes[:3]...), ""), measured, "each master, and Postgres")

	// A replica freezes, and then its master dies.
	lone, frozen := cluster.Nodes[1], cluster.Nodes[4]
	frozen.Freeze()
	testkit.Eventually(t, 30*time.Second, "a master has no replica", func() bool {
		found := located(t, rdb)
		return slices.Contains(found, "warning: redis "+lone.Addr()+": the master has no replica") &&
			slices.Contains(found, "warning: redis "+frozen.Addr()+": the node has failed")
	})
	lone.Kill()
	testkit.Eventually(t, 30*time.Second, "slots have no master", func() bool {
		return slices.Contains(located(t, rdb), "unsafe: redis: slots have no master: 5461-10921")
	})
}

// A cluster has room for the sales of each master by itself.
func requireMemoryPerMaster(t *testing.T, cluster *localserver.Cluster, rdb redis.UniversalClient) {
	t.Helper()
	pool := testkit.Pool(t)
	keys := reservation.Keys{Prefix: "test", Partitions: 8}
	store := reservation.NewStore(rdb, keys, reservation.StoreOptions{Logger: testkit.Logger(t)})
	t.Cleanup(store.Close)
	sale, err := catalog.New(pool, store).Create(t.Context(),
		reservation.Terms{Name: "big", Stock: 100_000_000, PerOrderLimit: 1})
	require.NoError(t, err)
	master, err := rdb.(*redis.ClusterClient).MasterForKey(t.Context(), keys.Sale(sale.Layout().Partition(0), sale.ID))
	require.NoError(t, err)
	for _, of := range []uuid.UUID{sale.ID, uuid.Nil} {
		found, err := doctor.Memory(t.Context(), rdb, pool, of)
		require.NoError(t, err)
		require.Len(t, found, 1)
		require.Equal(t, "redis "+master.Options().Addr, found[0].Where())
		require.Contains(t, found[0].What, "100,000,000 units are on sale")
	}
	// The units of a sale with shards are on all masters.
	spread, err := catalog.New(pool, store).Create(t.Context(),
		reservation.Terms{Name: "spread", Stock: 80_000_001, PerOrderLimit: 1, Shards: 8})
	require.NoError(t, err)
	found, err := doctor.Memory(t.Context(), rdb, pool, spread.ID)
	require.NoError(t, err)
	var units []string
	for _, f := range found {
		count, _, _ := strings.Cut(f.What, " ")
		units = append(units, count)
	}
	first := 10_000_000 * partitionsOn(t, rdb, keys, spread.Layout().Home)
	require.Len(t, units, 3)
	require.Contains(t, units, format.Count(first+1), "the first shard has the odd unit")

	_, err = doctor.Memory(t.Context(), rdb, pool, uuid.Must(uuid.NewV7()))
	require.ErrorIs(t, err, reservation.ErrSaleNotFound)
}

// partitionsOn counts the partitions on the master of one of them.
func partitionsOn(t *testing.T, rdb redis.UniversalClient, keys reservation.Keys, of int) (n int) {
	t.Helper()
	addr := func(partition int) string {
		master, err := rdb.(*redis.ClusterClient).MasterForKey(t.Context(), keys.Server(partition))
		require.NoError(t, err)
		return master.Options().Addr
	}
	for p := range keys.Partitions {
		if addr(p) == addr(of) {
			n++
		}
	}
	return n
}

func TestURLOfClusterNeedsCluster(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	findings, err := doctor.Redis(t.Context(), control(t, "redis+cluster://"+server.Addr()), reservation.OperatorRights)
	require.NoError(t, err)
	require.Equal(t, []string{"unsafe: REDIS_URL is of a cluster, and its server has cluster mode off"}, summaries(findings))
	require.Contains(t, findings[0].Mend, "redis://"+server.Addr()+"/0,")
}

func TestSentinelsAreRecognized(t *testing.T) {
	t.Parallel()
	sentinels := testkit.OwnSentinels(t)
	require.Equal(t, []string{"warning: redis: replicas are attached, and the server does not wait for them"},
		located(t, control(t, sentinels.URL)), "through them their master is checked")

	addr := strings.TrimPrefix(sentinels.URL, "redis+sentinel://")
	addr, _, _ = strings.Cut(addr, "/")
	addr, _, _ = strings.Cut(addr, ",")
	findings, err := doctor.Redis(t.Context(), control(t, "redis://"+addr), reservation.OperatorRights)
	require.NoError(t, err)
	require.Equal(t, []string{"unsafe: REDIS_URL names a Sentinel"}, summaries(findings))
	name := strings.Split(strings.TrimPrefix(sentinels.URL, "redis+sentinel://"), "/")[1]
	require.Contains(t, findings[0].Mend, "redis+sentinel://"+addr+"/"+name+"/0")
}
