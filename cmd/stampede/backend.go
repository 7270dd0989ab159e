package main

import (
	"context"
	"errors"
	"log/slog"
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

// backend holds the Redis and Postgres clients and what uses both. Both connect on first use.
type backend struct {
	redis   redis.UniversalClient
	pool    *pgxpool.Pool
	store   *reservation.Store
	catalog *catalog.Catalog
}

// openBackend creates the Redis client with open, and uses up to postgresConns connections to Postgres.
func openBackend(
	ctx context.Context, open func(url string) (redis.UniversalClient, error), redisURL, databaseURL string,
	keys keysFlags, postgresConns int32, storeOptions reservation.StoreOptions, options ...connect.PostgresOption,
) (*backend, error) {
	pool, err := connect.Postgres(ctx, databaseURL, postgresConns, options...)
	if err != nil {
		return nil, err
	}
	rdb, err := open(redisURL)
	if err != nil {
		pool.Close()
		return nil, err
	}
	store := reservation.NewStore(rdb, keys.keys(), storeOptions)
	return &backend{redis: rdb, pool: pool, store: store, catalog: catalog.New(pool, store)}, nil
}

// openControl opens the backend of a worker or a command.
func openControl(
	ctx context.Context, redisURL, databaseURL string, keys keysFlags, postgresConns int32, logger *slog.Logger,
	options ...connect.PostgresOption,
) (*backend, error) {
	return openBackend(ctx, connect.Control, redisURL, databaseURL, keys, postgresConns,
		reservation.StoreOptions{Logger: logger}, options...)
}

func (b *backend) Close() {
	b.store.Close()
	_ = b.redis.Close() // nothing is running any more
	b.pool.Close()
}

// rebuilder returns the rebuilder for manual rebuilds of the stock in Redis. It returns an error if
// this version cannot work with the schema.
func (b *backend) rebuilder(
	ctx context.Context, keys reservation.Keys, logger *slog.Logger,
) (*rebuild.Rebuilder, error) {
	if err := sql.Check(ctx, b.pool); err != nil {
		return nil, err
	}
	return rebuild.New(rebuild.Config{
		Pool: b.pool, Redis: b.redis, Keys: keys, Store: b.store,
		Logger: logger,
	})
}

// ready returns nil if both servers take writes.
func (b *backend) ready(ctx context.Context) error {
	return errors.Join(b.store.Writable(ctx), pg.Writable(ctx, b.pool))
}

// askTimeout bounds the checks of a server before a command starts its work.
const askTimeout = 5 * time.Second

// checkSchema returns an error if this version cannot work with the schema, and logs if the schema is newer. If
// Postgres does not answer, it only logs that: accepted orders wait in Redis until a worker can write them.
func checkSchema(ctx context.Context, pool *pgxpool.Pool, logger *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	newer, err := sql.Compare(ctx, pool)
	if err == nil && len(newer) > 0 {
		logger.Info("the schema is that of a newer version, and this one works with it", "migrations", newer)
	}
	if err == nil || sql.IsUnfit(err) {
		return err
	}
	logger.Warn("Postgres does not answer, so its schema is unchecked; orders wait in Redis until it answers",
		"error", err)
	return nil
}

// warnOfSettings logs the findings of doctor for a Redis user with these rights, unsafe ones as errors. It never fails.
func warnOfSettings(ctx context.Context, b *backend, rights reservation.Rights, logger *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	findings, err := doctor.Redis(ctx, b.redis, rights)
	if err != nil {
		logger.Warn("Redis does not answer, so its settings are unchecked", "error", err)
	}
	more, err := doctor.Postgres(ctx, b.pool)
	if err == nil { // else checkSchema has reported it
		findings = append(findings, more...)
	}
	more, _ = doctor.Memory(ctx, b.redis, b.pool, uuid.Nil) // a server that does not answer is reported above
	findings = append(findings, more...)
	for _, f := range findings {
		level, prefix := slog.LevelWarn, "setting to check: "
		if f.Severity == doctor.Unsafe {
			level, prefix = slog.LevelError, "UNSAFE SETTING: "
		}
		logger.Log(ctx, level, prefix+f.What, "severity", f.Severity, "server", f.Where(), "why", f.Why, "mend", f.Mend)
	}
}
