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
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

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
