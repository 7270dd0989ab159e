package fulfillment_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

// lostAnswer loses the answer to the next reservation, and delays the retry until resume is closed.
type lostAnswer struct {
	orders string // the stream, which is the third key of a reservation and of no other script
	lost   atomic.Bool
	resume chan struct{}
}

func (h *lostAnswer) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	err := next(ctx, cmd)
	args := cmd.Args()
	if err == nil && cmd.Name() == "evalsha" && len(args) > 5 && args[5] == h.orders &&
		h.lost.CompareAndSwap(false, true) {
		<-h.resume
		err = &net.OpError{Op: "read", Err: errors.New("reset")}
		cmd.SetErr(err)
	}
	return err
}

// An ingress without an answer retries with the same order. If the order has ended meanwhile, the retry
// reserves units for an ended order, which nothing else would release. In another epoch the retry
// reserves nothing.
func TestRetryOfEndedReservationHoldsNothing(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]struct {
		how    func(t *testing.T, s *testshop.Shop, b *batch.Batcher)
		status order.Status
		// The answer of the retry.
		verdict reservation.Verdict
		err     error
	}{
		"Redis lost it": {func(t *testing.T, s *testshop.Shop, b *batch.Batcher) {
			messages := testwork.Messages(t, s) // a worker has read them
			s.Flush(t)
			testwork.Rebuild(t, s)
			testwork.RequireDone(t, testwork.Handle(b, messages...))
		}, order.StatusVoided, "", reservation.ErrOutcomeUnknown},
		"it expired": {func(t *testing.T, s *testshop.Shop, b *batch.Batcher) {
			testwork.RequireDone(t, testwork.Handle(b, testwork.Messages(t, s)...))
			require.NoError(t, s.Exec(t, "UPDATE orders SET due = due - interval '1 day' WHERE user_id = 'alice'"))
			testwork.Heartbeat(t, s.Pool)
			testwork.Expire(t, s)
			testwork.ReleaseUnits(t, s)
		}, order.StatusExpired, reservation.Reserved, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 1)
			sale := s.OpenPayable(t, 10)
			b := testwork.Batch(t, s, nil)
			s.Buy(t, sale, "ann")
			testwork.RequireDone(t, testwork.Handle(b, testwork.Messages(t, s)...))
			hook := &lostAnswer{orders: s.Keys.Orders(0), resume: make(chan struct{})}
			resume := sync.OnceFunc(func() { close(hook.resume) })
			defer resume()
			s.Rdb.AddHook(testkit.Hook(hook.process))
			// Bounds all tries together: longer than the order takes to end.
			ingress := reservation.NewStore(s.Rdb, s.Keys,
				reservation.StoreOptions{Logger: testkit.Logger(t), CallTimeout: time.Minute})
			t.Cleanup(ingress.Close)
			var again reservation.Answer
			reserved := make(chan error, 1)
			go func() {
				var err error
				again, err = ingress.Reserve(t.Context(), reservation.Request{Sale: sale, User: "alice", Quantity: 1})
				reserved <- err
			}()
			testkit.Eventually(t, 20*time.Second, "the first answer is lost", hook.lost.Load)
			end.how(t, s, b)
			resume()
			require.ErrorIs(t, testshop.Answer(t, reserved), end.err)
			require.Equal(t, end.verdict, again.Verdict)
			testwork.RequireDone(t, testwork.Handle(b, testwork.Messages(t, s)...))
			var status order.Status
			require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT status FROM orders WHERE user_id = 'alice'").Scan(&status))
			require.Equal(t, end.status, status)
			require.EqualValues(t, 9, s.Left(t, sale), "the unit is released")
			require.Equal(t, reservation.Reserved, s.Ask(t, sale, "alice").Verdict, "the user can buy")
		})
	}
}

// An operator's change does not verify a server.
func TestOnlyRebuildVerifiesUsedPartition(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 10)
	require.NoError(t, s.Exec(t, "DELETE FROM redis_servers"))
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Server(0)).Err())
	require.NoError(t, s.Rdb.ScriptFlush(t.Context()).Err())
	s.RequireClosed(t, sale)

	other := s.Open(t, 5)
	s.RequireClosed(t, sale)
	needs, err := testwork.Rebuilder(t, s).Needs(t.Context(), 1, true)
	require.NoError(t, err)
	require.Equal(t, []rebuild.Need{{Reason: rebuild.ReasonUnverified}}, needs)
	testwork.Rebuild(t, s)
	_, err = s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, s.Ask(t, sale, "ann").Verdict)
	require.Equal(t, reservation.Reserved, s.Ask(t, other, "ann").Verdict)
}
