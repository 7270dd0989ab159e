package projection_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/fulfillment/audit"
	"stampede/fulfillment/ledger"
	"stampede/fulfillment/projection"
	"stampede/internal/pg"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	allOrders   = "SELECT row_to_json(o)::text FROM orders AS o ORDER BY id"
	allCounters = "SELECT concat_ws(' ', id, sold, last_sequence) FROM sales ORDER BY id"
	// leftovers selects what exists only during a rebuild.
	leftovers = `SELECT relname FROM pg_class WHERE relname ~ '^(orders_next|orders_replaced|order_changes)'
		UNION ALL SELECT proname FROM pg_proc WHERE proname = 'note_order_change'
		UNION ALL SELECT tgname FROM pg_trigger WHERE tgrelid = 'orders'::regclass`
)

// makeOrders makes orders of every status in two sales, and returns their ids by "user/index of the sale".
func makeOrders(s *testshop.Shop, t testing.TB) (orders map[string]uuid.UUID) {
	t.Helper()
	orders = map[string]uuid.UUID{}
	sales := []uuid.UUID{s.OpenPayable(t, 50), s.Open(t, 50)}
	orderLedger := ledger.New(s.Pool)
	for n, sale := range sales {
		for i := range 10 {
			user := fmt.Sprintf("user-%d", i)
			answer, err := s.Store.Reserve(t.Context(),
				reservation.Request{Sale: sale, User: user, Quantity: int64(1 + i%3), IdempotencyKey: fmt.Sprintf("key-%d", i)})
			require.NoError(t, err)
			orders[fmt.Sprint(user, "/", n)] = answer.Reservation.OrderID
		}
		s.Buy(t, sale, "without-key")
	}
	testwork.Fulfil(s, t)
	_, err := orderLedger.Pay(t.Context(), orders["user-1/0"], "user-1", "pi_1")
	require.NoError(t, err)
	_, err = orderLedger.Cancel(t.Context(), orders["user-2/0"], "user-2")
	require.NoError(t, err)
	testwork.EndWindow(t, s.Pool, orders["user-3/0"])
	_, err = s.Pool.Exec(t.Context(),
		`UPDATE order_events SET data = order_events.data || jsonb_build_object('due', o.due) FROM orders AS o
		WHERE o.id = order_id AND type = 'OrderConfirmed' AND o.id = $1`, orders["user-3/0"])
	require.NoError(t, err)
	expired, err := testwork.Expire(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, expired)
	refused := testshop.Reserved(sales[0], "refused", 99)
	_, err = orderLedger.Refuse(t.Context(), []order.OrderReserved{refused}, order.RejectedSoldOut)
	require.NoError(t, err)
	_, err = s.Pool.Exec(t.Context(), "UPDATE sales SET epoch = 2 WHERE id = $1", sales[1])
	require.NoError(t, err)
	late := testshop.Reserved(sales[1], "late", 99)
	outcomes, err := orderLedger.Record(t.Context(), []order.OrderReserved{late})
	require.NoError(t, err)
	require.Equal(t, order.StatusVoided, outcomes[0].Status)
	require.Equal(t, []string{"cancelled 1", "confirmed 19", "expired 1", "paid 1", "rejected 1", "voided 1"},
		testshop.RowsOf(t, s.Pool, "SELECT concat(status, ' ', count(*)) FROM orders GROUP BY status ORDER BY status"))
	return orders
}

func TestProjectionRebuildRestoresEachRow(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	orders := makeOrders(s, t)
	rows, counters, shape := testshop.RowsOf(t, s.Pool, allOrders), testshop.RowsOf(t, s.Pool, allCounters),
		testshop.RowsOf(t, s.Pool, sql.ProjectionShape)
	require.Equal(t, int64(len(rows)), testwork.RebuildProjections(s, t).Orders)
	require.Equal(t, rows, testshop.RowsOf(t, s.Pool, allOrders))
	require.Equal(t, counters, testshop.RowsOf(t, s.Pool, allCounters))
	require.Equal(t, shape, testshop.RowsOf(t, s.Pool, sql.ProjectionShape))
	require.Empty(t, testshop.RowsOf(t, s.Pool, leftovers))

	// The log restores any damage of the rows.
	for _, damage := range []string{
		"DELETE FROM orders",
		"UPDATE orders SET status = 'expired', version = 9, quantity = 7, user_id = id::text, sequence = 0, epoch = 9, " +
			"reserved_at = now(), updated_at = now()",
		"UPDATE orders SET reason = 'x', due = now(), payment_reference = 'x', key_fingerprint = 'x'",
		"UPDATE sales SET sold = 1, last_sequence = 0",
		"TRUNCATE orders; UPDATE sales SET sold = 0",
	} {
		_, err := s.Pool.Exec(t.Context(), damage)
		require.NoError(t, err)
		testwork.RebuildProjections(s, t)
		require.Equal(t, rows, testshop.RowsOf(t, s.Pool, allOrders), damage)
		require.Equal(t, counters, testshop.RowsOf(t, s.Pool, allCounters), damage)
	}
	o, err := ledger.New(s.Pool).Pay(t.Context(), orders["user-4/0"], "user-4", "pi_4")
	require.NoError(t, err)
	require.Equal(t, order.StatusPaid, o.Status)
}

func TestProjectionRebuildKeepsTableOptions(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	makeOrders(s, t)
	role := "reader_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	_, err := s.Pool.Exec(t.Context(), `CREATE ROLE `+role+`;
		GRANT SELECT ON orders TO `+role+
		`; GRANT UPDATE (reason) ON orders TO PUBLIC; ALTER DEFAULT PRIVILEGES GRANT DELETE ON TABLES TO PUBLIC;
		COMMENT ON TABLE orders IS 'buyers'' orders'; COMMENT ON COLUMN orders.due IS 'until'; COMMENT ON INDEX orders_due IS `+
		`'next';
		COMMENT ON CONSTRAINT orders_pkey ON orders IS 'key'; COMMENT ON CONSTRAINT orders_quantity_check ON orders IS 'some';
		ALTER TABLE orders SET (fillfactor = 80, autovacuum_enabled = false); ALTER TABLE orders ALTER COLUMN user_id SET `+
		`STATISTICS 500;
		ALTER TABLE orders ALTER COLUMN reason SET DEFAULT 'none'; CREATE INDEX "by Reason" ON orders (lower(reason)) `+
		`WITH (fillfactor = 70) WHERE reason <> ' USING ''';
		CREATE INDEX of_epoch ON orders (epoch); CLUSTER orders USING of_epoch`)
	t.Cleanup(func() {
		_, err := s.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role)
		require.NoError(t, err)
	})
	require.NoError(t, err)
	shape, rows := testshop.RowsOf(t, s.Pool, sql.ProjectionShape), testshop.RowsOf(t, s.Pool, allOrders)
	testwork.RebuildProjections(s, t)
	require.Equal(t, shape, testshop.RowsOf(t, s.Pool, sql.ProjectionShape))
	require.Equal(t, rows, testshop.RowsOf(t, s.Pool, allOrders))
}

func TestProjectionRebuildRejectsUnsupportedObjects(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{
		"view report, which reads it": "CREATE VIEW report AS SELECT count(*) FROM orders",
		"the column note":             "ALTER TABLE orders ADD COLUMN note text",
		"the trigger own_rule": "CREATE TRIGGER own_rule BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION " +
			"suppress_redundant_updates_trigger()",
		"the constraint parts_order_fkey": "CREATE TABLE parts (order_id uuid CONSTRAINT parts_order_fkey REFERENCES " +
			"orders)",
		"the policy own":                           "CREATE POLICY own ON orders USING (user_id = current_user)",
		"the publication all_of_it":                "CREATE PUBLICATION all_of_it FOR TABLE orders",
		"the statistics of_both":                   "CREATE STATISTICS of_both ON status, version FROM orders",
		"the inheritance relation with old_orders": "CREATE TABLE old_orders () INHERITS (orders)",
		"function first(), which needs it": "CREATE FUNCTION first() RETURNS bigint BEGIN ATOMIC SELECT count(*) FROM " +
			"orders; END",
		"the option UNLOGGED":                "ALTER TABLE orders SET UNLOGGED",
		"the constraint once of orders":      "ALTER TABLE orders ADD CONSTRAINT once UNIQUE (id, version)",
		"its row security":                   "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
		"function text(orders), which needs": "CREATE FUNCTION text(orders) RETURNS text LANGUAGE sql AS 'SELECT 1::text'",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t, testkit.Pool(t))
			_, err := s.Pool.Exec(t.Context(), statement)
			require.NoError(t, err)
			_, err = projection.Rebuild(t.Context(), s.Pool, testkit.Logger(t))
			require.ErrorIs(t, err, projection.ErrTableExtended)
			require.ErrorContains(t, err, name)
		})
	}
}

func TestProjectionRebuildRejectsDamagedLog(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	orders := makeOrders(s, t)
	damagedOrder := orders["user-1/0"] // confirmed and paid
	for _, damage := range []string{
		"UPDATE order_events SET version = 4 WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET version = 4 WHERE order_id = $1 AND version = 3",
		"DELETE FROM order_events WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET type = 'OrderPaid' WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET type = 'OrderMislaid' WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET user_id = 'eve' WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET sale_id = gen_random_uuid() WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET quantity = quantity + 1 WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET data = data - 'sequence' WHERE order_id = $1",
		"UPDATE order_events SET reserved_at = NULL WHERE order_id = $1",
		"UPDATE order_events SET type = 'OrderReserved' WHERE order_id = $1 AND version = 2",
	} {
		t.Run(damage, func(t *testing.T) {
			saved := testshop.RowsOf(t, s.Pool, "SELECT row_to_json(e)::text FROM order_events AS e ORDER BY position")
			before := testshop.RowsOf(t, s.Pool, allOrders)
			_, err := s.Pool.Exec(t.Context(), damage, damagedOrder)
			require.NoError(t, err)
			_, err = projection.Rebuild(t.Context(), s.Pool, testkit.Logger(t))
			require.ErrorIs(t, err, projection.ErrDamagedLog)
			require.ErrorContains(t, err, damagedOrder.String())
			require.Equal(t, before, testshop.RowsOf(t, s.Pool, allOrders))
			require.Empty(t, testshop.RowsOf(t, s.Pool, leftovers))
			_, err = s.Pool.Exec(t.Context(), `TRUNCATE order_events`)
			require.NoError(t, err)
			_, err = s.Pool.Exec(t.Context(),
				`INSERT INTO order_events OVERRIDING SYSTEM VALUE SELECT e.* FROM unnest($1::json[]) AS row,
					json_populate_record(NULL::order_events, row) AS e`, saved)
			require.NoError(t, err)
		})
	}
	testwork.RebuildProjections(s, t)
}

// Orders are confirmed, paid and cancelled during several rebuilds, also with statements prepared before. The rows are
// the same as without a rebuild.
func TestProjectionRebuildDuringRunningSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	const rebuilds = 5
	sales := []uuid.UUID{s.OpenPayable(t, 100_000), s.Open(t, 100_000)}
	testwork.Work(t, testwork.Config(s, t))
	orderLedger := ledger.New(s.Pool)
	ctx, stopBuyers := context.WithCancel(t.Context())
	defer stopBuyers()
	var cancelled, paid atomic.Int64
	var buyers errgroup.Group
	buy := func(sale uuid.UUID, user string, n int) (reservation.Answer, error) {
		return s.Store.Reserve(t.Context(), reservation.Request{
			Sale: sale, User: user, Quantity: 2,
			IdempotencyKey: fmt.Sprint(n),
		})
	}
	for b := range 4 {
		buyers.Go(func() error {
			for n := 0; ctx.Err() == nil; n++ {
				// Mostly the same user repeatedly: the new table must never hold two live orders of one user.
				user, finish, finished := fmt.Sprintf("buyer-%d", b), orderLedger.Cancel, &cancelled
				if n%10 == 9 {
					user, finished = fmt.Sprintf("payer-%d-%d", b, n), &paid
					finish = func(ctx context.Context, id uuid.UUID, user string) (order.Order, error) {
						return orderLedger.Pay(ctx, id, user, "pi_"+user)
					}
				}
				answer, err := buy(sales[0], user, n)
				if err != nil {
					return err
				}
				if _, err := buy(sales[1], fmt.Sprintf("other-%d-%d", b, n), n); err != nil {
					return err
				}
				if answer.Verdict != reservation.Reserved {
					continue // no worker has published the cancellation to Redis yet
				}
				for ctx.Err() == nil {
					_, err := finish(t.Context(), answer.Reservation.OrderID, user)
					if err == nil {
						finished.Add(1)
						break
					} else if !errors.Is(err, order.ErrNotFound) {
						return err
					}
				}
			}
			return nil
		})
	}
	var changes int64
	for range rebuilds {
		at := cancelled.Load()
		report := testwork.RebuildProjections(s, t)
		changes += report.Changes
		require.Empty(t, report.Recounted)
		require.Empty(t, testshop.RowsOf(t, s.Pool, leftovers))
		testkit.Eventually(t, 30*time.Second, "buyers continue", func() bool { return cancelled.Load() > at+20 })
	}
	stopBuyers()
	require.NoError(t, buyers.Wait())
	testwork.AwaitRest(s, t)
	require.Positive(t, changes, "orders must change during the rebuilds")
	require.Positive(t, paid.Load())
	rows, counters := testshop.RowsOf(t, s.Pool, allOrders), testshop.RowsOf(t, s.Pool, allCounters)
	report := testwork.RebuildProjections(s, t)
	require.Zero(t, report.Changes)
	require.Equal(t, rows, testshop.RowsOf(t, s.Pool, allOrders))
	require.Equal(t, counters, testshop.RowsOf(t, s.Pool, allCounters))
	audited, err := audit.Run(t.Context(), audit.Config{Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Wait: 30 * time.Second})
	require.NoError(t, err)
	require.False(t, audited.Broken(), testwork.TextOf(t, audited))
}

func TestConcurrentProjectionRebuilds(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	makeOrders(s, t)
	rows := testshop.RowsOf(t, s.Pool, allOrders)
	var mu sync.Mutex
	done, refused := 0, 0
	// On a busy machine one may end before the next begins.
	testkit.Eventually(t, 30*time.Second, "a rebuild is refused while another runs", func() bool {
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				_, err := projection.Rebuild(t.Context(), s.Pool, testkit.Logger(t))
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					done++
				} else {
					require.ErrorIs(t, err, projection.ErrRunning)
					refused++
				}
			})
		}
		all.Wait()
		return refused > 0
	})
	require.Positive(t, done)
	require.Equal(t, rows, testshop.RowsOf(t, s.Pool, allOrders))
	require.Empty(t, testshop.RowsOf(t, s.Pool, leftovers))
}

// A rebuild waits for a transaction that locks orders, and other statements run meanwhile.
func TestWaitingProjectionRebuildBlocksNoStatement(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	makeOrders(s, t)
	holder, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "LOCK TABLE orders IN ROW EXCLUSIVE MODE")
	require.NoError(t, err)
	t.Cleanup(func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }) // else a failed test waits for its pool
	ctx, cancel := context.WithCancel(t.Context())
	var rebuild errgroup.Group
	rebuild.Go(func() error {
		_, err := projection.Rebuild(ctx, s.Pool, testkit.Logger(t))
		return err
	})
	waiting := func() bool {
		return len(testshop.RowsOf(t, s.Pool, "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND "+
			"datname = current_database()")) > 0
	}
	testkit.Eventually(t, 30*time.Second, "the rebuild waits for the lock", waiting)
	_, err = s.Pool.Exec(t.Context(), "UPDATE orders SET reason = reason") // waits behind the rebuild
	require.NoError(t, err)
	cancel()
	require.ErrorIs(t, rebuild.Wait(), context.Canceled)
	require.NoError(t, holder.Rollback(t.Context()))
	testkit.Eventually(t, 30*time.Second, "the server has ended the cancelled session", func() bool {
		_, err := projection.Rebuild(t.Context(), s.Pool, testkit.Logger(t))
		require.True(t, err == nil || errors.Is(err, projection.ErrRunning), "%v", err)
		return err == nil
	})
}

// The trigger of a killed rebuild records nothing.
func TestCrashedProjectionRebuildStopsRecordingChanges(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	makeOrders(s, t)
	conn, err := s.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Conn().PgConn().Exec(t.Context(), "BEGIN;"+sql.ProjectionBegin+sql.ProjectionWatch+"COMMIT").ReadAll()
	require.NoError(t, err)
	recorded := func() int64 {
		_, err := s.Pool.Exec(t.Context(), "UPDATE orders SET reason = 'x' WHERE status = 'rejected'")
		require.NoError(t, err)
		return s.Count(t, "SELECT count(*) FROM order_changes")
	}
	require.Zero(t, recorded())
	err = pg.Session{Conn: conn.Conn()}.Lock(t.Context(), pg.ProjectionAliveLock)
	require.NoError(t, err)
	require.EqualValues(t, 1, recorded(), "the trigger of a running rebuild records")
	_, err = conn.Exec(t.Context(), "SELECT pg_advisory_unlock_all()")
	require.NoError(t, err)
	require.EqualValues(t, 1, recorded())
	testwork.RebuildProjections(s, t)
	require.Empty(t, testshop.RowsOf(t, s.Pool, leftovers))
}

// A snapshot that waits for a swap sees the complete new table.
func TestProjectionSnapshotIsTakenAfterSwap(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	makeOrders(s, t)
	want := s.Count(t, "SELECT count(*) FROM orders")
	swap, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = swap.Rollback(context.WithoutCancel(t.Context())) })
	_, err = swap.Exec(t.Context(), "LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	var snapshot errgroup.Group
	var seen int64
	snapshot.Go(func() error {
		return pg.InSnapshot(t.Context(), s.Pool, func(tx pgx.Tx) error {
			return tx.QueryRow(t.Context(), "SELECT count(*) FROM orders").Scan(&seen)
		})
	})
	testkit.Eventually(t, 30*time.Second, "the snapshot waits for the lock", func() bool {
		return len(testshop.RowsOf(t, s.Pool, "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND "+
			"datname = current_database()")) > 0
	})
	_, err = swap.Exec(t.Context(), "CREATE TABLE orders_2 AS SELECT * FROM orders")
	require.NoError(t, err)
	_, err = swap.Exec(t.Context(), "ALTER TABLE orders RENAME TO orders_1")
	require.NoError(t, err)
	_, err = swap.Exec(t.Context(), "ALTER TABLE orders_2 RENAME TO orders")
	require.NoError(t, err)
	require.NoError(t, swap.Commit(t.Context()))
	require.NoError(t, snapshot.Wait())
	require.Equal(t, want, seen)
}
