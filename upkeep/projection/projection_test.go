package projection_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/audit"
	"stampede/upkeep/projection"
)

func TestMain(m *testing.M) { testwork.Main(m) }

const (
	allOrders   = "SELECT row_to_json(o)::text FROM orders AS o ORDER BY id"
	allCounters = "SELECT concat_ws(' ', id, sold, last_sequence) FROM sales ORDER BY id"
)

// makeOrders makes orders of every status in two sales, and returns their ids by "user/index of the sale".
func makeOrders(t testing.TB, s *testshop.Shop) (orders map[string]uuid.UUID) {
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
	testwork.Fulfil(t, s)
	_, err := orderLedger.Pay(t.Context(), orders["user-1/0"], "user-1", "pi_1")
	require.NoError(t, err)
	_, err = orderLedger.Cancel(t.Context(), orders["user-2/0"], "user-2")
	require.NoError(t, err)
	testwork.EndWindow(t, s.Pool, orders["user-3/0"])
	require.NoError(t, s.Exec(t, `UPDATE order_events SET due = o.due FROM orders AS o
		WHERE o.id = order_id AND type = 'OrderConfirmed' AND o.id = $1`, orders["user-3/0"]))
	expired := testwork.Expire(t, s)
	require.Equal(t, 1, expired)
	refused := testshop.Reserved(sales[0], "refused", 99)
	_, err = orderLedger.Refuse(t.Context(), []order.OrderReserved{refused}, order.RejectedSoldOut)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, "UPDATE sales SET epoch = 2 WHERE id = $1", sales[1]))
	late := testshop.Reserved(sales[1], "late", 99)
	outcomes, err := orderLedger.Record(t.Context(), []order.OrderReserved{late})
	require.NoError(t, err)
	require.Equal(t, order.StatusVoided, outcomes[0].Status)
	require.Equal(t, []string{"cancelled 1", "confirmed 19", "expired 1", "paid 1", "rejected 1", "voided 1"},
		testshop.Rows(t, s.Pool, "SELECT concat(status, ' ', count(*)) FROM orders GROUP BY status ORDER BY status"))
	return orders
}

func TestProjectionRebuildRestoresEachRow(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	orders := makeOrders(t, s)
	rows, counters := testshop.Rows(t, s.Pool, allOrders), testshop.Rows(t, s.Pool, allCounters)
	report := testwork.RebuildProjections(t, s)
	require.Equal(t, int64(len(rows)), report.Orders)
	require.Zero(t, report.Replaced)
	require.Equal(t, rows, testshop.Rows(t, s.Pool, allOrders))
	require.Equal(t, counters, testshop.Rows(t, s.Pool, allCounters))

	// The log restores any damage of the rows.
	for _, damage := range []string{
		"DELETE FROM orders",
		"UPDATE orders SET pay_from = now()",
		"UPDATE orders SET status = 'expired', version = 9, quantity = 7, user_id = id::text, sequence = 0, epoch = 9, " +
			"reserved_at = now(), updated_at = now()",
		"UPDATE orders SET reason = 'x', due = now(), payment_reference = 'x', key_fingerprint = 'x'",
		"UPDATE sales SET sold = 1, last_sequence = 0",
		"TRUNCATE orders; UPDATE sales SET sold = 0",
		// The live orders of two users are exchanged.
		`UPDATE orders SET status = 'voided' WHERE user_id IN ('user-4', 'user-5');
		UPDATE orders SET user_id = CASE user_id WHEN 'user-4' THEN 'user-5' ELSE 'user-4' END
			WHERE user_id IN ('user-4', 'user-5');
		UPDATE orders SET status = 'confirmed' WHERE user_id IN ('user-4', 'user-5')`,
		// In another month, and of another sale in the same month.
		"INSERT INTO sales (id, name, stock) VALUES ('01700000-0000-7000-8000-000000000000', 'x', 1); UPDATE orders SET " +
			"sale_id = '01700000-0000-7000-8000-000000000000' WHERE user_id = 'user-3' AND status = 'expired'; " +
			"DELETE FROM sales WHERE name = 'x'",
		"UPDATE orders SET sale_id = (SELECT id FROM sales ORDER BY id DESC LIMIT 1) WHERE status = 'expired'",
	} {
		require.NoError(t, s.Exec(t, damage))
		testwork.RebuildProjections(t, s)
		require.Equal(t, rows, testshop.Rows(t, s.Pool, allOrders), damage)
		require.Equal(t, counters, testshop.Rows(t, s.Pool, allCounters), damage)
	}
	o, err := ledger.New(s.Pool).Pay(t.Context(), orders["user-4/0"], "user-4", "pi_4")
	require.NoError(t, err)
	require.Equal(t, order.StatusPaid, o.Status)
}

// Orders may be in DEFAULT partitions, which are no months.
func TestProjectionRebuildReadsDefaultPartitions(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	require.NoError(t, s.Exec(t, `DO $$ DECLARE part text; BEGIN
			FOR part IN SELECT unnest(ARRAY[orders, events]) FROM order_months LOOP EXECUTE 'DROP TABLE ' || part; END LOOP;
		END $$;
		SELECT make_month('01700000-0000-7000-8000-000000000000');
		CREATE TABLE orders_else PARTITION OF orders DEFAULT;
		CREATE TABLE order_events_else PARTITION OF order_events DEFAULT;
		ALTER TABLE sales DISABLE TRIGGER make_month`))
	makeOrders(t, s)
	rows := testshop.Rows(t, s.Pool, allOrders)
	require.EqualValues(t, len(rows), s.Count(t, "SELECT count(*) FROM orders_else"))
	require.NoError(t, s.Exec(t, "DELETE FROM orders"))
	require.Equal(t, int64(len(rows)), testwork.RebuildProjections(t, s).Replaced)
	require.Equal(t, rows, testshop.Rows(t, s.Pool, allOrders))
}

// A damaged log blocks its sale only.
func TestProjectionRebuildRejectsDamagedLog(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	orders := makeOrders(t, s)
	damagedOrder := orders["user-1/0"] // confirmed and paid
	var sale uuid.UUID
	require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT sale_id FROM orders WHERE id = $1", damagedOrder).Scan(&sale))
	rowsOf := func(is string) []string {
		is += " '" + sale.String() + "'"
		return testshop.Rows(t, s.Pool, "SELECT row_to_json(o)::text FROM orders AS o WHERE sale_id "+is+
			" UNION ALL SELECT format('%s %s %s', id, sold, last_sequence) FROM sales WHERE id "+is+" ORDER BY 1")
	}
	before, others := rowsOf("="), rowsOf("<>")
	for _, damage := range []string{
		"DELETE FROM order_events WHERE order_id = $1",
		"UPDATE order_events SET user_id = 'eve' WHERE order_id = $1 AND version = 3",
		"UPDATE order_events SET quantity = quantity + 1 WHERE order_id = $1 AND version = 3",
		"UPDATE order_events SET epoch = NULL WHERE order_id = $1 AND version = 2",
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, data)
			SELECT order_id, n, 'OrderCancelled', sale_id, user_id, quantity, occurred_at, data
			FROM order_events, generate_series(4, 5) AS n WHERE order_id = $1 AND version = 3`,
		// Of two live orders of one user.
		"UPDATE order_events SET user_id = 'user-4' WHERE order_id = $1",
		"UPDATE order_events SET version = 4 WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET version = 4 WHERE order_id = $1 AND version = 3",
		"DELETE FROM order_events WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET type = 'OrderPaid' WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET type = 'OrderMislaid' WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET user_id = 'eve' WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET sale_id = (SELECT id FROM sales ORDER BY id DESC LIMIT 1) WHERE order_id = $1 AND " +
			"version = 2",
		"UPDATE order_events SET quantity = quantity + 1 WHERE order_id = $1 AND version = 2",
		"UPDATE order_events SET sequence = NULL WHERE order_id = $1",
		"UPDATE order_events SET reserved_at = NULL WHERE order_id = $1",
		"UPDATE order_events SET type = 'OrderReserved' WHERE order_id = $1 AND version = 2",
	} {
		t.Run(damage, func(t *testing.T) {
			saved := testshop.Rows(t, s.Pool, "SELECT row_to_json(e)::text FROM order_events AS e ORDER BY position")
			require.NoError(t, s.Exec(t, damage, damagedOrder))
			require.NoError(t, s.Exec(t, "UPDATE orders SET updated_at = now() WHERE user_id = 'user-5'"))
			require.NoError(t, s.Exec(t, "UPDATE sales SET last_sequence = last_sequence + 1 WHERE id = $1", sale))
			wrong := rowsOf("=")
			report, err := projection.Rebuild(t.Context(), s.Pool)
			require.ErrorIs(t, err, projection.ErrDamagedLog)
			require.ErrorContains(t, err, sale.String())
			require.Equal(t, wrong, rowsOf("="))
			if len(report.Damaged) == 1 { // events may have moved to the other sale
				require.Equal(t, others, rowsOf("<>"))
			}
			require.NoError(t, s.Exec(t, `TRUNCATE order_events`))
			require.NoError(t, s.Exec(t,
				`INSERT INTO order_events OVERRIDING SYSTEM VALUE SELECT e.* FROM unnest($1::json[]) AS row,
					json_populate_record(NULL::order_events, row) AS e`, saved))
			testwork.RebuildProjections(t, s)
			require.Equal(t, before, rowsOf("="))
			require.Equal(t, others, rowsOf("<>"))
		})
	}
}

// Orders are confirmed, paid and cancelled during several rebuilds, also with statements prepared before. The rows are
// the same as without a rebuild.
func TestProjectionRebuildDuringRunningSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const rebuilds = 5
	sales := []uuid.UUID{s.OpenPayable(t, 100_000), s.Open(t, 100_000)}
	testwork.Work(t, testwork.Config(t, s))
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
				// Mostly the same user repeatedly.
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
	for range rebuilds {
		at := cancelled.Load()
		report := testwork.RebuildProjections(t, s)
		require.Zero(t, report.Replaced, "no row is wrong at any moment")
		require.Empty(t, report.Recounted)
		testkit.Eventually(t, 30*time.Second, "buyers continue", func() bool { return cancelled.Load() > at+20 })
	}
	stopBuyers()
	require.NoError(t, buyers.Wait())
	testwork.AwaitRest(t, s)
	require.Positive(t, paid.Load())
	rows, counters := testshop.Rows(t, s.Pool, allOrders), testshop.Rows(t, s.Pool, allCounters)
	report := testwork.RebuildProjections(t, s)
	require.Zero(t, report.Replaced)
	require.Equal(t, rows, testshop.Rows(t, s.Pool, allOrders))
	require.Equal(t, counters, testshop.Rows(t, s.Pool, allCounters))
	audited, err := audit.Run(t.Context(), audit.Config{Catalog: s.Catalog, Wait: 30 * time.Second})
	require.NoError(t, err)
	require.False(t, audited.Broken(), testwork.Text(t, audited))
}

func TestConcurrentProjectionRebuilds(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	makeOrders(t, s)
	rows := testshop.Rows(t, s.Pool, allOrders)
	var mu sync.Mutex
	done, refused := 0, 0
	// On a busy machine one may end before the next begins.
	testkit.Eventually(t, 30*time.Second, "a rebuild is refused while another runs", func() bool {
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				_, err := projection.Rebuild(t.Context(), s.Pool)
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
	require.Equal(t, rows, testshop.Rows(t, s.Pool, allOrders))
}

// A rebuild locks the wrong rows only, waits for a transaction that has one of them, and a payment that waits for the
// rebuild finds the row.
func TestProjectionRebuildLocksWrongRowsOnly(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	orders := makeOrders(t, s)
	rows := testshop.Rows(t, s.Pool, allOrders)
	wrong := []uuid.UUID{orders["user-4/0"], orders["user-5/0"]}
	require.NoError(t, s.Exec(t, "UPDATE orders SET sequence = 0 WHERE id = ANY ($1)", wrong))
	holder, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }) // else a failed test waits for its pool
	_, err = holder.Exec(t.Context(),
		"SELECT FROM orders WHERE id = ANY ($1) ORDER BY user_id DESC LIMIT 1 FOR UPDATE", wrong)
	require.NoError(t, err)
	var all errgroup.Group
	all.Go(func() error {
		report, err := projection.Rebuild(t.Context(), s.Pool)
		require.EqualValues(t, 2, report.Replaced)
		return err
	})
	waiting := func(n int) func() bool {
		return func() bool {
			return testshop.TransactionsWaiting(t, s.Pool) >= int64(n)
		}
	}
	testkit.Eventually(t, 30*time.Second, "the rebuild waits for the lock", waiting(1))
	l := ledger.New(s.Pool).WithLockTimeout(time.Minute)
	_, err = l.Pay(t.Context(), orders["user-6/0"], "user-6", "pi_6")
	require.NoError(t, err, "another order can be paid meanwhile")
	_, err = s.Pool.Exec(t.Context(), "SELECT FROM orders WHERE id = ANY ($1)", wrong)
	require.NoError(t, err, "wrong rows can be read")
	all.Go(func() error {
		_, err := l.Pay(t.Context(), wrong[0], "user-4", "pi_4")
		return err
	})
	testkit.Eventually(t, 30*time.Second, "a payment waits for the rebuild, or is done", func() bool {
		return waiting(2)() || s.Count(t, "SELECT count(*) FROM order_events WHERE order_id = $1", wrong[0]) == 2
	})
	require.NoError(t, holder.Commit(t.Context()))
	require.NoError(t, all.Wait())
	require.Len(t, testshop.Rows(t, s.Pool, allOrders), len(rows))
	require.Zero(t, testwork.RebuildProjections(t, s).Replaced)
}
