package testshop

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// Token is the token of the rebuilds in tests.
const Token = "token"

// Flush deletes everything in Redis. It is for shops on a Redis of their own.
func (s *Shop) Flush(t testing.TB) {
	t.Helper()
	require.NoError(t, s.Rdb.FlushAll(t.Context()).Err())
}

// Lose deletes a sale from Redis, and returns a function that restores it.
func (s *Shop) Lose(t testing.TB, sale uuid.UUID) (bringBack func()) {
	t.Helper()
	dumps := map[string]string{}
	for _, key := range []string{s.Keys.Sale(0, sale), s.Keys.Buyers(0, sale)} {
		dumps[key] = s.Rdb.Dump(t.Context(), key).Val()
		require.NotEmpty(t, dumps[key])
		require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
	}
	return func() {
		for key, dump := range dumps {
			require.NoError(t, s.Rdb.Restore(t.Context(), key, 0, dump).Err())
		}
	}
}

func (s *Shop) SaleInRedis(t testing.TB, sale uuid.UUID) map[string]string {
	t.Helper()
	fields, err := s.Rdb.HGetAll(t.Context(), s.Keys.Sale(0, sale)).Result()
	require.NoError(t, err)
	return fields
}

// RequireSound compares sales, orders, events and Redis with each other.
func (s *Shop) RequireSound(t testing.TB) {
	t.Helper()
	require.Zero(t, s.Count(t, BrokenLogs))
	require.Zero(t, s.Count(t, `SELECT count(*) FROM sales AS s
		WHERE sold <> (SELECT coalesce(sum(quantity), 0) FROM orders WHERE sale_id = s.id AND status IN ('confirmed',
		'paid'))`))
	rows, err := s.Pool.Query(t.Context(), "SELECT id, stock - sold, epoch, revision, published_revision FROM sales")
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var sale uuid.UUID
		var left, epoch, revision, published int64
		require.NoError(t, rows.Scan(&sale, &left, &epoch, &revision, &published))
		fields := s.SaleInRedis(t, sale)
		require.Equal(t, fmt.Sprint(left), fields["left"], "units left of %s", sale)
		require.Equal(t, fmt.Sprint(epoch), fields["epoch"])
		require.Equal(t, fmt.Sprint(revision), fields["revision"])
		require.Equal(t, revision, published)
	}
	require.NoError(t, rows.Err())
}

// RequireShards compares the shards of a sale with each other and with Postgres, which has all orders.
func (s *Shop) RequireShards(t testing.TB, sale uuid.UUID) {
	t.Helper()
	layout := s.Layout(t, sale)
	var stock, sold, epoch, revision, published int64
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"SELECT stock, sold, epoch, revision, published_revision FROM sales WHERE id = $1", sale).
		Scan(&stock, &sold, &epoch, &revision, &published))
	require.Equal(t, revision, published)
	stocks := map[string]int64{"": stock} // of the sale, and of each item by its letter
	rows, _ := s.Pool.Query(t.Context(), "SELECT item, stock FROM sale_items WHERE sale_id = $1", sale)
	var letter string
	_, err := pgx.ForEachRow(rows, []any{&letter, &stock}, func() error { stocks[letter] = stock; return nil })
	require.NoError(t, err)
	found, given, got, taken := map[string]int64{}, map[string]int64{}, map[string]int64{}, int64(0)
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
			addUnits(given, fields[fmt.Sprint("given:", other)])
			addUnits(got, fields[fmt.Sprint("got:", other)])
		}
		held := map[string]int64{}
		for user, text := range s.Rdb.HGetAll(t.Context(), s.Keys.Buyers(p, sale)).Val() {
			require.Equal(t, shard, layout.ShardOf(user), "the shard of %s", user)
			r, _, err := order.ParseReservation(text)
			require.NoError(t, err)
			require.LessOrEqual(t, r.Sequence, number("sequence"))
			require.Empty(t, places[r.Sequence], "who has the place of %s as well", user)
			places[r.Sequence], orders[r.OrderID] = user, true
			held[""] += r.Quantity
			for item, units := range r.Lines.Each() {
				held[order.ItemLetter(item)] += units
			}
		}
		taken += held[""]
		for letter := range stocks {
			of := strings.TrimSuffix("."+letter, ".")
			require.GreaterOrEqual(t, number("left"+of), int64(0))
			require.Equal(t, number("stock"+of)-number("left"+of), held[letter], "units taken of shard %d %s", shard, letter)
			found[letter] += number("stock" + of)
		}
	}
	for letter, stock := range stocks {
		moving := given[letter] - got[letter]
		if letter == "" && len(stocks) > 1 { // the totals are of the items
			for _, units := range given {
				moving += units
			}
			for _, units := range got {
				moving -= units
			}
		}
		require.GreaterOrEqual(t, moving, int64(0), letter)
		require.Equal(t, stock, found[letter]+moving, "the stock of %q", letter)
	}
	require.Equal(t, sold, taken)
	require.EqualValues(t, len(orders),
		s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1 AND is_live(status)", sale))
	for id := range orders {
		require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE id = $1", id))
	}
	require.Zero(t, s.Count(t, "SELECT count(*) - count(DISTINCT sequence) FROM orders WHERE sale_id = $1 AND status <> 'voided'",
		sale), "no place was given out twice")
}

// addUnits adds a total of lua/give.lua to sums by the letters of the items; that of a sale without items to "".
func addUnits(sums map[string]int64, total string) {
	if n, err := strconv.ParseInt(total, 10, 64); err == nil {
		sums[""] += n
		return
	}
	for item, units := range order.Lines(total).Each() {
		sums[order.ItemLetter(item)] += units
	}
}

// SoldOutShop returns a shop on its own Redis that remembers its sale as sold out: ann has the only unit.
func SoldOutShop(t testing.TB) (*Shop, uuid.UUID) {
	t.Helper()
	s := NewShopOn(t, Options{Redis: testkit.Client(t, testkit.OwnRedis(t).URL)})
	sale := s.Open(t, 1)
	s.Buy(t, sale, "ann")
	s.RememberSoldOut(t, sale)
	return s, sale
}

// RememberSoldOut waits until the shop refuses buyers without a call of Redis.
func (s *Shop) RememberSoldOut(t testing.TB, sale uuid.UUID) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "the sale is remembered as sold out", func() bool {
		before := ScriptCalls(t, s.Rdb)
		require.Equal(t, reservation.SoldOut, s.Ask(t, sale, "loser").Verdict)
		return ScriptCalls(t, s.Rdb) == before
	})
}

// ScriptCalls returns the number of scripts that Redis has run.
func ScriptCalls(t testing.TB, rdb redis.UniversalClient) int {
	t.Helper()
	calls := 0
	stats, err := rdb.InfoMap(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for _, section := range stats {
		if line := section["cmdstat_evalsha"]; line != "" {
			_, err := fmt.Sscanf(line, "calls=%d,", &calls)
			require.NoError(t, err)
		}
	}
	return calls
}

// ClusterShop is a shop on a Redis Cluster of its own, with partitions on each master.
type ClusterShop struct {
	*Shop
	Cluster *localserver.Cluster
}

func NewClusterShop(t testing.TB) ClusterShop {
	t.Helper()
	cluster := testkit.OwnCluster(t)
	keys := reservation.Keys{Prefix: "test", Partitions: 8}
	return ClusterShop{NewShopOn(t, Options{RedisURL: cluster.URL, Keys: keys}), cluster}
}

// master returns the index of the master that has a partition, which must have had no failover.
func (s ClusterShop) master(t testing.TB, partition int) int {
	t.Helper()
	node, err := s.Rdb.(*redis.ClusterClient).MasterForKey(t.Context(), s.Keys.Server(partition))
	require.NoError(t, err)
	for i, one := range s.Cluster.Nodes {
		if one.Addr() == node.Options().Addr {
			return i
		}
	}
	t.Fatalf("no node has the address %s of the master of partition %d", node.Options().Addr, partition)
	return 0
}

// PartitionApart returns a partition on another master than the partition.
func (s ClusterShop) PartitionApart(t testing.TB, from int) int {
	t.Helper()
	for p := range s.Keys.Partitions {
		if s.master(t, p) != s.master(t, from) {
			return p
		}
	}
	t.Fatal("all partitions are on one master")
	return 0
}

// Freeze suspends the master of a partition and its replica, so that the partition has no server until thaw is called.
func (s ClusterShop) Freeze(t testing.TB, partition int) (thaw func()) {
	t.Helper()
	master := s.master(t, partition)
	nodes := []*localserver.Redis{s.Cluster.Nodes[master], s.Cluster.Nodes[master+len(s.Cluster.Nodes)/2]}
	for _, node := range nodes {
		node.Freeze()
	}
	return func() {
		for _, node := range nodes {
			node.Thaw()
		}
	}
}

// Fate is what happens to a call of a script.
type Fate int

const (
	Passes     Fate = iota
	Lost            // it does not leave
	Unanswered      // its answer is lost
	Late            // it takes a few milliseconds
)

var errWire = errors.New("the connection is gone")

// Wire is the network between an ingress and Redis, for the scripts that change a sale or count its shards.
type Wire struct {
	mu    sync.Mutex
	next  func() Fate // nil if all pass
	calls [][]any     // the arguments of all calls, also of lost ones: any of them may arrive late
}

// Wired returns a client of the server at the URL, and its wire.
func Wired(t testing.TB, url string) (*redis.Client, *Wire) {
	t.Helper()
	rdb, w := testkit.Client(t, url), &Wire{}
	rdb.AddHook(testkit.Hook(w.process))
	return rdb, w
}

func (w *Wire) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	args := cmd.Args()
	if cmd.Name() != "evalsha" || strings.HasSuffix(args[3].(string), ":server") {
		return next(ctx, cmd)
	}
	switch w.send(args) {
	case Lost:
		cmd.SetErr(errWire)
		return errWire
	case Unanswered:
		_ = next(ctx, cmd)
		cmd.SetErr(errWire)
		return errWire
	case Late:
		retry.Pause(time.Duration(rand.IntN(int(3*time.Millisecond))), ctx.Done())
	}
	return next(ctx, cmd)
}

func (w *Wire) send(args []any) Fate {
	w.mu.Lock()
	defer w.mu.Unlock()
	call := slices.Clone(args)
	for i, arg := range call {
		if text, ok := arg.(*string); ok { // of a call that is used again
			call[i] = *text
		}
	}
	w.calls = append(w.calls, call)
	if w.next == nil {
		return Passes
	}
	return w.next()
}

// Set sets the fate of the next calls.
func (w *Wire) Set(next func() Fate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = next
}

// Calls returns all calls so far.
func (w *Wire) Calls() [][]any {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.calls)
}

// KilledAfter is the fate of the calls of a process that is killed after n of them.
func KilledAfter(n int) func() Fate {
	return func() Fate {
		if n--; n >= 0 {
			return Passes
		}
		return Lost
	}
}

// Losing is the fate of the calls if these are lost, or their answers, in turns.
func Losing(which ...int) func() Fate {
	call := 0
	return func() Fate {
		call++
		switch at := slices.Index(which, call); {
		case at < 0:
			return Passes
		case at%2 == 0:
			return Unanswered
		default:
			return Lost
		}
	}
}

// Forget drops the calls of an earlier sale.
func (w *Wire) Forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = nil
}

// Repeat sends a call late. It has no effect if Redis has dropped the script meanwhile.
func Repeat(t require.TestingT, rdb redis.UniversalClient, call []any) {
	if err := rdb.Do(context.Background(), call...).Err(); !redis.HasErrorPrefix(err, "NOSCRIPT") {
		require.NoError(t, err, "%v", call)
	}
}
