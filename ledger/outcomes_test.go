package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
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

// Nothing depends on outcomes, so Redis waits for no disk.
func TestOutcomesAreNotLogged(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Control(t, own.URL)
	keys := reservation.Keys{Prefix: "stampede", Partitions: 1}
	_, o, run := testwork.PublishingLedger(t, testkit.Pool(t), rdb, keys)
	before := testkit.Logged(t, rdb)
	o.Enqueue([]order.OrderOutcome{{OrderID: uuid.New(), Status: order.StatusConfirmed, Version: 2}})
	run()()
	require.Len(t, published(t, rdb, keys), 1)
	require.Equal(t, before, testkit.Logged(t, rdb))
	require.NoError(t, rdb.Set(t.Context(), "x", "y", 0).Err())
	require.NotEqual(t, before, testkit.Logged(t, rdb), "the size of the file shows what is logged")
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

// BenchmarkIndexes says what each index and check costs Postgres for an order: without it, in turns with all of them,
// batches of 500 orders. Those without rows, as of ended orders, are dropped together.
func BenchmarkIndexes(b *testing.B) {
	const size, batches, rounds = 500, 40, 6
	server := testkit.OwnPostgres(b)
	require.NoError(b, migrate.Up(b.Context(), server.URL))
	pool, err := pgxpool.New(b.Context(), server.URL)
	require.NoError(b, err)
	b.Cleanup(pool.Close)
	l := ledger.New(pool)
	sale := testshop.NewSale(b, pool, order.MaxStock)
	exec := func(statement string) {
		_, err := pool.Exec(b.Context(), statement, pgx.QueryExecModeSimpleProtocol)
		require.NoError(b, err)
	}
	next := 0
	measure := func() (cpu time.Duration, wal int64) {
		exec("TRUNCATE orders, order_events")
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
	variants := []struct {
		name    string
		indexes []string
	}{
		{"events-by-position", []string{"order_events_position"}},
		{"events-by-order", []string{"order_events_pkey"}},
		{"orders", []string{"orders_pkey"}},
		{"live-orders-by-user", []string{"orders_one_live_per_user"}},
		{"without-rows", []string{"orders_due", "orders_ended", "orders_ended_of_user", "orders_paid", "orders_turns"}},
	}
	drop := func(indexes []string) (restore string) {
		for _, index := range indexes {
			var definition string
			require.NoError(b, pool.QueryRow(b.Context(), "SELECT pg_get_indexdef($1::regclass)", index).Scan(&definition))
			restore += strings.Replace(definition, " ON ONLY ", " ON ", 1) + ";"
			exec("DROP INDEX " + index)
		}
		return restore
	}
	// Primary keys become indexes, which can be dropped.
	exec(`CREATE UNIQUE INDEX orders_key ON orders (sale_id, id); ALTER TABLE orders DROP CONSTRAINT orders_pkey;
		ALTER INDEX orders_key RENAME TO orders_pkey;
		CREATE UNIQUE INDEX events_key ON order_events (sale_id, order_id, version);
		ALTER TABLE order_events DROP CONSTRAINT order_events_pkey; ALTER INDEX events_key RENAME TO order_events_pkey`)
	measure() // the server is warm
	total := make(map[string]time.Duration)
	written := make(map[string]int64)
	for b.Loop() {
		for range rounds {
			for _, v := range variants {
				c, w := measure()
				restore := drop(v.indexes)
				without, less := measure()
				exec("TRUNCATE orders, order_events; " + restore)
				total["all"] += c
				total[v.name] += c - without
				written[v.name] += w - less
			}
		}
	}
	orders := float64(b.N * rounds * batches * size)
	b.ReportMetric(float64(total["all"].Microseconds())/orders/float64(len(variants)), "µs/order")
	for _, v := range variants {
		b.ReportMetric(float64(total[v.name].Microseconds())/orders, v.name+"-µs/order")
		b.ReportMetric(float64(written[v.name])/orders, v.name+"-WAL-bytes/order")
	}
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

func receiptFor(e order.OrderReserved) order.Receipt {
	return order.Receipt{
		OrderID: e.OrderID, SaleID: e.SaleID, User: e.UserID, Epoch: e.Epoch, Sequence: e.Sequence,
		Quantity: e.Quantity, ReservedAt: e.ReservedAt,
	}
}

func TestFindByReceiptReturnsRecordedOrVoidedOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 10)
	here, lost := testshop.Reserved(sale, "alice", 1), testshop.Reserved(sale, "bob", 2)
	testwork.Record(t, l, []order.OrderReserved{here})
	confirmed, err := l.FindByReceipt(t.Context(), receiptFor(here))
	require.NoError(t, err)
	require.Equal(t, testwork.Order(t, pool, here.OrderID), confirmed)
	_, err = l.FindByReceipt(t.Context(), receiptFor(lost))
	require.ErrorIs(t, err, order.ErrNotFound)

	testshop.Exec(t, pool, "UPDATE sales SET epoch = epoch + 1 WHERE id = $1", sale)
	got, err := l.FindByReceipt(t.Context(), receiptFor(here))
	require.NoError(t, err)
	require.Equal(t, confirmed, got, "a recorded order is returned whatever its epoch")
	got, err = l.FindByReceipt(t.Context(), receiptFor(lost))
	require.NoError(t, err)
	require.Equal(t, order.Order{
		ID: lost.OrderID, SaleID: sale, UserID: "bob", Quantity: lost.Quantity, Status: order.StatusVoided, Version: 2,
		ReservedAt: lost.ReservedAt, Reason: order.VoidedSaleRebuilt,
	}, got)

	// Its late event is recorded with the same result.
	testwork.Record(t, l, []order.OrderReserved{lost})
	late, err := l.FindByReceipt(t.Context(), receiptFor(lost))
	require.NoError(t, err)
	require.Equal(t, []any{got.Status, got.Version, got.Reason}, []any{late.Status, late.Version, late.Reason})

	// An order of the new epoch is not voided.
	fresh := testshop.Reserved(sale, "carol", 3)
	fresh.Epoch = 2
	_, err = l.FindByReceipt(t.Context(), receiptFor(fresh))
	require.ErrorIs(t, err, order.ErrNotFound)
	_, err = l.FindByReceipt(t.Context(), receiptFor(testshop.Reserved(uuid.New(), "dave", 1)))
	require.ErrorIs(t, err, order.ErrNotFound)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = l.FindByReceipt(cancelled, receiptFor(lost))
	require.Error(t, err)
	require.False(t, errors.Is(err, order.ErrNotFound))
}

// An order that was once reported as voided stays voided, even if its epoch ends while a transaction
// confirms it.
func TestVoidedOrderIsNeverConfirmed(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	for range 60 {
		sale := testshop.NewSale(t, pool, 10)
		event := testshop.Reserved(sale, "alice", 1)
		recorded := make(chan struct{})
		go func() {
			defer close(recorded)
			_, _ = l.Record(context.Background(), []order.OrderReserved{event}) // it may fail because the epoch has just ended
		}()
		testshop.Exec(t, pool, "UPDATE sales SET epoch = epoch + 1 WHERE id = $1", sale)
		first, err := l.FindByReceipt(t.Context(), receiptFor(event))
		require.NoError(t, err, "an ended epoch decides the order")
		<-recorded
		_, _ = l.Record(t.Context(), []order.OrderReserved{event}) // delivered again
		then, err := l.FindByReceipt(t.Context(), receiptFor(event))
		require.NoError(t, err)
		require.Equal(t, first.Status, then.Status)
	}
}

// An order that is confirmed, and whose epoch ends, between the two queries is not voided.
func TestFindByReceiptReadsEpochFirst(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 1)
	// One connection, on which the statements are prepared already: preparing them would wait for the
	// lock as well.
	one := testkit.PoolAt(t, testkit.DatabaseURL(t), 1)
	_, err := ledger.New(one).FindByReceipt(t.Context(), receiptFor(event))
	require.ErrorIs(t, err, order.ErrNotFound)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE sales IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	type answer struct {
		order order.Order
		err   error
	}
	found := make(chan answer, 1)
	go func() {
		o, err := ledger.New(one).FindByReceipt(context.Background(), receiptFor(event))
		found <- answer{o, err}
	}()
	testkit.Eventually(t, 10*time.Second, "the query waits for the sale", func() bool {
		return testshop.QueryInt(t, pool,
			"SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'sales'::regclass") == 1
	})
	_, err = tx.Exec(t.Context(),
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		VALUES ($1, $2, 'alice', 1, 'confirmed', 2, 1, 1, now(), now())`, event.OrderID, sale)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "UPDATE sales SET epoch = epoch + 1, sold = 1 WHERE id = $1", sale)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	got := <-found
	require.NoError(t, got.err)
	require.Equal(t, order.StatusConfirmed, got.order.Status)
}

func TestReceiptSecretIsCreatedOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	secret, err := ledger.New(pool).ReceiptSecret(t.Context())
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(secret), order.MinReceiptSecretBytes)
	again, err := ledger.New(pool).ReceiptSecret(t.Context())
	require.NoError(t, err)
	require.Equal(t, secret, again)
}

func TestFindOrdersReturnsRecordedOrders(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewPayableSale(t, pool, 10)
	ids := testwork.Confirm(t, pool, sale, 3)
	orders, err := ledger.New(pool).FindOrders(t.Context(), append(ids, uuid.New()))
	require.NoError(t, err)
	require.Len(t, orders, 3)
	for _, o := range orders {
		require.Contains(t, ids, o.ID)
		require.Equal(t, testwork.Order(t, pool, o.ID), o)
		require.False(t, o.ExpiresAt.Before(time.Now()))
	}
	orders, err = ledger.New(pool).FindOrders(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, orders)
}

// A restore or a replication may set the sequence of positions ahead: numbers without an event cost nothing.
func TestExportOfChangesReadsRows(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewSale(t, pool, 10_000)
	var newest int64
	for i, ahead := range []int64{1_000_000_000, 2_000_000_000, 3_000_000_000} {
		testshop.Exec(t, pool, `WITH o AS (
				INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
				SELECT gen_random_uuid(), $1, 'user-' || n, 1, 'voided', 2, n, 1, now(), now()
				FROM generate_series($2::int * 2100 + 1, $2 * 2100 + 2100) AS n RETURNING *)
			INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 2, 'OrderVoided', sale_id, user_id, 1, now() FROM o`, sale, i)
		newest = testshop.QueryInt(t, pool, "SELECT max(position) FROM order_events")
		testshop.Exec(t, pool, "SELECT setval('order_events_position_seq', $1)", ahead)
	}
	export := func(after, to int64) int {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		users := map[string]bool{}
		span := ledger.Span{ChangedAfter: after, ChangedTo: to}
		require.NoError(t, ledger.New(pool).Export(ctx, order.Filter{}, span, func(o order.Placed) error {
			require.False(t, users[o.UserID], "each once")
			users[o.UserID] = true
			return nil
		}))
		return len(users)
	}
	require.Equal(t, 6300, export(0, 3_000_000_000))
	require.Equal(t, 2100, export(1_000_000_000, newest-2100))
	require.Equal(t, 100, export(newest-100, 3_000_000_000))
}
