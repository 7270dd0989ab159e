package offers_test

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/draw"
	"stampede/fulfillment/offers"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/order"
)

// list is a waiting list of a shop, of a sale or of an item.
type list struct {
	*testshop.Shop
	*draws.Store
	sale reservation.Sale
	// item is its code, and letter its letter; both are empty in a sale without items.
	item, letter string
}

// newList makes a sale with a waiting list whose units the holders have.
func newList(t testing.TB, s *testshop.Shop, holders ...string) *list {
	t.Helper()
	return newListOf(t, s, reservation.Terms{}, holders...)
}

// newListOf is newList for a sale with these terms. If it has items, the list is that of the first one, and the others
// are sold to everybody.
func newListOf(t testing.TB, s *testshop.Shop, terms reservation.Terms, holders ...string) *list {
	t.Helper()
	terms.Name, terms.PerOrderLimit, terms.PaymentWindow, terms.Waitlist = "shoe", 1, testshop.PaymentWindow, true
	terms.Stock = int64(len(holders))
	l := &list{Shop: s, Store: draws.New(s.Pool)}
	if terms.Items = slices.Clone(terms.Items); len(terms.Items) > 0 {
		terms.Items[0].Stock, terms.Stock = terms.Stock, 0
		for _, i := range terms.Items {
			terms.Stock += i.Stock
		}
		l.item, l.letter = terms.Items[0].Code, "a"
	}
	sale, err := s.Catalog.Create(t.Context(), terms)
	require.NoError(t, err)
	l.sale = sale.Sale
	for _, holder := range holders {
		require.Equal(t, reservation.Reserved, l.ask(t, holder))
	}
	return l
}

// forms runs a test for a sale with one shard and no items, for one in shards, and for an item of a sale, in one shard
// and in several.
func forms(t *testing.T, test func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list)) {
	t.Parallel()
	items := []reservation.Item{{Code: "m", Name: "M"}, {Code: "l", Name: "L", Stock: 5}}
	for name, terms := range map[string]reservation.Terms{
		"sale": {}, "shards": {Shards: 4}, "item": {Items: items}, "item in shards": {Shards: 4, Items: items},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, max(1, terms.Shards))
			test(t, s, func(holders ...string) *list { return newListOf(t, s, terms, holders...) })
		})
	}
}

// request asks for one unit.
func (l *list) request(user string) reservation.Request {
	r := reservation.Request{Sale: l.sale.ID, User: user, Quantity: 1}
	if l.item != "" {
		r.Quantity, r.Items = 0, map[string]int64{l.item: 1}
	}
	return r
}

func (l *list) ask(t testing.TB, user string) (verdict reservation.Verdict) {
	t.Helper()
	testkit.Eventually(t, testshop.Soon, "the sale answers", func() bool {
		a, err := l.Reserve(t.Context(), l.request(user))
		if err != nil {
			require.ErrorIs(t, err, reservation.ErrUnavailable) // once after a rebuild
		}
		verdict = a.Verdict
		return err == nil
	})
	return verdict
}

// requireNoneFor checks that a user cannot buy what is left. In another shard than that of the units it is sold out.
func (l *list) requireNoneFor(t testing.TB, user string) {
	t.Helper()
	if verdict := l.ask(t, user); l.sale.Shards == 1 || verdict != reservation.SoldOut {
		require.Equal(t, reservation.OffersOnly, verdict)
	}
}

func (l *list) look(t testing.TB) reservation.Whose {
	t.Helper()
	found, err := l.LookWhose(t.Context(), []reservation.Sale{l.sale})
	require.NoError(t, err)
	return found[0]
}

func (l *list) isPlain(t testing.TB) bool { return l.look(t).IsPlain }

// units are those that Redis has left.
func (l *list) units(t testing.TB) reservation.WhoseUnits { return l.look(t).Units[0] }

// restock adds a unit.
func (l *list) restock(t testing.TB) {
	t.Helper()
	var err error
	if l.item == "" {
		_, err = l.Catalog.Restock(t.Context(), l.sale.ID, 1, "")
	} else {
		_, err = l.Catalog.RestockItems(t.Context(), l.sale.ID, map[string]int64{l.item: 1}, "")
	}
	require.NoError(t, err)
}

// left is how many there are.
func (l *list) left(t testing.TB) int64 {
	u := l.units(t)
	return u.Offered + u.ForSale
}

// join has users wait, in their order.
func (l *list) join(t testing.TB, users ...string) {
	t.Helper()
	for _, user := range users {
		a, err := l.Join(t.Context(), l.sale, l.item, user, "")
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, a.Verdict, user)
	}
}

// expire ends the orders of the users in the sale.
func (l *list) expire(t *testing.T, users ...string) {
	t.Helper()
	testwork.FulfilAll(t, l.Shop)
	for _, user := range users {
		testwork.EndWindow(t, l.Pool, l.orderOf(t, l.sale.ID, user))
	}
	require.Equal(t, len(users), testwork.Expire(t, l.Shop))
	require.GreaterOrEqual(t, testwork.ReleaseUnits(t, l.Shop), len(users)) // and those of entries that have left
}

// orderOf is the live order of a user in a sale.
func (l *list) orderOf(t testing.TB, sale uuid.UUID, user string) (id uuid.UUID) {
	t.Helper()
	require.NoError(t, l.Pool.QueryRow(t.Context(), `SELECT id FROM orders
		WHERE sale_id = $1 AND user_id = $2 AND is_live(status)`, sale, user).Scan(&id))
	return id
}

// turns are those that were had, as user and outcome.
func (l *list) turns(t testing.TB) []string {
	return testshop.Rows(t, l.Pool, `SELECT e.user_id || ' ' || coalesce(had.reason, 'offered') FROM draw_offers AS had
		JOIN orders AS e ON e.sale_id = $2 AND e.id = had.entry_id WHERE had.sale_id = $1 AND had.item = $3 ORDER BY had.rank`,
		l.sale.ID, l.sale.EntriesID, l.letter)
}

// awaitTurns has units offered until these turns were had.
func (l *list) awaitTurns(t *testing.T, o *offers.Offerer, want ...string) {
	t.Helper()
	testkit.Eventually(t, testshop.Soon, fmt.Sprint(want), func() bool {
		if _, err := o.OfferWaiting(t.Context()); err != nil {
			require.ErrorIs(t, err, reservation.ErrUnavailable) // once after a rebuild
		}
		return len(l.turns(t)) >= len(want)
	})
	require.Equal(t, want, l.turns(t))
}

// requireNoTurn has units offered, of which nobody gets one.
func (l *list) requireNoTurn(t *testing.T, o *offers.Offerer) {
	t.Helper()
	done, err := o.OfferWaiting(t.Context())
	require.NoError(t, err)
	require.Zero(t, done)
}

// Units that return go to those who wait, by place: who has left gets none, and a holder is skipped. When nobody waits,
// everybody can buy.
func TestReturnedUnitsAreOfferedByPlace(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2", "h3")
		o := offerer(t, s)
		require.False(t, l.units(t).IsOffered)
		l.join(t, "ann", "bob", "cid", "dan")
		testwork.FulfilAll(t, s)
		l.requireNoTurn(t, o)
		require.Empty(t, l.turns(t))

		// An operator gives ann a unit by hand; bob leaves.
		l.restock(t)
		require.True(t, l.units(t).IsOffered)
		l.requireNoneFor(t, "eve")
		l.awaitTurns(t, o, "ann offered")
		bob, err := l.Waiter(t.Context(), l.sale.ID, "bob")
		require.NoError(t, err)
		want := draws.Waiter{EntryID: l.orderOf(t, l.sale.EntriesID, "bob"), Place: 2, Item: l.letter}
		require.Equal(t, want, bob)
		_, err = ledger.New(s.Pool).Withdraw(t.Context(), bob.EntryID, "has left", "")
		require.NoError(t, err)
		places, err := l.WaitingPlaces(t.Context(), l.sale.ID, l.letter)
		require.NoError(t, err)
		require.Equal(t, []int64{3, 4}, places)

		l.expire(t, "h1", "h2", "ann")
		require.Equal(t, int64(3), l.left(t))
		l.awaitTurns(t, o, "ann offered", "bob entry-cancelled", "cid offered", "dan offered")
		require.Equal(t, int64(1), l.left(t))
		waiter := func(user string) draws.Waiter {
			w, err := l.Waiter(t.Context(), l.sale.ID, user)
			require.NoError(t, err)
			return w
		}
		testwork.FulfilAll(t, s)
		require.Equal(t, l.orderOf(t, l.sale.ID, "cid"), waiter("cid").OrderID)
		require.Equal(t, draw.Offered, waiter("ann").Outcome, "it has expired")
		require.True(t, waiter("bob").HasLeft)

		l.requireNoTurn(t, o)
		require.Equal(t, reservation.WhoseUnits{ForSale: 1}, l.units(t), "it is for everybody")
		testkit.Eventually(t, testshop.Soon, "it is sold", func() bool {
			return l.ask(t, "eve") == reservation.Reserved
		})
		l.join(t, "bob", "fay") // behind all others
		l.expire(t, "eve")
		require.True(t, l.units(t).IsOffered, "the next return closes it again")
		l.awaitTurns(t, o, "ann offered", "bob entry-cancelled", "cid offered", "dan offered", "bob offered")
		testwork.FulfilAll(t, s)
		testwork.RequireUnbroken(t, s, uuid.Nil)
	})
}

// A worker dies between its call of Redis and the record of the turns, and those who were offered a unit leave. Who has
// got one keeps it, and who has not gets none, also if the call is on its way yet.
func TestWhoLeavesIsOfferedUnitOrNot(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2", "h3")
		l.join(t, "ann", "bob", "cid")
		testwork.FulfilAll(t, s)
		l.expire(t, "h1")
		leave := func(user string) (offer reservation.Offer, made uuid.UUID) {
			w, err := l.Waiter(t.Context(), l.sale.ID, user)
			require.NoError(t, err)
			_, err = ledger.New(s.Pool).Withdraw(t.Context(), w.EntryID, "has left", "")
			require.NoError(t, err)
			offer = reservation.Offer{
				OrderID: order.NewOrderID(l.sale.ID), UserID: user, Key: reservation.OfferKey(w.EntryID), Item: l.item,
			}
			made, err = s.Withdraw(t.Context(), l.sale.ID, offer)
			require.NoError(t, err)
			return offer, made
		}
		bob, none := leave("bob")
		require.Equal(t, uuid.Nil, none)
		w, err := l.Waiter(t.Context(), l.sale.ID, "ann")
		require.NoError(t, err)
		ann := reservation.Offer{
			OrderID: order.NewOrderID(l.sale.ID), UserID: "ann", Key: reservation.OfferKey(w.EntryID), Item: l.item,
		}
		answers, err := s.Offer(t.Context(), l.sale, []reservation.Offer{ann}) // the last one of the worker that dies
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, answers[0].Verdict)
		_, made := leave("ann")
		require.Equal(t, ann.OrderID, made)

		l.expire(t, "h2", "h3")
		answers, err = s.Offer(t.Context(), l.sale, []reservation.Offer{bob}) // one that was on its way
		require.NoError(t, err)
		require.Equal(t, reservation.Withdrawn, answers[0].Verdict)
		l.awaitTurns(t, offerer(t, s), "ann offered", "bob entry-cancelled", "cid offered")
		testwork.FulfilAll(t, s)
		require.Equal(t, ann.OrderID, l.orderOf(t, l.sale.ID, "ann"))
		testwork.RequireUnbroken(t, s, uuid.Nil)
	})
}

// A user with an order in the sale gets no second one.
func TestHolderIsSkippedInWaitingList(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2")
		l.join(t, "ann", "bob")
		l.expire(t, "h1")
		given := reservation.Offer{OrderID: order.NewOrderID(l.sale.ID), UserID: "ann", Item: l.item} // by an operator's tool
		answers, err := s.Offer(t.Context(), l.sale, []reservation.Offer{given})
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, answers[0].Verdict)
		l.expire(t, "h2")
		l.awaitTurns(t, offerer(t, s), "ann already-purchased", "bob offered")
		w, err := l.Waiter(t.Context(), l.sale.ID, "ann")
		require.NoError(t, err)
		require.Equal(t, []any{draw.Skipped, draw.SkippedHolder, uuid.Nil}, []any{w.Outcome, w.Reason, w.OrderID})
	})
}

// Nobody is passed over: an entry that is accepted and not recorded yet has its turn before later ones.
func TestEntryInTransitIsNotPassedOver(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2")
		o := offerer(t, s)
		l.expire(t, "h1", "h2")
		l.join(t, "ann")
		partition := s.Keys.Partition(l.sale.EntriesID)
		first := s.Events(t, partition)
		l.join(t, "bob")
		for _, e := range s.Events(t, partition)[len(first):] { // another worker was faster with bob's
			testwork.Record(t, ledger.New(s.Pool), append(first[:0:0], e))
		}
		require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1", l.sale.EntriesID))
		l.requireNoTurn(t, o)
		require.True(t, l.units(t).IsOffered, "ann waits")
		testwork.FulfilAll(t, s)
		l.awaitTurns(t, o, "ann offered", "bob offered")
	})
}

// The clock of Redis may be set back, so that a later place has an earlier time.
func TestClockChangeDoesNotChangePlaces(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	l := newList(t, s, "h1", "h2")
	l.join(t, "ann", "bob")
	l.expire(t, "h1", "h2")
	change := "UPDATE orders SET reserved_at = reserved_at + make_interval(hours => $2) WHERE id = $1"
	ann := l.orderOf(t, l.sale.EntriesID, "ann")
	require.NoError(t, s.Exec(t, change, ann, 1))
	l.requireNoTurn(t, offerer(t, s))
	require.NoError(t, s.Exec(t, change, ann, -1))
	l.awaitTurns(t, offerer(t, s), "ann offered", "bob offered")
}

// Who had an offer that is lost with Redis has it again, before the next place.
func TestWaitingListOffersLostUnitsAgain(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2")
		l.join(t, "ann", "bob", "cid")
		l.expire(t, "h1", "h2")
		o := offerer(t, s)
		l.awaitTurns(t, o, "ann offered", "bob offered")
		offersOf := func() []string {
			return testshop.Rows(t, s.Pool, "SELECT order_id::text FROM draw_offers WHERE sale_id = $1 ORDER BY rank", l.sale.ID)
		}
		lost := offersOf()
		s.Flush(t)
		testwork.HealAll(t, s)
		require.Equal(t, int64(2), l.left(t))
		testkit.Eventually(t, testshop.Soon, "both have another offer", func() bool {
			_, err := o.OfferWaiting(t.Context()) // the first call learns that the stock was rebuilt
			return err == nil && l.left(t) == 0
		})
		require.Equal(t, []string{"ann offered", "bob offered"}, l.turns(t))
		for i, id := range offersOf() {
			require.NotEqual(t, lost[i], id)
		}
		testwork.FulfilAll(t, s)
		require.Equal(t, []string{"ann", "bob"}, testshop.Rows(t, s.Pool,
			"SELECT user_id FROM orders WHERE sale_id = $1 AND status = 'confirmed' ORDER BY user_id", l.sale.ID))
		l.expire(t, "ann")
		l.awaitTurns(t, o, "ann offered", "bob offered", "cid offered")
		testwork.FulfilAll(t, s)
		testwork.RequireUnbroken(t, s, uuid.Nil)
	})
}

// A crowd that asks at the moment when units return gets none while somebody waits.
func TestCrowdTakesNoUnitFromThoseWhoWait(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		holders, waiting := make([]string, 30), make([]string, 30)
		for i := range holders {
			holders[i], waiting[i] = fmt.Sprint("holder-", i), fmt.Sprint("waiting-", i)
		}
		l := newList(holders...)
		l.join(t, waiting...)
		testwork.FulfilAll(t, s)
		for _, h := range holders {
			testwork.EndWindow(t, s.Pool, l.orderOf(t, l.sale.ID, h))
		}
		var over atomic.Bool
		var crowd errgroup.Group
		for n := range 8 {
			crowd.Go(func() error {
				for i := 0; !over.Load(); i++ {
					a, err := s.Reserve(t.Context(), l.request(fmt.Sprintf("crowd-%d-%d", n, i)))
					if err != nil {
						return err
					}
					if a.Verdict == reservation.Reserved {
						return fmt.Errorf("one of the crowd has a unit, at place %d", a.Reservation.Sequence)
					}
				}
				return nil
			})
		}
		stop := testwork.Work(t, testwork.Config(t, s))
		second := testwork.Config(t, s)
		second.Consumer = "second"
		stopSecond := testwork.Work(t, second)
		testkit.Eventually(t, 2*time.Minute, "all who wait have an offer",
			func() bool { return len(l.turns(t)) == len(waiting) })
		over.Store(true)
		require.NoError(t, crowd.Wait())
		testwork.AwaitRest(t, s)
		stop()
		stopSecond()
		want := slices.Clone(waiting)
		for i := range want {
			want[i] += " offered"
		}
		require.Equal(t, want, l.turns(t))
		require.EqualValues(t, 30, s.Count(t, `SELECT count(DISTINCT user_id) FROM orders
		WHERE sale_id = $1 AND status = 'confirmed'`, l.sale.ID))
		testwork.RequireUnbroken(t, s, uuid.Nil)
	})
}

// A rebuild of both sales changes neither the places nor who gets a unit.
func TestWaitingListSurvivesRebuild(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2", "h3")
		o := offerer(t, s)
		l.join(t, "ann", "bob", "cid")
		l.expire(t, "h1")
		l.awaitTurns(t, o, "ann offered")
		testwork.FulfilAll(t, s)
		s.Flush(t)
		testwork.HealAll(t, s)
		require.Equal(t, reservation.WhoseUnits{}, l.units(t), "nothing is left to offer")
		require.Equal(t, reservation.SoldOut, l.ask(t, "eve"))
		entries := l.request("eve")
		entries.Sale = l.sale.EntriesID
		a, err := s.Reserve(t.Context(), entries)
		require.NoError(t, err)
		require.Equal(t, reservation.OffersOnly, a.Verdict, "places are given by Join")
		again, err := l.Join(t.Context(), l.sale, l.item, "bob", "")
		require.NoError(t, err)
		require.Equal(t, []any{reservation.Replayed, int64(2)}, []any{again.Verdict, again.Reservation.Sequence})
		l.expire(t, "h2", "h3")
		s.Flush(t)
		testwork.HealAll(t, s)
		require.True(t, l.units(t).IsOffered, "units are left, and it is not known whether somebody waits")
		l.requireNoneFor(t, "eve")
		l.awaitTurns(t, o, "ann offered", "bob offered", "cid offered")
		testwork.FulfilAll(t, s)
		require.EqualValues(t, 3,
			s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1 AND status = 'confirmed'", l.sale.ID))
		testwork.RequireUnbroken(t, s, uuid.Nil)
	})
}

// The list ends with its sale, and both can leave Redis and Postgres.
func TestWaitingListEndsWithItsSale(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	l := newList(t, s, "h1")
	l.join(t, "ann")
	testwork.FulfilAll(t, s)
	_, err := s.Catalog.End(t.Context(), l.sale.ID)
	require.NoError(t, err)
	a, err := l.Join(t.Context(), l.sale, l.item, "bob", "")
	require.NoError(t, err)
	require.Equal(t, reservation.Ended, a.Verdict)
	l.requireNoTurn(t, offerer(t, s))
	entries, err := s.Catalog.Show(t.Context(), l.sale.EntriesID)
	require.NoError(t, err)
	require.Equal(t, reservation.StateEnded, entries.State)
	l.expire(t, "h1")
	for _, sale := range []uuid.UUID{l.sale.EntriesID, l.sale.ID} {
		shown, err := s.Catalog.Show(t.Context(), sale)
		require.NoError(t, err)
		require.NoError(t, s.Catalog.Retire(t.Context(), sale, shown.Epoch, shown.Revision))
		archive := s.Process(t, "archive", sale.String(), t.TempDir())
		archive.Start()
		require.True(t, archive.Wait(time.Minute).Success(), archive.Output())
	}
}
