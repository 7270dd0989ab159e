//go:build system

package main

import (
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

func TestMissingMigrationsAreReportedOrAwaited(t *testing.T) {
	t.Parallel()
	server, err := localserver.StartPostgres(t.Context(), localserver.PostgresOptions{})
	require.NoError(t, err)
	t.Cleanup(server.Stop)
	command := func(args ...string) *testkit.Cmd {
		c := testkit.Command(t, args...)
		c.Setenv("REDIS_URL", testkit.RedisURL(t))
		c.Setenv("DATABASE_URL", server.URL)
		c.Setenv("STAMPEDE_KEY_PREFIX", testkit.Keys(t).Prefix)
		c.Setenv("STAMPEDE_AUTH", "header")
		c.Setenv("STAMPEDE_YES", "true")
		return c
	}
	starts := map[string]string{ // what it logs when it starts
		"serve --http-addr=127.0.0.1:0": "ingress listens", "work --metrics-addr=127.0.0.1:0": "worker started",
		"relay run --metrics-addr=127.0.0.1:0": "metrics are served", "dashboard --addr=127.0.0.1:0": "dashboard listens",
	}
	waiting := map[string]*testkit.Cmd{}
	for args := range starts {
		waiting[args] = command(strings.Fields(args)...)
		waiting[args].Start()
		waiting[args].WaitOutput(within, "stampede migrate up")
	}
	stopped := command("work")
	stopped.Start()
	stopped.WaitOutput(within, "waiting for the migration")
	assert.Equal(t, exitFailed, stopped.Stop().ExitCode())
	for args, status := range map[string]int{
		"sale list": exitUnknown, "dlq list": exitUnknown, "doctor": exitFailed, "audit": exitUnknown,
		"rebuild": exitFailed,
	} {
		c := command(strings.Fields(args)...)
		c.Start()
		assert.Equal(t, status, c.Wait(within).ExitCode(), args)
		assert.Contains(t, c.Output(), "stampede migrate up", args)
	}

	for _, step := range []struct{ arg, want string }{
		{"status", "-"}, {"up", "up to date"}, {"up", "up to date"}, {"status", "00001_schema +20"}, {"down", "undone"},
	} {
		c := command("migrate", step.arg)
		c.Start()
		assert.Equal(t, exitOK, c.Wait(within).ExitCode())
		assert.Regexp(t, step.want, c.Output())
		if step.arg != "up" {
			continue
		}
		for args, c := range waiting {
			c.WaitOutput(within, starts[args])
			c.Stop()
			delete(waiting, args)
		}
	}
}

func TestMigrateDownRequiresForceToDeleteSales(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.ends(exitOK, "sale", "create", "--name=autumn", "--stock=1")
	output := s.ends(exitFailed, "migrate", "down")
	assert.Contains(t, output, "--discard-data")
	output = s.ends(exitOK, "sale", "list")
	assert.Contains(t, output, "autumn")
	s.ends(exitOK, "migrate", "down", "--discard-data")
}

func TestDoctorAndServeWarnOfEvictingRedis(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	own := testkit.OwnRedis(t)
	rdb := control(t, own.URL)
	require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err())
	require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory", "0").Err())

	doctor := s.command("doctor")
	doctor.Setenv("REDIS_URL", own.URL)
	doctor.Start()
	assert.Equal(t, exitFailed, doctor.Wait(within).ExitCode())
	assert.Contains(t, doctor.Output(), "maxmemory-policy is allkeys-lru")
	assert.Contains(t, doctor.Output(), "mend:")
	assert.Regexp(t, `(Redis|Valkey) \d+\.\S+, PostgreSQL \d+`, doctor.Output(), "names and versions of the servers")

	serve := s.command("serve")
	serve.Setenv("REDIS_URL", own.URL)
	serve.Setenv("STAMPEDE_AUTH", "header")
	serve.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
	serve.Start()
	serve.WaitOutput(within, "ingress listens")
	assert.Contains(t, serve.Output(), "level=ERROR msg=\"UNSAFE SETTING: maxmemory-policy is allkeys-lru\"")
	assert.Contains(t, serve.Output(), "level=WARN msg=\"setting to check: maxmemory is not set\"")
	assert.Equal(t, exitOK, serve.Stop().ExitCode())
}

func TestDoctorAcceptsShippedConfiguration(t *testing.T) {
	t.Parallel()
	status, output := newShop(t).run("doctor", "--output=json")
	assert.Equal(t, exitOK, status)
	var findings []struct{ Severity string }
	require.NoError(t, json.Unmarshal([]byte(output), &findings), output)
	for _, f := range findings {
		assert.NotEqual(t, "unsafe", f.Severity)
	}
}

func TestDeadLetterCommands(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	rdb := testkit.Redis(t)
	require.NoError(t, rdb.XAdd(t.Context(), &redis.XAddArgs{
		Stream: s.keys.Orders(0), Values: []any{"unknown", "\x1b[31mred\xff"},
	}).Err())
	s.worker("worker").Start()
	parked := func() int { return s.count("SELECT count(*) FROM dead_letters WHERE status = 'parked'") }
	testkit.Eventually(t, within, "the entry is parked", func() bool { return parked() == 1 })

	output := s.ends(exitOK, "dlq", "list")
	assert.Contains(t, output, "parked")
	output = s.ends(exitOK, "dlq", "show", "1")
	assert.Contains(t, output, `"\x1b[31mred\xff"`, "control characters of an entry must not reach the terminal")

	s.ends(exitOK, "dlq", "replay", "1")
	testkit.Eventually(t, within, "it is parked again", func() bool { return parked() == 1 })
	// An entry that a worker has applied is not parked again.
	var entry string
	require.NoError(t, s.pool.QueryRow(t.Context(),
		`UPDATE dead_letters SET status = 'replayed' RETURNING replayed_as`).Scan(&entry))
	output = s.ends(exitOK, "dlq", "replay", "1")
	assert.Contains(t, output, "replayed before as entry "+entry)
	_, err := s.pool.Exec(t.Context(), `UPDATE dead_letters SET status = 'parked'`)
	require.NoError(t, err)
	output = s.ends(exitOK, "dlq", "list", "--output=json")
	assert.Contains(t, output, `"replays":1,"replayed_as":"`+entry+`"`)
	output = s.ends(exitOK, "dlq", "discard", "1", "--reason=a joke", "--operator=ann")
	assert.Contains(t, output, "a joke")
	output = s.ends(exitOK, "dlq", "list", "--status=discarded", "--output=json")
	assert.Contains(t, output, `"operator":"ann"`)
	output = s.ends(exitFailed, "dlq", "discard", "1", "--reason=again")
	assert.Contains(t, output, "not parked")
	s.ends(exitUsage, "dlq", "discard", "1")
}

func TestDevServesAndCleansUp(t *testing.T) {
	t.Parallel()
	c := testkit.Command(t, "dev", "--http-addr=127.0.0.1:0", "--admin-token="+adminToken)
	c.Setenv("REDIS_URL", "")
	c.Setenv("DATABASE_URL", "")
	c.Start()
	url := strings.Fields(c.WaitOutput(within, "ingress  "))[1]
	load := testkit.Command(t, "load", "--url="+url, "--admin-token="+adminToken, "--stock=20", "--buyers=60",
		"--over=100ms")
	load.Setenv("REDIS_URL", "")
	load.Setenv("DATABASE_URL", "")
	load.Start()
	assert.Equal(t, exitOK, load.Wait(within).ExitCode())
	assert.Contains(t, load.Output(), "20 accepted, 20 of them found")

	pool, err := connect.Postgres(t.Context(), strings.Fields(c.WaitOutput(within, "  postgres  "))[1], 1)
	require.NoError(t, err)
	defer pool.Close()
	begun := time.Now()
	testkit.Eventually(t, within, "heartbeats reach Postgres", func() bool {
		var seen time.Time
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT seen_at FROM pulse`).Scan(&seen))
		return seen.After(begun)
	})
	assert.Equal(t, exitOK, c.Stop().ExitCode())
	assert.NotContains(t, c.Output(), "SETTING")
	assert.NotContains(t, c.Output(), "setting to check")
}

func TestDevEndsWithItsServers(t *testing.T) {
	t.Parallel()
	c := testkit.Command(t, "dev", "--http-addr=127.0.0.1:0")
	c.Setenv("REDIS_URL", "")
	c.Setenv("DATABASE_URL", "")
	c.Start()
	url := strings.Fields(c.WaitOutput(within, "  redis  "))[1]
	rdb := control(t, url)
	pid, err := strconv.Atoi(regexp.MustCompile(`process_id:(\d+)`).FindStringSubmatch(rdb.Info(t.Context(),
		"server").Val())[1])
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	assert.Equal(t, exitFailed, c.Wait(within).ExitCode())
	assert.Contains(t, c.Output(), "the private Redis ended unexpectedly (signal: killed)")
}

func TestSecondSignalEndsImmediately(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := s.command("serve", "--stop-delay=10m")
	c.Setenv("STAMPEDE_AUTH", "header")
	c.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
	c.Start()
	c.WaitOutput(within, "ingress listens")
	// A second signal that arrives before the first was handled has no effect, so they are repeated.
	testkit.Eventually(t, within, "the process ends", func() bool {
		return syscall.Kill(c.Pid(), syscall.SIGTERM) != nil
	})
	assert.Equal(t, syscall.SIGTERM, c.Wait(within).Sys().(syscall.WaitStatus).Signal())
}

func TestWorkersOfOneHostUseDistinctConsumers(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	one, freeOne, err := takeLane(folder)
	require.NoError(t, err)
	two, freeTwo, err := takeLane(folder)
	require.NoError(t, err)
	assert.Equal(t, []int{0, 1}, []int{one, two})
	copyOpenFile(t, folder+"/0") // as a child has between its fork and its exec
	freeOne()
	again, freeAgain, err := takeLane(folder)
	require.NoError(t, err)
	assert.Equal(t, 0, again, "the first free lane, so a restarted worker gets its old name")
	freeTwo()
	freeAgain()

	file := folder + "/no-folder"
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, _, err = takeLane(file)
	assert.Error(t, err, "an error if the folder cannot be created")
}

// copyOpenFile keeps a second descriptor of a file that this process has open.
func copyOpenFile(t *testing.T, path string) {
	t.Helper()
	const descriptors = "/proc/self/fd"
	open, err := os.ReadDir(descriptors)
	require.NoError(t, err)
	for _, entry := range open {
		if target, _ := os.Readlink(descriptors + "/" + entry.Name()); target == path {
			fd, err := strconv.Atoi(entry.Name())
			require.NoError(t, err)
			twin, err := syscall.Dup(fd)
			require.NoError(t, err)
			t.Cleanup(func() { _ = syscall.Close(twin) })
			return
		}
	}
	t.Fatalf("%s is not open", path)
}

// A failed check is neither kept nor broken; broken promises are still reported.
func TestUnverifiableCommandsExitWithThree(t *testing.T) {
	t.Parallel()
	const nowhere = "127.0.0.1:1"
	runWith := func(s *shop, variable, url string, args ...string) (int, string) {
		c := s.command(args...)
		c.Setenv(variable, url)
		c.Start()
		return c.Wait(within).ExitCode(), c.Output()
	}
	redis := func(s *shop, args ...string) (int, string) {
		return runWith(s, "REDIS_URL", "redis://"+nowhere, args...)
	}
	postgres := func(s *shop, args ...string) (int, string) {
		return runWith(s, "DATABASE_URL", "postgres://"+nowhere+"/none?connect_timeout=2", args...)
	}
	s := newShop(t)

	status, output := redis(s, "audit")
	assert.Equal(t, exitUnknown, status, output)
	for _, line := range []string{
		"S1  nothing is oversold                kept", "S3  every accepted order has an end    UNKNOWN",
		"S7  Redis is whole and up to date      UNKNOWN",
		"DB  Postgres has all its guards        kept", "? not checked: ", "connection refused",
	} {
		assert.Contains(t, output, line)
	}
	status, output = redis(s, "audit", "--output=json")
	assert.Equal(t, exitUnknown, status, output)
	assert.Contains(t, output, `"unchecked":["`)
	status, output = redis(s, "reconcile")
	assert.Equal(t, exitUnknown, status, output)
	assert.Contains(t, output, "no difference in what could be checked")
	status, output = redis(s, "doctor")
	assert.Equal(t, exitUnknown, status, output)
	assert.Contains(t, output, "away       redis: ")

	for _, args := range [][]string{{"audit"}, {"reconcile"}, {"doctor"}, {"migrate", "status"}} {
		status, output = postgres(s, args...)
		assert.Equal(t, exitUnknown, status, "%v: %s", args, output)
	}

	// A failed check does not affect the others.
	_, err := s.pool.Exec(t.Context(), "ALTER TABLE orders RENAME COLUMN reason TO cause")
	require.NoError(t, err)
	output = s.ends(exitUnknown, "audit")
	assert.Contains(t, output, "S5  nothing is lost or doubled         UNKNOWN")
	assert.Contains(t, output, `? not checked: ERROR: column o.reason does not exist`)
	assert.Contains(t, output, "S7  Redis is whole and up to date      kept")

	// Broken takes precedence.
	_, err = s.pool.Exec(t.Context(), "DROP INDEX orders_one_live_per_user")
	require.NoError(t, err)
	for _, args := range [][]string{{"audit"}, {"reconcile"}, {"doctor"}} {
		status, output = redis(s, args...)
		assert.Equal(t, exitFailed, status, "%v: %s", args, output)
	}
}

// An audit that could not run does not hide the failures of the crowd.
func TestFailedAuditKeepsOtherFailures(t *testing.T) {
	t.Parallel()
	failed := errors.New("some clicks ended without a valid answer")
	for _, c := range []struct {
		judged, audited error
		status          int
		want            string
	}{
		{nil, nil, exitOK, ""},
		{nil, errUnchecked, exitUnknown, ""},
		{nil, errBroken, exitFailed, ""},
		{failed, nil, exitFailed, "stampede: some clicks ended without a valid answer\n"},
		{
			failed, errUnchecked, exitFailed,
			"stampede: some clicks ended without a valid answer; the audit: something could not be checked\n",
		},
		{
			failed, unchecked(errors.New("postgres is away")), exitFailed,
			"stampede: some clicks ended without a valid answer; the audit: postgres is away\n",
		},
		{
			failed, errBroken, exitFailed,
			"stampede: some clicks ended without a valid answer; the audit: a promise is broken\n",
		},
		{errBroken, errUnchecked, exitFailed, ""},
	} {
		var stderr strings.Builder
		assert.Equal(t, c.status, reportError(&stderr, alsoAudited(c.judged, c.audited)), "%v, %v", c.judged, c.audited)
		assert.Equal(t, c.want, stderr.String())
	}
}

// An audit that waits for an order which no worker takes shows it, beside the result.
func TestProgressStaysOutOfResult(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	store := s.store(testkit.Redis(s.t))
	sale, err := catalog.New(s.pool, store).Create(t.Context(), reservation.Terms{Name: "x", Stock: 5, PerOrderLimit: 1})
	require.NoError(t, err)
	answer, err := store.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, answer.Verdict)
	const shown = " s  waiting until no order is in flight: 1 entries left"

	audit := s.command("audit", "--wait=4s", "--output=json")
	audit.Setenv("STAMPEDE_PROGRESS", "on")
	audit.KeepStdout()
	audit.Start()
	assert.Equal(t, exitFailed, audit.Wait(within).ExitCode())
	assert.Contains(t, audit.Output(), shown)
	require.Len(t, objects(t, audit.Stdout()), 1)

	quiet := s.command("audit", "--wait=4s", "--progress=off")
	quiet.Start()
	assert.Equal(t, exitFailed, quiet.Wait(within).ExitCode())
	assert.NotContains(t, quiet.Output(), shown)

	terminal := s.command("audit", "--wait=60s")
	terminal.Setenv("STAMPEDE_PROGRESS", "on")
	terminal.Terminal()
	terminal.Start()
	terminal.WaitOutput(within, "\x1b[K   3"+shown)
	assert.Equal(t, exitUnknown, terminal.Stop().ExitCode())
}
