package locks

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
)

const (
	anotherKey = "another key each time"
	sameKey    = "the same key"
)

// BenchmarkUncontended measures how long one client takes to acquire and release a lock without
// contention.
func BenchmarkUncontended(b *testing.B) {
	turns, times := rig.Scale(b, 15, 1), rig.Scale(b, 200, 20)
	var candidates []rig.Candidate
	for _, l := range []library{watched, unwatched, redislockDefault, redsyncDefault, rueidislock1} {
		clients := map[string]client{}
		for _, p := range persistences {
			clients[p.name] = serverWith(b, p).open(b, l)
		}
		same := newKey()
		candidates = append(candidates, rig.Candidate{Name: l.name, Turn: func(b *testing.B, _ int) rig.Values {
			v := rig.Values{}
			for _, p := range persistences {
				put(v, anotherKey+p.name, uncontended(b, clients[p.name], times, newKey))
				put(v, sameKey+p.name, uncontended(b, clients[p.name], times, func() string { return same }))
			}
			return v
		}})
	}
	// The Java program measures one key only. A smoke test starts it once.
	candidates = withRedisson(candidates, func(b *testing.B, v rig.Values) {
		for _, p := range persistences {
			if b.N > 1 || p.name == inMemory.name {
				serverWith(b, p).java(b).run(b, v, sameKey+p.name, fmt.Sprintf("bench-uncontended %s %d", newKey(), times))
			}
		}
	})
	results := rig.CompareInTurns(b, turns, candidates...)
	table := rig.Table{
		Title: "Acquire and release without contention",
		Note: fmt.Sprintf("One client, one lock at a time: the median, and its ratio to the first (least–greatest over "+
			"rounds). %d rounds of %d each.", b.N, turns*times),
		Head: []string{""},
	}
	for _, c := range candidates {
		table.Rows = append(table.Rows, []string{c.Name})
	}
	for _, p := range persistences {
		for _, key := range []string{anotherKey, sameKey} {
			table.Head = append(table.Head, p.name+": "+key)
			for i, c := range candidates {
				table.Rows[i] = append(table.Rows[i], compared(results, c.Name, watched.name, key+p.name+p50))
			}
		}
	}
	rig.Put(table)
}

func uncontended(b *testing.B, c client, times int, key func() string) []time.Duration {
	took := make([]time.Duration, times)
	for i := range took {
		key := key()
		began := time.Now()
		release, err := c.acquire(b.Context(), key)
		if err == nil {
			err = release()
		}
		took[i] = time.Since(began)
		require.NoError(b, err)
	}
	return took
}

// BenchmarkMany measures the cost of a lock for a caller that needs many, such as a worker that locks
// the users of a batch: the time to take and release all, divided by their number.
func BenchmarkMany(b *testing.B) {
	numbers := []int{64, 256, 512}
	const most = 2048 // locks in a turn
	s := serverWith(b, inMemory)
	locker, c, err := openLocker(s.url, nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, c.close()) })
	candidates := []rig.Candidate{many("stampede-TryEach", numbers, most, func(b *testing.B, keys []string) error {
		lease, busy, err := locker.TryEach(b.Context(), keys)
		require.Empty(b, busy)
		if err != nil {
			return err
		}
		return lease.Release(b.Context())
	})}
	for _, l := range []library{watched, redislockDefault, redsyncDefault, rueidislock1} {
		c := s.open(b, l)
		candidates = append(candidates, many(l.name+", one by one", numbers, most, func(b *testing.B, keys []string) error {
			releases := make([]func() error, len(keys))
			for i, key := range keys {
				var err error
				if releases[i], err = c.acquire(b.Context(), key); err != nil {
					return err
				}
			}
			for _, release := range releases {
				if err := release(); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	turns := rig.Scale(b, 5, 1)
	results := rig.CompareInTurns(b, turns, candidates...)
	table := rig.Table{
		Title: "Many locks at a time, cost of each",
		Note: fmt.Sprintf("One client takes all and then releases all; the time is divided by their number. The median, "+
			"and its ratio to the first (least–greatest over rounds). Persistence is off. %d rounds of %d locks.",
			b.N, turns*rig.Scale(b, most, most/4)),
		Head: []string{""},
	}
	for _, number := range numbers {
		table.Head = append(table.Head, fmt.Sprint(number, " locks"))
	}
	for _, c := range candidates {
		row := []string{c.Name}
		for _, number := range numbers {
			row = append(row, compared(results, c.Name, candidates[0].Name, fmt.Sprint(number)+p50))
		}
		table.Rows = append(table.Rows, row)
	}
	rig.Put(table)
}

// many measures a way to take and release all of these keys.
func many(name string, numbers []int, most int, all func(b *testing.B, keys []string) error) rig.Candidate {
	return rig.Candidate{Name: name, Turn: func(b *testing.B, _ int) rig.Values {
		v := rig.Values{}
		for _, number := range numbers {
			took := make([]time.Duration, rig.Scale(b, most, most/4)/number)
			for i := range took {
				keys := newKeys(number)
				began := time.Now()
				require.NoError(b, all(b, keys))
				took[i] = time.Since(began) / time.Duration(number)
			}
			put(v, fmt.Sprint(number), took)
		}
		return v
	}}
}

func newKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = newKey()
	}
	return keys
}
