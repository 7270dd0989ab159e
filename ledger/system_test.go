//go:build system

package ledger_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
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
		own, err := connect.Postgres(t.Context(), server.URL, 2)
		require.NoError(t, err)
		t.Cleanup(own.Close)
		heartbeats.Go(func() error { return ledger.Heartbeat{Pool: own, Logger: slog.New(log)}.Run(ctx) })
	}
	before := s.Count(t, outages)
	require.NoError(t, testwork.MoveDue(t.Context(), s.Pool, "pay_clock() + interval '8 s'", unlucky, absent))
	_, err := ledger.New(s.Pool).Pay(t.Context(), punctual, "ann", "pi_1")
	require.NoError(t, err)

	server.StopImmediate()
	stopped := time.Now()
	testkit.Eventually(t, 20*time.Second, "the deadline and outageAfter have passed", func() bool {
		return time.Since(stopped) > outageAfter+4*time.Second
	})
	s.Restart(t, server)
	testkit.Eventually(t, 20*time.Second, "the outage is recorded",
		func() bool { return s.Count(t, outages) == before+1 })
	_, err = ledger.New(s.Pool).Pay(t.Context(), unlucky, "bob", "pi_2")
	require.NoError(t, err)
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
