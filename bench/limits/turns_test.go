package limits

import (
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
)

// The figures of a turn, beside the CPU time of each role under the role's name.
const (
	perSecond = "orders/s"
	perCall   = "orders in a call of the script"
	// scriptMicros is the time of Redis in the script.
	scriptMicros = "script, µs an order"
)

const (
	// hugeStock is more than any turn can sell.
	hugeStock = 50_000_000
	// callGrace is how much longer than the turn its last call may take.
	callGrace = 10 * time.Second
)

// buyerSerial numbers buyers who have bought nothing yet.
var buyerSerial atomic.Uint64

// shop is a turn's own servers with a sale, for use without an ingress.
type shop struct {
	*rig.Shop
	keys reservation.Keys
	sale uuid.UUID
	// units of an order as the script takes them: one, or one of each item.
	units string
}

// openShop opens a shop and a sale, of items if there are some, without processes.
func openShop(b *testing.B, items ...reservation.Item) shop {
	b.Helper()
	on := rig.Open(b)
	store := reservation.NewStore(on.Redis, on.Keys(1), reservation.StoreOptions{Logger: slog.New(slog.DiscardHandler)})
	defer store.Close()
	terms := reservation.Terms{Name: "limits", Stock: hugeStock, PerOrderLimit: int64(max(1, len(items))), Items: items}
	units := "1"
	if len(items) > 0 {
		terms.Stock = 0
		each := make([]int64, len(items))
		for i, item := range items {
			terms.Stock += item.Stock
			each[i] = 1
		}
		units = string(order.MakeLines(each))
	}
	sale, err := catalog.New(on.Pool, store).Create(b.Context(), terms)
	require.NoError(b, err)
	require.NoError(b, lua.Reserve.Load(b.Context(), on.Redis).Err()) // calls use only its hash
	return shop{on, on.Keys(1), sale.ID, units}
}

// turn is a candidate's work in a round.
type turn func(b *testing.B, round int) rig.Values

// turnDuration bounds a turn by time, and backlogOrders is the number of orders in a turn without such
// a bound.
func turnDuration(b *testing.B) time.Duration {
	return rig.Scale(b, 2*time.Second, 200*time.Millisecond)
}
func backlogOrders(b *testing.B) int { return rig.Scale(b, 60_000, 6000) }

func newValues(orders int64, took time.Duration, used rig.Usage) rig.Values {
	values := rig.Values{perSecond: float64(orders) / took.Seconds()}
	for role, each := range used.PerOrder(orders) {
		values[role] = each
	}
	return values
}

// nothing is a front whose design does nothing.
func nothing(design string) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := rig.StartDesign(b, design, nil, hugeStock)
		defer s.Close()
		s.Warm(crowdConnections)
		values, _ := accept(b, s)
		return values
	}
}

// serve is `stampede serve` alone: accepted orders wait in Redis.
func serve(b *testing.B, how rig.Stampede) rig.Values {
	s := how.Start(b, hugeStock)
	defer s.Close()
	s.StopWorkers()
	s.Warm(crowdConnections)
	before := scriptCalls(b, s.Shop.Redis)
	values, orders := accept(b, s)
	values[perCall] = float64(orders) / float64(scriptCalls(b, s.Shop.Redis)-before)
	return values
}

// accept measures a crowd in a closed loop.
func accept(b *testing.B, s *rig.System) (values rig.Values, orders int64) {
	b.Helper()
	load := s.Crowd(1)
	load.Connections, load.For = crowdConnections, turnDuration(b)
	before := s.CPU()
	answers := s.Measure(load)
	used := s.CPU().Since(before)
	require.Zero(b, answers.Others(), "answers: %s", answers)
	values = newValues(answers.Wanted, answers.Took, used)
	values[perSecond] = answers.PerSecond()
	return values, answers.Wanted
}

const crowdConnections = 256

// scriptCalls is the number of script calls by hash that Redis has processed.
func scriptCalls(b *testing.B, rdb redis.UniversalClient) int64 { return scriptStat(b, rdb, "calls=") }

// scriptStat is a figure of script calls by hash: "calls=", or the microseconds that they took, "usec=".
func scriptStat(b *testing.B, rdb redis.UniversalClient, name string) int64 {
	b.Helper()
	info, err := rdb.InfoMap(b.Context(), "commandstats").Result()
	require.NoError(b, err)
	_, rest, _ := strings.Cut(info["Commandstats"]["cmdstat_evalsha"], name)
	text, _, _ := strings.Cut(rest, ",")
	calls, err := strconv.ParseInt(text, 10, 64)
	require.NoError(b, err)
	return calls
}

// script calls the reserve script without an ingress, with so many buyers in a call.
func script(batch func() int, connections int, items ...reservation.Item) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := openShop(b, items...)
		defer s.Close()
		size, within := batch(), turnDuration(b)/2
		// At most what a fast Redis could reserve in the time, because they take memory.
		requests := int(within.Seconds() * float64(min(500_000, 10_000*size*connections)))
		prepared := newRequests(s.sale, max(requests, size*connections))
		before, inScript, began := s.CPU(), scriptStat(b, s.Redis, "usec="), time.Now()
		orders := s.reserveAll(b, prepared, size, connections, within)
		took := time.Since(began)
		values := newValues(orders, took, s.CPU().Since(before))
		values[scriptMicros] = float64(scriptStat(b, s.Redis, "usec=")-inScript) / float64(orders)
		return values
	}
}

// insert writes the rows of orders without any decision.
func insert(how inserter, connections int) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := openShop(b)
		defer s.Close()
		orders := newColumns(newRequests(s.sale, backlogOrders(b)))
		before, began := s.CPU(), time.Now()
		s.insertAll(b, orders, connections, how)
		took := time.Since(began)
		used := s.CPU().Since(before)
		require.EqualValues(b, backlogOrders(b), s.Units())
		return newValues(int64(backlogOrders(b)), took, used)
	}
}

// read takes entries from the stream and acknowledges them.
func read(b *testing.B, _ int) rig.Values {
	s := openShop(b)
	defer s.Close()
	key := s.keys.Orders(0)
	require.NoError(b, s.Redis.XGroupCreateMkStream(b.Context(), key, reservation.Group, "0").Err())
	const batch, within = 256, time.Minute
	reserved := s.reserveAll(b, newRequests(s.sale, backlogOrders(b)), batch, 1, within)
	require.EqualValues(b, backlogOrders(b), reserved)
	before, began := s.CPU(), time.Now()
	orders := readStream(b, s.Redis, key)
	took := time.Since(began)
	require.Equal(b, backlogOrders(b), orders)
	return newValues(int64(orders), took, s.CPU().Since(before))
}

// readBatch is the most entries that a worker asks for.
const readBatch = 64

// readStream reads and acknowledges a stream to its end, as one consumer that does nothing with the
// entries, and returns the number of their orders.
func readStream(b *testing.B, rdb redis.UniversalClient, key string) int {
	b.Helper()
	ctx := b.Context()
	count := 0
	for {
		streams, err := rdb.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: reservation.Group, Consumer: "limits", Streams: []string{key, ">"}, Count: readBatch,
			Block: -1, // no wait for new entries
		}).Result()
		if err == redis.Nil { //nolint:errorlint // go-redis returns it as it is
			return count
		}
		require.NoError(b, err)
		ids := make([]string, len(streams[0].Messages))
		for i, message := range streams[0].Messages {
			ids[i] = message.ID
			count += order.CountReserved(message.Values[stream.FieldPayload].(string))
		}
		acked, err := rdb.XAck(ctx, key, reservation.Group, ids...).Result()
		require.NoError(b, err)
		require.EqualValues(b, len(ids), acked)
	}
}
