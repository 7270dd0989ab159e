// Command testservers runs a command, usually go test, with one Redis and one Postgres for all test processes: those
// of REDIS_URL and DATABASE_URL, else private ones. It prints their versions first, so a missing server is found
// before the tests are compiled. Without a command it only prints them.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/upkeep/doctor"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:])
	stop()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		os.Exit(max(failed.ExitCode(), 1)) // the command has said why; -1 after a signal
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testservers:", err)
		os.Exit(1)
	}
}

// connectionsMax is for the tests of all packages that run at the same time.
const connectionsMax = "500"

func run(ctx context.Context, command []string) error {
	if err := os.Setenv("TMPDIR", temporaryFolder()); err != nil {
		return err
	}
	servers := localserver.Pair{RedisURL: os.Getenv("REDIS_URL"), DatabaseURL: os.Getenv("DATABASE_URL")}
	defer func() { servers.Stop() }()
	var err error
	if servers.RedisURL == "" {
		if servers.Redis, err = localserver.StartRedis(ctx, localserver.RedisOptions{}); err != nil {
			return fmt.Errorf("the tests need Redis: %w", err)
		}
		servers.RedisURL = servers.Redis.URL
	}
	if servers.DatabaseURL == "" {
		if servers.Postgres, err = localserver.StartPostgres(ctx, localserver.PostgresOptions{
			Settings: map[string]string{"max_connections": connectionsMax},
		}); err != nil {
			return fmt.Errorf("the tests need Postgres: %w", err)
		}
		servers.DatabaseURL = servers.Postgres.URL
	}
	if err := printVersions(ctx, servers); err != nil || len(command) == 0 {
		return err
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), testkit.EnvRedis+"="+servers.RedisURL, testkit.EnvPostgres+"="+servers.DatabaseURL)
	cmd.Cancel = func() error { return nil } // the interrupt reaches the command too, in the same process group
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}

func printVersions(ctx context.Context, servers localserver.Pair) error {
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

const (
	memory = "/dev/shm" // a file system in memory, on Linux
	// memoryMin is the free space, in bytes, that tests and the linker have enough of.
	memoryMin = 4 << 30
	noExec    = 8 // ST_NOEXEC of statfs(2)
)

// temporaryFolder returns where tests keep temporary files, the servers' data included: in memory if there is room,
// because most of their time would be spent on creating and syncing files. TMPDIR overrides it.
func temporaryFolder() string {
	var found syscall.Statfs_t
	if os.Getenv("TMPDIR") != "" || syscall.Statfs(memory, &found) != nil || found.Flags&noExec != 0 ||
		found.Bavail*uint64(found.Bsize) < memoryMin {
		return os.TempDir()
	}
	return memory
}
