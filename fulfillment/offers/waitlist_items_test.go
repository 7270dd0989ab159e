package offers_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

// newSizes is newListOf for a sale of one m and one l, both of which are sold, with the lists of both.
func newSizes(t *testing.T, s *testshop.Shop) (m, l *list) {
	t.Helper()
	m = newListOf(t, s, reservation.Terms{Items: []reservation.Item{
		{Code: "m", Name: "M"}, {Code: "l", Name: "L", Stock: 1},
	}}, "hm")
	other := *m
	l = &other
	l.item, l.letter = "l", "b"
	require.Equal(t, reservation.Reserved, l.ask(t, "hl"))
	l.units(t)
	return m, l
}

// Each item has a list of its own: who waits for another one, or nobody, changes nothing there.
func TestItemsHaveListsOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	m, l := newSizes(t, s)
	unitsOf := func(place int) reservation.WhoseUnits { return m.look(t).Units[place] }
	m.join(t, "ann", "bob")
	l.join(t, "cid")
	a, err := s.Join(t.Context(), m.sale, "l", "ann", "")
	require.NoError(t, err)
	require.Equal(t, []any{reservation.Replayed, order.Lines("a1")}, []any{a.Verdict, a.Reservation.Lines},
		"ann waits for m")
	for item, want := range map[string]string{"": "must say for which one", "xl": ""} {
		a, err := s.Join(t.Context(), m.sale, item, "dan", "")
		if want != "" {
			require.ErrorContains(t, err, want)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, []any{reservation.UnknownItem, []string{"xl"}}, []any{a.Verdict, a.Of.Codes})
	}

	// The unit of l is offered to cid, who came last; when a second one returns, nobody waits for it.
	l.expire(t, "hl")
	require.Equal(t, reservation.WhoseUnits{IsOffered: true, Offered: 1}, unitsOf(1))
	require.Equal(t, reservation.WhoseUnits{}, unitsOf(0))
	o := offerer(t, s)
	l.awaitTurns(t, o, "cid offered")
	require.Empty(t, m.turns(t))
	testkit.Eventually(t, testshop.Soon, "nobody waits for l", func() bool {
		_, err := o.OfferWaiting(t.Context())
		return err == nil && unitsOf(1) == reservation.WhoseUnits{}
	})
	l.expire(t, "cid")
	l.requireNoTurn(t, o)
	require.Equal(t, reservation.WhoseUnits{ForSale: 1}, unitsOf(1), "it is for everybody")
	_, err = s.Join(t.Context(), m.sale, "l", "dan", "")
	require.ErrorIs(t, err, reservation.ErrNotSoldOut)
	testkit.Eventually(t, testshop.Soon, "dan buys l", func() bool { return l.ask(t, "dan") == reservation.Reserved })

	// Meanwhile those who wait for m keep their order; who holds another item is skipped there.
	m.join(t, "eve")
	m.expire(t, "hm")
	m.awaitTurns(t, o, "ann offered")
	testwork.FulfilAll(t, s)
	testwork.RequireUnbroken(t, s, uuid.Nil)
	places, err := m.WaitingPlaces(t.Context(), m.sale.ID, "a")
	require.NoError(t, err)
	require.Equal(t, []int64{2, 4}, places)
}

// When the last place of a list is left, buyers hear again that nothing is left, and not that others come first.
func TestLastPlaceIsLeft(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1")
		o := offerer(t, s)
		l.join(t, "ann", "bob")
		l.expire(t, "h1")
		l.awaitTurns(t, o, "ann offered")
		l.requireNoTurn(t, o)
		require.True(t, l.units(t).IsOffered, "bob waits")
		_, err := ledger.New(s.Pool).Withdraw(t.Context(), l.orderOf(t, l.sale.EntriesID, "bob"), "has left", "")
		require.NoError(t, err)
		require.Equal(t, 1, testwork.ReleaseUnits(t, s))
		testkit.Eventually(t, testshop.Soon, "nobody waits", func() bool {
			_, err := o.OfferWaiting(t.Context())
			return err == nil && !l.units(t).IsOffered
		})
		require.Equal(t, reservation.SoldOut, l.ask(t, "eve"))
		require.Equal(t, []string{"ann offered", "bob entry-cancelled"}, l.turns(t))
		testwork.FulfilAll(t, s)
		testwork.RequireUnbroken(t, s, uuid.Nil)
	})
}

// The shards of a sale are raised while people wait: the places stay, and units go to them in any shard.
func TestShardsOfSaleWithWaitingListAreRaised(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 4)
	l := newListOf(t, s, reservation.Terms{Shards: 1}, "h1", "h2", "h3", "h4")
	l.join(t, "ann", "bob", "cid", "dan")
	l.expire(t, "h1")
	o := offerer(t, s)
	l.awaitTurns(t, o, "ann offered")
	testwork.FulfilAll(t, s)
	l.expire(t, "h2")
	_, err := testwork.Rebuilder(t, s).RaiseShards(t.Context(), l.sale.ID, 4, rebuild.ReasonByHand)
	require.NoError(t, err)
	shown, err := s.Catalog.Show(t.Context(), l.sale.ID)
	require.NoError(t, err)
	l.sale = shown.Sale
	require.Equal(t, reservation.WhoseUnits{IsOffered: true, Offered: 1}, l.units(t))
	l.awaitTurns(t, o, "ann offered", "bob offered")
	l.expire(t, "h3", "h4")
	l.awaitTurns(t, o, "ann offered", "bob offered", "cid offered", "dan offered")
	testwork.FulfilAll(t, s)
	testwork.RequireUnbroken(t, s, uuid.Nil)
	_, err = testwork.Rebuilder(t, s).RaiseShards(t.Context(), l.sale.EntriesID, 2, rebuild.ReasonByHand)
	require.ErrorContains(t, err, "places have one order")
}
