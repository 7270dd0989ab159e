// Package testkit gives tests real servers: one private Redis and one private Postgres for each test
// process, started when the first test asks, or those that REDIS_URL and DATABASE_URL name. Each
// test has its own key prefix and its own database, so tests run in parallel. A server that is
// missing fails the test; nothing is skipped.
//
// testkit imports reservation and sql: their tests, and those of what testkit imports, are in
// packages of their own (reservation_test).
package testkit

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"stampede/internal/localserver"
)

// envReexec makes the test binary run the command of WithCommand instead of the tests.
const envReexec = "STAMPEDE_TEST_REEXEC"

// Option configures Main.
type Option func(*options)

type options struct {
	command func() int
	leaks   []goleak.Option
	redis   localserver.RedisOptions
}

// WithRedisInMemory makes the private Redis that tests share write nothing to disk, so that a busy disk does not
// slow down tests that need no durability.
func WithRedisInMemory() Option {
	return func(o *options) { o.redis.Settings = map[string]string{"appendonly": "no"} }
}

// WithCommand sets what the test binary does when Command starts it: usually what the program's main
// does. os.Args are the program's name and the arguments of Command.
func WithCommand(command func() int) Option {
	return func(o *options) { o.command = command }
}

// IgnoreLeaks excepts goroutines from the check for leaks.
func IgnoreLeaks(except ...goleak.Option) Option {
	return func(o *options) { o.leaks = append(o.leaks, except...) }
}

// Main is the body of a package's TestMain. It runs the tests, stops the servers, and fails the
// package if a goroutine is left over.
func Main(m *testing.M, opts ...Option) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	private.redisOptions = o.redis
	if os.Getenv(envReexec) != "" {
		if o.command == nil {
			fmt.Fprintln(os.Stderr, "testkit: the test binary was re-executed, and its TestMain has no WithCommand")
			os.Exit(2)
		}
		os.Exit(o.command())
	}
	code := m.Run()
	stopServers()
	if code == 0 {
		if err := goleak.Find(o.leaks...); err != nil {
			fmt.Fprintln(os.Stderr, "testkit: goroutines outlive the tests:", err)
			code = 1
		}
	}
	os.Exit(code)
}
