//go:build system

package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

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
