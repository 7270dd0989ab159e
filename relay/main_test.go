package relay_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"stampede/internal/connect"
	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/relay"
	"stampede/relay/target"
	"stampede/reservation"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithCommand(command)) }

// command runs a relay, in a process that a test kills.
func command() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runRelay(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runRelay(ctx context.Context) error {
	if err := crashpoint.Check(); err != nil {
		return err
	}
	pool, err := connect.Postgres(ctx, os.Getenv("DATABASE_URL"), target.Max)
	if err != nil {
		return err
	}
	defer pool.Close()
	rdb, err := connect.Control(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	defer func() { _ = rdb.Close() }()
	r, err := relay.New(relay.Config{
		Pool: pool, Redis: rdb, Keys: reservation.Keys{Prefix: os.Getenv("STAMPEDE_KEY_PREFIX")},
		Name: fmt.Sprint(os.Getpid()), Source: "/test", Scan: 50 * time.Millisecond, Lease: time.Second, Stdout: os.Stdout,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}
