package offers_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/upkeep/archive"
	"stampede/upkeep/rebuild"
)

// operate does each operation to a sale.
func operate(s *testshop.Shop) map[catalog.Operation]func(context.Context, uuid.UUID) error {
	type operation = func(context.Context, uuid.UUID) error
	shown := func(do func(context.Context, uuid.UUID) (catalog.CountedSale, error)) operation {
		return func(ctx context.Context, sale uuid.UUID) error {
			_, err := do(ctx, sale)
			return err
		}
	}
	other := "another name"
	return map[catalog.Operation]func(context.Context, uuid.UUID) error{
		catalog.OpPause:  shown(s.Catalog.Pause),
		catalog.OpResume: shown(s.Catalog.Resume),
		catalog.OpEnd:    shown(s.Catalog.End),
		catalog.OpOpen:   s.Catalog.OpenDraw,
		catalog.OpRestock: func(ctx context.Context, sale uuid.UUID) error {
			_, err := s.Catalog.Restock(ctx, sale, 1, "")
			return err
		},
		catalog.OpRename: func(ctx context.Context, sale uuid.UUID) error {
			_, err := s.Catalog.Rename(ctx, sale, catalog.Names{Sale: &other})
			return err
		},
	}
}

// Whatever an operator does to one half of a waiting list, no unit is left that nobody can have, and nobody waits who
// cannot be offered one.
func TestNoOperationStrandsWaitingList(t *testing.T) {
	t.Parallel()
	for op := range operate(testshop.NewShop(t)) {
		for _, half := range []catalog.Half{catalog.ListGoods, catalog.ListPlaces} {
			for _, waiting := range []int{0, 1, 2} {
				t.Run(fmt.Sprintf("%s %s, %d wait", op, half, waiting), func(t *testing.T) {
					t.Parallel()
					s := testshop.OnOwnRedis(t, 1)
					l := newList(t, s, "h1", "h2")
					for n := range waiting {
						l.join(t, fmt.Sprint("waiting-", n))
					}
					testwork.FulfilAll(t, s)
					sale := l.sale.ID
					if half == catalog.ListPlaces {
						sale = l.sale.EntriesID
					}
					err := operate(s)[op](t.Context(), sale)
					if catalog.RuleOf(op, half).Effect == catalog.Refused {
						illegal := new(reservation.IllegalTransitionError)
						require.ErrorAs(t, err, &illegal)
						require.Contains(t, illegal.Error(), l.sale.ID.String(), "it says what to do")
					} else {
						require.NoError(t, err)
					}
					l.expire(t, "h1", "h2")
					l.requireSettles(t, waiting)
				})
			}
		}
	}
}

// requireSettles has workers work until each unit is held, or for everybody, or the sale is halted.
func (l *list) requireSettles(t *testing.T, waiting int) {
	t.Helper()
	o := offerer(t, l.Shop)
	goods, err := l.Catalog.Show(t.Context(), l.sale.ID)
	require.NoError(t, err)
	switch goods.State {
	case reservation.StateEnded:
		entries, err := l.Catalog.Show(t.Context(), l.sale.EntriesID)
		require.NoError(t, err)
		require.Equal(t, reservation.StateEnded, entries.State, "nobody waits for a sale that is over")
		return
	case reservation.StatePaused:
		l.requireNoTurn(t, o)
		_, err := l.Catalog.Resume(t.Context(), l.sale.ID)
		require.NoError(t, err)
	}
	testkit.Eventually(t, testshop.Soon, "all who wait have a turn, and a stranger the rest", func() bool {
		_, err := o.OfferWaiting(t.Context())
		require.NoError(t, err)
		return len(l.turns(t)) == waiting && (l.Left(t, l.sale.ID) == 0 ||
			l.Ask(t, l.sale.ID, "stranger").Verdict == reservation.Reserved)
	})
	testwork.FulfilAll(t, l.Shop)
	testwork.RequireUnbroken(t, l.Shop, uuid.Nil)
}

// A list that is closed takes nobody, offers what returns to those who wait, and is none afterwards.
func TestClosedListIsEmptiedAndForgotten(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2")
		l.join(t, "ann")
		testwork.FulfilAll(t, s)
		ctx := catalog.WithOperator(t.Context(), "ada")
		for range 2 { // a repeat changes nothing
			_, err := s.Catalog.End(ctx, l.sale.EntriesID)
			require.NoError(t, err)
			closed, err := s.Catalog.Show(ctx, l.sale.ID)
			require.NoError(t, err)
			require.Equal(t, []any{true, reservation.StateOpen}, []any{closed.WaitlistClosed, closed.State})
		}
		require.EqualValues(t, 1, s.Count(t, `SELECT count(*) FROM sale_events
		WHERE sale_id = $1 AND type = 'WaitlistClosed' AND operator = 'ada'`, l.sale.ID))
		_, err := l.Join(t.Context(), l.sale, l.item, "bob", "")
		require.ErrorIs(t, err, reservation.ErrWaitlistClosed)
		again, err := l.Join(t.Context(), l.sale, l.item, "ann", "")
		require.NoError(t, err)
		require.Equal(t, reservation.Replayed, again.Verdict, "who waits keeps the place")

		o := offerer(t, s)
		places, err := s.Catalog.Show(t.Context(), l.sale.EntriesID)
		require.NoError(t, err)
		require.ErrorIs(t, s.Catalog.Retire(t.Context(), places.ID, places.Epoch, places.Revision), catalog.ErrNotRetired,
			"ann is found in Redis")
		l.expire(t, "h1")
		l.awaitTurns(t, o, "ann offered")
		testwork.FulfilAll(t, s)
		o = offerer(t, s) // which has not looked yet
		l.requireNoTurn(t, o)
		require.True(t, l.isPlain(t), "the list is over")
		testwork.RequireUnbroken(t, s, uuid.Nil)
		l.expire(t, "h2")
		testkit.Eventually(t, testshop.Soon, "it is sold without a worker", func() bool {
			return l.ask(t, "eve") == reservation.Reserved
		})
		_, err = l.Join(t.Context(), l.sale, l.item, "bob", "")
		require.ErrorIs(t, err, reservation.ErrWaitlistClosed)

		testwork.FulfilAll(t, s)
		s.Flush(t)
		testwork.HealAll(t, l.Shop)
		testkit.Eventually(t, testshop.Soon, "so it is after a rebuild", func() bool {
			_, err := o.OfferWaiting(t.Context())
			return err == nil && l.isPlain(t)
		})
		testwork.RequireUnbroken(t, s, uuid.Nil)
	})
}

// A sale does not sell plainly while somebody may still get a place: the end of the places waits for its publication.
func TestListIsNotForgottenBeforeItsEndIsPublished(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	l := newList(t, s, "h1")
	testwork.FulfilAll(t, s)
	require.NoError(t, s.Exec(t, "UPDATE sales SET state = 'ended' WHERE id = $1", l.sale.EntriesID))
	l.requireNoTurn(t, offerer(t, s))
	require.False(t, l.isPlain(t))
}

// Whatever an operator does to one half of a draw, before its entries are over or while units are offered, each unit
// finds an entrant, or the sale is halted.
func TestNoOperationStrandsDraw(t *testing.T) {
	t.Parallel()
	for op := range operate(testshop.NewShop(t)) {
		for _, half := range []catalog.Half{catalog.DrawGoods, catalog.DrawEntries} {
			t.Run(fmt.Sprint(op, " ", half), func(t *testing.T) {
				t.Parallel()
				s := testshop.OnOwnRedis(t, 1)
				d := newDraw(t, s, 10, 3)
				closes := "UPDATE sales SET closes_at = now() + make_interval(secs => $2) WHERE id = $1"
				require.NoError(t, s.Exec(t, closes, d.entries, 3600))
				if half == catalog.DrawEntries {
					d.requireOperated(t, op, half, d.entries)
				}
				require.NoError(t, s.Exec(t, closes, d.entries, -1))
				o := d.rank(t)
				if half == catalog.DrawGoods {
					d.requireOperated(t, op, half, d.goods)
				}
				now := d.find(t)
				if now.State == draws.Over {
					d.requireBothEnded(t)
					return
				}
				if now.Paused {
					require.Zero(t, offer(t, o))
					_, err := s.Catalog.Resume(t.Context(), d.goods)
					require.NoError(t, err)
				}
				testkit.Eventually(t, testshop.Soon, "each unit is offered", func() bool {
					offer(t, o)
					return s.Left(t, d.goods) == 0
				})
				testwork.Fulfil(t, s)
				_, err := s.Catalog.PublishPending(t.Context())
				require.NoError(t, err)
				testwork.RequireUnbroken(t, s, d.goods)
			})
		}
	}
}

// Nobody enters for goods that end before their entries.
func TestEntriesEndWithGoods(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 1, 1)
	require.NoError(t, s.Exec(t, "UPDATE sales SET closes_at = now() + interval '1 hour' WHERE id = $1", d.entries))
	d.requireOperated(t, catalog.OpEnd, catalog.DrawGoods, d.goods)
	d.requireBothEnded(t)
}

// requireOperated does the operation, which is refused with what to do if that is the rule.
func (d *drawn) requireOperated(t *testing.T, op catalog.Operation, half catalog.Half, sale uuid.UUID) {
	t.Helper()
	err := operate(d.Shop)[op](t.Context(), sale)
	if catalog.RuleOf(op, half).Effect == catalog.Refused {
		require.ErrorAs(t, err, new(*reservation.IllegalTransitionError))
		return
	}
	require.NoError(t, err)
}

func (d *drawn) requireBothEnded(t *testing.T) {
	t.Helper()
	for _, sale := range []uuid.UUID{d.goods, d.entries} {
		shown, err := d.Catalog.Show(t.Context(), sale)
		require.NoError(t, err)
		require.Equal(t, reservation.StateEnded, shown.Sale.State)
	}
	require.Equal(t, reservation.Ended, d.Ask(t, d.entries, "late").Verdict, "nobody enters for goods that have ended")
}

// archived ends a sale and its entries, and returns the files of both: that of the goods first.
func archived(t *testing.T, s *testshop.Shop, goods, entries uuid.UUID) (files []string) {
	t.Helper()
	_, err := s.Catalog.End(t.Context(), goods)
	require.NoError(t, err)
	testwork.FulfilAll(t, s)
	testwork.ReleaseUnits(t, s)
	a, err := archive.New(t.Context(), archive.Config{Catalog: s.Catalog, Dir: t.TempDir(), Logger: s.Logger})
	require.NoError(t, err)
	defer a.Close()
	for _, sale := range []uuid.UUID{goods, entries} {
		shown, err := s.Catalog.Show(t.Context(), sale)
		require.NoError(t, err)
		require.NoError(t, s.Catalog.Retire(t.Context(), sale, shown.Epoch, shown.Revision))
		done, err := a.Sale(t.Context(), sale)
		require.NoError(t, err)
		files = append(files, done.Path)
	}
	return files
}

// brokenIn returns the promises that are broken in files.
func brokenIn(t *testing.T, s *testshop.Shop, files []string) (promises []string) {
	t.Helper()
	for _, file := range files {
		report, err := archive.Audit(t.Context(), s.Pool, file)
		require.NoError(t, err)
		for _, f := range report.Findings {
			promises = append(promises, f.Promise)
		}
	}
	return slices.Compact(promises)
}

// inOtherDatabase takes files into another database, where no promise is broken.
func inOtherDatabase(t *testing.T, files []string, check func(t *testing.T, other *testshop.Shop)) {
	t.Helper()
	t.Run("in another database", func(t *testing.T) {
		other := testshop.OnOwnRedis(t, 1)
		for _, file := range files {
			_, err := archive.Restore(t.Context(), other.Pool, file)
			require.NoError(t, err)
		}
		check(t, other)
		testwork.RequireUnbroken(t, other, uuid.Nil)
	})
}

// A draw that is archived is the same draw in another database: list, seed, ranks and turns.
func TestArchivedDrawComesBack(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 12, 3, 2)
	offer(t, d.rank(t))
	testwork.FulfilAll(t, s)
	for _, o := range testshop.Rows(t, s.Pool, "SELECT id::text FROM orders WHERE sale_id = $1", d.goods) {
		testwork.EndWindow(t, s.Pool, uuid.MustParse(o))
	}
	require.Equal(t, 5, testwork.Expire(t, s))
	bundle := func(s *testshop.Shop) string {
		var all bytes.Buffer
		d := &drawn{Shop: s, Store: draws.New(s.Pool), goods: d.goods, entries: d.entries, receipts: d.receipts}
		require.NoError(t, d.Leaves(t.Context(), d.goods, &all))
		text, err := json.Marshal(d.verify(t))
		require.NoError(t, err)
		return all.String() + string(text)
	}
	turns := "SELECT row_to_json(o)::text FROM draw_offers AS o ORDER BY item, rank"
	had := testshop.Rows(t, s.Pool, turns)
	require.Len(t, had, 5)
	files := archived(t, s, d.goods, d.entries)
	require.Empty(t, brokenIn(t, s, files))
	before := bundle(s) // it stays in Postgres, too
	inOtherDatabase(t, files, func(t *testing.T, other *testshop.Shop) {
		require.Equal(t, before, bundle(other))
		require.Equal(t, had, testshop.Rows(t, other.Pool, turns))
	})
	back, err := archive.Restore(t.Context(), s.Pool, files[0])
	require.NoError(t, err)
	require.EqualValues(t, 1+1+1+5, back.DrawRows, "the draw, its list, its ranks and its turns")
	require.Equal(t, had, testshop.Rows(t, s.Pool, turns), "they were there")
}

func TestArchiveAuditChecksDraw(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 12, 3, 2)
	d.rank(t)
	require.NoError(t, s.Exec(t, `WITH list AS (UPDATE draw_chunks SET hash = sha256(hash))
		UPDATE draws SET skipped = 1, frozen_at = frozen_at - interval '1 s', seed = sha256(seed)`))
	require.Equal(t, []string{"D1", "D3", "D4", "D5"}, brokenIn(t, s, archived(t, s, d.goods, d.entries)))
}

// An archived waiting list comes back, too.
func TestArchivedWaitingListComesBack(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2")
		l.join(t, "ann", "bob")
		l.expire(t, "h1")
		l.awaitTurns(t, offerer(t, s), "ann offered")
		testwork.FulfilAll(t, s)
		l.expire(t, "ann", "h2")
		was, err := l.Waiter(t.Context(), l.sale.ID, "ann")
		require.NoError(t, err)
		require.Equal(t, draw.Offered, was.Outcome)
		files := archived(t, s, l.sale.ID, l.sale.EntriesID)
		require.Empty(t, brokenIn(t, s, files))
		inOtherDatabase(t, files, func(t *testing.T, other *testshop.Shop) {
			w, err := draws.New(other.Pool).Waiter(t.Context(), l.sale.ID, "ann")
			require.NoError(t, err)
			require.Equal(t, was, w)
		})
	})
}

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
