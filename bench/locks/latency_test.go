package locks

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/page"
)

// BenchmarkUncontended measures how long one client takes to acquire and release a lock without
// contention.
func BenchmarkUncontended(b *testing.B) {
	for _, p := range []persistence{inMemory, aofAlways} {
		for _, another := range []bool{true, false} {
			name := "the same key"
			if another {
				name = "another key each time"
			}
			b.Run(p.name+"/"+name, func(b *testing.B) {
				s := serverWith(b, p)
				var candidates []timed
				for _, l := range []library{watched, unwatched, redislockDefault, redsyncDefault, rueidislock1} {
					candidates = append(candidates, timed{Name: l.name, Times: uncontended(b, s.open(b, l), another)})
				}
				// The Java program measures one key only. A smoke test starts it once.
				if !another && (b.N > 1 || p.name == inMemory.name) {
					candidates = s.withRedisson(b, candidates, func(key string, n int) string {
						return fmt.Sprintf("bench-uncontended %s %d", key, n)
					})
				}
				turns, times := scale(b, 15, 1), scale(b, 200, 20)
				timings := compareTimes(b, turns, times, candidates...)
				figures.Put(page.Table{
					Title: "Acquire and release without contention: " + name + ", " + p.name,
					Note:  fmt.Sprintf("One client, one lock at a time. %d rounds of %d each.", b.N, turns*times),
					Head:  timingHead("acquire + release"), Rows: timingRows(timings),
				})
			})
		}
	}
}

func uncontended(b *testing.B, c client, another bool) func(times int) sample {
	same := newKey()
	return func(times int) sample {
		took := make([]time.Duration, times)
		for i := range took {
			key := same
			if another {
				key = newKey()
			}
			began := time.Now()
			release, err := c.acquire(b.Context(), key)
			if err == nil {
				err = release()
			}
			took[i] = time.Since(began)
			require.NoError(b, err)
		}
		return sum(took)
	}
}

// scale is the amount of work in a round. A single round is a smoke test, or the warm-up before the
// rounds that count, and is small.
func scale(b *testing.B, full, single int) int {
	if b.N == 1 {
		return single
	}
	return full
}

func timingHead(what string) []string {
	return []string{"", what + ", median", "p99", "÷ the first (min–max over rounds)"}
}

func timingRows(timings []timing) [][]string {
	var rows [][]string
	for i, t := range timings {
		ratio := "1"
		if i > 0 {
			ratio = fmt.Sprintf("**%.2f** (%.2f–%.2f)", t.Ratio, t.RatioMin, t.RatioMax)
		}
		rows = append(rows, []string{t.Name, duration(t.P50), duration(t.P99), ratio})
	}
	return rows
}

// duration formats a time with about three digits.
func duration(d time.Duration) string {
	switch {
	case d < 100*time.Microsecond:
		return fmt.Sprintf("%.1f µs", float64(d)/float64(time.Microsecond))
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.0f µs", float64(d)/float64(time.Microsecond))
	}
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}
