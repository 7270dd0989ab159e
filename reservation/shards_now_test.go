package reservation_test

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

// shardNow is one shard in Redis.
type shardNow struct {
	stock, left, revision int64
	quiet                 bool
	state, restocked      string
	given, got            []int64
	holders               map[string]order.Reservation
}

// saleNow is all shards of a sale at one moment.
type saleNow []shardNow

// lookNow reads all shards in one transaction.
func lookNow(t require.TestingT, s *testshop.Shop, sale reservation.Sale) (now saleNow) {
	layout := sale.Layout()
	hashes, buyers := make([]*redis.MapStringStringCmd, layout.Shards), make([]*redis.MapStringStringCmd, layout.Shards)
	var clock *redis.TimeCmd
	_, err := s.Rdb.TxPipelined(context.Background(), func(p redis.Pipeliner) error {
		clock = p.Time(context.Background())
		for shard := range hashes {
			partition := layout.Partition(shard)
			hashes[shard] = p.HGetAll(context.Background(), s.Keys.Sale(partition, sale.ID))
			buyers[shard] = p.HGetAll(context.Background(), s.Keys.Buyers(partition, sale.ID))
		}
		return nil
	})
	require.NoError(t, err)
	for shard := range hashes {
		fields := hashes[shard].Val()
		number := func(name string) int64 {
			n, err := strconv.ParseInt(fields[name], 10, 64)
			if fields[name] != "" {
				require.NoError(t, err)
			}
			return n
		}
		one := shardNow{
			stock: number("stock"), left: number("left"), revision: number("revision"), state: fields["state"],
			restocked: fields["restocked"], holders: map[string]order.Reservation{},
			quiet: clock.Val().UnixMilli()-number("quiet_since_ms") < 1000,
		}
		for other := range layout.Shards {
			one.given = append(one.given, number("given:"+strconv.Itoa(other)))
			one.got = append(one.got, number("got:"+strconv.Itoa(other)))
		}
		for user, text := range buyers[shard].Val() {
			held, _, err := order.ParseReservation(text)
			require.NoError(t, err)
			one.holders[user] = held
		}
		now = append(now, one)
	}
	return now
}

// taken is the number of units that buyers hold.
func (now saleNow) taken() (units int64) {
	for _, shard := range now {
		for held := range maps.Values(shard.holders) {
			units += held.Quantity
		}
	}
	return units
}

// left is the number of units that nobody holds, with those on their way.
func (now saleNow) left() (units int64) {
	for _, shard := range now {
		units += shard.left
	}
	return units + now.moving()
}

// forSale is the number of units that can be sold now.
func (now saleNow) forSale() (units int64) {
	for _, shard := range now {
		if !shard.quiet {
			units += shard.left
		}
	}
	return units + now.moving()
}

// least is the lowest number of units left in a shard.
func (now saleNow) least() int64 {
	return slices.MinFunc(now, func(a, b shardNow) int { return cmp.Compare(a.left, b.left) }).left
}

// moving is the number of units on their way.
func (now saleNow) moving() (units int64) {
	for from, giver := range now {
		for to, taker := range now {
			units += giver.given[to] - taker.got[from]
		}
	}
	return units
}

// requireWhole fails the test unless these shards have this stock together, and no unit twice.
func (now saleNow) requireWhole(t require.TestingT, layout reservation.Layout, stock int64) {
	require.Equal(t, stock, now.left()+now.taken(), "stock = left + taken + on their way: %+v", now)
	places := map[int64]string{}
	for at, shard := range now {
		require.GreaterOrEqual(t, shard.left, int64(0))
		require.Equal(t, shard.stock, shard.left+now[at:at+1].taken(), "shard %d: %+v", at, shard)
		for from, giver := range now {
			require.GreaterOrEqual(t, giver.given[at], shard.got[from], "from %d to %d", from, at)
		}
		for user, held := range shard.holders {
			require.Equal(t, at, layout.ShardOf(user), user)
			require.EqualValues(t, at, (held.Sequence-1)%int64(layout.Shards), user)
			require.Empty(t, places[held.Sequence], "place %d of %s", held.Sequence, user)
			places[held.Sequence] = user
		}
	}
}
