package stream_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

func TestSubscriberReplaysPendingEntriesInOrder(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(10)
	b.takeAway("worker-1", 7) // before a restart
	// Without claims: the consumer's name alone finds the pending entries, immediately.
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) { c.MinIdle, c.PageMax = time.Hour, 3 }))
	for i, uuid := range uuids {
		msg := receive(t, messages)
		require.Equal(t, uuid, msg.UUID)
		want := 1
		if i < 7 {
			want = 2
		}
		require.Equal(t, want, deliveriesOf(t, msg))
		msg.Ack()
	}
	b.awaitNonePending()
}

func TestSubscriberRecoversFromDeletedStreamOrGroup(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		destroy     func(b *streamBench) error
		redelivered int // how many handled entries are delivered again
	}{
		"group":  {func(b *streamBench) error { return b.rdb.XGroupDestroy(b.ctx, b.stream, reservation.Group).Err() }, 1},
		"stream": {func(b *streamBench) error { return b.rdb.Del(b.ctx, b.stream).Err() }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStreamBench(t)
			messages := b.subscribe(b.subscriber("worker-1"))
			handled := b.publish(1)
			receiveUUIDs(t, messages, 1)
			b.awaitNonePending()
			require.NoError(t, test.destroy(b))
			uuids := b.publish(2) // the group may still be missing
			want := append(handled[:test.redelivered], uuids...)
			require.Equal(t, want, receiveUUIDs(t, messages, len(want)))
			b.awaitNonePending()
		})
	}
}

func TestSubscriberRecoversFromFlushAll(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	messages := b.subscribe(b.subscriber("worker-1"))
	b.publish(2)
	open := receive(t, messages)
	receive(t, messages).Ack()
	require.NoError(t, b.rdb.FlushAll(t.Context()).Err())
	require.Equal(t, b.publish(2), receiveUUIDs(t, messages, 2))
	open.Ack() // its entry does not exist any more
	b.awaitNonePending()
}

// A group that is created again at the start of the stream delivers everything again, except entries
// that are being handled here.
func TestSubscriberDeliversEntryOnceAtATime(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(2)
	messages := b.subscribe(b.subscriber("worker-1"))
	open := receive(t, messages)
	receive(t, messages).Ack()
	testkit.Eventually(t, testshop.Soon, "the second is acknowledged", func() bool { return len(b.pending()) == 1 })
	require.NoError(t, b.rdb.XGroupDestroy(t.Context(), b.stream, reservation.Group).Err())

	again := receive(t, messages)
	require.Equal(t, uuids[1], again.UUID)
	again.Ack()
	require.Equal(t, b.publish(1), receiveUUIDs(t, messages, 1))
	open.Ack()
	b.awaitNonePending()
}

// lostReply breaks the first XREADGROUP that returned entries: Redis has delivered them, and the
// reader does not receive them.
type lostReply struct {
	once sync.Once
	lost chan struct{}
}

func (l *lostReply) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	err := next(ctx, cmd)
	if reply, ok := cmd.(stream.ReadOnce); ok && err == nil && len(reply.Val()) > 0 &&
		len(reply.Val()[0].Messages) > 0 {
		l.once.Do(func() {
			err = errors.New("connection reset by peer")
			cmd.SetErr(err)
			close(l.lost)
		})
	}
	return err
}

func TestSubscriberDeliversEntriesOfLostReply(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	reply := &lostReply{lost: make(chan struct{})}
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) {
		c.MinIdle = time.Hour // so that claims do not find them
		c.Client.(*redis.Client).AddHook(testkit.HookAll{Hook: reply.process})
	}))
	uuids := b.publish(5)
	<-reply.lost
	require.ElementsMatch(t, uuids, receiveUUIDs(t, messages, 5))
	b.awaitNonePending()
}

// go-redis must not retry a read, whatever the client's settings are.
func TestClientDoesNotRetryReads(t *testing.T) {
	t.Parallel()
	require.True(t, stream.ReadOnce{redis.NewXStreamSliceCmd(t.Context())}.NoRetry())
}

func TestAcksAreRetriedUntilSent(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(1)
	// The observer has its own client, whose commands are not broken.
	observer := newStreamBenchAt(t, b.url, b.stream)
	ackHook := &brokenCommand{name: "xack", failures: 4}
	messages := b.subscribe(b.subscriber("worker-1", hooked(ackHook.process)))
	receiveUUIDs(t, messages, 1)
	observer.awaitNonePending()
	require.Zero(t, ackHook.left())
}

// hooked adds a hook to both clients of a subscriber: acks are sent alone, or with a read.
func hooked(hook testkit.Hook) func(*stream.Config) {
	return func(c *stream.Config) {
		c.Client.AddHook(testkit.HookAll{Hook: hook})
		c.Control.AddHook(testkit.HookAll{Hook: hook})
	}
}

// brokenCommand makes a command fail a number of times.
type brokenCommand struct {
	name string

	mu       sync.Mutex
	failures int
}

func (c *brokenCommand) left() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failures
}

func (c *brokenCommand) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	c.mu.Lock()
	fails := strings.EqualFold(cmd.Name(), c.name) && c.failures > 0
	if fails {
		c.failures--
	}
	c.mu.Unlock()
	if fails {
		return fmt.Errorf("%s is broken", c.name)
	}
	return next(ctx, cmd)
}

// Redis is away for longer than the drain: Close returns, and unacknowledged entries stay pending.
func TestCloseReturnsWithoutRedis(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	uuids := b.publish(1)
	sub := b.subscriber("worker-1", func(c *stream.Config) { c.DrainTimeout = 100 * time.Millisecond })
	msg := receive(t, b.subscribe(sub))
	server.Kill()
	msg.Ack()
	require.NoError(t, sub.Close())

	require.NoError(t, server.Restart(t.Context()))
	again := receive(t, b.subscribe(b.subscriber("worker-1")))
	require.Equal(t, uuids[0], again.UUID)
	again.Ack()
	b.awaitNonePending()
}

// An entry whose content was deleted while it was pending is lost: that is logged and counted, and the
// entry does not stay pending.
func TestSubscriberReportsLostEntries(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(4)
	own := b.takeAway("worker-1", 1)
	orphan := b.takeAway("worker-0", 2)
	require.NoError(t, b.rdb.XDel(t.Context(), b.stream, own[0], orphan[1]).Err())

	sub := b.subscriber("worker-1")
	messages := b.subscribe(sub)
	require.ElementsMatch(t, []string{uuids[1], uuids[3]}, receiveUUIDs(t, messages, 2))
	b.awaitNonePending()
	require.EqualValues(t, 2, testutil.ToFloat64(sub.Metrics(b.stream).Lost))
}

// A replay and a claim find the same deleted entry: the claim removes it in Redis, and the entry is
// acknowledged and released here before the answer of the claim arrives.
func TestSubscriberReportsLostEntryOnce(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(1)
	own := b.takeAway("worker-1", 1)
	require.NoError(t, b.rdb.XDel(t.Context(), b.stream, own[0]).Err())
	// The observer has its own client, whose commands do not wait.
	observer := newStreamBenchAt(t, b.url, b.stream)

	claimed, released, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	claims := 0
	sub := b.subscriber("worker-1", hooked(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		switch {
		case cmd.Name() == "xack":
			<-claimed
		case cmd.Name() == "xautoclaim" && claims > 0:
			if claims++; claims == 2 {
				close(done)
			}
		case cmd.Name() == "xautoclaim":
			err := next(ctx, cmd)
			if len(observer.pending()) == 0 {
				claims = 1
				close(claimed)
				<-released
			}
			return err
		}
		return next(ctx, cmd)
	}))
	b.subscribe(sub)
	<-claimed
	testkit.Eventually(t, testshop.Soon, "the entry is released", func() bool {
		return testutil.ToFloat64(sub.Metrics(b.stream).InFlight) == 0
	})
	close(released)
	<-done
	require.EqualValues(t, 1, testutil.ToFloat64(sub.Metrics(b.stream).Lost))
}

func TestSubscribeInitializeCreatesTheGroup(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	sub := b.subscriber("worker-1")
	for range 2 {
		require.NoError(t, sub.SubscribeInitialize(b.stream))
	}
	groups, err := b.rdb.XInfoGroups(t.Context(), b.stream).Result()
	require.NoError(t, err)
	require.Len(t, groups, 1)
	require.Equal(t, "0-0", groups[0].LastDeliveredID)

	require.NoError(t, b.rdb.Set(t.Context(), b.stream+"-text", "", 0).Err())
	require.Error(t, sub.SubscribeInitialize(b.stream+"-text"))
}

// aliveWithin is a MinIdle within which a subscriber renews its leases on a busy machine, too.
const aliveWithin = 2 * time.Second

func TestSubscriberClaimsOrphansAmongNewEntries(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	orphans := b.publish(25)
	b.takeAway("worker-0", 25)
	fresh := b.publish(25)
	// Two subscribers share the work, in pages smaller than the number of orphans. Neither is silent for MinIdle.
	small := func(c *stream.Config) { c.PageMax, c.InFlightMax, c.MinIdle = 10, 10, aliveWithin }
	first, second := b.subscriber("worker-1", small), b.subscriber("worker-2", small)
	a, z := b.subscribe(first), b.subscribe(second)
	var got []string
	for len(got) < 50 {
		select {
		case msg := <-a:
			got = append(got, msg.UUID)
			msg.Ack()
		case msg := <-z:
			got = append(got, msg.UUID)
			msg.Ack()
		case <-time.After(testshop.Soon):
			require.FailNow(t, "messages are missing", "%d of 50", len(got))
		}
	}
	require.ElementsMatch(t, append(orphans, fresh...), got, "each message once")
	b.awaitNonePending()
	claimed := testutil.ToFloat64(first.Metrics(b.stream).Claimed) +
		testutil.ToFloat64(second.Metrics(b.stream).Claimed)
	require.EqualValues(t, 25, claimed)
}

// A page of deleted entries is empty, but not the last one.
func TestClaimContinuesAfterDeletedEntries(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(60)
	ids := b.takeAway("worker-0", 60)
	require.NoError(t, b.rdb.XDel(t.Context(), b.stream, ids[:59]...).Err())
	sub := b.subscriber("worker-1", func(c *stream.Config) {
		c.PageMax = 5
		c.ClaimInterval = time.Hour // the first round must find it
	})
	testkit.Eventually(t, testshop.Soon, "the orphan is old enough",
		func() bool { return b.pending()[59].Idle >= sub.Config().MinIdle })
	require.Equal(t, uuids[59:], receiveUUIDs(t, b.subscribe(sub), 1))
	b.awaitNonePending()
	require.EqualValues(t, 59, testutil.ToFloat64(sub.Metrics(b.stream).Lost))
}

// A handler may take many times MinIdle: neither another subscriber nor its own claims the entry, and
// renewals do not count as deliveries.
func TestLongHandlerKeepsItsEntry(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(1)
	quick := func(c *stream.Config) { c.MinIdle, c.ClaimInterval = aliveWithin, 20*time.Millisecond }
	worker, other := b.subscriber("worker-1", quick), b.subscriber("worker-2", quick)
	messages := b.subscribe(worker)
	msg := receive(t, messages)
	others := b.subscribe(other)
	select {
	case <-time.After(3 * other.Config().MinIdle): // nothing happens
	case <-messages:
		require.Fail(t, "delivered again by its own subscriber")
	case <-others:
		require.Fail(t, "claimed by the other subscriber")
	}
	require.Equal(t, "worker-1", b.pending()[0].Consumer)
	require.EqualValues(t, 1, b.pending()[0].RetryCount)
	msg.Ack()
	b.awaitNonePending()
}

// An entry that another consumer claimed is neither claimed back nor delivered here again.
func TestEntryClaimedByAnotherConsumerIsNotClaimedBack(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(2)
	// The other consumer is not silent for MinIdle before the test ends: then its entry could be claimed.
	sub := b.subscriber("worker-1", func(c *stream.Config) { c.MinIdle = 10 * time.Second })
	messages := b.subscribe(sub)
	kept, taken := receive(t, messages), receive(t, messages)
	id := taken.Metadata.Get(order.MetaEntryID)
	require.NoError(t, b.rdb.XClaim(t.Context(), &redis.XClaimArgs{
		Stream: b.stream, Group: reservation.Group, Consumer: "other", Messages: []string{id},
	}).Err())
	testkit.Eventually(t, testshop.Soon, "the claim is noticed",
		func() bool { return testutil.ToFloat64(sub.Metrics(b.stream).Taken) == 1 })
	taken.Nack()
	kept.Ack()
	testkit.Eventually(t, testshop.Soon, "both entries are released",
		func() bool { return testutil.ToFloat64(sub.Metrics(b.stream).InFlight) == 0 })
	pending := b.pending()
	require.Len(t, pending, 1)
	require.Equal(t, "other", pending[0].Consumer)
	require.Zero(t, testutil.ToFloat64(sub.Metrics(b.stream).Redelivered))
}

func TestSilentConsumersAreDeleted(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(1)
	b.takeAway("with-entries", 1)
	require.NoError(t, b.rdb.XGroupCreateConsumer(t.Context(), b.stream, reservation.Group, "silent").Err())
	consumers := func() []string {
		infos, err := b.rdb.XInfoConsumers(t.Context(), b.stream, reservation.Group).Result()
		require.NoError(t, err)
		var names []string
		for _, info := range infos {
			names = append(names, info.Name)
		}
		return names
	}
	sub := b.subscriber("worker-1", func(c *stream.Config) {
		c.MinIdle, c.ConsumerIdleMax = time.Hour, 50*time.Millisecond
		c.ClaimInterval = 20 * time.Millisecond
	})
	b.subscribe(sub)
	testkit.Eventually(t, testshop.Soon, "only the silent consumer is deleted", func() bool {
		names := consumers()
		slices.Sort(names)
		return slices.Equal(names, []string{"with-entries", "worker-1"})
	})
}

func TestReapAnswers(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	reap := func(idleMS int) ([]string, error) {
		return lua.Reap.Run(t.Context(), b.rdb, []string{b.stream}, "g", "self", idleMS).StringSlice()
	}
	names, err := reap(0)
	require.NoError(t, err)
	require.Empty(t, names, "no stream")
	b.add("a", "b")
	names, err = reap(0)
	require.NoError(t, err)
	require.Empty(t, names, "no group")

	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, "g"))
	for _, consumer := range []string{"self", "other", "third"} {
		require.NoError(t, b.rdb.XGroupCreateConsumer(t.Context(), b.stream, "g", consumer).Err())
	}
	names, err = reap(3_600_000)
	require.NoError(t, err)
	require.Empty(t, names, "no consumer was silent for that long")
	require.NoError(t, b.rdb.XReadGroup(t.Context(), &redis.XReadGroupArgs{
		Group: "g", Consumer: "with a pending entry", Streams: []string{b.stream, ">"}, Count: 1, Block: -1,
	}).Err())
	names, err = reap(0)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"other", "third"}, names)

	require.NoError(t, b.rdb.Set(t.Context(), b.stream, "", 0).Err())
	_, err = reap(0)
	require.ErrorContains(t, err, "WRONGTYPE")
}

func TestKeepAnswers(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(3)
	ids := b.takeAway("worker", 3)
	require.NoError(t, b.rdb.XAck(t.Context(), b.stream, reservation.Group, ids[2]).Err())
	keep := func(consumer string, pairs ...any) []string {
		answers, err := lua.Keep.Run(t.Context(), b.rdb, []string{b.stream},
			append([]any{reservation.Group, consumer}, pairs...)...).StringSlice()
		require.NoError(t, err)
		return answers
	}
	require.Equal(t, []string{stream.LeaseKept, stream.LeaseKept, stream.LeaseGone},
		keep("worker", ids[0], 0, ids[1], 7, ids[2], 0))
	require.Equal(t, []string{stream.LeaseTaken}, keep("another", ids[0], 9))
	require.Equal(t, []string{stream.LeaseKept}, keep("worker", ids[1], 3), "a repeat does not lower the count")
	counts := fmt.Sprintf("%s=%d %s=%d", b.pending()[0].Consumer, b.pending()[0].RetryCount, b.pending()[1].Consumer,
		b.pending()[1].RetryCount)
	require.Equal(t, "worker=1 worker=7", counts)

	require.NoError(t, b.rdb.XDel(t.Context(), b.stream, ids[0]).Err())
	require.Equal(t, []string{stream.LeaseGone}, keep("worker", ids[0], 0), "deleted from the stream")
	require.Error(t, lua.Keep.Run(t.Context(), b.rdb, []string{b.stream}, reservation.Group, "worker", ids[0]).Err())
}
