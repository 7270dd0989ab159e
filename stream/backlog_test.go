package stream_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

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
