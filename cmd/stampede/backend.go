package main

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/connect"
	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/catalog"
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
	return rebuild.New(rebuild.Config{Pool: b.pool, Redis: b.redis, Keys: b.keys, Store: b.store, Logger: logger})
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
