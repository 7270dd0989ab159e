package testshop

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// NewShardedShop returns a shop with eight partitions on a Redis of its own.
func NewShardedShop(t testing.TB) LostShop {
	t.Helper()
	server := testkit.OwnRedis(t)
	keys := reservation.Keys{Prefix: "test", Partitions: 8}
	return LostShop{NewShopOn(t, testkit.Pool(t), server.URL, keys), server}
}

// OpenSharded opens a sale with several shards and a payment window.
func (s *Shop) OpenSharded(t testing.TB, stock int64, shards int) uuid.UUID {
	t.Helper()
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "test", Stock: stock, PerOrderLimit: 10, PaymentWindow: PaymentWindow, Shards: shards,
	})
	require.NoError(t, err)
	return sale.ID
}

// LayoutOf returns the layout of a sale in Postgres.
func (s *Shop) LayoutOf(t testing.TB, sale uuid.UUID) reservation.Layout {
	t.Helper()
	var partitions, shards int
	require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT partitions, shards FROM sales WHERE id = $1", sale).
		Scan(&partitions, &shards))
	return reservation.LayoutOf(sale, partitions, shards)
}

// RequireShards compares the shards of a sale with each other and with Postgres, which has all orders.
func (s *Shop) RequireShards(t testing.TB, sale uuid.UUID) {
	t.Helper()
	layout := s.LayoutOf(t, sale)
	var stock, sold, epoch, revision, published int64
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"SELECT stock, sold, epoch, revision, published_revision FROM sales WHERE id = $1", sale).
		Scan(&stock, &sold, &epoch, &revision, &published))
	require.Equal(t, revision, published)
	var left, taken, given, got int64
	places, orders := map[int64]string{}, map[uuid.UUID]bool{}
	for shard := range layout.Shards {
		p := layout.Partition(shard)
		fields := s.Rdb.HGetAll(t.Context(), s.Keys.Sale(p, sale)).Val()
		number := func(name string) (n int64) {
			_, err := fmt.Sscan(fields[name], &n)
			require.NoError(t, err, "%s of shard %d: %v", name, shard, fields)
			return n
		}
		require.Equal(t, []int64{epoch, revision}, []int64{number("epoch"), number("revision")}, "shard %d", shard)
		require.Equal(t, layout.Field(shard), fields["shard"])
		require.True(t, s.Rdb.SIsMember(t.Context(), s.Keys.Sales(p), sale.String()).Val())
		for other := range layout.Shards {
			for field, sum := range map[string]*int64{fmt.Sprint("given:", other): &given, fmt.Sprint("got:", other): &got} {
				if fields[field] != "" {
					*sum += number(field)
				}
			}
		}
		var held int64
		for user, text := range s.Rdb.HGetAll(t.Context(), s.Keys.Buyers(p, sale)).Val() {
			require.Equal(t, shard, layout.ShardOf(user), "the shard of %s", user)
			r, _, err := order.ParseReservation(text)
			require.NoError(t, err)
			require.LessOrEqual(t, r.Sequence, number("sequence"))
			require.Empty(t, places[r.Sequence], "who has the place of %s as well", user)
			places[r.Sequence], orders[r.OrderID] = user, true
			held += r.Quantity
		}
		require.Equal(t, number("stock")-number("left"), held, "units taken of shard %d", shard)
		left, taken = left+number("left"), taken+held
	}
	require.GreaterOrEqual(t, given, got)
	require.Equal(t, stock, left+taken+given-got)
	require.Equal(t, sold, taken)
	require.EqualValues(t, len(orders),
		s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1 AND status IN ('confirmed', 'paid')", sale))
	for id := range orders {
		require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE id = $1", id))
	}
	require.Zero(t, s.Count(t, "SELECT count(*) - count(DISTINCT sequence) FROM orders WHERE sale_id = $1 AND status <> 'voided'",
		sale), "no place was given out twice")
}
