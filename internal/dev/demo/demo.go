// Package demo shows the promises of Stampede with real processes of this program on private servers: a
// crowd buys, a worker is killed with pending orders, and an audit gives the verdict. Nothing is
// simulated, so it is also the largest test.
package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/dev/loadgen"
	"stampede/internal/dev/localserver"
	"stampede/internal/format"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/sql/migrate"
	"stampede/stream"
)

// Config sets the size of the demo. There are no defaults.
type Config struct {
	Stock        int64
	Items        []reservation.Item // none: the sale sells one thing
	Shards       int
	Buyers       int
	Over         time.Duration
	DoubleClicks float64
	// Servers are used or started.
	Servers localserver.Wanted
	// Partitions is the number of partitions.
	Partitions int
	// Dashboard starts a dashboard too. Run then returns when ctx ends.
	Dashboard bool
	// Out gets the story. Terminal means that lines on Out can be rewritten.
	Out      io.Writer
	Terminal bool
	// Verdict gets the verdict as well, good or bad, unless it is nil.
	Verdict func(Verdict) error
}

var (
	// ErrBroken is returned when a promise did not hold.
	ErrBroken = errors.New("a promise is broken")
	// ErrUnchecked is returned when a promise could not be checked and the others held.
	ErrUnchecked = errors.New("a promise could not be checked")
)

const (
	// killAt is the sold share of the stock at which the worker is killed.
	killAt = 0.4
	// replaceAfter is the time from the kill to the start of a replacement.
	replaceAfter = time.Second
	// minIdle is how long orders are pending before another worker takes them over.
	minIdle = 2 * time.Second
	// beat is longer than the time between two heartbeats of ingresses.
	beat = 2 * time.Second
	// patience bounds each wait for a state of the system.
	patience = 30 * time.Second
	// arrivalPatience bounds the time without an arrival in Postgres. A claim takes little longer than
	// minIdle.
	arrivalPatience = 5 * minIdle
)

// workers are those that run from the start.
var workers = []string{"worker-1", "worker-2"}

// quantity is the units of an order: baskets have two lines.
func (c Config) quantity() int64 { return int64(min(max(len(c.Items), 1), 2)) }

func (c Config) inItems() string {
	if len(c.Items) == 0 {
		return ""
	}
	return fmt.Sprintf(" in %d items", len(c.Items))
}

// orders is how many orders the stock is enough for.
func (c Config) orders() int64 { return c.Stock / c.quantity() }

// demo is one run.
type demo struct {
	config  Config
	story   *story
	servers *localserver.Pair
	keys    reservation.Keys
	token   string
	redis   redis.UniversalClient
	pool    *pgxpool.Pool
	fleet   *fleet
	ingress string // URL
	sale    uuid.UUID
	crash   crash
}

// smallest is the least stock and the least number of buyers with which the kill happens during the sale.
const smallest = 100

// Run writes the story to config.Out, with a verdict at its end. It returns ErrBroken or
// ErrUnchecked if the verdict is bad. After any error the logs of the processes are kept, and the
// story names their folder.
func Run(ctx context.Context, config Config) (err error) {
	if config.Stock < smallest || config.Buyers < smallest {
		return &order.InvalidError{Field: "stock and buyers", Reason: fmt.Sprintf("must be at least %d", smallest)}
	}
	d := &demo{
		config: config, story: newStory(config.Out, config.Terminal), token: rand.Text(),
		keys: reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: max(config.Partitions, config.Shards)},
	}
	if config.Servers.RedisURL != "" {
		d.keys.Prefix = "demo-" + rand.Text() // the server may have other orders and workers
	}
	if d.servers, err = localserver.Provide(ctx, config.Servers); err != nil {
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
		d.story.add("the logs of all processes are in %s", logs)
	}()
	if d.fleet, err = newFleet(logs); err != nil {
		return err
	}
	defer d.fleet.stop()
	if err := d.connect(ctx); err != nil {
		return err
	}
	defer d.disconnect()
	if err := d.refuseOthers(ctx); err != nil {
		return err
	}
	return d.run(ctx)
}

// refuseOthers returns an error if an ingress runs with the database: its workers and those of the demo, which have
// other keys in Redis, would rebuild each other's sales.
func (d *demo) refuseOthers(ctx context.Context) error {
	if d.config.Servers.DatabaseURL == "" {
		return nil
	}
	var seen [2]time.Time
	for n := range seen {
		if n > 0 && !retry.Pause(beat, ctx.Done()) {
			return ctx.Err()
		}
		if err := d.pool.QueryRow(ctx, sql.CrowdSeenAt).Scan(&seen[n]); err != nil {
			return fmt.Errorf("look for other servers: %w", err)
		}
	}
	if seen[0].Equal(seen[1]) {
		return nil
	}
	return &order.InvalidError{
		Field: "DATABASE_URL", Reason: "must be a database that no server uses now: the demo rebuilds its sales",
	}
}

func (d *demo) connect(ctx context.Context) (err error) {
	if err := migrate.Up(ctx, d.servers.DatabaseURL); err != nil {
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

// run plays the demo. If a process ends unexpectedly, run stops and returns that as its error.
func (d *demo) run(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	d.fleet.onLoss = end
	err := d.play(ctx)
	if err == nil || errors.Is(err, ErrBroken) || errors.Is(err, ErrUnchecked) {
		d.stay(ctx)
		return err
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

func (d *demo) play(ctx context.Context) error {
	if err := d.open(ctx); err != nil {
		return err
	}
	verifier, err := loadgen.NewPostgresVerifier(ctx, d.pool, d.sale)
	if err != nil {
		return err
	}
	buyers, err := loadgen.New(loadgen.Config{
		URLs: []string{d.ingress}, Sale: d.sale, Buyers: d.config.Buyers, Arrivals: loadgen.Evenly(d.config.Over),
		Quantity: d.config.quantity(), Items: reservation.Terms{Items: d.config.Items}.Codes(),
		DoubleClicks: d.config.DoubleClicks, Patience: patience,
	})
	if err != nil {
		return err
	}
	var durable loadgen.Durable
	running, beside := errgroup.WithContext(ctx)
	running.Go(func() error { buyers.Run(beside); return nil })
	running.Go(func() error { d.story.follow(beside, buyers); return nil })
	running.Go(func() error { return d.killWorker(beside, buyers) })
	running.Go(func() (err error) {
		durable, err = buyers.WatchDurable(beside, verifier, arrivalPatience)
		return err
	})
	if err := running.Wait(); err != nil {
		return err
	}
	report := buyers.Report()
	report.Durable = &durable
	if err := d.story.report(report); err != nil {
		return err
	}
	comparison, err := verifier.Compare(ctx, buyers.Ledger())
	if err != nil {
		return err
	}
	return d.judge(ctx, report, comparison)
}

// open starts the processes and creates the sale.
func (d *demo) open(ctx context.Context) error {
	addr, err := d.fleet.startIngress(ctx, d.env())
	if err != nil {
		return err
	}
	d.ingress = "http://" + addr
	watched := []string{d.ingress + "/metrics"}
	for _, name := range workers {
		if err := d.fleet.startWorker(ctx, name, d.env()); err != nil {
			return err
		}
		watched = append(watched, "http://"+d.fleet.workers[name].metrics+"/metrics")
	}
	if err := d.openDashboard(ctx, watched); err != nil {
		return err
	}
	d.sale, err = loadgen.CreateSale(ctx, d.ingress, d.token, reservation.Terms{
		Name: "demo", Stock: d.config.Stock, Shards: d.config.Shards, Items: d.config.Items,
		PerOrderLimit: d.config.quantity(),
	})
	if err != nil {
		return err
	}
	if err := d.awaitWorkers(ctx); err != nil {
		return err
	}
	d.story.add("up: an ingress and two workers, Redis (AOF always) and Postgres, a sale of %s units%s",
		format.Count(d.config.Stock), d.config.inItems())
	d.story.add("%s buyers arrive within %g s; %g %% of them click twice", format.Count(d.config.Buyers),
		d.config.Over.Seconds(), 100*d.config.DoubleClicks)
	return nil
}

// openDashboard starts a dashboard, if one is wanted.
func (d *demo) openDashboard(ctx context.Context, watched []string) error {
	if !d.config.Dashboard {
		return nil
	}
	addr, err := d.fleet.startDashboard(ctx, d.env(), watched)
	if err == nil {
		d.story.add("the dashboard: http://%s, token %s", addr, d.token)
	}
	return err
}

// stay leaves the dashboard and all processes running after the verdict, until ctx is done.
func (d *demo) stay(ctx context.Context) {
	if d.config.Dashboard {
		d.story.add("the dashboard stays until Ctrl-C")
		<-ctx.Done()
	}
}

// env is the environment of the processes: that of this process, with the settings of the demo.
func (d *demo) env() []string {
	kept := slices.DeleteFunc(os.Environ(), func(setting string) bool {
		name, _, _ := strings.Cut(setting, "=")
		switch name {
		case "REDIS_URL_FILE", "DATABASE_URL_FILE", "STAMPEDE_ADMIN_TOKEN_FILE":
			return true // the variables themselves are set below
		}
		return false
	})
	return append(kept,
		"REDIS_URL="+d.servers.RedisURL,
		"DATABASE_URL="+d.servers.DatabaseURL,
		"STAMPEDE_KEY_PREFIX="+d.keys.Prefix,
		"STAMPEDE_PARTITIONS="+strconv.Itoa(d.keys.Partitions),
		"STAMPEDE_AUTH=header",
		"STAMPEDE_ADMIN_TOKEN="+d.token,
		"STAMPEDE_HTTP_ADDR=127.0.0.1:0",
		"STAMPEDE_METRICS_ADDR=127.0.0.1:0",
		"STAMPEDE_MIN_IDLE="+minIdle.String(),
		"STAMPEDE_STOP_DELAY=0s",   // the crowd has ended by then
		"STAMPEDE_LOG_FORMAT=json", // newAddrWatch reads it
		"STAMPEDE_LOG_LEVEL=info",
	)
}

func (d *demo) stream() string { return d.keys.Orders(d.keys.Partition(d.sale)) }

// pendingMax is more entries than a worker holds.
const pendingMax = 10_000

// pendingOrders returns the number of orders in the pending entries of a worker.
func (d *demo) pendingOrders(ctx context.Context, worker string) (orders int64, err error) {
	pending, err := d.redis.XPendingExt(ctx, &redis.XPendingExtArgs{
		Stream: d.stream(), Group: reservation.Group, Consumer: worker, Start: "-", End: "+", Count: pendingMax,
	}).Result()
	if err != nil {
		return 0, fmt.Errorf("read the pending entries of %s: %w", worker, err)
	}
	for _, p := range pending {
		entries, err := d.redis.XRange(ctx, d.stream(), p.ID, p.ID).Result()
		if err != nil {
			return 0, fmt.Errorf("read entry %s: %w", p.ID, err)
		}
		for _, entry := range entries {
			payload, _ := entry.Values[stream.FieldPayload].(string)
			orders += int64(order.CountReserved(payload))
		}
	}
	return orders, nil
}

func (d *demo) awaitWorkers(ctx context.Context) error {
	presence := stream.Presence{Control: d.redis, Group: reservation.Group, SilentMax: minIdle}
	return await(ctx, "the workers", func() (bool, error) {
		found := presence.Look(ctx, []string{d.stream()})
		return len(found[0].Others) >= len(workers), nil // the first worker creates the group
	})
}

// await polls until done returns true.
func await(ctx context.Context, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("%s: not within %s", what, patience))
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
