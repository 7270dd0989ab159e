package limits

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/rig"
	"stampede/internal/connect"
	"stampede/ledger"
	"stampede/reservation/order"
)

// The test binary also runs as a consumer process.
func TestMain(m *testing.M) {
	if os.Getenv(consumerEnv) != "" {
		os.Exit(consumerMain())
	}
	rig.Main(m, "limits", "labstack/echo", "redis/go-redis", "jackc/pgx", "hibiken/asynq", "riverdriver/riverpgxv5",
		"watermill-redisstream")
}

// consumerEnv is the environment variable with the consumerSpec of a consumer process, in JSON.
const consumerEnv = "STAMPEDE_BENCH_CONSUMER"

// consumerSpec says which queue a consumer works on, and how.
type consumerSpec struct {
	Queue                 string // a name in consumers
	RedisURL, DatabaseURL string
	Stream                string // in Redis, for consumers of Stampede's stream
	// Together lets concurrent handlers share a transaction.
	Together bool
	// Handlers is the number of orders handled at a time, and Connections the number of concurrent
	// transactions.
	Handlers, Connections int
	// Servers is the number of servers of a queue in the process; Groups lets the queue group tasks
	// itself.
	Servers, Groups int
}

// consume takes orders from a queue and passes each of them to record, until ctx is done. It calls ready
// when it is connected.
type consume func(ctx context.Context, c consumer, ready func()) error

var consumers = map[string]consume{
	"stock": consumeStock,
	"asynq": consumeAsynq,
	"river": consumeRiver,
}

// consumer is common to all consumers.
type consumer struct {
	consumerSpec
	pool *pgxpool.Pool
	// record writes one order, and recordAll several in one transaction.
	record    func(ctx context.Context, event order.OrderReserved) error
	recordAll func(ctx context.Context, events []order.OrderReserved) error
}

const consumesLine = "consumes "

// consumerMain runs a consumer until SIGTERM and returns the exit status.
func consumerMain() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runConsumer(ctx, os.Getenv(consumerEnv)); err != nil {
		fmt.Fprintln(os.Stderr, "consumer:", err)
		return 1
	}
	return 0
}

func runConsumer(ctx context.Context, text string) error {
	debug.SetGCPercent(400) // an advantage that `stampede work` does not have
	c := consumer{}
	if err := json.Unmarshal([]byte(text), &c.consumerSpec); err != nil {
		return fmt.Errorf("read %s: %w", consumerEnv, err)
	}
	var err error
	if c.pool, err = connect.Postgres(ctx, c.DatabaseURL, int32(c.Connections)); err != nil {
		return err
	}
	defer c.pool.Close()
	orders := ledger.New(c.pool)
	c.recordAll = func(ctx context.Context, events []order.OrderReserved) error {
		outcomes, err := orders.Record(ctx, events)
		for _, outcome := range outcomes {
			if err == nil {
				err = outcome.Err
			}
		}
		return err
	}
	c.record = func(ctx context.Context, event order.OrderReserved) error {
		return c.recordAll(ctx, []order.OrderReserved{event})
	}
	if c.Together {
		c.record = newTogether(c.Connections, c.recordAll).record
	}
	return consumers[c.Queue](ctx, c, func() { fmt.Println(consumesLine + c.Queue) })
}

// start runs the consumer in its own process, and returns when it is ready.
func (c consumerSpec) start(b *testing.B) *rig.Process {
	b.Helper()
	text, err := json.Marshal(c)
	require.NoError(b, err)
	self, err := os.Executable()
	require.NoError(b, err)
	return rig.Run(b, c.Queue, consumesLine, exec.Command(self), consumerEnv+"="+string(text))
}

// job is an order in asynq and River: the same data as the event in Stampede's stream.
type job struct {
	OrderID    uuid.UUID `json:"order_id"`
	SaleID     uuid.UUID `json:"sale_id"`
	UserID     string    `json:"user_id"`
	Quantity   int64     `json:"quantity"`
	Epoch      int64     `json:"epoch"`
	Sequence   int64     `json:"sequence"`
	ReservedAt int64     `json:"reserved_at_ms"`
}

// Kind implements river.JobArgs.
func (job) Kind() string { return "order" }

func (j job) event() order.OrderReserved {
	at := time.UnixMilli(j.ReservedAt).UTC()
	return order.OrderReserved{
		OrderID: j.OrderID, SaleID: j.SaleID, UserID: j.UserID, Quantity: j.Quantity,
		Epoch: j.Epoch, Sequence: j.Sequence, ReservedAt: at,
	}
}

// jobs returns orders of distinct buyers for one unit each.
func jobs(sale uuid.UUID, number int) []job {
	all := make([]job, number)
	for i := range all {
		all[i] = job{
			OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "buyer-" + uuid.NewString(), Quantity: 1,
			Epoch: 1, Sequence: int64(i + 1), ReservedAt: time.Now().UnixMilli(),
		}
	}
	return all
}

const (
	// pendingOrders wait in the stream when they are measured, in entries of pendingInCall: about as many
	// as `serve` sends in a call when it has 256 connections.
	pendingOrders = 100_000
	pendingInCall = 52

	aofBytes, redisBytes = "AOF bytes", "Redis bytes"
)

// BenchmarkPending measures what an accepted order that no worker has read takes in Redis and in its log.
func BenchmarkPending(b *testing.B) {
	table := rig.Table{
		Title: "A pending order in Redis",
		Note: fmt.Sprintf("Bytes of the append-only file and of memory (used_memory) for each of %s accepted orders that no "+
			"worker has read: the buyer's entry, and the share of a stream entry of %d orders.",
			rig.Count(pendingOrders), pendingInCall),
		Head: []string{"user id", aofBytes, redisBytes},
	}
	var candidates []rig.Candidate
	lengths := []int{12, 36}
	name := func(length int) string { return strconv.Itoa(length) + " characters" }
	for _, length := range lengths {
		candidates = append(candidates, rig.Candidate{Name: name(length), Turn: pending(length)})
	}
	results := rig.Compare(b, candidates...)
	for _, length := range lengths {
		table.Rows = append(table.Rows,
			append([]string{name(length)}, results.Ranges(rig.Count, name(length), aofBytes, redisBytes)...))
	}
	results.Report(b, name(lengths[0]), aofBytes, "AOF-B/order")
	results.Report(b, name(lengths[0]), redisBytes, "Redis-B/order")
	rig.Put(table)
}

// pending measures with user ids of so many characters.
func pending(length int) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := openShop(b)
		defer s.Close()
		orders := rig.Scale(b, pendingOrders, 1_000)
		requests := newRequests(s.sale, orders)
		for i := range requests {
			requests[i].user = fmt.Sprintf("%0*d", length, i)
		}
		read := func(section, name string) int64 {
			n, err := rig.InfoNumber(b.Context(), s.Redis, section, name)
			require.NoError(b, err)
			return n
		}
		aof, memory := read("Persistence", "aof_current_size"), read("Memory", "used_memory")
		reserved := s.reserveAll(b, requests, pendingInCall, 1, callGrace)
		require.EqualValues(b, orders, reserved)
		return rig.Values{
			aofBytes:   float64(read("Persistence", "aof_current_size")-aof) / float64(orders),
			redisBytes: float64(read("Memory", "used_memory")-memory) / float64(orders),
		}
	}
}

// togetherMax is the maximum of orders per transaction, as in Stampede's worker.
const togetherMax = 500

// together is the batching that a user can add to any queue whose handlers run in one process: a
// handler waits until its order is written, and orders that arrive while a transaction is running go
// into the next one. No queue loses its guarantees, because each handler returns after its own order is
// in Postgres.
type together struct {
	// connections is the maximum of concurrent transactions.
	connections int
	write       func(ctx context.Context, events []order.OrderReserved) error

	mu      sync.Mutex
	waiting []handling
	writing int
}

// handling is an order whose handler waits.
type handling struct {
	event order.OrderReserved
	done  chan error
}

func newTogether(connections int, write func(context.Context, []order.OrderReserved) error) *together {
	return &together{connections: connections, write: write}
}

func (t *together) record(_ context.Context, event order.OrderReserved) error {
	h := handling{event, make(chan error, 1)}
	t.mu.Lock()
	t.waiting = append(t.waiting, h)
	if t.writing < t.connections {
		t.writing++
		go t.run()
	}
	t.mu.Unlock()
	return <-h.done
}

// run writes batches until no handler waits. Handlers wait for it, so it ends before they do.
func (t *together) run() {
	var batch []handling
	var events []order.OrderReserved
	for {
		t.mu.Lock()
		if len(t.waiting) == 0 {
			t.writing--
			t.mu.Unlock()
			return
		}
		n := min(len(t.waiting), togetherMax)
		batch = append(batch[:0], t.waiting[:n]...)
		t.waiting = append(t.waiting[:0], t.waiting[n:]...)
		t.mu.Unlock()

		events = events[:0]
		for _, h := range batch {
			events = append(events, h.event)
		}
		// Not the context of one handler: the other orders must not end with it.
		err := t.write(context.Background(), events)
		for _, h := range batch {
			h.done <- err
		}
	}
}

func TestConcurrentHandlersShareTransactions(t *testing.T) {
	t.Parallel()
	var calls, written atomic.Int64
	first := make(chan struct{})
	shared := newTogether(1, func(_ context.Context, events []order.OrderReserved) error {
		if calls.Add(1) == 1 {
			<-first
		}
		written.Add(int64(len(events)))
		if len(events) > togetherMax {
			return errors.New("too many")
		}
		return nil
	})
	const handlers = 2*togetherMax + 1
	var running errgroup.Group
	for i := range handlers {
		running.Go(func() error { return shared.record(t.Context(), order.OrderReserved{UserID: fmt.Sprint(i)}) })
	}
	require.Eventually(t, func() bool {
		shared.mu.Lock()
		defer shared.mu.Unlock()
		return len(shared.waiting) >= handlers-togetherMax
	}, 10e9, 1e6)
	close(first)
	require.NoError(t, running.Wait())
	require.EqualValues(t, handlers, written.Load())
	require.Less(t, calls.Load(), int64(handlers/2))
}
