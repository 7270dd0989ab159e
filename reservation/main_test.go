package reservation_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/reservation"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// shop is a store and a catalog on servers of their own key prefix and database.
type shop struct {
	*reservation.Store
	*reservation.Catalog
	t    *testing.T
	rdb  *redis.Client
	keys reservation.Keys
	pool *pgxpool.Pool
}

func newShop(t *testing.T) *shop {
	t.Helper()
	return newShopOn(t, testkit.Redis(t), testkit.Keys(t), reservation.StoreOptions{})
}

func newShopOn(t *testing.T, rdb *redis.Client, keys reservation.Keys, o reservation.StoreOptions) *shop {
	t.Helper()
	o.Logger = testkit.Logger(t)
	store := reservation.NewStore(rdb, keys, o)
	t.Cleanup(store.Close)
	pool := testkit.Pool(t)
	return &shop{store, reservation.NewCatalog(pool, store), t, rdb, keys, pool}
}

// next is another ingress on the same servers.
func (s *shop) next(rdb *redis.Client) *shop {
	s.t.Helper()
	store := reservation.NewStore(rdb, s.keys, reservation.StoreOptions{Logger: testkit.Logger(s.t)})
	s.t.Cleanup(store.Close)
	return &shop{store, reservation.NewCatalog(s.pool, store), s.t, rdb, s.keys, s.pool}
}

// sale opens a sale of so many units.
func (s *shop) sale(stock int64) reservation.CountedSale {
	s.t.Helper()
	sale, err := s.Create(s.t.Context(), reservation.Terms{Name: "a sale", Stock: stock, PerOrderLimit: 2})
	require.NoError(s.t, err)
	return sale
}

func (s *shop) buy(sale uuid.UUID, user string) reservation.Answer {
	s.t.Helper()
	a, err := s.Reserve(s.t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
	require.NoError(s.t, err)
	return a
}

func (s *shop) left(sale uuid.UUID) string {
	s.t.Helper()
	left, err := s.rdb.HGet(s.t.Context(), s.keys.Sale(s.keys.Partition(sale), sale), "left").Result()
	require.NoError(s.t, err)
	return left
}

func (s *shop) events(sale uuid.UUID) []redis.XMessage {
	s.t.Helper()
	entries, err := s.rdb.XRange(s.t.Context(), s.keys.Orders(s.keys.Partition(sale)), "-", "+").Result()
	require.NoError(s.t, err)
	return entries
}

// ownClient is a client of a server of the test's own.
func ownClient(t *testing.T, url string) *redis.Client {
	t.Helper()
	o, err := redis.ParseURL(url)
	require.NoError(t, err)
	rdb := redis.NewClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// commandsServed counts the commands that a Redis has served, but for the asking.
func commandsServed(t *testing.T, rdb *redis.Client) (n int) {
	t.Helper()
	stats, err := rdb.Info(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for line := range strings.Lines(stats) {
		name, rest, _ := strings.Cut(line, ":calls=")
		if rest != "" && name != "cmdstat_info" {
			var calls int
			_, err := fmt.Sscanf(rest, "%d,", &calls)
			require.NoError(t, err)
			n += calls
		}
	}
	return n
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}
