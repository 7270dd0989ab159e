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
	// Redis or Cluster, and Postgres, are the private servers behind the URLs; nil for given URLs.
	Redis    *Redis
	Cluster  *Cluster
	Postgres *Postgres
}

// Wanted says what Provide has to start: a private server for each empty URL.
type Wanted struct {
	RedisURL, DatabaseURL string
	// Cluster makes the private Redis a cluster of three masters, each with a replica.
	Cluster bool
}

// Provide starts the private servers, all at the same time. The error wraps errNotInstalled if a required server is
// not installed. After an error no server runs.
func Provide(ctx context.Context, w Wanted) (*Pair, error) {
	var missing []string
	if _, found := findRedis(); w.RedisURL == "" && !found {
		missing = append(missing, redisPrograms)
	}
	if _, found := findPostgres(); w.DatabaseURL == "" && !found {
		missing = append(missing, postgresPrograms)
	}
	if len(missing) > 0 { // in one error
		return nil, notInstalled(missing...)
	}
	p := &Pair{RedisURL: w.RedisURL, DatabaseURL: w.DatabaseURL}
	var redisErr, postgresErr error
	var starting sync.WaitGroup
	switch {
	case w.RedisURL != "":
	case w.Cluster:
		starting.Go(func() { p.Cluster, redisErr = StartCluster(ctx, ClusterOptions{Masters: 3, Replicas: 1}) })
	default:
		starting.Go(func() { p.Redis, redisErr = StartRedis(ctx, RedisOptions{}) })
	}
	if w.DatabaseURL == "" {
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
	if p.Cluster != nil {
		p.RedisURL = p.Cluster.URL
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
	if p.Cluster != nil {
		watching.Go(func() error { return p.Cluster.watch(ctx) })
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
	if p.Cluster != nil {
		stopping.Go(p.Cluster.Stop)
	}
	if p.Postgres != nil {
		stopping.Go(p.Postgres.Stop)
	}
	stopping.Wait()
}
