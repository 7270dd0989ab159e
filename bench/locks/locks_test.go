package locks

import (
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/designs/redisson"
	"stampede/bench/rig"
	"stampede/internal/dev/localserver"
	"stampede/lock"
)

func TestMain(m *testing.M) {
	if version := redisson.Version(); version != "" {
		rig.MeasuredWith("Redisson " + version)
	}
	rig.Main(m, "lock", "bsm/redislock", "go-redsync/redsync", "redis/go-redis", "redis/rueidis")
}

// The figures of a measurement, in microseconds, under the name of what was measured.
const (
	p50 = ", p50"
	p99 = ", p99"
)

// put adds the percentiles of what was measured to the values of a turn.
func put(v rig.Values, what string, took []time.Duration) {
	v[what+p50], v[what+p99] = percentile(took, 50), percentile(took, 99)
}

// percentile is the smallest value that at least p percent of the values do not exceed, in microseconds.
func percentile(values []time.Duration, p int) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return float64(sorted[(len(sorted)*p+99)/100-1]) / float64(time.Microsecond)
}

// compared writes a median and its ratio to that of the first candidate: "12.0 µs, 1.50 (1.20–1.70)".
func compared(results *rig.Results, name, first, figure string) string {
	s := results.Of(name, figure)
	if s.N == 0 || name == first {
		return s.FormatMedian(micros)
	}
	return s.FormatMedian(micros) + ", " + results.Ratio(name, figure, first, figure).Format(rig.Ratio)
}

// micros writes a time with about three digits.
func micros(v float64) string {
	switch {
	case v < 100:
		return fmt.Sprintf("%.1f µs", v)
	case v < 10_000:
		return fmt.Sprintf("%.0f µs", v)
	}
	return fmt.Sprintf("%.1f ms", v/1000)
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100-i) * time.Microsecond
	}
	for p, want := range map[int]float64{50: 50, 99: 99} {
		assert.InDelta(t, want, percentile(hundred, p), 0)
	}
	assert.InDelta(t, 7, percentile(hundred[93:94], 99), 0)
	assert.InDelta(t, 0.002, percentile([]time.Duration{3, 1, 2}, 50), 0)
}

// persistence is what a Redis writes to disk.
type persistence struct {
	name     string
	settings map[string]string
}

var (
	inMemory  = persistence{"persistence off", map[string]string{"appendonly": "no"}}
	aofAlways = persistence{"appendfsync always", nil} // the default of the private servers

	persistences = []persistence{inMemory, aofAlways}
)

// server is a Redis for the benchmarks.
type server struct {
	url string
	rdb redis.UniversalClient // for INFO; no candidate uses it
	// redisson is a Java process that starts on first use.
	redisson *javaProcess
}

// servers are shared by all benchmarks, which run one after another.
var servers = map[string]*server{}

func serverWith(b *testing.B, p persistence) *server {
	b.Helper()
	if s := servers[p.name]; s != nil {
		return s
	}
	private, err := localserver.StartRedis(context.Background(), localserver.RedisOptions{Settings: p.settings})
	require.NoError(b, err)
	rig.AtExit(private.Stop)
	rdb, err := openRedis(private.URL)
	require.NoError(b, err)
	s := &server{url: private.URL, rdb: rdb}
	rig.AtExit(func() { _ = s.rdb.Close() })
	if len(servers) == 0 {
		rig.MeasuredWith("Redis " + s.info(b, "server")["redis_version"])
	}
	servers[p.name] = s
	return s
}

// open opens a library on the server until the benchmark ends.
func (s *server) open(b *testing.B, l library) client {
	b.Helper()
	c, err := l.open(s.url)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, c.close()) })
	return c
}

var keySerial atomic.Uint64

// newKey returns a new key.
func newKey() string { return "lock:" + strconv.FormatUint(keySerial.Add(1), 10) }

// info is a section of Redis's INFO.
func (s *server) info(b *testing.B, section string) map[string]string {
	b.Helper()
	sections, err := s.rdb.InfoMap(context.Background(), section).Result()
	require.NoError(b, err)
	all := map[string]string{}
	for _, fields := range sections {
		maps.Copy(all, fields)
	}
	return all
}

// work is what Redis has done.
type work struct {
	commands int           // of clients and of their scripts
	cpu      time.Duration // of the server's process
}

func (w work) since(before work) work {
	return work{w.commands - before.commands, w.cpu - before.cpu}
}

// work reads Redis's counters. Commands that open a connection or read the counters do not count.
func (s *server) work(b *testing.B) work {
	b.Helper()
	var w work
	for name, value := range s.info(b, "commandstats") {
		command, _, _ := strings.Cut(strings.TrimPrefix(name, "cmdstat_"), "|")
		switch command {
		case "info", "hello", "client", "config", "ping", "command":
			continue
		}
		_, rest, _ := strings.Cut(value, "calls=")
		calls, _, _ := strings.Cut(rest, ",")
		n, err := strconv.Atoi(calls)
		require.NoError(b, err, "%s:%s", name, value)
		w.commands += n
	}
	cpu := s.info(b, "cpu")
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		seconds, err := strconv.ParseFloat(cpu[name], 64)
		require.NoError(b, err)
		w.cpu += time.Duration(seconds * float64(time.Second))
	}
	return w
}

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
