package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"stampede/internal/telemetry"
	"stampede/reservation"
)

// logFlags are settings of all commands.
type logFlags struct {
	Level  string `default:"info" enum:"debug,info,warn,error" placeholder:"LEVEL" help:"Lowest level that is logged: debug, info, warn or error (${default})."`
	Format string `default:"text" enum:"text,json" placeholder:"FORMAT" help:"Format of the log on standard error: text or json (${default})."`
}

// logger also becomes the process's default, for libraries that log by themselves.
func (f logFlags) logger(w io.Writer) (*slog.Logger, error) {
	logger, err := telemetry.NewLogger(w, f.Format, f.Level)
	if err == nil {
		slog.SetDefault(logger)
	}
	return logger, err
}

// want is a usage error that names the flag and what it may be, unless its value is allowed. Where a
// library takes zero for its default, a zero that somebody typed must not get that far.
func want(allowed bool, flag string, value any, what string) error {
	if allowed {
		return nil
	}
	return usagef("%s is %v, want %s", flag, value, what)
}

func wantAtLeast[N int | int64 | float64 | time.Duration](flag string, n, least N) error {
	return want(n >= least, flag, n, fmt.Sprintf("at least %v", least))
}

func wantShare(flag string, share float64) error {
	return want(share >= 0 && share <= 1, flag, share, "0 to 1") // so written that NaN is refused too
}

func wantHeader(flag, name string) error {
	return want(name != "", flag, "empty", "the name of a header")
}

// collectLess lets the heap grow to five times of what lives before it is collected, unless GOGC says
// otherwise. Who answers or sends requests, or writes orders down, keeps little of them, so that
// costs little memory; an ingress was measured to answer 7 to 13 % more a second, and a worker to
// take a fifth less time for an order.
func collectLess() {
	const percent = 400
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
}

// Where the servers are: needed by most commands, and optional where private ones are started instead.
type (
	redisFlag struct {
		RedisURL string `name:"redis-url" env:"REDIS_URL" required:"" placeholder:"URL" help:"Redis, as redis://user:password@host:6379/0."`
	}
	databaseFlag struct {
		DatabaseURL string `name:"database-url" env:"DATABASE_URL" required:"" placeholder:"URL" help:"Postgres, as postgres://user:password@host:5432/database."`
	}
	optionalServers struct {
		RedisURL    string `name:"redis-url" env:"REDIS_URL" placeholder:"URL" help:"Redis to use; without it a private one is started."`
		DatabaseURL string `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres to use; without it a private one is started."`
	}
)

// keysFlags name the keys in Redis.
type keysFlags struct {
	Partitions int    `default:"1" placeholder:"N" help:"Partitions that new sales are spread over, 1 to 64 (${default}). The same for all ingresses and workers."`
	KeyPrefix  string `hidden:"" default:"stampede" help:"First part of every key in Redis."`
}

// Validate is called by kong: by that of a command which has its own, or else for the command that
// embeds it.
func (f keysFlags) Validate() error {
	return want(f.Partitions >= 1 && f.Partitions <= reservation.MaxPartitions,
		"--partitions", f.Partitions, fmt.Sprintf("1 to %d", reservation.MaxPartitions))
}

func (f keysFlags) keys() reservation.Keys {
	return reservation.Keys{Prefix: f.KeyPrefix, Partitions: f.Partitions}
}

// jsonFlag is for commands that print a result.
type jsonFlag struct {
	JSON bool `name:"json" help:"Print the result as JSON."`
}
