package reservation_test

import (
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/reservation"
)

func TestUnknownSaleIsLookedUpOncePerMoment(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := ownClient(t, own.URL)
	s := newShopOn(t, rdb, testkit.Keys(t), reservation.StoreOptions{})
	known := s.sale(1).ID
	require.Equal(t, reservation.Reserved, s.buy(known, "ann").Verdict)

	unknown := uuid.Must(uuid.NewV7())
	require.Equal(t, reservation.UnknownSale, s.buy(unknown, "ann").Verdict)
	before, began := scriptCalls(t, rdb), time.Now()
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			for range 200 {
				a, err := s.Reserve(t.Context(), reservation.Request{Sale: unknown, User: "ann", Quantity: 1})
				if err != nil || a.Verdict != reservation.UnknownSale {
					t.Error(a, err)
				}
			}
		})
	}
	all.Wait()
	looks := scriptCalls(t, rdb) - before
	// One for each quarter of a second that has begun, and one a second for each partition.
	require.LessOrEqual(t, looks, int(4*time.Since(began)/time.Second)+int(time.Since(began)/time.Second)+8, "looks for 10,000 requests")

	// A sale that is published meanwhile is found.
	require.NoError(t, s.rdb.HSet(t.Context(), s.keys.Sale(0, unknown), s.rdb.HGetAll(t.Context(), s.keys.Sale(0, known)).Val()).Err())
	require.NoError(t, s.rdb.HSet(t.Context(), s.keys.Sale(0, unknown), "left", 1).Err())
	testkit.Eventually(t, 10*time.Second, "the sale is known", func() bool { return s.buy(unknown, "ann").Verdict == reservation.Reserved })
	// One that this process creates is not looked for before.
	require.Equal(t, reservation.Reserved, s.buy(s.sale(1).ID, "ann").Verdict)
}
