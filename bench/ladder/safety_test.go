package ladder

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/internal/retry"
)

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
