package growth

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/httpload"
	"stampede/bench/rig"
	"stampede/internal/retry"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// The figures of a sale.
const (
	// accepted and durable count orders a second: until the last one was accepted, and from the first
	// request until the last one was in Postgres. soldOut counts the answers after the last acceptance.
	accepted = "accepted/s"
	soldOut  = "sold out/s"
	durable  = "durable/s"
	// Latencies, in milliseconds, are of those who were accepted.
	p50 = "p50"
	p99 = "p99"
	// cpu is in microseconds for each buyer, winner or loser, of all processes but the load.
	cpu = "CPU"
	// Bytes of Redis for each order: when it held the most, and when all orders were in Postgres and the
	// streams trimmed.
	redisMost  = "Redis at most"
	redisAfter = "Redis after"
	// And what that is made of, as far as it is more than a few bytes.
	buyersAfter   = "buyers"
	outcomesAfter = "outcomes"
	streamAfter   = "streams"
	// The most bytes that the processes of a kind have held together, and for each buyer what they have
	// held more than before the sale.
	serveMemory = "serve"
	workMemory  = "work"
	servePer    = "serve for each"
	workPer     = "work for each"
)

const (
	hugeStock = 50_000_000
	// saleWithin bounds a sale that is to sell out, and recordWithin the time until Postgres has all.
	saleWithin   = 5 * time.Minute
	recordWithin = 5 * time.Minute
	lookEvery    = 20 * time.Millisecond
)

// run sells to a crowd on servers of its own and waits until every order is recorded.
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
	serveBefore, workBefore := memoryOfAll(b, s.Fronts).now, memoryOfAll(b, s.Workers).now

	most := watchMemory(b, s.Shop.Redis)
	before := s.CPU()
	// Where the crowd goes on when all is sold, the last order is in Postgres before the last buyer is answered.
	soldOutAt := make(chan sold, 1)
	if p.stock > 0 {
		go func() { soldOutAt <- awaitSold(b.Context(), s.Shop, int64(min(p.stock, p.buyers))) }()
	}
	crowd := sendCrowd(b, s, sales, p)
	if p.stock == 0 {
		soldOutAt <- awaitSold(b.Context(), s.Shop, crowd.Wanted)
	}
	all := <-soldOutAt
	require.NoError(b, all.err)
	used := s.CPU().Since(before)
	mostHeld := most()

	orders, buyers := float64(crowd.Wanted), float64(crowd.Wanted+crowd.Others())
	values := rig.Values{
		accepted: orders / crowd.selling.Seconds(), durable: orders / all.at.Sub(crowd.began).Seconds(),
		p50: rig.InMillis(crowd.Percentile(50)), p99: rig.InMillis(crowd.Percentile(99)),
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
	serve, work := memoryOfAll(b, s.Fronts).most, memoryOfAll(b, s.Workers).most
	values[serveMemory], values[workMemory] = float64(serve), float64(work)
	values[servePer], values[workPer] = float64(serve-serveBefore)/buyers, float64(work-workBefore)/buyers

	// What the sale holds is what is gone with its keys: Redis's own, as the scripts that it keeps, stays.
	s.Kill()
	after, err := idleRedisMemory(b.Context(), s.Shop.Redis)
	require.NoError(b, err)
	for p := range keys.Partitions {
		values[streamAfter] += keyMemory(b, s.Shop.Redis, keys.Orders(p)) / orders
	}
	for _, sale := range sales {
		values[buyersAfter] += keyMemory(b, s.Shop.Redis, keys.Buyers(keys.Partition(sale), sale)) / orders
	}
	values[outcomesAfter] = keyMemory(b, s.Shop.Redis, keys.Outcomes()) / orders
	s.Close()
	without, err := idleRedisMemory(b.Context(), s.Shop.Redis)
	require.NoError(b, err)
	values[redisMost], values[redisAfter] = float64(mostHeld-without)/orders, float64(after-without)/orders
	return values
}

// crowdAnswers is what a crowd heard.
type crowdAnswers struct {
	httpload.Answers
	began   time.Time
	selling time.Duration // until the last one was accepted
}

func sendCrowd(b *testing.B, s *rig.System, sales []uuid.UUID, p plan) crowdAnswers {
	b.Helper()
	var last atomic.Int64 // when somebody was accepted, in Unix nanoseconds
	load := httpload.Load{
		Addrs: []string{s.Fronts[0].Addr}, Connections: p.connections, For: p.within, Most: uint64(p.buyers),
		Request: purchases(sales, p.longIDs),
		Heard: func(_ uint64, status int, _ []byte) {
			if status == http.StatusAccepted {
				last.Store(time.Now().UnixNano())
			}
		},
	}
	if load.For == 0 {
		load.For = saleWithin
	}
	crowd := crowdAnswers{began: time.Now()}
	crowd.Answers = s.Measure(load)
	crowd.selling = time.Unix(0, last.Load()).Sub(crowd.began)
	// Nobody is turned away but because it is sold out, and that only when it is.
	require.EqualValues(b, crowd.ByStatus[http.StatusConflict], crowd.Others(), "answers: %s", crowd)
	if p.stock > 0 {
		require.EqualValues(b, min(p.stock, p.buyers), crowd.Wanted, "answers: %s", crowd)
	}
	return crowd
}

// openSpread opens sales, the same number of them in each partition. Ids are random, so those that
// would be too many somewhere are left alone.
func openSpread(b *testing.B, shop *rig.Shop, keys reservation.Keys, n int, stock int64) []uuid.UUID {
	b.Helper()
	store := reservation.NewStore(shop.Redis, keys, reservation.StoreOptions{Logger: slog.New(slog.DiscardHandler)})
	defer store.Close()
	catalog := catalog.New(shop.Pool, store)
	room := make([]int, keys.Partitions)
	for p := range room {
		room[p] = n / keys.Partitions
	}
	var sales []uuid.UUID
	for len(sales) < n {
		sale, err := catalog.Create(b.Context(), reservation.Terms{Name: "growth", Stock: stock, PerOrderLimit: 1})
		require.NoError(b, err)
		if p := keys.Partition(sale.ID); room[p] > 0 {
			room[p]--
			sales = append(sales, sale.ID)
		}
	}
	return sales
}

// purchases makes the requests of buyers who each come once, to the sales in turns.
func purchases(sales []uuid.UUID, longIDs bool) func(dst []byte, n uint64) []byte {
	var heads []string
	for _, sale := range sales {
		heads = append(heads, "POST /v1/sales/"+sale.String()+"/orders HTTP/1.1\r\nHost: localhost\r\n"+
			"Content-Type: application/json\r\nContent-Length: 14\r\nX-User-ID: ")
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
		return append(dst, "\r\n\r\n{\"quantity\":1}"...)
	}
}

// sold is when all units were sold in Postgres.
type sold struct {
	at  time.Time
	err error
}

// awaitSold waits until so many units are sold in Postgres. It asks the counters of the sales: to count
// the orders would be work.
func awaitSold(ctx context.Context, shop *rig.Shop, units int64) sold {
	ctx, cancel := context.WithTimeout(ctx, saleWithin+recordWithin)
	defer cancel()
	for {
		var have int64
		if err := shop.Pool.QueryRow(ctx, "SELECT sum(sold)::bigint FROM sales").Scan(&have); err != nil {
			return sold{err: fmt.Errorf("wait for %d units in Postgres, %d are there: %w", units, have, err)}
		}
		if have == units {
			return sold{at: time.Now()}
		}
		retry.Pause(lookEvery, ctx.Done())
	}
}

// watchMemory looks at what Redis holds until most is called, which returns the most that it has seen.
func watchMemory(b *testing.B, rdb *redis.Client) (most func() int64) {
	b.Helper()
	ctx, stop := context.WithCancel(b.Context())
	highest := make(chan int64, 1)
	look := func() int64 {
		bytes, err := redisMemory(b.Context(), rdb)
		if err != nil {
			b.Error(err)
		}
		return bytes
	}
	go func() {
		seen := look()
		for retry.Pause(lookEvery, ctx.Done()) {
			seen = max(seen, look())
		}
		highest <- max(seen, look())
	}()
	return func() int64 {
		stop()
		return <-highest
	}
}

// trim frees what the workers are done with, as they do themselves every ten seconds.
func trim(b *testing.B, rdb *redis.Client, keys reservation.Keys) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), recordWithin)
	defer cancel()
	for p := range keys.Partitions {
		stream := keys.Orders(p)
		for { // an entry is acknowledged after its order is in Postgres
			pending, err := rdb.XPending(ctx, stream, reservation.Group).Result()
			require.NoError(b, err)
			if pending.Count == 0 {
				break
			}
			retry.Pause(lookEvery, ctx.Done())
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

// keyMemory is the bytes that a key takes, all its fields counted; 0 if there is no such key.
func keyMemory(b *testing.B, rdb *redis.Client, key string) float64 {
	b.Helper()
	const all = 0 // not a sample of them
	bytes, err := rdb.MemoryUsage(b.Context(), key, all).Result()
	if errors.Is(err, redis.Nil) {
		return 0
	}
	require.NoError(b, err)
	return float64(bytes)
}

// memoryOfAll is the sum over processes.
func memoryOfAll(b *testing.B, processes []*rig.Process) processMemory {
	b.Helper()
	var sum processMemory
	for _, p := range processes {
		m, err := memoryOf(p.Pid())
		require.NoError(b, err)
		sum.now += m.now
		sum.most += m.most
	}
	return sum
}
