package ledger_test

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
	"pgregory.net/rapid"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

// setHeartbeatBack sets the last heartbeat back by ago.
func setHeartbeatBack(t testing.TB, pool *pgxpool.Pool, ago string) {
	t.Helper()
	testshop.Exec(t, pool, "UPDATE pulse SET seen_at = now() - $1::interval", ago)
}

const outages = "SELECT count(*) FROM outages"

// outageAfter is how long heartbeats may be missing before that is an outage, as a migrated database has
// it.
const outageAfter = 5 * time.Second

// expiresIn sets the deadline of an order, relative to now.
func expiresIn(t testing.TB, pool *pgxpool.Pool, id uuid.UUID, fromNow string) {
	t.Helper()
	require.NoError(t, testwork.MoveDue(t.Context(), pool, "now() - lost_time() + interval '"+fromNow+"'", id))
}

// lastOutage returns the outage that ended last.
func lastOutage(t testing.TB, pool *pgxpool.Pool) (began, ended time.Time) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT began_at, ended_at FROM outages ORDER BY ended_at DESC LIMIT 1").Scan(&began, &ended))
	return began.UTC(), ended.UTC()
}

func TestFirstHeartbeatAfterOutageExtendsDeadlines(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	orders := testwork.Confirm(t, pool, sale, 5)
	final := testwork.Confirm(t, pool, testshop.NewSale(t, pool, 10), 1)[0]
	l := ledger.New(pool)
	testwork.Pay(t, l, orders[3], "user-4", "pi_4")
	setHeartbeatBack(t, pool, "60 s")
	// The deadline of each order, from now.
	for i, fromNow := range []string{
		"-30 s", // the deadline passed during the outage
		"30 s",  // the deadline has not passed
		"-90 s", // it was overdue before the outage
	} {
		expiresIn(t, pool, orders[i], fromNow)
	}
	before := testshop.QueryInt(t, pool, outages)
	var deadlines []time.Time
	for _, id := range orders {
		deadlines = append(deadlines, testwork.Order(t, pool, id).ExpiresAt)
	}

	// All ingresses come back at the same time. One of them records the outage, and the others send their
	// heartbeats before it commits.
	hold, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = hold.Rollback(context.Background()) }()
	testshop.Exec(t, pool,
		`CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW;
			END $$;
		CREATE TRIGGER wait BEFORE INSERT ON outages FOR EACH ROW EXECUTE FUNCTION wait()`)
	_, err = hold.Exec(t.Context(), "SELECT pg_advisory_xact_lock(1)")
	require.NoError(t, err)
	const ingresses = 6
	var done, found atomic.Int64
	var all errgroup.Group
	for range ingresses {
		all.Go(func() error {
			defer done.Add(1)
			outage, err := ledger.Heartbeat{Pool: pool, Logger: slog.New(slog.DiscardHandler)}.Send(context.Background())
			if outage > 0 {
				found.Add(1)
			}
			return err
		})
	}
	testkit.Eventually(t, 20*time.Second, "one ingress records the outage, and the others do not wait", func() bool {
		return done.Load() == ingresses-1 &&
			testshop.TransactionsWaiting(t, pool) == 1
	})
	require.NoError(t, hold.Rollback(t.Context()))
	require.NoError(t, all.Wait())
	require.EqualValues(t, 1, found.Load())
	require.Equal(t, before+1, testshop.QueryInt(t, pool, outages))
	began, ended := lastOutage(t, pool)
	outage := ended.Sub(began)
	require.Greater(t, outage, 60*time.Second)
	require.Less(t, outage, 120*time.Second)

	after := func(i int) time.Time { return testwork.Order(t, pool, orders[i]).ExpiresAt }
	for _, i := range []int{0, 1, 2, 4} {
		require.Equal(t, deadlines[i].Add(outage), after(i))
	}
	shown, log, err := l.History(t.Context(), orders[1])
	require.NoError(t, err)
	require.Equal(t, after(1), shown.ExpiresAt)
	for _, event := range log {
		require.NotContains(t, string(event.Data), "due", "it shows no deadline that is not in force")
	}
	require.Zero(t, after(3), "a paid order has no deadline")
	require.Zero(t, testwork.Order(t, pool, final).ExpiresAt)

	testwork.Pay(t, l, orders[0], "user-1", "pi_1")
	_, err = l.Pay(t.Context(), orders[2], "user-3", "pi_3")
	require.ErrorIs(t, err, order.ErrExpired)
	_, n, err := ledger.NewExpirer(l, testkit.Logger(t)).ExpireSome(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, order.StatusExpired, testwork.Order(t, pool, orders[2]).Status)
}

func TestMissedHeartbeatsAreNoOutage(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	id := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
	deadline := testwork.Order(t, pool, id).ExpiresAt
	before := testshop.QueryInt(t, pool, outages)
	setHeartbeatBack(t, pool, "3 s")
	require.Zero(t, testwork.Heartbeat(t, pool))
	require.Equal(t, before, testshop.QueryInt(t, pool, outages))
	require.Equal(t, deadline, testwork.Order(t, pool, id).ExpiresAt)
	require.Less(t, testshop.QueryInt(t, pool, "SELECT extract(epoch FROM now() - seen_at)::bigint FROM pulse"), int64(3),
		"the heartbeat was recorded")

	setHeartbeatBack(t, pool, "6 s")
	outage := testwork.Heartbeat(t, pool)
	require.Greater(t, outage, 6*time.Second)
	require.WithinDuration(t, deadline.Add(outage), testwork.Order(t, pool, id).ExpiresAt, time.Millisecond)
}

// An outage is recorded in one row, so locked orders neither prevent nor repeat that.
func TestOutageIsRecordedOnceWhileOrdersAreLocked(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	orders := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 3)
	deadline := testwork.Order(t, pool, orders[0]).ExpiresAt
	before := testshop.QueryInt(t, pool, outages)
	setHeartbeatBack(t, pool, "60 s")
	paying, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = paying.Rollback(context.Background()) }()
	_, err = paying.Exec(t.Context(), "SELECT FROM orders FOR UPDATE")
	require.NoError(t, err)
	began := time.Now()
	outage := testwork.Heartbeat(t, pool)
	require.Greater(t, outage, 60*time.Second)
	testkit.Eventually(t, 30*time.Second, "the orders are locked for longer than outageAfter", func() bool {
		require.Zero(t, testwork.Heartbeat(t, pool))
		return time.Since(began) > outageAfter+time.Second
	})
	require.NoError(t, paying.Rollback(t.Context()))
	require.Zero(t, testwork.Heartbeat(t, pool))
	require.Equal(t, before+1, testshop.QueryInt(t, pool, outages))
	require.WithinDuration(t, deadline.Add(outage), testwork.Order(t, pool, orders[0]).ExpiresAt, time.Millisecond)
}

// Recording an outage changes no order, however many there are.
func TestOutageWritesNoOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	sale := testshop.NewPayableSale(t, pool, 1_000_000)
	const n = 200_000
	testshop.Exec(t, pool,
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, due)
		SELECT gen_random_uuid(), $1, 'user-' || n, 1, 'confirmed', 2, n, 1, now(), now(), (SELECT pay_clock()) +
		make_interval(secs => n)
		FROM generate_series(1, $2) AS n`, sale, n)
	const versions = "SELECT md5(string_agg(ctid::text || xmin::text || xmax::text, ' ' ORDER BY id)) FROM orders"
	const deadlines = "SELECT sum(extract(epoch FROM due + (SELECT lost_time())))::bigint FROM orders"
	var before, after string
	require.NoError(t, pool.QueryRow(t.Context(), versions).Scan(&before))
	first := testshop.QueryInt(t, pool, deadlines)
	setHeartbeatBack(t, pool, "1 h")
	outage := testwork.Heartbeat(t, pool)
	require.Greater(t, outage, time.Hour)
	require.NoError(t, pool.QueryRow(t.Context(), versions).Scan(&after))
	require.Equal(t, before, after)
	require.InDelta(t, outage.Seconds(), float64(testshop.QueryInt(t, pool, deadlines)-first)/n, 0.001,
		"all deadlines are postponed")
	require.Zero(t,
		testshop.QueryInt(t, pool,
			"SELECT count(*) FROM orders WHERE due <= (SELECT least(seen_at, now()) - lost FROM pulse)"))
}

// A worker continues while there is no ingress. An order that it confirms then can be paid only after the
// outage.
func TestOrderConfirmedDuringOutageGetsWholeWindow(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	setHeartbeatBack(t, pool, "60 s")
	id := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
	testwork.Heartbeat(t, pool)
	_, ended := lastOutage(t, pool)
	require.Equal(t, ended.Add(testshop.PaymentWindow), testwork.Order(t, pool, id).ExpiresAt)
}

func TestConsecutiveOutagesAddUp(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	orders := testwork.Confirm(t, pool, sale, 3)
	expiresIn(t, pool, orders[1], "45 s")
	deadlines := []time.Time{
		testwork.Order(t, pool, orders[0]).ExpiresAt,
		testwork.Order(t, pool, orders[1]).ExpiresAt,
	}
	expiresIn(t, pool, orders[2], "-3 h")
	var lost time.Duration
	for _, ago := range []string{"30 s", "2 h", "40 s"} {
		setHeartbeatBack(t, pool, ago)
		outage := testwork.Heartbeat(t, pool)
		require.NotZero(t, outage)
		lost += outage
		for i, deadline := range deadlines {
			require.WithinDuration(t, deadline.Add(lost), testwork.Order(t, pool, orders[i]).ExpiresAt, time.Millisecond)
		}
	}
	l := ledger.New(pool)
	_, n, err := ledger.NewExpirer(l, testkit.Logger(t)).ExpireSome(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(
		t, order.StatusExpired, testwork.Order(t, pool, orders[2]).Status, "it was overdue before the outages",
	)
	require.EqualValues(
		t, 1, testshop.QueryInt(
			t, pool, "SELECT count(*) FROM pulse WHERE lost = (SELECT sum(ended_at - began_at) FROM outages)",
		),
	)

	// An order that is confirmed between two outages is postponed by the second one only.
	between := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
	deadline := testwork.Order(t, pool, between).ExpiresAt
	require.WithinDuration(t, time.Now().Add(testshop.PaymentWindow), deadline, time.Minute)
	setHeartbeatBack(t, pool, "2 h")
	outage := testwork.Heartbeat(t, pool)
	require.WithinDuration(t, deadline.Add(outage), testwork.Order(t, pool, between).ExpiresAt, time.Millisecond)
}

// moveClock moves the clock of Postgres, forward or back, as time and settings of the clock do: what is stored of it
// moves the other way. Deadlines are on the pay clock.
func moveClock(t require.TestingT, pool *pgxpool.Pool, by time.Duration) {
	_, err := pool.Exec(context.Background(), "UPDATE pulse SET seen_at = seen_at - $1::interval, lost = lost - $1", by)
	require.NoError(t, err)
}

// The clock of Postgres was an hour ahead and is corrected.
func TestClockSetBackKeepsTimeToPay(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	orders := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 2)
	expiresIn(t, pool, orders[1], "-1 min")
	moveClock(t, pool, -time.Hour)
	late := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
	require.InDelta(t, -time.Hour, testwork.Heartbeat(t, pool), float64(time.Minute))
	require.Zero(t, testshop.QueryInt(t, pool, "SELECT count(*) FROM pulse WHERE seen_at > now()"),
		"otherwise the next outage would not be detected")
	require.Zero(t, testwork.Heartbeat(t, pool))
	for _, id := range []uuid.UUID{orders[0], late} {
		require.WithinDuration(t, time.Now().Add(testshop.PaymentWindow), testwork.Order(t, pool, id).ExpiresAt,
			time.Minute)
	}
	_, n, err := ledger.NewExpirer(ledger.New(pool), testkit.Logger(t)).ExpireSome(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, order.StatusConfirmed, testwork.Order(t, pool, orders[0]).Status)

	setHeartbeatBack(t, pool, "60 s")
	require.Greater(t, testwork.Heartbeat(t, pool), 60*time.Second, "a later outage is recorded")
}

// Time passes, ingresses restart and fail, and the clock of Postgres is set, forward and back. The pay clock advances
// by the time that passes except in outages, with an error of pulse.outage_after at most for each time that the clock
// is set. It is so between two heartbeats too, and if the row of pulse is lost.
func TestPayClockIsContinuous(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	const outageAfter = 60.0 // a busy machine is no outage
	exec := func(r require.TestingT, statement string, args ...any) {
		_, err := pool.Exec(t.Context(), statement, args...)
		require.NoError(r, err)
	}
	exec(t, "UPDATE pulse SET outage_after = make_interval(secs => $1)", outageAfter)
	testwork.Heartbeat(t, pool)
	seconds := func(r *rapid.T, least, most float64) float64 {
		return rapid.Float64Range(least, most).Draw(r, "seconds")
	}
	var moved time.Duration
	rapid.Check(t, func(r *rapid.T) {
		payClock := func() (at float64) {
			require.NoError(r, pool.QueryRow(t.Context(), "SELECT extract(epoch FROM pay_clock())::float8").Scan(&at))
			return at
		}
		began, first := time.Now(), payClock()
		passed, tolerance := 0.0, 1.0
		pass := func(real, step float64) {
			by := time.Duration((real + step) * float64(time.Second)).Round(time.Microsecond)
			moveClock(r, pool, by)
			moved += by
		}
		agree := func() {
			require.InDelta(r, passed+time.Since(began).Seconds(), payClock()-first, tolerance)
		}
		beat := func() {
			testwork.Heartbeat(t, pool)
			agree()
		}
		r.Repeat(map[string]func(*rapid.T){
			"time passes": func(r *rapid.T) {
				real := seconds(r, 0, outageAfter/2)
				passed += real
				pass(real, 0)
				beat()
			},
			"the clock is set": func(r *rapid.T) {
				real := seconds(r, 0, 1)
				passed, tolerance = passed+real, tolerance+outageAfter+real
				pass(real, seconds(r, -40_000, 40_000))
				agree()
				beat()
			},
			"an outage": func(r *rapid.T) {
				step := 0.0
				if rapid.Bool().Draw(r, "the clock is set") {
					step = seconds(r, -40_000, 40_000)
					tolerance += outageAfter
				}
				pass(seconds(r, outageAfter+1, 40_000), step)
				agree()
				beat()
			},
			"the row is lost": func(r *rapid.T) {
				exec(r, "DELETE FROM pulse")
				testwork.Heartbeat(t, pool)
				exec(r, "UPDATE pulse SET outage_after = make_interval(secs => $1), lost = lost - $2::interval", outageAfter, moved)
				agree()
			},
		})
	})
}

func TestHeartbeatInsertsMissingRow(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	for range 2 {
		setHeartbeatBack(t, pool, "60 s")
		require.NotZero(t, testwork.Heartbeat(t, pool))
	}
	sale := testshop.NewPayableSale(t, pool, 10)
	orders := testwork.Confirm(t, pool, sale, 2)
	expiresIn(t, pool, orders[1], "-1 h")
	deadline := testwork.Order(t, pool, orders[0]).ExpiresAt
	testshop.Exec(t, pool, "DELETE FROM pulse")

	require.Equal(t, deadline, testwork.Order(t, pool, orders[0]).ExpiresAt, "the order is returned without the row")
	listed, _, err := l.ListOrders(t.Context(), order.Filter{User: "user-1"}, uuid.Nil, 10)
	require.NoError(t, err)
	require.Len(t, listed, 1)
	require.Equal(t, deadline, listed[0].ExpiresAt)
	later := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
	require.WithinDuration(t, time.Now().Add(testshop.PaymentWindow), testwork.Order(t, pool, later).ExpiresAt,
		time.Minute)
	_, n, err := ledger.NewExpirer(l, testkit.Logger(t)).ExpireSome(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Zero(t, n, "it is unknown whether an ingress ran")

	require.Zero(t, testwork.Heartbeat(t, pool))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool,
		"SELECT count(*) FROM pulse WHERE lost = (SELECT sum(ended_at - began_at) FROM outages)"))
	require.Equal(t, deadline, testwork.Order(t, pool, orders[0]).ExpiresAt)
	testwork.Pay(t, l, orders[0], "user-1", "pi_1")
	_, n, err = ledger.NewExpirer(l, testkit.Logger(t)).ExpireSome(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, order.StatusExpired, testwork.Order(t, pool, orders[1]).Status)
}

func TestHeartbeatDoesNotWaitForAnother(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	setHeartbeatBack(t, pool, "60 s")
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }() // otherwise closing the pool would wait for it
	_, err = tx.Exec(t.Context(), "SELECT FROM pulse FOR UPDATE")
	require.NoError(t, err)
	outage := testwork.Heartbeat(t, pool)
	require.Zero(t, outage, "the other heartbeat records the outage")
	require.NoError(t, tx.Rollback(t.Context()))
	outage = testwork.Heartbeat(t, pool)
	require.NotZero(t, outage)
}
