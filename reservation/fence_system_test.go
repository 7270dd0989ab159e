//go:build system

package reservation_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// mend ends a cut, and waits until the second server has caught up.
func (h *replicaPair) mend() {
	h.t.Helper()
	require.NoError(h.t, h.atSecond.ConfigSet(h.t.Context(), "masteruser", "").Err())
	require.NoError(h.t, h.atSecond.ConfigSet(h.t.Context(), "masterauth", "").Err())
	h.catchUp(h.atSecond, h.atFirst)
}

// It sells nothing to an ingress that sells all the time, to an idle one and to a new one.
func TestServerWithPossibleLossSellsNothing(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		lose func(h *replicaPair) // points the address to the server that is used afterwards
		kept bool                 // the sale still exists,
		all  bool                 // with all accepted orders
	}{
		"restarted": {func(h *replicaPair) { require.NoError(h.t, h.first.Restart(h.t.Context())) }, true, true},
		"killed": {func(h *replicaPair) {
			h.first.Kill()
			require.NoError(h.t, h.first.Restart(h.t.Context()))
		}, true, true},
		"flushed": {func(h *replicaPair) {
			require.NoError(h.t, h.atFirst.FlushAll(h.t.Context()).Err())
		}, false, false},
		"database flushed": {func(h *replicaPair) {
			require.NoError(h.t, h.atFirst.FlushDB(h.t.Context()).Err())
		}, false, false},
		"replica promoted": {func(h *replicaPair) {
			h.first.Kill()
			resetStats(h.t, h.atSecond) // drop the commands applied as a replica
			h.promote(h.atSecond)
			h.address.Store(h.atSecond.Options().Addr)
		}, true, true},
		"replica promoted while the primary is frozen": {func(h *replicaPair) {
			h.first.Freeze()
			resetStats(h.t, h.atSecond)
			h.promote(h.atSecond)
			h.address.Store(h.atSecond.Options().Addr)
			h.first.Kill()
		}, true, true},
		"former primary promoted again": {func(h *replicaPair) {
			// The first server still has the script loaded, because it has sold before. Orders that it accepts
			// after the promotion of its replica are lost.
			h.promote(h.atSecond)
			h.follow(h.atFirst, h.atSecond)
			resetStats(h.t, h.atFirst)
			h.promote(h.atFirst)
		}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newReplicaPair(t)
			selling := testshop.NewShopOn(t, testshop.Options{Redis: h.client()})
			idle, fresh := selling.Next(t, h.client()), selling.Next(t, h.client())
			sale := selling.Sale(t, 1_000_000).ID
			held := selling.Ask(t, sale, "ann").Reservation
			idle.Buy(t, sale, "bob")
			h.catchUp(h.atSecond, h.atFirst)
			stop := crowd(t, selling, sale)

			tc.lose(h)
			stop()
			now := h.client()
			if tc.kept {
				require.Equal(t, "nothing", appended(t, now))
			} else {
				require.Zero(t, now.Exists(t.Context(), selling.Keys.Orders(0)).Val())
			}
			for _, s := range []*testshop.Shop{selling, idle, fresh} {
				refuses(t, s, sale, "eve")
				_, err := s.Release(t.Context(), []reservation.Release{{SaleID: sale, OrderID: held.OrderID, UserID: "ann"}})
				require.ErrorIs(t, err, reservation.ErrUnavailable)
				_, err = s.FindReserved(t.Context(), order.NewOrderID(sale), "nobody")
				require.ErrorIs(t, err, reservation.ErrUnavailable, "the order may be lost")
				_, err = s.Pause(t.Context(), sale)
				require.ErrorIs(t, err, catalog.ErrNotInForce)
				created, err := s.Create(t.Context(), reservation.Terms{Name: "opens later", Stock: 1, PerOrderLimit: 1})
				require.NoError(t, err)
				refuses(t, s, created.ID, "eve")
			}
			state, err := selling.Inspect(t.Context(), 0)
			require.NoError(t, err)
			require.False(t, state.Known)
			require.Equal(t, tc.kept, state.Recorded)

			if !tc.all {
				return
			}
			// Nothing was lost: Redis runs with appendfsync always, and the replica had caught up.
			testkit.VerifyServer(t, selling.Pool, selling.Store, 0)
			for _, s := range []*testshop.Shop{selling, idle, fresh} {
				_, err := s.Resume(t.Context(), sale)
				require.NoError(t, err)
				require.Equal(t, held, s.Ask(t, sale, "ann").Reservation)
				s.Buy(t, sale, uuid.NewString())
			}
		})
	}
}

// The server still has the script loaded, and the record that it got from the other server.
func TestReturningServerIsUnverified(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: h.client()})
	idle := s.Next(t, h.client())
	sale := s.Sale(t, 100)
	s.Buy(t, sale.ID, "ann")
	idle.Buy(t, sale.ID, "bob")
	h.catchUp(h.atSecond, h.atFirst)

	h.promote(h.atSecond)
	h.move(h.atFirst, h.atSecond)
	refuses(t, s, sale.ID, "eve")
	rebuild(t, s, sale.Sale, 2)
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	s.Buy(t, sale.ID, "ann")

	h.follow(h.atFirst, h.atSecond)
	h.second.Kill()
	resetStats(t, h.atFirst)
	h.promote(h.atFirst)
	h.address.Store(h.atFirst.Options().Addr)
	for _, ingress := range []*testshop.Shop{s, idle, s.Next(t, h.client())} {
		refuses(t, ingress, sale.ID, "eve")
		refuses(t, ingress, sale.ID, "ann")
	}
	require.Equal(t, "nothing", appended(t, h.atFirst))

	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	for _, ingress := range []*testshop.Shop{s, idle} {
		require.EqualValues(t, 2, ingress.Ask(t, sale.ID, uuid.NewString()).Reservation.Epoch)
	}
}

// The process, its record and its script are the same, and the sale's sequence shows no loss.
func TestPromotedPrimaryIsUnverified(t *testing.T) {
	t.Parallel()
	for _, asReplica := range []bool{true, false} {
		t.Run(fmt.Sprintf("used as a replica: %t", asReplica), func(t *testing.T) {
			t.Parallel()
			h := newReplicaPair(t)
			s := testshop.NewShopOn(t, testshop.Options{Redis: h.atFirst})
			sale := s.Sale(t, 100).ID
			s.Buy(t, sale, "ann")
			h.catchUp(h.atSecond, h.atFirst)
			h.promote(h.atSecond)
			h.follow(h.atFirst, h.atSecond)
			if asReplica {
				refuses(t, s, sale, "eve")
			}
			resetStats(t, h.atFirst)
			h.promote(h.atFirst)
			if !asReplica {
				refuses(t, s.Next(t, h.atFirst), sale, "eve") // and distrusts the server for all
			}
			refuses(t, s, sale, "eve")
			require.Equal(t, "nothing", appended(t, h.atFirst))
		})
	}
}

// The ingress was connected to the replica before the promotion.
func TestIngressOnPromotedReplicaSellsNothing(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: h.client()})
	sale := s.Sale(t, 100_000).ID
	s.Buy(t, sale, "ann")
	h.catchUp(h.atSecond, h.atFirst)
	misled := s.Next(t, h.atSecond)
	refuses(t, misled, sale, "eve")
	stop := crowd(t, misled, sale)
	resetStats(t, h.atSecond)
	h.promote(h.atSecond)
	stop()
	require.Equal(t, "nothing", appended(t, h.atSecond))
	require.Equal(t, reservation.Reserved, s.Ask(t, sale, "bob").Verdict, "the primary still sells")
}

func TestHarmlessEventsKeepServerVerified(t *testing.T) {
	t.Parallel()
	for name, happen := range map[string]func(t *testing.T, rdb *redis.Client){
		"first replica connects": func(t *testing.T, rdb *redis.Client) {
			replica := testkit.Client(t, testkit.OwnRedis(t).URL)
			before, err := rdb.InfoMap(t.Context(), "replication").Result()
			require.NoError(t, err)
			(&replicaPair{t: t}).follow(replica, rdb)
			after, err := rdb.InfoMap(t.Context(), "replication").Result()
			require.NoError(t, err)
			require.NotEqual(t, before["Replication"]["master_replid"], after["Replication"]["master_replid"],
				"the replication id changes")
		},
		"scripts flushed": func(t *testing.T, rdb *redis.Client) {
			require.NoError(t, rdb.ScriptFlush(t.Context()).Err())
		},
		"connections killed": func(t *testing.T, rdb *redis.Client) {
			rdb.Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal")
		},
		"another database flushed": func(t *testing.T, rdb *redis.Client) {
			conn := rdb.EphemeralConn()
			defer func() { require.NoError(t, conn.Close()) }()
			require.NoError(t, conn.Select(t.Context(), 1).Err())
			require.NoError(t, conn.FlushDB(t.Context()).Err())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb := testkit.Client(t, testkit.OwnRedis(t).URL)
			s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
			sale := s.Sale(t, 100).ID
			s.Buy(t, sale, "ann")
			happen(t, rdb)
			s.Buy(t, sale, "bob")
			fresh := s.Next(t, rdb)
			fresh.Buy(t, sale, "cid")
			require.NoError(t, rdb.ScriptFlush(t.Context()).Err())
			fresh.Buy(t, sale, "dan")
			require.EqualValues(t, 96, s.Left(t, sale))
		})
	}
}
