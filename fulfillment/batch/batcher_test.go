package batch_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/lock"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
)

func TestMain(m *testing.M) { testwork.Main(m) }

func TestBatcherGroupsMessagesThatArriveDuringTransaction(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	s.Crowd(t, sale, 41)
	msgs := testwork.Messages(t, s)
	b := testwork.Batch(t, s, nil)

	hold := s.HoldSale(t, sale)
	answers := testwork.Handle(b, msgs[0])
	s.AwaitWaiting(t, 1)
	answers = append(answers, testwork.Handle(b, msgs[1:]...)...)
	testkit.Eventually(t, 30*time.Second, "the others wait", func() bool { return b.Queued() == 40 })
	require.NoError(t, hold.Rollback(t.Context()))
	testwork.RequireDone(t, answers)
	// now() is the start of the transaction.
	require.EqualValues(t, 2, s.Count(t, "SELECT count(DISTINCT updated_at) FROM orders"),
		"one transaction for one order, one for forty")
	require.EqualValues(t, 41, s.Count(t, testshop.ConfirmedOrders))
}

func TestBatcherRecordsGoodEventsBesideBadEvent(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := testshop.NewSale(t, s.Pool, 100)
	b := testwork.Batch(t, s, nil)
	events := testshop.ReservedCrowd(sale, 20)
	events[7].UserID = "a\x00b" // rejected by every decoder and every text column

	outcomes := b.Record(t.Context(), events)
	require.Len(t, outcomes, 20)
	for i, out := range outcomes {
		require.Equal(t, events[i], out.Event)
		if i == 7 {
			require.Equal(t, ledger.BadData, ledger.FaultOf(out.Err))
		} else {
			require.Equal(t, order.StatusConfirmed, out.Status)
		}
	}
	require.EqualValues(t, 19, testshop.Sold(t, s.Pool, sale))
}

func TestBatcherConfirmsLastUnitsInSaleOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	full, roomy := testshop.NewSale(t, s.Pool, 5), testshop.NewSale(t, s.Pool, 100)
	counted, trips := testshop.CountTrips(t, s.Pool)
	b := testwork.Batch(t, s, func(c *batch.Config) { c.Ledger = ledger.New(counted) })
	events := append(testshop.ReservedCrowd(full, 40), testshop.ReservedCrowd(roomy, 40)...)
	events[10].Quantity = 3

	outcomes := b.Record(t.Context(), events)
	for i, out := range outcomes {
		require.NoError(t, out.Err)
		want := order.StatusConfirmed
		if i >= 5 && i < 40 {
			want = order.StatusRejected
			require.Equal(t, order.RejectedSoldOut, out.Reason)
		}
		require.Equal(t, want, out.Status, "event %d", i)
	}
	require.EqualValues(t, 5, testshop.Sold(t, s.Pool, full))
	require.EqualValues(t, 40, testshop.Sold(t, s.Pool, roomy))
	require.Less(t, trips.N.Load(), int64(60), "it does not try the events one by one")
}

func TestBatcherSurvivesPanic(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	b := testwork.Batch(t, s, func(c *batch.Config) { c.Ledger = ledger.New(nil) })
	for range 2 {
		testwork.RequireAllFail(t, testwork.Handle(b, testwork.Messages(t, s)...), ledger.ErrPanicked)
	}
}

// One message is deferred, and recording the others panics: the deferred message is resolved as well.
func TestBatcherResolvesDeferredMessagesAfterPanic(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := testshop.NewSale(t, s.Pool, 1)
	_, _, err := lock.New(s.Rdb).TryEach(t.Context(), []string{s.Keys.Lock(0, "user-1")}, lock.For(30*time.Second))
	require.NoError(t, err)
	b := testwork.Batch(t, s, func(c *batch.Config) { c.Store = nil }) // releasing a rejected order's unit panics
	events := testshop.ReservedCrowd(sale, 3)
	require.Equal(t, "user-1", events[0].UserID)
	answers, deferred := b.ProcessBatch(t.Context(), events...)
	require.Zero(t, deferred)
	testwork.RequireAllFail(t, answers, ledger.ErrPanicked)
}

// A lease that expires because Postgres is slow is no outage of Redis.
func TestBatcherExpiredLeaseReportsNoOutage(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	user := s.Keys.Lock(0, "alice")
	s.Buy(t, sale, "alice")
	hold := s.HoldSale(t, sale)

	log := &testshop.CountingLog{}
	b := testwork.Batch(t, s, func(c *batch.Config) { c.Lease, c.Logger = time.Second, slog.New(log) })
	answers := testwork.Handle(b, testwork.Messages(t, s)...)
	locked := func() bool { return s.Rdb.Exists(t.Context(), user).Val() == 1 }
	testkit.Eventually(t, 30*time.Second, "the user is locked", locked)
	testkit.Eventually(t, 30*time.Second, "the lease expires", func() bool { return !locked() })
	require.NoError(t, hold.Rollback(t.Context()))
	require.NoError(t, testshop.Answer(t, answers[0]))
	testkit.Eventually(t, 30*time.Second, "the batcher logs it", func() bool {
		return log.Times("locks of a batch expired before it ended") == 1
	})
	require.Zero(t, log.Times("cannot lock the users of a batch, continuing without, trying again"))
	require.EqualValues(t, 1, s.Count(t, testshop.ConfirmedOrders))
}

func TestBatcherRecordsWithoutLocks(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	t.Cleanup(func() { _ = gone.Close() })
	b := testwork.Batch(t, s, func(c *batch.Config) { c.Locker = lock.New(gone) })
	testwork.RequireDone(t, testwork.Handle(b, testwork.Messages(t, s)...))
	require.EqualValues(t, 3, s.Count(t, testshop.ConfirmedOrders))
}

func TestBatcherRejectsUndecodableMessage(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	b := testwork.Batch(t, s, nil)
	require.ErrorIs(t, b.Handle(message.NewMessage("1", []byte("{}"))), order.ErrUndecodable)
}

func TestBatcherStopLeavesUnfinishedMessages(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	gone := testkit.PoolAt(t, "postgres://nobody@127.0.0.1:1/nothing", 1)
	b := testwork.Batch(t, s, func(c *batch.Config) { c.Ledger = ledger.New(gone) })
	answers := testwork.Handle(b, testwork.Messages(t, s)...)
	b.Drain()
	testwork.RequireAllFail(t, answers, stream.ErrStopping)
}

// While units cannot be released, only the rejected orders wait: the rest of their batch is done.
func TestBatcherRetriesRejectedOrderUntilUnitIsReleased(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 3)
	for i := range 3 {
		s.Buy(t, sale, fmt.Sprintf("user-%d", i))
	}
	require.NoError(t, s.Exec(t, "UPDATE sales SET stock = 2 WHERE id = $1", sale))
	msgs := testwork.Messages(t, s)
	s.Server.Kill()

	b := testwork.Batch(t, s, nil)
	answers := testwork.Handle(b, msgs...)
	// Which of the three is rejected depends on the order in which they are batched.
	countAnswers := func() (n int) {
		for _, a := range answers {
			n += len(a)
		}
		return n
	}
	testkit.Eventually(t, 20*time.Second, "two are done, and one is rejected", func() bool {
		var n int64
		err := s.Pool.QueryRow(t.Context(), "SELECT count(*) FROM orders WHERE status = 'rejected'").Scan(&n)
		return err == nil && n == 1 && countAnswers() == 2
	})
	require.NoError(t, s.Server.Restart(t.Context()))
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	testwork.RequireDone(t, answers)
	require.EqualValues(t, 1, s.Left(t, sale))
}

func TestBatchLockLeaseEndsBeforeClaim(t *testing.T) {
	t.Parallel()
	for minIdle, want := range map[time.Duration]time.Duration{
		time.Millisecond: lock.MinLease, 2 * time.Second: 2 * time.Second, time.Hour: 3 * time.Second,
	} {
		require.Equal(t, want, batch.LockLease(minIdle), minIdle)
	}
}

// openPage returns the messages of two orders that were read in one page.
func openPage(t *testing.T) (s *testshop.Shop, page []*message.Message) {
	t.Helper()
	s = testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	s.Buy(t, sale, "bob")
	subscriber, err := stream.NewSubscriber(stream.Config{
		Client: s.Blocking, Control: s.Rdb, Group: reservation.Group, Consumer: "worker",
		DeadLetter: func(context.Context, stream.Entry, error) error { return nil }, Logger: testkit.Logger(t),
		DrainTimeout: time.Millisecond, // the messages are not acked
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, subscriber.Close()) })
	messages, err := subscriber.Subscribe(t.Context(), s.Keys.Orders(0))
	require.NoError(t, err)
	for range 2 {
		page = append(page, testshop.Answer(t, messages))
	}
	return s, page
}

func TestBatchWaitsForTheRestOfItsPage(t *testing.T) {
	t.Parallel()
	s, page := openPage(t)
	b := testwork.Batcher(t, s, nil)
	b.SetPageWait(testshop.Soon)
	testwork.RunBatcher(t, b)
	first := testwork.Handle(b, page[0])
	testkit.Eventually(t, testshop.Soon, "the batch waits for the second message", b.AwaitsPage)
	second := testwork.Handle(b, page[1])
	require.NoError(t, testshop.Answer(t, first[0]))
	require.NoError(t, testshop.Answer(t, second[0]))
	require.EqualValues(t, 2, s.Count(t, testshop.ConfirmedOrders))
	require.EqualValues(t, 1, s.Count(t, "SELECT count(DISTINCT updated_at) FROM orders"))
}

func TestBatchDoesNotWaitLongForItsPage(t *testing.T) {
	t.Parallel()
	s, page := openPage(t)
	b := testwork.Batch(t, s, nil)
	require.NoError(t, testshop.Answer(t, testwork.Handle(b, page[0])[0]))
	require.EqualValues(t, 1, s.Count(t, testshop.ConfirmedOrders))
}

func TestFullBatchDoesNotWaitForItsPage(t *testing.T) {
	t.Parallel()
	s, page := openPage(t)
	b := testwork.Batcher(t, s, func(c *batch.Config) { c.BatchMax = 1 })
	b.SetPageWait(time.Hour)
	testwork.RunBatcher(t, b)
	require.NoError(t, testshop.Answer(t, testwork.Handle(b, page[0])[0]))
}

// lockFromOtherRole locks the row of a sale in a session of another role, which no worker may end,
// until release is called.
func lockFromOtherRole(t testing.TB, s *testshop.Shop, sale uuid.UUID) (release func()) {
	t.Helper()
	role := "other_" + strings.ToLower(rand.Text())
	for _, statement := range []string{
		"CREATE ROLE " + role + " LOGIN PASSWORD 'other'", "GRANT SELECT, UPDATE ON sales TO " + role,
	} {
		require.NoError(t, s.Exec(t, statement))
	}
	u, err := url.Parse(testkit.DatabaseURL(t))
	require.NoError(t, err)
	u.User = url.UserPassword(role, "other")
	conn, err := pgx.Connect(t.Context(), u.String())
	require.NoError(t, err)
	ctx := context.WithoutCancel(t.Context())
	t.Cleanup(func() {
		_ = conn.Close(ctx)
		_, err := s.Pool.Exec(ctx, "DROP OWNED BY "+role+"; DROP ROLE "+role)
		require.NoError(t, err)
	})
	_, err = conn.Exec(t.Context(), "BEGIN")
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR UPDATE", sale)
	require.NoError(t, err)
	return func() {
		_, err := conn.Exec(ctx, "COMMIT")
		require.NoError(t, err)
	}
}

const confirmedInSale = testshop.ConfirmedOrders + " AND sale_id = $1"

func TestLockedSaleDoesNotBlockOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked := s.Open(t, 1000)
	others := make([]uuid.UUID, 5)
	for i := range others {
		others[i] = s.Open(t, 1000)
	}
	for i := range 10 {
		s.Buy(t, locked, fmt.Sprint("user-", i))
		for _, sale := range others {
			s.Buy(t, sale, fmt.Sprint("user-", i)) // the same users in all sales
		}
	}
	release := lockFromOtherRole(t, s, locked)
	testwork.Work(t, testwork.Config(t, s))
	testkit.Eventually(t, testshop.Soon, "the orders of the other sales are confirmed", func() bool {
		return s.Count(t, testshop.ConfirmedOrders) == 50
	})
	for _, sale := range others {
		s.Buy(t, sale, "late")
	}
	testkit.Eventually(t, testshop.Soon, "later orders are confirmed",
		func() bool { return s.Count(t, testshop.ConfirmedOrders) == 55 })
	require.Zero(t, s.Count(t, confirmedInSale, locked))
	release()
	s.AwaitConfirmed(t, 65)
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 10, testshop.Sold(t, s.Pool, locked))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

// The locked sale has more orders in the stream than a worker holds in memory.
func TestBacklogOfLockedSaleDoesNotBlockOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked, other := s.Open(t, 1000), s.Open(t, 1000)
	config := testwork.Config(t, s)
	config.BatchMax, config.MinIdle = 10, 2*time.Second
	s.Crowd(t, locked, 200)
	s.Crowd(t, other, 20)
	release := lockFromOtherRole(t, s, locked)
	testwork.Work(t, config)
	testkit.Eventually(t, testshop.Soon, "the orders of the other sale are confirmed", func() bool {
		return s.Count(t, confirmedInSale, other) == 20
	})
	require.Zero(t, s.Count(t, confirmedInSale, locked))
	release()
	s.AwaitConfirmed(t, 220)
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 200, testshop.Sold(t, s.Pool, locked))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

// The locked row is an order's, not a sale's: the error does not say which sale is blocked.
func TestLockedOrderBlocksOnlyItsSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked, other := s.Open(t, 1000), s.Open(t, 1000)
	s.Crowd(t, locked, 3)
	s.Crowd(t, other, 3)
	// Another session inserts one of the orders, and does not commit.
	hold, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) })
	_, err = hold.Exec(t.Context(), "SET LOCAL idle_in_transaction_session_timeout = 0")
	require.NoError(t, err)
	_, err = hold.Exec(t.Context(),
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		VALUES (gen_random_uuid(), $1, 'user-1', 1, 'confirmed', 2, 9, 1, now(), now())`, locked)
	require.NoError(t, err)

	b := testwork.Batch(t, s, func(c *batch.Config) {
		c.Ledger = ledger.New(s.Pool).WithLockTimeout(200 * time.Millisecond)
	})
	answers := testwork.Handle(b, testwork.Messages(t, s)...)
	testkit.Eventually(t, testshop.Soon, "all others are confirmed",
		func() bool { return s.Count(t, testshop.ConfirmedOrders) == 5 })
	require.EqualValues(t, 2, s.Count(t, confirmedInSale, locked), "the other orders of its sale are confirmed as well")
	require.NoError(t, hold.Rollback(t.Context()))
	testwork.RequireDone(t, answers)
	require.EqualValues(t, 6, s.Count(t, testshop.ConfirmedOrders))
}

// TestSlowBatchIsHalved uses a database that needs 10 ms per order and cancels statements after 250 ms.
func TestSlowBatchIsHalved(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	for _, statement := range []string{
		`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.01); RETURN NEW; END $$`,
		"CREATE TRIGGER slow BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION slow()",
	} {
		require.NoError(t, s.Exec(t, statement))
	}
	sale := s.Open(t, 1000)
	s.Crowd(t, sale, 100)
	limited := testkit.PoolAt(t, testkit.DatabaseURL(t)+"&statement_timeout=250", 8)
	config := testwork.Config(t, s)
	config.Catalog = catalog.New(limited, s.Store)
	testwork.Work(t, config)
	s.AwaitConfirmed(t, 100)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

// TestLockedSaleDoesNotDelayExpiryOfOtherSales also checks that the orders of the locked sale are not
// locked for long: a buyer may want to pay.
func TestLockedSaleDoesNotDelayExpiryOfOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked, other := testshop.NewPayableSale(t, s.Pool, 100), testshop.NewPayableSale(t, s.Pool, 100)
	orders := append(testwork.Confirm(t, s.Pool, locked, 6), testwork.Confirm(t, s.Pool, other, 5)...)
	unexpired := orders[0]
	testwork.EndWindow(t, s.Pool, orders[1:]...)
	release := lockFromOtherRole(t, s, locked)
	expired, err := testwork.TryExpire(t.Context(), s)
	require.True(t, ledger.IsLocked(err), "%v", err)
	require.ErrorContains(t, err, "sale="+locked.String())
	require.Equal(t, 5, expired)

	var user string
	require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT user_id FROM orders WHERE id = $1", unexpired).Scan(&user))
	_, err = ledger.New(s.Pool).Cancel(t.Context(), unexpired, user)
	require.True(t, ledger.IsLocked(err), "%v", err)
	_, err = ledger.New(s.Pool).Pay(t.Context(), unexpired, user, "pi")
	require.NoError(t, err, "paying does not use the sale's row")
	release()
	expired = testwork.Expire(t, s)
	require.Equal(t, 5, expired)
}

func TestLockedSaleDoesNotDelayPublishingOfOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked := s.Open(t, 10)
	for range 20 {
		s.Open(t, 10)
	}
	require.NoError(t, s.Exec(t, "UPDATE sales SET published_revision = 0"))
	release := lockFromOtherRole(t, s, locked)
	ctx, cancel := context.WithTimeout(t.Context(), ledger.RecordTimeout)
	defer cancel()
	published, err := s.Catalog.PublishPending(ctx)
	require.ErrorContains(t, err, "sale="+locked.String())
	require.Equal(t, 20, published)
	release()
	// A statement that its client has given up may still have published the sale.
	_, err = s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM sales WHERE published_revision <> revision"))
}
