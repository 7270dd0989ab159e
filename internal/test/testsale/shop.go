package testsale

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// Shop is a store and a catalog with their own key prefix and database.
type Shop struct {
	*reservation.Store
	*catalog.Catalog
	T     *testing.T
	Redis redis.UniversalClient
	Keys  reservation.Keys
	Pool  *pgxpool.Pool
}

// Token is the token of the rebuilds in tests.
const Token = "token"

func NewShop(t *testing.T) *Shop {
	t.Helper()
	return NewShopOn(t, testkit.Redis(t), testkit.Keys(t), reservation.StoreOptions{})
}

func NewShopOn(t *testing.T, rdb redis.UniversalClient, keys reservation.Keys, o reservation.StoreOptions) *Shop {
	t.Helper()
	o.Logger = testkit.Logger(t)
	store := reservation.NewStore(rdb, keys, o)
	t.Cleanup(store.Close)
	pool := testkit.Pool(t)
	return &Shop{store, catalog.New(pool, store), t, rdb, keys, pool}
}

// Next returns the shop of another ingress on the same servers.
func (s *Shop) Next(rdb redis.UniversalClient) *Shop {
	s.T.Helper()
	store := reservation.NewStore(rdb, s.Keys, reservation.StoreOptions{Logger: testkit.Logger(s.T)})
	s.T.Cleanup(store.Close)
	return &Shop{store, catalog.New(s.Pool, store), s.T, rdb, s.Keys, s.Pool}
}

// Sale opens a sale with this stock.
func (s *Shop) Sale(stock int64) catalog.CountedSale {
	s.T.Helper()
	sale, err := s.Create(s.T.Context(), reservation.Terms{Name: "a sale", Stock: stock, PerOrderLimit: 2})
	require.NoError(s.T, err)
	return sale
}

// NewShardShop returns a shop whose sales can have up to 8 shards.
func NewShardShop(t *testing.T) *Shop {
	t.Helper()
	keys := testkit.Keys(t)
	keys.Partitions = 8
	return NewShopOn(t, testkit.Redis(t), keys, reservation.StoreOptions{})
}

// ShardedSale opens a sale with this stock in so many shards.
func (s *Shop) ShardedSale(stock int64, shards int) catalog.CountedSale {
	s.T.Helper()
	sale, err := s.Create(s.T.Context(),
		reservation.Terms{Name: "a sale", Stock: stock, PerOrderLimit: 5, Shards: shards})
	require.NoError(s.T, err)
	return sale
}

func (s *Shop) Buy(sale uuid.UUID, user string) reservation.Answer {
	s.T.Helper()
	a, err := s.Reserve(s.T.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
	require.NoError(s.T, err)
	return a
}

func (s *Shop) Left(sale uuid.UUID) string {
	s.T.Helper()
	left, err := s.Redis.HGet(s.T.Context(), s.Keys.Sale(s.Keys.Partition(sale), sale), "left").Result()
	require.NoError(s.T, err)
	return left
}

// Entries are what the stream of the sale holds.
func (s *Shop) Entries(sale uuid.UUID) []redis.XMessage {
	s.T.Helper()
	entries, err := s.Redis.XRange(s.T.Context(), s.Keys.Orders(s.Keys.Partition(sale)), "-", "+").Result()
	require.NoError(s.T, err)
	return entries
}

// Events are the orders in the stream of the sale.
func (s *Shop) Events(sale uuid.UUID) (events []order.OrderReserved) {
	s.T.Helper()
	for _, entry := range s.Entries(sale) {
		msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(entry.Values)
		require.NoError(s.T, err)
		held, err := order.DecodeReserved(msg)
		require.NoError(s.T, err)
		events = append(events, held...)
	}
	return events
}

// OwnClient returns a client of the server at the URL, which is closed when the test ends.
func OwnClient(t *testing.T, url string) *redis.Client {
	t.Helper()
	o, err := redis.ParseURL(url)
	require.NoError(t, err)
	o.DialerRetries = 1 // as the clients of package connect: otherwise a refused call takes most of CallTimeout
	rdb := redis.NewClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// Soon returns a context that ends after 20 s.
func Soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}
