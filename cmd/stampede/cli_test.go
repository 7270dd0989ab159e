//go:build system

package main

import (
	"bytes"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestHelpWithoutCommand(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{"Usage: stampede": nil, "stampede ": {"--version"}} {
		var out, errs bytes.Buffer
		assert.Equal(t, exitOK, run(args, &out, &errs), args)
		assert.True(t, strings.HasPrefix(out.String(), name), out.String())
		assert.Empty(t, errs.String())
	}
	var flag, command, errs bytes.Buffer
	run([]string{"--version"}, &flag, &errs)
	run([]string{"version"}, &command, &errs)
	assert.Equal(t, command.String(), flag.String())
}

func TestInvalidSaleIDIsUsageError(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"sale", "show", "nonsense"},
		{"sale", "pause", "nonsense"},
		{"sale", "restock", "nonsense", "5"},
		{"sale", "list", "--after=nonsense"},
		{"audit", "--sale=nonsense"},
		{"rebuild", "--sale=nonsense"},
		{"reconcile", "--sale=nonsense"},
		{"doctor", "--sale=nonsense"},
		{"load", "--sale=nonsense"},
	} {
		var out, errs bytes.Buffer
		assert.Equal(t, exitUsage, run(args, &out, &errs), args)
		assert.Contains(t, errs.String(), `"nonsense" is not a sale id`, args)
		assert.Equal(t, 1, strings.Count(errs.String(), "\n"), errs.String())
	}
}

func TestTakenPortNamesSetting(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	taken, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	for _, c := range []struct{ command, variable, flag string }{
		{"serve", "STAMPEDE_HTTP_ADDR", "--http-addr"},
		{"dev", "STAMPEDE_HTTP_ADDR", "--http-addr"},
		{"work", "STAMPEDE_METRICS_ADDR", "--metrics-addr"},
	} {
		cmd := s.command(c.command, c.flag+"="+taken.Addr().String())
		if c.command == "serve" {
			cmd.Setenv("STAMPEDE_AUTH", "header")
		}
		cmd.Start()
		assert.Equal(t, exitFailed, cmd.Wait(within).ExitCode(), c.command)
		assert.Contains(t, cmd.Output(), taken.Addr().String(), c.command)
		assert.Contains(t, cmd.Output(), "address already in use: set "+c.variable+" ("+c.flag+") to another address",
			c.command)
	}
}

func TestDevPrintsEnvironmentForSecondTerminal(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	dev := s.command("dev", "--http-addr=127.0.0.1:0")
	dev.Start()
	line := dev.WaitOutput(within, "export REDIS_URL=")
	found := regexp.MustCompile(`^export REDIS_URL='([^']+)' DATABASE_URL='([^']+)'$`).FindStringSubmatch(line)
	require.Len(t, found, 3, line)
	list := testkit.Command(t, "sale", "list")
	list.Setenv("REDIS_URL", found[1])
	list.Setenv("DATABASE_URL", found[2])
	list.Start()
	assert.Equal(t, exitOK, list.Wait(within).ExitCode(), list.Output())
	assert.Equal(t, `'a'\''b'`, quoted("a'b"))
	assert.Equal(t, exitOK, dev.Stop().ExitCode())
}

func TestDevTakesTokensAndOrigins(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	dev := s.command("dev", "--http-addr=127.0.0.1:0", "--auth=jwt", "--jwt-secret="+strings.Repeat("s", 32),
		"--cors-origins=https://shop.example")
	dev.Start()
	url := strings.Fields(dev.WaitOutput(within, "ingress  "))[1]
	dev.WaitOutput(within, "-H 'Authorization: Bearer TOKEN'")
	ask, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/orders", nil)
	require.NoError(t, err)
	ask.Header.Set("Origin", "https://shop.example")
	ask.Header.Set("X-User-ID", "ada")
	answer, err := http.DefaultClient.Do(ask)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	assert.Equal(t, http.StatusUnauthorized, answer.StatusCode)
	assert.Equal(t, "https://shop.example", answer.Header.Get("Access-Control-Allow-Origin"))
	assert.Equal(t, exitOK, dev.Stop().ExitCode())

	output := s.ends(exitUsage, "dev", "--http-addr=127.0.0.1:0", "--auth=jwt")
	assert.Contains(t, output, "auth mode jwt needs STAMPEDE_JWT_SECRET")
}

// A Redis of 8 MiB is too small for a hundred million units.
func TestDoctorComparesMemoryWithUnitsOnSale(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	own := testkit.OwnRedis(t)
	s.redisURL = own.URL
	rdb := control(t, own.URL)
	require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory", "8mb").Err())
	store := s.store(rdb)
	sales := catalog.New(s.pool, store)
	sale := func(stock int64) string {
		sale, err := sales.Create(t.Context(), reservation.Terms{Name: "x", Stock: stock, PerOrderLimit: 1})
		require.NoError(t, err)
		return "--sale=" + sale.ID.String()
	}
	fits := func(flags ...string) {
		t.Helper()
		output := s.ends(exitOK, append([]string{"doctor"}, flags...)...)
		assert.NotContains(t, output, "on sale, which")
	}
	small := sale(1000)
	fits()
	fits(small)
	_, err := sales.Create(t.Context(), reservation.Terms{
		Name: "x", Stock: 1, PerOrderLimit: 1, PaymentWindow: time.Hour, Waitlist: true,
	})
	require.NoError(t, err)
	fits() // its places are no units
	huge := sale(order.MaxStock)
	for _, c := range []struct{ flag, units string }{{huge, "100,000,000"}, {"--output=json", "100,001,001"}} {
		output := s.ends(exitFailed, "doctor", c.flag)
		assert.Contains(t, output, c.units+" units are on sale, which take about 46.6 GiB")
		assert.Contains(t, output, "of maxmemory, 8 MiB")
	}
	fits(small)
	serve, _ := s.serve()
	assert.Contains(t, serve.Output(), "UNSAFE SETTING: 100,001,001 units are on sale")

	s.ends(exitOK, "sale", "end", strings.TrimPrefix(huge, "--sale="))
	fits()
	fits(huge)
	output := s.ends(exitFailed, "doctor", "--sale="+uuid.Must(uuid.NewV7()).String())
	assert.Contains(t, output, "sale not found")
}

func TestUndecidedErrorsNameIdempotencyKey(t *testing.T) {
	t.Parallel()
	for err, repeat := range map[error]bool{
		reservation.ErrUnavailable: true, pg.ErrChangeUnknown: true, catalog.ErrRestockUndecided: true,
		catalog.ErrNotInForce:       true,
		catalog.ErrRestockWithdrawn: false, reservation.ErrSaleNotFound: false,
		catalog.ErrIdempotencyKeyReused: false,
	} {
		got := mayBeDone(err, "k")
		require.ErrorIs(t, got, err)
		assert.Equal(t, repeat, strings.Contains(got.Error(), "repeat it with --idempotency-key=k"), got)
	}
	assert.NoError(t, mayBeDone(nil, "k"))
}

// Flags whose value must not be seen can be read from files.
func TestEachSecretHasFile(t *testing.T) {
	t.Parallel()
	found := map[string]bool{}
	for _, leaf := range leaves(t) {
		for _, group := range leaf.AllFlags(true) {
			for _, flag := range group {
				_, file := secretFile(flag)
				found[file] = true
				secret := strings.HasSuffix(flag.Name, "-secret") || strings.HasSuffix(flag.Name, "-token") ||
					flag.Name == "redis-url" || flag.Name == "database-url"
				assert.Equal(t, secret, file != "", "%s --%s", leaf.Path(), flag.Name)
			}
		}
	}
	for _, file := range secretFiles {
		assert.True(t, found[file], "no flag has the variable of %s", file)
	}
	var out, errs strings.Builder
	require.Equal(t, exitOK, run([]string{"serve", "--help"}, &out, &errs))
	for _, file := range secretFiles {
		assert.Contains(t, out.String(), "$"+file)
	}
}

func TestSecretsAreReadFromFiles(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := testkit.Command(t, "serve", "--auth=header", "--http-addr=127.0.0.1:0", "--stop-delay=0s",
		"--key-prefix="+s.keys.Prefix)
	c.Setenv("REDIS_URL", "") // as compose passes on what is not set
	c.Setenv("DATABASE_URL", "")
	c.Setenv("REDIS_URL_FILE", file(t, testkit.RedisURL(t)+"\n"))
	c.Setenv("DATABASE_URL_FILE", file(t, testkit.DatabaseURL(t)+"\r\n"))
	c.Setenv("STAMPEDE_ADMIN_TOKEN_FILE", file(t, "from-a-file\n"))
	c.Start()
	url := "http://" + loggedAddr(c, "ingress listens")
	for token, want := range map[string]int{"from-a-file": http.StatusOK, "another": http.StatusUnauthorized} {
		status, text := call(t, http.MethodGet, url+"/v1/admin/orders?user=ann", "", "Authorization", "Bearer "+token)
		assert.Equal(t, want, status, text)
	}

	// A flag wins, also over a file that cannot be read.
	list := s.command("sale", "list", "--redis-url="+testkit.RedisURL(t), "--database-url="+testkit.DatabaseURL(t))
	list.Setenv("REDIS_URL_FILE", "/none")
	list.Setenv("DATABASE_URL_FILE", "/none")
	list.Start()
	assert.Equal(t, exitOK, list.Wait(within).ExitCode(), list.Output())
}

// The processes of a demo get its own servers and token, not the files.
func TestDemoTakesSecretsFromFiles(t *testing.T) {
	t.Parallel()
	c := demoCommand(t)
	c.Setenv("REDIS_URL", "")
	c.Setenv("REDIS_URL_FILE", file(t, testkit.RedisURL(t)))
	c.Setenv("STAMPEDE_ADMIN_TOKEN_FILE", file(t, "another"))
	c.Start()
	assert.Equal(t, exitOK, c.Wait(within).ExitCode())
}

func TestSecretFileErrorsNameVariableAndPath(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	none := filepath.Join(folder, "none")
	for name, c := range map[string]struct {
		path, other, want string
	}{
		"missing":   {none, "", "REDIS_URL_FILE: open " + none + ": no such file or directory"},
		"folder":    {folder, "", "REDIS_URL_FILE: read " + folder + ": is a directory"},
		"empty":     {file(t, " \n"), "", "/secret is empty"},
		"too long":  {file(t, strings.Repeat("hunter2-", 2049)), "", "/secret is longer than 16384 bytes"},
		"both":      {file(t, "redis://:hunter2@localhost"), "redis://:hunter2@localhost", "both REDIS_URL and REDIS_URL_FILE are set: unset one of them"},
		"malformed": {file(t, "hunter2"), "", "REDIS_URL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := testkit.Command(t, "sale", "list", "--database-url=postgres://localhost/none")
			run.Setenv("REDIS_URL", c.other)
			run.Setenv("REDIS_URL_FILE", c.path)
			run.Start()
			assert.Equal(t, exitUsage, run.Wait(within).ExitCode())
			assert.Contains(t, run.Output(), c.want)
			assert.NotContains(t, run.Output(), "hunter2")
			assert.Equal(t, 1, strings.Count(run.Output(), "\n"), run.Output())
		})
	}
}

func TestDefaultLimits(t *testing.T) {
	t.Parallel()
	var flags cli
	parser, err := kong.New(&flags, defaults)
	require.NoError(t, err)
	_, err = parser.Parse([]string{"serve", "--redis-url=redis://localhost", "--database-url=postgres://localhost"})
	require.NoError(t, err)
	assert.Equal(t, clientFlags{UserRate: 5, UserBurst: 20, AddressBurst: 200, UserStreams: 16, AddressStreams: 1000},
		flags.Serve.clientFlags)
	assert.Equal(t, 5*time.Second, flags.Serve.StopDelay)
}

func TestUserRateLimit(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve("--user-rate=5/s")
	orders := url + "/v1/sales/" + s.sale(url, 10).String() + "/orders"
	require.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, orders, "ann", "").HTTP)
	testkit.Eventually(t, within, "the user is limited", func() bool {
		for range 30 { // without a pause; after a long pause of the test machine, Eventually tries again
			if ask(t, http.MethodPost, orders, "ann", "").HTTP == http.StatusTooManyRequests {
				return true
			}
		}
		return false
	})
	assert.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, orders, "bob", "").HTTP)
}

// forGood are the commands that cannot be undone, with arguments that make them so.
var forGood = map[string]string{
	"sale end":     uuid.Nil.String(),
	"draw open":    uuid.Nil.String(),
	"order cancel": uuid.Nil.String() + " --reason=r",
	"dlq discard":  "1 --reason=r",
	"reconcile":    "",
	"rebuild":      "",
	"migrate down": "--discard-data",
	"relay remove": "x",
}

// Without a terminal nobody can be asked: that is found before a server is.
func TestCommandsThatCannotBeUndoneNeedYes(t *testing.T) {
	t.Parallel()
	for _, leaf := range leaves(t) {
		command := strings.Join(words(leaf), " ")
		_, listed := forGood[command]
		assert.Equal(t, findFlag(leaf, "yes") != nil, listed, "%s: does it have --yes, and is it in forGood?", command)
	}
	for command, args := range forGood {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			run := func(more ...string) (int, string) {
				c := testkit.Command(t, append(append(strings.Fields(command), strings.Fields(args)...), more...)...)
				c.Setenv("REDIS_URL", "redis://127.0.0.1:1")
				c.Setenv("DATABASE_URL", "postgres://127.0.0.1:1/none?connect_timeout=2")
				c.Start()
				return c.Wait(within).ExitCode(), c.Output()
			}
			status, output := run()
			assert.Equal(t, exitUsage, status, output)
			assert.Contains(t, output, "add --yes (STAMPEDE_YES); nothing was done")
			status, output = run("--yes")
			assert.NotEqual(t, exitUsage, status, output)
			assert.Contains(t, output, "refused")
		})
	}
}

func findFlag(leaf *kong.Node, name string) *kong.Flag {
	for _, group := range leaf.AllFlags(false) {
		for _, flag := range group {
			if flag.Name == name {
				return flag
			}
		}
	}
	return nil
}

// On a terminal each of them names what happens, and does nothing unless the answer is yes.
func TestCommandsThatCannotBeUndoneAskOnTerminal(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sale, orders := s.recorded("ann", "bob")
	_, err := s.pool.Exec(t.Context(), `INSERT INTO dead_letters (stream, entry_id, fields, reason, deliveries)
		VALUES ('s', '1-1', '[]', 'rubbish', 1)`)
	require.NoError(t, err)
	s.ends(exitOK, "relay", "add", "shop", "redis-stream://localhost:1/0?stream=s")
	done := "SELECT (SELECT count(*) FROM orders WHERE status = 'cancelled') + " +
		"(SELECT count(*) FROM dead_letters WHERE status = 'discarded') + (SELECT 1 - count(*) FROM relay_targets) + " +
		"(SELECT count(*) FROM sale_events WHERE type IN ('SaleEnded', 'SaleRebuilt'))"
	for i, c := range []struct{ args, question, result string }{
		{
			"order cancel " + orders["ann"].String() + " --reason=r",
			"Order " + orders["ann"].String() + " of ann (confirmed) is cancelled; its 1 units go back to the sale.",
			"is cancelled",
		},
		{"dlq discard 1 --reason=r", "Dead letter 1 (rubbish) is discarded. It names no order.", "is discarded"},
		{"relay remove shop", "Target shop (redis-stream://localhost:1/0?stream=s) is removed, with its secrets", "is removed"},
		{"rebuild", "The stock in Redis is rebuilt from Postgres: all sales.", "rebuilt"},
		{
			"sale end " + sale.String(), `The sale "a sale" ends: of 100 units 0 are sold, 1 held, 99 unsold.`,
			"ended",
		},
		{"reconcile", "Differences between Redis and Postgres are repaired in all sales", "difference"},
	} {
		ask := func(answer, result string) int {
			cmd := s.command(strings.Fields(c.args)...)
			cmd.Setenv("STAMPEDE_YES", "false")
			cmd.Terminal()
			cmd.Start()
			cmd.WaitOutput(within, "This cannot be undone. Go on? [y/N]")
			assert.Contains(t, cmd.Output(), c.question)
			cmd.WriteLine(answer)
			cmd.WaitOutput(within, result)
			return cmd.Wait(within).ExitCode()
		}
		before := s.count(done)
		for _, answer := range []string{"", "no", "yes, but not now"} {
			assert.Equal(t, exitFailed, ask(answer, "not confirmed; nothing was done"), c.args)
			assert.Equal(t, before, s.count(done), c.args)
		}
		assert.Equal(t, exitOK, ask([]string{"y", "YES"}[i%2], c.result), c.args)
		if c.args != "reconcile" {
			assert.Greater(t, s.count(done), before, c.args)
		}
	}
}

// A question can be interrupted.
func TestQuestionEndsBySignal(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	cmd := s.command("migrate", "down", "--discard-data")
	cmd.Setenv("STAMPEDE_YES", "false")
	cmd.Terminal()
	cmd.Start()
	cmd.WaitOutput(within, "[y/N]")
	assert.Contains(t, cmd.Output(), "is undone, and the sales and orders in what it made are deleted.")
	assert.Equal(t, exitFailed, cmd.Stop().ExitCode())
	cmd.WaitOutput(within, "nothing was done")
	s.ends(exitOK, "sale", "list")
}

// Commands that check the database report missing constraints and indexes, with the SQL that restores them.
func TestCommandsReportMissingGuard(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := s.pool.Exec(t.Context(), "DROP INDEX orders_one_live_per_user, orders_ended_of_user")
	require.NoError(t, err)
	const (
		what = "the unique index orders_one_live_per_user of the table orders is missing"
		mend = "CREATE UNIQUE INDEX orders_one_live_per_user ON ONLY orders USING btree (user_id, sale_id)"
	)
	for _, args := range [][]string{{"doctor"}, {"audit"}, {"reconcile", "--explain"}, {"migrate", "status"}} {
		output := s.ends(exitFailed, args...)
		require.Contains(t, output, what)
		require.Contains(t, output, mend)
	}

	worker := s.worker("worker")
	worker.Start()
	line := worker.WaitOutput(within, what)
	require.Contains(t, line, "level=ERROR")
	require.Contains(t, line, mend)
	require.Contains(t, worker.WaitOutput(within, "the index orders_ended_of_user of the table orders is missing"), "level=WARN")
	require.Equal(t, exitOK, worker.Stop().ExitCode(), "the worker runs without it")
}
