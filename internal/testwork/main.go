package testwork

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"stampede/fulfillment"
	"stampede/fulfillment/rebuild"
	"stampede/internal/connect"
	"stampede/internal/crashpoint"
	"stampede/internal/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// Watermill's conformance suite reads from many subscriptions at the same time, and leaves a reader behind if a message
// is delivered again after it has seen enough, as happens on a busy machine.
const suiteReader = "github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe"

// Main runs the tests of a package on servers of their own. A test may start the binary again, as a
// worker that it kills.
func Main(m *testing.M) {
	testkit.Main(m, testkit.WithCommand(command), testkit.IgnoreLeaks(
		goleak.IgnoreAnyFunction(suiteReader+".func2"), goleak.IgnoreAnyFunction(suiteReader+".func3"),
	))
}

// RebuildEnv names a sale that the process is to rebuild, instead of working.
const RebuildEnv = "STAMPEDE_TEST_REBUILD"

// command is a process with nothing but a worker or a rebuilder, for tests that kill it.
func command() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runWorker(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runWorker(ctx context.Context) error {
	if err := crashpoint.Check(); err != nil {
		return err
	}
	pool, err := connect.Postgres(ctx, os.Getenv("DATABASE_URL"), 4)
	if err != nil {
		return err
	}
	defer pool.Close()
	blocking, err := connect.Blocking(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	defer func() { _ = blocking.Close() }()
	control, err := connect.Control(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	defer func() { _ = control.Close() }()
	keys := reservation.Keys{Prefix: os.Getenv("STAMPEDE_KEY_PREFIX"), Partitions: 1}
	// Many buyers on a busy machine wait long.
	store := reservation.NewStore(control, keys, reservation.StoreOptions{WaitMax: time.Minute})
	defer store.Close()
	if sale := os.Getenv(RebuildEnv); sale != "" {
		r, err := rebuild.New(rebuild.Config{Pool: pool, Redis: control, Keys: keys, Store: store})
		if err == nil {
			_, err = r.Sale(ctx, uuid.MustParse(sale), rebuild.ReasonByHand)
		}
		return err
	}
	worker, err := fulfillment.NewWorker(fulfillment.WorkerConfig{
		Pool: pool, Blocking: blocking, Control: control, Keys: keys, Store: store, Catalog: catalog.New(pool, store),
		Consumer: "worker", SweepInterval: 50 * time.Millisecond, GuardInterval: 50 * time.Millisecond, MinIdle: time.Second,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return worker.Run(ctx)
}
