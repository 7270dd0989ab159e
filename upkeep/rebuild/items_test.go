package rebuild_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

// baskets are buyers of a sale with items.
type baskets struct {
	*testshop.Shop
	sale reservation.Sale
}

func newBaskets(t *testing.T) baskets {
	t.Helper()
	s := testshop.OnOwnRedis(t, 1)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", PerOrderLimit: 4, Stock: 10, PaymentWindow: testshop.PaymentWindow,
		Items: []reservation.Item{
			{Code: "m", Name: "M", Stock: 5, PerOrderLimit: 3},
			{Code: "l", Name: "L", Stock: 3},
			{Code: "s", Name: "S", Stock: 2},
		},
	})
	require.NoError(t, err)
	return baskets{s, created.Sale}
}

// want asks for a unit of the item of each letter, "mml" for two of m and one of l.
func (b baskets) want(t *testing.T, user, codes string) reservation.Answer {
	t.Helper()
	items := map[string]int64{}
	for _, code := range codes {
		items[string(code)]++
	}
	a, err := b.Reserve(t.Context(),
		reservation.Request{Sale: b.sale.ID, User: user, IdempotencyKey: "key-" + user, Items: items})
	require.NoError(t, err)
	return a
}

func (b baskets) requireLeft(t *testing.T, m, l, s int64) {
	t.Helper()
	require.Equal(t, map[string]int64{"": m + l + s, "a": m, "b": l, "c": s}, b.LeftItems(t, b.sale))
	b.RequireSound(t)
	testwork.RequireUnbroken(t, b.Shop, uuid.Nil)
}

func TestRebuildRestoresItems(t *testing.T) {
	t.Parallel()
	s := newBaskets(t)
	l := ledger.New(s.Pool)
	ann, bob := s.want(t, "ann", "mml"), s.want(t, "bob", "ll")
	carol, dave := s.want(t, "carol", "ms"), s.want(t, "dave", "s")
	testwork.Fulfil(t, s.Shop)
	testwork.Pay(t, l, bob.Reservation.OrderID, "bob", "pi")
	testwork.Cancel(t, l, carol.Reservation.OrderID, "carol")
	testwork.EndWindow(t, s.Pool, dave.Reservation.OrderID)
	testwork.Expire(t, s.Shop)
	testwork.ReleaseUnits(t, s.Shop)
	s.requireLeft(t, 3, 0, 2)
	before := s.SaleInRedis(t, s.sale.ID)
	s.want(t, "lost", "m") // unread by workers

	for range 2 {
		s.Flush(t)
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: s.sale.ID, User: "eve", Items: map[string]int64{"m": 1}})
		require.ErrorIs(t, err, reservation.ErrUnavailable)
		testwork.Rebuild(t, s.Shop)
		s.requireLeft(t, 3, 0, 2)
		after := s.SaleInRedis(t, s.sale.ID)
		for name, value := range before {
			switch name {
			case "epoch", "revision", "generation", "sequence", "quiet_since_ms", "quiet.a", "quiet.b", "quiet.c":
			default:
				require.Equal(t, value, after[name], name)
			}
		}

		ann.Verdict, bob.Verdict = reservation.Replayed, reservation.Replayed
		require.Equal(t, ann, s.want(t, "ann", "lmm"))
		require.Equal(t, bob, s.want(t, "bob", "ll"))
		require.Equal(t, reservation.KeyReused, s.want(t, "ann", "mll").Verdict)
		for user, ended := range map[string]struct {
			reservation.Answer
			codes  string
			status order.Status
		}{"carol": {carol, "sm", order.StatusCancelled}, "dave": {dave, "s", order.StatusExpired}} {
			again := s.want(t, user, ended.codes)
			require.Equal(t, []any{reservation.OrderEnded, ended.status, ended.Of.Units},
				[]any{again.Verdict, again.Status, again.Of.Units})
			require.Equal(t, []any{ended.Reservation.OrderID, ended.Reservation.Lines},
				[]any{again.Reservation.OrderID, again.Reservation.Lines})
			require.Equal(t, reservation.KeyReused, s.want(t, user, "m").Verdict)
		}
	}

	// An order of before returns its units to its items, and each item sells its rest.
	testwork.Cancel(t, l, ann.Reservation.OrderID, "ann")
	testwork.ReleaseUnits(t, s.Shop)
	s.requireLeft(t, 5, 1, 2)
	testkit.Eventually(t, testshop.Soon, "the returned unit is sold", func() bool {
		return s.want(t, "l0", "l").Verdict == reservation.Reserved
	})
	rest := map[string]int{"m": 5, "l": 0, "s": 2}
	for code, units := range rest {
		for i := range units + 1 {
			a := s.want(t, fmt.Sprint(code, i+1), code)
			if i < units {
				require.Equal(t, reservation.Reserved, a.Verdict)
			} else {
				require.Equal(t, reservation.SoldOut, a.Verdict)
				require.Equal(t, []string{code}, a.Of.Codes)
			}
		}
	}
	testwork.Fulfil(t, s.Shop)
	require.Equal(t, "5,3,2 10", testwork.SoldItems(t, s.Pool, s.sale.ID))
	s.requireLeft(t, 0, 0, 0)
}

// An item of which live orders hold more than its stock takes nothing from the others.
func TestRebuildKeepsItemsApart(t *testing.T) {
	t.Parallel()
	s := newBaskets(t)
	require.Equal(t, reservation.Reserved, s.want(t, "ann", "mml").Verdict)
	testwork.Fulfil(t, s.Shop)
	require.NoError(t, s.Exec(t, "UPDATE sale_items SET stock = 1, sold = 1 WHERE item = 'a'"))
	testwork.Rebuild(t, s.Shop)
	require.Equal(t, map[string]int64{"": 4, "a": 0, "b": 2, "c": 2}, s.LeftItems(t, s.sale))
}

func TestSaleWithItemsKeepsOneShard(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 4)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", PerOrderLimit: 4, Stock: 1, Items: []reservation.Item{{Code: "m", Name: "M", Stock: 1}},
	})
	require.NoError(t, err)
	r := testwork.Rebuilder(t, s)
	_, err = r.RaiseShards(t.Context(), created.ID, 2, rebuild.ReasonByHand)
	var invalid *order.InvalidError
	require.ErrorAs(t, err, &invalid)
	require.ErrorContains(t, err, "must be 1 in a sale with items")
	require.EqualValues(t, 1, s.Epoch(t, created.ID), "a refused raise changes nothing")
	_, err = r.RaiseShards(t.Context(), created.ID, 1, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.EqualValues(t, 2, s.Epoch(t, created.ID))
}
