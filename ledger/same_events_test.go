package ledger

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation/order"
	"stampede/sql"
)

// requireLogEndsAsOrders checks that each order has one row in the log, with the order's status and reason.
func requireLogEndsAsOrders(t *testing.T, pool *pgxpool.Pool, orders int) {
	t.Helper()
	require.EqualValues(t, orders, testshop.QueryInt(t, pool, "SELECT count(*) FROM orders"))
	require.EqualValues(t, orders, testshop.QueryInt(t, pool, "SELECT count(*) FROM order_events"))
	require.EqualValues(t, orders, testshop.QueryInt(t, pool, `SELECT count(*) FROM order_events AS e JOIN orders AS o
		ON o.id = e.order_id AND o.version = e.version AND 'Order' || initcap(o.status) = e.type
		AND o.reason IS NOT DISTINCT FROM e.data ->> 'reason'`))
}

// A transaction has recorded an event and not committed. Another one with the same event waits for it. It repeats the
// outcome after a commit, and decides itself after a rollback.
func TestLedgerWaitsForTransactionWithSameEvent(t *testing.T) {
	t.Parallel()
	refused := order.RejectedSoldOut
	for name, c := range map[string]struct {
		refusal *string
		first   order.Status
	}{
		"confirmed": {nil, order.StatusConfirmed},
		"rejected":  {&refused, order.StatusRejected},
	} {
		for _, commit := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, commit %v", name, commit), func(t *testing.T) {
				t.Parallel()
				pool := testkit.Pool(t)
				sale := testshop.NewSale(t, pool, 10)
				event := testshop.Reserved(sale, "alice", 1)
				columns, _ := ColumnsOf([]order.OrderReserved{event})
				tx, err := pool.Begin(t.Context())
				require.NoError(t, err)
				defer func() { _ = tx.Rollback(context.Background()) }()
				_, err = tx.Exec(t.Context(), sql.LedgerRecordOrders, append(columns.Arguments(), c.refusal)...)
				require.NoError(t, err)
				if c.refusal != nil {
					_, err = tx.Exec(t.Context(), sql.LedgerLogRefusals, sale, []uuid.UUID{event.OrderID})
				} else {
					_, err = tx.Exec(t.Context(), sql.LedgerAddSold, sale, 1, 1, 1)
				}
				require.NoError(t, err)

				var outcomes []Outcome
				var second errgroup.Group
				second.Go(func() (err error) {
					outcomes, err = New(pool).WithLockTimeout(time.Minute).Record(context.Background(), []order.OrderReserved{event})
					return err
				})
				testkit.Eventually(t, testshop.Soon, "the second transaction waits for the first", func() bool {
					return testshop.QueryInt(t, pool, "SELECT count(*) FROM pg_stat_activity WHERE datname = "+
						"current_database() AND wait_event_type = 'Lock'") == 1
				})
				want := Outcome{Event: event, Status: order.StatusConfirmed, Fresh: true}
				if commit {
					require.NoError(t, tx.Commit(t.Context()))
					want = Outcome{Event: event, Status: c.first}
					if c.refusal != nil {
						want.Reason = *c.refusal
					}
				} else {
					require.NoError(t, tx.Rollback(t.Context()))
				}
				require.NoError(t, second.Wait())
				require.Equal(t, []Outcome{want}, outcomes)
				requireLogEndsAsOrders(t, pool, 1)
			})
		}
	}
}

// Workers record the same events of several sales and users in opposite orders. They wait for each other,
// and none may run into a deadlock.
func TestConcurrentLedgersWithSameEventsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	const workers, rounds, size = 4, 15, 60
	sales := []uuid.UUID{
		testshop.NewSale(t, pool, 1_000_000), testshop.NewSale(t, pool, 1_000_000),
		testshop.NewSale(t, pool, 1_000_000),
	}
	var fresh sync.Map
	for round := range rounds {
		shared := make([]order.OrderReserved, size)
		for i := range shared {
			shared[i] = testshop.Reserved(sales[i%len(sales)], fmt.Sprintf("user-%d-%d", round, i/2), int64(i))
		}
		var wg sync.WaitGroup
		for w := range workers {
			mine := slices.Clone(shared)
			// Another order of a user who is also in the shared batch.
			mine = append(mine, testshop.Reserved(sales[w%len(sales)], fmt.Sprintf("user-%d-%d", round, w), 1000))
			if w%2 == 1 {
				slices.Reverse(mine)
			}
			wg.Go(func() {
				outcomes, err := ledger.Record(context.Background(), mine)
				if err != nil {
					t.Errorf("worker %d: %v", w, err)
					return
				}
				for _, out := range outcomes {
					if out.Err != nil {
						t.Errorf("order %s: %v", out.Event.OrderID, out.Err)
					}
					if !out.Fresh {
						continue
					}
					if _, twice := fresh.LoadOrStore(out.Event.OrderID, true); twice {
						t.Errorf("order %s was fresh twice", out.Event.OrderID)
					}
				}
			})
		}
		wg.Wait()
	}
	requireLogEndsAsOrders(t, pool, rounds*(size+workers))
	require.Equal(t, testshop.QueryInt(t, pool, "SELECT sum(sold) FROM sales"),
		testshop.QueryInt(t, pool, "SELECT count(*) FROM orders WHERE status = 'confirmed'"))
}

// Some workers confirm the same events that others refuse, in opposite orders, while the users' other orders end. Each
// order has one outcome, which all of them return, and there is no deadlock.
func TestConcurrentRecordAndRefuseOfSameEvents(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	const rounds, size, workers = 20, 40, 4
	sale := testshop.NewPayableSale(t, pool, 1_000_000)
	for round := range rounds {
		var held, events []order.OrderReserved
		for i := range size {
			user := fmt.Sprintf("user-%d-%d", round, i)
			if i%2 == 0 {
				held = append(held, testshop.Reserved(sale, user, int64(2*i)))
			}
			events = append(events, testshop.Reserved(sale, user, int64(2*i+1)))
		}
		_, err := ledger.Record(t.Context(), held)
		require.NoError(t, err)

		results := make([][]Outcome, workers)
		var all errgroup.Group
		for w := range workers {
			mine := slices.Clone(events)
			if w%2 == 1 {
				slices.Reverse(mine)
			}
			all.Go(func() (err error) {
				if w < workers/2 {
					results[w], err = ledger.Record(context.Background(), mine)
				} else {
					results[w], err = ledger.Refuse(context.Background(), mine, order.RejectedSoldOut)
				}
				return err
			})
		}
		all.Go(func() error {
			for _, e := range held {
				if _, err := ledger.Cancel(context.Background(), e.OrderID, e.UserID); err != nil {
					return err
				}
			}
			return nil
		})
		require.NoError(t, all.Wait())

		type end struct {
			status order.Status
			reason string
		}
		ends, fresh := map[uuid.UUID]end{}, map[uuid.UUID]int{}
		for _, outcomes := range results {
			for _, out := range outcomes {
				require.NoError(t, out.Err)
				is := end{out.Status, out.Reason}
				if before, known := ends[out.Event.OrderID]; known {
					require.Equal(t, before, is, "order %s", out.Event.OrderID)
				}
				ends[out.Event.OrderID] = is
				if out.Fresh {
					fresh[out.Event.OrderID]++
				}
			}
		}
		require.Len(t, fresh, size)
		for id, n := range fresh {
			require.Equal(t, 1, n, "order %s", id)
		}
	}
	_, err := pool.Exec(t.Context(), `DELETE FROM orders WHERE status = 'cancelled';
		DELETE FROM order_events AS e WHERE NOT EXISTS (SELECT FROM orders WHERE id = e.order_id)`)
	require.NoError(t, err)
	requireLogEndsAsOrders(t, pool, rounds*size)
	require.Equal(t, testshop.QueryInt(t, pool, "SELECT sum(sold) FROM sales"),
		testshop.QueryInt(t, pool, "SELECT count(*) FROM orders WHERE status = 'confirmed'"))
}
