//go:build system

package main

import (
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
)

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
		"load", "--stock=50", "--buyers=200", "--rate=400", "--double-clicks=0.2", "--patience=5s",
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
