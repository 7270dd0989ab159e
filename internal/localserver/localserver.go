// Package localserver runs private Redis and Postgres servers for development and tests: children
// of this process on free ports of the loopback, with data in a temporary folder, ready within a
// second. Both keep what they acknowledge through a crash (appendfsync always, fsync on), so what
// a test or the demo shows of durability is real. They are gone when this process is gone, even
// by SIGKILL; the folder of a process that could not clean up is removed by the next one.
package localserver

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Pair is a Redis and a Postgres to work with.
type Pair struct {
	RedisURL    string
	DatabaseURL string
	// Redis and Postgres are the private servers behind the URLs; nil where a URL was given.
	Redis    *Redis
	Postgres *Postgres
}

// Provide starts a private server, both at once, for each URL that is empty. The error wraps
// errNotInstalled where a server that is needed is not installed. After an error nothing runs.
func Provide(ctx context.Context, redisURL, databaseURL string) (*Pair, error) {
	var missing []string
	if _, found := findRedis(); redisURL == "" && !found {
		missing = append(missing, redisPrograms)
	}
	if _, found := findPostgres(); databaseURL == "" && !found {
		missing = append(missing, postgresPrograms)
	}
	if len(missing) > 0 { // said at once, not one after the other
		return nil, notInstalled(missing...)
	}
	p := &Pair{RedisURL: redisURL, DatabaseURL: databaseURL}
	var redisErr, postgresErr error
	var starting sync.WaitGroup
	if redisURL == "" {
		starting.Go(func() { p.Redis, redisErr = StartRedis(ctx, RedisOptions{}) })
	}
	if databaseURL == "" {
		starting.Go(func() { p.Postgres, postgresErr = StartPostgres(ctx, PostgresOptions{}) })
	}
	starting.Wait()
	if err := errors.Join(redisErr, postgresErr); err != nil {
		p.Stop()
		return nil, err
	}
	if p.Redis != nil {
		p.RedisURL = p.Redis.URL
	}
	if p.Postgres != nil {
		p.DatabaseURL = p.Postgres.URL
	}
	return p, nil
}

// Watch returns nil when ctx ends, and before that an error when a private server ends by itself.
// Without private servers it returns at once.
func (p *Pair) Watch(ctx context.Context) error {
	watching, ctx := errgroup.WithContext(ctx)
	if p.Redis != nil {
		watching.Go(func() error { return p.Redis.server.watch(ctx) })
	}
	if p.Postgres != nil {
		watching.Go(func() error { return p.Postgres.server.watch(ctx) })
	}
	return watching.Wait()
}

// Stop stops the private servers and removes their data. Servers behind given URLs go on.
func (p *Pair) Stop() {
	var stopping sync.WaitGroup
	if p.Redis != nil {
		stopping.Go(p.Redis.Stop)
	}
	if p.Postgres != nil {
		stopping.Go(p.Postgres.Stop)
	}
	stopping.Wait()
}
