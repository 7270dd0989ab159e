package locks

import (
	"fmt"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/rig"
	"stampede/lock"
)

// The costs of holding and renewing many locks.
const (
	goroutines        = "goroutines"                    // besides those that ran before
	bytesOfLock       = "bytes of the process per lock" // of heap and stacks
	commandsPerSecond = "Redis commands/s"
	redisCPU          = "Redis, % of a core"
	ownCPU            = "process, % of a core"
)

// BenchmarkHeld measures the cost of locks that a watchdog renews. redsync and redislock have none;
// their users write one, usually with a goroutine for each lock.
func BenchmarkHeld(b *testing.B) {
	// A lease is renewed at a third of it, so twice in the measured time.
	lease := rig.Scale(b, 9*time.Second, 1500*time.Millisecond)
	number := rig.Scale(b, 10_000, 1_000)
	s := serverWith(b, inMemory)
	libraries := []library{
		{"stampede", func(url string) (client, error) {
			_, c, err := openLocker(url, []lock.Option{lock.WithLease(lease)})
			return c, err
		}},
		{"rueidislock", openRueidislock(lease)},
	}
	var candidates []rig.Candidate
	for _, l := range libraries {
		candidates = append(candidates, rig.Candidate{Name: l.name, Turn: func(b *testing.B, _ int) rig.Values {
			return holdMany(b, s, l, number, 2*lease/3)
		}})
	}
	results := rig.Compare(b, candidates...)
	table := rig.Table{
		Title: "Locks held and renewed",
		Note: fmt.Sprintf("%d locks with a lease of %v, renewed every %v. With the default of 30 s all rates are lower "+
			"in proportion. Persistence is off. Medians of %d rounds.", number, lease, lease/3, b.N),
		Head: []string{"", goroutines, bytesOfLock, commandsPerSecond, redisCPU, ownCPU},
	}
	for _, l := range libraries {
		table.Rows = append(table.Rows, slices.Concat([]string{l.name},
			results.Medians(rig.Count, l.name, goroutines, bytesOfLock, commandsPerSecond),
			results.Medians(rig.Ratio, l.name, redisCPU, ownCPU)))
	}
	rig.Put(table)
}

// holdMany acquires locks and measures the cost of holding them for a time. All of them must still be
// held at the end.
func holdMany(b *testing.B, s *server, l library, number int, during time.Duration) rig.Values {
	b.Helper()
	keys := newKeys(number)
	releases := make([]func() error, number)
	c, err := l.open(s.url)
	require.NoError(b, err)
	defer func() { require.NoError(b, c.close()) }()
	release, err := c.acquire(b.Context(), newKey()) // opens connections and starts goroutines
	require.NoError(b, err)
	require.NoError(b, release())
	running, bytes := runtime.NumGoroutine(), inUse()

	// Acquired in parallel, because the first locks must not be renewed before the last is
	// acquired.
	const parallel = 16
	var acquiring errgroup.Group
	for first := range parallel {
		acquiring.Go(func() error {
			for i := first; i < number; i += parallel {
				var err error
				if releases[i], err = c.acquire(b.Context(), keys[i]); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(b, acquiring.Wait())

	v := rig.Values{
		goroutines:  float64(runtime.NumGoroutine() - running),
		bytesOfLock: float64(inUse()-bytes) / float64(number),
	}
	before, cpu, began := s.work(b), processCPU(b), time.Now()
	<-time.After(during)
	took := time.Since(began).Seconds()
	w := s.work(b).since(before)
	v[commandsPerSecond] = float64(w.commands) / took
	v[redisCPU] = 100 * w.cpu.Seconds() / took
	v[ownCPU] = 100 * (processCPU(b) - cpu).Seconds() / took

	for _, release := range releases {
		require.NoError(b, release(), "a lock was lost while it was held")
	}
	return v
}

// inUse is the memory of live objects and of stacks.
func inUse() int64 {
	runtime.GC()
	runtime.GC() // the first one may leave objects with finalizers
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// processCPU is the processor time that this process has used.
func processCPU(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
