//go:build system

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
)

// TestUsersOfACLFilesSuffice runs migration, ingress, worker, relay, dashboard and the operators' commands as the users
// and roles of the files in deploy/acl. Redis and the processes log what is refused.
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
	database := testkit.OwnPostgres(t).URL + "&search_path=shop"
	execute(t, database, "CREATE SCHEMA shop; GRANT CREATE ON SCHEMA shop TO PUBLIC")
	applyRoles(t, database)
	become := func(user, role string) {
		s.redisURL = strings.Replace(url, "://", "://stampede-"+user+":p%40ss@", 1)
		s.databaseURL = strings.Replace(database, "://stampede@", "://stampede_"+role+"@", 1)
	}
	var running []*testkit.Cmd
	start := func(c *testkit.Cmd) *testkit.Cmd {
		c.Start()
		running = append(running, c)
		return c
	}
	operate := func(args ...string) {
		t.Helper()
		output := s.ends(exitOK, args...)
		assert.NotContains(t, output, "permission denied", args)
	}
	become("operator", "migrator")
	operate("migrate", "up")
	applyRoles(t, database)
	execute(t, database, `DO $$ DECLARE missing text := (
			SELECT string_agg(relname, ' ') FROM pg_class
			WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v') AND NOT relispartition
			  AND NOT EXISTS (SELECT FROM aclexplode(relacl) WHERE grantee <> relowner));
		BEGIN ASSERT missing IS NULL, 'postgres.sql gives nobody a right to ' || missing; END $$`)
	become("worker", "worker")
	worker := start(s.worker("worker"))
	become("ingress", "ingress")
	serving := start(s.ingress())
	ingress := "http://" + loggedAddr(serving, "ingress listens")
	become("operator", "desk")
	desk := s.command("dashboard", "--addr=127.0.0.1:0")
	desk.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	desk.Setenv("STAMPEDE_SCRAPE", ingress+"/metrics")
	start(desk).WaitOutput(within, "dashboard listens")

	sale := s.sale(ingress, 5).String()
	at := ingress + "/v1/sales/" + sale
	buy := func(user string) apiAnswer { return ask(t, http.MethodPost, at+"/orders", user, "") }
	for _, user := range []string{"ann", "bob", "cid"} {
		require.Equal(t, http.StatusAccepted, buy(user).HTTP)
	}
	operate("audit", "--wait=60s")
	worker.Kill()
	require.Equal(t, http.StatusAccepted, buy("dan").HTTP)
	become("worker", "worker")
	start(s.worker("other"))
	become("worker", "desk")
	operate("relay", "add", "lines", "stdout", "--from=start")
	become("worker", "relay")
	relay := start(s.relay())
	relay.WaitOutput(within, "stampede.order.confirmed")
	become("operator", "desk")
	payable := s.payableSale("5", "1h").String()
	body := map[string]string{"pay": `{"reference":"pi_1"}`}
	for user, step := range map[string]string{"ann": "pay", "bob": "cancel"} {
		bought := ask(t, http.MethodPost, ingress+"/v1/sales/"+payable+"/orders", user, "")
		require.Equal(t, http.StatusAccepted, bought.HTTP)
		testkit.Eventually(t, within, step, func() bool {
			return ask(t, http.MethodPost, ingress+"/v1/orders/"+bought.OrderID+"/"+step, user, body[step]).HTTP == http.StatusOK
		})
	}
	relay.WaitOutput(within, "stampede.order.paid")
	relay.WaitOutput(within, "stampede.order.cancelled")
	operate("order", "list", "--user=ann")
	become("operator", "reader")
	operate("order", "export", "--sale="+payable)
	operate("order", "export", "--changed-since=0")
	become("operator", "desk")
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
	assert.NotContains(t, output, "permission denied")
	for _, c := range running {
		assert.NotContains(t, c.Output(), "permission denied")
	}
	for role, statements := range map[string][]string{
		"ingress": {"DELETE FROM orders", "UPDATE relay_targets SET fence = 0", "CREATE TABLE mine ()"},
		"worker":  {"SELECT secret FROM receipt_key", "INSERT INTO sales DEFAULT VALUES", "CREATE TABLE mine ()"},
		"relay": {
			"SELECT secret FROM receipt_key", "SELECT FROM orders", "DELETE FROM payment_events",
			"UPDATE sales SET stock = 9", "SELECT next_position()", "CREATE TABLE mine ()",
		},
		"desk": {
			"SELECT secret FROM receipt_key", "DELETE FROM order_events", "DELETE FROM payment_events",
			"UPDATE order_events SET user_id = 'eve'", "UPDATE pulse SET lost = '1 h'", "CREATE TABLE mine ()",
		},
		"reader": {
			"SELECT secret FROM receipt_key", "SELECT secrets FROM relay_targets", "UPDATE orders SET status = 'paid'",
			"INSERT INTO sales DEFAULT VALUES", "UPDATE payment_events SET amount = 1", "SELECT next_position()",
			"SELECT make_month(first_sale(now()::timestamp))", "CREATE TABLE mine ()",
		},
	} {
		become("", role)
		for _, statement := range statements {
			require.ErrorContains(t, tryExecute(t, s.databaseURL, statement), "permission denied", "%s: %s", role, statement)
		}
	}
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

// applyRoles runs the file of the roles of Postgres, as its first lines say.
func applyRoles(t *testing.T, databaseURL string) {
	t.Helper()
	file, err := os.ReadFile("../../deploy/acl/postgres.sql")
	require.NoError(t, err)
	execute(t, databaseURL, string(file))
}

func execute(t *testing.T, databaseURL, statements string) {
	t.Helper()
	require.NoError(t, tryExecute(t, databaseURL, statements))
}

func tryExecute(t *testing.T, databaseURL, statements string) error {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), databaseURL)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), statements)
	return errors.Join(err, conn.Close(t.Context()))
}

// administrator is a session that may write at any time.
type administrator struct {
	t *testing.T
	*pgx.Conn
}

func connectAdministrator(t *testing.T, url string) administrator {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url+"&default_transaction_read_only=off")
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return administrator{t, conn}
}

func (a administrator) run(statements ...string) {
	a.t.Helper()
	for _, s := range statements {
		_, err := a.Exec(a.t.Context(), s)
		require.NoError(a.t, err, s)
	}
}

func (a administrator) count(query string) (n int64) {
	a.t.Helper()
	require.NoError(a.t, a.QueryRow(a.t.Context(), query).Scan(&n))
	return n
}

const (
	reloadSettings = "SELECT pg_reload_conf()"
	endSessions    = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND " +
		"backend_type = 'client backend'"
)

// An administrator, or a managed service whose disk is full, makes Postgres read-only: nothing is written, orders wait,
// and all goes on by itself.
func TestReadOnlyPostgresIsAnOutage(t *testing.T) {
	t.Parallel()
	own := testkit.OwnPostgres(t)
	admin := connectAdministrator(t, own.URL)
	admin.run("ALTER SYSTEM SET autovacuum = off", reloadSettings) // it writes, too
	s := &shop{t: t, keys: testkit.Keys(t), redisURL: testkit.OwnRedis(t).URL, databaseURL: own.URL}
	_, url := s.serve()
	worker := s.worker("worker")
	worker.Start()
	workerURL := "http://" + loggedAddr(worker, "metrics are served")

	for _, fence := range []struct {
		name        string
		begin, lift []string
	}{
		{
			"configuration file",
			[]string{"ALTER SYSTEM SET default_transaction_read_only = on", reloadSettings},
			[]string{"ALTER SYSTEM RESET default_transaction_read_only", reloadSettings},
		},
		{
			"database",
			[]string{"ALTER DATABASE postgres SET default_transaction_read_only = on", endSessions},
			[]string{"ALTER DATABASE postgres RESET default_transaction_read_only"},
		},
		{
			"user",
			[]string{"ALTER ROLE stampede SET default_transaction_read_only = on", endSessions},
			[]string{"ALTER ROLE stampede RESET default_transaction_read_only"},
		},
	} {
		sale := url + "/v1/sales/" + s.payableSale("10", "30m").String() + "/orders"
		buy := func(user string) (order string) {
			bought := ask(t, http.MethodPost, sale, user, "")
			require.Equal(t, http.StatusAccepted, bought.HTTP)
			return url + "/v1/orders/" + bought.OrderID
		}
		confirmed := func(order, user string) {
			testkit.Eventually(t, within, "the order is confirmed", func() bool {
				return ask(t, http.MethodGet, order, user, "").Status == "confirmed"
			})
		}
		paid, cancelled := buy("ann"), buy("bob")
		confirmed(paid, "ann")
		confirmed(cancelled, "bob")

		admin.run(fence.begin...)
		testkit.Eventually(t, within, "doctor names it", func() bool {
			status, output := s.run("doctor")
			return status == exitFailed &&
				strings.Contains(output, "takes no writes: default_transaction_read_only is on ("+fence.name+")")
		})
		const newestTransaction = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
		before := admin.count(newestTransaction)
		waiting := buy("cleo")
		assert.Equal(t, http.StatusServiceUnavailable, ask(t, http.MethodPost, paid+"/pay", "ann", `{"reference":"r"}`).HTTP)
		assert.Equal(t, http.StatusServiceUnavailable, ask(t, http.MethodPost, cancelled+"/cancel", "bob", "").HTTP)
		testkit.Eventually(t, within, "the ingress is ready, and names it", func() bool {
			status, body := call(t, http.MethodGet, url+"/readyz", "")
			return status == http.StatusOK && strings.Contains(body, `"postgres":"read-only"`)
		})
		testkit.Eventually(t, within, "the worker is not ready, and names it", func() bool {
			status, body := call(t, http.MethodGet, workerURL+"/readyz", "")
			return status == http.StatusServiceUnavailable && strings.Contains(body, "Postgres takes no writes")
		})
		testkit.Eventually(t, within, "the worker has tried to record the order", func() bool {
			_, metrics := call(t, http.MethodGet, workerURL+"/metrics", "")
			return strings.Contains(metrics, `stampede_worker_failing{step="record"} 1`) &&
				strings.Contains(metrics, "stampede_postgres_up 0")
		})
		assert.Equal(t, "reserved", ask(t, http.MethodGet, waiting, "cleo", "").Status)
		assert.Equal(t, before, admin.count(newestTransaction), "%s: no transaction has written", fence.name)

		admin.run(fence.lift...)
		confirmed(waiting, "cleo")
		testkit.Eventually(t, within, "payments and cancellations go on", func() bool {
			return ask(t, http.MethodPost, paid+"/pay", "ann", `{"reference":"r"}`).HTTP == http.StatusOK &&
				ask(t, http.MethodPost, cancelled+"/cancel", "bob", "").HTTP == http.StatusOK
		})
	}
	assert.Zero(t, admin.count("SELECT count(*) FROM dead_letters"))
	s.ends(exitOK, "audit", "--wait=30s")
}

// Sessions inherit settings from the server, the database and the role. Add one here before code relies on another
// value than its default.
func TestShopLivesUnderInheritedSettings(t *testing.T) {
	t.Parallel()
	own := testkit.OwnPostgres(t)
	redis := testkit.OwnRedis(t)
	for i, test := range []struct {
		// of is what has the settings: "DATABASE %s", "ROLE stampede IN DATABASE %[1]s", "SYSTEM".
		scope    string
		settings []string
		// named is what doctor says.
		named string
	}{
		{scope: "DATABASE %s", settings: []string{"standard_conforming_strings = off"}},
		{
			scope: "ROLE stampede IN DATABASE %s",
			settings: []string{
				"default_transaction_isolation = serializable", "default_transaction_deferrable = on", "search_path = shop, public",
			},
		},
		{scope: "DATABASE %s", settings: []string{"default_transaction_isolation = 'repeatable read'"}},
		{scope: "DATABASE %s", settings: []string{"quote_all_identifiers = on"}},
		{
			scope:    "DATABASE %s",
			settings: []string{"session_replication_role = replica"},
			named:    "session_replication_role is replica",
		},
		{
			scope: "SYSTEM", settings: []string{
				"DateStyle = 'SQL, DMY'", "IntervalStyle = sql_standard", "TimeZone = 'Asia/Kolkata'", "bytea_output = escape",
				"array_nulls = off", "transform_null_equals = on", "extra_float_digits = -15", "xmloption = document",
				"row_security = off", "check_function_bodies = off", "client_min_messages = debug1", "synchronous_commit = off",
				"plan_cache_mode = force_generic_plan", "enable_seqscan = off", "enable_partition_pruning = off",
				"jit_above_cost = 0",
				"client_encoding = LATIN1", "cursor_tuple_fraction = 1", "statement_timeout = '30s'", "lock_timeout = '10s'",
				"idle_session_timeout = '1s'", "idle_in_transaction_session_timeout = '1s'",
			},
			named: "synchronous_commit is off",
		},
	} {
		name := fmt.Sprintf("shop%d", i)
		url := strings.Replace(own.URL, "/postgres?", "/"+name+"?", 1)
		admin := connectAdministrator(t, own.URL)
		admin.run("CREATE DATABASE " + name)
		connectAdministrator(t, url).run("CREATE SCHEMA shop")
		scope := strings.ReplaceAll(test.scope, "%s", name)
		for _, setting := range test.settings {
			admin.run("ALTER " + scope + " SET " + setting)
		}
		admin.run(reloadSettings)
		s := &shop{t: t, keys: testkit.Keys(t), redisURL: redis.URL, databaseURL: url}
		s.live(fmt.Sprint(scope, " ", test.settings), test.named)
	}
}

// live is the short life of a shop: its orders are bought, paid, cancelled and expired, while its stock is raised; then
// the commands find nothing wrong.
func (s *shop) live(under, named string) {
	s.t.Helper()
	s.ends(exitOK, "migrate", "up")
	ingress, url := s.serve()
	worker := s.worker("worker")
	worker.Start()
	sale, short := s.payableSale("20", "30m"), s.payableSale("1", "1s")

	var crowd sync.WaitGroup
	const buyers = 8
	var restocked [buyers]int
	for i := range buyers {
		crowd.Go(func() {
			restocked[i], _ = call(s.t, http.MethodPost, url+"/v1/sales/"+sale.String()+"/restock", `{"units":1}`,
				"Authorization", "Bearer "+adminToken)
		})
		crowd.Go(func() { assert.NoError(s.t, s.tryBuy(url, sale, fmt.Sprint("buyer", i)), under) })
	}
	late := ask(s.t, http.MethodPost, url+"/v1/sales/"+short.String()+"/orders", "eve", "")
	crowd.Wait()
	for _, status := range restocked {
		assert.Equal(s.t, http.StatusOK, status, "%s: a restock beside others", under)
	}
	for to, body := range map[string]string{"pay": `{"reference":"it's \\1"}`, "cancel": ""} {
		user := "to-" + to
		order := url + "/v1/orders/" + ask(s.t, http.MethodPost, url+"/v1/sales/"+sale.String()+"/orders", user, "").OrderID
		testkit.Eventually(s.t, within, under+": the order is changed", func() bool {
			return ask(s.t, http.MethodPost, order+"/"+to, user, body).HTTP == http.StatusOK
		})
	}
	testkit.Eventually(s.t, within, under+": an unpaid order expires", func() bool {
		return ask(s.t, http.MethodGet, url+"/v1/orders/"+late.OrderID, "eve", "").Status == "expired"
	})
	for _, command := range [][]string{
		{"audit", "--wait=30s"},
		{"projections", "rebuild"},
		{"reconcile"},
		{"rebuild"},
		{"migrate", "up"},
		{"migrate", "status"},
		{"audit", "--wait=30s"},
	} {
		s.ends(exitOK, command...)
	}
	_, output := s.run("doctor")
	assert.NotContains(s.t, output, "differs", under)
	assert.NotContains(s.t, output, "missing", under)
	assert.Contains(s.t, output, named, under)
	for _, c := range []*testkit.Cmd{worker, ingress} {
		assert.Equal(s.t, exitOK, c.Stop().ExitCode(), under)
	}
}
