//go:build system

package main

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/upkeep/projection"
)

// A rebuild that is killed at any of these points has changed nothing, and the next one succeeds.
func TestKilledProjectionRebuildChangesNothing(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.ProjectionsWithdrawn, crashpoint.ProjectionsReplaced,
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			pool := testkit.Pool(t)
			texts := func(query string) []string {
				rows, err := pool.Query(t.Context(), query)
				require.NoError(t, err)
				found, err := pgx.CollectRows(rows, pgx.RowTo[string])
				require.NoError(t, err)
				return found
			}
			orders := func() []string { return texts("SELECT row_to_json(o)::text FROM orders AS o ORDER BY id") }
			_, err := pool.Exec(t.Context(), `
				INSERT INTO sales (id, name, stock, sold, last_sequence) VALUES ('00000000-0000-7000-8000-000000000001', 'x', 100,
				100, 100);
				INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
				key_fingerprint)
					SELECT (left(gen_random_uuid()::text, 32) || '0001')::uuid, sales.id, n, 1, 'confirmed', 2, n, 1, now(), now(),
					NULL FROM sales, generate_series(1, 100) AS n;
				INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, sequence,
				epoch) SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, updated_at, reserved_at, sequence, epoch FROM orders`)
			require.NoError(t, err)
			whole := orders()
			_, err = pool.Exec(t.Context(), "DELETE FROM orders WHERE sequence > 50; UPDATE sales SET sold = 50")
			require.NoError(t, err)
			damaged := orders()

			rebuild := func() *testkit.Cmd {
				process := testkit.Command(t, "projections", "rebuild", "--output=json")
				process.Setenv("DATABASE_URL", testkit.DatabaseURL(t))
				return process
			}
			victim := rebuild()
			victim.Setenv(crashpoint.Env, point)
			victim.Start()
			victim.WaitKilled(within)
			require.Equal(t, damaged, orders())
			_, err = pool.Exec(t.Context(),
				"UPDATE orders SET reason = 'x' WHERE sequence = 1; UPDATE orders SET reason = NULL WHERE sequence = 1")
			require.NoError(t, err, "orders can be changed")

			var report projection.Report
			testkit.Eventually(t, within, "Postgres has ended the session of the killed rebuild", func() bool {
				successor := rebuild()
				successor.Start()
				return successor.Wait(within).Success() && json.Unmarshal([]byte(successor.Output()), &report) == nil
			})
			require.EqualValues(t, 100, report.Orders)
			require.EqualValues(t, 50, report.Replaced)
			require.Equal(t, whole, orders())
			require.Equal(t, []string{"100"}, texts("SELECT sold::text FROM sales"))
		})
	}
}
