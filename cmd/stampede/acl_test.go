package main

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/localserver"
	"stampede/internal/testkit"
)

// TestUsersOfACLFilesSuffice runs ingress, worker, relay and the operators' commands as the users of the files in
// deploy/acl. Redis logs what it refuses.
func TestUsersOfACLFilesSuffice(t *testing.T) {
	t.Parallel()
	t.Run("single", func(t *testing.T) {
		t.Parallel()
		server := testkit.OwnRedis(t)
		runAsUsers(t, server.URL, server)
	})
	t.Run("cluster", func(t *testing.T) {
		t.Parallel()
		cluster := testkit.OwnCluster(t)
		runAsUsers(t, cluster.URL, cluster.Nodes...)
	})
}

func runAsUsers(t *testing.T, url string, nodes ...*localserver.Redis) {
	t.Helper()
	const password = "p@ss"
	admins := make([]*redis.Client, len(nodes))
	for i, node := range nodes {
		admins[i] = redis.NewClient(&redis.Options{Addr: node.Addr()})
		t.Cleanup(func() { _ = admins[i].Close() })
		for _, role := range []string{"ingress", "worker", "operator"} {
			file, err := os.ReadFile("../../deploy/acl/" + role + ".acl")
			require.NoError(t, err)
			rules := strings.Fields(strings.Replace(string(file), "PASSWORD", password, 1))
			args := []any{"ACL", "SETUSER"}
			for _, rule := range rules[1:] { // after "user"
				args = append(args, rule)
			}
			require.NoError(t, admins[i].Do(t.Context(), args...).Err())
		}
	}
	s := newShop(t)
	s.keys.Prefix, s.keys.Partitions = "stampede", 4
	become := func(role string) {
		s.redisURL = strings.Replace(url, "://", "://stampede-"+role+":p%40ss@", 1)
	}
	become("worker")
	worker := s.worker("worker")
	worker.Start()
	become("ingress")
	_, ingress := s.serve()
	become("operator")

	sale := s.sale(ingress, 5).String()
	at := ingress + "/v1/sales/" + sale
	buy := func(user string) apiAnswer { return ask(t, http.MethodPost, at+"/orders", user, "") }
	for _, user := range []string{"ann", "bob", "cid"} {
		require.Equal(t, http.StatusAccepted, buy(user).HTTP)
	}
	operate := func(args ...string) {
		t.Helper()
		status, output := s.run(args...)
		require.Equal(t, exitOK, status, "%v: %s", args, output)
	}
	operate("audit", "--wait=60s")
	worker.Kill()
	require.Equal(t, http.StatusAccepted, buy("dan").HTTP)
	become("worker")
	s.worker("other").Start()
	operate("relay", "add", "lines", "stdout", "--from=start")
	relay := s.relay()
	relay.Start()
	relay.WaitOutput(within, "stampede.order.confirmed")
	become("operator")
	operate("audit", "--wait=60s")
	for _, step := range []string{"pause", "resume"} {
		operate("sale", step, sale)
	}
	operate("sale", "restock", sale, "--", "-1")
	operate("sale", "list")
	operate("dlq", "list")
	operate("reconcile")
	operate("rebuild")
	operate("projections", "rebuild")
	operate("sale", "restock", sale, "10")
	testkit.Eventually(t, within, "returned units are sold", func() bool { return buy("eve").HTTP == http.StatusAccepted })
	operate("sale", "end", sale)
	operate("audit", "--wait=60s")
	_, output := s.run("doctor") // its exit status depends on the machine's settings
	assert.NotContains(t, output, "not allowed")
	for i, admin := range admins {
		refused, err := admin.ACLLog(t.Context(), 100).Result()
		require.NoError(t, err)
		for _, entry := range refused {
			if entry.Object == "config|get" && entry.Username != "stampede-operator" {
				continue // the check of settings at a start does without
			}
			t.Errorf("node %d refused user %s: %s (%s, %s)", i, entry.Username, entry.Object, entry.Reason, entry.Context)
		}
	}
}
