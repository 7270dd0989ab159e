package reservation_test

import (
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

func TestUnknownSaleIsLookedUpOncePerMoment(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Client(t, own.URL)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
	known := s.Sale(t, 1).ID
	s.Buy(t, known, "ann")

	unknown := uuid.Must(uuid.NewV7())
	require.Equal(t, reservation.UnknownSale, s.Ask(t, unknown, "ann").Verdict)
	before, began := testshop.ScriptCalls(t, rdb), time.Now()
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
	looks := testshop.ScriptCalls(t, rdb) - before
	// One for each quarter of a second that has begun, and one a second for each partition.
	require.LessOrEqual(t, looks, int(4*time.Since(began)/time.Second)+int(time.Since(began)/time.Second)+8,
		"lookups for 10,000 requests")

	// A sale that is published meanwhile is found.
	require.NoError(
		t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, unknown),
			s.Rdb.HGetAll(t.Context(), s.Keys.Sale(0, known)).Val()).Err(),
	)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, unknown), "left", 1).Err())
	testkit.Eventually(t, 30*time.Second, "the sale is known", func() bool {
		return s.Ask(t, unknown, "ann").Verdict == reservation.Reserved
	})
	// This process has not looked up the sale that it creates.
	s.Buy(t, s.Sale(t, 1).ID, "ann")
}
