package offers_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
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
		l.rebuild(t)
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
