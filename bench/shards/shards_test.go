package shards

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/internal/connect"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestMain(m *testing.M) {
	rig.Main(m, "shards", "redis/go-redis", "jackc/pgx")
}

// partitions is how many there are in each turn, so that candidates differ only in their shards.
const partitions = 8

// The figures.
const (
	refused                                 = "refused"
	counts, gives, takes, moved             = "counts", "gives", "takes", "moved"
	all50, all99, last50, last99, perSecond = "all, p50", "all, p99", "last, p50", "last, p99", "orders/s"
)

// perCall is how many buyers are in each call of the script, and callsPerSlice how many calls are made for a candidate
// before the next one has its turn: this machine is not equally fast for long.
const perCall, callsPerSlice = 64, 32

// candidate is a sale of BenchmarkCost. With items each buyer wants one unit of two of them.
type candidate struct{ shards, items int }

var candidates = []candidate{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {1, 5}, {4, 5}}

func (c candidate) name() string {
	if c.items == 0 {
		return strconv.Itoa(c.shards)
	}
	return fmt.Sprintf("%d, %d items", c.shards, c.items)
}

// together is the only candidate of BenchmarkCost: the sales are measured in slices of one turn.
const together = "together"

// BenchmarkCost calls the reserve script with equal batches, on each shard in turn.
func BenchmarkCost(b *testing.B) {
	results := rig.Compare(b,
		rig.Candidate{Name: together, Turn: func(b *testing.B, _ int) rig.Values { return costs(b) }})
	t := rig.Table{
		Title: "What an order costs Redis",
		Note: fmt.Sprintf("CPU time of the process of Redis for an order, %d buyers in each call, one connection, all "+
			"shards on this one Redis. With items each buyer gets two of them. The sales take turns of %d calls. Medians of "+
			"%d rounds, with the least and the greatest; the ratio is computed in each round.", perCall, callsPerSlice, b.N),
		Head: []string{"shards", "µs an order", "compared with one shard"},
	}
	for _, c := range candidates {
		one := candidate{1, c.items}
		t.Rows = append(t.Rows, []string{
			c.name(), results.Of(together, c.name()).Format(rig.Ratio),
			results.Ratio(together, c.name(), together, one.name()).Format(rig.Ratio),
		})
	}
	rig.Put(t)
	results.Report(b, together, "8", "µs")
}

// openSale opens a sale, and returns it with a client of its own.
func openSale(b *testing.B, shop *rig.Shop, stock int64, c candidate) (*reservation.Store, catalog.CountedSale) {
	b.Helper()
	store := newStore(b, shop, nil)
	terms := reservation.Terms{Name: "a sale", Stock: stock, PerOrderLimit: 2, Shards: c.shards}
	for i := range c.items {
		code := strconv.Itoa(i)
		terms.Items = append(terms.Items, reservation.Item{Code: code, Name: code, Stock: stock})
		terms.Stock = stock * int64(i+1)
	}
	sale, err := catalog.New(shop.Pool, store).Create(b.Context(), terms)
	require.NoError(b, err)
	return store, sale
}

func newStore(b *testing.B, shop *rig.Shop, hook redis.Hook) *reservation.Store {
	b.Helper()
	rdb, err := connect.Ingress(shop.RedisURL)
	require.NoError(b, err)
	b.Cleanup(func() { _ = rdb.Close() })
	if hook != nil {
		rdb.AddHook(hook)
	}
	store := reservation.NewStore(rdb, shop.Keys(partitions), reservation.StoreOptions{})
	b.Cleanup(store.Close)
	return store
}

func costs(b *testing.B) rig.Values {
	shop := rig.Open(b)
	defer shop.Close()
	require.NoError(b, lua.Reserve.Load(b.Context(), shop.Redis).Err())
	slicesOfEach := rig.Scale(b, 100, 2)
	calls := make([][][]any, len(candidates))
	for i, c := range candidates {
		calls[i] = makeCalls(b, shop, c, slicesOfEach*callsPerSlice)
	}
	used := make([]float64, len(candidates))
	for slice := range slicesOfEach {
		for place := range candidates {
			i := (place + slice) % len(candidates)
			before := cpuOfRedis(b, shop)
			for _, args := range calls[i][slice*callsPerSlice : (slice+1)*callsPerSlice] {
				require.NoError(b, shop.Redis.Do(b.Context(), args...).Err())
			}
			used[i] += cpuOfRedis(b, shop) - before
		}
	}
	values := rig.Values{}
	for i, c := range candidates {
		values[c.name()] = used[i] * 1e6 / float64(len(calls[i])*perCall)
	}
	return values
}

// makeCalls opens a sale and makes n calls for its shards in turn.
func makeCalls(b *testing.B, shop *rig.Shop, c candidate, n int) (calls [][]any) {
	b.Helper()
	_, sale := openSale(b, shop, int64(2*n*perCall), c)
	keys, layout := shop.Keys(partitions), sale.Layout()
	metadata := order.ReservedMetadataPrefix(sale.ID, 1, c.items > 0)
	users, next := make([][]string, c.shards), 0
	for len(calls) < n {
		shard := len(calls) % c.shards
		for ; len(users[shard]) < perCall; next++ {
			user := "user-" + strconv.Itoa(next)
			owner := layout.ShardOf(user)
			users[owner] = append(users[owner], user)
		}
		p := layout.Partition(shard)
		args := []any{
			"evalsha", lua.Reserve.Hash(), 4, keys.Sale(p, sale.ID), keys.Buyers(p, sale.ID), keys.Orders(p),
			keys.Ended(p, sale.ID), "1", "0", metadata,
		}
		for i, user := range users[shard][:perCall] {
			quantity := "1"
			if c.items > 0 {
				units := make([]int64, c.items)
				units[i%c.items], units[(i+1)%c.items] = 1, 1
				quantity = string(order.MakeLines(units))
			}
			args = append(args, user, order.CompactID(order.NewOrderID(sale.ID)), "-", quantity)
		}
		users[shard] = users[shard][perCall:]
		calls = append(calls, args)
	}
	return calls
}

// cpuOfRedis is the CPU time that Redis has used, in seconds, to the microsecond.
func cpuOfRedis(b *testing.B, shop *rig.Shop) (seconds float64) {
	b.Helper()
	info, err := shop.Redis.InfoMap(b.Context(), "cpu").Result()
	require.NoError(b, err)
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		n, err := strconv.ParseFloat(info["CPU"][name], 64)
		require.NoError(b, err)
		seconds += n
	}
	return seconds
}

// crowd is who buys in a sale.
type crowd struct {
	name   string
	shards int
	// favorite is true if all buyers belong to one shard.
	favorite bool
}

const (
	oneShard, eightShards, favorite = "one shard", "8 shards", "8 shards, all buyers of one"
	// buying is how many buyers wait for their answers at a time.
	buying = 256
	// lastUnits are looked at by themselves.
	lastUnits = 100
)

// BenchmarkSellOut lets as many buyers as there are units buy from two ingresses.
func BenchmarkSellOut(b *testing.B) {
	crowds := []crowd{{oneShard, 1, false}, {eightShards, 8, false}, {favorite, 8, true}}
	var compared []rig.Candidate
	for _, c := range crowds {
		compared = append(compared,
			rig.Candidate{Name: c.name, Turn: func(b *testing.B, _ int) rig.Values { return sellOut(b, c) }})
	}
	results := rig.Compare(b, compared...)
	stock := rig.Scale(b, 10_000, 1000)
	calls := rig.Table{
		Title: "The calls of a sell-out",
		Note: fmt.Sprintf("%s units and as many buyers, %d at a time, at two ingresses in one process. A count asks all "+
			"shards, and is counted once for each. Medians of %d rounds, with the least and the greatest.",
			rig.Count(float64(stock)), buying, b.N),
		Head: []string{"", refused, counts, gives, takes, "units moved"},
	}
	times := rig.Table{
		Title: "The times of a sell-out",
		Note: fmt.Sprintf("From the request to the answer, of all buyers and of the last %d who got a unit, without HTTP. "+
			"All shards share one Redis here, so that they are not faster together. The same rounds.", lastUnits),
		Head: []string{"", perSecond, "all, ms: p50", "p99", "last, ms: p50", "p99"},
	}
	for _, c := range crowds {
		calls.Rows = append(calls.Rows,
			append([]string{c.name}, results.Ranges(rig.Count, c.name, refused, counts, gives, takes, moved)...))
		times.Rows = append(times.Rows, append([]string{c.name, results.Of(c.name, perSecond).Format(rig.Count)},
			results.Ranges(rig.Ratio, c.name, all50, all99, last50, last99)...))
	}
	rig.Put(calls)
	rig.Put(times)
	results.Report(b, eightShards, last99, "ms-last-p99")
}

func sellOut(b *testing.B, c crowd) rig.Values {
	shop := rig.Open(b)
	defer shop.Close()
	stock := rig.Scale(b, 10_000, 1000)
	_, sale := openSale(b, shop, int64(stock), candidate{shards: c.shards})
	var sent callCounts
	stores := []*reservation.Store{newStore(b, shop, &sent), newStore(b, shop, &sent)}
	users := make(chan string, stock)
	for i := 0; len(users) < stock; i++ {
		if user := "user-" + strconv.Itoa(i); !c.favorite || sale.Layout().ShardOf(user) == 0 {
			users <- user
		}
	}
	close(users)
	type answered struct{ began, ended time.Time }
	var mu sync.Mutex
	var bought []answered
	var losers atomic.Int64
	var buyers sync.WaitGroup
	began := time.Now()
	for range buying {
		store := stores[rand.IntN(len(stores))]
		buyers.Go(func() {
			for user := range users {
				this := answered{began: time.Now()}
				answer, err := store.Reserve(b.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
				this.ended = time.Now()
				switch {
				case err != nil:
					b.Error(err)
				case answer.Verdict == reservation.Reserved:
					mu.Lock()
					bought = append(bought, this)
					mu.Unlock()
				default:
					losers.Add(1)
				}
			}
		})
	}
	buyers.Wait()
	took := time.Since(began)
	require.Len(b, bought, stock, "every buyer gets a unit")
	slices.SortFunc(bought, func(x, y answered) int { return x.ended.Compare(y.ended) })
	percentile := func(buyers []answered, p int) float64 {
		var times []time.Duration
		for _, a := range buyers {
			times = append(times, a.ended.Sub(a.began))
		}
		slices.Sort(times)
		return rig.InMillis(times[(len(times)-1)*p/100])
	}
	last := bought[len(bought)-lastUnits:]
	return rig.Values{
		refused: float64(losers.Load()), counts: float64(sent.counts.Load()), gives: float64(sent.gives.Load()),
		takes: float64(sent.takes.Load()), moved: float64(unitsMoved(b, shop, sale)),
		perSecond: float64(stock) / took.Seconds(),
		all50:     percentile(bought, 50), all99: percentile(bought, 99),
		last50: percentile(last, 50), last99: percentile(last, 99),
	}
}

func unitsMoved(b *testing.B, shop *rig.Shop, sale catalog.CountedSale) (units int64) {
	b.Helper()
	for shard := range sale.Shards {
		key := shop.Keys(partitions).Sale(sale.Layout().Partition(shard), sale.ID)
		fields, err := shop.Redis.HGetAll(b.Context(), key).Result()
		require.NoError(b, err)
		for field, value := range fields {
			if strings.HasPrefix(field, "got:") {
				n, err := strconv.ParseInt(value, 10, 64)
				require.NoError(b, err)
				units += n
			}
		}
	}
	return units
}

// callCounts counts the calls of the scripts that move units, which differ in the number of their arguments.
type callCounts struct{ counts, gives, takes atomic.Int64 }

func (c *callCounts) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (c *callCounts) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	const countArgs, giveArgs, reserveKeys = 6, 8, 4
	return func(ctx context.Context, cmd redis.Cmder) error {
		switch args := cmd.Args(); {
		case cmd.Name() != "evalsha" || args[2] == reserveKeys || len(args) < countArgs:
		case len(args) == countArgs:
			c.counts.Add(1)
		case len(args) == giveArgs:
			c.gives.Add(1)
		case len(args)%2 == 1:
			c.takes.Add(1)
		}
		return next(ctx, cmd)
	}
}

func (c *callCounts) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
