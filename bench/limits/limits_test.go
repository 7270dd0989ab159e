package limits

import (
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/httpload"
	"stampede/bench/rig"
	"stampede/ingress"
	"stampede/internal/connect"
	"stampede/ledger"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
)

// The candidates that the tables refer to by name.
const (
	oursAccept  = "`stampede serve`"
	oursRecord  = "`stampede work`, one process"
	echoNothing = "Echo, nothing behind it"
	echoRaw     = "Echo, prebuilt bytes"
	scriptSame  = "reserve script, as many in a call as `serve` has, 1 connection"
	insertOne   = "unnest inserts, 500 orders a transaction, 1 connection"
	insertTwo   = "unnest inserts, 500 orders a transaction, 2 connections"
	copyOne     = "COPY, 500 orders a transaction, 1 connection"
	readAck     = "XREADGROUP COUNT 500 and one XACK, 1 connection"
)

// BenchmarkLimits compares each stage with its limit, in one run.
func BenchmarkLimits(b *testing.B) {
	// In the first round the ingress has the first turn, which measures how many buyers share a call.
	inCall := 0
	candidates := []rig.Candidate{
		{Name: oursAccept, Turn: func(b *testing.B, _ int) rig.Values {
			values := serve(b, rig.Stampede{})
			inCall = int(math.Round(values[perCall]))
			return values
		}},
		{Name: echoNothing, Turn: nothing("nothing")},
		{Name: echoRaw, Turn: nothing("nothing-raw")},
		{Name: scriptSame, Turn: script(func() int { return inCall }, 1)},
	}
	for _, connections := range []int{1, 4} {
		for _, batch := range rig.Scale(b, []int{1, 16, 64, 256}, []int{1, 256}) {
			candidates = append(candidates, rig.Candidate{
				Name: fmt.Sprintf("reserve script, %d in a call, %s", batch, plural(connections)),
				Turn: script(func() int { return batch }, connections),
			})
		}
	}
	candidates = append(candidates,
		rig.Candidate{Name: oursRecord, Turn: func(b *testing.B, _ int) rig.Values {
			return stampede.work(b, backlogOrders(b))
		}},
		rig.Candidate{Name: insertOne, Turn: insert(insertUnnest, 1)},
		rig.Candidate{Name: insertTwo, Turn: insert(insertUnnest, 2)},
		rig.Candidate{Name: copyOne, Turn: insert(insertCopy, 1)},
		rig.Candidate{Name: readAck, Turn: read},
	)
	results := rig.Compare(b, candidates...)

	table := rig.Table{
		Title: "Each stage and its limit",
		Note: fmt.Sprintf("Orders a second, what ours reach of it, and the CPU time of an order by process in µs. “load” is "+
			"the benchmark: the buyers, or, where there is no ingress and no worker, the client that makes the calls. Script "+
			"calls of `serve` had %s buyers. Medians of %d rounds, with the least and the greatest.",
			results.Of(oursAccept, perCall).Format(rig.Count), b.N),
		Head: append([]string{"", "orders/s", "ours ÷ it"}, rig.Roles...),
	}
	comparedWith := map[string]string{
		echoNothing: oursAccept, echoRaw: oursAccept, scriptSame: oursAccept,
		insertOne: oursRecord, insertTwo: oursRecord, copyOne: oursRecord, readAck: oursRecord,
	}
	for _, c := range candidates {
		share := ""
		if ours, found := comparedWith[c.Name]; found {
			share = results.Ratio(ours, perSecond, c.Name, perSecond).Format(rig.Ratio)
		}
		table.Rows = append(table.Rows, slices.Concat(
			[]string{c.Name, results.Of(c.Name, perSecond).Format(rig.Count), share},
			results.Medians(rig.Ratio, c.Name, rig.Roles...)))
	}
	rig.Put(table)
	results.Report(b, oursAccept, perSecond, "accepted/s")
	results.Report(b, oursRecord, perSecond, "durable/s")
	for limit, unit := range map[string]string{
		echoNothing: "accepted÷Echo-doing-nothing", insertOne: "durable÷raw-batch-insert",
	} {
		b.ReportMetric(results.Ratio(comparedWith[limit], perSecond, limit, perSecond).Median, unit)
	}
}

func plural(connections int) string {
	if connections == 1 {
		return "1 connection"
	}
	return fmt.Sprint(connections, " connections")
}

const (
	withReader    = "`stampede serve`, plain purchases in front of net/http"
	withoutReader = "`stampede serve --plain-reader=off`"
)

// BenchmarkPlainReader compares an ingress that reads plain purchases in front of net/http with one that does not.
func BenchmarkPlainReader(b *testing.B) {
	mode := func(reader string) turn {
		return func(b *testing.B, _ int) rig.Values {
			return serve(b, rig.Stampede{Env: []string{"STAMPEDE_PLAIN_READER=" + reader}})
		}
	}
	results := rig.Compare(b, rig.Candidate{Name: withReader, Turn: mode("on")},
		rig.Candidate{Name: withoutReader, Turn: mode("off")})
	ratio := results.Ratio(withReader, perSecond, withoutReader, perSecond)
	table := rig.Table{
		Title: "Plain purchases in front of net/http",
		Note: fmt.Sprintf("Accepted orders, and CPU time for each in µs; medians of %d rounds. An ingress with the reader "+
			"accepts %s times as many.", b.N, ratio.Format(rig.Ratio)),
		Head: append([]string{"", "orders/s"}, rig.Roles...),
	}
	for _, name := range []string{withReader, withoutReader} {
		table.Rows = append(table.Rows, append([]string{name, results.Of(name, perSecond).Format(rig.Count)},
			results.Medians(rig.Ratio, name, rig.Roles...)...))
	}
	rig.Put(table)
	b.ReportMetric(ratio.Median, "on÷off")
}

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

// BenchmarkAllocations counts the allocations of an accepted purchase in a whole ingress, including the
// call of Redis, in excess of those in an Echo that answers with prebuilt bytes.
//
// The servers run in the process of the benchmark, because only a process itself knows its allocations.
// Those of the client are the same on both sides and cancel out.
func BenchmarkAllocations(b *testing.B) {
	before := debug.SetGCPercent(400) // as `stampede serve` does
	b.Cleanup(func() { debug.SetGCPercent(before) })

	table := rig.Table{
		Title: "Allocations of an accepted purchase",
		Note: "In the whole process, client included. Echo's own are those of a route that answers with prebuilt bytes: " +
			"net/http, the router, the answer. Over one connection every purchase is its own script call.",
		Head: []string{"connections", "Echo's own", "ingress", "beyond Echo's own", "bytes beyond Echo's own"},
	}
	for _, connections := range []int{1, crowdConnections} {
		var own, total, beyond, bytesBeyond []float64
		for range b.N {
			echoes, ours := allocations(b, echoAlone(), uuid.New(), connections), ingressAllocations(b, connections)
			own, total = append(own, echoes.objects), append(total, ours.objects)
			beyond, bytesBeyond = append(beyond, ours.objects-echoes.objects), append(bytesBeyond, ours.bytes-echoes.bytes)
		}
		table.Rows = append(table.Rows, []string{
			strconv.Itoa(connections), rig.Summarize(own).Format(rig.Ratio), rig.Summarize(total).Format(rig.Ratio),
			rig.Summarize(beyond).Format(rig.Ratio), rig.Summarize(bytesBeyond).Format(rig.Count),
		})
		b.ReportMetric(rig.Summarize(beyond).Median, "allocations-beyond-Echo_"+strconv.Itoa(connections)+"-connections")
	}
	b.ReportMetric(0, "ns/op") // a round has no meaning as an operation
	rig.Put(table)
}

func echoAlone() http.Handler {
	e := echo.New()
	answer := []byte(`{"order_id":"019ab3c0-5b3c-7b3c-8b3c-0b3c5b3c7b3c","status":"reserved"}`)
	e.POST("/v1/sales/:sale/orders", func(c echo.Context) error {
		return c.Blob(http.StatusAccepted, "application/json", answer)
	})
	return e
}

// ingressAllocations measures an ingress that is wired as the serve command does.
func ingressAllocations(b *testing.B, connections int) allocation {
	b.Helper()
	s := openShop(b)
	defer s.Close()
	rdb, err := connect.Ingress(s.RedisURL)
	require.NoError(b, err)
	defer func() { _ = rdb.Close() }()
	store := reservation.NewStore(rdb, s.keys, reservation.StoreOptions{})
	defer store.Close()
	server, err := ingress.New(ingress.Config{
		Reservations: store, Sales: catalog.New(s.Pool, store), Orders: ledger.New(s.Pool),
		Postgres: s.Pool,
		Auth:     ingress.AuthHeader, Logger: slog.New(slog.DiscardHandler), OutcomesStreams: s.keys.AllOutcomes(),
		Outcomes: func() (redis.UniversalClient, error) { return connect.Blocking(s.RedisURL) },
	})
	require.NoError(b, err)
	defer server.Close()
	return allocations(b, server.Handler(), s.sale, connections)
}

// allocation is the average of a request.
type allocation struct{ objects, bytes float64 }

// allocations lets a crowd buy from a handler. The cost of opening connections is excluded: the result
// is the slope between a small and a large crowd.
func allocations(b *testing.B, h http.Handler, sale uuid.UUID, connections int) allocation {
	b.Helper()
	server := httptest.NewServer(h)
	defer server.Close()
	head := rig.PurchaseHead(sale) + "buyer-"
	crowd := func(most uint64) (requests int64, objects, bytes uint64) {
		load := httpload.Load{
			Addrs: []string{server.Listener.Addr().String()}, Connections: connections, For: time.Minute, Most: most,
			Request: func(dst []byte, _ uint64) []byte {
				dst = strconv.AppendUint(append(dst, head...), buyerSerial.Add(1), 10)
				return append(dst, rig.PurchaseEnd...)
			},
			Status: http.StatusAccepted,
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		answers, err := load.Measure(b.Context())
		runtime.ReadMemStats(&after)
		require.NoError(b, err)
		require.Zero(b, answers.Others(), "answers: %s", answers)
		return answers.Wanted, after.Mallocs - before.Mallocs, after.TotalAlloc - before.TotalAlloc
	}
	few := uint64(rig.Scale(b, 20, 1)*connections + 200)
	crowd(few) // fills the pools
	requestsFew, objectsFew, bytesFew := crowd(few)
	requestsMany, objectsMany, bytesMany := crowd(5 * few)
	n := float64(requestsMany - requestsFew)
	return allocation{(float64(objectsMany) - float64(objectsFew)) / n, (float64(bytesMany) - float64(bytesFew)) / n}
}
