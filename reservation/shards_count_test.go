package reservation_test

import (
	"context"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

// A unit returns to a shard that is counted, and one is sold in a shard that is not yet. Two units were for sale all
// the time, and the count shows one.
func TestOneCountDoesNotProveThatTooLittleIsLeft(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 6, 2)
	first, second := usersOf(sale, 0, 3), usersOf(sale, 1, 3)
	returned := s.Ask(t, sale.ID, first[0]).Reservation.OrderID
	for _, user := range []string{first[1], second[0], second[1]} {
		s.Buy(t, sale.ID, user)
	}
	counted := make(chan struct{})
	var change, count sync.Once
	rdb := testkit.Client(t, testkit.RedisURL(t))
	rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		const ofCount = 6 // arguments
		args := cmd.Args()
		switch isCount := cmd.Name() == "evalsha" && len(args) == ofCount && args[2] == 1; {
		case isCount && args[3] == s.Keys.Sale(sale.Layout().Partition(0), sale.ID):
			defer count.Do(func() { close(counted) })
		case isCount:
			<-counted
			change.Do(func() {
				released, err := s.Release(t.Context(), []reservation.Release{
					{SaleID: sale.ID, OrderID: returned, UserID: first[0], Quantity: 1},
				})
				require.NoError(t, err)
				require.Equal(t, []reservation.ReleaseResult{reservation.Released}, released)
				s.Buy(t, sale.ID, second[2])
			})
		}
		return next(ctx, cmd)
	}))
	answer, err := s.Next(t, rdb).Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: first[2], Quantity: 2})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, answer.Verdict)
	require.Zero(t, shardHas(t, s, sale, 1, "left"), "the change came between the two")
}

// One shard is set back to an earlier state, as no Redis does that keeps its process: its units were sold meanwhile. An
// ingress that has sold later places distrusts it, and from then on nobody sells from it, or hears that nothing is
// left.
func TestSetBackShardSellsNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 8, 2)
	other := s.Next(t, s.Rdb)
	partition := sale.Layout().Partition(0)
	keys := []string{s.Keys.Sale(partition, sale.ID), s.Keys.Buyers(partition, sale.ID)}
	users, others := usersOf(sale, 0, 6), usersOf(sale, 1, 6)
	s.Buy(t, sale.ID, users[0])
	var dumps []string
	for _, key := range keys {
		dump, err := s.Rdb.Dump(t.Context(), key).Result()
		require.NoError(t, err)
		dumps = append(dumps, dump)
	}
	for _, user := range append(others[:4:4], users[1:3]...) {
		s.Buy(t, sale.ID, user)
	}
	for i, key := range keys {
		require.NoError(t, s.Rdb.RestoreReplace(t.Context(), key, 0, dumps[i]).Err())
	}
	before := lookNow(t, s, sale.Sale)
	_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: users[3], Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	for _, ingress := range []*testshop.Shop{s, other} {
		for _, user := range []string{users[4], others[4]} {
			_, err := ingress.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			require.ErrorIs(t, err, reservation.ErrUnavailable, user)
		}
		require.ErrorIs(t, ingress.HelpUnits(t.Context(), sale.ID, sale.Layout(), 1), reservation.ErrUnavailable)
	}
	require.Equal(t, before, lookNow(t, s, sale.Sale))
}

// A shard that forgot what it gave would give the same units again.
func TestShardThatForgotAGiftIsDistrusted(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 8, 2)
	users, ctx := usersOf(sale, 0, 8), t.Context()
	giver := sale.Layout().Partition(1)
	before, err := s.Rdb.Dump(ctx, s.Keys.Sale(giver, sale.ID)).Result()
	require.NoError(t, err)
	for _, user := range users[:5] {
		s.Buy(t, sale.ID, user)
	}
	// The count that shows the gift.
	_, err = s.Reserve(ctx, reservation.Request{Sale: sale.ID, User: users[5], Quantity: 4})
	require.NoError(t, err)
	require.NoError(t, s.Rdb.RestoreReplace(ctx, s.Keys.Sale(giver, sale.ID), 0, before).Err())
	_, err = s.Reserve(ctx, reservation.Request{Sale: sale.ID, User: users[6], Quantity: 4})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	state, err := s.Inspect(ctx, giver)
	require.NoError(t, err)
	require.False(t, state.Known, "its server is distrusted")
}
