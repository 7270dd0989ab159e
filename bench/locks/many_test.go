package locks

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/page"
)

// BenchmarkMany measures the cost of a lock for a caller that needs many, such as a worker that
// locks the users of a batch: the time to take and release all, divided by their number.
func BenchmarkMany(b *testing.B) {
	for _, number := range []int{64, 256, 512} {
		b.Run(fmt.Sprint(number), func(b *testing.B) {
			s := serverWith(b, inMemory)
			candidates := []timed{{Name: "stampede-TryEach", Times: tryEach(b, s, number)}}
			for _, l := range []library{watched, redislockDefault, redsyncDefault, rueidislock1} {
				candidates = append(candidates, timed{
					Name:  l.name + "-one-by-one",
					Times: oneByOne(b, s.open(b, l), number),
				})
			}
			turns, times := scale(b, 5, 1), scale(b, 2048, 512)/number
			timings := compareTimes(b, turns, times, candidates...)
			figures.Put(page.Table{
				Title: fmt.Sprintf("%d locks at a time, cost of each", number),
				Note: fmt.Sprintf("One client takes all and then releases all. The time is divided by %d. "+
					"Persistence is off. %d rounds of %d.",
					number, b.N, turns*times),
				Head: timingHead("acquire + release of one lock"), Rows: timingRows(timings),
			})
		})
	}
}

// tryEach takes all locks with one call and releases them with another.
func tryEach(b *testing.B, s *server, number int) func(times int) sample {
	locker, c, err := openLocker(s.url, nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, c.close()) })
	return func(times int) sample {
		took := make([]time.Duration, times)
		for i := range took {
			keys := newKeys(number)
			began := time.Now()
			lease, busy, err := locker.TryEach(b.Context(), keys)
			if err == nil {
				err = lease.Release(b.Context())
			}
			took[i] = time.Since(began) / time.Duration(number)
			require.NoError(b, err)
			require.Empty(b, busy)
		}
		return sum(took)
	}
}

func oneByOne(b *testing.B, c client, number int) func(times int) sample {
	releases := make([]func() error, number)
	return func(times int) sample {
		took := make([]time.Duration, times)
		for i := range took {
			keys := newKeys(number)
			var err error
			began := time.Now()
			for j := 0; j < number && err == nil; j++ {
				releases[j], err = c.acquire(b.Context(), keys[j])
			}
			for j := 0; j < number && err == nil; j++ {
				err = releases[j]()
			}
			took[i] = time.Since(began) / time.Duration(number)
			require.NoError(b, err)
		}
		return sum(took)
	}
}

func newKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = newKey()
	}
	return keys
}
