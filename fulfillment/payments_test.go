package fulfillment_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/rebuild"
)

// till is a shop to which money is reported.
type till struct {
	*testshop.Shop
	*ledger.Ledger
}

func newTill(s *testshop.Shop) till { return till{s, ledger.New(s.Pool)} }

// reportNow reports money for an order that Postgres does not have, and returns its reference.
func (s till) reportNow(t *testing.T, id uuid.UUID) (reference string) {
	t.Helper()
	p, err := s.Report(t.Context(), order.Money{Reference: "pi_" + uuid.NewString(), OrderID: id})
	require.NoError(t, err)
	require.Equal(t, order.PaymentWaiting, p.State)
	return p.Reference
}

// report is reportNow, eleven minutes ago.
func (s till) report(t *testing.T, id uuid.UUID) (reference string) {
	t.Helper()
	reference = s.reportNow(t, id)
	testwork.WaitLonger(t, s.Pool, 11*time.Minute, reference)
	return reference
}

func (s till) await(t *testing.T, reference string, state order.PaymentState, reason order.PaymentReason) {
	t.Helper()
	testkit.Eventually(t, testshop.Soon, string(state), func() bool {
		p, err := s.Payment(t.Context(), reference)
		require.NoError(t, err)
		return p.State == state && p.Reason == reason
	})
}

// requireWaits requires that money still waits after a whole sweep. Orders that do not exist tell that there was one.
func (s till) requireWaits(t *testing.T, reference string) {
	t.Helper()
	for range 2 {
		s.await(t, s.report(t, uuid.Must(uuid.NewV7())), order.PaymentRefundDue, order.RefundOrderNotFound)
	}
	s.await(t, reference, order.PaymentWaiting, "")
}

// Money that was reported before its order was recorded settles when a worker has recorded it, and money for an order
// that does not exist becomes due for refund.
func TestMoneyWaitsForItsOrder(t *testing.T) {
	t.Parallel()
	s := newTill(testshop.NewShop(t))
	sale := s.OpenPayable(t, 10)
	testwork.Heartbeat(t, s.Pool)
	early, lost := s.reportNow(t, s.Buy(t, sale, "ann")), s.report(t, order.NewOrderID(sale))
	testwork.Work(t, testwork.Config(t, s.Shop))
	s.await(t, early, order.PaymentSettled, "")
	s.await(t, lost, order.PaymentRefundDue, order.RefundOrderNotFound)
}

// An order that no worker has acknowledged for long may still come.
func TestMoneyWaitsForOrderInStream(t *testing.T) {
	t.Parallel()
	s := newTill(testshop.NewShardedShop(t))
	sale := s.OpenSharded(t, 80, 8)
	testwork.Heartbeat(t, s.Pool)
	require.NoError(t, s.Exec(t, "UPDATE sales SET payment_window_seconds = 3600"))
	held := s.HoldSale(t, sale)
	id := s.Buy(t, sale, "ann")
	key := s.Keys.Orders(s.Layout(t, sale).PartitionOf("ann"))
	values := stream.Values(s.Events(t, s.Layout(t, sale).PartitionOf("ann"))...)
	require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
	require.NoError(t, s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, ID: "1-1", Values: values}).Err())
	reference := s.report(t, id)
	wider := *s.Shop
	wider.Keys.Partitions = 8
	testwork.Work(t, testwork.Config(t, wider.Next(t, s.Rdb)))
	s.requireWaits(t, reference)
	require.NoError(t, held.Rollback(t.Context()))
	s.await(t, reference, order.PaymentSettled, "")
}

// A parked order may still come, and money for it is due for refund when an operator decides that it does not.
func TestMoneyWaitsForParkedOrder(t *testing.T) {
	t.Parallel()
	s := newTill(testshop.NewShop(t))
	sale := s.OpenPayable(t, 10)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	id := s.Buy(t, sale, "ann")
	entry := s.Entries(t, 0)[0]
	require.NoError(t, letters.Park(t.Context(),
		stream.Entry{Stream: s.Keys.Orders(0), ID: entry.ID, Fields: stream.FieldsOf(entry.Values)},
		stream.OrderErrors{{OrderID: id, Err: errors.New("refused")}}))
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
	reference := s.report(t, id)
	testwork.Work(t, testwork.Config(t, s.Shop))
	s.requireWaits(t, reference)
	parked, err := letters.List(t.Context(), deadletter.StatusParked, 10)
	require.NoError(t, err)
	require.NoError(t, letters.Discard(t.Context(), parked[0].ID, "a test", "zoe"))
	s.await(t, reference, order.PaymentRefundDue, order.RefundOrderRejected)
}

// While Redis cannot be asked, nothing is known about orders that Postgres lacks.
func TestMoneyWaitsWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	s := newTill(testshop.OnOwnRedis(t, 1))
	sale := s.OpenPayable(t, 10)
	config, registry := testwork.Config(t, s.Shop), prometheus.NewRegistry()
	config.Registerer = registry
	testwork.Work(t, config)
	testwork.AwaitRest(t, s.Shop)
	s.Server.Kill()
	lost := s.report(t, order.NewOrderID(sale))
	testkit.Eventually(t, testshop.Soon, "the step fails", func() bool {
		return testshop.Metric(t, registry, "stampede_worker_failing", "payments") == 1
	})
	s.await(t, lost, order.PaymentWaiting, "")
	require.NoError(t, s.Server.Restart(t.Context()))
	s.await(t, lost, order.PaymentRefundDue, order.RefundOrderNotFound)
}

// A clock of Postgres that is ahead for a moment makes no money old whose order is on its way.
func TestMoneyWaitsWhileClockIsAhead(t *testing.T) {
	t.Parallel()
	shop, set := testshop.OnClockedPostgres(t)
	s := newTill(shop)
	sale := s.OpenPayable(t, 10)
	lost := s.reportNow(t, order.NewOrderID(sale))
	set(20 * time.Minute)
	config, registry := testwork.Config(t, s.Shop), prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	testkit.Eventually(t, testshop.Soon, "the step waits", func() bool {
		return testshop.Metric(t, registry, "stampede_worker_failing", "payments") == 1
	})
	s.await(t, lost, order.PaymentWaiting, "")
	stop() // a clock that is set within a step counts
	set(0)
	testwork.Work(t, testwork.Config(t, s.Shop))
	s.requireWaits(t, lost)
}

// Nobody knows the payments of an archive by an older version, until its file is read: a refund could be made of money
// that has paid.
func TestMoneyWaitsForArchiveThatDoesNotSayItsPayments(t *testing.T) {
	t.Parallel()
	s := newTill(testshop.NewShop(t))
	sale := s.OpenPayable(t, 10)
	const archived = "UPDATE sales SET archived_at = now(), archive = $2 WHERE id = $1"
	require.NoError(t, s.Exec(t, archived, sale, "{}"))
	reference := s.report(t, order.NewOrderID(sale))
	testwork.Work(t, testwork.Config(t, s.Shop))
	s.requireWaits(t, reference)
	require.NoError(t, s.Exec(t, archived, sale, `{"remembered_at": "2026-11-28"}`))
	s.await(t, reference, order.PaymentRefundDue, order.RefundOrderNotFound)
}

// contested is an order that its buyer, an operator, and the end of its time to pay change at the same time.
type contested struct {
	id   uuid.UUID
	user string

	mu sync.Mutex
	// What the sides got as results: the payment and the cancellations that succeeded, and the reference that the
	// operator has to refund.
	paid, cancelled, withdrawn bool
	refund                     string
}

// told notes the result of a side.
func (c *contested) told(note func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	note()
}

// Operators cancel orders while buyers pay and cancel them, they expire, and their sale is rebuilt. Each order ends in
// one state, which agrees with every result, and Postgres and Redis agree.
func TestOperatorsCancelAgainstEverything(t *testing.T) {
	t.Parallel()
	const buyers, seconds = 300, 2
	for name, window := range map[string]time.Duration{"with a payment window": time.Hour, "confirmed is final": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
				Name: "contested", Stock: buyers, PerOrderLimit: 1, PaymentWindow: window,
			})
			require.NoError(t, err)
			config := testwork.Config(t, s)
			config.SweepInterval, config.GuardInterval = 5*time.Millisecond, 20*time.Millisecond
			stop := testwork.Work(t, config)
			defer stop()
			testwork.Heartbeat(t, s.Pool)
			orders := make([]*contested, buyers)
			for i := range orders {
				user := fmt.Sprintf("user-%d", i)
				orders[i] = &contested{id: s.Buy(t, sale.ID, user), user: user}
			}
			s.AwaitConfirmed(t, buyers)

			contest(t, s, sale.ID, orders, seconds*time.Second)
			testwork.AwaitRest(t, s)
			live := 0
			ends := map[string]int{}
			for _, o := range orders {
				now := requireTruth(t, s, o)
				if now.Status.Live() {
					live++
				}
				ends[fmt.Sprintf("%s, refund %v, told paid %v cancelled %v withdrawn %v", now.Status, o.refund != "", o.paid,
					o.cancelled, o.withdrawn)]++
			}
			rebuilds := s.Count(t, "SELECT count(*) FROM sale_events WHERE type = 'SaleRebuilt'")
			t.Logf("%d rebuilds; %v", rebuilds, ends)
			require.NotZero(t, rebuilds)
			require.NotZero(t, live, "some orders are left alone")
			require.EqualValues(t, live, testshop.Sold(t, s.Pool, sale.ID))
			require.EqualValues(t, buyers-live, s.Left(t, sale.ID))
			require.Zero(t, s.Count(t, testshop.BrokenLogs))
			testwork.RequireUnbroken(t, s, sale.ID)
			require.Zero(t, testwork.RebuildProjections(t, s).Replaced, "rows are what their log says")
			for _, o := range orders {
				if o.withdrawn {
					s.Buy(t, sale.ID, o.user) // again
				}
			}
		})
	}
}

// contest has all sides change orders for a while, except the first of them.
func contest(t *testing.T, s *testshop.Shop, sale uuid.UUID, orders []*contested, lasts time.Duration) {
	t.Helper()
	l := ledger.New(s.Pool)
	ctx, cancel := context.WithTimeout(t.Context(), lasts)
	defer cancel()
	var sides errgroup.Group
	often := func(do func(o *contested) error) {
		sides.Go(func() error {
			for ctx.Err() == nil {
				o := orders[1+rand.IntN(len(orders)-1)]
				if err := do(o); err != nil && !isRefusal(err) {
					return fmt.Errorf("order %s: %w", o.id, err)
				}
			}
			return nil
		})
	}
	// What has begun is finished, so that its outcome is known.
	background := context.WithoutCancel(ctx)
	often(func(o *contested) error {
		_, err := l.Pay(background, o.id, o.user, "pi "+o.user)
		if err == nil {
			o.told(func() { o.paid = true })
		}
		return err
	})
	often(func(o *contested) error {
		_, err := l.Cancel(background, o.id, o.user)
		if err == nil {
			o.told(func() { o.cancelled = true })
		}
		return err
	})
	for range 2 { // two operators
		often(func(o *contested) error {
			if rand.IntN(3) > 0 { // or hardly any would be paid
				return nil
			}
			withdrawn, err := l.Withdraw(background, o.id, "sold twice", "ann")
			if err == nil {
				o.told(func() { o.withdrawn, o.refund = true, withdrawn.PaymentReference })
			}
			return err
		})
	}
	sides.Go(func() error {
		for ctx.Err() == nil {
			o := orders[1+rand.IntN(len(orders)-1)]
			_, err := s.Pool.Exec(background, "UPDATE orders SET due = now() - interval '1 h' WHERE id = $1 AND due IS NOT NULL",
				o.id)
			if err == nil {
				_, err = s.Pool.Exec(background, `UPDATE order_events SET due = o.due
					FROM orders AS o WHERE o.id = $1 AND order_id = o.id AND order_events.version = 2 AND o.due IS NOT NULL`, o.id)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	sides.Go(func() error {
		for ctx.Err() == nil {
			_, err := testwork.Rebuilder(t, s).Sale(background, sale, "a test")
			if err != nil && !errors.Is(err, rebuild.ErrRunning) && !errors.Is(err, reservation.ErrUnavailable) {
				return err
			}
		}
		return nil
	})
	require.NoError(t, sides.Wait())
}

func isRefusal(err error) bool {
	return errors.Is(err, order.ErrIllegalTransition) || errors.Is(err, order.ErrExpired)
}

// requireTruth checks the state of an order against the results of the sides, and its log. It returns the order.
func requireTruth(t *testing.T, s *testshop.Shop, o *contested) order.Placed {
	t.Helper()
	now, log, err := ledger.New(s.Pool).History(t.Context(), o.id)
	require.NoError(t, err)
	wanted := order.Status("")
	switch {
	case o.withdrawn || o.cancelled:
		wanted = order.StatusCancelled
	case o.paid:
		wanted = order.StatusPaid
	}
	if wanted == "" {
		require.Contains(t, []order.Status{order.StatusConfirmed, order.StatusExpired}, now.Status, "order %s", o.id)
	} else {
		require.Equal(t, wanted, now.Status, "order %s: %+v", o.id, o)
	}
	reference := ""
	if o.paid {
		reference = "pi " + o.user
	}
	require.Equal(t, reference, now.PaymentReference, "order %s", o.id)
	if o.withdrawn {
		require.Equal(t, reference, o.refund, "order %s", o.id)
	}
	require.Len(t, log, now.Version)
	require.Equal(t, now.UpdatedAt, log[len(log)-1].OccurredAt)
	return now
}
