// Package testshop is a shop for tests: sales, buyers and orders on a database and a Redis key prefix of their own. It
// runs no worker; package testwork does.
package testshop

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/clocks"
	"stampede/internal/dev/localserver"
	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
)

// Shop is everything that a sale needs, on real servers.
type Shop struct {
	*reservation.Store
	*catalog.Catalog
	Pool     *pgxpool.Pool
	Rdb      redis.UniversalClient
	Blocking redis.UniversalClient // nil if the shop was made with a client
	Keys     reservation.Keys
	Server   *localserver.Redis // the shop's own Redis, if it has one
}

// Options say where a shop is. The zero value is a shop on the servers that all tests share.
type Options struct {
	Pool     *pgxpool.Pool         // default: a database of its own
	Redis    redis.UniversalClient // for all commands, in place of RedisURL
	RedisURL string                // default: the Redis that all tests share
	Keys     reservation.Keys      // default: a prefix of its own, with one partition
	Store    reservation.StoreOptions
}

// NewShop returns a shop on the servers that all tests share.
func NewShop(t testing.TB) *Shop {
	t.Helper()
	return NewShopOn(t, Options{})
}

// NewShardedShop returns a shop with eight partitions on the servers that all tests share.
func NewShardedShop(t testing.TB) *Shop {
	t.Helper()
	keys := testkit.Keys(t)
	keys.Partitions = 8
	return NewShopOn(t, Options{Keys: keys})
}

// OnOwnRedis returns a shop on a Redis of its own, which can be lost.
func OnOwnRedis(t testing.TB, partitions int) *Shop {
	t.Helper()
	server := testkit.OwnRedis(t)
	s := NewShopOn(t, Options{RedisURL: server.URL, Keys: reservation.Keys{Prefix: "test", Partitions: partitions}})
	s.Server = server
	return s
}

// OnOwnPostgres returns a shop on a Postgres for this test only, which it may stop and restart.
func OnOwnPostgres(t testing.TB) (*Shop, *localserver.Postgres) {
	t.Helper()
	server := testkit.OwnPostgres(t)
	return NewShopOn(t, Options{Pool: testkit.PoolAt(t, server.URL, 8)}), server
}

// OnClockedPostgres returns a shop on a Postgres whose clock set sets ahead of those of Redis and of this process.
func OnClockedPostgres(t testing.TB) (s *Shop, set func(ahead time.Duration)) {
	t.Helper()
	server, set := testkit.ClockedPostgres(t)
	return NewShopOn(t, Options{Pool: testkit.PoolAt(t, server.URL, 8)}), set
}

// NewShopOn returns a shop where the options say.
func NewShopOn(t testing.TB, o Options) *Shop {
	t.Helper()
	s := &Shop{Pool: o.Pool, Rdb: o.Redis, Keys: o.Keys}
	if s.Pool == nil {
		s.Pool = testkit.Pool(t)
	}
	if s.Keys.Prefix == "" {
		s.Keys = testkit.Keys(t)
	}
	if s.Rdb == nil {
		if o.RedisURL == "" {
			o.RedisURL = testkit.RedisURL(t)
		}
		if o.Store.WaitMax == 0 {
			o.Store.WaitMax = time.Minute // many buyers on a busy machine wait long
		}
		s.Rdb, s.Blocking = testkit.Control(t, o.RedisURL), testkit.Blocking(t, o.RedisURL)
	}
	return s.sell(t, o.Store)
}

// sell adds the store and the catalog to the shop.
func (s *Shop) sell(t testing.TB, o reservation.StoreOptions) *Shop {
	o.Logger = testkit.Logger(t)
	s.Store = reservation.NewStore(s.Rdb, s.Keys, o)
	t.Cleanup(s.Store.Close)
	s.Catalog = catalog.New(s.Pool, s.Store)
	return s
}

// Next returns the shop of another ingress on the same servers.
func (s *Shop) Next(t testing.TB, rdb redis.UniversalClient) *Shop {
	t.Helper()
	next := *s
	next.Rdb = rdb
	return next.sell(t, reservation.StoreOptions{})
}

// PaymentWindow is the payment window of payable sales.
const PaymentWindow = 10 * time.Minute

func (s *Shop) create(t testing.TB, terms reservation.Terms) catalog.CountedSale {
	t.Helper()
	terms.Name, terms.PerOrderLimit = "test", 10
	sale, err := s.Create(t.Context(), terms)
	require.NoError(t, err)
	return sale
}

// Sale opens a sale with this stock.
func (s *Shop) Sale(t testing.TB, stock int64) catalog.CountedSale {
	t.Helper()
	return s.create(t, reservation.Terms{Stock: stock})
}

// ShardedSale opens a sale with this stock in so many shards.
func (s *Shop) ShardedSale(t testing.TB, stock int64, shards int) catalog.CountedSale {
	t.Helper()
	return s.create(t, reservation.Terms{Stock: stock, Shards: shards})
}

// Open opens a sale with this stock, and returns its id.
func (s *Shop) Open(t testing.TB, stock int64) uuid.UUID {
	t.Helper()
	return s.Sale(t, stock).ID
}

// OpenPayable opens a sale with a payment window.
func (s *Shop) OpenPayable(t testing.TB, stock int64) uuid.UUID {
	t.Helper()
	return s.create(t, reservation.Terms{Stock: stock, PaymentWindow: PaymentWindow}).ID
}

// OpenSharded opens a sale with several shards and a payment window.
func (s *Shop) OpenSharded(t testing.TB, stock int64, shards int) uuid.UUID {
	t.Helper()
	return s.create(t, reservation.Terms{Stock: stock, PaymentWindow: PaymentWindow, Shards: shards}).ID
}

// OpenItems opens a sale with these items in Redis alone, and returns its definition.
func (s *Shop) OpenItems(t testing.TB, limit int64, items ...reservation.Item) reservation.Sale {
	t.Helper()
	s.Open(t, 1) // verifies the server
	sale := reservation.Sale{ID: uuid.Must(uuid.NewV7()), Epoch: 1, Revision: 1, Partitions: s.Keys.Partitions}
	sale.State, sale.PerOrderLimit, sale.Items = reservation.StateOpen, limit, items
	for _, item := range items {
		sale.Stock += item.Stock
	}
	require.NoError(t, s.OpenShard(t.Context(), sale, 0, 1, sale.Stock))
	return sale
}

// ShardedItems opens a sale with these items in so many shards and a payment window.
func (s *Shop) ShardedItems(t testing.TB, shards int, items ...reservation.Item) catalog.CountedSale {
	t.Helper()
	terms := reservation.Terms{Shards: shards, Items: items, PaymentWindow: PaymentWindow}
	for i := range items {
		items[i].Name = items[i].Code
		terms.Stock += items[i].Stock
	}
	return s.create(t, terms)
}

// LeftItems returns the units left in all shards in Redis of each item of a sale, by letter, and "" for their sum.
func (s *Shop) LeftItems(t testing.TB, sale reservation.Sale) map[string]int64 {
	t.Helper()
	left := map[string]int64{}
	for _, partition := range sale.Layout().All() {
		fields := s.Rdb.HGetAll(t.Context(), s.Keys.Sale(partition, sale.ID)).Val()
		for place := range len(sale.Items) + 1 {
			letter, name := "", "left"
			if place > 0 {
				letter = order.ItemLetter(place - 1)
				name += "." + letter
			}
			n, err := strconv.ParseInt(fields[name], 10, 64)
			require.NoError(t, err, name)
			left[letter] += n
		}
	}
	return left
}

// OpenIn opens a sale in a partition.
func (s *Shop) OpenIn(t testing.TB, partition int, stock int64) uuid.UUID {
	t.Helper()
	for {
		if sale := s.Open(t, stock); s.Keys.Partition(sale) == partition {
			return sale
		}
	}
}

// Attempt sends a purchase with an idempotency key, "" for none.
func (s *Shop) Attempt(t testing.TB, sale uuid.UUID, user string, quantity int64, key string) reservation.Answer {
	t.Helper()
	answer, err := s.Reserve(t.Context(), reservation.Request{
		Sale: sale, User: user, Quantity: quantity, IdempotencyKey: key,
	})
	require.NoError(t, err)
	return answer
}

// Ask sends a purchase of one unit.
func (s *Shop) Ask(t testing.TB, sale uuid.UUID, user string) reservation.Answer {
	t.Helper()
	return s.Attempt(t, sale, user, 1, "")
}

// Buy reserves one unit, and returns the id of the order.
func (s *Shop) Buy(t testing.TB, sale uuid.UUID, user string) uuid.UUID {
	t.Helper()
	answer := s.Ask(t, sale, user)
	require.Equal(t, reservation.Reserved, answer.Verdict)
	return answer.Reservation.OrderID
}

// Crowd lets n users buy one unit each, and returns how many were accepted.
func (s *Shop) Crowd(t testing.TB, sale uuid.UUID, n int) (accepted int) {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			answer, err := s.Reserve(context.Background(),
				reservation.Request{Sale: sale, User: fmt.Sprintf("user-%d", i), Quantity: 1})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if answer.Verdict == reservation.Reserved {
				accepted++
			}
		})
	}
	wg.Wait()
	return accepted
}

func (s *Shop) RequireClosed(t testing.TB, sale uuid.UUID) {
	t.Helper()
	_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: "eve", Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
}

// Left returns the units left in Redis of a sale with one shard, or -1 if it has no such field.
func (s *Shop) Left(t testing.TB, sale uuid.UUID) int64 {
	t.Helper()
	left, err := s.Rdb.HGet(t.Context(), s.Keys.Sale(s.Keys.Partition(sale), sale), "left").Int64()
	if errors.Is(err, redis.Nil) {
		return -1
	}
	require.NoError(t, err)
	return left
}

// Entries are the entries in the stream of a partition.
func (s *Shop) Entries(t testing.TB, partition int) []redis.XMessage {
	t.Helper()
	entries, err := s.Rdb.XRange(t.Context(), s.Keys.Orders(partition), "-", "+").Result()
	require.NoError(t, err)
	return entries
}

// Events are the orders in the stream of a partition.
func (s *Shop) Events(t testing.TB, partition int) []order.OrderReserved {
	t.Helper()
	return Decode(t, s.Entries(t, partition))
}

// Decode returns the orders in entries of a stream.
func Decode(t testing.TB, entries []redis.XMessage) (events []order.OrderReserved) {
	t.Helper()
	for _, entry := range entries {
		msg, err := stream.DecodeEntry(entry.ID, entry.Values, 1)
		require.NoError(t, err)
		held, err := order.DecodeReserved(msg)
		require.NoError(t, err)
		events = append(events, held...)
	}
	return events
}

// Process runs the test binary on this shop, with arguments for the command of its TestMain.
func (s *Shop) Process(t testing.TB, args ...string) *testkit.Cmd {
	t.Helper()
	process := testkit.Command(t, args...)
	process.UseServers(s.Keys)
	if s.Server != nil {
		process.Setenv("REDIS_URL", s.Server.URL)
	}
	return process
}

// Restart restarts Postgres and drops the test's old connections.
func (s *Shop) Restart(t testing.TB, server *localserver.Postgres) {
	t.Helper()
	require.NoError(t, server.Restart(t.Context()))
	s.Pool.Reset()
}

// HoldSale locks the sale's row, so that transactions of the sale wait until the returned one is rolled back.
func (s *Shop) HoldSale(t testing.TB, sale uuid.UUID) pgx.Tx {
	t.Helper()
	hold, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) })
	_, err = hold.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR UPDATE", sale)
	require.NoError(t, err)
	return hold
}

// AwaitWaiting waits until n transactions of the shop's database wait for a lock.
func (s *Shop) AwaitWaiting(t testing.TB, n int64) {
	t.Helper()
	AwaitWaiting(t, s.Pool, n)
}

// AwaitWaiting waits until n transactions of the database wait for a lock.
func AwaitWaiting(t testing.TB, pool *pgxpool.Pool, n int64) {
	t.Helper()
	testkit.Eventually(t, Soon, fmt.Sprintf("%d transactions wait for a lock", n), func() bool {
		return TransactionsWaiting(t, pool) == n
	})
}

// TransactionsWaiting returns the number of transactions of the database that wait for a lock.
func TransactionsWaiting(t testing.TB, pool *pgxpool.Pool) int64 {
	t.Helper()
	return QueryInt(t, pool,
		"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
}

// A round of drand quicknet, of the past, with its signature.
const (
	BeaconRound     = 657413
	BeaconSignature = "b713718a38ae728dfd477991af2822e08d2f305e47718cef9f7848ce4050e7be" +
		"41076862b98fad56e91a6b85b89cd97b"
)

// Clocks are those of a draw in Postgres alone.
func Clocks(ctx context.Context, on pg.Querier) (clocks.Times, error) {
	r, err := pg.ReadClock(ctx, on)
	if err != nil {
		return clocks.Times{}, err
	}
	return clocks.Agree(r)
}

// MoveDrawToRound moves a frozen draw to the time of that round, and what was published of it.
func MoveDrawToRound(t testing.TB, pool *pgxpool.Pool, goods uuid.UUID) {
	t.Helper()
	at := draw.RoundTime(BeaconRound)
	Exec(t, pool, `WITH entries AS (UPDATE sales SET closes_at = $2 FROM draws WHERE id = entries_id AND draws.sale_id = $1),
		published AS (UPDATE sale_events SET data = data || jsonb_build_object('closes_at', $2::timestamptz,
			'frozen_at', $3::timestamptz, 'rounds', ARRAY[$4::bigint]) WHERE sale_id = $1 AND type = 'DrawFrozen')
		UPDATE draws SET frozen_at = $3, round = $4 WHERE sale_id = $1`,
		goods, at.Add(-time.Minute), at.Add(-time.Second), BeaconRound)
}
