package limits

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/internal/retry"
	"stampede/reservation"
)

// The figures of a turn, beside the CPU time of each role under the role's name.
const (
	perSecond = "orders/s"
	perCall   = "orders in a call of the script"
)

// turn is a candidate's work in a round.
type turn func(b *testing.B, round int) rig.Values

// turnDuration bounds a turn by time, and backlogOrders is the number of orders in a turn without such
// a bound.
func turnDuration(b *testing.B) time.Duration {
	return rig.Scale(b, 2*time.Second, 200*time.Millisecond)
}
func backlogOrders(b *testing.B) int { return rig.Scale(b, 60_000, 6000) }

func valuesOf(orders int64, took time.Duration, used rig.Usage) rig.Values {
	values := rig.Values{perSecond: float64(orders) / took.Seconds()}
	for role, each := range used.PerOrder(orders) {
		values[role] = each
	}
	return values
}

// nothing is a front whose design does nothing.
func nothing(design string) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := rig.StartDesign(b, design, nil, hugeStock)
		defer s.Close()
		s.Warm(crowdConnections)
		values, _ := accept(b, s)
		return values
	}
}

// serve is `stampede serve` alone: accepted orders wait in Redis.
func serve(b *testing.B, how rig.Stampede) rig.Values {
	s := how.Start(b, hugeStock)
	defer s.Close()
	s.StopWorkers()
	s.Warm(crowdConnections)
	before := scriptCalls(b, s.Shop.Redis)
	values, orders := accept(b, s)
	values[perCall] = float64(orders) / float64(scriptCalls(b, s.Shop.Redis)-before)
	return values
}

// accept measures a crowd in a closed loop.
func accept(b *testing.B, s *rig.System) (values rig.Values, orders int64) {
	b.Helper()
	load := s.Crowd(1)
	load.Connections, load.For = crowdConnections, turnDuration(b)
	before := s.CPU()
	answers := s.Measure(load)
	used := s.CPU().Since(before)
	require.Zero(b, answers.Others(), "answers: %s", answers)
	values = valuesOf(answers.Wanted, answers.Took, used)
	values[perSecond] = answers.PerSecond()
	return values, answers.Wanted
}

const crowdConnections = 256

// scriptCalls is the number of script calls by hash that Redis has processed.
func scriptCalls(b *testing.B, rdb redis.UniversalClient) int64 {
	b.Helper()
	info, err := rdb.InfoMap(b.Context(), "commandstats").Result()
	require.NoError(b, err)
	_, rest, _ := strings.Cut(info["Commandstats"]["cmdstat_evalsha"], "calls=")
	text, _, _ := strings.Cut(rest, ",")
	calls, err := strconv.ParseInt(text, 10, 64)
	require.NoError(b, err)
	return calls
}

// script calls the reserve script without an ingress, with so many buyers in a call.
func script(batch func() int, connections int) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := openShop(b)
		defer s.Close()
		size, within := batch(), turnDuration(b)/2
		// At most what a fast Redis could reserve in the time, because they take memory.
		requests := int(within.Seconds() * float64(min(500_000, 10_000*size*connections)))
		prepared := newRequests(s.sale, max(requests, size*connections))
		before, began := s.CPU(), time.Now()
		orders := s.reserveAll(b, prepared, size, connections, within)
		took := time.Since(began)
		return valuesOf(orders, took, s.CPU().Since(before))
	}
}

// insert writes the rows of orders without any decision.
func insert(how inserter, connections int) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := openShop(b)
		defer s.Close()
		orders := columnsOf(newRequests(s.sale, backlogOrders(b)))
		before, began := s.CPU(), time.Now()
		s.insertAll(b, orders, connections, how)
		took := time.Since(began)
		used := s.CPU().Since(before)
		require.EqualValues(b, backlogOrders(b), s.Units())
		return valuesOf(int64(backlogOrders(b)), took, used)
	}
}

// read takes entries from the stream and acknowledges them.
func read(b *testing.B, _ int) rig.Values {
	s := openShop(b)
	defer s.Close()
	stream := s.keys.Orders(0)
	require.NoError(b, s.Redis.XGroupCreateMkStream(b.Context(), stream, reservation.Group, "0").Err())
	s.fill(b, backlogOrders(b))
	before, began := s.CPU(), time.Now()
	orders := readStream(b, s.Redis, stream)
	took := time.Since(began)
	require.Equal(b, backlogOrders(b), orders)
	return valuesOf(int64(orders), took, s.CPU().Since(before))
}

// work is one `stampede work` that starts with a backlog.
func work(b *testing.B, _ int) rig.Values {
	system := rig.Stampede{}.Start(b, hugeStock)
	defer system.Close()
	system.Kill()
	s := shopOf(b, system.Shop, system.Sale)
	s.fill(b, backlogOrders(b))

	// The processes must have started before the first orders become durable. So the row that every
	// transaction needs is locked until then.
	tx, err := s.Pool.Begin(b.Context())
	require.NoError(b, err)
	_, err = tx.Exec(b.Context(), "SELECT FROM sales FOR UPDATE")
	require.NoError(b, err)
	system.Restart()
	require.NoError(b, tx.Rollback(b.Context()))

	// The measurement starts when the worker is running.
	sold := s.awaitSold(b, 1)
	before, began := system.CPU(), time.Now()
	orders := s.awaitSold(b, int64(backlogOrders(b))) - sold
	took := time.Since(began)
	return valuesOf(orders, took, system.CPU().Since(before))
}

// awaitSold waits until at least so many units are sold in Postgres, and returns how many are.
func (s shop) awaitSold(b *testing.B, units int64) int64 {
	b.Helper()
	const timeout, pollInterval = time.Minute, 5 * time.Millisecond
	deadline := time.Now().Add(timeout)
	for {
		var sold int64
		require.NoError(b, s.Pool.QueryRow(b.Context(), "SELECT sold FROM sales").Scan(&sold))
		if sold >= units {
			return sold
		}
		require.True(b, time.Now().Before(deadline), "only %d of %d units sold within %v", sold, units, timeout)
		retry.Pause(pollInterval, b.Context().Done())
	}
}
