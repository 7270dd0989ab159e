package ratelimit

import (
	"encoding/binary"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRateParsesItsString(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Rate{"5/s": 5, "30/m": 0.5, "36/h": 0.01, "0": 0, "0.5/s": 0.5} {
		var r Rate
		require.NoError(t, r.UnmarshalText([]byte(text)), text)
		require.InDelta(t, float64(want), float64(r), 1e-9, text)
		var again Rate
		require.NoError(t, again.UnmarshalText([]byte(r.String())), r.String())
		require.InDelta(t, float64(r), float64(again), 1e-6)
	}
	for _, wrong := range []string{
		"", "5", "/s", "s", "-1/s", "NaN/s", "Inf/s", "5/d", "5 /s", "5/s ", "10001/s", "1e-9/s", "0x",
	} {
		var r Rate
		require.Error(t, r.UnmarshalText([]byte(wrong)), wrong)
	}
}

func TestTakeAllowsBurstThenRate(t *testing.T) {
	t.Parallel()
	l := New(5, 20)
	now := l.start
	for range 20 {
		_, ok := l.Take("ann", now)
		require.True(t, ok)
	}
	for range 100 {
		wait, ok := l.Take("ann", now) // refused calls do not count
		require.False(t, ok)
		require.InDelta(t, 200*time.Millisecond, wait, float64(time.Millisecond))
	}
	_, ok := l.Take("bob", now)
	require.True(t, ok, "each key has its own bucket")
	_, ok = l.TakeBytes([]byte("ann"), now.Add(199*time.Millisecond))
	require.False(t, ok)
	_, ok = l.TakeBytes([]byte("ann"), now.Add(200*time.Millisecond))
	require.True(t, ok)
	_, ok = l.Take("ann", now.Add(200*time.Millisecond))
	require.False(t, ok)
	// A caller with a slightly earlier time finds the same bucket.
	_, ok = l.Take("ann", now.Add(100*time.Millisecond))
	require.False(t, ok)
}

// naive is the textbook GCRA: its time does not wrap, and its map holds every key.
type naive struct {
	burst int64
	full  map[string]int64 // the tick at which a bucket is full again
}

func (n naive) take(key string, tick int64) bool {
	full := max(n.full[key], tick) + ticksPerInterval
	if full-tick > n.burst*ticksPerInterval {
		return false
	}
	n.full[key] = full
	return true
}

// Some pauses are longer than 32 bits of ticks.
func TestTakeMatchesNaiveGCRA(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		rate := Rate(rapid.SampledFrom([]float64{0.01, 0.5, 5, 1000, MaxPerSecond}).Draw(t, "rate"))
		burst := rapid.SampledFrom([]int{1, 2, 20, MaxBurst}).Draw(t, "burst")
		l := newLimiter(rate, burst, 2*ways)
		model := naive{int64(burst), make(map[string]int64)}
		var tick int64
		pause := rapid.OneOf(
			rapid.Just(int64(0)),
			rapid.Int64Range(1, 3*ticksPerInterval),
			rapid.Int64Range(1, int64(burst)*ticksPerInterval),
			rapid.Int64Range(sweepTicks-10, sweepTicks+10),
			rapid.Int64Range(1<<32-2*int64(burst)*ticksPerInterval, 1<<32),
			rapid.Int64Range(1, 1<<34),
		)
		for range rapid.IntRange(1, 200).Draw(t, "calls") {
			// The clock of a process has 64 bits of nanoseconds.
			tick = min(tick+pause.Draw(t, "pause"), int64(1<<62)/int64(l.tick))
			key := rapid.SampledFrom([]string{"a", "b", "c", "d", "e"}).Draw(t, "key") // fewer than ways
			_, got := l.Take(key, l.start.Add(time.Duration(tick)*l.tick))
			if want := model.take(key, tick); got != want {
				t.Fatalf("%s at tick %d: %v, want %v", key, tick, got, want)
			}
		}
		if l.Evicted() != 0 {
			t.Fatalf("%d evicted", l.Evicted())
		}
	})
}

func TestTakeEvictsOldestOfFullSet(t *testing.T) {
	t.Parallel()
	l := newLimiter(1, 1, ways)
	now := l.start
	key := func(i int) string { return strconv.Itoa(i) }
	for i := range ways {
		_, ok := l.Take(key(i), now.Add(time.Duration(i)*time.Millisecond))
		require.True(t, ok)
	}
	now = now.Add(ways * time.Millisecond)
	for i := range ways {
		_, ok := l.Take(key(i), now)
		require.False(t, ok, "nothing is evicted yet")
	}
	_, ok := l.Take("one more", now)
	require.True(t, ok)
	require.EqualValues(t, 1, l.Evicted())
	for i := 1; i < ways; i++ {
		_, ok := l.Take(key(i), now)
		require.False(t, ok, "only the oldest is evicted")
	}
	_, ok = l.Take(key(0), now)
	require.True(t, ok)
	require.EqualValues(t, 2, l.Evicted())
	_, ok = l.Take("much later", now.Add(time.Hour))
	require.True(t, ok)
	require.EqualValues(t, 2, l.Evicted(), "a full bucket needs no slot")
}

func TestTakeIsExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	const burst, keys = 100, 5
	l := newLimiter(1, burst, ways)
	var taken [keys]atomic.Int64
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := range 4 * burst * keys {
				if _, ok := l.Take(strconv.Itoa(i%keys), l.start); ok {
					taken[i%keys].Add(1)
				}
			}
		})
	}
	all.Wait()
	for i := range taken {
		require.EqualValues(t, burst, taken[i].Load())
	}
}

func TestTakeAllocatesNothing(t *testing.T) {
	l := New(5, 20)
	now := time.Now()
	address := [8]byte{1}
	assert.Zero(t, testing.AllocsPerRun(1000, func() { l.Take("ann", now) }))
	assert.Zero(t, testing.AllocsPerRun(1000, func() { l.TakeBytes(address[:], now) }))
	assert.EqualValues(t, 8<<20, 8*len(l.slots))
}

// BenchmarkTake uses half a million users in an order that misses caches.
func BenchmarkTake(b *testing.B) {
	const users = 1 << 19
	l := New(5, 20)
	began := time.Now()
	var next atomic.Uint64
	b.ReportAllocs()
	before := cpuTime(b)
	b.RunParallel(func(pb *testing.PB) {
		var user [36]byte
		for i := next.Add(users / 4); pb.Next(); i++ {
			binary.LittleEndian.PutUint64(user[:], i*7919%users)
			l.TakeBytes(user[:], began.Add(time.Duration(i)*time.Microsecond))
		}
	})
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
	b.ReportMetric(float64(l.Evicted()), "evicted")
}

// cpuTime returns the CPU time of this process. On a busy machine wall time is not comparable.
func cpuTime(b *testing.B) time.Duration {
	var used syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// BenchmarkTakeOfOne is the worst case: all calls contend for the slot of one user.
func BenchmarkTakeOfOne(b *testing.B) {
	l := New(MaxPerSecond, MaxBurst)
	began := time.Now()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			l.Take("one user", began)
		}
	})
}
