// Package localserver runs private Redis and Postgres servers for development and tests: children
// of this process on free ports of the loopback, with data in a temporary folder, ready within a
// second. Acknowledged writes survive a crash (appendfsync always, fsync on), so tests and the demo
// show real durability. The servers end with this process, even after a SIGKILL; a later process
// removes their folders then.
package localserver

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Pair is a Redis and a Postgres.
type Pair struct {
	RedisURL    string
	DatabaseURL string
	// Redis and Postgres are the private servers behind the URLs; nil for given URLs.
	Redis    *Redis
	Postgres *Postgres
}

// Provide starts a private server for each empty URL, both at the same time. The error wraps
// errNotInstalled if a required server is not installed. After an error no server runs.
func Provide(ctx context.Context, redisURL, databaseURL string) (*Pair, error) {
	var missing []string
	if _, found := findRedis(); redisURL == "" && !found {
		missing = append(missing, redisPrograms)
	}
	if _, found := findPostgres(); databaseURL == "" && !found {
		missing = append(missing, postgresPrograms)
	}
	if len(missing) > 0 { // in one error
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

// Watch returns nil when ctx ends, or an error if a private server ends before. Without private servers it
// returns immediately.
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

// Stop stops the private servers and removes their data. Servers of given URLs keep running.
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
