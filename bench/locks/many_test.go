package locks

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/benchkit"
)

// BenchmarkMany measures the cost of a lock for a caller that needs many, such as a worker that
// locks the users of a batch: the time to take and release all, divided by their number.
func BenchmarkMany(b *testing.B) {
	for _, number := range []int{64, 256, 512} {
		b.Run(fmt.Sprint(number), func(b *testing.B) {
			s := serverWith(b, inMemory)
			candidates := []benchkit.Timed{{Name: "stampede-TryEach", Times: tryEach(b, s, number)}}
			for _, l := range []library{watched, redislockDefault, redsyncDefault, rueidislock1} {
				candidates = append(candidates, benchkit.Timed{
					Name:  l.name + "-one-by-one",
					Times: oneByOne(b, s.open(b, l), number),
				})
			}
			turns, times := scale(b, 5, 1), scale(b, 2048, 512)/number
			timings := benchkit.CompareTimes(b, turns, times, candidates...)
			figures.Put(benchkit.Table{
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
func tryEach(b *testing.B, s *server, number int) func(times int) benchkit.Sample {
	locker, c, err := openLocker(s.url, nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, c.close()) })
	return func(times int) benchkit.Sample {
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
		return benchkit.Sum(took)
	}
}

func oneByOne(b *testing.B, c client, number int) func(times int) benchkit.Sample {
	releases := make([]func() error, number)
	return func(times int) benchkit.Sample {
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
		return benchkit.Sum(took)
	}
}

func newKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = newKey()
	}
	return keys
}
