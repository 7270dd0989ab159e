package ladder

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/bench/designs"
	"stampede/bench/rig"
	"stampede/internal/retry"
)

func TestMain(m *testing.M) {
	rig.Main(m, "ladder", "labstack/echo", "redis/go-redis", "jackc/pgx", "watermill-redisstream")
}

// rung is a compared design, or Stampede.
type rung struct {
	name   string // for -only
	title  string // on the page
	design string // of package designs; "" means Stampede
	// alone is Stampede without its worker, like an ingress on its own machine. It accepts orders, and
	// they are not written to Postgres.
	alone bool
}

const (
	nothing         = "nothing"
	nothingRaw      = "nothing-raw"
	evalsha         = "evalsha"
	postgresBatched = "postgres-batched"
	ours            = "Stampede"
	// postgresBatchedReader is the rival with the reader of `stampede serve`.
	postgresBatchedReader = "postgres-batched-reader"
	ingress               = "Stampede, ingress alone"
)

// smokeOptions and smokeEnv shorten long starts and claim delays in smoke runs.
var (
	smokeOptions = map[string]string{"warm-up": "64", "max-idle-ms": "500"}
	smokeEnv     = []string{"STAMPEDE_MIN_IDLE=1s"}
)

// smokeSpeedup divides claim delays in smoke runs.
const smokeSpeedup = 10

// oursClaimDelay is how long Stampede may leave the orders of a dead worker: the default lock time of
// their users, and the time until the next look.
const oursClaimDelay = 14 * time.Second

// rungOrder is the order of the tables: from Echo alone, through the tutorials' designs, to ours.
var rungOrder = []string{
	nothing, nothingRaw,
	"check-set", "mutex", "mutex-twice", "setnx", "lock-transaction", "lock-transaction-redisson", "memory-queue",
	"postgres-row", "postgres-units", postgresBatched, postgresBatchedReader,
	evalsha, "stock-stream",
}

func TestEveryDesignIsOnLadder(t *testing.T) {
	t.Parallel()
	assert.ElementsMatch(t, slices.Collect(maps.Keys(designs.All)), rungOrder)
}

// rungs returns the rungs that can run on this machine, and sentences about those that are left out.
func rungs() (all []rung, leftOut string) {
	for _, name := range rungOrder {
		entry := designs.All[name]
		if entry.Missing != nil {
			if what := entry.Missing(); what != "" {
				leftOut += " " + entry.Title + " is left out: " + what + "."
				continue
			}
		}
		all = append(all, rung{name: name, title: entry.Title, design: name})
	}
	return append(all, rung{name: ingress, title: ingress, alone: true}, rung{name: ours, title: ours}), leftOut
}

// pick returns the rungs with these names that can run here, in the order of the tables.
func pick(names ...string) []rung {
	all, _ := rungs()
	return slices.DeleteFunc(all, func(r rung) bool { return !slices.Contains(names, r.name) })
}

// compare gives each rung its turns.
func compare(
	b *testing.B, all []rung, turn func(r rung, b *testing.B, round int) rig.Values,
) *rig.Results {
	b.Helper()
	var candidates []rig.Candidate
	for _, r := range all {
		candidates = append(candidates, rig.Candidate{Name: r.name, Turn: func(b *testing.B, round int) rig.Values {
			return turn(r, b, round)
		}})
	}
	return rig.Compare(b, candidates...)
}

// isOurs reports whether the rung is Stampede.
func (r rung) isOurs() bool { return r.design == "" }

// writes reports whether the orders of the rung reach Postgres.
func (r rung) writes() bool {
	return !r.alone && (r.isOurs() || !designs.All[r.design].NoOrders)
}

// claimDelay is how long orders may stay unprocessed after a kill -9 until another process claims them.
func (r rung) claimDelay(b *testing.B) time.Duration {
	full := oursClaimDelay
	if !r.isOurs() {
		full = designs.All[r.design].ClaimDelay
	}
	return rig.Scale(b, full, full/smokeSpeedup)
}

// start starts the rung on its own shop with so many units for sale.
func (r rung) start(b *testing.B, stock int64) *rig.System {
	b.Helper()
	if !r.isOurs() {
		return rig.StartDesign(b, r.design, rig.Scale(b, nil, smokeOptions), stock)
	}
	s := rig.Stampede{Env: rig.Scale(b, nil, smokeEnv)}.Start(b, stock)
	if r.alone {
		s.StopWorkers()
	}
	return s
}

func putRateTables(b *testing.B, results *rig.Results, all []rung, leftOut string) {
	b.Helper()
	acceptedOrders := rig.Table{
		Title: "Orders accepted a second",
		Note: fmt.Sprintf("Closed loop of %d connections, %d rounds of %v; medians, with the least and the greatest. Only "+
			"201 and 202 count. Other answers: %s. The last column compares the ingress without a worker: its orders wait in "+
			"the stream.%s", usualConnections(b), b.N, turnDuration(b), otherAnswers(results, all), leftOut),
		Head: []string{"design", "accepted/s", "p99, ms", "ingress alone ÷ it"}, Bars: 1,
	}
	durableOrders := rig.Table{
		Title: "Orders in Postgres a second",
		Note: "The same loads, from the first request until the last accepted order is in Postgres. A design that is behind " +
			"when the load ends gets the same time again, and counts with what it has written by then. Front, Redis, worker, " +
			"Postgres and the load share the cores.",
		Head: []string{"design", "in Postgres/s", "Stampede ÷ it"}, Bars: 1,
	}
	for _, r := range all {
		acceptedOrders.Rows = append(acceptedOrders.Rows, []string{
			r.title, results.Of(r.name, accepted).Format(rig.Count),
			results.Of(r.name, closedLoop+p99).FormatMedian(rig.Ratio), ratioTo(results, ingress, r, accepted),
		})
		if s := results.Of(r.name, durable); s.N > 0 {
			durableOrders.Rows = append(durableOrders.Rows,
				[]string{r.title, s.Format(rig.Count), ratioTo(results, ours, r, durable)})
		}
	}
	rig.Put(acceptedOrders)
	rig.Put(durableOrders)
}

// ratioTo is the cell that divides our figure by the figure of a rung; it is empty for our own rungs.
func ratioTo(results *rig.Results, system string, r rung, figure string) string {
	if r.isOurs() {
		return ""
	}
	return results.Ratio(system, figure, r.name, figure).Format(rig.Ratio)
}

// otherAnswers names the designs that did not accept every buyer.
func otherAnswers(results *rig.Results, all []rung) string {
	var others []string
	for _, r := range all {
		if s := results.Of(r.name, failed); s.Median > 0 {
			others = append(others, fmt.Sprintf("%s %s %%", r.title, rig.Ratio(s.Median)))
		}
	}
	if len(others) == 0 {
		return "none"
	}
	return strings.Join(others, ", ")
}

func putLatencyTable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := rig.Table{
		Title: "How long a buyer waits",
		Note: fmt.Sprintf("Open loop over %d connections, at half of what the design accepted in a closed loop of the same "+
			"round, and at %d buyers a second for all. A buyer who was due and never got a connection counts with the "+
			"time waited so far.", openConnections, commonRate),
		Head: []string{
			"design", "half load: answers/s", "p50, ms", "p99, ms", fmt.Sprintf("%d/s: p50, ms", commonRate), "p99, ms",
		},
		Bars: 3,
	}
	for _, r := range all {
		row := append([]string{r.title}, results.Medians(rig.Count, r.name, halfLoad+rate)...)
		t.Rows = append(t.Rows, append(row, results.Medians(rig.Ratio, r.name,
			halfLoad+p50, halfLoad+p99, commonLoad+p50, commonLoad+p99)...))
	}
	rig.Put(t)
}

func putCPUTable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := rig.Table{
		Title: "CPU time for each order",
		Note: "Microseconds, user and system, in the closed loop. Load, front and Redis for each order that was accepted; " +
			"the worker and Postgres, with all its processes, for each that was written. What a design does in the " +
			"background of its front is in the front's time.",
		Head: append([]string{"design"}, rig.Roles...),
	}
	for _, r := range all {
		t.Rows = append(t.Rows, append([]string{r.title}, results.Medians(rig.Ratio, r.name, cpuFigures...)...))
	}
	rig.Put(t)
}

// Figures of a turn.
const (
	oversold      = "oversold, promised"
	oversoldRows  = "oversold, in Postgres"
	doubleBuyers  = "double buyers"
	crashPromised = "crash, promised"
	crashSold     = "crash, oversold"
	crashLeft     = "crash, units that are neither for sale nor in Postgres"
	lost          = "crash, lost"
)

// BenchmarkSafety measures whether each rung keeps its promises: when there are more buyers than units,
// each with a double click, and when all its processes are killed in the middle of a sale. The faults
// of others are figures; a fault of Stampede fails the benchmark.
func BenchmarkSafety(b *testing.B) {
	all, leftOut := rungs()
	all = slices.DeleteFunc(all, func(r rung) bool { return !r.writes() })
	results := compare(b, all, func(r rung, b *testing.B, _ int) rig.Values {
		v := rig.Values{}
		r.rush(b, v)
		r.crash(b, v)
		if r.isOurs() {
			requirePromisesKept(b, v)
		}
		return v
	})
	t := rig.Table{
		Title: "What becomes of the promises",
		Note: fmt.Sprintf("Medians of %d rounds, with the least and the greatest. First %d buyers come for %d units, each "+
			"with two clicks at the same moment on different connections. Then, in another sale of %d units, all processes of "+
			"the design (not Redis, not Postgres) are killed by SIGKILL when half of them are sold, or after %v; they are "+
			"started again, more buyers come, and what was promised has time to reach Postgres: until nothing has been "+
			"written for %v, and longer where a design waits before it claims orders of dead processes "+
			"(stock-stream and Stampede). Lost: orders that a buyer was promised and that are not there. Gone: units "+
			"that are neither for sale nor in Postgres, where the sale was sold out in the end.%s",
			b.N, 2*rushStock(b), rushStock(b), crashStock(b), crashAfter(b), baseQuietTime(b), leftOut),
		Head: []string{
			"design", "oversold", "double buyers", "with a crash: promised", "oversold", "units gone", "**lost**",
		},
	}
	for _, r := range all {
		t.Rows = append(t.Rows, append([]string{r.title},
			results.Ranges(rig.Count, r.name, oversold, doubleBuyers, crashPromised, crashSold, crashLeft, lost)...))
		results.Report(b, r.name, lost, "lost")
	}
	rig.Put(t)
}

// requirePromisesKept fails the benchmark for each promise that Stampede broke.
func requirePromisesKept(b *testing.B, v rig.Values) {
	b.Helper()
	for _, fault := range []string{oversold, oversoldRows, doubleBuyers, crashSold, crashLeft, lost} {
		if n, measured := v[fault]; !measured || n != 0 {
			b.Errorf("%s: %s: %v (measured: %t), want none", ours, fault, n, measured)
		}
	}
}

func rushStock(b *testing.B) int64 { return rig.Scale[int64](b, 1000, 100) }

// rush sells out to a crowd of twice as many buyers as units, each with two clicks.
func (r rung) rush(b *testing.B, v rig.Values) {
	const clicks = 2
	stock := rushStock(b)
	s := r.start(b, stock)
	defer s.Close()
	l := newLedger()
	load := s.Crowd(clicks)
	load.Connections, load.Most = usualConnections(b), uint64(2*stock*clicks)
	load.For, load.OnAnswer = rig.Scale(b, 10*time.Second, 2*time.Second), l.onAnswer(0, clicks)
	s.Measure(load)

	v[oversold] = float64(max(0, l.accepted.Load()-stock))
	v[doubleBuyers] = float64(l.doubleBuyers())
	units, _ := r.awaitWrites(b, s, l, l.accepted.Load())
	v[oversoldRows] = float64(max(0, units-stock))
}

func crashStock(b *testing.B) int64 { return rig.Scale[int64](b, 10_000, 1_000) }

// crashAfter is the latest time of the kill.
func crashAfter(b *testing.B) time.Duration {
	return rig.Scale(b, time.Second, 200*time.Millisecond)
}

// crash kills all processes in the middle of a sale, starts them again, and lets more buyers come.
func (r rung) crash(b *testing.B, v rig.Values) {
	stock := crashStock(b)
	s := r.start(b, stock)
	defer s.Close()
	l := newLedger()
	buyers := s.Crowd(1)
	buyers.Connections, buyers.For, buyers.OnAnswer = usualConnections(b), time.Minute, l.onAnswer(0, 1)
	done := make(chan error, 1)
	go func() {
		_, err := buyers.Measure(b.Context())
		done <- err
	}()
	halfSold(b.Context(), l, stock/2, crashAfter(b))
	s.Kill()
	require.NoError(b, <-done)

	s.Restart()
	soldOut, least := r.sellRest(b, s, l), l.accepted.Load()
	if soldOut {
		least = stock // orders whose answers were lost must be written as well
	}
	units, missing := r.awaitWrites(b, s, l, least)
	v[crashPromised], v[lost] = float64(l.accepted.Load()), float64(missing)
	if soldOut {
		v[crashSold] = float64(max(0, units-stock, l.accepted.Load()-stock))
		v[crashLeft] = float64(max(0, stock-units))
	}
}

// sellRest lets more buyers come until one gets "sold out", or for a while, and returns whether it is
// sold out. Stampede must sell out, or the benchmark would not see what it oversold.
func (r rung) sellRest(b *testing.B, s *rig.System, l *ledger) bool {
	ctx, stop := context.WithCancel(b.Context())
	defer stop()
	record := l.onAnswer(1, 1)
	load := s.Crowd(1)
	load.Connections, load.For = usualConnections(b), rig.Scale(b, 2*time.Second, 200*time.Millisecond)
	if r.isOurs() {
		load.For = time.Minute
	}
	var refused atomic.Bool
	load.OnAnswer = func(n uint64, status int, body []byte) {
		record(n, status, body)
		if status == http.StatusConflict {
			refused.Store(true)
			stop()
		}
	}
	_, err := load.Measure(ctx)
	require.NoError(b, err)
	return refused.Load()
}

// halfSold waits until so many orders were promised, or for so long.
func halfSold(ctx context.Context, l *ledger, orders int64, within time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for l.accepted.Load() < orders && retry.Pause(time.Millisecond, ctx.Done()) {
	}
}

func baseQuietTime(b *testing.B) time.Duration {
	return rig.Scale(b, 4*time.Second, 500*time.Millisecond)
}

// awaitWrites waits until the design writes no more: until all promised orders and at least so many
// units are in Postgres and nothing follows for a moment, or until nothing was written for so long that
// no claim can follow. A design cannot write more than was bought, so this ends. It returns the units
// in Postgres, and the number of promised orders that are missing.
func (r rung) awaitWrites(b *testing.B, s *rig.System, l *ledger, least int64) (units, missing int64) {
	b.Helper()
	const pollInterval, moment = 50 * time.Millisecond, 250 * time.Millisecond
	most := r.claimDelay(b) + baseQuietTime(b) // a longer wait than any claim
	units, since := s.Shop.Units(), time.Now()
	for {
		retry.Pause(pollInterval, b.Context().Done())
		if now := s.Shop.Units(); now != units {
			units, since = now, time.Now()
		}
		quiet := time.Since(since)
		if quiet < moment {
			continue
		}
		missing, err := l.missing(b.Context(), s.Shop.Pool)
		require.NoError(b, err)
		if missing == 0 && units >= least || quiet > most {
			return units, missing
		}
	}
}

// ledger records what the buyers of a sale were promised.
type ledger struct {
	accepted atomic.Int64

	mu         sync.Mutex
	orders     []string       // ids
	acceptedBy map[uint64]int // by buyer
}

func newLedger() *ledger { return &ledger{acceptedBy: make(map[uint64]int)} }

// onAnswer returns a callback that records the answers of a crowd in which each buyer sends so many
// requests. The number of the crowd separates the buyers of several crowds.
func (l *ledger) onAnswer(crowd, clicks uint64) func(n uint64, status int, body []byte) {
	return func(n uint64, status int, body []byte) {
		if status < 200 || status > 299 {
			return
		}
		l.accepted.Add(1)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.acceptedBy[crowd<<32|(n-1)/clicks]++
		if id := orderID(body); id != "" {
			l.orders = append(l.orders, id)
		}
	}
}

// orderID is the order's id in an accepting answer, or "".
func orderID(body []byte) string {
	const idBytes = 36
	_, rest, found := bytes.Cut(body, []byte(`"order_id":"`))
	if !found || len(rest) < idBytes {
		return ""
	}
	return string(rest[:idBytes])
}

// doubleBuyers counts buyers who were promised more than one order.
func (l *ledger) doubleBuyers() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	doubles := 0
	for _, times := range l.acceptedBy {
		if times > 1 {
			doubles++
		}
	}
	return doubles
}

// missing counts promised orders that are not in Postgres.
func (l *ledger) missing(ctx context.Context, pool *pgxpool.Pool) (missing int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	err = pool.QueryRow(ctx, `SELECT count(*) FROM unnest($1::uuid[]) AS promised (id)
		WHERE NOT EXISTS (SELECT FROM orders AS o WHERE o.id = promised.id AND o.status IN ('confirmed', 'paid'))`,
		l.orders).Scan(&missing)
	return missing, err
}
