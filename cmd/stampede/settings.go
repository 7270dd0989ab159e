package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"stampede/internal/dev/localserver"
	"stampede/internal/telemetry"
	"stampede/reservation"
)

// logFlags are settings of all commands.
type logFlags struct {
	Level  string `default:"info" enum:"debug,info,warn,error" placeholder:"LEVEL" help:"Lowest level to log: debug, info, warn or error (${default})."`
	Format string `default:"text" enum:"text,json" placeholder:"FORMAT" help:"Format of the log on standard error: text or json (${default})."`
}

// logger also sets the process's default logger, for libraries that use it.
func (f logFlags) logger(w io.Writer) (*slog.Logger, error) {
	logger, err := telemetry.NewLogger(w, f.Format, f.Level)
	if err == nil {
		slog.SetDefault(logger)
	}
	return logger, err
}

// checkFlag returns a usage error with the flag and its valid values, unless the value is valid. It rejects zero where
// a library would replace zero by its default.
func checkFlag(valid bool, flag string, value any, want string) error {
	if valid {
		return nil
	}
	return usagef("%s is %v, want %s", flag, value, want)
}

func wantAtLeast[N int | int64 | float64 | time.Duration](flag string, n, least N) error {
	return checkFlag(n >= least, flag, n, fmt.Sprintf("at least %v", least))
}

func wantShare(flag string, share float64) error {
	return checkFlag(share >= 0 && share <= 1, flag, share, "0 to 1") // false for NaN
}

func wantHeader(flag, name string) error {
	return checkFlag(name != "", flag, "empty", "the name of a header")
}

// collectLess lets the heap grow to five times the live data before a collection, unless GOGC is set.
// Ingresses, workers and crowds have little live data, so this costs little memory. Measured: an ingress
// answers 7 to 13 % more requests a second, and a worker takes a fifth less time per order.
func collectLess() {
	const percent = 400
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
}

// URLs of the servers: required by most commands, optional where private servers are started instead.
type (
	redisFlag struct {
		RedisURL string `name:"redis-url" env:"REDIS_URL" required:"" placeholder:"URL" help:"Redis, as redis://user:password@host:6379/0, redis+cluster://user:password@a:6379,b:6379 or redis+sentinel://user:password@a:26379,b:26379/master/0."`
	}
	databaseFlag struct {
		DatabaseURL string `name:"database-url" env:"DATABASE_URL" required:"" placeholder:"URL" help:"Postgres, as postgres://user:password@host:5432/database."`
	}
	optionalServers struct {
		RedisURL    string `name:"redis-url" env:"REDIS_URL" placeholder:"URL" help:"Redis to use (default: a private one is started)."`
		DatabaseURL string `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres to use (default: a private one is started)."`
		Cluster     bool   `help:"Start the private Redis as a cluster of three masters and three replicas, with at least 4 partitions."`
	}
)

// clusterPartitions is the least number of partitions on a private cluster: they lie on all its masters.
const clusterPartitions = 4

// Validate is called by kong, or by the Validate of a command that embeds these flags.
func (f optionalServers) Validate() error {
	if f.Cluster && f.RedisURL != "" {
		return usagef("--cluster starts a private Redis Cluster, and REDIS_URL is set: unset one of them")
	}
	return nil
}

// wanted returns the servers to use or to start.
func (f optionalServers) wanted() localserver.Wanted {
	return localserver.Wanted{RedisURL: f.RedisURL, DatabaseURL: f.DatabaseURL, Cluster: f.Cluster}
}

// keysFlags name the keys in Redis.
type keysFlags struct {
	Partitions int    `default:"1" placeholder:"N" help:"Partitions for new sales, 1 to 64 (${default}). Must be the same for all ingresses and workers."`
	KeyPrefix  string `hidden:"" default:"stampede" help:"First part of every key in Redis."`
}

// Validate is called by kong, or by the Validate of a command that embeds these flags.
func (f keysFlags) Validate() error {
	return checkFlag(f.Partitions >= 1 && f.Partitions <= reservation.MaxPartitions,
		"--partitions", f.Partitions, fmt.Sprintf("1 to %d", reservation.MaxPartitions))
}

func (f keysFlags) keys() reservation.Keys {
	return reservation.Keys{Prefix: f.KeyPrefix, Partitions: f.Partitions}
}
