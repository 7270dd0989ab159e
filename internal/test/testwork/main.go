// Package testwork lets tests do what workers and operators do on a shop of package testshop.
package testwork

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/fulfillment"
	"stampede/internal/connect"
	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/upkeep/archive"
	"stampede/upkeep/rebuild"
)

// Main runs the tests of a package on their own servers. A test may start the same binary as a process of its shop,
// which it kills.
func Main(m *testing.M) { testkit.Main(m, testkit.WithCommand(command)) }

func command() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runProcess(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// process is what a process of a shop works with.
type process struct {
	pool              *pgxpool.Pool
	blocking, control redis.UniversalClient
	keys              reservation.Keys
	store             *reservation.Store
}

func runProcess(ctx context.Context, args []string) error {
	if err := crashpoint.Check(); err != nil {
		return err
	}
	p := process{keys: reservation.Keys{Prefix: os.Getenv("STAMPEDE_KEY_PREFIX")}}
	var err error
	if p.keys.Partitions, err = strconv.Atoi(os.Getenv("STAMPEDE_PARTITIONS")); err != nil {
		return err
	}
	if p.pool, err = connect.Postgres(ctx, os.Getenv("DATABASE_URL"), 4); err != nil {
		return err
	}
	defer p.pool.Close()
	if p.blocking, err = connect.Blocking(os.Getenv("REDIS_URL")); err != nil {
		return err
	}
	defer func() { _ = p.blocking.Close() }()
	if p.control, err = connect.Control(os.Getenv("REDIS_URL")); err != nil {
		return err
	}
	defer func() { _ = p.control.Close() }()
	// Many buyers on a busy machine wait long.
	p.store = reservation.NewStore(p.control, p.keys, reservation.StoreOptions{WaitMax: time.Minute})
	defer p.store.Close()
	return p.run(ctx, args)
}

func (p process) run(ctx context.Context, args []string) error {
	switch args[0] {
	case "worker":
		return p.work(ctx, 0)
	case "retiring worker":
		return p.work(ctx, time.Millisecond)
	case "archive": // a sale, into a folder
		a, err := archive.New(ctx, archive.Config{
			Pool: p.pool, Redis: p.control, Keys: p.keys, Store: p.store, Dir: args[2], Logger: slog.Default(),
		})
		if err != nil {
			return err
		}
		defer a.Close()
		_, err = a.Sale(ctx, uuid.MustParse(args[1]))
		return err
	case "report": // a payment with this reference, of this order
		_, err := ledger.New(p.pool).Report(ctx, order.Money{Reference: args[1], OrderID: uuid.MustParse(args[2])})
		return err
	case "beacon": // of the draw of a sale: a round, and its signature
		round, err := strconv.ParseInt(args[2], 10, 64)
		if err != nil {
			return err
		}
		signature, err := hex.DecodeString(args[3])
		if err != nil {
			return err
		}
		_, err = draws.New(p.pool).Beacon(ctx, uuid.MustParse(args[1]), round, signature)
		return err
	case "restore": // a file
		_, err := archive.Restore(ctx, p.pool, args[1])
		return err
	}
	r, err := rebuild.New(rebuild.Config{Pool: p.pool, Redis: p.control, Keys: p.keys, Store: p.store})
	if err != nil {
		return err
	}
	sale := uuid.MustParse(args[1])
	switch args[0] {
	case "rebuild": // a sale
		_, err = r.Sale(ctx, sale, rebuild.ReasonByHand)
	case "raise shards": // of a sale, to a number
		var shards int
		if shards, err = strconv.Atoi(args[2]); err == nil {
			_, err = r.RaiseShards(ctx, sale, shards, rebuild.ReasonByHand)
		}
	default:
		err = fmt.Errorf("testwork has no command %q", args[0])
	}
	return err
}

// work runs a worker. A sale leaves Redis so long after its end; never for 0.
func (p process) work(ctx context.Context, retireAfter time.Duration) error {
	worker, err := fulfillment.NewWorker(fulfillment.WorkerConfig{
		Pool: p.pool, Blocking: p.blocking, Control: p.control, Keys: p.keys, Store: p.store,
		Catalog: catalog.New(p.pool, p.store), Consumer: "worker",
		SweepInterval: 50 * time.Millisecond, GuardInterval: 50 * time.Millisecond, MinIdle: time.Second,
		RetireAfter: retireAfter,
		Logger:      slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return worker.Run(ctx)
}
