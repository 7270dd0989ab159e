// Package testkit gives tests real servers: the Redis and the Postgres of internal/test/testservers, which runs all
// packages on one pair, or those that REDIS_URL and DATABASE_URL name, or private ones of the test process, started on
// first use. Each test has its own key prefix and database, so tests run in parallel. A missing server fails the test;
// nothing is skipped.
//
// testkit imports reservation and sql, so tests of these packages and of their dependencies are in
// external test packages (reservation_test).
package testkit

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"stampede/internal/dev/localserver"
)

// envReexec makes the test binary run the command of WithCommand instead of the tests.
const envReexec = "STAMPEDE_TEST_REEXEC"

// endsWithin is how long goroutines may take to end after the tests: a closed client of go-redis that could not connect
// sleeps for a second first.
const endsWithin = 10 * time.Second

// Option configures Main.
type Option func(*options)

type options struct {
	command func() int
	leaks   []goleak.Option
	redis   localserver.RedisOptions
}

// WithRedisInMemory gives the package a Redis of its own that writes nothing to disk, for crowds that need no
// durability: they would slow others down, and a busy disk would slow them down.
func WithRedisInMemory() Option {
	return func(o *options) { o.redis.Settings = map[string]string{"appendonly": "no"} }
}

// WithCommand sets the function that the test binary runs when Command starts it, usually the main of the
// program. os.Args are the program's name and the arguments of Command.
func WithCommand(command func() int) Option {
	return func(o *options) { o.command = command }
}

// IgnoreLeaks excludes goroutines from the leak check.
func IgnoreLeaks(except ...goleak.Option) Option {
	return func(o *options) { o.leaks = append(o.leaks, except...) }
}

// Main is the body of a package's TestMain. It runs the tests, stops the servers, and fails the package
// if goroutines are leaked.
func Main(m *testing.M, opts ...Option) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	private.redisOptions = o.redis
	if os.Getenv(envReexec) != "" {
		if o.command == nil {
			fmt.Fprintln(os.Stderr, "testkit: the test binary was re-executed, but its TestMain has no WithCommand")
			os.Exit(2)
		}
		os.Exit(o.command())
	}
	code := m.Run()
	stopServers()
	if code == 0 {
		err := goleak.Find(o.leaks...)
		for began := time.Now(); err != nil && time.Since(began) < endsWithin; {
			err = goleak.Find(o.leaks...)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "testkit: goroutines outlive the tests:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// Eventually fails the test unless cond becomes true in time; what names the condition in the failure. Call it
// from the test's own goroutine.
func Eventually(t testing.TB, within time.Duration, what string, cond func() bool) {
	t.Helper()
	const pauseMax = 50 * time.Millisecond
	deadline := time.Now().Add(within)
	for pause := time.Millisecond; !cond(); pause = min(2*pause, pauseMax) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
		time.Sleep(pause)
	}
}

// Soak returns how many random rounds a test plays: n, times STAMPEDE_TEST_SOAK, which task soak sets.
func Soak(n int) int {
	if factor, err := strconv.Atoi(os.Getenv("STAMPEDE_TEST_SOAK")); err == nil {
		return n * factor
	}
	return n
}

// PlaySales lets rapid play n sales.
func PlaySales(t *testing.T, n int, play func(*rapid.T)) {
	t.Helper()
	require.NoError(t, flag.Set("rapid.checks", strconv.Itoa(n)))
	require.NoError(t, flag.Set("rapid.nofailfile", "true"))
	rapid.Check(t, play)
}

// salesForRareSteps is how many sales take each step at least once, as in task soak.
const salesForRareSteps = 40

// EnoughForRareSteps reports whether so many sales were played that each step was taken. Few sales miss rare steps.
// rapid begins no further sale when the deadline of the tests is near, and does not fail then.
func EnoughForRareSteps(t testing.TB, played, planned int) bool {
	t.Helper()
	enough := played >= max(planned, salesForRareSteps)
	if !enough {
		t.Logf("%d of %d sales are too few to require each step", played, planned)
	}
	return enough
}

// Logger returns a logger that writes all levels to the test's log. After the test it discards records, because
// logging to an ended test panics.
func Logger(t testing.TB) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(w.end)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct {
	mu    sync.Mutex
	t     testing.TB
	ended bool
}

// Write implements io.Writer.
func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.t.Log(strings.TrimSuffix(string(p), "\n"))
	}
	return len(p), nil
}

func (w *testWriter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
}

// Hook is a go-redis hook that is called for each single command of a client.
type Hook func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error

// DialHook implements redis.Hook.
func (h Hook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (h Hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return h(next, ctx, cmd) }
}

// ProcessPipelineHook implements redis.Hook.
func (h Hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// HookAll is a Hook that also gets each command of a pipeline, whose next runs the rest. If one returns an error
// without it, the pipeline is not sent, and that is the error of all its commands.
type HookAll struct{ Hook }

// ProcessPipelineHook implements redis.Hook.
func (h HookAll) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		sent := false
		run := func(ctx context.Context, _ redis.Cmder) error {
			sent = true
			return next(ctx, cmds)
		}
		for _, cmd := range slices.Backward(cmds) {
			rest := run
			run = func(ctx context.Context, _ redis.Cmder) error { return h.Hook(rest, ctx, cmd) }
		}
		err := run(ctx, nil)
		for _, cmd := range cmds {
			if !sent {
				cmd.SetErr(err)
			}
		}
		return err
	}
}

// Logged is how many bytes a server of Redis has in its append-only file.
func Logged(t testing.TB, rdb redis.UniversalClient) int64 {
	t.Helper()
	stats, err := rdb.(*redis.Client).InfoMap(t.Context(), "persistence").Result()
	if err != nil {
		t.Fatal(err)
	}
	bytes, err := strconv.ParseInt(stats["Persistence"]["aof_current_size"], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// Ports are below those that systems give to connections and to listeners on port 0, and those of private servers: none
// of them takes one before its process listens.
const portFirst, ports = 10_000, 5_000

// portsTaken begins at a random one, as several packages are tested at the same time.
var portsTaken = func() *atomic.Int64 {
	var n atomic.Int64
	n.Store(rand.Int64N(ports))
	return &n
}()

// FreeAddr returns an address to listen on, for a process that has to have the same one each time, or whose log cannot
// tell it. Each call returns another one.
func FreeAddr(t testing.TB) string {
	t.Helper()
	var err error
	for range ports {
		addr := fmt.Sprint("127.0.0.1:", portFirst+portsTaken.Add(1)%ports)
		var listener net.Listener
		if listener, err = new(net.ListenConfig).Listen(t.Context(), "tcp", addr); err == nil {
			_ = listener.Close() // nothing was accepted
			return addr
		}
	}
	t.Fatal("find a free port: ", err)
	return ""
}
