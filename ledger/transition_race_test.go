package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

// races is the number of orders that two sides change at the same time.
const races = 1000

// racedSale is a sale whose units are all sold and not yet paid.
type racedSale struct {
	*testshop.Shop
	sale   uuid.UUID
	ledger *ledger.Ledger
	orders []order.Order
}

func newRacedSale(t *testing.T) *racedSale {
	t.Helper()
	s := testshop.NewShop(t)
	r := &racedSale{Shop: s, sale: s.OpenPayable(t, races), ledger: ledger.New(s.Pool)}
	require.Equal(t, races, s.Crowd(t, r.sale, races))
	for _, out := range testwork.Fulfil(t, s) {
		r.orders = append(r.orders, testwork.Order(t, s.Pool, out.Event.OrderID))
	}
	require.Len(t, r.orders, races)
	testwork.Heartbeat(t, s.Pool)
	return r
}

// each runs race once for every order, a few at a time.
func (r *racedSale) each(t *testing.T, race func(o order.Order) error) {
	t.Helper()
	var running errgroup.Group
	running.SetLimit(3)
	for _, o := range r.orders {
		running.Go(func() error {
			if err := race(o); err != nil {
				return fmt.Errorf("order %s: %w", o.ID, err)
			}
			return nil
		})
	}
	require.NoError(t, running.Wait())
}

// linger delays a side by a random number of round trips, so that either may win.
func (r *racedSale) linger(most int) error {
	for range rand.IntN(most + 1) {
		if err := r.Pool.Ping(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

// requireOneWinner checks that each order has one winner, which the audit and Redis agree with. won holds
// the status that the sides received for each order.
func (r *racedSale) requireOneWinner(t *testing.T, won *sync.Map, loser order.Status) {
	t.Helper()
	paid := 0
	for _, o := range r.orders {
		now := testwork.Order(t, r.Pool, o.ID)
		status, ok := won.Load(o.ID)
		require.True(t, ok)
		require.Equal(t, status, now.Status, "order %s", o.ID)
		require.Equal(t, 3, now.Version)
		if now.Status == order.StatusPaid {
			require.Equal(t, "pi "+o.UserID, now.PaymentReference)
			paid++
		} else {
			require.Equal(t, loser, now.Status)
		}
	}
	t.Logf("%d paid, %d %s", paid, races-paid, loser)
	require.Greater(t, paid, races/50, "both sides must win some of the races")
	require.Less(t, paid, races-races/50, "both sides must win some of the races")
	require.Zero(t, r.Count(t, testshop.BrokenLogs))
	require.EqualValues(t, 2*races, r.Count(t, "SELECT count(*) FROM order_events"))
	require.EqualValues(t, paid, testshop.Sold(t, r.Pool, r.sale))
	require.EqualValues(t, races-paid, r.Count(t, testshop.PendingReleases))
	testwork.RequireUnbroken(t, r.Shop, r.sale)
	_, err := testwork.ReleaseUnits(t.Context(), r.Shop)
	require.NoError(t, err)
	require.EqualValues(t, races-paid, r.Left(t, r.sale))
	testwork.RequireUnbroken(t, r.Shop, r.sale)
}

func (r *racedSale) pay(o order.Order) (order.Order, error) {
	return r.ledger.Pay(context.Background(), o.ID, o.UserID, "pi "+o.UserID)
}

func TestConcurrentPayAndCancelHaveOneWinner(t *testing.T) {
	t.Parallel()
	r := newRacedSale(t)
	var won sync.Map
	r.each(t, func(o order.Order) error {
		var sides errgroup.Group
		for range 2 { // a double click
			sides.Go(func() error {
				if err := r.linger(2); err != nil {
					return err
				}
				return noteWinner(&won, o, order.StatusPaid, func() (order.Order, error) { return r.pay(o) })
			})
			sides.Go(func() error {
				if err := r.linger(2); err != nil {
					return err
				}
				return noteWinner(&won, o, order.StatusCancelled, func() (order.Order, error) {
					return r.ledger.Cancel(context.Background(), o.ID, o.UserID)
				})
			})
		}
		return sides.Wait()
	})
	r.requireOneWinner(t, &won, order.StatusCancelled)
}

// noteWinner records the order's status if this side won. It returns an error if the other side won as
// well.
func noteWinner(won *sync.Map, o order.Order, as order.Status, act func() (order.Order, error)) error {
	got, err := act()
	switch {
	case errors.Is(err, order.ErrIllegalTransition), errors.Is(err, order.ErrExpired):
		return nil
	case err != nil:
		return err
	case got.Status != as:
		return fmt.Errorf("is %s, want %s", got.Status, as)
	}
	if other, loaded := won.LoadOrStore(o.ID, as); loaded && other != as {
		return fmt.Errorf("is %s and %s", other, as)
	}
	return nil
}

// The deadline of each order passes while its buyer pays and sweepers look for overdue orders.
func TestConcurrentPayAndExpiryHaveOneWinner(t *testing.T) {
	t.Parallel()
	r := newRacedSale(t)
	ingress := ledger.Heartbeat{Pool: r.Pool, Logger: testkit.Logger(t)}
	var won sync.Map
	r.each(t, func(o order.Order) error {
		if err := testwork.MoveDue(context.Background(), r.Pool, "pay_clock()", o.ID); err != nil {
			return err
		}
		var sides errgroup.Group
		for range 2 {
			sides.Go(func() error {
				if err := r.linger(8); err != nil {
					return err
				}
				return noteWinner(&won, o, order.StatusPaid, func() (order.Order, error) { return r.pay(o) })
			})
		}
		sides.Go(func() error {
			if err := r.linger(3); err != nil {
				return err
			}
			if _, err := ingress.Send(context.Background()); err != nil {
				return err
			}
			_, err := testwork.Expire(context.Background(), r.Shop)
			return err
		})
		return sides.Wait()
	})
	// Orders that a late payment had locked during the sweep.
	_, err := testwork.Expire(t.Context(), r.Shop)
	require.NoError(t, err)
	for _, o := range r.orders {
		won.LoadOrStore(o.ID, order.StatusExpired)
	}
	r.requireOneWinner(t, &won, order.StatusExpired)
}
