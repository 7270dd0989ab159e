package reservation_test

import (
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testsale"
	"stampede/reservation"
)

func TestUnknownSaleIsLookedUpOncePerMoment(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testsale.OwnClient(t, own.URL)
	s := testsale.NewShopOn(t, rdb, testkit.Keys(t), reservation.StoreOptions{})
	known := s.Sale(1).ID
	require.Equal(t, reservation.Reserved, s.Buy(known, "ann").Verdict)

	unknown := uuid.Must(uuid.NewV7())
	require.Equal(t, reservation.UnknownSale, s.Buy(unknown, "ann").Verdict)
	before, began := testsale.ScriptCalls(t, rdb), time.Now()
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
	looks := testsale.ScriptCalls(t, rdb) - before
	// One for each quarter of a second that has begun, and one a second for each partition.
	require.LessOrEqual(t, looks, int(4*time.Since(began)/time.Second)+int(time.Since(began)/time.Second)+8,
		"lookups for 10,000 requests")

	// A sale that is published meanwhile is found.
	require.NoError(
		t, s.Redis.HSet(t.Context(), s.Keys.Sale(0, unknown),
			s.Redis.HGetAll(t.Context(), s.Keys.Sale(0, known)).Val()).Err(),
	)
	require.NoError(t, s.Redis.HSet(t.Context(), s.Keys.Sale(0, unknown), "left", 1).Err())
	testkit.Eventually(
		t, 30*time.Second, "the sale is known", func() bool { return s.Buy(unknown, "ann").Verdict == reservation.Reserved },
	)
	// This process has not looked up the sale that it creates.
	require.Equal(t, reservation.Reserved, s.Buy(s.Sale(1).ID, "ann").Verdict)
}
