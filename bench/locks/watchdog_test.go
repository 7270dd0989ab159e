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

	"stampede/bench/page"
	"stampede/lock"
)

// held is the cost of holding and renewing many locks.
type held struct {
	goroutines float64 // besides those that ran before
	bytes      float64 // of heap and stacks for each lock
	commands   float64 // in Redis per second
	redisCPU   float64 // of one core
	processCPU float64
}

// BenchmarkHeld measures the cost of locks that a watchdog renews. redsync and redislock have none;
// their users write one, usually with a goroutine for each lock.
func BenchmarkHeld(b *testing.B) {
	// A lease is renewed at a third of it, so twice in the measured time.
	lease := time.Duration(scale(b, 9_000, 1_500)) * time.Millisecond
	number := scale(b, 10_000, 1_000)
	s := serverWith(b, inMemory)
	libraries := []library{
		{"stampede", func(url string) (client, error) {
			_, c, err := openLocker(url, []lock.Option{lock.WithLease(lease)})
			return c, err
		}},
		{"rueidislock", openRueidislock(lease)},
	}
	found := make([][]held, len(libraries))
	for range b.N {
		for i, l := range libraries {
			found[i] = append(found[i], holdMany(b, s, l, number, 2*lease/3))
		}
	}
	b.ReportMetric(0, "ns/op") // a round is not an operation
	var rows [][]string
	for i, l := range libraries {
		medianOf := func(of func(held) float64) float64 {
			var values []float64
			for _, h := range found[i] {
				values = append(values, of(h))
			}
			slices.Sort(values)
			return values[len(values)/2]
		}
		goroutines := medianOf(func(h held) float64 { return h.goroutines })
		bytes := medianOf(func(h held) float64 { return h.bytes })
		commands := medianOf(func(h held) float64 { return h.commands })
		redisCPU := medianOf(func(h held) float64 { return h.redisCPU })
		cpuOfProcess := medianOf(func(h held) float64 { return h.processCPU })
		b.ReportMetric(goroutines, l.name+"_goroutines")
		b.ReportMetric(bytes, l.name+"_B/lock")
		b.ReportMetric(commands, l.name+"_commands/s")
		rows = append(rows, []string{
			l.name, fmt.Sprintf("%.0f", goroutines), fmt.Sprintf("%.0f", bytes), fmt.Sprintf("%.0f", commands),
			fmt.Sprintf("%.2f %%", 100*redisCPU), fmt.Sprintf("%.2f %%", 100*cpuOfProcess),
		})
	}
	figures.Put(page.Table{
		Title: "Locks held and renewed",
		Note: fmt.Sprintf("%d locks with a lease of %v, renewed every %v. With the default of 30 s all rates are lower "+
			"in proportion. Persistence is off. Medians of %d rounds.",
			number, lease, lease/3, b.N),
		Head: []string{
			"", "goroutines", "bytes of the process per lock", "Redis commands/s", "Redis, of one core",
			"process, of one core",
		},
		Rows: rows,
	})
}

// holdMany acquires locks and measures the cost of holding them for a time. All of them must still be
// held at the end.
func holdMany(b *testing.B, s *server, l library, number int, during time.Duration) held {
	b.Helper()
	keys := newKeys(number)
	releases := make([]func() error, number)
	c, err := l.open(s.url)
	require.NoError(b, err)
	defer func() { require.NoError(b, c.close()) }()
	release, err := c.acquire(b.Context(), newKey()) // opens connections and starts goroutines
	require.NoError(b, err)
	require.NoError(b, release())
	goroutines, bytes := runtime.NumGoroutine(), inUse()

	// Acquired in parallel, because the first locks must not be renewed before the last is
	// acquired.
	const together = 16
	var acquiring errgroup.Group
	for first := range together {
		acquiring.Go(func() error {
			for i := first; i < number; i += together {
				var err error
				if releases[i], err = c.acquire(b.Context(), keys[i]); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(b, acquiring.Wait())

	h := held{
		goroutines: float64(runtime.NumGoroutine() - goroutines),
		bytes:      float64(inUse()-bytes) / float64(number),
	}
	before, cpu, began := s.work(b), processCPU(b), time.Now()
	<-time.After(during)
	took := time.Since(began).Seconds()
	w := s.work(b).since(before)
	h.commands = float64(w.commands) / took
	h.redisCPU = w.cpu.Seconds() / took
	h.processCPU = (processCPU(b) - cpu).Seconds() / took

	for _, release := range releases {
		require.NoError(b, release(), "a lock was lost while it was held")
	}
	return h
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
