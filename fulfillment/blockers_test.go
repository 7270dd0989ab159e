//go:build system

package fulfillment_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/connect"
	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
)

// vanishedWithin is how long a vanished client may block the commits of a sale.
const vanishedWithin = 15 * time.Second

// waitingForItsClient counts sessions that hold locks and wait for the rest of a batch.
const waitingForItsClient = `SELECT count(*) FROM pg_stat_activity
	WHERE datname = current_database() AND state = 'active' AND wait_event = 'ClientRead' AND backend_xid IS NOT NULL`

// TestCommitsContinueAfterWorkerFreezesInBatch freezes a process of whose last batch Postgres has received only a part:
// the sale's row is locked, and the COMMIT never arrives.
func TestCommitsContinueAfterWorkerFreezesInBatch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	victim := s.Process(t, "worker")
	databaseURL, cut := cutOffAfter(t, "SET sold = sold +")
	victim.Setenv("DATABASE_URL", databaseURL)
	victim.Start()
	s.Buy(t, sale, "ann")
	select {
	case <-cut:
	case <-time.After(30 * time.Second):
		t.Fatal("the worker does not send its batch")
	}
	victim.Freeze()
	testkit.Eventually(t, testshop.Soon, "its session waits for the rest of the batch",
		func() bool { return s.Count(t, waitingForItsClient) == 1 })

	s.Crowd(t, sale, 50)
	config := testwork.Config(t, s)
	config.Consumer, config.MinIdle = "survivor", time.Second
	log := &testshop.CountingLog{}
	config.Logger = slog.New(log)
	began := time.Now()
	testwork.Work(t, config)
	testkit.Eventually(t, vanishedWithin, "all orders of the sale are committed", func() bool {
		return s.Count(t, testshop.ConfirmedOrders) == 51
	})
	t.Logf("committed %v after the worker had vanished", time.Since(began))
	require.EqualValues(t, 51, testshop.Sold(t, s.Pool, sale))
	testkit.Eventually(t, testshop.Soon, "the end of the session is logged, which does not delay the orders",
		func() bool { return log.Times(fulfillment.EndedSession) == 1 })
}

// TestCommitsContinueAfterIngressFreezesInChange does the same with a cancellation that has locked the sale's row.
func TestCommitsContinueAfterIngressFreezesInChange(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 100)
	s.Crowd(t, sale, 1)
	orderID := testwork.Fulfil(t, s)[0].Event.OrderID
	databaseURL, cut := cutOffAfter(t, "SET sold = sold -")
	pool, err := connect.Postgres(t.Context(), databaseURL, 1, connect.Service("serve"))
	require.NoError(t, err)
	ctx, vanish := context.WithCancel(t.Context())
	cancellation := make(chan error, 1)
	go func() {
		_, err := ledger.New(pool).Cancel(ctx, orderID, "user-0")
		cancellation <- err
		pool.Close()
	}()
	select {
	case <-cut:
	case err := <-cancellation:
		require.NoError(t, err)
		t.Fatal("the cancellation was not cut off")
	}
	testkit.Eventually(t, testshop.Soon, "its session waits for the rest",
		func() bool { return s.Count(t, waitingForItsClient) == 1 })
	s.Buy(t, sale, "ann")
	testwork.Work(t, testwork.Config(t, s))
	testkit.Eventually(t, vanishedWithin, "the other order of the sale is committed", func() bool {
		return s.Count(t, testshop.ConfirmedOrders) == 2
	})
	vanish()
	require.Error(t, <-cancellation)
	_, err = ledger.New(s.Pool).Cancel(t.Context(), orderID, "user-0")
	require.NoError(t, err, "the order is no longer locked")
}

// TestOnlySilentBlockerIsTerminated lets time pass by setting back when the sessions were seen.
func TestOnlySilentBlockerIsTerminated(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	s.Crowd(t, sale, 1)
	log := &testshop.CountingLog{}
	blockers := fulfillment.NewBlockers(s.Pool, slog.New(log))
	endSilent := func() int {
		t.Helper()
		ended, err := blockers.EndSilent(t.Context())
		require.NoError(t, err)
		return ended
	}
	require.Zero(t, endSilent(), "no session waits")
	hold := s.HoldSale(t, sale)
	require.Zero(t, endSilent(), "no session waits for the lock")
	require.Zero(t, blockers.Seen())

	b := testwork.Batch(t, s, nil)
	answers := testwork.Handle(b, testwork.Messages(t, s)...)
	// Postgres sends the answer before it records that the session waits for its client.
	awaitSilent := func() {
		t.Helper()
		testkit.Eventually(t, testshop.Soon, "the batch waits for a silent session", func() bool {
			blocking, err := pg.Blockers(t.Context(), s.Pool)
			require.NoError(t, err)
			return len(blocking) == 1 && blocking[0].Silent
		})
	}
	awaitSilent()
	require.Zero(t, endSilent())
	blockers.Pass(fulfillment.SilentBetweenQueryMax / 2)
	require.Zero(t, endSilent(), "it was silent too shortly")
	require.Equal(t, 1, log.Times(fulfillment.NamedSession), "it is logged")
	require.Zero(t, endSilent())
	require.Equal(t, 1, log.Times(fulfillment.NamedSession), "it is logged once")

	_, err := hold.Exec(t.Context(), "SELECT 1")
	require.NoError(t, err)
	awaitSilent()
	blockers.Pass(fulfillment.SilentBetweenQueryMax)
	require.Zero(t, endSilent(), "a slow client is not ended")
	blockers.Pass(fulfillment.SilentBetweenQueryMax)
	awaitSilent()
	require.Equal(t, 1, endSilent())
	require.Equal(t, 1, log.Times(fulfillment.EndedSession))
	testwork.RequireDone(t, answers)
	_, err = hold.Exec(t.Context(), "SELECT 1")
	require.Error(t, err)
}
