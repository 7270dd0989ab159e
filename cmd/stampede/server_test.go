//go:build system

package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
)

// remote runs a command through an ingress, without the databases' URLs.
func remote(t *testing.T, url, token string, args ...string) (status int, out, output string) {
	t.Helper()
	c := testkit.Command(t, args...)
	c.Setenv("REDIS_URL", "")
	c.Setenv("DATABASE_URL", "")
	c.Setenv("STAMPEDE_SERVER", url)
	c.Setenv("STAMPEDE_ADMIN_TOKEN", token)
	c.Setenv("STAMPEDE_YES", "true")
	c.KeepStdout()
	c.Start()
	status = c.Wait(within).ExitCode()
	return status, c.Stdout(), c.Output()
}

// Through an ingress, the commands on sales print what they print on the databases.
func TestSaleCommandsWorkThroughServer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	over := func(args ...string) string {
		t.Helper()
		status, out, output := remote(t, url, adminToken, args...)
		require.Equal(t, exitOK, status, "%v: %s", args, output)
		return out
	}
	created := objects(t, over("sale", "create", "--name=spring", "--stock=10", "--per-order-limit=2", "--opens-at=+1h",
		"--closes-at=2999-01-01T00:00:00Z", "--payment-window=10m", "--idempotency-key=k", "--output=json"))[0]
	id := created["id"].(string)
	assert.Equal(t, "spring", created["name"])
	assert.Equal(t, "scheduled", created["state"])
	same := func(args ...string) {
		t.Helper()
		for _, format := range []string{"--output=text", "--output=json"} {
			output := s.ends(exitOK, append(args, format)...)
			testkit.Eventually(t, within, strings.Join(args, " ")+" prints the same", func() bool {
				return over(append(args, format)...) == output // an ingress shows sales as they were a second ago
			})
		}
	}
	same("sale", "show", id)
	for _, step := range []string{"pause", "resume"} {
		assert.Contains(t, over("sale", step, id), "spring")
	}
	assert.Contains(t, over("sale", "restock", id, "5", "--idempotency-key=five"), "  15  ")
	assert.Contains(t, over("sale", "restock", id, "5", "--idempotency-key=five"), "  15  ", "a repeat changes nothing")
	assert.Contains(t, over("sale", "restock", id, "--idempotency-key=less", "--", "-3"), "  12  ")
	assert.Contains(t, over("sale", "rename", id, "summer"), "summer")
	for range 3 {
		over("sale", "create", "--name=another", "--stock=1")
	}
	same("sale", "list")
	same("sale", "list", "--limit=2")
	same("sale", "list", "--after="+id)
	assert.Contains(t, over("sale", "end", id), "ended")
	same("sale", "history", id)
	same("sale", "history", id, "--limit=2")
	assert.Contains(t, over("sale", "history", id), " admin ", "the server records the operator of the token")

	// Orders.
	sale, orders := s.recorded("ann", "bob")
	ann := orders["ann"].String()
	same("order", "show", ann)
	same("order", "list", "--sale="+sale.String())
	same("order", "list", "--user=bob", "--limit=1", "--status=confirmed")
	assert.Contains(t, over("order", "cancel", ann, "--reason=r"), "is cancelled")
	same("order", "show", ann)
	same("order", "cancel", ann, "--reason=again")
}

func TestErrorsOfServer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	operators := filepath.Join(t.TempDir(), "operators")
	viewer := fmt.Sprintf("ann viewer %x\n", sha256.Sum256([]byte("token-of-ann")))
	require.NoError(t, os.WriteFile(operators, []byte(viewer), 0o600))
	_, url := s.serve("--operators-file=" + operators)
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("<html>"))
	}))
	t.Cleanup(page.Close)
	id := uuid.NewString()
	for _, c := range []struct {
		url, token, args string
		status           int
		want             string
	}{
		{url, "wrong", "sale history " + id, exitUsage, "the server refuses the token (STAMPEDE_ADMIN_TOKEN): HTTP 401"},
		{url, "", "sale pause " + id, exitUsage, "the server refuses the token (STAMPEDE_ADMIN_TOKEN): HTTP 401"},
		{url, "token-of-ann", "sale pause " + id, exitUsage, "This call needs the role operator"},
		{url, "token-of-ann", "sale history " + id, exitFailed, "sale not found"},
		{url, adminToken, "sale show " + id, exitFailed, "sale not found"},
		{url, adminToken, "sale pause " + id, exitFailed, "sale not found"},
		{url, adminToken, "order show " + id, exitFailed, "order not found"},
		{url, adminToken, "sale create --name=x --stock=0", exitUsage, "stock"},
		{url, adminToken, "sale list --limit=0", exitUsage, "--limit is 0"},
		{"http://127.0.0.1:1", adminToken, "sale list", exitUnknown, "refused"},
		{"http://127.0.0.1:1", adminToken, "sale show " + id, exitUnknown, "refused"},
		{"http://127.0.0.1:1", adminToken, "sale history " + id, exitUnknown, "refused"},
		{"http://127.0.0.1:1", adminToken, "order list --user=ann", exitUnknown, "refused"},
		{"http://127.0.0.1:1", adminToken, "sale pause " + id, exitFailed, "refused"},
		{"ftp://x", adminToken, "sale list", exitUsage, "--server: want the URL of an ingress"},
		{page.URL, adminToken, "sale list", exitUnknown, "is this the URL of an ingress?"},
		{page.URL + "/%zz", adminToken, "sale list", exitUsage, "--server"},
		{url, adminToken, "sale archive --server=" + url + " --dir=.", exitUsage, "this command has no --server: it moves"},
		{"", adminToken, "sale list", exitUsage, "missing flags: --redis-url=URL (or REDIS_URL), --database-url=URL (or " +
			"DATABASE_URL); or --server=URL (or STAMPEDE_SERVER) instead"},
		{"", adminToken, "order list --user=ann", exitUsage, "missing flags: --database-url=URL (or DATABASE_URL); or --server"},
	} {
		status, out, output := remote(t, c.url, c.token, strings.Fields(c.args)...)
		assert.Equal(t, c.status, status, "%s: %s", c.args, output)
		assert.Contains(t, output, c.want, c.args)
		assert.Empty(t, out)
	}
}

// A server that vanishes with the answer leaves the outcome unknown, and the message says how to repeat the request.
func TestLostAnswerNamesIdempotencyKey(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(server.Close)
	create := []string{"sale", "create", "--name=x", "--stock=1", "--idempotency-key=k7"}
	status, _, output := remote(t, server.URL, adminToken, create...)
	assert.Equal(t, exitFailed, status)
	assert.Contains(t, output, "the outcome is unknown")
	assert.Contains(t, output, "repeat it with --idempotency-key=k7, or it may be done twice")
	status, _, output = remote(t, server.URL, adminToken, "order", "cancel", uuid.NewString(), "--reason=r")
	assert.Equal(t, exitFailed, status)
	assert.Contains(t, output, "the outcome is unknown")
	assert.Contains(t, output, "it may be repeated")
	status, _, output = remote(t, server.URL, adminToken, "sale", "list")
	assert.Equal(t, exitUnknown, status, output)
}

// What others wrote controls and reorders nothing on an operator's terminal, whichever command shows it.
func TestNoCommandPrintsMisleadingText(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sale, orders := s.recorded("ann")
	const hostile = "\u202eevil\u2066\u200b\u009b"
	for _, forge := range []string{
		"UPDATE sales SET name = $1",
		"UPDATE sale_events SET operator = $1, data = jsonb_build_object('reason', $1::text, 'list', ARRAY[$1, $1, $1, $1], 'of', jsonb_build_object('x', $1))",
		"UPDATE orders SET user_id = $1, payment_reference = $1",
		"UPDATE order_events SET data = jsonb_build_object('reason', $1::text, 'operator', $1::text, 'by', ARRAY[$1])",
		`INSERT INTO dead_letters (stream, entry_id, fields, deliveries, reason, resolution, operator)
			VALUES ($1, $1, jsonb_build_array($1::text, $1::text), 1, $1, $1, $1)`,
		`INSERT INTO relay_targets (name, url, state, position, last_error) VALUES ('t', 'https://shop.example/' || $1, 'paused', 0, $1)`,
	} {
		_, err := s.pool.Exec(t.Context(), forge, hostile)
		require.NoError(t, err, forge)
	}
	var letter string
	require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT id::text FROM dead_letters").Scan(&letter))
	id, order := sale.String(), orders["ann"].String()
	for _, command := range [][]string{
		{"sale", "list"},
		{"sale", "show", id},
		{"sale", "pause", id},
		{"sale", "history", id},
		{"sale", "end", id},
		{"order", "list", "--sale", id},
		{"order", "show", order},
		{"order", "cancel", order, "--reason=r"},
		{"dlq", "list"},
		{"dlq", "show", letter},
		{"dlq", "discard", letter, "--reason=" + hostile},
		{"relay", "list"},
		{"relay", "remove", "t"},
		{"audit"},
		{"reconcile", "--explain"},
		{"top", "--once"},
	} {
		_, output := s.run(command...)
		require.NotEmpty(t, output, command)
		require.NotRegexp(t, `[^\P{C}\n\t]`, output, "%v", command)
	}
}

// runJSON runs a command with --output json, and returns the objects that it prints, one a line.
func (s *shop) runJSON(want int, args ...string) []map[string]any {
	s.t.Helper()
	c := s.command(args...)
	c.Setenv("STAMPEDE_OUTPUT", "json")
	c.KeepStdout()
	c.Start()
	require.Equal(s.t, want, c.Wait(within).ExitCode(), "%v: %s", args, c.Output())
	return objects(s.t, c.Stdout())
}

func TestMigrateCommandsPrintJSON(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	assert.Empty(t, s.runJSON(exitOK, "migrate", "up")[0]["applied"])
	undone := s.runJSON(exitOK, "migrate", "down")[0]["undone"]
	assert.NotEmpty(t, undone)
	status := s.runJSON(exitOK, "migrate", "status")[0]
	all := status["migrations"].([]any)
	assert.Equal(t, map[string]any{"name": undone, "applied": false}, all[len(all)-1])
	assert.Equal(t, []any{}, status["missing"])
	assert.Equal(t, []any{undone}, s.runJSON(exitOK, "migrate", "up")[0]["applied"])

	_, err := s.pool.Exec(t.Context(), "DROP INDEX orders_one_live_per_user")
	require.NoError(t, err)
	missing := s.runJSON(exitFailed, "migrate", "status")[0]["missing"].([]any)
	require.Len(t, missing, 1)
	assert.Contains(t, missing[0].(map[string]any)["mend"], "CREATE UNIQUE INDEX")
}

func TestRelayCommandsPrintTargetAsJSON(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, c := range []struct {
		args, state string
	}{
		{"add one redis-stream://localhost:1/0?stream=s --from=start", "active"},
		{"pause one", "paused"},
		{"resume one", "active"},
		{"replay one --from=start", "active"},
		{"list", "active"},
	} {
		got := s.runJSON(exitOK, append([]string{"relay"}, strings.Fields(c.args)...)...)
		require.Len(t, got, 1, c.args)
		assert.Equal(t, "one", got[0]["name"], c.args)
		assert.Equal(t, c.state, got[0]["state"], c.args)
		assert.Contains(t, got[0], "position", c.args)
	}
	assert.Equal(t, map[string]any{"name": "one", "removed": true}, s.runJSON(exitOK, "relay", "remove", "one")[0])
	assert.Empty(t, s.runJSON(exitOK, "relay", "list"))
}

func TestHealthcheckPrintsJSON(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	for path, want := range map[string]map[string]any{
		"/readyz": {"ready": true, "status": 200.0}, "/none": {"ready": false, "status": 404.0},
	} {
		want["url"] = url + path
		status := map[bool]int{true: exitOK, false: exitFailed}[want["ready"].(bool)]
		assert.Equal(t, want, s.runJSON(status, "healthcheck", "--url="+url+path)[0])
	}
}

func TestLoadPrintsJSON(t *testing.T) {
	t.Parallel()
	_, load := loadCommand(t)
	load.Setenv("STAMPEDE_OUTPUT", "json")
	load.KeepStdout()
	load.Start()
	assert.Equal(t, exitOK, load.Wait(within).ExitCode())
	got := objects(t, load.Stdout())
	require.Len(t, got, 1)
	crowd := got[0]["crowd"].(map[string]any)
	assert.Equal(t, 50.0, crowd["accepted"])
	assert.Equal(t, 200.0, crowd["buyers"])
	assert.Positive(t, crowd["winners_ms"].(map[string]any)["p50"])
	assert.Equal(t, 50.0, crowd["durable"].(map[string]any)["orders"])
	assert.Equal(t, 50.0, got[0]["checked"].(map[string]any)["found"])
	assert.Len(t, got[0]["audit"].(map[string]any)["promises"], 8)
}

func TestDemoPrintsVerdictAsJSON(t *testing.T) {
	t.Parallel()
	c := demoCommand(t)
	c.Setenv("STAMPEDE_OUTPUT", "json")
	c.KeepStdout()
	c.Start()
	assert.Equal(t, exitOK, c.Wait(within).ExitCode())
	got := objects(t, c.Stdout())
	require.Len(t, got, 1, c.Stdout())
	assert.Equal(t, true, got[0]["kept"])
	assert.Len(t, got[0]["promises"], 5)
	assert.Equal(t, 500.0, got[0]["checked"].(map[string]any)["found"])
	assert.Contains(t, c.Output(), "kill -9 of worker-", "the story goes to standard error")
}

// loadCommand prepares a small crowd that authenticates with JWTs.
func loadCommand(t *testing.T, flags ...string) (*shop, *testkit.Cmd) {
	t.Helper()
	const secret = "a secret of at least thirty-two bytes"
	s := newShop(t)
	ingress := s.command("serve")
	ingress.Setenv("STAMPEDE_JWT_SECRET", secret)
	ingress.Setenv("STAMPEDE_JWT_ISSUER", "tests")
	ingress.Setenv("STAMPEDE_JWT_AUDIENCE", "stampede")
	ingress.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	ingress.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
	ingress.Start()
	_, addr, _ := strings.Cut(ingress.WaitOutput(within, "ingress listens"), "addr=")
	addr, _, _ = strings.Cut(addr, " ")
	s.worker("worker").Start()

	load := s.command(append([]string{
		"load", "--stock=50", "--buyers=200", "--arrive=flash:100ms", "--double-clicks=0.2", "--patience=5s",
	}, flags...)...)
	load.Setenv("STAMPEDE_LOAD_URL", "http://"+addr)
	load.Setenv("STAMPEDE_JWT_SECRET", secret)
	load.Setenv("STAMPEDE_JWT_ISSUER", "tests")
	load.Setenv("STAMPEDE_JWT_AUDIENCE", "stampede")
	load.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	return s, load
}

func TestLoadVerifiesEveryOrderInPostgres(t *testing.T) {
	t.Parallel()
	_, load := loadCommand(t)
	load.Start()
	assert.Equal(t, exitOK, load.Wait(within).ExitCode())
	assert.Contains(t, load.Output(), "checked against Postgres, order by order: 50 accepted, 50 of them found")
	assert.Contains(t, load.Output(), "durable")
	assert.Equal(t, 8, strings.Count(load.Output(), " kept "), "the audit's promises")
}

func TestLoadSaysWhetherWantsAreMet(t *testing.T) {
	t.Parallel()
	course := filepath.Join(t.TempDir(), "course")
	require.NoError(t, os.WriteFile(course, []byte("1764925200 150\n1764925201 50\n"), 0o600))
	_, load := loadCommand(t, "--arrive="+course, "--want=failed=0,durable=1m,refused-p99=1m", "--want=p50=1ns")
	load.Start()
	assert.Equal(t, exitFailed, load.Wait(within).ExitCode())
	for _, line := range []string{
		"✓ 0 of 240 clicks failed, wanted at most 0%", "✓ from the first click until the last order was in Postgres ",
		"✓ p99 of refusals ", "✗ p50 of accepted orders ",
	} {
		assert.Contains(t, load.Output(), line)
	}
}

func TestLoadBuysBaskets(t *testing.T) {
	t.Parallel()
	s, load := loadCommand(t, "--items=m:30,l:20", "--quantity=2")
	load.Start()
	assert.Equal(t, exitOK, load.Wait(within).ExitCode())
	assert.Contains(t, load.Output(), "checked against Postgres, order by order: 20 accepted, 20 of them found")
	assert.Equal(t, 8, strings.Count(load.Output(), " kept "), "the audit's promises")
	assert.Equal(t, []string{"m: 20 of 30", "l: 20 of 20"}, testshop.Rows(t, s.pool,
		"SELECT code || ': ' || sold || ' of ' || stock FROM sale_items ORDER BY item"))
}

func TestLoadFailsOnOrderOfAnotherUser(t *testing.T) {
	t.Parallel()
	s, load := loadCommand(t)
	_, err := s.pool.Exec(t.Context(), `
		CREATE FUNCTION steal() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.user_id = 'thief'; RETURN NEW; END $$;
		CREATE TRIGGER steal BEFORE INSERT ON orders FOR EACH ROW WHEN (NEW.sequence = 10) EXECUTE FUNCTION steal();`)
	require.NoError(t, err)
	load.Start()
	assert.Equal(t, exitFailed, load.Wait(within).ExitCode())
	assert.Contains(t, load.Output(), "1 altered")
	assert.Contains(t, load.Output(), "thief")
	assert.Contains(t, load.Output(), "BROKEN")
}

func demoCommand(t *testing.T, flags ...string) *testkit.Cmd {
	t.Helper()
	c := testkit.Command(t,
		append([]string{"demo", "--stock=500", "--buyers=1000", "--over=4s", "--double-clicks=0.1"}, flags...)...)
	c.Setenv("REDIS_URL", testkit.RedisURL(t))
	c.Setenv("DATABASE_URL", testkit.DatabaseURL(t))
	c.Setenv("TMPDIR", t.TempDir()) // for its logs
	return c
}

func TestDemoPasses(t *testing.T) {
	t.Parallel()
	c := demoCommand(t)
	c.Start()
	state := c.Wait(within)
	assert.Equal(t, exitOK, state.ExitCode())
	out := c.Output()
	assert.Regexp(t, "kill -9 of worker-[12] with", out)
	for _, name := range []string{"S1", "S2", "S3", "S4", "S5"} {
		assert.Contains(t, out, "✓ "+name)
	}
	assert.NotContains(t, out, "level=", "the story contains no log")
}

func TestDemoSellsItems(t *testing.T) {
	t.Parallel()
	c := demoCommand(t, "--items=m:400,l:300,xl:300")
	c.Start()
	state := c.Wait(within)
	assert.Equal(t, exitOK, state.ExitCode(), c.Output())
	assert.Contains(t, c.Output(), "a sale of 1,000 units in 3 items")
	assert.Contains(t, c.Output(), "✓ S5")
}

func TestDemoRefusesDatabaseInUse(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.serve()
	output := s.ends(exitUsage, "demo")
	assert.Contains(t, output, "DATABASE_URL must be a database that no server uses now")
	assert.Zero(t, s.count("SELECT count(*) FROM sales"))
}

// The dashboard shows the sale after the verdict, until Ctrl-C.
func TestDemoKeepsDashboard(t *testing.T) {
	t.Parallel()
	c := demoCommand(t, "--dashboard")
	c.Start()
	c.WaitOutput(2*within, "the dashboard stays until Ctrl-C")
	require.Contains(t, c.Output(), "✓ S5")
	found := regexp.MustCompile(`the dashboard: (http://\S+), token (\S+)`).FindStringSubmatch(c.Output())
	require.NotNil(t, found, c.Output())
	desk, token := found[1], found[2]
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	browser := &http.Client{Jar: jar, Timeout: within}
	defer browser.CloseIdleConnections()
	read := func(method, path string, form url.Values) string {
		r, err := http.NewRequestWithContext(t.Context(), method, desk+path, strings.NewReader(form.Encode()))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		answer, err := browser.Do(r)
		require.NoError(t, err)
		defer func() { _ = answer.Body.Close() }()
		page, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		return string(page)
	}
	require.Contains(t, read(http.MethodGet, "/", nil), "Your operator", "nothing is shown without the token")
	read(http.MethodPost, "/login", url.Values{"token": {token}, "next": {"/"}})
	testkit.Eventually(t, within, "the sale is sold out, and all processes are up", func() bool {
		page := read(http.MethodGet, "/", nil)
		return strings.Contains(page, ">demo<") && strings.Contains(page, ".sold\">500<") &&
			strings.Count(page, "✓ up") >= 3
	})

	require.NoError(t, unix.Kill(c.Pid(), unix.SIGINT))
	require.Equal(t, exitOK, c.Wait(within).ExitCode(), c.Output())
	_, err = net.DialTimeout("tcp", strings.TrimPrefix(desk, "http://"), within) //nolint:noctx // of a test
	require.Error(t, err, "its dashboard has ended as well")
}

// A Postgres that loses one row of a batch breaks a promise.
func TestDemoFailsOnLostOrder(t *testing.T) {
	t.Parallel()
	_, err := testkit.Pool(t).Exec(t.Context(), `
		CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER lose BEFORE INSERT ON orders FOR EACH ROW WHEN (NEW.sequence = 10) EXECUTE FUNCTION lose();`)
	require.NoError(t, err)
	c := demoCommand(t)
	c.Start()
	state := c.Wait(2 * within)
	assert.Equal(t, exitFailed, state.ExitCode())
	assert.Contains(t, c.Output(), "✗ S5")
	assert.Contains(t, c.Output(), "the logs of all processes are in")
}
