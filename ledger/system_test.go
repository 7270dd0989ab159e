//go:build system

package ledger_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

// Two ingresses and a worker run. The deadline of an order passes while Postgres is away, and its buyer
// pays afterwards.
func TestOrderDoesNotExpireDuringPostgresOutage(t *testing.T) {
	t.Parallel()
	s, server := testshop.OnOwnPostgres(t)
	sale := s.OpenPayable(t, 10)
	stop := testwork.Work(t, testwork.Config(t, s))
	punctual, unlucky, absent := s.Buy(t, sale, "ann"), s.Buy(t, sale, "bob"), s.Buy(t, sale, "cid")
	s.AwaitConfirmed(t, 3)
	testwork.Heartbeat(t, s.Pool) // there was no heartbeat since the migration

	ctx, cancel := context.WithCancel(context.Background())
	var heartbeats errgroup.Group
	log := &testshop.CountingLog{}
	for range 2 {
		own := testkit.PoolAt(t, server.URL, 2)
		heartbeats.Go(func() error { return ledger.Heartbeat{Pool: own, Logger: slog.New(log)}.Run(ctx) })
	}
	before := s.Count(t, outages)
	require.NoError(t, testwork.MoveDue(t.Context(), s.Pool, "pay_clock() + interval '8 s'", unlucky, absent))
	testwork.Pay(t, ledger.New(s.Pool), punctual, "ann", "pi_1")

	server.StopImmediate()
	stopped := time.Now()
	testkit.Eventually(t, 20*time.Second, "the deadline and outageAfter have passed", func() bool {
		return time.Since(stopped) > outageAfter+4*time.Second
	})
	s.Restart(t, server)
	testkit.Eventually(t, 20*time.Second, "the outage is recorded",
		func() bool { return s.Count(t, outages) == before+1 })
	testwork.Pay(t, ledger.New(s.Pool), unlucky, "bob", "pi_2")
	require.Zero(t, s.Count(t, testshop.ExpiredOrders))
	remaining := time.Until(testwork.Order(t, s.Pool, absent).ExpiresAt)
	require.Positive(t, remaining)
	testkit.Eventually(t, 20*time.Second, "an order that is not paid in the remaining time expires", func() bool {
		return s.Count(t, testshop.ExpiredOrders) == 1
	})
	require.Equal(t, order.StatusExpired, testwork.Order(t, s.Pool, absent).Status)
	testkit.Eventually(t, 20*time.Second, "its unit is released", func() bool { return s.Left(t, sale) == 8 })
	cancel()
	require.NoError(t, heartbeats.Wait())
	require.Equal(t, before+1, s.Count(t, outages))
	require.Equal(t, 1, log.Times("buyers could not pay for a while: deadlines are postponed"))
	require.Equal(t, 2, log.Times("cannot record a heartbeat in Postgres, trying again"))
	stop()
	testwork.RequireUnbroken(t, s, sale)
}

// If an ingress is killed while it keeps a payment, or a worker while it decides about one that waits, it has happened
// or not, and a repeat of the report settles the order once.
func TestMoneyIsKeptOnceAfterCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.BeforePayment, crashpoint.PaymentInserted, crashpoint.BeforePaymentCommit, crashpoint.AfterPayment,
	} {
		for _, isEarly := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s early=%t", point, isEarly), func(t *testing.T) {
				t.Parallel()
				s := testshop.NewShop(t)
				testwork.Heartbeat(t, s.Pool)
				l := ledger.New(s.Pool)
				id := s.Buy(t, s.OpenPayable(t, 10), "ann")
				money := order.Money{Reference: "pi_1", OrderID: id}
				if isEarly {
					_, err := l.Report(t.Context(), money)
					require.NoError(t, err)
				}
				testwork.Fulfil(t, s)
				victim := s.Process(t, "report", money.Reference, id.String())
				if isEarly {
					victim = s.Process(t, "worker")
				}
				victim.Setenv(crashpoint.Env, point)
				victim.Start()
				victim.WaitKilled(30 * time.Second)
				testwork.RequireUnbroken(t, s, uuid.Nil)
				settled := s.Count(t, "SELECT count(*) FROM payments WHERE state = 'settled'") == 1
				require.Equal(t, point == crashpoint.AfterPayment, settled)
				require.Equal(t, settled, testwork.Order(t, s.Pool, id).Status == order.StatusPaid)

				for range 2 {
					_, err := l.Report(t.Context(), money)
					require.NoError(t, err)
					_, err = l.SweepPayments(t.Context(), nil)
					require.NoError(t, err)
				}
				p, err := l.Payment(t.Context(), money.Reference)
				require.NoError(t, err)
				require.Equal(t, []any{order.PaymentSettled, 2}, []any{p.State, p.Version})
				require.Equal(t, order.StatusPaid, testwork.Order(t, s.Pool, id).Status)
				testwork.RequireUnbroken(t, s, uuid.Nil)
			})
		}
	}
}

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
							testwork.Pay(t, ledger.New(s.Pool), id, user, "pi")
						case "user-1":
							testwork.Cancel(t, ledger.New(s.Pool), id, user)
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
