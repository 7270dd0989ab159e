package designs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/front"
	"stampede/internal/test/testkit"
	"stampede/ledger"
	"stampede/reservation/order"
)

// The test binary also runs as a front, for tests that kill it.
func TestMain(m *testing.M) {
	testkit.Main(m, testkit.WithCommand(func() int { return front.Main(Find) }))
}

// testDesigns runs a test for each design that sells and needs nothing but Redis and Postgres, once for those that are
// on the ladder in several forms. Designs that answer before the order is in Postgres accept as Reserved.
func testDesigns(t *testing.T, stock int64, test func(t *testing.T, name string, s *testSale, accepted front.Verdict)) {
	t.Parallel()
	for name, entry := range All {
		if entry.NoOrders || entry.Missing != nil || entry.Fronts > 0 || entry.Options != nil {
			continue
		}
		accepted := front.Confirmed
		if name == "memory-queue" || name == "stock-stream" {
			accepted = front.Reserved
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, name, newSale(t, stock, entry.Guarded), accepted)
		})
	}
}

func TestDesignsSellToSequentialBuyers(t *testing.T) {
	testDesigns(t, 3, func(t *testing.T, name string, s *testSale, accepted front.Verdict) {
		first := openDesign[front.Design](t, s, All[name].New)
		stop := run(t, first)
		require.Equal(t, accepted, s.buy(t, first, "alice"))
		require.Equal(t, front.AlreadyPurchased, s.buy(t, first, "alice"))
		stop()

		d := openDesign[front.Design](t, s, All[name].New)
		run(t, d)
		require.Equal(t, front.AlreadyPurchased, s.buy(t, d, "alice"), "in another process")
		buy := func(quantity int64) front.Verdict {
			o := s.order("bob")
			o.Quantity = quantity
			verdict, err := d.Buy(t.Context(), o)
			require.NoError(t, err)
			return verdict
		}
		require.Equal(t, front.SoldOut, buy(3), "another process, and refused orders, keep what is left: two units")
		require.Equal(t, accepted, buy(2))
		require.Equal(t, front.SoldOut, s.buy(t, d, "carol"))
		s.requireOrders(t, 2)
		if All[name].Guarded {
			require.Equal(t, front.AlreadyPurchased, s.buy(t, d, "alice"), "also when it is sold out")
			s.requireRows(t, 2, 3)
		}
	})
}

func TestDesignsSellStockToCrowd(t *testing.T) {
	testDesigns(t, 20, func(t *testing.T, name string, s *testSale, accepted front.Verdict) {
		if name == "check-set" {
			return // it sells more: TestCheckSetSellsLastUnitTwice
		}
		d := []front.Design{openDesign[front.Design](t, s, All[name].New)}
		if name != "mutex" { // in two processes: TestMutexOversellsInTwoProcesses
			d = append(d, openDesign[front.Design](t, s, All[name].New))
		}
		for _, process := range d {
			run(t, process)
		}
		require.Equal(t, map[front.Verdict]int{accepted: 20, front.SoldOut: 44}, s.crowd(t, 64, d...))
		s.requireOrders(t, 20)
		if All[name].Guarded {
			s.requireRows(t, 20, 20)
		}
	})
}

// timeout bounds the wait for anything that is in progress.
const timeout = 15 * time.Second

// testSale is a sale with its own Redis keys and database.
type testSale struct {
	id      uuid.UUID
	stock   int64
	backend front.Backend
	pool    *pgxpool.Pool
	rdb     redis.UniversalClient
}

// newSale creates a sale as the benchmark does for guarded or unguarded designs.
func newSale(t *testing.T, stock int64, guarded bool) *testSale {
	t.Helper()
	s := &testSale{
		id: uuid.Must(uuid.NewV7()), stock: stock, pool: testkit.Pool(t), rdb: testkit.Redis(t),
		backend: front.Backend{
			RedisURL: testkit.RedisURL(t), DatabaseURL: testkit.DatabaseURL(t), Prefix: testkit.Keys(t).Prefix,
		},
	}
	_, err := s.pool.Exec(t.Context(), "INSERT INTO sales (id, name, stock) VALUES ($1, 'test', $2)", s.id, stock)
	require.NoError(t, err)
	if !guarded {
		_, err := s.pool.Exec(t.Context(), "DROP INDEX orders_one_live_per_user")
		require.NoError(t, err)
	}
	return s
}

// openDesign opens and prepares a design, as one process of it does.
func openDesign[D front.Design](t *testing.T, s *testSale, open front.New) D {
	t.Helper()
	design, err := open(t.Context(), s.backend)
	require.NoError(t, err)
	if closer, ok := design.(interface{ close() }); ok {
		t.Cleanup(closer.close)
	}
	require.NoError(t, design.Prepare(t.Context(), s.id, s.stock))
	return design.(D)
}

func (s *redisStock) close() {
	_ = s.rdb.Close()
	s.pool.Close()
}

// run runs the background work of a design until the test ends or stop is called.
func run(t *testing.T, design front.Design) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- design.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return stop
}

func (s *testSale) order(user string) front.Order {
	return front.Order{ID: uuid.Must(uuid.NewV7()), Sale: s.id, User: user, Quantity: 1}
}

func (s *testSale) buy(t *testing.T, design front.Design, user string) front.Verdict {
	t.Helper()
	verdict, err := design.Buy(t.Context(), s.order(user))
	require.NoError(t, err)
	return verdict
}

// crowd lets n users buy concurrently, spread over the designs, and counts the verdicts.
func (s *testSale) crowd(t *testing.T, n int, from ...front.Design) map[front.Verdict]int {
	t.Helper()
	verdicts := make([]front.Verdict, n)
	var buyers errgroup.Group
	for i := range n {
		buyers.Go(func() (err error) {
			verdicts[i], err = from[i%len(from)].Buy(t.Context(), s.order(fmt.Sprintf("user-%d", i)))
			return err
		})
	}
	require.NoError(t, buyers.Wait())
	counts := map[front.Verdict]int{}
	for _, verdict := range verdicts {
		counts[verdict]++
	}
	return counts
}

func (s *testSale) orders(t *testing.T) int {
	t.Helper()
	var n int
	require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT count(*) FROM orders WHERE sale_id = $1", s.id).Scan(&n))
	return n
}

func (s *testSale) requireOrders(t *testing.T, n int) {
	t.Helper()
	testkit.Eventually(t, timeout, fmt.Sprintf("%d orders in Postgres", n), func() bool { return s.orders(t) == n })
}

// blockWrites blocks all writes of orders until unblock is called.
func (s *testSale) blockWrites(t *testing.T) (unblock func()) {
	t.Helper()
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE orders IN EXCLUSIVE MODE")
	require.NoError(t, err)
	unblock = sync.OnceFunc(func() {
		if err := tx.Rollback(context.Background()); !errors.Is(err, pgx.ErrTxClosed) {
			require.NoError(t, err)
		}
	})
	t.Cleanup(unblock)
	return unblock
}

// frontProcess runs a design in its own process, which can be killed.
type frontProcess struct {
	*testkit.Cmd
	url  string
	http *http.Client
}

func (s *testSale) start(t *testing.T, design string) *frontProcess {
	t.Helper()
	spec := front.Spec{Design: design, Backend: s.backend, Sale: s.id, Stock: s.stock, Addr: "127.0.0.1:0"}
	variable, err := spec.Environ()
	require.NoError(t, err)
	name, value, _ := strings.Cut(variable, "=")
	p := &frontProcess{Cmd: testkit.Command(t), http: &http.Client{Transport: &http.Transport{}}}
	p.Setenv(name, value)
	p.Start()
	t.Cleanup(p.http.CloseIdleConnections)
	const listens = "listens on "
	_, addr, _ := strings.Cut(p.WaitOutput(timeout, listens), listens)
	_, _, err = net.SplitHostPort(addr)
	require.NoError(t, err)
	p.url = "http://" + addr + "/v1/sales/" + s.id.String() + "/orders"
	return p
}

// buy returns the status of the answer.
func (p *frontProcess) buy(t *testing.T, user string) int {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url, strings.NewReader(`{"quantity":1}`))
	require.NoError(t, err)
	request.Header.Set("X-User-ID", user)
	request.Header.Set("Content-Type", "application/json")
	response, err := p.http.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	return response.StatusCode
}

// buyTimes lets user-0, user-1 and so on buy, n of them.
func (p *frontProcess) buyTimes(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		require.Equal(t, http.StatusAccepted, p.buy(t, fmt.Sprintf("user-%d", i)))
	}
}

// gate is a hook of go-redis that holds commands of a client, so that a test decides what happens in
// between. A command whose context ends is not sent.
type gate struct {
	held    func(commands ...redis.Cmder) bool
	reached chan struct{}
	open    chan struct{}
}

// holdCommands holds the pipelines that begin with this command.
func holdCommands(rdb redis.UniversalClient, command string) *gate {
	return hold(rdb, func(commands ...redis.Cmder) bool { return len(commands) > 1 && commands[0].Name() == command })
}

// holdSingle holds commands with these names that are sent by themselves.
func holdSingle(rdb redis.UniversalClient, names ...string) *gate {
	return hold(rdb, func(commands ...redis.Cmder) bool {
		return len(commands) == 1 && slices.Contains(names, commands[0].Name())
	})
}

func hold(rdb redis.UniversalClient, held func(...redis.Cmder) bool) *gate {
	g := &gate{held: held, reached: make(chan struct{}, 16), open: make(chan struct{})}
	rdb.AddHook(g)
	return g
}

// DialHook implements redis.Hook.
func (g *gate) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (g *gate) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, command redis.Cmder) error {
		if err := g.wait(ctx, command); err != nil {
			return err
		}
		return next(ctx, command)
	}
}

// ProcessPipelineHook implements redis.Hook.
func (g *gate) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, commands []redis.Cmder) error {
		if err := g.wait(ctx, commands...); err != nil {
			return err
		}
		return next(ctx, commands)
	}
}

func (g *gate) wait(ctx context.Context, commands ...redis.Cmder) error {
	if !g.held(commands...) {
		return nil
	}
	g.reached <- struct{}{}
	select {
	case <-g.open:
		return nil
	case <-ctx.Done():
		for _, command := range commands {
			command.SetErr(ctx.Err())
		}
		return ctx.Err()
	}
}

// purchaseResult is the outcome of a purchase in another goroutine.
type purchaseResult struct {
	verdict front.Verdict
	err     error
}

func (s *testSale) startBuying(t *testing.T, design front.Design, user string) <-chan purchaseResult {
	t.Helper()
	done := make(chan purchaseResult, 1)
	go func() {
		verdict, err := design.Buy(t.Context(), s.order(user))
		done <- purchaseResult{verdict, err}
	}()
	return done
}

// allRows returns the rows of all orders without the columns that differ each time.
func allRows(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	const query = `
		SELECT (to_jsonb(o) - 'updated_at')::text FROM orders AS o
		UNION ALL
		SELECT (to_jsonb(e) - '{position,occurred_at}'::text[])::text FROM order_events AS e
		ORDER BY 1`
	rows, err := pool.Query(t.Context(), query)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

func TestRecordedOrderHasRowsOfLedger(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	o := s.order("alice")
	o.Quantity = 2
	require.NoError(t, recordOrder(t.Context(), s.pool, o, 7))
	ours := allRows(t, s.pool)
	require.Len(t, ours, 2)

	_, err := s.pool.Exec(t.Context(), "TRUNCATE orders, order_events")
	require.NoError(t, err)
	_, err = ledger.New(s.pool).Record(t.Context(), []order.OrderReserved{{
		OrderID: o.ID, SaleID: o.Sale, UserID: o.User, Quantity: o.Quantity,
		Sequence: 7, Epoch: 1, ReservedAt: reservedAt(o.ID),
	}})
	require.NoError(t, err)
	require.Equal(t, allRows(t, s.pool), ours)
}

func TestRecordingOrderTwiceChangesNothing(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	o := s.order("alice")
	require.NoError(t, recordOrder(t.Context(), s.pool, o, unnumbered))
	first := allRows(t, s.pool)
	require.NoError(t, recordOrder(t.Context(), s.pool, o, unnumbered))
	require.Equal(t, first, allRows(t, s.pool))
}
