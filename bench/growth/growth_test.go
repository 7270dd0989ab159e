package growth

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/httpload"
	"stampede/bench/rig"
	"stampede/internal/retry"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestMain(m *testing.M) { rig.Main(m, "growth") }

// plan is one sale, or several at the same time.
type plan struct {
	// stock is the units of all sales together, and buyers the number of buyers, who each buy one unit
	// once. If both are 0, stock and buyers are unlimited within the duration.
	stock, buyers int
	duration      time.Duration
	connections   int
	workers       int // processes of `stampede work`
	partitions    int
	sales         int
	longIDs       bool // user ids are UUIDs, instead of a word and a number
}

// defaultPlan holds the settings that a series does not vary.
func defaultPlan() plan { return plan{connections: 256, workers: 1, partitions: 1, sales: 1} }

// series varies one setting.
type series struct {
	grows string
	note  string
	at    []int
	vary  func(p *plan, at int)
}

// crowdDuration is how long an unlimited crowd sends requests.
func crowdDuration(b *testing.B) time.Duration {
	return rig.Scale(b, 2*time.Second, 150*time.Millisecond)
}

// BenchmarkGrowthStock sells stocks of growing size until they are sold out.
func BenchmarkGrowthStock(b *testing.B) {
	grow(b, series{
		grows: "units",
		note:  "As many buyers as units, 256 connections, one worker.",
		at:    rig.Scale(b, []int{1000, 10_000, 100_000, 1_000_000}, []int{500, 2000}),
		vary:  func(p *plan, at int) { p.stock, p.buyers = at, at },
	})
}

// BenchmarkGrowthBuyers sends crowds of growing size to the same stock: most buyers find it sold out.
func BenchmarkGrowthBuyers(b *testing.B) {
	stock := rig.Scale(b, 10_000, 500)
	grow(b, series{
		grows: "buyers",
		note: fmt.Sprintf("A stock of %s units, 256 connections, one worker. Costs are for each buyer, winner or loser.",
			rig.Count(float64(stock))),
		at:   rig.Scale(b, []int{10_000, 100_000, 1_000_000}, []int{500, 5000}),
		vary: func(p *plan, at int) { p.stock, p.buyers = stock, at },
	})
}

// BenchmarkGrowthConnections sends requests over a growing number of connections.
func BenchmarkGrowthConnections(b *testing.B) {
	grow(b, series{
		grows: "connections",
		note:  fmt.Sprintf("A closed loop for %v, one worker.", crowdDuration(b)),
		at:    rig.Scale(b, []int{1, 4, 16, 64, 256}, []int{1, 256}),
		vary:  func(p *plan, at int) { p.duration, p.connections = crowdDuration(b), at },
	})
}

// BenchmarkGrowthWorkers shares the orders of one sale among a growing number of processes.
func BenchmarkGrowthWorkers(b *testing.B) {
	grow(b, series{
		grows: "workers",
		note:  fmt.Sprintf("A crowd on 256 connections for %v, on the same cores as the workers.", crowdDuration(b)),
		at:    rig.Scale(b, []int{1, 2, 3, 4}, []int{1, 4}),
		vary:  func(p *plan, at int) { p.duration, p.workers = crowdDuration(b), at },
	})
}

// BenchmarkGrowthPartitions spreads several sales over a growing number of partitions.
func BenchmarkGrowthPartitions(b *testing.B) {
	const sales = 16
	grow(b, series{
		grows: "partitions",
		note: fmt.Sprintf("%d sales at the same time, evenly spread over the partitions; a crowd on 256 connections for %v, "+
			"one worker.", sales, crowdDuration(b)),
		at:   rig.Scale(b, []int{1, 4, 16}, []int{1, 16}),
		vary: func(p *plan, at int) { p.duration, p.sales, p.partitions = crowdDuration(b), sales, at },
	})
}

// BenchmarkGrowthUserIDs sells to buyers with short ids and with UUIDs, which Redis stores with each
// order.
func BenchmarkGrowthUserIDs(b *testing.B) {
	const short, long = 12, 36
	stock := rig.Scale(b, 100_000, 1000)
	grow(b, series{
		grows: "characters of a user id",
		note: fmt.Sprintf("A stock of %s units for as many buyers: `buyer-1`, `buyer-2` and so on with up to %d "+
			"characters, as in all other series, and UUIDs with %d.", rig.Count(float64(stock)), short, long),
		at:   []int{short, long},
		vary: func(p *plan, at int) { p.stock, p.buyers, p.longIDs = stock, stock, at == long },
	})
}

// columns are the figures of a series, in the order of its table.
var columns = []struct {
	figure, head string
	write        func(float64) string
	spread       bool // with the least and the greatest
}{
	{accepted, "accepted/s", rig.Count, true},
	{soldOut, "sold out/s", rig.Count, false},
	{durable, "durable/s", rig.Count, true},
	{p99, "p99, ms", rig.Ratio, false},
	{cpu, "CPU, µs", rig.Ratio, false},
	{serveMemory, "`serve`, MiB", megabytes, false},
	{workMemory, "`work`, MiB", megabytes, false},
	{redisMost, "Redis at most, B", rig.Count, false},
	{redisAfter, "after, B", rig.Count, false},
}

// grow runs the sales of a series in turns and puts the results on the page. Figures that the series
// does not have are left out.
func grow(b *testing.B, s series) {
	b.Helper()
	var candidates []rig.Candidate
	for _, at := range s.at {
		p := defaultPlan()
		s.vary(&p, at)
		candidates = append(candidates, rig.Candidate{
			Name: strconv.Itoa(at),
			Turn: func(b *testing.B, _ int) rig.Values { return run(b, p) },
		})
	}
	results := rig.Compare(b, candidates...)
	table := rig.Table{
		Title: "Growth in " + s.grows, Note: fmt.Sprintf("%s Medians of %d rounds.", s.note, b.N), Head: []string{s.grows},
	}
	for _, at := range s.at {
		table.Rows = append(table.Rows, []string{rig.Count(float64(at))})
	}
	for _, c := range columns {
		measured := false
		for _, at := range s.at {
			measured = measured || results.Of(strconv.Itoa(at), c.figure).N > 0
		}
		if !measured {
			continue
		}
		if c.figure == durable {
			table.Bars = len(table.Head)
		}
		table.Head = append(table.Head, c.head)
		for i, at := range s.at {
			cell := results.Of(strconv.Itoa(at), c.figure)
			if !c.spread {
				table.Rows[i] = append(table.Rows[i], cell.FormatMedian(c.write))
				continue
			}
			table.Rows[i] = append(table.Rows[i], cell.Format(c.write))
		}
	}
	rig.Put(table)
	for _, at := range s.at {
		for _, figure := range []string{accepted, durable, redisAfter} {
			results.Report(b, strconv.Itoa(at), figure, figure)
		}
	}
}

func megabytes(v float64) string { return rig.Count(v / (1 << 20)) }

// The figures of a sale.
const (
	// accepted and durable are orders per second: until the last acceptance, and from the first request
	// until the last order is in Postgres. soldOut is the rate of answers after the last acceptance.
	accepted = "accepted/s"
	soldOut  = "sold out/s"
	durable  = "durable/s"
	// p99 is the latency of accepted requests, in milliseconds.
	p99 = "p99"
	// cpu is microseconds per buyer, with or without an order, of all processes except the load.
	cpu = "CPU"
	// Bytes of Redis per order: at the peak, and when all orders are in Postgres and the streams
	// trimmed.
	redisMost  = "Redis-at-most"
	redisAfter = "Redis-after"
	// The peak memory of all processes of a kind in bytes.
	serveMemory = "serve"
	workMemory  = "work"
)

const (
	hugeStock = 50_000_000
	// saleTimeout bounds a sale until it is sold out, and recordTimeout the time until Postgres has all
	// orders.
	saleTimeout   = 5 * time.Minute
	recordTimeout = 5 * time.Minute
	pollInterval  = 20 * time.Millisecond
)

// run sells to a crowd on its own servers and waits until every order is recorded.
func run(b *testing.B, p plan) rig.Values {
	b.Helper()
	stock := int64(p.stock)
	if stock == 0 {
		stock = hugeStock
	}
	s := rig.Stampede{Partitions: p.partitions, Workers: p.workers}.Start(b, stock)
	defer s.Close()
	keys := s.Shop.Keys(p.partitions)
	sales := []uuid.UUID{s.Sale}
	if p.sales > 1 {
		sales = openSpread(b, s.Shop, keys, p.sales, stock)
	}
	redisPeak := watchMemory(b, s.Shop.Redis)
	before := s.CPU()
	// A crowd continues after the sale is sold out, so the last order can be in Postgres before the
	// last answer.
	var soldOutAt time.Time
	var waiting errgroup.Group
	awaitSold := func(units int64) {
		waiting.Go(func() error {
			have, err := s.Shop.AwaitSold(b.Context(), units, saleTimeout+recordTimeout)
			soldOutAt = time.Now()
			if err == nil && have != units {
				err = fmt.Errorf("%d units are in Postgres, want %d", have, units)
			}
			return err
		})
	}
	if p.stock > 0 {
		awaitSold(int64(min(p.stock, p.buyers)))
	}
	crowd := sendCrowd(b, s, sales, p)
	if p.stock == 0 {
		awaitSold(crowd.Wanted)
	}
	require.NoError(b, waiting.Wait())
	used := s.CPU().Since(before)
	peak := redisPeak()

	orders, buyers := float64(crowd.Wanted), float64(crowd.Wanted+crowd.Others())
	values := rig.Values{
		accepted: orders / crowd.selling.Seconds(), durable: orders / soldOutAt.Sub(crowd.began).Seconds(),
		p99: rig.InMillis(crowd.Percentile(99)),
	}
	if losers := buyers - orders; losers > 0 {
		values[soldOut] = losers / (crowd.Took - crowd.selling).Seconds()
	}
	for role, each := range used.PerOrder(int64(buyers)) {
		if role != rig.Load {
			values[cpu] += each
		}
	}
	trim(b, s.Shop.Redis, keys)
	values[serveMemory], values[workMemory] = peakMemory(b, s.Fronts), peakMemory(b, s.Workers)

	// The sale's share is what deleting its keys frees: Redis's own memory, such as cached scripts,
	// stays.
	s.Kill()
	after, err := idleRedisMemory(b.Context(), s.Shop.Redis)
	require.NoError(b, err)
	s.Close()
	without, err := idleRedisMemory(b.Context(), s.Shop.Redis)
	require.NoError(b, err)
	values[redisMost], values[redisAfter] = float64(peak-without)/orders, float64(after-without)/orders
	return values
}

// crowdAnswers is the answers to a crowd.
type crowdAnswers struct {
	httpload.Answers
	began   time.Time
	selling time.Duration // until the last acceptance
}

func sendCrowd(b *testing.B, s *rig.System, sales []uuid.UUID, p plan) crowdAnswers {
	b.Helper()
	var last atomic.Int64 // time of the last acceptance in Unix nanoseconds
	load := httpload.Load{
		Addrs: []string{s.Fronts[0].Addr}, Connections: p.connections, For: p.duration, Most: uint64(p.buyers),
		Request: purchases(sales, p.longIDs),
		OnAnswer: func(_ uint64, status int, _ []byte) {
			if status == http.StatusAccepted {
				last.Store(time.Now().UnixNano())
			}
		},
	}
	if load.For == 0 {
		load.For = saleTimeout
	}
	crowd := crowdAnswers{began: time.Now()}
	crowd.Answers = s.Measure(load)
	crowd.selling = time.Unix(0, last.Load()).Sub(crowd.began)
	// All refusals are "sold out", and they come only after the sale is sold out.
	require.EqualValues(b, crowd.ByStatus[http.StatusConflict], crowd.Others(), "answers: %s", crowd)
	if p.stock > 0 {
		require.EqualValues(b, min(p.stock, p.buyers), crowd.Wanted, "answers: %s", crowd)
	}
	return crowd
}

// openSpread opens n sales, the same number in each partition. Ids are random, so sales beyond the
// share of a partition are created but not used.
func openSpread(b *testing.B, shop *rig.Shop, keys reservation.Keys, n int, stock int64) []uuid.UUID {
	b.Helper()
	store := reservation.NewStore(shop.Redis, keys, reservation.StoreOptions{Logger: slog.New(slog.DiscardHandler)})
	defer store.Close()
	saleCatalog := catalog.New(shop.Pool, store)
	missing := make([]int, keys.Partitions)
	for p := range missing {
		missing[p] = n / keys.Partitions
	}
	var sales []uuid.UUID
	for len(sales) < n {
		sale, err := saleCatalog.Create(b.Context(), reservation.Terms{Name: "growth", Stock: stock, PerOrderLimit: 1})
		require.NoError(b, err)
		if p := keys.Partition(sale.ID); missing[p] > 0 {
			missing[p]--
			sales = append(sales, sale.ID)
		}
	}
	return sales
}

// purchases builds requests of distinct buyers, to the sales in turn.
func purchases(sales []uuid.UUID, longIDs bool) func(dst []byte, n uint64) []byte {
	var heads []string
	for _, sale := range sales {
		heads = append(heads, rig.PurchaseHead(sale))
	}
	base := uuid.New()
	return func(dst []byte, n uint64) []byte {
		dst = append(dst, heads[n%uint64(len(heads))]...)
		if longIDs {
			user := base
			binary.BigEndian.PutUint64(user[8:], n)
			dst = order.AppendID(dst, user)
		} else {
			dst = strconv.AppendUint(append(dst, "buyer-"...), n, 10)
		}
		return append(dst, rig.PurchaseEnd...)
	}
}

// watchMemory samples the memory of Redis until peak is called, which returns the highest sample.
func watchMemory(b *testing.B, rdb redis.UniversalClient) (peak func() int64) {
	b.Helper()
	ctx, stop := context.WithCancel(b.Context())
	highest := make(chan int64, 1)
	sample := func() int64 {
		bytes, err := redisMemory(b.Context(), rdb)
		if err != nil {
			b.Error(err)
		}
		return bytes
	}
	go func() {
		seen := sample()
		for retry.Pause(pollInterval, ctx.Done()) {
			seen = max(seen, sample())
		}
		highest <- max(seen, sample())
	}()
	return func() int64 {
		stop()
		return <-highest
	}
}

// trim removes what the workers have finished, as they do themselves every ten seconds.
func trim(b *testing.B, rdb redis.UniversalClient, keys reservation.Keys) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), recordTimeout)
	defer cancel()
	for p := range keys.Partitions {
		stream := keys.Orders(p)
		for { // an entry is acknowledged only after its order is in Postgres
			pending, err := rdb.XPending(ctx, stream, reservation.Group).Result()
			require.NoError(b, err)
			if pending.Count == 0 {
				break
			}
			retry.Pause(pollInterval, ctx.Done())
		}
		for {
			answer, err := lua.Trim.Run(ctx, rdb, []string{stream}).Slice()
			require.NoError(b, err)
			if answer[1] == int64(0) {
				break
			}
		}
	}
}

// peakMemory is the sum over all processes (VmHWM), in bytes.
func peakMemory(b *testing.B, processes []*rig.Process) (sum float64) {
	b.Helper()
	for _, p := range processes {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid()))
		require.NoError(b, err)
		_, rest, _ := strings.Cut(string(text), "\nVmHWM:")
		kilobytes, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
		require.NoError(b, err)
		sum += kilobytes * 1024
	}
	return sum
}

// redisMemory is the memory that Redis uses in bytes (used_memory).
func redisMemory(ctx context.Context, rdb redis.UniversalClient) (int64, error) {
	return rig.InfoNumber(ctx, rdb, "Memory", "used_memory")
}

// idleRedisMemory is the same after Redis has freed what it can, without the buffers of this process's
// connections. The processes that used Redis must have ended.
func idleRedisMemory(ctx context.Context, rdb redis.UniversalClient) (int64, error) {
	for {
		clients, err := rig.InfoNumber(ctx, rdb, "Clients", "connected_clients")
		if err != nil {
			return 0, err
		}
		if clients <= int64(rdb.PoolStats().TotalConns) {
			break
		}
		if !retry.Pause(pollInterval, ctx.Done()) {
			return 0, ctx.Err()
		}
	}
	// The slow log keeps the arguments of slow commands.
	for _, command := range [][]any{{"slowlog", "reset"}, {"memory", "purge"}} {
		if err := rdb.Do(ctx, command...).Err(); err != nil {
			return 0, err
		}
	}
	held, err := redisMemory(ctx, rdb)
	if err != nil {
		return 0, err
	}
	lent, err := lentToClients(ctx, rdb)
	return held - lent, err
}

// lentToClients is the memory of all client connections in Redis, including ours. Their buffers grow
// and shrink.
func lentToClients(ctx context.Context, rdb redis.UniversalClient) (int64, error) {
	list, err := rdb.ClientList(ctx).Result()
	if err != nil {
		return 0, err
	}
	var sum int64
	for client := range strings.Lines(list) {
		_, rest, _ := strings.Cut(client, " tot-mem=")
		value, _, _ := strings.Cut(rest, " ")
		bytes, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("CLIENT LIST: tot-mem: %w", err)
		}
		sum += bytes
	}
	return sum, nil
}
