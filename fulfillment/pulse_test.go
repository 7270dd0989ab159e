package fulfillment

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/testkit"
	"stampede/reservation"
)

// away lets the last pulse be so long ago.
func away(t testing.TB, pool *pgxpool.Pool, ago string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), "UPDATE pulse SET seen_at = now() - $1::interval", ago)
	require.NoError(t, err)
}

const outages = "SELECT count(*) FROM outages"

// outageAfter is how long nobody may be there, as a migrated database has it.
const outageAfter = 5 * time.Second

func TestTheFirstPulseAfterAnOutagePutsDeadlinesOff(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := newPayableSale(t, pool, 10)
	orders := confirm(t, pool, sale, 6)
	final := confirm(t, pool, newSale(t, pool, 10), 1)[0]
	ledger := NewLedger(pool)
	_, err := ledger.Pay(t.Context(), orders[4], "user-5", "pi_5")
	require.NoError(t, err)
	away(t, pool, "60 s")
	// By order: when it was confirmed, and its deadline, from now.
	for i, c := range [][2]string{
		{"-600 s", "-30 s"}, // the deadline came while nobody could pay
		{"-600 s", "30 s"},  // the deadline is still to come
		{"-600 s", "-61 s"}, // it was overdue before
		{"-20 s", "580 s"},  // it was confirmed by a worker while nobody could pay
	} {
		_, err := pool.Exec(t.Context(), "UPDATE orders SET updated_at = now() + $2::interval, due = now() + $3::interval WHERE id = $1", orders[i], c[0], c[1])
		require.NoError(t, err)
	}
	var deadlines []time.Time
	for _, id := range orders {
		deadlines = append(deadlines, orderOfID(t, pool, id).ExpiresAt)
	}

	// Ingresses come back all at once, and one of them sees to it. A buyer's payment keeps it from being done
	// before the others have asked.
	paying, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = paying.Rollback(context.Background()) }()
	_, err = paying.Exec(t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", orders[0])
	require.NoError(t, err)
	const ingresses = 6
	var done, found atomic.Int64
	var all errgroup.Group
	for range ingresses {
		all.Go(func() error {
			defer done.Add(1)
			outage, err := Pulse{Pool: pool, Logger: slog.New(slog.DiscardHandler)}.beat(context.Background())
			if outage > 0 {
				found.Add(1)
			}
			return err
		})
	}
	testkit.Eventually(t, 20*time.Second, "all have asked", func() bool {
		waiting := queryInt(t, pool, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
		return waiting > 0 && waiting+done.Load() == ingresses
	})
	require.NoError(t, paying.Rollback(t.Context()))
	require.NoError(t, all.Wait())
	require.EqualValues(t, 1, found.Load())
	var began, ended time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT began_at, ended_at FROM outages").Scan(&began, &ended))
	outage := ended.Sub(began)
	require.Greater(t, outage, 60*time.Second)
	require.Less(t, outage, 120*time.Second)

	after := func(i int) time.Time { return orderOfID(t, pool, orders[i]).ExpiresAt }
	require.Equal(t, deadlines[0].Add(outage), after(0))
	require.Equal(t, deadlines[1].Add(outage), after(1))
	require.Equal(t, deadlines[2], after(2))
	var confirmed time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT updated_at FROM orders WHERE id = $1", orders[3]).Scan(&confirmed))
	require.Equal(t, deadlines[3].Add(ended.Sub(confirmed)), after(3), "what it lost of its time, and no more")
	require.Zero(t, after(4), "it is paid")
	require.Zero(t, orderOfID(t, pool, final).ExpiresAt)

	_, err = ledger.Pay(t.Context(), orders[0], "user-1", "pi_1")
	require.NoError(t, err)
	_, err = ledger.Pay(t.Context(), orders[2], "user-3", "pi_3")
	require.ErrorIs(t, err, reservation.ErrOrderExpired)
	_, n, err := ledger.expireSome(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, reservation.StatusExpired, orderOfID(t, pool, orders[2]).Status)
}

func TestMissedBeatsAreNoOutage(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	order := confirm(t, pool, newPayableSale(t, pool, 10), 1)[0]
	deadline := orderOfID(t, pool, order).ExpiresAt
	away(t, pool, "4 s")
	outage := beat(t, pool)
	require.Zero(t, outage)
	require.Zero(t, queryInt(t, pool, outages))
	require.Equal(t, deadline, orderOfID(t, pool, order).ExpiresAt)
	require.Less(t, queryInt(t, pool, "SELECT extract(epoch FROM now() - seen_at)::bigint FROM pulse"), int64(2), "it was noted that somebody is here")

	away(t, pool, "6 s")
	outage = beat(t, pool)
	require.Greater(t, outage, 6*time.Second)
}

func TestThePulseDoesNotGoBackWithTheClock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	away(t, pool, "-1 h")
	var before, after time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT seen_at FROM pulse").Scan(&before))
	outage := beat(t, pool)
	require.Zero(t, outage)
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT seen_at FROM pulse").Scan(&after))
	require.Equal(t, before, after)
}

func TestABeatDoesNotWaitForAnother(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	away(t, pool, "60 s")
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }() // or the pool would wait for it
	_, err = tx.Exec(t.Context(), "SELECT FROM pulse FOR UPDATE")
	require.NoError(t, err)
	outage := beat(t, pool)
	require.Zero(t, outage, "who has the row sees to it")
	require.NoError(t, tx.Rollback(t.Context()))
	outage = beat(t, pool)
	require.NotZero(t, outage)
}

// The whole of it: two ingresses and a worker, an order whose deadline comes while Postgres is away, and
// a buyer who pays when it is back.
func TestAnOrderDoesNotExpireWhilePostgresIsAway(t *testing.T) {
	t.Parallel()
	server := testkit.OwnPostgres(t)
	pool, err := connect.Postgres(t.Context(), server.URL, 8)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s := newShop(t, pool)
	sale := s.openPayable(t, 10)
	stop := work(t, s.config(t))
	punctual, unlucky, absent := s.buy(t, sale, "ann"), s.buy(t, sale, "bob"), s.buy(t, sale, "cid")
	s.awaitConfirmed(t, 3)
	beat(t, pool) // since the migration there was nobody

	ctx, cancel := context.WithCancel(context.Background())
	var pulses errgroup.Group
	log := &countingLog{}
	for range 2 {
		own, err := connect.Postgres(t.Context(), server.URL, 2)
		require.NoError(t, err)
		t.Cleanup(own.Close)
		pulses.Go(func() error { return Pulse{Pool: own, Logger: slog.New(log)}.Run(ctx) })
	}
	_, err = pool.Exec(t.Context(), "DELETE FROM outages")
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), "UPDATE orders SET due = now() + interval '4 s' WHERE id IN ($1, $2)", unlucky, absent)
	require.NoError(t, err)
	_, err = NewLedger(pool).Pay(t.Context(), punctual, "ann", "pi_1")
	require.NoError(t, err)

	server.StopImmediate()
	stopped := time.Now()
	testkit.Eventually(t, 20*time.Second, "the deadline and more than missed beats are over", func() bool {
		return time.Since(stopped) > outageAfter+2*time.Second
	})
	s.restart(t, server)
	testkit.Eventually(t, 20*time.Second, "the outage is written down", func() bool { return s.count(t, outages) == 1 })
	_, err = NewLedger(pool).Pay(t.Context(), unlucky, "bob", "pi_2")
	require.NoError(t, err)
	require.Zero(t, s.count(t, expiredOrders))
	left := time.Until(orderOfID(t, pool, absent).ExpiresAt)
	require.Positive(t, left)
	testkit.Eventually(t, 20*time.Second, "who does not pay in what was left expires all the same", func() bool {
		return s.count(t, expiredOrders) == 1
	})
	require.Equal(t, reservation.StatusExpired, orderOfID(t, pool, absent).Status)
	testkit.Eventually(t, 20*time.Second, "its unit is back", func() bool { return s.left(t, sale) == 8 })
	cancel()
	require.NoError(t, pulses.Wait())
	require.EqualValues(t, 1, s.count(t, outages))
	require.Equal(t, 1, log.times("nobody could pay for a while: deadlines are put off"))
	require.Equal(t, 2, log.times("cannot tell Postgres that buyers can pay, trying again"))
	stop()
	require.False(t, s.audit(t, sale).Broken(), textOf(t, s.audit(t, sale)))
}
