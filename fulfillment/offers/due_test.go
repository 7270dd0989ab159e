package offers_test

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/offers"
	"stampede/internal/clocks"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
)

// A worker looks at a list when something has changed there, and until nothing is left to offer.
func TestIdleListsAreNotLookedAt(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	l, idle := newList(t, s, "h1"), newList(t, s, "h1")
	l.join(t, "ann")
	idle.join(t, "bob")
	testwork.FulfilAll(t, s)
	o := offerer(t, s)
	due := func() []string { return testshop.Rows(t, s.Pool, "SELECT sale_id::text FROM offers_due") }
	require.Len(t, due(), 2, "new lists are looked at")
	l.requireNoTurn(t, o)
	require.Empty(t, due())

	l.expire(t, "h1")
	require.Equal(t, []string{l.sale.ID.String()}, due(), "a unit has returned")
	l.awaitTurns(t, o, "ann offered")
	l.requireNoTurn(t, o)
	require.Empty(t, due())

	// Units that nobody noted are found, too, by a worker that starts, or within a minute.
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, idle.sale.ID), "left", 1, "state", "offers",
		"open_state", "offers").Err())
	idle.requireNoTurn(t, o)
	idle.awaitTurns(t, offerer(t, s), "bob offered")
}

// BenchmarkIdleLists measures a look for units to offer beside 10,000 idle waiting lists: one that finds a unit and
// offers it, one that finds nothing, and the survey of all lists, which is made once a minute.
func BenchmarkIdleLists(b *testing.B) {
	s := testshop.OnOwnRedis(b, 1)
	l := newList(b, s, "user-0")
	for i := range b.N {
		l.join(b, fmt.Sprint("user-", i+1))
	}
	testwork.FulfilAll(b, s)
	l.addIdle(b, 10_000, draws.ByPlace)
	o := offerer(b, s)
	look := func() time.Duration {
		began := time.Now()
		_, err := o.OfferWaiting(b.Context())
		require.NoError(b, err)
		return time.Since(began)
	}
	survey := look()
	var offered, idle time.Duration
	b.ResetTimer()
	for i := range b.N {
		testwork.FulfilAll(b, s)
		testwork.EndWindow(b, s.Pool, l.orderOf(b, l.sale.ID, fmt.Sprint("user-", i)))
		require.Equal(b, 1, testwork.Expire(b, s))
		testwork.ReleaseUnits(b, s)
		for len(l.turns(b)) == i {
			offered += look()
		}
		look()
		idle += look()
	}
	b.ReportMetric(float64(survey.Milliseconds()), "survey-ms")
	b.ReportMetric(float64(offered.Microseconds())/float64(b.N), "offer-µs")
	b.ReportMetric(float64(idle.Microseconds())/float64(b.N), "idle-µs")
}

// addIdle adds so many waiting lists, or draws whose ranks are offered, of which no unit is left: copies of this list.
func (l *list) addIdle(b *testing.B, n int, kind draws.Kind) {
	b.Helper()
	ids := testshop.Rows(b, l.Pool, `WITH made AS MATERIALIZED (
			SELECT overlay(gen_random_uuid()::text PLACING left($1::uuid::text, 14) FROM 1)::uuid AS goods,
				overlay(gen_random_uuid()::text PLACING left($1::uuid::text, 14) FROM 1)::uuid AS entries
			FROM generate_series(1, $2::int) -- of the same month
		), sale AS (
			INSERT INTO sales SELECT (jsonb_populate_record(s, jsonb_build_object('id', one, 'name', 'idle'))).*
			FROM made, unnest(ARRAY[goods, entries]) AS one, sales AS s WHERE s.id = $1
		), drawn AS (
			INSERT INTO draws (sale_id, entries_id, kind, offers_epoch, entries, item_entries, root, frozen_at, seeded_at, ranked_at)
			SELECT goods, entries, $3, 1, 10, ARRAY[10], sha256('x'), now(), now() + interval '1 s', now() FROM made
		) SELECT unnest(ARRAY[goods, entries])::text FROM made`, l.sale.ID, n, string(kind))
	_, err := l.Rdb.Pipelined(b.Context(), func(p redis.Pipeliner) error {
		for _, id := range ids {
			p.Copy(b.Context(), l.Keys.Sale(0, l.sale.ID), l.Keys.Sale(0, uuid.MustParse(id)), 0, false)
			p.SAdd(b.Context(), l.Keys.Sales(0), id)
		}
		return nil
	})
	require.NoError(b, err)
}

// BenchmarkNextTurn measures the time from the end of an order to the offer of its unit to the next one, with the
// intervals of a real worker, and the CPU time that the worker takes when nothing happens: alone, and beside 10,000
// waiting lists and 1,000 draws.
func BenchmarkNextTurn(b *testing.B) {
	ends := map[string]func(*testing.B, *list, uuid.UUID, string){
		"expiry": func(b *testing.B, l *list, id uuid.UUID, _ string) { testwork.EndWindow(b, l.Pool, id) },
		"cancel": func(b *testing.B, l *list, id uuid.UUID, user string) {
			_, err := ledger.New(l.Pool).Cancel(b.Context(), id, user)
			require.NoError(b, err)
		},
	}
	for _, others := range []int{0, 1000} {
		for name, end := range ends {
			b.Run(fmt.Sprintf("%s/%d", name, 11*others), func(b *testing.B) { nextTurn(b, others, end) })
		}
	}
}

func nextTurn(b *testing.B, others int, end func(*testing.B, *list, uuid.UUID, string)) {
	b.StopTimer()
	s := testshop.OnOwnRedis(b, 1)
	l := newList(b, s, "user-0")
	for i := range b.N {
		l.join(b, fmt.Sprint("user-", i+1))
	}
	if others > 0 {
		l.addIdle(b, 10*others, draws.ByPlace)
		l.addIdle(b, others, draws.ByHash)
	}
	config := testwork.Config(b, s)
	config.SweepInterval, config.GuardInterval = 0, 0
	testwork.Work(b, config)
	s.AwaitConfirmed(b, 1+b.N)
	before := cpuTime(b)
	<-time.After(idleFor)
	idle := cpuTime(b) - before
	var longest time.Duration
	for i := range b.N {
		s.AwaitConfirmed(b, 1+b.N)
		user := fmt.Sprint("user-", i)
		id := l.orderOf(b, l.sale.ID, user)
		b.StartTimer()
		began := time.Now()
		end(b, l, id, user)
		testkit.Eventually(b, time.Minute, "the next turn", func() bool { return len(l.turns(b)) == i+1 })
		b.StopTimer()
		longest = max(longest, time.Since(began))
	}
	b.ReportMetric(longest.Seconds(), "s-longest")
	b.ReportMetric(float64(idle.Milliseconds())/idleFor.Seconds(), "idle-ms/s")
}

// idleFor has a survey of all lists, which is made once a minute.
const idleFor = 65 * time.Second

// cpuTime is that of this process.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var used syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// closes sets the end of the entries, from now.
func (d *drawn) closes(t *testing.T, fromNow string) {
	t.Helper()
	require.NoError(t, d.Exec(t, "UPDATE sales SET closes_at = now() + $2::interval WHERE id = $1", d.entries, fromNow))
}

// A clock of Postgres that is ahead for a moment neither ends the entries of a draw nor makes it void.
func TestClockAheadEndsNoDraw(t *testing.T) {
	t.Parallel()
	s, set := testshop.OnClockedPostgres(t)
	d := newDraw(t, s, 20, 5)
	d.closes(t, "40 seconds")
	testwork.Fulfil(t, s)
	o := offerer(t, s)
	for _, ahead := range []time.Duration{45 * time.Second, time.Hour} { // after the end, and after the last round
		set(ahead)
		require.Equal(t, draws.Freezing, d.find(t).State, "by that clock")
		require.ErrorIs(t, o.Prepare(t.Context()), clocks.ErrApart)
		set(0)
		require.NoError(t, o.Prepare(t.Context()))
		require.Equal(t, draws.Entering, d.find(t).State)
	}
	require.Equal(t, reservation.Reserved, s.Ask(t, d.entries, "late").Verdict)
	d.closes(t, "-1 second")
	testwork.FulfilAll(t, s)
	require.NoError(t, o.Prepare(t.Context()))
	testwork.FulfilAll(t, s)
	require.NoError(t, o.Prepare(t.Context()))
	frozen := d.find(t)
	require.Equal(t, draws.Frozen, frozen.State)
	require.Equal(t, int64(21), frozen.Entries)
}

// A clock of Postgres that is behind does not freeze a list whose round is known to the world.
func TestClockBehindFreezesNoList(t *testing.T) {
	t.Parallel()
	s, set := testshop.OnClockedPostgres(t)
	d := newDraw(t, s, 20, 5)
	testwork.Fulfil(t, s)
	_, err := s.Catalog.End(t.Context(), d.entries)
	require.NoError(t, err)
	d.closes(t, "-65 seconds")
	o := offerer(t, s)
	set(-30 * time.Second)
	require.Len(t, d.find(t).Rounds, 1, "by that clock")
	require.ErrorIs(t, o.Prepare(t.Context()), clocks.ErrApart)
	require.Equal(t, draws.Freezing, d.find(t).State)
	set(0)
	require.NoError(t, o.Prepare(t.Context()))
	require.Len(t, d.find(t).Rounds, 2)
	require.Equal(t, draws.Frozen, d.find(t).State)
}

// Who waits is not sent away because the sale is over by one clock. Its list has the same end.
func TestWaitingListDoesNotEndByClock(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	l := newList(t, s, "ann")
	l.join(t, "bob")
	require.NoError(t, s.Exec(t, "UPDATE sales SET closes_at = now() WHERE id = $1", l.sale.ID))
	_, err := offerer(t, s).OfferWaiting(t.Context())
	require.NoError(t, err)
	found, err := l.Store.Find(t.Context(), l.sale.ID)
	require.NoError(t, err)
	require.Equal(t, draws.Over, found.State)
	entries, err := s.Catalog.Show(t.Context(), found.EntriesID)
	require.NoError(t, err)
	require.Equal(t, reservation.StateOpen, entries.State)
}

// reserve reserves the units of the next ranks, as a worker that dies before it records them.
func (d *drawn) reserve(t *testing.T, units int64) {
	t.Helper()
	died := errors.New("died")
	_, err := d.Store.Offer(t.Context(), d.goods, map[string]int64{"": units},
		func(ctx context.Context, turns []draws.Turn) ([]draws.Result, error) {
			var asked []reservation.Offer
			for _, turn := range turns {
				asked = append(asked, reservation.Offer{
					OrderID: turn.OrderID, UserID: turn.UserID, Key: reservation.OfferKey(turn.EntryID),
				})
			}
			_, err := d.Shop.Offer(ctx, reservation.Sale{ID: d.goods, Epoch: turns[0].Epoch}, asked)
			return nil, errors.Join(died, err)
		})
	require.ErrorIs(t, err, died)
	require.Zero(t, d.Left(t, d.goods))
}

// offerAll offers until no unit is left.
func (d *drawn) offerAll(t *testing.T, o *offers.Offerer) {
	t.Helper()
	testkit.Eventually(t, testshop.Soon, "all units are offered", func() bool {
		n, err := o.Offer(t.Context()) // the first call learns that the stock was rebuilt
		return err == nil && n == 0 && d.Left(t, d.goods) == 0
	})
}

// requireUnbroken audits the draw once all is recorded and published.
func (d *drawn) requireUnbroken(t *testing.T) {
	t.Helper()
	testwork.FulfilAll(t, d.Shop)
	_, err := d.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	testwork.RequireUnbroken(t, d.Shop, uuid.Nil)
	d.verify(t)
}

// Offers that Redis loses before Postgres has their orders are made again, each to the same rank with another order,
// whatever comes of the lost one.
func TestOffersLostWithRedisAreMadeAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		users    int
		recorded bool // in draw_offers
		late     bool // the events of the lost orders come after those of the new ones
	}{
		"not recorded":                {users: 12},
		"not recorded, late events":   {users: 12, late: true},
		"recorded":                    {users: 12, recorded: true},
		"recorded, late events":       {users: 12, recorded: true, late: true},
		"recorded, and no rank waits": {users: 5, recorded: true, late: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 1)
			d := newDraw(t, s, c.users, 5)
			o := d.rank(t)
			if c.recorded {
				require.Equal(t, 5, offer(t, o))
			} else {
				d.reserve(t, 5)
			}
			entries := s.Entries(t, 0)
			lost := entries[len(entries)-1]
			s.Flush(t)
			testwork.Rebuild(t, s)
			again := func() {
				add := redis.XAddArgs{Stream: s.Keys.Orders(0), Values: lost.Values}
				require.NoError(t, s.Rdb.XAdd(t.Context(), &add).Err())
				testwork.FulfilAll(t, s)
			}
			if !c.late {
				again()
			}
			d.offerAll(t, o)
			testwork.FulfilAll(t, s)
			if c.late {
				again()
			}
			require.Equal(t, []string{"0 2 confirmed", "1 2 confirmed", "2 2 confirmed", "3 2 confirmed", "4 2 confirmed"},
				testshop.Rows(t, s.Pool, `SELECT rank || ' ' || o.epoch || ' ' || status FROM draw_offers AS o
					JOIN orders ON orders.sale_id = o.sale_id AND id = order_id ORDER BY rank`))
			require.Equal(t, []string{"confirmed 5", "voided 5"}, testshop.Rows(t, s.Pool,
				"SELECT status || ' ' || count(*) FROM orders WHERE sale_id = $1 GROUP BY status ORDER BY status", d.goods))
			require.Zero(t, offer(t, offerer(t, s)))
			found := d.find(t)
			require.Equal(t, []int64{5, 0}, []int64{found.Offered, found.Skipped})
			require.Equal(t, c.users == 5, found.State == draws.Over)
			d.requireUnbroken(t)
		})
	}
}

// An offer whose order has ended is over, also after a loss of Redis. Who has left meanwhile is skipped.
func TestOnlyLostOffersAreMadeAgain(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 12, 5)
	o := d.rank(t)
	require.Equal(t, 5, offer(t, o))
	testwork.Fulfil(t, s)
	order := func(rank int) uuid.UUID {
		return uuid.MustParse(testshop.Rows(t, s.Pool, "SELECT order_id::text FROM draw_offers WHERE rank = $1", rank)[0])
	}
	expired, kept := []uuid.UUID{order(0), order(1)}, order(2)
	testwork.EndWindow(t, s.Pool, expired...)
	require.Equal(t, 2, testwork.Expire(t, s))
	require.Equal(t, 2, testwork.ReleaseUnits(t, s))
	d.offerAll(t, o)
	want := []string{"0 offered", "1 offered", "2 offered", "3 offered", "4 offered", "5 offered", "6 offered"}
	require.Equal(t, want, d.outcomes(t))
	lost := order(5)
	s.Flush(t)
	testwork.Rebuild(t, s)
	_, err := ledger.New(s.Pool).Withdraw(t.Context(), d.receipts[d.userOf(t, 6)].OrderID, "a mistake", "ada")
	require.NoError(t, err)
	d.offerAll(t, o)
	want[6] = "6 entry-cancelled"
	require.Equal(t, append(want, "7 offered"), d.outcomes(t))
	require.Equal(t, append(expired, kept), []uuid.UUID{order(0), order(1), order(2)})
	require.NotEqual(t, lost, order(5))
	found := d.find(t)
	require.Equal(t, []int64{7, 1}, []int64{found.Offered, found.Skipped})
	testwork.ReleaseUnits(t, s) // of the cancelled entry
	d.requireUnbroken(t)
	require.Equal(t, int64(5), s.Count(t, "SELECT sold FROM sales WHERE id = $1", d.goods))
}

// A worker that dies after it has reserved a unit leaves an offer, whatever becomes of the entry.
func TestOfferOfCancelledEntryIsRecorded(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 12, 3)
	o := d.rank(t)
	d.reserve(t, 3)
	for _, rank := range []int64{1, 3} {
		entry := d.receipts[d.userOf(t, rank)].OrderID
		_, err := ledger.New(s.Pool).Withdraw(t.Context(), entry, "a mistake", "ada")
		require.NoError(t, err)
	}
	require.Equal(t, 4, offer(t, o))
	d.requireUnbroken(t)
	require.Equal(t, []string{"0 offered", "1 offered", "2 offered", "3 entry-cancelled"}, d.outcomes(t))
}
