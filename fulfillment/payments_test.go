package fulfillment_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation/order"
	"stampede/stream"
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
	config := testwork.Config(t, s.Shop)
	config.Keys.Partitions = 8
	testwork.Work(t, config)
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
