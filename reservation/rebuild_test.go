package reservation_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func heldBy(user string, r order.Reservation) reservation.Holder {
	return reservation.Holder{User: user, Reservation: r, Epoch: r.Epoch}
}

func TestRetriesAfterRebuildReturnFirstAnswer(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 10)
	request := reservation.Request{Sale: sale.ID, User: "ann", Quantity: 2, IdempotencyKey: "click-1"}
	first, err := s.Reserve(t.Context(), request)
	require.NoError(t, err)
	require.EqualValues(t, 1, first.Reservation.Epoch)
	bob, lost := s.Ask(t, sale.ID, "bob").Reservation, s.Ask(t, sale.ID, "lost").Reservation
	key := s.Events(t, 0)[0].KeyFingerprint

	ann := heldBy("ann", first.Reservation)
	ann.KeyFingerprint = key
	rebuild(t, s, sale.Sale, 2, ann, heldBy("bob", bob))
	require.EqualValues(t, 7, s.Left(t, sale.ID))

	for _, ingress := range []*testshop.Shop{s, s.Next(t, s.Rdb)} {
		again, err := ingress.Reserve(t.Context(), request)
		require.NoError(t, err)
		require.Equal(t, reservation.Answer{Verdict: reservation.Replayed, Reservation: first.Reservation}, again,
			"the same key, the same order")
		request.Quantity++
		reused, err := ingress.Reserve(t.Context(), request)
		require.NoError(t, err)
		require.Equal(t, reservation.KeyReused, reused.Verdict)
		request.Quantity--
		require.Equal(
			t, reservation.Answer{Verdict: reservation.AlreadyPurchased, Reservation: bob}, ingress.Ask(t, sale.ID, "bob"),
		)
	}
	found, err := s.FindReserved(t.Context(), bob.OrderID, "bob")
	require.NoError(t, err)
	require.Equal(t, bob.ReservedAt, found.ReservedAt)
	_, err = s.FindReserved(t.Context(), lost.OrderID, "lost")
	require.ErrorIs(t, err, order.ErrNotFound)

	second := s.Ask(t, sale.ID, "lost").Reservation
	require.Equal(
		t, []int64{2, 4}, []int64{second.Epoch, second.Sequence}, "the user of a lost order may buy again",
	)
	require.Equal(t, reservation.Answer{Verdict: reservation.AlreadyPurchased, Reservation: second},
		s.Ask(t, sale.ID, "lost"))
	require.EqualValues(t, 2, s.Events(t, 0)[3].Epoch)
}

func TestClosedSaleIsUnavailable(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 10)
	ann := s.Ask(t, sale.ID, "ann").Reservation
	closed, err := s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	require.Equal(t, reservation.ClosedSale{Sequence: 1, Epoch: 1}, closed)
	closed, err = s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	require.Equal(t, reservation.ClosedSale{Sequence: 1, Epoch: 1, LastToken: testshop.Token}, closed, "a repeat")

	for _, ingress := range []*testshop.Shop{s, s.Next(t, s.Rdb)} {
		refuses(t, ingress, sale.ID, "ann")
		refuses(t, ingress, sale.ID, "bob")
		_, err = ingress.FindReserved(t.Context(), order.NewOrderID(sale.ID), "bob")
		require.ErrorIs(t, err, reservation.ErrUnavailable, "it may exist after the rebuild")
		_, err = ingress.Release(t.Context(), []reservation.Release{{SaleID: sale.ID, OrderID: ann.OrderID, UserID: "ann"}})
		require.ErrorIs(t, err, reservation.ErrUnavailable)
	}
	_, err = s.Pause(t.Context(), sale.ID)
	require.ErrorIs(t, err, catalog.ErrNotInForce)
	require.Len(t, s.Events(t, 0), 1)

	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale.ID)).Err())
	closed, err = s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	require.Zero(t, closed)
	refuses(t, s, sale.ID, "bob")
	refuses(t, s.Next(t, s.Rdb), sale.ID, "bob")
}

func TestOpenRebuiltRequiresClosedSaleAndAllBuyers(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 10)
	ann := heldBy("ann", s.Ask(t, sale.ID, "ann").Reservation)
	ctx := t.Context()
	rebuilt := reservation.Rebuilt{Sale: sale.Sale, Left: 9, Held: 1, LastPlace: 1, Holders: 1, Token: testshop.Token}
	rebuilt.Sale.Epoch, rebuilt.Sale.Revision = 2, 2
	require.NoError(t, s.StageBuyers(ctx, 0, sale.ID, testshop.Token, 2, []reservation.Holder{ann}))
	require.ErrorIs(t, s.OpenRebuilt(ctx, rebuilt), reservation.ErrSaleNotClosed)
	require.Equal(t, reservation.Reserved, s.Ask(t, sale.ID, "bob").Verdict, "the sale is unchanged")

	_, err := s.CloseSale(ctx, sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	for _, holders := range []int64{0, 2} {
		wrong := rebuilt
		wrong.Holders = holders
		require.ErrorIs(t, s.OpenRebuilt(ctx, wrong), reservation.ErrHoldersMissing)
		refuses(t, s, sale.ID, "eve")
	}
	require.NoError(t, s.OpenRebuilt(ctx, rebuilt))
	require.EqualValues(t, 2, s.Ask(t, sale.ID, "cid").Reservation.Epoch)
	require.NoError(t, s.OpenRebuilt(ctx, rebuilt), "a repeat")
	require.EqualValues(t, 8, s.Left(t, sale.ID), "a repeat returns no units")
	require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, sale.ID, "cid").Verdict)

	late := rebuilt
	late.Sale.Epoch = 3
	require.ErrorIs(t, s.OpenRebuilt(ctx, late), reservation.ErrSaleNotClosed, "not closed for this epoch")
}

func TestStageBuyersWritesInPieces(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 10_000)
	s.Buy(t, sale.ID, "ann")
	_, err := s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	const buyers = 5_001
	holders := make([]reservation.Holder, buyers)
	for i := range holders {
		holders[i] = heldBy(fmt.Sprintf("user-%d", i), order.Reservation{
			OrderID: order.NewOrderID(sale.ID), Quantity: 1, Sequence: int64(i + 1),
			ReservedAt: time.UnixMilli(1_000_000).UTC(), Epoch: 1,
		})
	}
	hold := func(some []reservation.Holder) {
		require.NoError(t, s.StageBuyers(t.Context(), 0, sale.ID, testshop.Token, 2, some))
	}
	hold(nil)
	hold(holders[:3_000])
	hold(holders[2_500:]) // some of them again
	ttl, err := s.Rdb.TTL(t.Context(), s.Keys.Staged(0, sale.ID, testshop.Token)).Result()
	require.NoError(t, err)
	require.Positive(t, ttl, "staged buyers expire")

	rebuilt := reservation.Rebuilt{
		Sale: sale.Sale, Left: 10_000 - buyers, Held: buyers, LastPlace: buyers, Holders: buyers, Token: testshop.Token,
	}
	rebuilt.Sale.Epoch, rebuilt.Sale.Revision = 2, 2
	require.NoError(t, s.OpenRebuilt(t.Context(), rebuilt))
	require.EqualValues(t, buyers, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale.ID)).Val())
	require.EqualValues(t, -1, s.Rdb.TTL(t.Context(), s.Keys.Buyers(0, sale.ID)).Val())
	for _, i := range []int{0, 999, 1000, 2_999, 3_000, buyers - 1} {
		require.Equal(t, holders[i].Reservation, s.Ask(t, sale.ID, holders[i].User).Reservation)
	}
	require.EqualValues(t, buyers+1, s.Ask(t, sale.ID, "next").Reservation.Sequence)
}

func TestMarkVerifiedRejectsChangedServer(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: h.client()})
	sale := s.Sale(t, 10).ID
	s.Buy(t, sale, "ann")
	h.catchUp(h.atSecond, h.atFirst)
	require.NoError(t, s.DistrustFor(t.Context(), 0, testshop.Token))
	state, err := s.Inspect(t.Context(), 0)
	require.NoError(t, err)
	h.promote(h.atSecond)
	h.move(h.atFirst, h.atSecond)
	require.ErrorIs(t, s.MarkVerified(t.Context(), 0, state, testshop.Token), reservation.ErrServerChanged)
	refuses(t, s, sale, "bob")

	// The same process in a later term is another server.
	state, err = s.Inspect(t.Context(), 0)
	require.NoError(t, err)
	h.follow(h.atSecond, h.atFirst)
	h.promote(h.atSecond)
	require.ErrorIs(t, s.MarkVerified(t.Context(), 0, state, testshop.Token), reservation.ErrServerChanged)
	refuses(t, s, sale, "bob")
}

// An ingress that has seen nothing refuses the server, too.
func TestRedisBehindSeenSequenceIsDistrusted(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	other := s.Next(t, s.Rdb)
	sale := s.Sale(t, 100)
	for _, user := range []string{"ann", "bob", "cid"} {
		s.Buy(t, sale.ID, user)
	}
	require.EqualValues(t, 4, other.Ask(t, sale.ID, "dan").Reservation.Sequence)
	// As on a replica that lacks the last reservation.
	set := func(sequence int) {
		require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale.ID), "sequence", sequence).Err())
	}
	set(3)
	require.EqualValues(t, 4, s.Ask(t, sale.ID, "eve").Reservation.Sequence, "this ingress has seen no later sequence")
	set(2)
	refuses(t, s, sale.ID, "fay")
	refuses(t, other, sale.ID, "fay")
	refuses(t, s.Next(t, s.Rdb), sale.ID, "fay")
	state, err := s.Inspect(t.Context(), 0)
	require.NoError(t, err)
	require.Equal(t, []bool{false, true}, []bool{state.Known, state.Recorded})
	require.Len(t, s.Events(t, 0), 5)

	// Sequences seen in the last epoch do not count in the new one: they may be lost permanently.
	rebuild(t, s, sale.Sale, 2)
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	for i, ingress := range []*testshop.Shop{s, other} {
		require.EqualValues(t, 3+i, ingress.Ask(t, sale.ID, fmt.Sprintf("new-%d", i)).Reservation.Sequence)
	}
}

func TestSoldOutMemoryEndsWithServerAndEpoch(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(s *testshop.Shop, sale reservation.Sale){
		"server distrusted": func(s *testshop.Shop, _ reservation.Sale) {
			require.NoError(t, s.Distrust(t.Context(), 0))
		},
		"sale rebuilt": func(s *testshop.Shop, sale reservation.Sale) { rebuild(t, s, sale, 2) },
		"sale closed": func(s *testshop.Shop, sale reservation.Sale) {
			_, err := s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, testkit.OwnRedis(t).URL)})
			sale := s.Sale(t, 1)
			s.Buy(t, sale.ID, "ann")
			ingress := s.Next(t, s.Rdb)
			ingress.RememberSoldOut(t, sale.ID)
			change(s, sale.Sale)
			changed := time.Now()
			for {
				asked := time.Now()
				a, err := ingress.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "bob", Quantity: 1})
				if err != nil || a.Verdict == reservation.Reserved {
					break
				}
				require.Less(t, asked.Sub(changed), 3*time.Second, "the answer is still sold out")
			}
		})
	}
}

func TestReleaseReturnsResultOfEach(t *testing.T) {
	t.Parallel()
	s := testshop.NewShopOn(t, testshop.Options{Store: reservation.StoreOptions{BatchMax: 2}})
	one, two := s.Sale(t, 5), s.Sale(t, 5)
	release := func(sale uuid.UUID, user string) reservation.Release {
		return reservation.Release{SaleID: sale, OrderID: s.Ask(t, sale, user).Reservation.OrderID, UserID: user}
	}
	a, b, c, d := release(one.ID, "ann"), release(two.ID, "ann"), release(one.ID, "bob"), release(one.ID, "cid")
	never := reservation.Release{SaleID: two.ID, OrderID: uuid.New(), UserID: "ann"}
	unknown := reservation.Release{SaleID: uuid.New(), OrderID: uuid.New(), UserID: "ann"} // not a version 7
	got, err := s.Release(t.Context(), []reservation.Release{never, a, unknown, b, c, d, a})
	require.NoError(t, err)
	require.Equal(t, []reservation.ReleaseResult{
		reservation.ReleaseNotHeld, reservation.Released, reservation.ReleaseUnknownSale, reservation.Released,
		reservation.Released, reservation.Released, reservation.ReleaseNotHeld,
	}, got)
	require.Equal(t, []int64{5, 5}, []int64{s.Left(t, one.ID), s.Left(t, two.ID)})

	e := release(one.ID, "eve")
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, one.ID), "left", 5).Err())
	got, err = s.Release(t.Context(), []reservation.Release{e})
	require.NoError(t, err)
	require.Equal(t, []reservation.ReleaseResult{reservation.ReleaseDamaged}, got)
}

// Only one of many concurrent first users verifies the server, and never a second time.
func TestFirstUserVerifiesPartitionOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	var opened atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		ingress := s.Next(t, s.Rdb)
		wg.Go(func() {
			sale, err := ingress.Create(t.Context(), reservation.Terms{Name: "n", Stock: 1, PerOrderLimit: 1})
			if err != nil {
				return
			}
			a, err := ingress.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
			if err == nil && a.Verdict == reservation.Reserved {
				opened.Add(1)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 8, opened.Load())
	state, err := s.Inspect(t.Context(), 0)
	require.NoError(t, err)
	var runID, replicationID string
	require.NoError(
		t, s.Pool.QueryRow(
			t.Context(), "SELECT run_id, replication_id FROM redis_servers WHERE partition = 0",
		).Scan(&runID, &replicationID),
	)
	require.Equal(t, []string{state.RunID, state.ReplicationID}, []string{runID, replicationID})

	// After a crash between the row and the record only a worker verifies it: Redis may have lost everything.
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Server(0)).Err())
	sale := s.Sale(t, 1)
	refuses(t, s, sale.ID, "ann")
	require.Zero(t, s.Rdb.Exists(t.Context(), s.Keys.Server(0), s.Keys.Sale(0, sale.ID)).Val())
}

// An event is appended only for a reservation that the user holds.
func TestAppendAddsOnlyCurrentReservations(t *testing.T) {
	t.Parallel()
	rdb, keys := testkit.Redis(t), testkit.Keys(t)
	store := reservation.NewStore(rdb, keys, reservation.StoreOptions{Logger: testkit.Logger(t)})
	t.Cleanup(store.Close)
	sale := uuid.New()
	held := order.OrderReserved{OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "ann", Quantity: 1, Epoch: 1}
	require.NoError(
		t, rdb.HSet(t.Context(), keys.Buyers(0, sale), "ann", order.CompactID(held.OrderID)+" 1 7 1a0c2d3e4f5@1").Err(),
	)
	former := held
	former.OrderID = order.NewOrderID(sale)
	notHeld := held
	notHeld.UserID = "bob"
	added, err := store.AppendReserved(t.Context(), 0, sale, []order.OrderReserved{former, held, notHeld})
	require.NoError(t, err)
	require.Equal(t, []bool{false, true, false}, added)
	entries, err := rdb.XRange(t.Context(), keys.Orders(0), "-", "+").Result()
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, "ann\n"+order.CompactID(held.OrderID)+" 1 7 1a0c2d3e4f5@1", entries[0].Values["payload"])
	require.Equal(t, order.CompactID(held.OrderID), entries[0].Values["_watermill_message_uuid"])
}
