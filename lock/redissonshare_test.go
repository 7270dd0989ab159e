//go:build redisson

package lock_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// share is one side's part of a lock: the number of turns and the longest wait.
type share struct {
	Turns   int64 `json:"turns"`
	Longest int64 `json:"longest_ms"`
}

// Threads of Redisson and goroutines of one Locker take turns at a lock. A message wakes a
// goroutine sooner than a Java thread, so without the yield Go would have nearly all turns.
func TestRedissonWaitersGetTheirShareBesideGo(t *testing.T) {
	const seconds = 4
	java := startRedisson(t, beyond)
	for _, c := range []struct {
		threads, goroutines int
		hold                time.Duration
	}{
		{1, 1, time.Millisecond},
		{4, 4, time.Millisecond},
		{4, 4, 0},
		{16, 16, time.Millisecond},
		{4, 4, 10 * time.Millisecond},
		{1, 8, time.Millisecond},
	} {
		t.Run(fmt.Sprintf("%d beside %d, held for %v", c.threads, c.goroutines, c.hold), func(t *testing.T) {
			in := setupInterop(t)
			key := in.key("ann")
			ask := func(seconds int) <-chan string {
				return java.tell(key, "share %s %d %d %d", key, c.threads, c.hold.Microseconds(), seconds)
			}
			java.wait(t, ask(1)) // warms up
			answer := ask(seconds)
			ours := in.share(key, c.goroutines, c.hold, seconds*time.Second)
			var theirs share
			require.NoError(t, json.Unmarshal([]byte(java.wait(t, answer)), &theirs))
			part := float64(theirs.Turns) / float64(theirs.Turns+ours.Turns)
			fair := float64(c.threads) / float64(c.threads+c.goroutines)
			assert.Greater(t, part, fair/2, "%+v, Go %+v", theirs, ours)
			t.Logf("Redisson had %.0f %% of the turns: %+v, Go %+v", 100*part, theirs, ours)
		})
	}
}

func (in interop) share(key string, goroutines int, hold, during time.Duration) share {
	var s share
	var longest atomic.Int64
	end := time.Now().Add(during)
	var all sync.WaitGroup
	for range goroutines {
		all.Go(func() {
			for began := time.Now(); began.Before(end); began = time.Now() {
				err := in.locker.Do(in.ctx, key, func(context.Context) error {
					if waited := time.Since(began).Milliseconds(); waited > longest.Load() {
						longest.Store(waited)
					}
					if hold > 0 {
						<-time.After(hold)
					}
					atomic.AddInt64(&s.Turns, 1)
					return nil
				})
				if !assert.NoError(in.t, err) {
					return
				}
			}
		})
	}
	all.Wait()
	s.Longest = longest.Load()
	return s
}
