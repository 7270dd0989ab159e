package testwork

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"stampede/fulfillment"
	"stampede/internal/connect"
	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/upkeep/archive"
	"stampede/upkeep/rebuild"
)

// suiteReader is the goroutine of Watermill's conformance suite that reads from many subscriptions. It never ends if a
// message is redelivered after the suite has received enough, as happens on a busy machine.
const suiteReader = "github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe"

// Main runs the tests of a package on their own servers. A test may start the same binary as a worker that it kills.
func Main(m *testing.M) {
	testkit.Main(m, testkit.WithCommand(command), testkit.IgnoreLeaks(
		goleak.IgnoreAnyFunction(suiteReader+".func2"), goleak.IgnoreAnyFunction(suiteReader+".func3"),
	))
}

// RebuildEnv names a sale that the process rebuilds instead of running a worker.
const RebuildEnv = "STAMPEDE_TEST_REBUILD"

// ShardsEnv is to how many shards the process raises that sale.
const ShardsEnv = "STAMPEDE_TEST_SHARDS"

// RetireEnv is how long after its end a sale leaves Redis; never without it.
const RetireEnv = "STAMPEDE_TEST_RETIRE_AFTER"

// ArchiveEnv names a sale that the process archives into ArchiveDirEnv, and RestoreEnv a file that it brings back,
// instead of running a worker.
const (
	ArchiveEnv    = "STAMPEDE_TEST_ARCHIVE"
	ArchiveDirEnv = "STAMPEDE_TEST_ARCHIVE_DIR"
	RestoreEnv    = "STAMPEDE_TEST_RESTORE"
)

// command runs only a worker or a rebuild, in a process that a test kills.
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
	keys := reservation.Keys{Prefix: os.Getenv("STAMPEDE_KEY_PREFIX")}
	if keys.Partitions, err = strconv.Atoi(os.Getenv("STAMPEDE_PARTITIONS")); err != nil {
		return err
	}
	// Many buyers on a busy machine wait long.
	store := reservation.NewStore(control, keys, reservation.StoreOptions{WaitMax: time.Minute})
	defer store.Close()
	if sale := os.Getenv(ArchiveEnv); sale != "" {
		a, err := archive.New(ctx, archive.Config{
			Pool: pool, Redis: control, Keys: keys, Dir: os.Getenv(ArchiveDirEnv), Logger: slog.Default(),
		})
		if err != nil {
			return err
		}
		defer a.Close()
		_, err = a.Sale(ctx, uuid.MustParse(sale))
		return err
	}
	if file := os.Getenv(RestoreEnv); file != "" {
		_, err := archive.Restore(ctx, pool, file)
		return err
	}
	if sale := os.Getenv(RebuildEnv); sale != "" {
		r, err := rebuild.New(rebuild.Config{Pool: pool, Redis: control, Keys: keys, Store: store})
		if err != nil {
			return err
		}
		if shards := os.Getenv(ShardsEnv); shards != "" {
			n, err := strconv.Atoi(shards)
			if err == nil {
				_, err = r.RaiseShards(ctx, uuid.MustParse(sale), n, rebuild.ReasonByHand)
			}
			return err
		}
		_, err = r.Sale(ctx, uuid.MustParse(sale), rebuild.ReasonByHand)
		return err
	}
	var retireAfter time.Duration
	if after := os.Getenv(RetireEnv); after != "" {
		if retireAfter, err = time.ParseDuration(after); err != nil {
			return err
		}
	}
	worker, err := fulfillment.NewWorker(fulfillment.WorkerConfig{
		Pool: pool, Blocking: blocking, Control: control, Keys: keys, Store: store, Catalog: catalog.New(pool, store),
		Consumer: "worker", SweepInterval: 50 * time.Millisecond, GuardInterval: 50 * time.Millisecond, MinIdle: time.Second,
		RetireAfter: retireAfter,
		Logger:      slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return worker.Run(ctx)
}
