package ledger

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation/order"
)

// countingTrips returns a pool on the same database, and the counter of its round trips.
func countingTrips(t testing.TB, pool *pgxpool.Pool) (*pgxpool.Pool, *testshop.TripCounter) {
	t.Helper()
	trips := &testshop.TripCounter{}
	config := pool.Config()
	config.ConnConfig.Tracer = trips
	counted, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(counted.Close)
	return counted, trips
}

// A batch of new events is recorded in one step, any other batch in two. Both write the same rows.
func TestLedgerFastPathWritesSameRows(t *testing.T) {
	t.Parallel()
	pool, trips := countingTrips(t, testkit.Pool(t))
	ledger := New(pool)
	plain, timed := testshop.NewSale(t, pool, 100), testshop.NewSale(t, pool, 100)
	_, err := pool.Exec(t.Context(), "UPDATE sales SET payment_window_seconds = 600 WHERE id = $1", timed)
	require.NoError(t, err)
	// Without heartbeats the clock of deadlines stands still.
	_, err = pool.Exec(t.Context(), "UPDATE pulse SET seen_at = now() - interval '1 hour'")
	require.NoError(t, err)
	// batch returns the same events for other users and sequences.
	batch := func(group int64) []order.OrderReserved {
		var events []order.OrderReserved
		for i, sale := range []uuid.UUID{timed, plain, timed, plain} {
			event := testshop.Reserved(sale, fmt.Sprintf("user-%d-%d", group, i), 10*group+int64(i))
			event.Quantity = int64(i) + 1
			if i < 2 {
				event.KeyFingerprint = "0123456789abcdef"
			}
			events = append(events, event)
		}
		return events
	}
	oneStep, twoSteps := batch(1), batch(2)

	earlier := trips.N.Load()
	outcomes, err := ledger.Record(t.Context(), oneStep)
	require.NoError(t, err)
	require.EqualValues(t, 1, trips.N.Load()-earlier, "round trips for new events")
	for i, out := range outcomes {
		require.Equal(t, Outcome{Event: oneStep[i], Status: order.StatusConfirmed, Fresh: true}, out)
	}
	earlier = trips.N.Load()
	outcomes, err = ledger.Record(t.Context(), append([]order.OrderReserved{oneStep[0]}, twoSteps...))
	require.NoError(t, err)
	require.EqualValues(t, 3, trips.N.Load()-earlier, "round trips for new events and a duplicate")
	require.False(t, outcomes[0].Fresh)
	for i, out := range outcomes[1:] {
		require.Equal(t, Outcome{Event: twoSteps[i], Status: order.StatusConfirmed, Fresh: true}, out)
	}

	require.EqualValues(t, 12, testshop.SoldOf(t, pool, plain))
	require.EqualValues(t, 8, testshop.SoldOf(t, pool, timed))
	require.EqualValues(t, 22, testshop.QueryInt(t, pool, "SELECT last_sequence FROM sales WHERE id = $1", timed))
	for i := range oneStep {
		require.JSONEq(t, written(t, pool, oneStep[i]), written(t, pool, twoSteps[i]), "event %d", i)
	}
}

// written returns all rows of an event's order, without its user, sequence and times, which it compares
// with the event.
func written(t testing.TB, pool *pgxpool.Pool, e order.OrderReserved) (rows string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `
		SELECT jsonb_build_object(
			'order', (SELECT to_jsonb(o) - '{id,user_id,sequence,reserved_at,updated_at}'::text[] ||
			                 jsonb_build_object('same', o.user_id = $2 AND o.sequence = $3 AND o.reserved_at = $4 AND
			o.updated_at > now() - interval '1 hour')
			          FROM orders AS o WHERE id = $1),
			'events', (SELECT jsonb_agg(to_jsonb(e) - '{position,order_id,user_id,occurred_at,reserved_at,sequence}'::text[] || jsonb_build_object(
			                  'same', e.user_id = $2 AND e.reserved_at = $4 AND e.occurred_at = o.updated_at AND e.sequence = $3)
			                  ORDER BY e.version)
			           FROM order_events AS e JOIN orders AS o ON o.id = e.order_id WHERE order_id = $1))`,
		e.OrderID, e.UserID, e.Sequence, e.ReservedAt).Scan(&rows))
	require.NotContains(t, rows, "false")
	return rows
}

// If a batch cannot be recorded in one step, that step leaves nothing behind, and only the event that
// prevented it has another outcome.
func TestLedgerFallsBackForBatchThatIsNotFresh(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		odd  func(e *order.OrderReserved)
		want order.Status
	}{
		"an earlier order of the user": {func(e *order.OrderReserved) { e.UserID = "holder" }, order.StatusRejected},
		"an ended epoch":               {func(e *order.OrderReserved) { e.Epoch = 1 }, order.StatusVoided},
		"an unknown sale":              {func(e *order.OrderReserved) { e.SaleID = uuid.Must(uuid.NewV7()) }, ""},
		"two orders of a user":         {func(e *order.OrderReserved) { e.UserID = "user-1" }, order.StatusRejected},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := testkit.Pool(t)
			ledger := New(pool)
			sale := testshop.NewSale(t, pool, 100)
			testshop.RaiseEpoch(t, pool, sale)
			holder := testshop.Reserved(sale, "holder", 1)
			holder.Epoch = 2
			_, err := ledger.Record(t.Context(), []order.OrderReserved{holder})
			require.NoError(t, err)
			events := testshop.CrowdOf(sale, 5)
			for i := range events {
				events[i].Epoch = 2
			}
			c.odd(&events[3])

			outcomes, err := ledger.Record(t.Context(), events)
			require.NoError(t, err)
			for i, out := range outcomes {
				want := order.StatusConfirmed
				if i == 3 {
					want = c.want
				}
				require.Equal(t, want, out.Status, "event %d", i)
				require.Equal(t, want != "", out.Fresh, "event %d", i)
			}
			require.EqualValues(t, 5, testshop.SoldOf(t, pool, sale))
			require.EqualValues(t, 5, testshop.QueryInt(t, pool, "SELECT count(*) FROM orders WHERE status = 'confirmed'"))
			require.Zero(t, testshop.QueryInt(t, pool,
				"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"))
		})
	}
}
