package locks

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/page"
)

const (
	// A holder keeps the lock for a random time in this range, so that pollers do not synchronize with
	// the releases.
	holdMin, holdMax = time.Millisecond, 5 * time.Millisecond
	// stallTimeout ends a benchmark in which no waiter gets the lock.
	stallTimeout = 30 * time.Second
)

// BenchmarkHandover measures how long a released lock takes to reach the next of 32 waiters: from just
// before the call of release until the next acquire returns. A participant that released the lock waits
// again once the next one has it, so that it cannot take it back immediately and 32 always wait.
func BenchmarkHandover(b *testing.B) {
	for _, mode := range []struct {
		name, where string
		alone       bool
	}{
		{"one-client", "goroutines (in Redisson: threads) that share a client", false},
		{"own-clients", "each with its own client, as if in another process", true},
	} {
		b.Run(mode.name, func(b *testing.B) {
			s := serverWith(b, inMemory)
			waiters := scale(b, 32, 8)
			var candidates []timed
			for _, l := range contended {
				c := crowd{b: b, name: l.name, events: make(chan event, 4*waiters)}
				for i := range waiters + 1 {
					if i == 0 || mode.alone {
						c.clients = append(c.clients, s.open(b, l))
					} else {
						c.clients = append(c.clients, c.clients[0])
					}
				}
				candidates = append(candidates, timed{Name: l.name, Times: c.handOvers})
			}
			if !mode.alone { // 33 Java processes would saturate the machine
				candidates = s.withRedisson(b, candidates, func(key string, n int) string {
					return fmt.Sprintf("bench-contended %s %d %d %d", key, waiters, n, ((holdMin + holdMax) / 2).Microseconds())
				})
			}
			compareHandovers(b, s, mode.where, waiters, candidates)
		})
	}
}

func compareHandovers(b *testing.B, s *server, where string, waiters int, candidates []timed) {
	b.Helper()
	commands := make([]int, len(candidates))
	for i := range candidates {
		times := candidates[i].Times
		candidates[i].Times = func(n int) sample {
			before := s.work(b)
			measured := times(n)
			commands[i] += s.work(b).since(before).commands
			return measured
		}
	}
	turns, times := scale(b, 3, 1), scale(b, 100, 10)
	timings := compareTimes(b, turns, times, candidates...)
	rows := timingRows(timings)
	for i := range rows {
		rows[i] = append(rows[i], fmt.Sprintf("%.0f", float64(commands[i])/float64(b.N*turns*times)))
	}
	figures.Put(page.Table{
		Title: "Hand-over: " + where,
		Note: fmt.Sprintf("From just before the release until the next acquire returns, with %d waiters. "+
			"The lock is held for %v to %v; persistence is off. %d rounds of %d hand-overs.",
			waiters, holdMin, holdMax, b.N, turns*times),
		Head: append(timingHead("hand-over"), "Redis commands per hand-over"), Rows: rows,
	})
}

// crowd passes one lock around among waiters + 1 participants.
type crowd struct {
	b       *testing.B
	name    string
	clients []client // of each participant
	events  chan event

	// released is when the last holder began its release, and holders is how many hold the lock.
	released atomic.Pointer[time.Time]
	holders  atomic.Int32
}

// event is what a participant did.
type event struct {
	who  int
	did  string        // got or ended, or the reason of a failure
	took time.Duration // from the release until it got the lock
}

const (
	got   = "got"
	ended = "ended"
)

// handOvers measures hand-overs, beginning with the release of the first holder.
func (c *crowd) handOvers(times int) sample {
	key := newKey()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	again := make([]chan struct{}, len(c.clients))
	join := func(i int) {
		again[i] = make(chan struct{}, 1)
		go c.participate(ctx, i, key, again[i])
	}
	join(0)
	holder := c.next(got).who
	// The waiters start spread over the longest delay of the pollers: if all started at the same time,
	// they would poll at the same time.
	arrivals := make([]time.Duration, len(c.clients)-1)
	for i := range arrivals {
		arrivals[i] = rand.N(time.Duration(scale(c.b, 250, 25)) * time.Millisecond)
	}
	slices.Sort(arrivals)
	began := time.Now()
	for i, arrival := range arrivals {
		<-time.After(time.Until(began.Add(arrival)))
		join(i + 1)
	}
	<-time.After(20 * time.Millisecond) // the last one is waiting
	again[0] <- struct{}{}

	took := make([]time.Duration, times)
	for i := range took {
		next := c.next(got)
		took[i] = next.took
		again[holder] <- struct{}{}
		holder = next.who
	}
	stop()
	for range c.clients {
		for c.next(got, ended).did != ended {
		}
	}
	return sum(took)
}

// next waits for one of these events.
func (c *crowd) next(did ...string) event {
	c.b.Helper()
	select {
	case e := <-c.events:
		require.Contains(c.b, did, e.did, c.name)
		return e
	case <-time.After(stallTimeout):
		c.b.Fatalf("%s: none of %v within %v", c.name, did, stallTimeout)
		panic("not reached")
	}
}

// participate acquires, holds and releases the lock, once more for each signal, until ctx is done. The
// first participant holds it until the signal.
func (c *crowd) participate(ctx context.Context, who int, key string, again <-chan struct{}) {
	emit := func(did string, took time.Duration) { c.events <- event{who, did, took} }
	defer func() { emit(ended, 0) }()
	for first := who == 0; ; first = false {
		release, err := c.clients[who].acquire(ctx, key)
		now := time.Now()
		if err != nil {
			if ctx.Err() == nil {
				emit("acquire: "+err.Error(), 0)
			}
			return
		}
		if c.holders.Add(1) > 1 {
			emit("two hold the lock", 0)
			return
		}
		if first {
			emit(got, 0)
			wait(ctx, again)
		} else {
			emit(got, now.Sub(*c.released.Load()))
			wait(ctx, time.After(holdMin+rand.N(holdMax-holdMin)))
		}
		c.holders.Add(-1)
		now = time.Now()
		c.released.Store(&now)
		if err := release(); err != nil && ctx.Err() == nil { // rueidislock's lease ends with ctx
			emit("release: "+err.Error(), 0)
		}
		wait(ctx, again)
		if ctx.Err() != nil {
			return
		}
	}
}

func wait[T any](ctx context.Context, until <-chan T) {
	select {
	case <-until:
	case <-ctx.Done():
	}
}
