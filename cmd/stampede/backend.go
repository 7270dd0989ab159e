package main

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/ingress"
	"stampede/internal/apiclient"
	"stampede/internal/connect"
	"stampede/internal/pg"
	"stampede/internal/telemetry"
	"stampede/internal/tracing"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/doctor"
	"stampede/upkeep/rebuild"
)

// storesFlags are the stores of a command, and the names of the keys in Redis.
type storesFlags struct {
	redisFlag
	databaseFlag
	keysFlags
}

// open opens the backend of a worker or a command, with up to postgresConns connections to Postgres.
func (f storesFlags) open(
	ctx context.Context, postgresConns int32, logger *slog.Logger, options ...connect.PostgresOption,
) (*backend, error) {
	return f.openBackend(ctx, connect.Control, postgresConns, reservation.StoreOptions{Logger: logger}, options...)
}

// with calls do with a backend whose schema this version can work with.
func (f storesFlags) with(
	ctx context.Context, postgresConns int32, logger *slog.Logger, do func(*backend) error,
) error {
	b, err := f.open(ctx, postgresConns, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	if err := sql.Check(ctx, b.pool); err != nil {
		return err
	}
	return do(b)
}

// backend holds the Redis and Postgres clients and what uses both. Both connect on first use.
type backend struct {
	keys reservation.Keys
	// redisURL is for clients of blocking reads, which must not be shared.
	redisURL string
	redis    redis.UniversalClient
	pool     *pgxpool.Pool
	store    *reservation.Store
	catalog  *catalog.Catalog
}

// openBackend creates the Redis client with open.
func (f storesFlags) openBackend(
	ctx context.Context, open func(url string) (redis.UniversalClient, error), postgresConns int32,
	storeOptions reservation.StoreOptions, options ...connect.PostgresOption,
) (*backend, error) {
	pool, err := connect.Postgres(ctx, f.DatabaseURL, postgresConns, options...)
	if err != nil {
		return nil, err
	}
	rdb, err := open(f.RedisURL)
	if err != nil {
		pool.Close()
		return nil, err
	}
	store := reservation.NewStore(rdb, f.keys(), storeOptions)
	return &backend{
		keys: f.keys(), redisURL: f.RedisURL, redis: rdb, pool: pool, store: store, catalog: catalog.New(pool, store),
	}, nil
}

func (b *backend) Close() {
	b.store.Close()
	_ = b.redis.Close() // nothing is running any more
	b.pool.Close()
}

// rebuilder returns the rebuilder for manual rebuilds of the stock in Redis. It returns an error if
// this version cannot work with the schema.
func (b *backend) rebuilder(ctx context.Context, logger *slog.Logger) (*rebuild.Rebuilder, error) {
	if err := sql.Check(ctx, b.pool); err != nil {
		return nil, err
	}
	return rebuild.New(rebuild.Config{Catalog: b.catalog, Logger: logger})
}

// writable returns nil for each server that takes writes.
func (b *backend) writable(ctx context.Context) (ofRedis, ofPostgres error) {
	var asking sync.WaitGroup
	asking.Go(func() { ofRedis = b.store.Writable(ctx) })
	asking.Go(func() { ofPostgres = pg.Writable(ctx, b.pool) })
	asking.Wait()
	return ofRedis, ofPostgres
}

// ready returns nil if both servers take writes.
func (b *backend) ready(ctx context.Context) error { return errors.Join(b.writable(ctx)) }

// look is ready for the metrics.
func (b *backend) look(ctx context.Context) (notReady string, dependencies map[string]bool) {
	ofRedis, ofPostgres := b.writable(ctx)
	switch {
	case ofRedis != nil:
		notReady = "Redis does not take writes"
	case ofPostgres != nil:
		notReady = "Postgres does not take writes"
	}
	return notReady, map[string]bool{"redis": ofRedis == nil, "postgres": ofPostgres == nil}
}

// askTimeout bounds the checks of a server before a command starts its work.
const askTimeout = 5 * time.Second

// schemaPause is the pause between two looks at a schema that lacks migrations.
const schemaPause = time.Second

// checkSchema waits until `migrate up` has applied all migrations of this version, so that processes can be started
// before it. It returns an error if this version cannot work with the schema, or if ctx ends while it waits, and logs
// if the schema is newer. If Postgres does not answer at first, it only logs that: accepted orders wait in Redis until
// a worker can write them.
func checkSchema(ctx context.Context, pool *pgxpool.Pool, logger *slog.Logger) error {
	newer, err := compareSchema(ctx, pool)
	if missing := err; errors.Is(missing, sql.ErrNotMigrated) {
		logger.Warn("waiting for the migration of the database; nothing is served before it", "error", missing)
		for errors.Is(err, sql.ErrNotMigrated) || err != nil && !sql.IsUnfit(err) {
			select {
			case <-ctx.Done():
				return missing
			case <-time.After(schemaPause):
			}
			newer, err = compareSchema(ctx, pool)
		}
	}
	if err == nil && len(newer) > 0 {
		logger.Info("the schema is that of a newer version, and this one works with it", "migrations", newer)
	}
	if err == nil || sql.IsUnfit(err) {
		return err
	}
	logger.Warn("Postgres does not answer, so its schema is unchecked; orders wait in Redis until it answers",
		"error", message(err))
	return nil
}

func compareSchema(ctx context.Context, pool *pgxpool.Pool) (newer []int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return sql.Compare(ctx, pool)
}

// warnOfSettings logs the findings of doctor for a Redis user with these rights, unsafe ones as errors. It never fails.
func warnOfSettings(ctx context.Context, b *backend, rights reservation.Rights, logger *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	findings, err := doctor.Redis(ctx, b.redis, rights)
	if err != nil {
		logger.Warn("Redis does not answer, so its settings are unchecked", "error", message(err))
	}
	more, err := doctor.Postgres(ctx, b.pool)
	if err == nil { // else checkSchema has reported it
		findings = append(findings, more...)
	}
	more, _ = doctor.Clocks(ctx, b.redis, b.pool) // a server that does not answer is reported above
	findings = append(findings, more...)
	more, _ = doctor.Memory(ctx, b.redis, b.pool, uuid.Nil) // likewise
	findings = append(findings, more...)
	for _, f := range findings {
		level, prefix := slog.LevelWarn, "setting to check: "
		if f.Severity == doctor.Unsafe {
			level, prefix = slog.LevelError, "UNSAFE SETTING: "
		}
		logger.Log(ctx, level, prefix+f.What, "severity", f.Severity, "server", f.Where(), "why", f.Why, "mend", f.Mend)
	}
}

// The connections of an ingress to Postgres, by use. Each use has its own pool, so that waiting requests of one
// cannot take the connections of another.
const (
	// dutyPostgresConns are for heartbeats, the guard, the breaker's probe, /readyz and the clock. Each runs one
	// query at a time.
	dutyPostgresConns = 5
	// changePostgresConns are for payments and cancellations.
	changePostgresConns = 4
	// lookPostgresConns are for buyers who read their own orders, and for all who look at draws.
	lookPostgresConns = 4
	// operatorPostgresConns are for operators who look at orders and cancel them.
	operatorPostgresConns = 2
	// otherPostgresConns are for everything else: sales, operators, and the orders that purchases wait for.
	otherPostgresConns = 5
)

// ingressBackend holds the clients of an ingress. The pool and the Redis client of its backend are for purchases and
// anonymous requests.
type ingressBackend struct {
	*backend
	duty, changes, looks, operators *pgxpool.Pool
	guardRedis                      redis.UniversalClient
	guardAge                        *telemetry.GuardAge
	watchClock                      func(context.Context)
}

func openIngressBackend(
	ctx context.Context, stores storesFlags, storeOptions reservation.StoreOptions, registry *prometheus.Registry,
	tracer *tracing.Tracer,
) (f *ingressBackend, err error) {
	if storeOptions.Observer, err = ingress.ObserveScripts(registry); err != nil {
		return nil, err
	}
	options := []connect.PostgresOption{connect.Service("serve"), connect.Traced(tracer)}
	b, err := stores.openBackend(ctx, connect.Ingress, otherPostgresConns, storeOptions, options...)
	if err != nil {
		return nil, err
	}
	f = &ingressBackend{backend: b}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	var errs [7]error
	f.duty, errs[0] = connect.Postgres(ctx, stores.DatabaseURL, dutyPostgresConns, options...)
	f.changes, errs[1] = connect.Postgres(ctx, stores.DatabaseURL, changePostgresConns, options...)
	f.looks, errs[2] = connect.Postgres(ctx, stores.DatabaseURL, lookPostgresConns, options...)
	f.operators, errs[3] = connect.Postgres(ctx, stores.DatabaseURL, operatorPostgresConns, options...)
	f.guardRedis, errs[4] = connect.Ingress(stores.RedisURL)
	f.guardAge, errs[5] = telemetry.NewGuardAge(registry, "ingress")
	f.watchClock, errs[6] = watchClock(registry, f.duty)
	if err = errors.Join(errs[:]...); err != nil {
		return f, err
	}
	return f, f.pools().Register(registry)
}

func (f *ingressBackend) pools() *connect.Pools {
	pools := connect.NewPools("ingress")
	pools.Redis("purchases", f.redis)
	pools.Redis("guard", f.guardRedis)
	pools.Postgres("others", f.pool)
	pools.Postgres("duty", f.duty)
	pools.Postgres("changes", f.changes)
	pools.Postgres("looks", f.looks)
	pools.Postgres("desk", f.operators)
	return pools
}

func (f *ingressBackend) Close() {
	for _, pool := range []*pgxpool.Pool{f.duty, f.changes, f.looks, f.operators} {
		if pool != nil {
			pool.Close()
		}
	}
	if f.guardRedis != nil {
		_ = f.guardRedis.Close()
	}
	f.backend.Close()
}

// heartbeat runs beside every ingress's server. It ends when a stop begins, before the last request: counting a
// moment too much as an outage gives buyers time, counting too little takes it from them.
func (f *ingressBackend) heartbeat(logger *slog.Logger) ledger.Heartbeat {
	return ledger.Heartbeat{Pool: f.duty, Logger: logger}
}

// guard runs beside every ingress's server and stops it from selling from a replaced Redis.
func (f *ingressBackend) guard(logger *slog.Logger) reservation.Guard {
	return reservation.Guard{Store: f.store, Redis: f.guardRedis, Pool: f.duty, Logger: logger, Age: f.guardAge}
}

// serveOrders gives the ingress the orders in Postgres. Payments and cancellations are published to all ingresses.
func (f *ingressBackend) serveOrders(config *ingress.Config) (*ledger.Outcomes, error) {
	outcomes, err := ledger.NewOutcomes(ledger.OutcomesConfig{
		Client: f.redis, Keys: f.keys, Logger: config.Logger, Registerer: config.Metrics,
	})
	if err != nil {
		return nil, err
	}
	counted, err := telemetry.OrdersByOutcome(config.Metrics, string(order.StatusPaid), string(order.StatusCancelled))
	if err != nil {
		return nil, err
	}
	paid, err := ledger.CountPayments(config.Metrics)
	if err != nil {
		return nil, err
	}
	changing := func(pool *pgxpool.Pool) *ledger.Ledger {
		return ledger.New(pool).WithOutcomes(outcomes).WithPayments(paid).
			WithChanges(func(status order.Status) { counted.WithLabelValues(string(status)).Inc() })
	}
	config.Orders = buyersOrders{ledger.New(f.looks), changing(f.changes)}
	config.AwaitedOrders = ledger.New(f.pool)
	config.OperatorsOrders = changing(f.operators)
	config.Postgres = ledger.New(f.duty)
	config.Draws = draws.New(f.looks)
	return outcomes, nil
}

// buyersOrders reads orders on other connections than it changes them.
type buyersOrders struct {
	*ledger.Ledger
	changes *ledger.Ledger
}

func (o buyersOrders) Pay(ctx context.Context, id uuid.UUID, user, reference string) (order.Order, error) {
	return o.changes.Pay(ctx, id, user, reference)
}

func (o buyersOrders) Withdraw(ctx context.Context, id uuid.UUID, reason, operator string) (order.Placed, error) {
	return o.changes.Withdraw(ctx, id, reason, operator)
}

func (o buyersOrders) Report(ctx context.Context, m order.Money) (order.Payment, error) {
	return o.changes.Report(ctx, m)
}

func (o buyersOrders) RefundedAtProvider(ctx context.Context, r order.ProviderRefund) (order.Payment, error) {
	return o.changes.RefundedAtProvider(ctx, r)
}

func (o buyersOrders) Disputed(ctx context.Context, d order.Dispute) (order.Payment, error) {
	return o.changes.Disputed(ctx, d)
}

func (o buyersOrders) Cancel(ctx context.Context, id uuid.UUID, user string) (order.Order, error) {
	return o.changes.Cancel(ctx, id, user)
}

// optionalDatabases are the URLs of commands that can work through an ingress instead.
type optionalDatabases struct {
	RedisURL    string `name:"redis-url" env:"REDIS_URL" placeholder:"URL" help:"Redis, as redis://user:password@host:6379/0, redis+cluster://user:password@a:6379,b:6379 or redis+sentinel://user:password@a:26379,b:26379/master/0. Not needed with --server."`
	DatabaseURL string `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres, as postgres://user:password@host:5432/database. Not needed with --server."`
}

// serverFlag is for commands that can work through an ingress instead of on the databases.
type serverFlag struct {
	Server     string `placeholder:"URL" help:"Ingress to work through, such as https://shop.example, instead of the databases. The server records the operator of the token."`
	AdminToken string `placeholder:"TOKEN" help:"Bearer token of an operator, for --server."`
}

func (f optionalDatabases) stores(keys keysFlags) storesFlags {
	return storesFlags{redisFlag{f.RedisURL}, databaseFlag{f.DatabaseURL}, keys}
}

// check says what is missing, as kong does for required flags.
func (f *serverFlag) check(databases optionalDatabases) error {
	if f.Server != "" {
		_, err := apiclient.New(f.Server, "", "")
		return serverError(err)
	}
	var missing []string
	if databases.RedisURL == "" {
		missing = append(missing, "--redis-url=URL (or REDIS_URL)")
	}
	if databases.DatabaseURL == "" {
		missing = append(missing, "--database-url=URL (or DATABASE_URL)")
	}
	if len(missing) > 0 {
		return usagef("missing flags: %s; or --server=URL (or STAMPEDE_SERVER) instead", strings.Join(missing, ", "))
	}
	return nil
}

// withClient calls do with a client of the server.
func (f *serverFlag) withClient(do func(*apiclient.Client) error) error {
	client, err := apiclient.New(f.Server, f.AdminToken, "stampede/"+telemetry.BuildVersion())
	if err != nil {
		return serverError(err)
	}
	defer client.Close()
	return serverError(do(client))
}

// serverError makes what another setting or argument corrects a usage error.
func serverError(err error) error {
	switch {
	case errors.Is(err, apiclient.ErrURL):
		return usagef("--server: %w", err)
	case errors.Is(err, apiclient.ErrToken), errors.Is(err, apiclient.ErrInvalid):
		return &usageError{err}
	}
	return err
}

// noServerFlag refuses --server where only the databases will do.
type noServerFlag struct {
	Server string `hidden:"" env:"-" placeholder:"URL" help:"Not supported."`
}

func (f noServerFlag) validate(why string) error {
	if f.Server != "" {
		return usagef("this command has no --server: %s", why)
	}
	return nil
}

// postgresOrServer is for commands that need Postgres only, or an ingress.
type postgresOrServer struct {
	DatabaseURL string `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres, as postgres://user:password@host:5432/database. Not needed with --server."`
	serverFlag
}

// checkPlace says what is missing.
func (f *postgresOrServer) checkPlace() error {
	return f.check(optionalDatabases{RedisURL: "not needed", DatabaseURL: f.DatabaseURL})
}

func (f *postgresOrServer) databaseFlag() databaseFlag { return databaseFlag{f.DatabaseURL} }
