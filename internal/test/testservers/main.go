// Command testservers prints the versions of the servers that tests run on: those of REDIS_URL and DATABASE_URL, else
// private ones, which it starts for that. So a missing server is found before the tests are compiled.
package main

import (
	"context"
	"fmt"
	"os"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/upkeep/doctor"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "the tests need Redis and Postgres:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	servers, err := localserver.Provide(ctx, localserver.Wanted{
		RedisURL: os.Getenv("REDIS_URL"), DatabaseURL: os.Getenv("DATABASE_URL"),
	})
	if err != nil {
		return err
	}
	defer servers.Stop()
	rdb, err := connect.Control(servers.RedisURL)
	if err != nil {
		return err
	}
	defer func() { _ = rdb.Close() }()
	if err := rdb.Ping(ctx).Err(); err != nil {
		return err
	}
	pool, err := connect.Postgres(ctx, servers.DatabaseURL, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	fmt.Println("tests run on", doctor.Servers(ctx, rdb, pool))
	return nil
}
