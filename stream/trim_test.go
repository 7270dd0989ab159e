package stream_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// suiteReader is the goroutine of Watermill's conformance suite that reads from many subscriptions. It never ends if a
// message is redelivered after the suite has received enough, as happens on a busy machine.
const suiteReader = "github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe"

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.IgnoreLeaks(
		goleak.IgnoreAnyFunction(suiteReader+".func2"), goleak.IgnoreAnyFunction(suiteReader+".func3"),
	))
}

// trimBench is a stream of 1000 entries. Trimming frees whole nodes of 100 entries, so the first entry
// that is left is a multiple of 100.
type trimBench struct {
	*streamBench
	ids []string
}

func newTrimBench(t *testing.T) *trimBench {
	b := &trimBench{streamBench: newStreamBench(t)}
	_, err := b.rdb.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
		for range 1000 {
			pipe.XAdd(t.Context(), &redis.XAddArgs{Stream: b.stream, Values: []string{"a", "b"}})
		}
		return nil
	})
	require.NoError(t, err)
	for _, entry := range b.rdb.XRange(t.Context(), b.stream, "-", "+").Val() {
		b.ids = append(b.ids, entry.ID)
	}
	require.Len(t, b.ids, 1000)
	return b
}

// group creates a group that has read the first entries and acknowledged all of them but some.
func (b *trimBench) group(name string, delivered int, pending ...int) {
	require.NoError(b.t, stream.CreateGroup(b.ctx, b.rdb, b.stream, name))
	if delivered == 0 {
		return
	}
	require.NoError(b.t, b.rdb.XReadGroup(b.ctx, &redis.XReadGroupArgs{
		Group: name, Consumer: "c", Streams: []string{b.stream, ">"}, Count: int64(delivered), Block: -1,
	}).Err())
	left := make(map[int]bool)
	for _, i := range pending {
		left[i] = true
	}
	var acks []string
	for i, id := range b.ids[:delivered] {
		if !left[i] {
			acks = append(acks, id)
		}
	}
	require.NoError(b.t, b.rdb.XAck(b.ctx, b.stream, name, acks...).Err())
}

func (b *trimBench) trim() (word string, removed int64) {
	reply, err := lua.Trim.Run(b.ctx, b.rdb, []string{b.stream}).Slice()
	require.NoError(b.t, err)
	require.Len(b.t, reply, 2)
	return reply[0].(string), reply[1].(int64)
}

// first is the index of the first entry that is left.
func (b *trimBench) first() int {
	return len(b.ids) - int(b.rdb.XLen(b.ctx, b.stream).Val())
}

func TestTrimKeepsEntriesNeededByAnyGroup(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		groups func(b *trimBench)
		first  int // index of the first entry that is left
	}{
		"read to the end":            {func(b *trimBench) { b.group("a", 1000) }, 900},
		"undelivered entries":        {func(b *trimBench) { b.group("a", 501) }, 500},
		"a pending entry":            {func(b *trimBench) { b.group("a", 1000, 350, 800) }, 300},
		"the first entry is pending": {func(b *trimBench) { b.group("a", 1000, 0) }, 0},
		"the slowest of several groups": {func(b *trimBench) {
			b.group("a", 1000)
			b.group("b", 1000, 450)
			b.group("c", 701)
		}, 400},
		"a group that has read nothing": {func(b *trimBench) { b.group("a", 1000); b.group("b", 0) }, 0},
		"a group that was set back":     {func(b *trimBench) { b.group("a", 1000, 700); b.setID("a", b.ids[200]) }, 200},
		"a group that was set to the last id": {func(b *trimBench) {
			b.group("a", 0)
			b.setID("a", "18446744073709551615-18446744073709551615")
		}, 1000},
		"no group":                        {func(*trimBench) {}, 0},
		"a group that has read one entry": {func(b *trimBench) { b.group("a", 1) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newTrimBench(t)
			test.groups(b)
			_, removed := b.trim()
			require.EqualValues(t, test.first, removed)
			require.Equal(t, test.first, b.first())
			_, removed = b.trim()
			require.Zero(t, removed, "a second trim frees nothing")
		})
	}
}

func (b *trimBench) setID(group, id string) {
	require.NoError(b.t, b.rdb.XGroupSetID(b.ctx, b.stream, group, id).Err())
}

// The halves of an id have 64 bits: 2^53 and 2^53+1 are equal as Lua numbers.
func TestTrimComparesLongIDs(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	// With one entry per node, approximate trimming is exact.
	require.NoError(t, b.rdb.ConfigSet(t.Context(), "stream-node-max-entries", "1").Err())
	ids := []string{
		"9-10", "10-9", "9007199254740992-9007199254740992", "9007199254740992-9007199254740993",
		"9007199254740993-0",
	}
	for i, first := range ids {
		for j, second := range ids {
			b := &trimBench{streamBench: newStreamBenchAt(t, server.URL, fmt.Sprintf("orders-%d-%d", i, j)), ids: ids}
			for _, id := range ids {
				require.NoError(t, b.rdb.XAdd(t.Context(),
					&redis.XAddArgs{Stream: b.stream, ID: id, Values: []string{"a", "b"}}).Err())
			}
			for group, id := range map[string]string{"a": first, "b": second} {
				b.group(group, 0)
				b.setID(group, id)
			}
			_, removed := b.trim()
			require.EqualValues(t, min(i, j), removed, "groups at %s and %s", first, second)
		}
	}
}

func TestTrimAnswers(t *testing.T) {
	t.Parallel()
	b := newTrimBench(t)
	word, _ := b.trim()
	require.Equal(t, "no-group", word)
	b.group("a", 1000)
	word, removed := b.trim()
	require.Equal(t, "trimmed", word)
	require.EqualValues(t, 900, removed)
	require.NoError(t, b.rdb.Del(t.Context(), b.stream).Err())
	word, _ = b.trim()
	require.Equal(t, "no-stream", word)
}

func TestTrimmerDeletesAcknowledgedEntries(t *testing.T) {
	t.Parallel()
	b := newTrimBench(t)
	b.group("a", 1000)
	trimmer, err := stream.NewTrimmer(stream.TrimmerConfig{
		Control: b.rdb, Stream: b.stream, Interval: time.Millisecond, Logger: testkit.Logger(t),
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { trimmer.Run(ctx) })
	testkit.Eventually(t, testshop.Soon, "the stream is trimmed", func() bool { return b.first() == 900 })
	cancel()
	running.Wait()
	require.EqualValues(t, 900, testutil.ToFloat64(trimmer.Trimmed()))

	_, err = stream.NewTrimmer(stream.TrimmerConfig{Control: b.rdb})
	require.ErrorContains(t, err, "Stream")
}

func TestSubscriberCreatesGroupOnceFullRedisHasRoom(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	uuids := b.publish(1)
	require.NoError(t, b.rdb.ConfigSet(b.ctx, "maxmemory", "1").Err())
	log := &testshop.CountingLog{}
	messages := b.subscribe(b.subscriber("worker-1", withLog(log)))
	testkit.Eventually(t, testshop.Soon, "the error is logged", func() bool { return log.Times(cannotRead) == 1 })
	require.NoError(t, b.rdb.ConfigSet(b.ctx, "maxmemory", "0").Err())
	require.Equal(t, uuids, receiveUUIDs(t, messages, 1))
	b.awaitNonePending()
}

func TestSubscriberCreatesGroupOncePerOutage(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	log := &testshop.CountingLog{}
	messages := b.subscribe(b.subscriber("worker-1", withLog(log)))
	b.publish(1)
	receive(t, messages).Ack()
	for lost := 1; lost <= 3; lost++ {
		testkit.Eventually(t, testshop.Soon, "a read is interrupted", func() bool {
			require.NoError(t, b.rdb.ClientKillByFilter(b.ctx, "TYPE", "normal").Err())
			return log.Times(cannotRead) >= lost
		})
		require.Equal(t, b.publish(1), receiveUUIDs(t, messages, 1))
	}
	b.awaitNonePending()
	for line := range strings.Lines(b.rdb.Info(b.ctx, "commandstats").Val()) {
		if strings.HasPrefix(line, "cmdstat_xgroup|create:") {
			require.Contains(t, line, ":calls=1,")
			return
		}
	}
	t.Fatal("the group was never created")
}

func withLog(log slog.Handler) func(*stream.Config) {
	return func(c *stream.Config) { c.Logger = slog.New(log) }
}

// cannotRead is what a subscriber logs at the first of several failures in a row.
const cannotRead = "cannot read the stream, trying again"

func (b *streamBench) backlog() stream.Backlog {
	b.t.Helper()
	backlog, err := stream.ReadBacklog(b.ctx, b.rdb, b.stream, reservation.Group)
	require.NoError(b.t, err)
	return backlog
}

func TestBacklogOfMissingStreamOrGroup(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	require.Equal(t, stream.Backlog{LagKnown: true}, b.backlog())

	b.publish(3)
	backlog := b.backlog()
	require.EqualValues(t, 3, backlog.Length)
	require.EqualValues(t, 3, backlog.Lag, "a missing group has read nothing")
	require.True(t, backlog.LagKnown)
}

func TestBacklogCountsWaitingEntries(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(10)
	ids := b.takeAway("worker-1", 4)
	require.NoError(t, b.rdb.XAck(t.Context(), b.stream, reservation.Group, ids[0]).Err())
	old := time.Now().Add(-time.Minute)
	testkit.Eventually(t, testshop.Soon, "the entries have an age",
		func() bool { return b.backlog().OldestPendingAge > 0 })

	backlog := b.backlog()
	require.EqualValues(t, 10, backlog.Length)
	require.EqualValues(t, 6, backlog.Lag)
	require.EqualValues(t, 3, backlog.Pending)
	waiting, known := backlog.Waiting()
	require.True(t, known)
	require.EqualValues(t, 9, waiting)
	require.Equal(t, backlog.OldestPendingAge, backlog.OldestWaitingAge, "undelivered entries are younger")
	require.Less(t, backlog.OldestWaitingAge, time.Since(old))

	// Without pending entries it is the oldest that was not delivered, behind handled ones that were not trimmed.
	require.NoError(t, b.rdb.XAck(t.Context(), b.stream, reservation.Group, ids[1:]...).Err())
	testkit.Eventually(t, testshop.Soon, "the undelivered entries have an age",
		func() bool { return b.backlog().OldestWaitingAge > 0 })
	require.Zero(t, b.backlog().OldestPendingAge)

	ids = b.takeAway("worker-1", 6)
	require.NoError(t, b.rdb.XAck(t.Context(), b.stream, reservation.Group, ids...).Err())
	backlog = b.backlog()
	require.EqualValues(t, 10, backlog.Length)
	require.Zero(t, backlog.OldestWaitingAge, "nothing waits")
}

// After an undelivered entry was deleted, Redis does not know the lag. The entries are counted.
func TestBacklogCountsEntriesWhenRedisReportsNoLag(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(3)
	deleted := b.add("a", "b")
	b.publish(3)
	b.takeAway("worker-1", 3)
	require.NoError(t, b.rdb.XDel(t.Context(), b.stream, deleted).Err())
	lagOfRedis := func() int64 {
		t.Helper()
		groups, err := b.rdb.XInfoGroups(t.Context(), b.stream).Result()
		require.NoError(t, err)
		return groups[0].Lag
	}
	lag := func(want int64) {
		t.Helper()
		backlog := b.backlog()
		require.True(t, backlog.LagKnown)
		require.Equal(t, want, backlog.Lag)
		require.Contains(t, scrape(t, b, testshop.Soon, 0),
			fmt.Sprintf("stampede_stream_lag_entries{group=\"fulfillment\",stream=%q} %d\n", b.stream, want))
	}
	require.EqualValues(t, -1, lagOfRedis(), "Redis reports that it does not know")
	lag(3)
	// Redis 7 and Valkey 8 report a figure now that stays wrong. Redis 8 does not know the lag until the
	// group has received the last entry.
	b.takeAway("worker-1", 1)
	require.NotEqualValues(t, 2, lagOfRedis(), "Redis does not report the right lag")
	lag(2)
	b.takeAway("worker-1", 2)
	lag(0)
	b.publish(2)
	lag(2)
}

func (b *streamBench) addMany(n int) {
	b.t.Helper()
	_, err := b.rdb.Pipelined(b.ctx, func(p redis.Pipeliner) error {
		for range n {
			p.XAdd(b.ctx, &redis.XAddArgs{Stream: b.stream, Values: []any{"a", "b"}})
		}
		return nil
	})
	require.NoError(b.t, err)
}

// Counting stops at LagCountMax entries.
func TestBacklogReportsUnknownLag(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.addMany(1)
	b.takeAway("worker-1", 1)
	deleted := b.add("a", "b")
	b.addMany(stream.LagCountMax)
	require.NoError(t, b.rdb.XDel(t.Context(), b.stream, deleted).Err())
	require.EqualValues(t, stream.LagCountMax, b.backlog().Lag)

	b.addMany(1)
	backlog := b.backlog()
	require.False(t, backlog.LagKnown)
	require.EqualValues(t, 1, backlog.Pending)
	_, known := backlog.Waiting()
	require.False(t, known)
	require.NotContains(t, scrape(t, b, testshop.Soon, 0), "stampede_stream_lag_entries{",
		"a missing figure is better than a wrong one")
}

// Frequent scrapes do not count the entries each time.
func TestBacklogCollectorCachesCounts(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(3)
	deleted := b.add("a", "b")
	b.takeAway("worker-1", 1)
	require.NoError(t, b.rdb.XDel(t.Context(), b.stream, deleted).Err())
	b.addMany(stream.FewEntries)
	c := stream.NewBacklogCollector(
		b.rdb, reservation.Group, b.streams, func(string) int64 { return 0 }, time.Second, testkit.Logger(t),
	)
	began := time.Now()
	read := func() int64 {
		t.Helper()
		backlog, err := c.Read(t.Context(), b.stream)
		require.NoError(t, err)
		return backlog.Lag
	}
	const counted = stream.FewEntries + 2
	require.EqualValues(t, counted, read())
	b.publish(1)
	if lag := read(); time.Since(began) < stream.CountedFor {
		require.EqualValues(t, counted, lag)
	}
	testkit.Eventually(t, testshop.Soon, "the entries are counted again", func() bool { return read() == counted+1 })
}

func TestBacklogFailsForKeyOfWrongType(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	require.NoError(t, b.rdb.Set(t.Context(), b.stream, "", 0).Err())
	_, err := stream.ReadBacklog(t.Context(), b.rdb, b.stream, reservation.Group)
	require.ErrorContains(t, err, "WRONGTYPE")
}

func (b *streamBench) streams() []string { return []string{b.stream} }

// scrape returns the metrics of a collector that waits for Redis up to the time-out.
func scrape(t *testing.T, b *streamBench, timeout time.Duration, estimate int64) string {
	t.Helper()
	registry := prometheus.NewRegistry()
	require.NoError(t,
		registry.Register(stream.NewBacklogCollector(b.rdb, reservation.Group, b.streams,
			func(string) int64 { return estimate }, timeout,
			testkit.Logger(t))))
	response := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(response,
		httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Equal(t, http.StatusOK, response.Code, response.Body)
	return response.Body.String()
}

func TestBacklogCollector(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(5)
	b.takeAway("worker-1", 2)
	text := scrape(t, b, testshop.Soon, 0)
	labels := `{group="fulfillment",stream="` + b.stream + `"} `
	for name, want := range map[string]string{
		"reachable": "1", "length_entries": "5", "lag_entries": "3",
		"pending_entries": "2", "waiting_orders": "5",
	} {
		require.Contains(t, text, "stampede_stream_"+name+labels+want+"\n")
	}
	require.Contains(t, text, "stampede_stream_oldest_pending_age_seconds"+labels)
	require.Contains(t, text, "stampede_stream_oldest_entry_age_seconds"+labels)
}

// The estimate is right while orders are in transit. It keeps the rejected ones, and may be older than the last
// entries.
func TestBacklogCollectorCorrectsEstimateOfOrders(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	waiting := func(estimate int64) string {
		text := scrape(t, b, testshop.Soon, estimate)
		_, value, _ := strings.Cut(text, "stampede_stream_waiting_orders{")
		_, value, _ = strings.Cut(value, "} ")
		value, _, _ = strings.Cut(value, "\n")
		return value
	}
	require.Equal(t, "0", waiting(7), "no entry waits")
	b.publish(3)
	require.Equal(t, "3", waiting(0), "each entry has an order")
	require.Equal(t, "500", waiting(500))
	require.Equal(t, strconv.Itoa(3*order.MaxPerMessage), waiting(5000), "entries have no more orders")
	b.takeAway("worker-1", 1)
	require.Equal(t, "500", waiting(500))
}
