//go:build system

package ledger_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
)

// If a worker is killed at any of these points between the expiry of an order and the release of its
// unit, the next worker releases the unit, once. In the second pass of a point, the orders of one sale
// are finished and those of the other are not.
func TestUnitIsReleasedOnceAfterWorkerCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.BeforeExpire, crashpoint.BeforeExpireCommit, crashpoint.AfterExpire,
		crashpoint.BeforeRelease, crashpoint.AfterRelease, crashpoint.AfterReleaseCommit,
	} {
		for pass := 1; pass <= 2; pass++ {
			t.Run(fmt.Sprintf("%s:%d", point, pass), func(t *testing.T) {
				t.Parallel()
				const stock, buyers = 20, 10
				s := testshop.NewShop(t)
				sales := []uuid.UUID{s.OpenPayable(t, stock), s.OpenPayable(t, stock)}
				var overdue []uuid.UUID
				for _, sale := range sales {
					require.Equal(t, buyers, s.Crowd(t, sale, buyers))
					for _, out := range testwork.Fulfil(t, s) {
						switch id, user := out.Event.OrderID, out.Event.UserID; user {
						case "user-0":
							_, err := ledger.New(s.Pool).Pay(t.Context(), id, user, "pi")
							require.NoError(t, err)
						case "user-1":
							_, err := ledger.New(s.Pool).Cancel(t.Context(), id, user)
							require.NoError(t, err)
						default:
							overdue = append(overdue, id)
						}
					}
				}
				testwork.EndWindow(t, s.Pool, overdue...)

				victim := s.Process(t, "worker")
				victim.Setenv(crashpoint.Env, fmt.Sprintf("%s:%d", point, pass))
				victim.Start()
				victim.WaitKilled(30 * time.Second)
				// At any point the audit finds nothing, and a buyer whose order has ended can buy again.
				testwork.RequireUnbroken(t, s, uuid.Nil)
				bought := map[string]bool{}
				buy := func() {
					for i, sale := range sales {
						for n := 1; n < buyers; n++ {
							user := fmt.Sprintf("user-%d", n)
							result, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
							require.NoError(t, err)
							if result.Verdict == reservation.Reserved {
								require.False(t, bought[fmt.Sprint(i, user)], "%s bought twice", user)
								bought[fmt.Sprint(i, user)] = true
							}
						}
					}
				}
				buy()

				successor := s.Process(t, "worker")
				successor.Start()
				testkit.Eventually(t, 30*time.Second, "all units are released", func() bool {
					return s.Count(t, testshop.ExpiredOrders) == int64(len(overdue)) && s.Count(t, testshop.PendingReleases) == 0
				})
				for i, sale := range sales {
					taken := 1 // the paid unit
					for n := range buyers {
						if bought[fmt.Sprint(i, fmt.Sprintf("user-%d", n))] {
							taken++
						}
					}
					require.EqualValues(t, stock-taken, s.Left(t, sale))
				}
				buy()
				require.Len(t, bought, 2*(buyers-1), "every buyer whose order ended can buy again")
				s.AwaitConfirmed(t, len(bought))
				testwork.AwaitRest(t, s)
				for _, sale := range sales {
					require.EqualValues(t, stock-buyers, s.Left(t, sale))
					require.EqualValues(t, buyers, testshop.Sold(t, s.Pool, sale))
				}
				require.Zero(t, s.Count(t, testshop.BrokenLogs))
				testwork.RequireUnbroken(t, s, uuid.Nil)
				require.True(t, successor.Stop().Success())
			})
		}
	}
}
