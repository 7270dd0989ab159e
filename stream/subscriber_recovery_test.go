package stream_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
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
		c.Client.(*redis.Client).AddHook(testkit.Hook(reply.process))
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
	b.rdb.AddHook(testkit.Hook(ackHook.process))
	messages := b.subscribe(b.subscriber("worker-1"))
	receiveUUIDs(t, messages, 1)
	observer.awaitNonePending()
	require.Zero(t, ackHook.left())
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
	b.rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
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
	sub := b.subscriber("worker-1")
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
