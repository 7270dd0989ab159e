package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/stream"
)

func TestMain(m *testing.M) { testwork.Main(m) }

func TestLedgerConfirmsOrderWithFieldsOfEvent(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 7)
	event.Quantity = 3

	outcomes, err := l.Record(t.Context(), []order.OrderReserved{event})
	require.NoError(t, err)
	require.Equal(t, []ledger.Outcome{{Event: event, Status: order.StatusConfirmed, Fresh: true}}, outcomes)

	o, err := l.Order(t.Context(), event.OrderID)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), o.UpdatedAt, time.Minute)
	require.Equal(t, order.Order{
		ID: event.OrderID, SaleID: sale, UserID: "alice", Quantity: 3, Kind: order.KindOrder,
		Status: order.StatusConfirmed, Version: 2, ReservedAt: event.ReservedAt, UpdatedAt: o.UpdatedAt,
	}, o)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed"}, testshop.History(t, pool, event.OrderID))
	require.EqualValues(t, 3, testshop.Sold(t, pool, sale))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool,
		`SELECT count(*) FROM order_events WHERE version = 2 AND sequence = 7 AND epoch = 1 AND reserved_at = $1`,
		event.ReservedAt))
}

func TestLedgerRepeatReturnsFirstOutcome(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 10)
	events := []order.OrderReserved{
		testshop.Reserved(sale, "alice", 1), testshop.Reserved(sale, "alice", 2), testshop.Reserved(sale, "bob", 3),
	}
	first, err := l.Record(t.Context(), events)
	require.NoError(t, err)
	require.Equal(t, order.StatusRejected, first[1].Status, "the later order of the same user")
	require.Equal(t, order.RejectedAlreadyPurchased, first[1].Reason)

	again := append(slices.Clone(events), testshop.Reserved(sale, "carol", 4), events[0])
	outcomes, err := l.Record(t.Context(), again)
	require.NoError(t, err)
	for i, out := range outcomes {
		require.NoError(t, out.Err)
		require.Equal(t, i == 3, out.Fresh, "event %d", i)
		if i < 3 {
			require.Equal(t, first[i].Status, out.Status)
			require.Equal(t, first[i].Reason, out.Reason)
		}
	}
	require.EqualValues(t, 3, testshop.Sold(t, pool, sale))
	require.EqualValues(t, 4, testshop.QueryInt(t, pool, "SELECT count(*) FROM order_events"))
}

func TestLedgerRecordsDuplicateInBatchOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 1)
	forged := event
	forged.UserID = "mallory"
	outcomes, err := ledger.New(pool).Record(t.Context(), []order.OrderReserved{event, event, forged})
	require.NoError(t, err)
	require.Equal(t, ledger.Outcome{Event: event, Status: order.StatusConfirmed, Fresh: true}, outcomes[0])
	require.Equal(t, ledger.Outcome{Event: event, Status: order.StatusConfirmed}, outcomes[1])
	require.ErrorIs(t, outcomes[2].Err, ledger.ErrContradiction)
	require.EqualValues(t, 1, testshop.Sold(t, pool, sale))
}

func TestLedgerRecordsOtherEventsOfBatchWithUnknownSale(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 10)
	lost := testshop.Reserved(uuid.Must(uuid.NewV7()), "alice", 1)
	outcomes, err := l.Record(t.Context(), []order.OrderReserved{lost, testshop.Reserved(sale, "alice", 1)})
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[0].Err, ledger.ErrUnknownSale)
	require.Equal(t, order.StatusConfirmed, outcomes[1].Status)
	_, err = l.Order(t.Context(), lost.OrderID)
	require.ErrorIs(t, err, order.ErrNotFound)
	require.Empty(t, testshop.History(t, pool, lost.OrderID))
}

func TestLedgerRejectsContradictingEvent(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 1)
	_, err := l.Record(t.Context(), []order.OrderReserved{event})
	require.NoError(t, err)
	event.Quantity = 5
	outcomes, err := l.Record(t.Context(), []order.OrderReserved{event})
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[0].Err, ledger.ErrContradiction)
	testshop.Exec(t, pool, "DELETE FROM orders")
	outcomes, err = l.Record(t.Context(), []order.OrderReserved{event})
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[0].Err, ledger.ErrContradiction, "events without an order")
}

func TestLedgerNeverExceedsStock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 2)
	_, err := l.Record(t.Context(), testshop.ReservedCrowd(sale, 3))
	require.ErrorIs(t, err, ledger.ErrOversold)
	require.Equal(t, ledger.Oversold, ledger.FaultOf(err))
	require.Zero(t, testshop.QueryInt(t, pool, "SELECT count(*) FROM order_events"), "all or nothing")
	require.Zero(t, testshop.Sold(t, pool, sale))
}

func TestLedgerRejectionKeepsSaleUnchanged(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 2)
	kept, refused := testshop.Reserved(sale, "alice", 1), testshop.Reserved(sale, "bob", 2)
	_, err := l.Record(t.Context(), []order.OrderReserved{kept})
	require.NoError(t, err)
	unknown := testshop.Reserved(uuid.Must(uuid.NewV7()), "carol", 1)

	outcomes, err := l.Refuse(t.Context(), []order.OrderReserved{kept, refused, unknown}, order.RejectedSoldOut)
	require.NoError(t, err)
	require.Equal(t, ledger.Outcome{Event: kept, Status: order.StatusConfirmed}, outcomes[0],
		"the recorded order is unchanged")
	for _, out := range outcomes[1:] {
		require.Equal(t, order.StatusRejected, out.Status)
		require.Equal(t, order.RejectedSoldOut, out.Reason)
		require.True(t, out.Fresh)
	}
	require.Equal(t, []string{"1 OrderReserved", "2 OrderRejected"}, testshop.History(t, pool, refused.OrderID))
	require.EqualValues(t, 1, testshop.Sold(t, pool, sale))
}

func TestConcurrentLedgersNeverExceedStock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	const stock = 40
	sale := testshop.NewSale(t, pool, stock)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 20 {
				_, err := l.Record(
					context.Background(), []order.OrderReserved{testshop.Reserved(sale, fmt.Sprintf("user-%d-%d", w, i), 1)},
				)
				if err != nil && ledger.FaultOf(err) != ledger.Oversold {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, stock, testshop.Sold(t, pool, sale))
	require.EqualValues(t, stock, testshop.QueryInt(t, pool, "SELECT count(*) FROM orders WHERE status = 'confirmed'"))
}

func TestLedgerErrorLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewSale(t, pool, 1)
	for range 20 {
		_, err := ledger.New(pool).Record(t.Context(), testshop.ReservedCrowd(sale, 2))
		require.ErrorIs(t, err, ledger.ErrOversold)
	}
	require.EqualValues(t, 1, pool.Stat().NewConnsCount(), "a failed batch does not close its connection")
	require.Zero(t, testshop.QueryInt(t, pool,
		"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"))
}

// BenchmarkLedger writes batches of 500 orders from one and two connections.
func BenchmarkLedger(b *testing.B) {
	for _, workers := range []int{1, 2} {
		b.Run(fmt.Sprintf("connections=%d", workers), func(b *testing.B) {
			pool := testkit.Pool(b)
			l := ledger.New(pool)
			const size = 500
			sale := testshop.NewSale(b, pool, order.MaxStock)
			var wg sync.WaitGroup
			b.ResetTimer()
			for w := range workers {
				wg.Go(func() {
					for i := w; i < b.N; i += workers {
						events := testshop.ReservedCrowd(sale, size)
						for j := range events {
							events[j].UserID = fmt.Sprintf("user-%d-%d", i, j)
						}
						if _, err := l.Record(context.Background(), events); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N*size)/b.Elapsed().Seconds(), "orders/s")
		})
	}
}

// A batch of new events is recorded in one step, any other batch in two. Both write the same rows.
func TestLedgerFastPathWritesSameRows(t *testing.T) {
	t.Parallel()
	pool, trips := testshop.CountTrips(t, testkit.Pool(t))
	l := ledger.New(pool)
	plain, timed := testshop.NewSale(t, pool, 100), testshop.NewSale(t, pool, 100)
	testshop.Exec(t, pool, "UPDATE sales SET payment_window_seconds = 600 WHERE id = $1", timed)
	// Without heartbeats the clock of deadlines stands still.
	testshop.Exec(t, pool, "UPDATE pulse SET seen_at = now() - interval '1 hour'")
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
	outcomes, err := l.Record(t.Context(), oneStep)
	require.NoError(t, err)
	require.EqualValues(t, 1, trips.N.Load()-earlier, "round trips for new events")
	for i, out := range outcomes {
		require.Equal(t, ledger.Outcome{Event: oneStep[i], Status: order.StatusConfirmed, Fresh: true}, out)
	}
	earlier = trips.N.Load()
	outcomes, err = l.Record(t.Context(), append([]order.OrderReserved{oneStep[0]}, twoSteps...))
	require.NoError(t, err)
	require.EqualValues(t, 3, trips.N.Load()-earlier, "round trips for new events and a duplicate")
	require.False(t, outcomes[0].Fresh)
	for i, out := range outcomes[1:] {
		require.Equal(t, ledger.Outcome{Event: twoSteps[i], Status: order.StatusConfirmed, Fresh: true}, out)
	}

	require.EqualValues(t, 12, testshop.Sold(t, pool, plain))
	require.EqualValues(t, 8, testshop.Sold(t, pool, timed))
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
			l := ledger.New(pool)
			sale := testshop.NewSale(t, pool, 100)
			testshop.RaiseEpoch(t, pool, sale)
			holder := testshop.Reserved(sale, "holder", 1)
			holder.Epoch = 2
			_, err := l.Record(t.Context(), []order.OrderReserved{holder})
			require.NoError(t, err)
			events := testshop.ReservedCrowd(sale, 5)
			for i := range events {
				events[i].Epoch = 2
			}
			c.odd(&events[3])

			outcomes, err := l.Record(t.Context(), events)
			require.NoError(t, err)
			for i, out := range outcomes {
				want := order.StatusConfirmed
				if i == 3 {
					want = c.want
				}
				require.Equal(t, want, out.Status, "event %d", i)
				require.Equal(t, want != "", out.Fresh, "event %d", i)
			}
			require.EqualValues(t, 5, testshop.Sold(t, pool, sale))
			require.EqualValues(t, 5, testshop.QueryInt(t, pool, "SELECT count(*) FROM orders WHERE status = 'confirmed'"))
			require.Zero(t, testshop.QueryInt(t, pool,
				"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"))
		})
	}
}

func TestFaultOf(t *testing.T) {
	t.Parallel()
	state := func(code string) error { return fmt.Errorf("record: %w", &pgconn.PgError{Code: code}) }
	for _, c := range []struct {
		what string
		err  error
		want ledger.Fault
	}{
		{"connection failure", state("08006"), ledger.Transient},
		{"admin shutdown", state("57P01"), ledger.Transient},
		{"starting up", state("57P03"), ledger.Transient},
		{"query cancelled by a time-out", state("57014"), ledger.Transient},
		{"too many connections", state("53300"), ledger.Transient},
		{"disk full", state("53100"), ledger.Transient},
		{"serialization failure", state("40001"), ledger.Transient},
		{"deadlock", state("40P01"), ledger.Transient},
		{"lock not available", state("55P03"), ledger.Transient},
		{"read only", state("25006"), ledger.Transient},
		{"password changed", state("28P01"), ledger.Transient},
		{"no such database", state("3D000"), ledger.Transient},
		{"undefined table: not migrated", state("42P01"), ledger.Transient},
		{"undefined column: another schema", state("42703"), ledger.Transient},
		{"internal error", state("XX000"), ledger.Transient},
		{"data corrupted", state("XX001"), ledger.Transient},
		{"unknown class", state("ZZ999"), ledger.Transient},
		{"connection lost", fmt.Errorf("record: %w", io.ErrUnexpectedEOF), ledger.Transient},
		{"deadline exceeded", context.DeadlineExceeded, ledger.Transient},
		{"anything else", errors.New("unknown"), ledger.Transient},

		{"text too long", state("22001"), ledger.BadData},
		{"number out of range", state("22003"), ledger.BadData},
		{"zero byte in a text", state("22021"), ledger.BadData},
		{"not null", state("23502"), ledger.BadData},
		{"unique", state("23505"), ledger.BadData},
		{"check", state("23514"), ledger.BadData},
		{
			"a row that cannot be read",
			fmt.Errorf("record: %w", pgx.ScanArgError{Err: errors.New("cannot scan -Infinity")}), ledger.BadData,
		},
		{"undecodable", fmt.Errorf("message: %w", order.ErrUndecodable), ledger.BadData},
		{"unknown sale", fmt.Errorf("%w: x", ledger.ErrUnknownSale), ledger.BadData},
		{"contradiction", fmt.Errorf("%w: x", ledger.ErrContradiction), ledger.BadData},
		{"panic", fmt.Errorf("%w: x", ledger.ErrPanicked), ledger.BadData},

		{
			"the check of the stock",
			ledger.TranslateError(&pgconn.PgError{Code: "23514", ConstraintName: "sales_not_oversold"}),
			ledger.Oversold,
		},
		{
			"an ended epoch", ledger.TranslateError(&pgconn.PgError{Code: "23502", TableName: "sales", ColumnName: "epoch"}),
			ledger.Transient,
		},
		{
			"another missing value",
			ledger.TranslateError(&pgconn.PgError{Code: "23502", TableName: "orders", ColumnName: "epoch"}), ledger.BadData,
		},
		{
			"another check", ledger.TranslateError(&pgconn.PgError{Code: "23514", ConstraintName: "orders_quantity_check"}),
			ledger.BadData,
		},
	} {
		require.Equal(t, c.want, ledger.FaultOf(c.err), c.what)
	}
}

func TestErrStoppingWrapsCanceled(t *testing.T) {
	t.Parallel()
	require.ErrorIs(t, stream.ErrStopping, context.Canceled)
}

// In a DEFAULT partition, which operators add to be safe, a row without a sale fails in another way than without one.
func TestDefaultPartitionKeepsNoOrderFromItsDecision(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testshop.Exec(t, pool, "CREATE TABLE events_else PARTITION OF order_events DEFAULT")
	testshop.Exec(t, pool, "CREATE TABLE orders_else PARTITION OF orders DEFAULT")
	sale, rebuilt := testshop.NewSale(t, pool, 10), testshop.NewSale(t, pool, 10)
	testshop.RaiseEpoch(t, pool, rebuilt)
	events := []order.OrderReserved{
		testshop.Reserved(sale, "ann", 1), testshop.Reserved(rebuilt, "bob", 1),
		testshop.Reserved(uuid.Must(uuid.NewV7()), "cid", 1),
	}
	outcomes, err := ledger.New(pool).Record(t.Context(), events)
	require.NoError(t, err)
	require.Equal(t, []order.Status{order.StatusConfirmed, order.StatusVoided},
		[]order.Status{outcomes[0].Status, outcomes[1].Status})
	require.Equal(t, ledger.BadData, ledger.FaultOf(outcomes[2].Err))
	require.ErrorIs(t, outcomes[2].Err, ledger.ErrUnknownSale)
}
