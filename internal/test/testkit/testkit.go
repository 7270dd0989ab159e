// Package testkit gives tests real servers: the Redis and the Postgres of internal/test/testservers, which runs all
// packages on one pair, or those that REDIS_URL and DATABASE_URL name, or private ones of the test process, started on
// first use. Each test has its own key prefix and database, so tests run in parallel. A missing server fails the test;
// nothing is skipped.
//
// testkit imports reservation and sql, so tests of these packages and of their dependencies are in
// external test packages (reservation_test).
package testkit

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

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
