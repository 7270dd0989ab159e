package reservation_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

// soldShards makes a sale with a waiting list in two shards, of which each user of the first shard has a unit and none
// is left, and returns how to name users of a shard.
func soldShards(t *testing.T, s *testshop.Shop, units int) (sale reservation.Sale, user func(shard, n int) string) {
	t.Helper()
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "test", Stock: int64(units), PerOrderLimit: 1, Shards: 2, Waitlist: true,
	})
	require.NoError(t, err)
	user = func(shard, n int) string {
		for i := 0; ; i++ {
			name := fmt.Sprint("user-", n, "-", i)
			if created.Layout().ShardOf(name) == shard {
				return name
			}
		}
	}
	for n := range units {
		s.Buy(t, created.ID, user(0, n))
	}
	return created.Sale, user
}

func giveBack(t *testing.T, s *testshop.Shop, sale uuid.UUID, user string) {
	t.Helper()
	results, err := s.Release(t.Context(), []reservation.Release{{
		SaleID: sale, OrderID: s.Ask(t, sale, user).Reservation.OrderID, UserID: user, Quantity: 1,
		Status: order.StatusExpired,
	}})
	require.NoError(t, err)
	require.Equal(t, []reservation.ReleaseResult{reservation.Released}, results)
}

func whose(t *testing.T, s *testshop.Shop, sale reservation.Sale) reservation.WhoseUnits {
	t.Helper()
	found, err := s.LookWhose(t.Context(), []reservation.Sale{sale})
	require.NoError(t, err)
	return found[0].Units[0]
}

// A worker that dies between the calls that move an offered unit leaves it to those who wait, whoever completes it.
func TestOfferedUnitOnItsWayStaysOffered(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	rdb, wire := testshop.Wired(t, testkit.RedisURL(t))
	onTheWay := 0
	for calls := 0; ; calls++ {
		sale, user := soldShards(t, s, 1)
		giveBack(t, s, sale.ID, user(0, 0))
		offers := []reservation.Offer{{OrderID: order.NewOrderID(sale.ID), UserID: user(1, 0)}}
		worker := s.Next(t, rdb)
		wire.Set(testshop.KilledAfter(calls))
		answers, err := worker.Offer(t.Context(), sale, offers)
		wire.Set(nil)
		worker.Close()
		if units := whose(t, s, sale); err != nil && units.Offered+units.ForSale == 0 {
			onTheWay++
		}
		require.NoError(t, s.HelpUnits(t.Context(), sale.ID, sale.Layout(), sale.Epoch))
		require.Zero(t, whose(t, s, sale).ForSale, "after %d calls", calls)
		for shard := range 2 {
			require.NotEqual(t, reservation.Reserved, s.Ask(t, sale.ID, user(shard, 1)).Verdict, "after %d calls", calls)
		}
		again, offerErr := s.Offer(t.Context(), sale, offers)
		require.NoError(t, offerErr)
		require.Contains(t, []reservation.Verdict{reservation.Reserved, reservation.Replayed}, again[0].Verdict)
		if err == nil {
			require.Equal(t, reservation.Reserved, answers[0].Verdict)
			break
		}
	}
	require.Positive(t, onTheWay, "a kill between giving and taking")
}

// An offer that finds no unit is followed by none, also not in another shard that has some: the order of turns holds.
func TestOffersInShardsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale, user := soldShards(t, s, 1)
	giveBack(t, s, sale.ID, user(0, 0))
	reopened, err := s.Reopen(t.Context(), sale, nil)
	require.NoError(t, err)
	require.True(t, reopened)
	require.Equal(t, reservation.WhoseUnits{ForSale: 1}, whose(t, s, sale))
	// It is in the first shard, for everybody, and not moved for an offer.
	key := s.Keys.Sale(sale.Layout().Partition(0), sale.ID)
	require.NoError(t, s.Rdb.HSet(t.Context(), key, "quiet_since_ms", 0).Err())
	var offers []reservation.Offer
	for _, shard := range []int{1, 0} {
		offers = append(offers, reservation.Offer{OrderID: order.NewOrderID(sale.ID), UserID: user(shard, 2)})
	}
	answers, err := s.Offer(t.Context(), sale, offers)
	require.NoError(t, err)
	require.Equal(t, []reservation.Verdict{reservation.SoldOut, reservation.SoldOut},
		[]reservation.Verdict{answers[0].Verdict, answers[1].Verdict})
	require.Equal(t, reservation.WhoseUnits{ForSale: 1}, whose(t, s, sale))
}

// offer has a worker offer units to users, if the sale has a waiting list.
func (r *shardRun) offer(ctx context.Context) {
	var offers []reservation.Offer
	for range rapid.IntRange(1, 3).Draw(r.T, "offers") {
		offers = append(offers, reservation.Offer{OrderID: order.NewOrderID(r.sale.ID), UserID: r.user()})
	}
	r.through(func(worker *testshop.Shop, sound bool) {
		before := r.now()
		answers, err := worker.Offer(ctx, reservation.Sale{ID: r.sale.ID}, offers)
		if err != nil {
			require.False(r.T, sound, "%v", err)
			return
		}
		own := before[r.sale.Layout().ShardOf(offers[0].UserID)]
		_, holds := own.holders[offers[0].UserID]
		has := own.left > 0 && (own.offers || !own.quiet) || own.left == 0 && before.offered() > 0
		if sound && has && !holds && before.moving() == 0 && !slices.ContainsFunc(before, shardNow.isPaused) {
			require.Equal(r.T, reservation.Reserved, answers[0].Verdict, "%+v", before)
			r.done["offered"]++
		}
		for i, a := range answers[1:] {
			require.False(r.T, a.Verdict == reservation.Reserved && answers[i].Verdict == reservation.SoldOut, "their order")
		}
	})
}

func (r *shardRun) reopen(ctx context.Context) {
	r.through(func(worker *testshop.Shop, sound bool) {
		if !r.sale.Waitlist {
			return
		}
		if _, err := worker.Reopen(ctx, r.sale, nil); sound {
			require.NoError(r.T, err)
			require.Zero(r.T, r.now().offered())
		}
	})
}

func offersOf(sale uuid.UUID, item string, users ...string) (offers []reservation.Offer) {
	for _, user := range users {
		offers = append(offers, reservation.Offer{OrderID: order.NewOrderID(sale), UserID: user, Item: item})
	}
	return offers
}

func verdicts(
	t *testing.T, s *testshop.Shop, sale uuid.UUID, offers []reservation.Offer,
) (words []reservation.Verdict) {
	t.Helper()
	answers, err := s.Offer(t.Context(), reservation.Sale{ID: sale}, offers)
	require.NoError(t, err)
	require.Len(t, answers, len(offers))
	for i, a := range answers {
		words = append(words, a.Verdict)
		if a.Reservation.OrderID != uuid.Nil {
			require.Equal(t, offers[i].OrderID, a.Reservation.OrderID)
		}
	}
	return words
}

func TestOffersTakeUnitsInTheirOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 2).ID
	require.NoError(t, s.Redis.HSet(t.Context(), s.Store.Keys.Sale(0, sale), "state", "offers").Err())
	require.Equal(t, reservation.OffersOnly, s.Ask(t, sale, "eve").Verdict)

	offers := offersOf(sale, "", "ann", "bob", "cid", "dan")
	require.Equal(t, []reservation.Verdict{
		reservation.Reserved, reservation.Reserved, reservation.SoldOut, reservation.SoldOut,
	}, verdicts(t, s, sale, offers))
	require.Equal(t, []reservation.Verdict{
		reservation.Replayed, reservation.Replayed, reservation.SoldOut, reservation.SoldOut,
	}, verdicts(t, s, sale, offers))

	_, err := s.Release(t.Context(), []reservation.Release{{
		SaleID: sale, OrderID: offers[0].OrderID, UserID: "ann", Quantity: 1, Status: order.StatusExpired,
	}})
	require.NoError(t, err)
	require.Equal(t, []reservation.Verdict{
		reservation.OrderEnded, reservation.Replayed, reservation.Reserved, reservation.SoldOut,
	}, verdicts(t, s, sale, offers), "the first offer was made, and is over")
	require.Equal(t, []reservation.Verdict{reservation.Replayed, reservation.SoldOut}, verdicts(t, s, sale, offers[2:]))
	require.Len(t, s.Events(t, 0), 3)
}

func TestOffersOfItems(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenItems(t, 4, reservation.Item{Code: "m", Stock: 1}, reservation.Item{Code: "l", Stock: 2}).ID
	require.NoError(t, s.Redis.HSet(t.Context(), s.Store.Keys.Sale(0, sale), "state", "offers").Err())
	offers := append(offersOf(sale, "m", "ann", "bob"), offersOf(sale, "l", "cid", "dan")...)
	require.Equal(t, []reservation.Verdict{
		reservation.Reserved, reservation.SoldOut, reservation.Reserved, reservation.Reserved,
	}, verdicts(t, s, sale, offers), "items are sold out each by itself")
	for _, item := range []string{"", "xl"} {
		_, err := s.Offer(t.Context(), reservation.Sale{ID: sale}, offersOf(sale, item, "eve"))
		require.ErrorContains(t, err, fmt.Sprintf("no item %q", item))
	}
}

func TestOffersAreRefusedWhole(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 9)
	offer := func(offers []reservation.Offer) error {
		_, err := s.Offer(t.Context(), reservation.Sale{ID: sale}, offers)
		return err
	}
	require.Error(t, offer(nil))
	require.Error(t, offer(make([]reservation.Offer, order.MaxPerMessage+1)))
	_, err := s.Offer(t.Context(), reservation.Sale{ID: uuid.Must(uuid.NewV7())}, offersOf(sale, "", "ann"))
	require.ErrorIs(t, err, reservation.ErrSaleNotFound)

	key := s.Store.Keys.Sale(0, sale)
	require.NoError(t, offer(offersOf(sale, "", "ann")))
	require.NoError(t, s.Redis.HSet(t.Context(), key, "epoch", "2").Err())
	require.ErrorIs(t, offer(offersOf(sale, "", "bob")), reservation.ErrUnavailable, "the stock is another one")
	require.NoError(t, offer(offersOf(sale, "", "bob")), "the next call knows the new epoch")

	require.NoError(t, s.Redis.HSet(t.Context(), s.Store.Keys.Buyers(0, sale), "cid", "?").Err())
	require.ErrorIs(t, offer(offersOf(sale, "", "dan", "cid")), reservation.ErrReservationDamaged)
	require.NoError(t, s.Redis.HSet(t.Context(), key, "sequence", "1").Err())
	require.ErrorIs(t, offer(offersOf(sale, "", "eve")), reservation.ErrLostSale, "Redis was set back")
}
