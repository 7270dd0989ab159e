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

	"stampede/bench/rig"
)

const (
	// A holder keeps the lock for a random time in this range, so that pollers do not synchronize with
	// the releases.
	holdMin, holdMax = time.Millisecond, 5 * time.Millisecond
	// stallTimeout ends a benchmark in which no waiter gets the lock.
	stallTimeout = 30 * time.Second
)

// The two ways to share clients, and a figure beside the times.
const (
	oneClient  = "one client"
	ownClients = "own clients"
	commands   = ", commands"
)

// BenchmarkHandover measures how long a released lock takes to reach the next of 32 waiters: from just
// before the call of release until the next acquire returns. A participant that released the lock waits
// again once the next one has it, so that it cannot take it back immediately and 32 always wait. The
// participants share a client, or each has its own, as if in another process.
func BenchmarkHandover(b *testing.B) {
	s := serverWith(b, inMemory)
	waiters := rig.Scale(b, 32, 8)
	turns, times := rig.Scale(b, 3, 1), rig.Scale(b, 100, 10)
	measure := func(v rig.Values, mode string, handOvers func()) {
		before := s.work(b)
		handOvers()
		v[mode+commands] = float64(s.work(b).since(before).commands) / float64(times)
	}
	var candidates []rig.Candidate
	for _, l := range contended {
		crowds := map[string]*crowd{}
		for mode, clients := range map[string]int{oneClient: 1, ownClients: waiters + 1} {
			c := &crowd{b: b, name: l.name, events: make(chan event, 4*waiters)}
			for i := range waiters + 1 {
				if i < clients {
					c.clients = append(c.clients, s.open(b, l))
				} else {
					c.clients = append(c.clients, c.clients[0])
				}
			}
			crowds[mode] = c
		}
		candidates = append(candidates, rig.Candidate{Name: l.name, Turn: func(*testing.B, int) rig.Values {
			v := rig.Values{}
			for mode, c := range crowds {
				measure(v, mode, func() { put(v, mode, c.handOvers(times)) })
			}
			return v
		}})
	}
	// Its waiters are threads that share a client: 33 Java processes would saturate the machine.
	candidates = withRedisson(candidates, func(b *testing.B, v rig.Values) {
		java := s.java(b)
		measure(v, oneClient, func() {
			java.run(b, v, oneClient, fmt.Sprintf("bench-contended %s %d %d %d", newKey(), waiters, times,
				((holdMin+holdMax)/2).Microseconds()))
		})
	})
	results := rig.CompareInTurns(b, turns, candidates...)
	table := rig.Table{
		Title: "Hand-over",
		Note: fmt.Sprintf("From just before the release until the next acquire returns, with %d waiters: goroutines (in "+
			"Redisson: threads) that share a client, and with a client each, as if in other processes. The median, and its "+
			"ratio to the first (least–greatest over rounds); commands of Redis for each hand-over. The lock is held for %v "+
			"to %v; persistence is off. %d rounds of %d hand-overs.", waiters, holdMin, holdMax, b.N, turns*times),
		Head: []string{"", "shared client", "p99", "commands", "own clients", "p99", "commands"},
	}
	for _, c := range candidates {
		row := []string{c.Name}
		for _, mode := range []string{oneClient, ownClients} {
			row = append(row, compared(results, c.Name, watched.name, mode+p50),
				results.Of(c.Name, mode+p99).FormatMedian(micros), results.Of(c.Name, mode+commands).FormatMedian(rig.Count))
		}
		table.Rows = append(table.Rows, row)
	}
	rig.Put(table)
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
func (c *crowd) handOvers(times int) []time.Duration {
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
		arrivals[i] = rand.N(time.Duration(rig.Scale(c.b, 250, 25)) * time.Millisecond)
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
	return took
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
