//go:build system

package main

import (
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

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
