package ledger_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

// turns are those of orders with this status, the earliest first, as their buyers see them.
func turns(t testing.TB, pool *pgxpool.Pool, events []order.OrderReserved, status order.Status) (all []time.Time) {
	t.Helper()
	for _, e := range events {
		if o := testwork.Order(t, pool, e.OrderID); o.Status == status {
			require.Equal(t, o.ExpiresAt, o.PayFrom.Add(testshop.PaymentWindow))
			all = append(all, o.PayFrom)
		}
	}
	slices.SortFunc(all, time.Time.Compare)
	return all
}

// requireSteps requires that the turns follow each other by step.
func requireSteps(t testing.TB, turns []time.Time, step time.Duration) {
	t.Helper()
	for i := 1; i < len(turns); i++ {
		require.Equal(t, step, turns[i].Sub(turns[i-1]), "turn %d of %d", i+1, len(turns))
	}
}

// crowdOf returns events of n users of the sale, the first one at the place first.
func crowdOf(sale uuid.UUID, first, n int) (events []order.OrderReserved) {
	for i := first; i < first+n; i++ {
		events = append(events, testshop.Reserved(sale, fmt.Sprint("user-", i), int64(i)))
	}
	return events
}

// What moves the clock of deadlines moves the turns ahead, and those that are given out later follow them at the pace.
func TestTurnsMoveWithDeadlines(t *testing.T) {
	t.Parallel()
	for name, move := range map[string]func(t *testing.T, pool *pgxpool.Pool){
		"outage":                func(t *testing.T, pool *pgxpool.Pool) { setHeartbeatBack(t, pool, "1 h") },
		"the clock is set back": func(t *testing.T, pool *pgxpool.Pool) { moveClock(t, pool, -time.Hour) },
		"the clock is set":      func(t *testing.T, pool *pgxpool.Pool) { moveClock(t, pool, time.Hour) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := testkit.Pool(t)
			testwork.Heartbeat(t, pool)
			sale := pacedSale(t, pool, 1)
			crowd := crowdOf(sale, 1, 150)
			l := ledger.New(pool)
			testwork.Record(t, l, crowd[:50])
			before := turns(t, pool, crowd[:50], order.StatusConfirmed)
			move(t, pool)
			testwork.Record(t, l, crowd[50:100]) // by a worker, while there is no ingress
			moved := testwork.Heartbeat(t, pool)
			require.NotZero(t, moved)
			testwork.Record(t, l, crowd[100:])
			after := turns(t, pool, crowd, order.StatusConfirmed)
			if name != "outage" { // the turn is as far ahead as before
				moved = 0
			}
			require.WithinDuration(t, before[0].Add(moved), after[0], 5*time.Second)
			requireSteps(t, after, time.Second)

			// A free turn is on that clock, too: it is not over, and goes to the next order.
			testwork.Cancel(t, l, crowd[120].OrderID, "user-121")
			move(t, pool)
			testwork.Heartbeat(t, pool)
			late := crowdOf(sale, 151, 2)
			testwork.Record(t, l, late)
			requireSteps(t, turns(t, pool, append(crowd, late...), order.StatusConfirmed), time.Second)

			_, log, err := l.History(t.Context(), crowd[0].OrderID)
			require.NoError(t, err)
			for _, event := range log {
				require.NotContains(t, string(event.Data), "pay_from", "it shows no turn that is not in force")
			}
		})
	}
}

// After an outage the turns that are written with the orders are those that are shown, for who reads the tables.
func TestTurnsAreWrittenAsOutageHasMovedThem(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	sale := pacedSale(t, pool, 1)
	testwork.Record(t, ledger.New(pool), crowdOf(sale, 1, 50))
	setHeartbeatBack(t, pool, "1 h")
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- ledger.Heartbeat{Pool: pool, Logger: testkit.Logger(t)}.Run(ctx) }()
	written := func(query string) int64 { return testshop.QueryInt(t, pool, query) }
	testkit.Eventually(t, testshop.Soon, "the turns are moved", func() bool {
		return written("SELECT count(*) FROM orders WHERE pay_from > now() + interval '59 min'") == 50
	})
	stop()
	require.NoError(t, <-stopped)
	require.EqualValues(t, 50, written(`SELECT count(*) FROM orders AS o JOIN sales AS s ON s.id = o.sale_id
		WHERE abs(extract(epoch FROM due + lost_time() - make_interval(secs => payment_window_seconds) - pay_from)) < 1`))
	require.EqualValues(t, 50, written(`SELECT count(*) FROM orders AS o JOIN order_events AS e
		ON (e.sale_id, e.order_id, e.version, e.pay_from) = (o.sale_id, o.id, 2, o.pay_from)`))
}

// The turn of an order that ends before its turn goes to the next one, once.
func TestFreeTurnGoesToNextOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := pacedSale(t, pool, 1)
	crowd := crowdOf(sale, 1, 60)
	testwork.Record(t, l, crowd)
	all := turns(t, pool, crowd, order.StatusConfirmed)
	for range 2 {
		testwork.Cancel(t, l, crowd[40].OrderID, "user-41")
		for _, leaves := range []int{30, 50} {
			_, err := l.Withdraw(t.Context(), crowd[leaves].OrderID, "a mistake", "zoe")
			require.NoError(t, err)
		}
		testwork.Pay(t, l, crowd[59].OrderID, "user-60", "pi_59")
	}
	// A batch that fails takes none.
	failing := crowdOf(sale, 100, 1)
	failing[0].Quantity = 5000
	_, err := l.Record(t.Context(), failing)
	require.ErrorIs(t, err, ledger.ErrOversold)

	// Neither do orders that are refused: user-1 has a live order.
	second := testshop.Reserved(sale, "user-1", 61)
	next := crowdOf(sale, 101, 2)
	outcomes := testwork.Record(t, l, []order.OrderReserved{second, next[0]})
	require.Equal(t, order.StatusRejected, outcomes[0].Status)
	testwork.Record(t, l, next[1:])
	require.ElementsMatch(t, []time.Time{all[30], all[40]}, turns(t, pool, next, order.StatusConfirmed))

	var workers errgroup.Group
	for i := range 6 {
		workers.Go(func() error {
			_, err := ledger.New(pool).Record(t.Context(), crowdOf(sale, 200+i, 1))
			return err
		})
	}
	require.NoError(t, workers.Wait())
	_, err = l.Withdraw(t.Context(), crowd[59].OrderID, "a mistake", "zoe") // another order has its turn by now
	require.NoError(t, err)
	live := turns(t, pool, slices.Concat(crowd, next), order.StatusConfirmed)
	rows, err := pool.Query(t.Context(), "SELECT id FROM orders WHERE user_id LIKE 'user-20_'")
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	require.NoError(t, err)
	require.Len(t, ids, 6)
	for _, id := range ids {
		live = append(live, testwork.Order(t, pool, id).PayFrom)
	}
	slices.SortFunc(live, time.Time.Compare)
	require.Len(t, live, 64)
	requireSteps(t, live, time.Second)
	require.EqualValues(t, 1, testshop.QueryInt(t, pool, "SELECT count(*) FROM pay_turns"), "the latest turn")
}

// Accounts that buy and cancel push nobody's turn out, and leave nothing behind.
func TestBuyersWhoCancelTakeNoTurns(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := pacedSale(t, pool, 1)
	for i := range 30 {
		e := testshop.Reserved(sale, "mallory", int64(i+1))
		testwork.Record(t, l, []order.OrderReserved{e})
		testwork.Cancel(t, l, e.OrderID, "mallory")
	}
	ann := testshop.Reserved(sale, "ann", 31)
	testwork.Record(t, l, []order.OrderReserved{ann})
	const ahead = `SELECT count(*) FROM orders WHERE user_id = 'ann' AND due + lost_time() - interval '10 min' <= now() + interval '1 s'`
	require.EqualValues(t, 1, testshop.QueryInt(t, pool, ahead))
	require.LessOrEqual(t, testshop.QueryInt(t, pool, "SELECT count(*) FROM pay_turns"), int64(2))
}

// A turn that came is used, however soon its buyer pays or leaves.
func TestUsedTurnsKeepThePace(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := pacedSale(t, pool, 1)
	first, second := testshop.Reserved(sale, "ann", 1), testshop.Reserved(sale, "bob", 2)
	testwork.Record(t, l, []order.OrderReserved{first})
	turn := testwork.Order(t, pool, first.OrderID).PayFrom
	testwork.Pay(t, l, first.OrderID, "ann", newReference())
	testwork.Record(t, l, []order.OrderReserved{second})
	require.GreaterOrEqual(t, testwork.Order(t, pool, second.OrderID).PayFrom.Sub(turn), time.Second)
}

// A program of the version before gives out turns, and takes or frees none.
func TestTurnsFollowThoseOfOldPrograms(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	setHeartbeatBack(t, pool, "1 h")
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := pacedSale(t, pool, 1)
	crowd := crowdOf(sale, 1, 60)
	const latest = "(SELECT max(pay_from) + interval '1 s' FROM orders)"
	for i := 0; i < len(crowd); i += 20 {
		testwork.Record(t, l, crowd[i:i+15])
		for _, e := range crowd[i+15 : i+20] {
			testshop.Exec(t, pool, `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at,
				updated_at, due, pay_from) VALUES ($1, $2, $3, 1, 'confirmed', 2, $4, 1, now(), now(),
				pay_clock() + (`+latest+" - now()) + interval '10 min', "+latest+")", e.OrderID, sale, e.UserID, e.Sequence)
		}
	}
	requireSteps(t, turns(t, pool, crowd, order.StatusConfirmed), time.Second)
	require.EqualValues(t, 60, testshop.QueryInt(t, pool, // what an old program shows, and what it continues from
		"SELECT count(*) FROM orders WHERE pay_from = due + lost_time() - interval '10 min'"))
}

// Orders come, end, and are paid, and outages move the clock: at any time the turns that are had and free ones are all
// different, they follow each other by the pace, and each order gets the earliest one.
func TestRandomTurnsKeepThePace(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	rapid.Check(t, func(r *rapid.T) {
		sale := pacedSale(t, pool, 1)
		var live []order.OrderReserved
		made := 0
		for range rapid.IntRange(1, 12).Draw(r, "steps") {
			switch rapid.SampledFrom([]string{"record", "record", "cancel", "cancel", "pay", "outage"}).Draw(r, "step") {
			case "record":
				events := crowdOf(sale, made+1, rapid.IntRange(1, 12).Draw(r, "orders"))
				made += len(events)
				testwork.Record(t, l, events)
				live = append(live, events...)
			case "outage":
				by := rapid.SampledFrom([]time.Duration{-time.Hour, 10 * time.Second, time.Hour}).Draw(r, "by")
				testwork.Heartbeat(t, pool)
				moveClock(r, pool, by)
				testwork.Heartbeat(t, pool)
			case "pay":
				if len(live) > 0 {
					e := live[0]
					testwork.Pay(t, l, e.OrderID, e.UserID, newReference())
					live = live[1:]
				}
			case "cancel":
				if len(live) > 0 {
					i := rapid.IntRange(0, len(live)-1).Draw(r, "order")
					testwork.Cancel(t, l, live[i].OrderID, live[i].UserID)
					live = slices.Delete(live, i, i+1)
				}
			}
		}
		// Of turns that came, those of unpaid orders; of turns ahead, all and the free ones. The clock may have gone back by
		// what passed between two heartbeats.
		const wrong = `SELECT count(*) FROM (
				SELECT turn - lag(turn) OVER one_by_one AS gap, lag(turn) OVER one_by_one > pay_clock() + interval '5 s' AS ahead
				FROM (SELECT due - interval '10 min' AS turn FROM orders WHERE sale_id = $1 AND status = 'confirmed'
					UNION ALL SELECT turn FROM pay_turns WHERE sale_id = $1 AND turn > pay_clock() AND free) AS known
				WINDOW one_by_one AS (ORDER BY turn)
			) AS gaps WHERE gap < interval '1 s' OR ahead AND gap > interval '1 s'`
		require.Zero(r, testshop.QueryInt(t, pool, wrong, sale))
		require.LessOrEqual(r, testshop.QueryInt(t, pool,
			"SELECT count(*) FROM pay_turns WHERE sale_id = $1 AND NOT free", sale), int64(1))
	})
}

// A sale with a pace takes the slower statement, under a lock of its own.
func BenchmarkLedgerWithPace(b *testing.B) {
	pool := testkit.Pool(b)
	l := ledger.New(pool)
	const size = 500
	sale := testshop.NewPayableSale(b, pool, order.MaxStock)
	testshop.Exec(b, pool, "UPDATE sales SET payments_per_second = 100 WHERE id = $1", sale)
	b.ResetTimer()
	for i := range b.N {
		testwork.Record(b, l, crowdOf(sale, i*size+1, size))
	}
	b.ReportMetric(float64(b.N*size)/b.Elapsed().Seconds(), "orders/s")
}
