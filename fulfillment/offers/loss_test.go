package offers_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/offers"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
)

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
