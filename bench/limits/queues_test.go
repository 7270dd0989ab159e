package limits

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/rig"
	"stampede/reservation"
	"stampede/reservation/order"
)

// turnTimeout ends the turn of a candidate that has not finished its backlog.
const turnTimeout = 5 * time.Second

// queue is a queue with a consumer process.
type queue struct {
	name string
	fill func(b *testing.B, orders int) (*backlog, *rig.Process)
}

// BenchmarkQueues measures how fast a backlog of orders becomes rows in Postgres, through one consumer
// process of each queue. All of them write the same rows, through Stampede's ledger.
//
// Each has the settings with which it was fastest and cheapest. Tried: for asynq, 1, 4 and 8 servers in
// the process, because each fetches its tasks one after another, 8 to 64 handlers in each, 4 to 16
// connections to Postgres; for River, 16 to 1000 workers, 4 and 8 connections; for the subscribers, 4,
// 8 and 16. Transactions with one order wait for the row of the sale: more handlers and connections
// only add to the waiting, and cost more.
func BenchmarkQueues(b *testing.B) {
	compareQueues(b, "Job queues: orders one by one",
		"A handler writes one order in one transaction, which is what the queues are made for; Stampede's worker makes "+
			"batches by itself.",
		stampede,
		fromStream("64 stock subscribers", consumerSpec{Queue: "stock", Handlers: 64, Connections: 4}),
		fromAsynq("asynq", consumerSpec{Queue: "asynq", Handlers: 8, Connections: 4, Servers: 4}),
		fromRiver("River", consumerSpec{Queue: "river", Handlers: 16, Connections: 4}),
	)
}

// BenchmarkQueuesBatched is the same with the best batching that users of the queues can have: asynq
// can group tasks, and handlers of any queue can share a transaction (together). River cannot pass
// several jobs to one call.
//
// asynq makes one task of at most asynqGroupMax orders of each group, once a second: 40 groups let it
// take the whole backlog at the first look. 10 were tried as well. For handlers that share: 1 to 16
// servers with 32 or 256 handlers each for asynq, 500 to 2000 workers for River; one connection writes
// as much as two, which would wait for the row of the sale.
func BenchmarkQueuesBatched(b *testing.B) {
	compareQueues(b, "Job queues: orders in batches",
		"“Together”: handlers that run at the same time share a transaction, by some fifty lines of the user's own. "+
			"“Groups”: asynq makes one task of many, once a second.",
		stampede,
		fromStream("64 stock subscribers, together",
			consumerSpec{Queue: "stock", Handlers: 64, Connections: 1, Together: true}),
		fromAsynq("asynq, groups", consumerSpec{Queue: "asynq", Handlers: 4, Connections: 2, Servers: 1, Groups: 40}),
		fromAsynq("asynq, together", consumerSpec{Queue: "asynq", Handlers: 32, Connections: 1, Servers: 16, Together: true}),
		fromRiver("River, together", consumerSpec{Queue: "river", Handlers: 1000, Connections: 1, Together: true}),
	)
}

func compareQueues(b *testing.B, title, note string, queues ...queue) {
	b.Helper()
	orders := rig.Scale(b, 20_000, 500)
	var candidates []rig.Candidate
	for _, q := range queues {
		candidates = append(candidates, rig.Candidate{Name: q.name, Turn: func(b *testing.B, _ int) rig.Values {
			return q.work(b, orders)
		}})
	}
	results := rig.Compare(b, candidates...)
	roles := []string{rig.Worker, rig.Redis, rig.Postgres}
	table := rig.Table{
		Title: title,
		Note: fmt.Sprintf("%s A backlog of %d orders, or what is done of it in %v. %d rounds; CPU time is in µs for each "+
			"order.", note, orders, turnTimeout, b.N),
		Head: append([]string{"", perSecond, "Stampede ÷ it"}, roles...),
	}
	for _, q := range queues {
		results.Report(b, q.name, perSecond, perSecond)
		ratio := "1"
		if q.name != stampede.name {
			ratio = results.Ratio(stampede.name, perSecond, q.name, perSecond).Format(rig.Ratio)
		}
		row := []string{q.name, results.Of(q.name, perSecond).Format(rig.Count), ratio}
		table.Rows = append(table.Rows, append(row, results.Medians(rig.Ratio, q.name, roles...)...))
	}
	rig.Put(table)
}

// backlog is a queue full of orders for one consumer.
type backlog struct {
	shop  *rig.Shop
	sale  uuid.UUID
	close func()
}

// stampede is `stampede work`, on a stream that its own ingress has filled.
var stampede = queue{name: "Stampede", fill: func(b *testing.B, orders int) (*backlog, *rig.Process) {
	system := rig.Stampede{}.Start(b, int64(orders))
	worker := system.Workers[0]
	freeze(b, worker)
	return fillStream(b, system, orders), worker
}}

// fromStream is a consumer in place of Stampede's worker.
func fromStream(name string, spec consumerSpec) queue {
	return queue{name: name, fill: func(b *testing.B, orders int) (*backlog, *rig.Process) {
		system := rig.Stampede{}.Start(b, int64(orders))
		system.StopWorkers()
		spec.RedisURL, spec.DatabaseURL = system.Shop.RedisURL, system.Shop.DatabaseURL
		spec.Stream = system.Shop.Keys(1).Orders(0)
		process := spec.start(b)
		freeze(b, process)
		return fillStream(b, system, orders), process
	}}
}

// fillStream lets buyers buy the whole stock, and then ends the ingress.
func fillStream(b *testing.B, system *rig.System, orders int) *backlog {
	b.Helper()
	crowd := system.Crowd(1)
	crowd.Connections, crowd.For, crowd.Most = crowdConnections, time.Minute, uint64(orders)
	answers := system.Measure(crowd)
	require.EqualValues(b, orders, answers.Wanted, "%s", answers)
	for _, p := range system.Fronts {
		p.Kill()
	}
	return &backlog{shop: system.Shop, sale: system.Sale, close: system.Close}
}

func fromAsynq(name string, spec consumerSpec) queue {
	return queue{name: name, fill: func(b *testing.B, orders int) (*backlog, *rig.Process) {
		q := openBacklog(b, orders)
		spec.RedisURL, spec.DatabaseURL = q.shop.RedisURL, q.shop.DatabaseURL
		process := spec.start(b)
		freeze(b, process)
		fillAsynq(b, q.shop.RedisURL, jobs(q.sale, orders), spec.Groups)
		q.close = func() {
			forgetAsynq(b, q.shop.RedisURL)
			q.shop.Close()
		}
		return q, process
	}}
}

func fromRiver(name string, spec consumerSpec) queue {
	return queue{name: name, fill: func(b *testing.B, orders int) (*backlog, *rig.Process) {
		q := openBacklog(b, orders)
		migrateRiver(b, q.shop.Pool)
		spec.RedisURL, spec.DatabaseURL = q.shop.RedisURL, q.shop.DatabaseURL
		process := spec.start(b)
		freeze(b, process)
		fillRiver(b, q.shop.Pool, jobs(q.sale, orders))
		return q, process
	}}
}

// openBacklog makes a shop with a sale.
func openBacklog(b *testing.B, orders int) *backlog {
	b.Helper()
	shop := rig.Open(b)
	return &backlog{shop: shop, sale: shop.InsertSale(int64(orders)), close: shop.Close}
}

// freeze suspends a consumer while its queue is filled, when it is connected and idle: so it neither
// works on the backlog before the measurement starts, nor is its start measured.
func freeze(b *testing.B, p *rig.Process) {
	b.Helper()
	require.NoError(b, syscall.Kill(p.Pid(), syscall.SIGSTOP))
}

// work fills the queue, and lets its consumer work on it.
func (q queue) work(b *testing.B, orders int) rig.Values {
	b.Helper()
	full, process := q.fill(b, orders)
	defer full.close()
	defer process.Kill()
	sold := func(units int, within time.Duration) int64 {
		n, err := full.shop.AwaitSold(b.Context(), int64(units), within)
		require.NoError(b, err)
		return n
	}
	require.Zero(b, sold(0, 0), "the consumer wrote orders before the start")
	cpu, consumed := full.shop.CPU(), rig.ProcessCPU(b, process.Pid())
	began := time.Now()
	require.NoError(b, syscall.Kill(process.Pid(), syscall.SIGCONT))
	done := sold(orders, turnTimeout)
	took := time.Since(began)
	cpu = full.shop.CPU().Since(cpu)
	cpu[rig.Worker] = rig.ProcessCPU(b, process.Pid()) - consumed
	require.NotZero(b, done, "the consumer wrote no orders")

	process.Kill() // ends all writing
	full.requireRows(b, done)
	return newValues(done, took, cpu)
}

// requireRows checks that the counted work was done: a row for each order, and its event.
func (q *backlog) requireRows(b *testing.B, least int64) {
	b.Helper()
	var sold, orders, events int64
	require.NoError(b, q.shop.Pool.QueryRow(b.Context(), `
		SELECT (SELECT sold FROM sales WHERE id = $1),
		       (SELECT count(*) FROM orders WHERE sale_id = $1 AND status = 'confirmed'),
		       (SELECT count(*) FROM order_events WHERE sale_id = $1)`, q.sale).Scan(&sold, &orders, &events))
	require.GreaterOrEqual(b, sold, least)
	require.Equal(b, []int64{sold, sold}, []int64{orders, events}, "orders and events of %d units", sold)
}

const (
	// asynqDatabase is the Redis database of asynq alone: its keys have no prefix.
	asynqDatabase = 1
	// asynqPool is the number of asynq's connections: with AOF always, more concurrent calls make Redis
	// faster.
	asynqPool = 64

	taskOrder  = "order"
	taskOrders = "orders" // grouped by asynq
	// asynqGroupMax is how many orders asynq puts into one task.
	asynqGroupMax = 500
	// asynqGrace is how long a group waits for more, the minimum of asynq; asynq also looks at groups
	// this often.
	asynqGrace = time.Second
)

func asynqRedis(url string) (asynq.RedisClientOpt, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return asynq.RedisClientOpt{}, err
	}
	return asynq.RedisClientOpt{Addr: o.Addr, DB: asynqDatabase, PoolSize: asynqPool}, nil
}

// consumeAsynq runs several asynq servers in one process: each fetches its tasks one by one, and waits
// for Redis's disk each time.
func consumeAsynq(ctx context.Context, c consumer, ready func()) error {
	opt, err := asynqRedis(c.RedisURL)
	if err != nil {
		return err
	}
	mux := asynq.NewServeMux()
	mux.HandleFunc(taskOrder, func(ctx context.Context, task *asynq.Task) error {
		var j job
		if err := json.Unmarshal(task.Payload(), &j); err != nil {
			return err
		}
		return c.record(ctx, j.event())
	})
	mux.HandleFunc(taskOrders, func(ctx context.Context, task *asynq.Task) error {
		var events []order.OrderReserved
		for line := range bytes.Lines(task.Payload()) {
			var j job
			if err := json.Unmarshal(line, &j); err != nil {
				return err
			}
			events = append(events, j.event())
		}
		return c.recordAll(ctx, events)
	})
	config := asynq.Config{
		Concurrency: c.Handlers, TaskCheckInterval: 5 * time.Millisecond, LogLevel: asynq.ErrorLevel,
		BaseContext: func() context.Context { return context.WithoutCancel(ctx) },
	}
	if c.Groups > 0 {
		config.GroupAggregator = asynq.GroupAggregatorFunc(joinTasks)
		config.GroupMaxSize, config.GroupGracePeriod, config.GroupMaxDelay = asynqGroupMax, asynqGrace, asynqGrace
	}
	for range c.Servers {
		server := asynq.NewServer(opt, config)
		if err := server.Start(mux); err != nil {
			return err
		}
		defer server.Shutdown()
	}
	ready()
	<-ctx.Done()
	return nil
}

// joinTasks makes one task of those in a group: their payloads, one per line.
func joinTasks(_ string, tasks []*asynq.Task) *asynq.Task {
	var lines []byte
	for _, task := range tasks {
		lines = append(append(lines, task.Payload()...), '\n')
	}
	return asynq.NewTask(taskOrders, lines)
}

// fillAsynq enqueues one task per order, and spreads them over the groups, if any.
func fillAsynq(b *testing.B, redisURL string, orders []job, groups int) {
	b.Helper()
	opt, err := asynqRedis(redisURL)
	require.NoError(b, err)
	client := asynq.NewClient(opt)
	var enqueuing errgroup.Group
	var next atomic.Int64
	for range asynqPool {
		enqueuing.Go(func() error {
			for i := next.Add(1) - 1; i < int64(len(orders)); i = next.Add(1) - 1 {
				payload, err := json.Marshal(orders[i])
				if err != nil {
					return err
				}
				var options []asynq.Option
				if groups > 0 {
					options = append(options, asynq.Group(fmt.Sprint(i%int64(groups))))
				}
				if _, err := client.Enqueue(asynq.NewTask(taskOrder, payload), options...); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(b, errors.Join(enqueuing.Wait(), client.Close()))
}

// forgetAsynq deletes what a turn has left in Redis.
func forgetAsynq(b *testing.B, redisURL string) {
	b.Helper()
	o, err := redis.ParseURL(redisURL)
	require.NoError(b, err)
	o.DB = asynqDatabase
	client := redis.NewClient(o)
	require.NoError(b, errors.Join(client.FlushDB(context.Background()).Err(), client.Close()))
}

// riverConnections are River's own: to fetch, complete, listen and elect a leader.
const riverConnections = 4

// riverWorker writes one order per job.
type riverWorker struct {
	river.WorkerDefaults[job]
	consumer
}

// Work implements river.Worker.
func (w *riverWorker) Work(ctx context.Context, j *river.Job[job]) error {
	return w.record(ctx, j.Args.event())
}

// consumeRiver lets River fetch as fast as its settings allow. River marks jobs as completed in
// batches.
func consumeRiver(ctx context.Context, c consumer, ready func()) error {
	config, err := pgxpool.ParseConfig(c.DatabaseURL)
	if err != nil {
		return err
	}
	config.MaxConns = riverConnections
	own, err := pgxpool.NewWithConfig(ctx, config) // in a shared pool River would wait for the orders' transactions
	if err != nil {
		return err
	}
	defer own.Close()
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{consumer: c})
	client, err := river.NewClient(riverpgxv5.New(own), &river.Config{
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: c.Handlers}},
		FetchCooldown: time.Millisecond, FetchPollInterval: 50 * time.Millisecond,
		Workers: workers, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	ready()
	<-ctx.Done()
	return ignoreCanceled(client.Stop(context.WithoutCancel(ctx)))
}

func ignoreCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// migrateRiver makes River's tables in the database of the orders.
func migrateRiver(b *testing.B, pool *pgxpool.Pool) {
	b.Helper()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	require.NoError(b, err)
	_, err = migrator.Migrate(b.Context(), rivermigrate.DirectionUp, nil)
	require.NoError(b, err)
}

// fillRiver inserts one job per order.
func fillRiver(b *testing.B, pool *pgxpool.Pool, orders []job) {
	b.Helper()
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{})
	require.NoError(b, err)
	const insertMax = 1000
	for len(orders) > 0 {
		n := min(len(orders), insertMax)
		params := make([]river.InsertManyParams, n)
		for i := range params {
			params[i].Args = orders[i]
		}
		_, err := client.InsertManyFast(b.Context(), params)
		require.NoError(b, err)
		orders = orders[n:]
	}
	// Autovacuum does this to a queue in use: without it the planner knows nothing of the backlog.
	_, err = pool.Exec(b.Context(), "ANALYZE river_job", pgx.QueryExecModeSimpleProtocol)
	require.NoError(b, err)
}

// consumeStock uses watermill-redisstream unchanged: a router whose subscribers, in one consumer group,
// read Stampede's own stream.
func consumeStock(ctx context.Context, c consumer, ready func()) error {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	options, err := redis.ParseURL(c.RedisURL)
	if err != nil {
		return err
	}
	handle := func(msg *message.Message) error {
		events, err := order.DecodeReserved(msg)
		if err != nil {
			return err
		}
		if !c.Together {
			return c.recordAll(msg.Context(), events)
		}
		var all errgroup.Group
		for _, event := range events {
			all.Go(func() error { return c.record(msg.Context(), event) })
		}
		return all.Wait()
	}
	for i := range c.Handlers {
		name := fmt.Sprint("stock-", i)
		subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
			// One client each: in a shared one, subscribers that block in reads would occupy all
			// connections.
			Client: redis.NewClient(options), ConsumerGroup: reservation.Group, Consumer: name,
			DisableIndefiniteInitialBlock: true, OldestId: "0",
		}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		router.AddConsumerHandler(name, c.Stream, subscriber, handle) // closes its client
	}
	go func() {
		<-router.Running()
		ready()
	}()
	return router.Run(ctx)
}
