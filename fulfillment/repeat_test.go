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
	"stampede/fulfillment/rebuild"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation"
	"stampede/reservation/order"
)

// lostAnswer loses the answer to the next reservation, and holds its next try back until goOn is closed.
type lostAnswer struct {
	orders string // the stream, which is the third key of a reservation and of no other script
	lost   atomic.Bool
	goOn   chan struct{}
}

func (h *lostAnswer) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *lostAnswer) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h *lostAnswer) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		args := cmd.Args()
		if err == nil && cmd.Name() == "evalsha" && len(args) > 5 && args[5] == h.orders &&
			h.lost.CompareAndSwap(false, true) {
			<-h.goOn
			err = &net.OpError{Op: "read", Err: errors.New("reset")}
			cmd.SetErr(err)
		}
		return err
	}
}

// An ingress that got no answer asks again with the same order. If the order has ended meanwhile, that makes a
// reservation of an order that is over, whose units nobody else would ever give back. In another epoch it makes none.
func TestRetryOfEndedReservationHoldsNothing(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]struct {
		how    func(t *testing.T, s testshop.LostShop, b *batch.Batcher)
		status order.Status
		// What the second try answers.
		verdict reservation.Verdict
		err     error
	}{
		"Redis lost it": {func(t *testing.T, s testshop.LostShop, b *batch.Batcher) {
			messages := testwork.Messages(s.Shop, t) // a worker has them in hand
			s.Flush(t)
			testwork.Rebuild(s.Shop, t)
			for _, a := range testwork.Handle(b, messages...) {
				require.NoError(t, testshop.Answer(t, a))
			}
		}, order.StatusVoided, "", reservation.ErrOutcomeUnknown},
		"it expired": {func(t *testing.T, s testshop.LostShop, b *batch.Batcher) {
			for _, a := range testwork.Handle(b, testwork.Messages(s.Shop, t)...) {
				require.NoError(t, testshop.Answer(t, a))
			}
			_, err := s.Pool.Exec(t.Context(), "UPDATE orders SET due = due - interval '1 day' WHERE user_id = 'alice'")
			require.NoError(t, err)
			testwork.Heartbeat(t, s.Pool)
			_, err = testwork.Expire(s.Shop, t.Context())
			require.NoError(t, err)
			_, err = testwork.ReleaseUnits(s.Shop, t.Context())
			require.NoError(t, err)
		}, order.StatusExpired, reservation.Reserved, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewLostShop(t)
			sale := s.OpenPayable(t, 10)
			b := testwork.Batch(s.Shop, t, nil)
			s.Buy(t, sale, "ann")
			for _, a := range testwork.Handle(b, testwork.Messages(s.Shop, t)...) {
				require.NoError(t, testshop.Answer(t, a))
			}
			hook := &lostAnswer{orders: s.Keys.Orders(0), goOn: make(chan struct{})}
			goOn := sync.OnceFunc(func() { close(hook.goOn) })
			defer goOn()
			s.Rdb.AddHook(hook)
			// All tries together have as long as the order takes to end.
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
			goOn()
			require.ErrorIs(t, testshop.Answer(t, reserved), end.err)
			require.Equal(t, end.verdict, again.Verdict)
			for _, a := range testwork.Handle(b, testwork.Messages(s.Shop, t)...) {
				require.NoError(t, testshop.Answer(t, a))
			}
			var status order.Status
			require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT status FROM orders WHERE user_id = 'alice'").Scan(&status))
			require.Equal(t, end.status, status)
			require.EqualValues(t, 9, s.Left(t, sale), "the unit is back")
			require.Equal(t, reservation.Reserved, s.Reserve(t, sale, "alice", 1, "").Verdict, "and its buyer can buy")
		})
	}
}

// An operator's change is no reason to believe that a server lost nothing.
func TestOnlyRebuildVerifiesUsedPartition(t *testing.T) {
	t.Parallel()
	s := testshop.NewLostShop(t)
	sale := s.Open(t, 10)
	_, err := s.Pool.Exec(t.Context(), "DELETE FROM redis_servers")
	require.NoError(t, err)
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Server(0)).Err())
	require.NoError(t, s.Rdb.ScriptFlush(t.Context()).Err())
	s.RequireClosed(t, sale)

	other := s.Open(t, 5)
	s.RequireClosed(t, sale)
	needs, err := testwork.Rebuilder(s.Shop, t).Needs(t.Context(), 1, true)
	require.NoError(t, err)
	require.Equal(t, []rebuild.Need{{Reason: rebuild.ReasonUnverified}}, needs)
	testwork.Rebuild(s.Shop, t)
	_, err = s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, s.Reserve(t, sale, "ann", 1, "").Verdict)
	require.Equal(t, reservation.Reserved, s.Reserve(t, other, "ann", 1, "").Verdict)
}
