package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"stampede/fulfillment"
	"stampede/ingress"
	"stampede/internal/accept"
	"stampede/internal/clocks"
	"stampede/internal/dev/localserver"
	"stampede/internal/pg"
	"stampede/internal/telemetry"
	"stampede/internal/tracing"
	"stampede/internal/tracing/otlp"
	"stampede/ledger"
	"stampede/reservation"
)

// defaults are the variables in the tags of flags: each default that a package has as well stands there.
var defaults = kong.Vars{
	"http_addr":     ingress.DefaultAddr,
	"auth_header":   accept.UserHeader,
	"max_in_flight": strconv.Itoa(ingress.DefaultMaxInFlight),
	"serve_drain":   ingress.DefaultDrainTimeout.String(),
	"key_prefix":    reservation.DefaultPrefix,
	"batch_max":     strconv.Itoa(ledger.BatchMax),
	"min_idle":      fulfillment.DefaultMinIdle.String(),
	"work_drain":    fulfillment.DefaultDrainTimeout.String(),
}

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

// raiseGOGC lets the heap grow to five times the live data before a collection, unless GOGC is set.
// Ingresses, workers and crowds have little live data, so this costs little memory. Measured: an ingress
// answers 7 to 13 % more requests a second, and a worker takes a fifth less time per order.
func raiseGOGC() {
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
	KeyPrefix  string `hidden:"" default:"${key_prefix}" help:"First part of every key in Redis."`
}

// Validate is called by kong, or by the Validate of a command that embeds these flags.
func (f keysFlags) Validate() error {
	return checkFlag(f.Partitions >= 1 && f.Partitions <= reservation.MaxPartitions,
		"--partitions", f.Partitions, fmt.Sprintf("1 to %d", reservation.MaxPartitions))
}

func (f keysFlags) keys() reservation.Keys {
	return reservation.Keys{Prefix: f.KeyPrefix, Partitions: f.Partitions}
}

// profileFlag is for services with a listener for operators.
type profileFlag struct {
	Pprof bool `name:"pprof" help:"Serve profiles of this process below /debug/pprof/ at --metrics-addr, for go tool pprof. Only operators may reach that address."`
}

// check refuses profiles without a listener for operators: the one for buyers never has them.
func (f profileFlag) check(metricsAddr string) error {
	if f.Pprof && metricsAddr == "" {
		return usagef("--pprof needs a listener for operators: set STAMPEDE_METRICS_ADDR or --metrics-addr, as in " +
			"127.0.0.1:9092")
	}
	return nil
}

// serve answers operators at an address until ctx is done.
func (f profileFlag) serve(
	ctx context.Context, addr string, registry *prometheus.Registry, ready func(context.Context) error,
) error {
	var options []telemetry.Option
	if f.Pprof {
		options = append(options, telemetry.Profiles)
	}
	return listenError(telemetry.Serve(ctx, addr, registry, ready, options...), "STAMPEDE_METRICS_ADDR", "--metrics-addr")
}

// serveStores answers operators for a process on the stores of b, and watches these for the metrics.
func (f profileFlag) serveStores(
	ctx context.Context, process, addr string, registry *prometheus.Registry, b *backend,
) error {
	watch, err := telemetry.WatchReady(registry, process, b.look)
	if err != nil {
		return err
	}
	watchClock, err := watchClock(registry, b.pool)
	if err != nil {
		return err
	}
	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { watch(ctx); return nil })
	running.Go(func() error { watchClock(ctx); return nil })
	running.Go(func() error { return f.serve(ctx, addr, registry, b.ready) })
	return running.Wait()
}

// watchClock compares the clock of this process with that of Postgres for the metrics.
func watchClock(registry prometheus.Registerer, pool *pgxpool.Pool) (run func(context.Context), err error) {
	return telemetry.WatchClock(registry, func(ctx context.Context) (clocks.Reading, error) {
		return pg.ReadClock(ctx, pool)
	})
}

// optionalMetricsAddr is for services whose metrics are on the port of the HTTP API as well.
type optionalMetricsAddr struct {
	MetricsAddr string `type:"addr" placeholder:"HOST:PORT" help:"Address of a second listener, for operators, with /metrics, /livez and /readyz (default: none; they are at --http-addr in any case)."`
}

// traceFlag bounds what clients can have traced.
type traceFlag struct {
	TracesPerSecond int `default:"100" placeholder:"N" help:"Requests a second that are traced at most, of those whose client sends a sampled traceparent; 0: none. Traces are on if OTEL_EXPORTER_OTLP_ENDPOINT is set (${default})."`
}

func (f traceFlag) Validate() error { return wantAtLeast("--traces-per-second", f.TracesPerSecond, 0) }

// tracer returns the tracer of a service, which is off unless an OTLP endpoint is set. The caller closes it.
func (f traceFlag) tracer(
	ctx context.Context, service string, registry prometheus.Registerer, logger *slog.Logger,
) (*tracing.Tracer, error) {
	tracer, err := otlp.New(ctx, otlp.Config{
		Service: service, Version: telemetry.BuildVersion(), PerSecond: f.TracesPerSecond, Logger: logger,
		Registerer: registry,
	})
	if errors.Is(err, otlp.ErrSetting) {
		err = &usageError{err}
	}
	return tracer, err
}

// withExample makes kong name an example of a value that it cannot read.
func withExample[T any](example string) kong.Option {
	read := kong.NewRegistry().RegisterDefaults().ForType(reflect.TypeFor[T]())
	return kong.TypeMapper(reflect.TypeFor[T](), kong.MapperFunc(func(c *kong.DecodeContext, target reflect.Value) error {
		if err := read.Decode(c, target); err != nil {
			return fmt.Errorf("%w: want one like %s", err, example)
		}
		return nil
	}))
}

// saleIDs makes kong parse every UUID as a sale id: the command line has no other UUIDs.
var saleIDs = kong.TypeMapper(reflect.TypeFor[uuid.UUID](),
	kong.MapperFunc(func(c *kong.DecodeContext, target reflect.Value) error {
		var text string
		if err := c.Scan.PopValueInto("id", &text); err != nil {
			return err
		}
		id, err := uuid.Parse(text)
		if err != nil {
			return usagef("%q is not a sale id: want one like 01a1fef0-cb72-76d5-818b-64550bc6ed90, as sale list shows them",
				text)
		}
		target.Set(reflect.ValueOf(id))
		return nil
	}))

// secretFiles are the variables that name a file with a secret, each in place of the variable without _FILE.
var secretFiles = []string{
	"REDIS_URL_FILE", "DATABASE_URL_FILE", "STAMPEDE_ADMIN_TOKEN_FILE", "STAMPEDE_JWT_SECRET_FILE",
	"STAMPEDE_RECEIPT_SECRET_FILE",
}

// secretMax bounds a secret in a file.
const secretMax = 16 << 10

// secretFile returns the variable of the file for a flag, or "" if the flag is no secret.
func secretFile(flag *kong.Flag) (variable, file string) {
	for _, env := range flag.Envs {
		if slices.Contains(secretFiles, env+"_FILE") {
			return env, env + "_FILE"
		}
	}
	return "", ""
}

// secretsFromFiles reads secrets that are given neither by a flag nor by a variable. An empty variable is none, because
// compose files pass unset ones on as empty.
var secretsFromFiles kong.ResolverFunc = func(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	variable, file := secretFile(flag)
	path := os.Getenv(file)
	switch {
	case file == "" || path == "":
		return nil, nil //nolint:nilnil // kong's answer for "not here"
	case os.Getenv(variable) != "":
		return nil, fmt.Errorf("both %s and %s are set: unset one of them", variable, file)
	}
	secret, err := readSecret(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return secret, nil
}

// readSecret returns the content of a file without a line break at its end. Its errors never have the content.
func readSecret(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	content, err := io.ReadAll(io.LimitReader(file, secretMax+1))
	secret := strings.TrimSuffix(strings.TrimSuffix(string(content), "\n"), "\r")
	switch {
	case err != nil:
		return "", err
	case len(content) > secretMax:
		return "", fmt.Errorf("%s is longer than %d bytes", path, secretMax)
	case strings.TrimSpace(secret) == "":
		return "", fmt.Errorf("%s is empty", path)
	}
	return secret, nil
}

// secretsHelp adds the variable of the file to the help of a secret.
func secretsHelp(value *kong.Value) string {
	text := kong.DefaultHelpValueFormatter(value)
	if value.Flag != nil {
		if variable, file := secretFile(value.Flag); file != "" {
			return strings.Replace(text, "$"+variable, "$"+variable+", $"+file, 1)
		}
	}
	return text
}

// maxLanes bounds how many workers of one host get a name automatically.
const maxLanes = 64

// consumerName is the name under which a worker reads: the given one, or else the host's name and
// the first free lane. A restarted worker finds its pending entries by its stable name. Two workers of
// one host must not share a name, or each would process the pending entries of the other.
// The name is reserved until free is called or the process ends.
func consumerName(given string, logger *slog.Logger) (name string, free func(), err error) {
	if given != "" {
		return given, func() {}, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", nil, fmt.Errorf("name this worker (or set STAMPEDE_CONSUMER): %w", err)
	}
	folder := filepath.Join(os.TempDir(), "stampede-lanes-"+strconv.Itoa(os.Getuid()))
	lane, free, err := takeLane(folder)
	switch {
	case errors.Is(err, errNoLane):
		return "", nil, fmt.Errorf("%w: set STAMPEDE_CONSUMER to a name for this worker", err)
	case err != nil:
		// For example in a container with a read-only file system, which has its own host name.
		logger.Warn("cannot see whether other workers run on this host; if so, set STAMPEDE_CONSUMER for each", "error", err)
		return host + "-0", func() {}, nil
	}
	return host + "-" + strconv.Itoa(lane), free, nil
}

var errNoLane = fmt.Errorf("all %d lanes of this host are taken", maxLanes)

// takeLane locks the first unlocked file of the folder. The kernel frees the lock when the process
// ends, even if it is killed.
func takeLane(folder string) (lane int, free func(), err error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return 0, nil, err
	}
	for lane := range maxLanes {
		f, err := os.OpenFile(filepath.Join(folder, strconv.Itoa(lane)), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return 0, nil, err
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return lane, func() {
				// A child that was just forked holds a copy of the file, which would keep the lock.
				_ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN)
				_ = f.Close()
			}, nil
		}
		_ = f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return 0, nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
	return 0, nil, errNoLane
}

// Files that an ingress and a worker may open beside the connections of clients: connections to Redis
// (ingress: up to 64; worker: 16 and one per partition), connections to Postgres (each needs a second
// one while a query is cancelled), and the listener, the poller, the log, and look-ups of names and keys.
const (
	ingressFiles = 64 + 32 + 32
	workerFiles  = 16 + 64 + 32
)

// maxConnections is how many connections clients may have open at the same time: the limit of open
// files, which Go has raised as far as allowed, minus reserved. If reserved is more than half of the
// limit, it is half of the limit.
func maxConnections(reserved uint64) int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur-min(reserved, limit.Cur/2), math.MaxInt32))
}
