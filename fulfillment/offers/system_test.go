//go:build system

package offers_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/draws"
	"stampede/reservation/order"
)

// A worker that dies at any step of a draw leaves a draw that the next one finishes: with the same list, and one order
// for each offer.
func TestDrawIsFinishedAfterCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.DrawPortion, crashpoint.DrawFrozen, crashpoint.DrawListed, crashpoint.DrawSeeded,
		crashpoint.DrawRanked, crashpoint.BeforeOffer, crashpoint.AfterOffer, crashpoint.BeforeOfferCommit,
		crashpoint.AfterOffer + ":2",
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 1)
			d := newDraw(t, s, 700, 500)
			await := func(state draws.State) {
				t.Helper()
				testkit.Eventually(t, time.Minute, "the draw is "+string(state), func() bool { return d.find(t).State == state })
			}
			victim := s.Process(t, "worker")
			if point == crashpoint.DrawSeeded {
				victim = s.Process(t, "beacon", d.goods.String(), strconv.Itoa(testshop.BeaconRound), testshop.BeaconSignature)
			}
			victim.Setenv(crashpoint.Env, point)
			switch point {
			case crashpoint.DrawPortion, crashpoint.DrawFrozen, crashpoint.DrawListed:
				victim.Start()
				victim.WaitKilled(time.Minute)
				require.Equal(t, draws.Freezing, d.find(t).State)
			case crashpoint.DrawSeeded:
				stop := testwork.Work(t, testwork.Config(t, s))
				await(draws.Frozen)
				stop()
				d.moveToRound(t)
				victim.Start()
				victim.WaitKilled(time.Minute)
				require.Equal(t, draws.Frozen, d.find(t).State)
			default:
				victim.Start()
				await(draws.Frozen)
				d.seed(t)
				victim.WaitKilled(time.Minute)
			}
			successor := s.Process(t, "worker")
			successor.Start()
			testkit.Eventually(t, time.Minute, "the list is frozen", func() bool { return !d.find(t).FrozenAt.IsZero() })
			if d.find(t).SeededAt.IsZero() {
				d.seed(t)
			}
			testkit.Eventually(t, time.Minute, "all units are offered", func() bool { return d.find(t).Offered == 500 })
			s.AwaitConfirmed(t, 700+500)
			testwork.AwaitRest(t, s)
			testkit.Eventually(t, time.Minute, "all changes are published", func() bool {
				return s.Count(t, "SELECT count(*) FROM sales WHERE published_revision < revision") == 0
			})
			successor.Stop()
			require.Len(t, d.verify(t).Offers, 500)
			require.Zero(t, s.Count(t, `SELECT count(*) FROM draw_offers AS o WHERE NOT EXISTS (
				SELECT FROM orders WHERE sale_id = o.sale_id AND id = o.order_id AND status = 'confirmed')`))
			require.EqualValues(t, 500, s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1", d.goods))
			testwork.RequireUnbroken(t, s, uuid.Nil)
		})
	}
}

// A worker that dies between two steps of an offer leaves a list that the next one goes on with: each has one unit, by
// place.
func TestWaitingListGoesOnAfterCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.BeforeOffer, crashpoint.BeforeOfferCommit} {
		t.Run(point, func(t *testing.T) {
			forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
				l := newList("h1", "h2")
				l.join(t, "ann", "bob", "cid")
				testwork.FulfilAll(t, s)
				victim := s.Process(t, "worker")
				victim.Setenv(crashpoint.Env, point)
				victim.Start()
				testwork.EndWindow(t, s.Pool, l.orderOf(t, l.sale.ID, "h1"), l.orderOf(t, l.sale.ID, "h2"))
				victim.WaitKilled(time.Minute)
				require.Empty(t, l.turns(t))
				successor := s.Process(t, "worker")
				successor.Start()
				testkit.Eventually(t, time.Minute, "both units are offered", func() bool { return len(l.turns(t)) == 2 })
				testwork.AwaitRest(t, s)
				successor.Stop()
				require.Equal(t, []string{"ann offered", "bob offered"}, l.turns(t))
				require.EqualValues(t, 2, s.Count(t, `SELECT count(*) FROM draw_offers AS o JOIN orders AS made
				ON made.sale_id = o.sale_id AND made.id = o.order_id AND made.status = 'confirmed'`))
				require.EqualValues(t, 4, s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1", l.sale.ID))
				testwork.RequireUnbroken(t, s, uuid.Nil)
			})
		})
	}
}

// Redis is lost before the list is frozen, and again while units are offered, some of which return. Each unit goes to
// the next rank, once.
func TestDrawOutlivesLossOfRedis(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 2200, 1100)
	d.receipts = map[string]order.Receipt{user(0): d.receipts[user(0)], user(7): d.receipts[user(7)]}
	await := func(what string, is func(draws.Draw) bool) {
		t.Helper()
		testkit.Eventually(t, time.Minute, what, func() bool { return is(d.find(t)) })
	}
	testwork.FulfilAll(t, s)
	s.Flush(t)
	for range 2 {
		s.Process(t, "worker").Start()
	}
	await("the list is frozen", func(d draws.Draw) bool { return d.State == draws.Frozen })
	require.Equal(t, int64(2200), d.find(t).Entries)
	d.seed(t)
	await("some units are offered", func(d draws.Draw) bool { return d.Offered > 0 })
	s.Flush(t)
	returned := testshop.Rows(t, s.Pool, "SELECT id::text FROM orders WHERE sale_id = $1 ORDER BY id LIMIT 20", d.goods)
	for _, id := range returned {
		testwork.EndWindow(t, s.Pool, uuid.MustParse(id))
	}
	testkit.Eventually(t, time.Minute, "all units have an order again", func() bool {
		return s.Count(t, "SELECT sold FROM sales WHERE id = $1", d.goods) == 1100 &&
			s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1 AND status = 'expired'", d.goods) == int64(len(returned))
	})
	testwork.AwaitRest(t, s)
	testwork.RequireUnbroken(t, s, uuid.Nil)
	offered := d.find(t).Offered
	require.GreaterOrEqual(t, offered, int64(1100+len(returned)))
	require.Len(t, d.verify(t).Offers, int(offered))
}
