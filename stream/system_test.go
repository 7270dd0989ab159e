//go:build system

package stream_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/stream"
)

// The AOF of Redis 7.0 does not hold how many entries a group has read: after a restart the lag that Redis reports has
// no bound.
func TestBacklogAfterRestartOfRedis(t *testing.T) {
	t.Parallel()
	for _, rewritten := range []bool{false, true} {
		t.Run(fmt.Sprintf("rewritten=%v", rewritten), func(t *testing.T) {
			t.Parallel()
			server := testkit.OwnRedis(t)
			b := newStreamBenchAt(t, server.URL, "orders")
			b.addMany(1)
			handle := func(n int) {
				t.Helper()
				require.NoError(t, b.rdb.XAck(t.Context(), b.stream, reservation.Group, b.takeAway("worker-1", n)...).Err())
			}
			handle(1)
			if rewritten {
				require.NoError(t, b.rdb.BgRewriteAOF(t.Context()).Err())
			}
			const entries = 3000
			b.addMany(entries)
			handle(entries)
			_, err := stream.TrimOnce(t.Context(), b.rdb, b.stream)
			require.NoError(t, err)
			b.addMany(300) // they stay in the stream when they are handled
			handle(300)
			server.Kill()
			require.NoError(t, server.Restart(t.Context()))

			waits := func(lag, pending int64) {
				t.Helper()
				backlog := b.backlog()
				require.True(t, backlog.LagKnown)
				require.Equal(t, []int64{lag, pending}, []int64{backlog.Lag, backlog.Pending})
				require.Contains(t, scrape(t, b, testshop.Soon, 0),
					fmt.Sprintf("stampede_stream_waiting_orders{group=\"fulfillment\",stream=%q} %d\n", b.stream, lag+pending))
			}
			testkit.Eventually(t, testshop.Soon, "Redis answers", func() bool { return b.rdb.Ping(t.Context()).Err() == nil })
			waits(0, 0)
			b.addMany(7)
			waits(7, 0)
			b.addMany(500)
			waits(507, 0)
			taken := b.takeAway("worker-1", 100)
			waits(407, 100)
			require.NoError(t, b.rdb.XAck(t.Context(), b.stream, reservation.Group, taken...).Err())
			waits(407, 0)
			_, err = stream.TrimOnce(t.Context(), b.rdb, b.stream)
			require.NoError(t, err)
			waits(407, 0)
			handle(407)
			waits(0, 0)
		})
	}
}

// A Redis that accepts connections and does not answer delays a scrape by its time-out only.
func TestBacklogCollectorTimesOutWithoutRedis(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	b.publish(1)
	require.NoError(t, b.rdb.Do(t.Context(), "CLIENT", "PAUSE", 60_000, "ALL").Err())
	began := time.Now()
	text := scrape(t, b, 200*time.Millisecond, 0)
	require.Less(t, time.Since(began), 10*time.Second, "the client's own retries take 12 s")
	require.Contains(t, text, "stampede_stream_reachable")
	require.NotContains(t, text, "stampede_stream_length_entries{")
	require.True(t, strings.Contains(text, `stream="orders"} 0`), text)
	server.Kill() // SIGTERM takes effect only after the pause
	require.Error(t, b.rdb.Ping(t.Context()).Err())
}

// Subscribing works while Redis is away, and a crash of Redis during the work loses nothing.
func TestSubscriberSurvivesRedisCrash(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	const total = 4000
	missing := make(map[string]bool, total)
	for _, uuid := range b.publish(total) {
		missing[uuid] = true
	}
	server.Kill()
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) { c.PageMax = 100 }))
	require.NoError(t, server.Restart(t.Context()))

	var crash sync.WaitGroup
	for n := 0; len(missing) > 0; n++ {
		if n == total/4 || n == total/2 {
			crash.Wait()
			crash.Go(func() {
				server.Kill()
				if err := server.Restart(context.WithoutCancel(t.Context())); err != nil {
					t.Error(err)
				}
			})
		}
		msg := receive(t, messages)
		delete(missing, msg.UUID)
		msg.Ack()
	}
	crash.Wait()
	// Entries whose ack or delivery was lost are delivered again.
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for msg := range messages {
			msg.Ack()
		}
	}()
	b.awaitNonePending()
	_, entries, _ := b.deadLetters.snapshot()
	require.Empty(t, entries)
}
