//go:build system

package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

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
