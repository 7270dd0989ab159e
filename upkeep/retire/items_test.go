package retire_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

// A sale with items retires as any other, and Postgres answers with the lines of its orders.
func TestSaleWithItemsIsRetired(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	l := ledger.New(s.Pool)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", Stock: 8, PerOrderLimit: 4, PaymentWindow: testshop.PaymentWindow,
		Items: []reservation.Item{{Code: "m", Name: "M", Stock: 5}, {Code: "l", Name: "L", Stock: 3}},
	})
	require.NoError(t, err)
	sale := created.ID
	request := func(user string) reservation.Request {
		return reservation.Request{
			Sale: sale, User: user, IdempotencyKey: "key-" + user, Items: map[string]int64{"m": 2, "l": 1},
		}
	}
	made := map[string]reservation.Answer{}
	for _, user := range []string{"ann", "bob"} {
		made[user], err = s.Reserve(t.Context(), request(user))
		require.NoError(t, err)
	}
	testwork.Fulfil(t, s)
	testwork.Pay(t, l, made["ann"].Reservation.OrderID, "ann", "pi")
	testwork.Cancel(t, l, made["bob"].Reservation.OrderID, "bob")
	testwork.ReleaseUnits(t, s)
	end(t, s, sale)
	before, err := s.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 2}, []int64{before.Items[0].Available, before.Items[1].Available})

	require.Equal(t, 1, sweep(t, s))
	for range 2 {
		requireRetired(t, s, sale)
		fields := s.SaleInRedis(t, sale)
		require.Equal(t, "m l", fields["items"])
		require.NotContains(t, fields, "left.a")
		after, err := s.Show(t.Context(), sale)
		require.NoError(t, err)
		before.Epoch, before.Revision, before.Retired = after.Epoch, after.Revision, true
		require.Equal(t, before, after, "nothing of it has changed for those who look")
		answer, err := s.Reserve(t.Context(), request("ann"))
		require.NoError(t, err)
		require.Equal(t, reservation.Retired, answer.Verdict)

		s.Flush(t)
		testwork.Rebuild(t, s)
	}
	for user, verdict := range map[string]reservation.Verdict{
		"ann": reservation.Replayed, "bob": reservation.OrderEnded,
	} {
		past, err := l.PastAnswer(t.Context(), request(user))
		require.NoError(t, err)
		require.Equal(t, []any{verdict, made[user].Reservation.OrderID, order.Lines("a2b1"), order.Items(`{"m":2,"l":1}`)},
			[]any{past.Verdict, past.Reservation.OrderID, past.Reservation.Lines, past.Of.Units})
	}
}
