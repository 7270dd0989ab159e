//go:build system

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/upkeep/audit"
)

func TestReconcileReportsActionsAndExitsWithOne(t *testing.T) {
	t.Parallel()
	keys, pool := testkit.Keys(t), testkit.Pool(t)
	reconcile := func(flags ...string) (status int, out string) {
		t.Helper()
		process := testkit.Command(t, append([]string{"reconcile", "--yes", "--log-level=error"}, flags...)...)
		process.UseServers(keys)
		process.Start()
		state := process.Wait(within)
		return state.ExitCode(), process.Output()
	}
	status, out := reconcile()
	require.Equal(t, exitOK, status, out)
	require.Equal(t, "no difference between Redis and Postgres\n", out)

	store := reservation.NewStore(testkit.Redis(t), keys, reservation.StoreOptions{Logger: testkit.Logger(t)})
	t.Cleanup(store.Close)
	sale, err := catalog.New(pool, store).Create(t.Context(),
		reservation.Terms{Name: "x", Stock: 10, PerOrderLimit: 1})
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), "UPDATE sales SET sold = 4")
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(),
		"INSERT INTO dead_letters (stream, entry_id, fields, reason, deliveries) VALUES ($1, '1-1', '[]', 'rubbish', 1)",
		keys.Orders(0))
	require.NoError(t, err)

	status, out = reconcile("--dry-run", "--explain")
	require.Equal(t, exitFailed, status, out)
	for _, line := range []string{
		"sale " + sale.ID.String() +
			": sold is 4, the live orders hold 0 units, and the events come to 0 (last event: SaleCreated at revision 1)\n    " +
			"→ recount the units of the sale's live orders\n",
		"waits for a decision: rubbish\n    → for you: run `stampede dlq show`, then replay or discard the dead letter\n",
		"recount      1 found, nothing done: ",
		"dlq          1 found, nothing done: ",
		"2 remain\n",
	} {
		require.Contains(t, out, line)
	}

	status, out = reconcile("--explain", "--output=json")
	require.Equal(t, exitFailed, status, out)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.Len(t, lines, 3)
	var report audit.ReconcileReport
	require.NoError(t, json.Unmarshal([]byte(lines[2]), &report))
	require.EqualValues(t, 1, report.Remaining)
	var sold int64
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT sold FROM sales").Scan(&sold))
	require.Zero(t, sold)

	_, err = pool.Exec(t.Context(), "UPDATE dead_letters SET status = 'discarded'; UPDATE sales SET sold = 4")
	require.NoError(t, err)
	status, out = reconcile("--sale=" + sale.ID.String())
	require.Equal(t, exitOK, status, out)
	require.Contains(t, out, "recount      1 found, 1 mended: ")
	require.Contains(t, out, "0 remain\n")
	status, out = reconcile("--sale=" + uuid.NewString())
	require.Equal(t, exitFailed, status, out)
	require.Contains(t, out, "sale not found")
}
