// Package demo shows what Stampede promises, for real: processes of this very program on private
// servers, a crowd that buys from them, a worker that is killed with orders in its hands, and the
// books at the end. Nothing in it is simulated, so it is also the largest test.
package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/crowd"
	"stampede/internal/figure"
	"stampede/internal/localserver"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// Config says how large the demo is. There are no defaults.
type Config struct {
	Stock        int64
	Buyers       int
	Over         time.Duration
	DoubleClicks float64
	// RedisURL and DatabaseURL are used instead of private servers where they are given.
	RedisURL, DatabaseURL string
	// Out takes the story, and Terminal says that lines on it can be rewritten.
	Out      io.Writer
	Terminal bool
}

var (
	// ErrBroken is returned when a promise did not hold.
	ErrBroken = errors.New("a promise is broken")
	// ErrUnchecked is returned when a promise could not be looked at, and the others held.
	ErrUnchecked = errors.New("a promise could not be checked")
)

const (
	// killAt is the share of the stock that is accepted when the worker is killed.
	killAt = 0.4
	// replaceAfter is how long the killed worker is missing.
	replaceAfter = time.Second
	// minIdle is how long a worker may be silent until another takes over its orders.
	minIdle = 2 * time.Second
	// patience bounds each wait for a state of the system.
	patience = 30 * time.Second
	// arrivalPatience is how long no order arrives in Postgres until no more is waited for. A claim
	// takes little longer than minIdle.
	arrivalPatience = 5 * minIdle
)

// demo is one run.
type demo struct {
	config  Config
	story   *story
	servers *localserver.Pair
	keys    reservation.Keys
	token   string
	redis   *redis.Client
	pool    *pgxpool.Pool
	fleet   *fleet
	ingress string // its URL
	sale    uuid.UUID
	crash   crash
}

// smallest is the least stock and the least crowd with which a worker can be killed in the middle of a sale.
const smallest = 100

// Run tells the story on config.Out, with a verdict at its end. It returns ErrBroken or
// ErrUnchecked if the verdict is bad. The logs of the processes are kept if anything went wrong,
// and the story says where.
func Run(ctx context.Context, config Config) (err error) {
	if config.Stock < smallest || config.Buyers < smallest {
		return &order.InvalidError{Field: "stock and buyers", Reason: fmt.Sprintf("must be at least %d", smallest)}
	}
	d := &demo{
		config: config, story: newStory(config.Out, config.Terminal), token: rand.Text(),
		keys: reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: 1},
	}
	if config.RedisURL != "" {
		d.keys.Prefix = "demo-" + rand.Text() // the server may have other orders, and other workers
	}
	if d.servers, err = localserver.Provide(ctx, config.RedisURL, config.DatabaseURL); err != nil {
		return err
	}
	defer d.servers.Stop()
	logs, err := os.MkdirTemp("", "stampede-demo-")
	if err != nil {
		return err
	}
	defer func() {
		if err == nil || ctx.Err() != nil {
			_ = os.RemoveAll(logs)
			return
		}
		d.story.tell("the logs of all processes are in %s", logs)
	}()
	if d.fleet, err = newFleet(logs); err != nil {
		return err
	}
	defer d.fleet.stop()
	if err := d.connect(ctx); err != nil {
		return err
	}
	defer d.disconnect()
	return d.run(ctx)
}

func (d *demo) connect(ctx context.Context) (err error) {
	if err := sql.Up(ctx, d.servers.DatabaseURL); err != nil {
		return err
	}
	if d.redis, err = connect.Control(d.servers.RedisURL); err != nil {
		return err
	}
	if d.pool, err = connect.Postgres(ctx, d.servers.DatabaseURL, 4); err != nil {
		_ = d.redis.Close()
	}
	return err
}

func (d *demo) disconnect() {
	d.pool.Close()
	_ = d.redis.Close()
}

// run ends early, with the reason, when one of the processes ends by itself.
func (d *demo) run(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	d.fleet.onLoss = end
	err := d.play(ctx)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, ErrBroken) && !errors.Is(err, ErrUnchecked) {
		return cause
	}
	return err
}

func (d *demo) play(ctx context.Context) error {
	if err := d.open(ctx); err != nil {
		return err
	}
	books, err := crowd.OpenPostgresBooks(ctx, d.pool, d.sale)
	if err != nil {
		return err
	}
	buyers, err := crowd.New(crowd.Config{
		URLs: []string{d.ingress}, Sale: d.sale, Buyers: d.config.Buyers, Over: d.config.Over,
		DoubleClicks: d.config.DoubleClicks, Patience: patience,
	})
	if err != nil {
		return err
	}
	var durable crowd.Durable
	together, beside := errgroup.WithContext(ctx)
	together.Go(func() error { buyers.Run(beside); return nil })
	together.Go(func() error { d.story.follow(beside, buyers); return nil })
	together.Go(func() error { return d.killWorker(beside, buyers) })
	together.Go(func() (err error) {
		durable, err = buyers.WatchDurable(beside, books, arrivalPatience)
		return err
	})
	if err := together.Wait(); err != nil {
		return err
	}
	report := buyers.Report()
	report.Durable = &durable
	if err := d.story.report(report); err != nil {
		return err
	}
	comparison, err := books.Compare(ctx, buyers.Ledger())
	if err != nil {
		return err
	}
	return d.judge(ctx, report, comparison)
}

// open starts everything and creates the sale.
func (d *demo) open(ctx context.Context) error {
	addr, err := d.fleet.startIngress(ctx, d.env())
	if err != nil {
		return err
	}
	d.ingress = "http://" + addr
	workers := []string{"worker-1", "worker-2"}
	for _, name := range workers {
		if err := d.fleet.startWorker(name, d.env()); err != nil {
			return err
		}
	}
	d.sale, err = crowd.CreateSale(ctx, d.ingress, d.token, "demo", d.config.Stock, 1)
	if err != nil {
		return err
	}
	if err := d.awaitWorkers(ctx, workers); err != nil {
		return err
	}
	d.story.tell("up: an ingress and two workers, Redis (AOF always) and Postgres, a sale of %s units",
		figure.Count(d.config.Stock))
	d.story.tell("in come %s buyers within %g s; %g %% of them click twice", figure.Count(d.config.Buyers),
		d.config.Over.Seconds(), 100*d.config.DoubleClicks)
	return nil
}

// env is the environment of the processes: ours, and over it what the story rests on.
func (d *demo) env() []string {
	return append(os.Environ(),
		"REDIS_URL="+d.servers.RedisURL,
		"DATABASE_URL="+d.servers.DatabaseURL,
		"STAMPEDE_KEY_PREFIX="+d.keys.Prefix,
		"STAMPEDE_PARTITIONS=1",
		"STAMPEDE_AUTH=header",
		"STAMPEDE_ADMIN_TOKEN="+d.token,
		"STAMPEDE_HTTP_ADDR=127.0.0.1:0",
		"STAMPEDE_METRICS_ADDR=127.0.0.1:0",
		"STAMPEDE_MIN_IDLE="+minIdle.String(),
		"STAMPEDE_STOP_DELAY=0s",   // the crowd has gone by then
		"STAMPEDE_LOG_FORMAT=json", // newAddrWatch reads it
		"STAMPEDE_LOG_LEVEL=info",
	)
}

func (d *demo) stream() string { return d.keys.Orders(0) }

// pendingOf is how many entries a worker has in its hands.
func (d *demo) pendingOf(ctx context.Context, worker string) (int64, error) {
	consumers, err := d.redis.XInfoConsumers(ctx, d.stream(), reservation.Group).Result()
	if err != nil {
		return 0, fmt.Errorf("ask for the pending entries of %s: %w", worker, err)
	}
	for _, c := range consumers {
		if c.Name == worker {
			return c.Pending, nil
		}
	}
	return 0, nil
}

func (d *demo) awaitWorkers(ctx context.Context, names []string) error {
	return await(ctx, "the workers", func() (bool, error) {
		consumers, err := d.redis.XInfoConsumers(ctx, d.stream(), reservation.Group).Result()
		if err != nil {
			return false, nil //nolint:nilerr // there is no group before the first worker makes it
		}
		return len(consumers) >= len(names), nil
	})
}

// await asks until the answer is yes.
func await(ctx context.Context, what string, ask func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("%s: not within %s", what, patience))
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if yes, err := ask(); yes || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
