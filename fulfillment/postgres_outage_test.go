//go:build system

package fulfillment_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

// A minute without Postgres shows defects that a short outage hides: deadlines that pass during the outage, deliveries
// that are counted, full readers.
func TestSaleSurvivesMinuteWithoutPostgres(t *testing.T) {
	t.Parallel()
	const (
		outageLength = time.Minute
		window       = 30 * time.Second // over in the middle of the outage
		perSecond    = 20
		buyersMin    = 500
	)
	s, server := testshop.OnOwnPostgres(t)
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "test", Stock: 5000, PerOrderLimit: 1,
		PaymentWindow: window,
	})
	require.NoError(t, err)
	ctx, stopHeartbeats := context.WithCancel(context.Background())
	var heartbeats sync.WaitGroup
	heartbeats.Go(func() { _ = ledger.Heartbeat{Pool: s.Pool, Logger: testkit.Logger(t)}.Run(ctx) }) // returns nil
	t.Cleanup(func() { stopHeartbeats(); heartbeats.Wait() })
	testwork.Work(t, testwork.Config(t, s))

	early := map[string]uuid.UUID{}
	for i := range 100 {
		user := fmt.Sprintf("early-%d", i)
		early[user] = s.Buy(t, sale.ID, user)
	}
	s.AwaitConfirmed(t, len(early))

	server.StopImmediate()
	stopped, late := time.Now(), 0
	for ; time.Since(stopped) < outageLength || late <= buyersMin; late++ {
		require.Less(t, time.Since(stopped), 3*outageLength, "buyers are served during the outage")
		s.Buy(t, sale.ID, fmt.Sprintf("late-%d", late))
		require.True(t, retry.Pause(time.Second/perSecond, t.Context().Done()))
	}

	s.Restart(t, server)
	s.AwaitConfirmed(t, len(early)+late) // within 30 s
	testwork.AwaitRest(t, s)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
	testkit.Eventually(t, testshop.Soon, "the next heartbeat records the outage", func() bool {
		return s.Count(t, "SELECT count(*) FROM outages") == 1
	})
	for user, o := range early {
		paid, err := ledger.New(s.Pool).Pay(t.Context(), o, user, "after the outage")
		require.NoError(t, err)
		require.Equal(t, order.StatusPaid, paid.Status)
	}
	require.Zero(t, s.Count(t, "SELECT count(*) FROM order_events WHERE type = 'OrderExpired'"))
	require.EqualValues(t, len(early)+late, testshop.Sold(t, s.Pool, sale.ID))
}
