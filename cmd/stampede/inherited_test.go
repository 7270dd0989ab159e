//go:build system

package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

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
