package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/sql"
)

// gathering is longer than payments are gathered.
const gathering = 30 * time.Millisecond

// races is the number of orders that two sides change at the same time.
const races = 1000

// racedSale is a sale whose units are all sold and not yet paid.
type racedSale struct {
	*testshop.Shop
	sale   uuid.UUID
	ledger *ledger.Ledger
	orders []order.Order
}

func newRacedSale(t *testing.T) *racedSale {
	t.Helper()
	s := testshop.NewShop(t)
	r := &racedSale{Shop: s, sale: s.OpenPayable(t, races), ledger: ledger.New(s.Pool)}
	require.Equal(t, races, s.Crowd(t, r.sale, races))
	for _, out := range testwork.Fulfil(t, s) {
		r.orders = append(r.orders, testwork.Order(t, s.Pool, out.Event.OrderID))
	}
	require.Len(t, r.orders, races)
	testwork.Heartbeat(t, s.Pool)
	return r
}

// each runs race once for every order, a few at a time.
func (r *racedSale) each(t *testing.T, race func(o order.Order) error) {
	t.Helper()
	var running errgroup.Group
	running.SetLimit(3)
	for _, o := range r.orders {
		running.Go(func() error {
			if err := race(o); err != nil {
				return fmt.Errorf("order %s: %w", o.ID, err)
			}
			return nil
		})
	}
	require.NoError(t, running.Wait())
}

// linger delays a side by a random number of round trips, so that either may win.
func (r *racedSale) linger(most int) error {
	for range rand.IntN(most + 1) {
		if err := r.Pool.Ping(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

// requireOneWinner checks that each order has one winner, which the audit and Redis agree with. won holds
// the status that the sides received for each order.
func (r *racedSale) requireOneWinner(t *testing.T, won *sync.Map, loser order.Status) {
	t.Helper()
	paid := 0
	for _, o := range r.orders {
		now := testwork.Order(t, r.Pool, o.ID)
		status, ok := won.Load(o.ID)
		require.True(t, ok)
		require.Equal(t, status, now.Status, "order %s", o.ID)
		require.Equal(t, 3, now.Version)
		if now.Status == order.StatusPaid {
			require.Equal(t, "pi "+o.UserID, now.PaymentReference)
			paid++
		} else {
			require.Equal(t, loser, now.Status)
		}
	}
	t.Logf("%d paid, %d %s", paid, races-paid, loser)
	require.Greater(t, paid, races/50, "both sides must win some of the races")
	require.Less(t, paid, races-races/50, "both sides must win some of the races")
	require.Zero(t, r.Count(t, testshop.BrokenLogs))
	require.EqualValues(t, 2*races, r.Count(t, "SELECT count(*) FROM order_events"))
	require.EqualValues(t, paid, testshop.Sold(t, r.Pool, r.sale))
	require.EqualValues(t, races-paid, r.Count(t, testshop.PendingReleases))
	testwork.RequireUnbroken(t, r.Shop, r.sale)
	testwork.ReleaseUnits(t, r.Shop)
	require.EqualValues(t, races-paid, r.Left(t, r.sale))
	testwork.RequireUnbroken(t, r.Shop, r.sale)
}

func (r *racedSale) pay(o order.Order) (order.Order, error) {
	return r.ledger.Pay(context.Background(), o.ID, o.UserID, "pi "+o.UserID)
}

func TestConcurrentPayAndCancelHaveOneWinner(t *testing.T) {
	t.Parallel()
	r := newRacedSale(t)
	var won sync.Map
	r.each(t, func(o order.Order) error {
		var sides errgroup.Group
		for range 2 { // a double click
			sides.Go(func() error {
				if err := r.linger(2); err != nil {
					return err
				}
				return noteWinner(&won, o, order.StatusPaid, func() (order.Order, error) { return r.pay(o) })
			})
			sides.Go(func() error {
				<-time.After(rand.N(2 * gathering)) // payments that come often are gathered before they are decided
				return noteWinner(&won, o, order.StatusCancelled, func() (order.Order, error) {
					return r.ledger.Cancel(context.Background(), o.ID, o.UserID)
				})
			})
		}
		return sides.Wait()
	})
	r.requireOneWinner(t, &won, order.StatusCancelled)
}

// noteWinner records the order's status if this side won. It returns an error if the other side won as
// well.
func noteWinner(won *sync.Map, o order.Order, as order.Status, act func() (order.Order, error)) error {
	got, err := act()
	switch {
	case errors.Is(err, order.ErrIllegalTransition), errors.Is(err, order.ErrExpired):
		return nil
	case err != nil:
		return err
	case got.Status != as:
		return fmt.Errorf("is %s, want %s", got.Status, as)
	}
	if other, loaded := won.LoadOrStore(o.ID, as); loaded && other != as {
		return fmt.Errorf("is %s and %s", other, as)
	}
	return nil
}

// The deadline of each order passes while its buyer pays and sweepers look for overdue orders.
func TestConcurrentPayAndExpiryHaveOneWinner(t *testing.T) {
	t.Parallel()
	r := newRacedSale(t)
	ingress := ledger.Heartbeat{Pool: r.Pool, Logger: testkit.Logger(t)}
	var won sync.Map
	r.each(t, func(o order.Order) error {
		if err := testwork.MoveDue(context.Background(), r.Pool, "pay_clock()", o.ID); err != nil {
			return err
		}
		var sides errgroup.Group
		for range 2 {
			sides.Go(func() error {
				if err := r.linger(8); err != nil {
					return err
				}
				return noteWinner(&won, o, order.StatusPaid, func() (order.Order, error) { return r.pay(o) })
			})
		}
		sides.Go(func() error {
			<-time.After(rand.N(4 * gathering)) // a sweep takes the orders of the other races, too
			if _, err := ingress.Send(context.Background()); err != nil {
				return err
			}
			_, err := testwork.TryExpire(context.Background(), r.Shop)
			return err
		})
		return sides.Wait()
	})
	// Orders that a late payment had locked during the sweep.
	testwork.Expire(t, r.Shop)
	for _, o := range r.orders {
		won.LoadOrStore(o.ID, order.StatusExpired)
	}
	r.requireOneWinner(t, &won, order.StatusExpired)
}

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
				columns, _ := ledger.ColumnsOf([]order.OrderReserved{event})
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

				var outcomes []ledger.Outcome
				var second errgroup.Group
				second.Go(func() (err error) {
					l := ledger.New(pool).WithLockTimeout(time.Minute)
					outcomes, err = l.Record(context.Background(), []order.OrderReserved{event})
					return err
				})
				testshop.AwaitWaiting(t, pool, 1)
				want := ledger.Outcome{Event: event, Status: order.StatusConfirmed, Fresh: true}
				if commit {
					require.NoError(t, tx.Commit(t.Context()))
					want = ledger.Outcome{Event: event, Status: c.first}
					if c.refusal != nil {
						want.Reason = *c.refusal
					}
				} else {
					require.NoError(t, tx.Rollback(t.Context()))
				}
				require.NoError(t, second.Wait())
				require.Equal(t, []ledger.Outcome{want}, outcomes)
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
	l := ledger.New(pool)
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
				outcomes, err := l.Record(context.Background(), mine)
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
	l := ledger.New(pool)
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
		testwork.Record(t, l, held)

		results := make([][]ledger.Outcome, workers)
		var all errgroup.Group
		for w := range workers {
			mine := slices.Clone(events)
			if w%2 == 1 {
				slices.Reverse(mine)
			}
			all.Go(func() (err error) {
				if w < workers/2 {
					results[w], err = l.Record(context.Background(), mine)
				} else {
					results[w], err = l.Refuse(context.Background(), mine, order.RejectedSoldOut)
				}
				return err
			})
		}
		all.Go(func() error {
			for _, e := range held {
				if _, err := l.Cancel(context.Background(), e.OrderID, e.UserID); err != nil {
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
	testshop.Exec(t, pool, `DELETE FROM orders WHERE status = 'cancelled';
		DELETE FROM order_events AS e WHERE NOT EXISTS (SELECT FROM orders WHERE id = e.order_id)`)
	requireLogEndsAsOrders(t, pool, rounds*size)
	require.Equal(t, testshop.QueryInt(t, pool, "SELECT sum(sold) FROM sales"),
		testshop.QueryInt(t, pool, "SELECT count(*) FROM orders WHERE status = 'confirmed'"))
}
