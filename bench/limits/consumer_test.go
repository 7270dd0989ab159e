package limits

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime/debug"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

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
