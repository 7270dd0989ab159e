package ledger_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql/migrate"
)

// published returns the messages of the stream of outcomes, decoded as the stock subscriber does.
func published(t testing.TB, rdb redis.UniversalClient, keys reservation.Keys) [][]order.OrderOutcome {
	t.Helper()
	entries, err := rdb.XRange(t.Context(), keys.Outcomes(0), "-", "+").Result()
	require.NoError(t, err)
	var messages [][]order.OrderOutcome
	for _, entry := range entries {
		msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(entry.Values)
		require.NoError(t, err)
		outcomes, err := order.DecodeOutcomes(msg.Payload)
		require.NoError(t, err)
		messages = append(messages, outcomes)
	}
	return messages
}

func TestOutcomesOfEveryChangeArePublished(t *testing.T) {
	t.Parallel()
	pool, rdb, keys := testkit.Pool(t), testkit.Redis(t), testkit.Keys(t)
	l, o, run := testwork.PublishingLedger(t, pool, rdb, keys)
	defer run()()
	sale := testshop.NewPayableSale(t, pool, 3)
	requirePublished := func(want ...order.OrderOutcome) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, "a message is published",
			func() bool { return len(published(t, rdb, keys)) > 0 })
		require.Equal(t, [][]order.OrderOutcome{want}, published(t, rdb, keys))
		require.NoError(t, rdb.Del(t.Context(), keys.Outcomes(0)).Err())
	}
	events := testshop.ReservedCrowd(sale, 2)
	again := testshop.Reserved(sale, events[0].UserID, 3)
	unknown := testshop.Reserved(uuid.New(), "stranger", 1)
	testwork.Record(t, l, append(events, again, unknown))
	requirePublished(
		order.OrderOutcome{OrderID: events[0].OrderID, Status: order.StatusConfirmed, Version: 2},
		order.OrderOutcome{OrderID: events[1].OrderID, Status: order.StatusConfirmed, Version: 2},
		order.OrderOutcome{OrderID: again.OrderID, Status: order.StatusRejected, Version: 2},
	)
	refused := testshop.Reserved(sale, "late", 4)
	_, err := l.Refuse(t.Context(), []order.OrderReserved{refused}, order.RejectedSoldOut)
	require.NoError(t, err)
	requirePublished(order.OrderOutcome{OrderID: refused.OrderID, Status: order.StatusRejected, Version: 2})

	testwork.Heartbeat(t, pool)
	testwork.Pay(t, l, events[0].OrderID, events[0].UserID, "pi_1")
	paid := order.OrderOutcome{OrderID: events[0].OrderID, Status: order.StatusPaid, Version: 3}
	requirePublished(paid)
	testwork.Cancel(t, l, events[1].OrderID, events[1].UserID)
	requirePublished(order.OrderOutcome{OrderID: events[1].OrderID, Status: order.StatusCancelled, Version: 3})

	// A retry changes nothing and is not published. A redelivered event is published again, because the
	// first worker may have crashed before it published.
	testwork.Pay(t, l, events[0].OrderID, events[0].UserID, "pi_1")
	_, err = l.Pay(t.Context(), events[1].OrderID, events[1].UserID, "pi_1")
	require.ErrorIs(t, err, order.ErrIllegalTransition)
	testwork.Record(t, l, events[:1])
	requirePublished(paid)

	late := testshop.ReservedCrowd(sale, 1)
	late[0].UserID = "slow"
	testwork.Record(t, l, late)
	requirePublished(order.OrderOutcome{OrderID: late[0].OrderID, Status: order.StatusConfirmed, Version: 2})
	testwork.EndWindow(t, pool, late[0].OrderID)
	_, expired, err := ledger.NewExpirer(l, testkit.Logger(t)).ExpireSome(t.Context(), []uuid.UUID{})
	require.NoError(t, err)
	require.Equal(t, 1, expired)
	requirePublished(order.OrderOutcome{OrderID: late[0].OrderID, Status: order.StatusExpired, Version: 3})
	testkit.Eventually(t, testshop.Soon, "all are counted, which follows the answer of Redis",
		func() bool { return testutil.ToFloat64(o.Published()) == 9 })
	require.Zero(t, testutil.ToFloat64(o.Dropped()))

	// A ledger without outcomes publishes nothing.
	testwork.Record(t, ledger.New(pool), testshop.ReservedCrowd(testshop.NewSale(t, pool, 1), 1))
}

func TestQueuedOutcomesAreSentTogether(t *testing.T) {
	t.Parallel()
	pool, rdb, keys := testkit.Pool(t), testkit.Redis(t), testkit.Keys(t)
	_, o, run := testwork.PublishingLedger(t, pool, rdb, keys)
	var all []order.OrderOutcome
	for range 200 {
		transaction := make([]order.OrderOutcome, 11)
		for i := range transaction {
			transaction[i] = order.OrderOutcome{OrderID: uuid.New(), Status: order.StatusConfirmed, Version: 2}
		}
		o.Enqueue(transaction)
		all = append(all, transaction...)
	}
	// They are published when Run ends.
	run()()
	var got []order.OrderOutcome
	messages := published(t, rdb, keys)
	for _, message := range messages {
		require.Less(t, len(message), ledger.OutcomesPerMessage+11)
		got = append(got, message...)
	}
	require.Equal(t, all, got)
	require.Len(t, messages, 3)
}

// Without Redis, outcomes that do not fit into the queue are dropped immediately.
func TestFullOutcomeQueueDropsMessages(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Control(t, own.URL)
	keys := reservation.Keys{Prefix: "stampede", Partitions: 1}
	pool := testkit.Pool(t)
	l, o, run := testwork.PublishingLedger(t, pool, rdb, keys)
	own.Kill()
	for range 2 * ledger.OutcomesQueued {
		o.Enqueue([]order.OrderOutcome{{OrderID: uuid.New(), Version: 2}})
	}
	require.EqualValues(t, ledger.OutcomesQueued, testutil.ToFloat64(o.Dropped()),
		"those that did not fit into the queue")
	testwork.Record(t, l, testshop.ReservedCrowd(testshop.NewSale(t, pool, 10), 3))
	stop := run()
	testkit.Eventually(t, 30*time.Second, "all are dropped",
		func() bool { return testutil.ToFloat64(o.Dropped()) == 2*ledger.OutcomesQueued+3 })
	require.NoError(t, own.Restart(t.Context()))
	testkit.Eventually(t, 30*time.Second, "outcomes are published again", func() bool {
		o.Enqueue([]order.OrderOutcome{{OrderID: uuid.New(), Version: 2}})
		return testutil.ToFloat64(o.Published()) > 0
	})
	stop()
}

func TestOutcomeStreamIsBounded(t *testing.T) {
	t.Parallel()
	pool, rdb, keys := testkit.Pool(t), testkit.Redis(t), testkit.Keys(t)
	_, o, _ := testwork.PublishingLedger(t, pool, rdb, keys)
	const node = 100 // entries, at most
	for range 2 * (ledger.OutcomesKept + node) {
		o.Publish(t.Context(), 0, []order.OrderOutcome{{OrderID: uuid.New(), Version: 2}})
	}
	length, err := rdb.XLen(t.Context(), keys.Outcomes(0)).Result()
	require.NoError(t, err)
	require.Less(t, length, int64(ledger.OutcomesKept+node), "whole nodes of the stream are freed")
}

// A worker publishes one message per batch, all of them before it stops.
func TestWorkerPublishesOneMessagePerBatch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	var want []uuid.UUID
	for n := range 100 {
		want = append(want, s.Buy(t, sale, fmt.Sprintf("user-%d", n)))
	}
	stop := testwork.Work(t, testwork.Config(t, s))
	s.AwaitConfirmed(t, 100)
	stop()
	var got []uuid.UUID
	messages := published(t, s.Rdb, s.Keys)
	for _, message := range messages {
		for _, outcome := range message {
			require.Equal(t, []any{order.StatusConfirmed, 2}, []any{outcome.Status, outcome.Version})
			got = append(got, outcome.OrderID)
		}
	}
	require.ElementsMatch(t, want, got)
	require.Less(t, len(messages), 50)
}

// BenchmarkPositionIndex compares what Postgres does for an order with and without the index that the relay reads by
// (docs/decisions/0026-relay-horizon.md): batches of 500 orders, in turns.
func BenchmarkPositionIndex(b *testing.B) {
	const size, batches, rounds = 500, 40, 6
	server := testkit.OwnPostgres(b)
	require.NoError(b, migrate.Up(b.Context(), server.URL))
	pool, err := pgxpool.New(b.Context(), server.URL)
	require.NoError(b, err)
	b.Cleanup(pool.Close)
	l := ledger.New(pool)
	sale := testshop.NewSale(b, pool, order.MaxStock)
	exec := func(statement string) {
		_, err := pool.Exec(b.Context(), statement)
		require.NoError(b, err)
	}
	next := 0
	measure := func() (cpu time.Duration, wal int64) {
		exec("CHECKPOINT")
		began := testshop.QueryInt(b, pool, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
		cpu = -cpuTime(b, server.Pid())
		for range batches {
			events := testshop.ReservedCrowd(sale, size)
			for j := range events {
				events[j].UserID = fmt.Sprintf("user-%d-%d", next, j)
			}
			next++
			_, err := l.Record(context.Background(), events)
			require.NoError(b, err)
		}
		cpu += cpuTime(b, server.Pid())
		return cpu, testshop.QueryInt(b, pool, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn") - began
	}
	var cpu [2]time.Duration
	var wal [2]int64
	measure() // the server is warm
	for b.Loop() {
		for range rounds {
			for with, statement := range []string{
				"DROP INDEX order_events_position", "CREATE INDEX order_events_position ON order_events (position)",
			} {
				exec(statement)
				c, w := measure()
				cpu[with] += c
				wal[with] += w
			}
		}
	}
	orders := float64(b.N * rounds * batches * size)
	for with, name := range []string{"without", "with"} {
		b.ReportMetric(float64(cpu[with].Nanoseconds())/1000/orders, "µs/order-"+name)
		b.ReportMetric(float64(wal[with])/orders, "WAL-bytes/order-"+name)
	}
	b.ReportMetric(float64(cpu[1])/float64(cpu[0]), "CPU-ratio")
	b.ReportMetric(float64(wal[1])/float64(wal[0]), "WAL-ratio")
	b.ReportMetric(0, "ns/op")
}

// cpuTime is the CPU time of a server and its children, in hundredths of a second.
func cpuTime(b *testing.B, server int) (total time.Duration) {
	b.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(b, err)
	const ticks = 10 * time.Millisecond
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		pid, rest, _ := strings.Cut(string(text), " ")
		fields := strings.Fields(rest[strings.LastIndex(rest, ")")+1:])
		used := fields[11:13] // its own
		switch strconv.Itoa(server) {
		case pid:
			used = fields[11:15] // and that of children that have ended
		case fields[1]:
		default:
			continue
		}
		for _, field := range used {
			n, err := strconv.Atoi(field)
			require.NoError(b, err)
			total += time.Duration(n) * ticks
		}
	}
	return total
}
