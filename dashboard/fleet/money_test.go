package fleet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

// The orders that wait for money are counted by deadline, with the last turn of a pace, and payments over a minute.
func TestUnpaidOrdersAreShown(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	paced, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "paced", Stock: 50, PerOrderLimit: 1, PaymentWindow: 4 * time.Minute, PaymentsPerSecond: 1,
	})
	require.NoError(t, err)
	short, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "short", Stock: 9, PerOrderLimit: 1, PaymentWindow: 50 * time.Second,
	})
	require.NoError(t, err)
	orders := testwork.Confirm(t, s.Pool, short.ID, 4)
	testwork.Confirm(t, s.Pool, paced.ID, 30)
	var lastTurn time.Time // which does not come during the test
	require.NoError(t, s.Pool.QueryRow(t.Context(), `UPDATE orders SET pay_from = now() + interval '1 hour'
		WHERE sale_id = $1 AND pay_from = (SELECT max(pay_from) FROM orders WHERE sale_id = $1) RETURNING pay_from`,
		paced.ID).Scan(&lastTurn))
	payments := ledger.New(s.Pool)
	for _, reference := range []string{"pi_1", "pi_2"} { // one more than the order takes
		_, err := payments.Report(t.Context(), order.Money{Reference: reference, OrderID: orders[0]})
		require.NoError(t, err)
	}
	all := f.play(t, "unpaid orders", func(x *Snapshot) bool { return x.Unpaid != nil && x.Unpaid.InMinute > 0 })
	require.Equal(t, Unpaid{InMinute: 3, InFive: 3, Settled: 1. / 60, Due: 1. / 60}, *saleIn(all, short.ID).Unpaid)
	last := saleIn(all, paced.ID).Unpaid
	require.EqualValues(t, 0, last.InMinute)
	require.EqualValues(t, 30, last.InFive)
	require.WithinDuration(t, lastTurn, last.LastTurn, 0)
	require.EqualValues(t, 33, all.Unpaid.InFive)
	require.Equal(t, last.LastTurn, all.Unpaid.LastTurn)
}
