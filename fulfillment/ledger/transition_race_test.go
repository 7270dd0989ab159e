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

	"stampede/fulfillment/ledger"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation/order"
)

// races is how often two sides want the same order at once.
const races = 1000

// raced is a sale of which every unit is sold and waits for its payment.
type raced struct {
	*testshop.Shop
	sale   uuid.UUID
	ledger *ledger.Ledger
	orders []order.Order
}

func newRaced(t *testing.T) *raced {
	t.Helper()
	s := testshop.NewShop(t, testkit.Pool(t))
	r := &raced{Shop: s, sale: s.OpenPayable(t, races), ledger: ledger.New(s.Pool)}
	require.Equal(t, races, s.Crowd(t, r.sale, races))
	for _, out := range testwork.Fulfil(s, t) {
		r.orders = append(r.orders, testwork.OrderOfID(t, s.Pool, out.Event.OrderID))
	}
	require.Len(t, r.orders, races)
	testwork.Heartbeat(t, s.Pool)
	return r
}

// each runs race once for every order, a few at a time.
func (r *raced) each(t *testing.T, race func(o order.Order) error) {
	t.Helper()
	var lanes errgroup.Group
	lanes.SetLimit(3)
	for _, o := range r.orders {
		lanes.Go(func() error {
			if err := race(o); err != nil {
				return fmt.Errorf("order %s: %w", o.ID, err)
			}
			return nil
		})
	}
	require.NoError(t, lanes.Wait())
}

// linger lets a side come a little later: so many round trips that either may win.
func (r *raced) linger(most int) error {
	for range rand.IntN(most + 1) {
		if err := r.Pool.Ping(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

// requireOneWinner checks what every race must leave: one winner for each order, whom the books and Redis agree
// with. won says for each order what the sides were told.
func (r *raced) requireOneWinner(t *testing.T, won *sync.Map, loser order.Status) {
	t.Helper()
	paid := 0
	for _, o := range r.orders {
		now := testwork.OrderOfID(t, r.Pool, o.ID)
		told, ok := won.Load(o.ID)
		require.True(t, ok)
		require.Equal(t, told, now.Status, "order %s", o.ID)
		require.Equal(t, 3, now.Version)
		if now.Status == order.StatusPaid {
			require.Equal(t, "pi "+o.UserID, now.PaymentReference)
			paid++
		} else {
			require.Equal(t, loser, now.Status)
		}
	}
	t.Logf("%d paid, %d %s", paid, races-paid, loser)
	require.Greater(t, paid, races/50, "both sides must win now and then, or this was no race")
	require.Less(t, paid, races-races/50, "both sides must win now and then, or this was no race")
	require.Zero(t, r.Count(t, testshop.BrokenLogs))
	require.EqualValues(t, 3*races, r.Count(t, "SELECT count(*) FROM order_events"))
	require.EqualValues(t, paid, testshop.SoldOf(t, r.Pool, r.sale))
	require.EqualValues(t, races-paid, r.Count(t, testshop.PendingReleases))
	report := testwork.Audit(r.Shop, t, r.sale)
	require.False(t, report.Broken(), testwork.TextOf(t, report))
	_, err := testwork.GiveBack(r.Shop, t.Context())
	require.NoError(t, err)
	require.EqualValues(t, races-paid, r.Left(t, r.sale))
	report = testwork.Audit(r.Shop, t, r.sale)
	require.False(t, report.Broken(), testwork.TextOf(t, report))
}

func (r *raced) pay(o order.Order) (order.Order, error) {
	return r.ledger.Pay(context.Background(), o.ID, o.UserID, "pi "+o.UserID)
}

func TestConcurrentPayAndCancelHaveOneWinner(t *testing.T) {
	t.Parallel()
	r := newRaced(t)
	var won sync.Map
	r.each(t, func(o order.Order) error {
		var sides errgroup.Group
		for range 2 { // a click too many
			sides.Go(func() error {
				if err := r.linger(2); err != nil {
					return err
				}
				return note(&won, o, order.StatusPaid, func() (order.Order, error) { return r.pay(o) })
			})
			sides.Go(func() error {
				if err := r.linger(2); err != nil {
					return err
				}
				return note(&won, o, order.StatusCancelled, func() (order.Order, error) {
					return r.ledger.Cancel(context.Background(), o.ID, o.UserID)
				})
			})
		}
		return sides.Wait()
	})
	r.requireOneWinner(t, &won, order.StatusCancelled)
}

// note notes whom an order went to, if it was this side. It returns an error if it was told so of both.
func note(won *sync.Map, o order.Order, as order.Status, act func() (order.Order, error)) error {
	got, err := act()
	switch {
	case errors.Is(err, order.ErrIllegalTransition), errors.Is(err, order.ErrOrderExpired):
		return nil
	case err != nil:
		return err
	case got.Status != as:
		return fmt.Errorf("is %s, want %s", got.Status, as)
	}
	if before, told := won.LoadOrStore(o.ID, as); told && before != as {
		return fmt.Errorf("was told to be %s and %s", before, as)
	}
	return nil
}

// The deadline of each order comes while its buyer pays and sweepers look for it.
func TestConcurrentPayAndExpiryHaveOneWinner(t *testing.T) {
	t.Parallel()
	r := newRaced(t)
	ingress := ledger.Heartbeat{Pool: r.Pool, Logger: testkit.Logger(t)}
	var won sync.Map
	r.each(t, func(o order.Order) error {
		if _, err := r.Pool.Exec(context.Background(),
			"UPDATE orders SET due = pay_clock() WHERE id = $1 AND status = 'confirmed'", o.ID); err != nil {
			return err
		}
		var sides errgroup.Group
		for range 2 {
			sides.Go(func() error {
				if err := r.linger(8); err != nil {
					return err
				}
				return note(&won, o, order.StatusPaid, func() (order.Order, error) { return r.pay(o) })
			})
		}
		sides.Go(func() error {
			if err := r.linger(3); err != nil {
				return err
			}
			if _, err := ingress.Send(context.Background()); err != nil {
				return err
			}
			_, err := testwork.Expire(r.Shop, context.Background())
			return err
		})
		return sides.Wait()
	})
	// What a payment had locked when the sweepers came by, and was too late.
	_, err := testwork.Expire(r.Shop, t.Context())
	require.NoError(t, err)
	for _, o := range r.orders {
		won.LoadOrStore(o.ID, order.StatusExpired)
	}
	r.requireOneWinner(t, &won, order.StatusExpired)
}
