package stream_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/lua"
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
