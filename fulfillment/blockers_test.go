package fulfillment_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/fulfillment/ledger"
	"stampede/internal/connect"
	"stampede/internal/pg"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
)

// vanishedWithin is how long a client that has vanished may keep the orders of a sale from being committed.
const vanishedWithin = 15 * time.Second

// waitingForItsClient counts sessions that hold locks in the middle of a batch, of which the rest does not come.
const waitingForItsClient = `SELECT count(*) FROM pg_stat_activity
	WHERE datname = current_database() AND state = 'active' AND wait_event = 'ClientRead' AND backend_xid IS NOT NULL`

// TestCommitsContinueAfterWorkerFreezesInBatch freezes a process whose last batch has reached Postgres in part: the
// sale's row is locked, and the COMMIT will never come.
func TestCommitsContinueAfterWorkerFreezesInBatch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 100)
	victim := s.Process(t)
	databaseURL, cut := cutOffAfter(t, "SET sold = sold +")
	victim.Setenv("DATABASE_URL", databaseURL)
	victim.Start()
	s.Buy(t, sale, "ann")
	select {
	case <-cut:
	case <-time.After(30 * time.Second):
		t.Fatal("the victim does not come to its batch")
	}
	victim.Freeze()
	testkit.Eventually(t, testshop.Soon, "its session waits for the rest of the batch",
		func() bool { return s.Count(t, waitingForItsClient) == 1 })

	s.Crowd(t, sale, 50)
	config := testwork.Config(s, t)
	config.Consumer, config.MinIdle = "survivor", time.Second
	log := &testshop.CountingLog{}
	config.Logger = slog.New(log)
	began := time.Now()
	testwork.Work(t, config)
	testkit.Eventually(t, vanishedWithin, "all orders of the sale are committed", func() bool {
		return s.Count(t, testshop.ConfirmedOrders) == 51
	})
	t.Logf("committed %v after the worker had vanished", time.Since(began))
	require.EqualValues(t, 51, testshop.SoldOf(t, s.Pool, sale))
	require.Equal(t, 1, log.Times(fulfillment.EndedSession))
}

// TestCommitsContinueAfterIngressFreezesInChange is the same with a cancellation that has the sale's row.
func TestCommitsContinueAfterIngressFreezesInChange(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.OpenPayable(t, 100)
	s.Crowd(t, sale, 1)
	order := testwork.Fulfil(s, t)[0].Event.OrderID
	databaseURL, cut := cutOffAfter(t, "SET sold = sold -")
	pool, err := connect.Postgres(t.Context(), databaseURL, 1, connect.Service("serve"))
	require.NoError(t, err)
	ctx, vanish := context.WithCancel(t.Context())
	cancelled := make(chan error, 1)
	go func() {
		_, err := ledger.New(pool).Cancel(ctx, order, "user-0")
		cancelled <- err
		pool.Close()
	}()
	select {
	case <-cut:
	case err := <-cancelled:
		require.NoError(t, err)
		t.Fatal("the cancellation was not cut off")
	}
	testkit.Eventually(t, testshop.Soon, "its session waits for the rest",
		func() bool { return s.Count(t, waitingForItsClient) == 1 })
	s.Buy(t, sale, "ann")
	testwork.Work(t, testwork.Config(s, t))
	testkit.Eventually(t, vanishedWithin, "the other order of the sale is committed", func() bool {
		return s.Count(t, testshop.ConfirmedOrders) == 2
	})
	vanish()
	require.Error(t, <-cancelled)
	_, err = ledger.New(s.Pool).Cancel(t.Context(), order, "user-0")
	require.NoError(t, err, "the order is free as well")
}

// TestOnlySilentBlockerIsTerminated has the time pass between two looks by setting back when a session was first seen.
func TestOnlySilentBlockerIsTerminated(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 100)
	s.Crowd(t, sale, 1)
	log := &testshop.CountingLog{}
	found := fulfillment.Blockers{
		Pool: s.Pool, Log: slog.New(log),
		Seen: make(map[fulfillment.BlockerKey]*fulfillment.BlockerSeen),
	}
	look := func() int {
		t.Helper()
		ended, err := found.Look(t.Context())
		require.NoError(t, err)
		return ended
	}
	pass := func(d time.Duration) {
		for _, seen := range found.Seen {
			seen.First = seen.First.Add(-d)
			if !seen.Silent.IsZero() {
				seen.Silent = seen.Silent.Add(-d)
			}
		}
	}
	require.Zero(t, look(), "nobody waits")
	hold := s.HoldSale(t, sale)
	require.Zero(t, look(), "nobody waits for it")
	require.Empty(t, found.Seen)

	b := testwork.Batch(s, t, nil)
	answers := testwork.Handle(b, testwork.Messages(s, t)...)
	// Postgres notes that a session waits for its client after the answer has been sent.
	awaitSilent := func() {
		t.Helper()
		testkit.Eventually(t, testshop.Soon, "the batch waits for a silent session", func() bool {
			blockers, err := pg.Blockers(t.Context(), s.Pool)
			require.NoError(t, err)
			return len(blockers) == 1 && blockers[0].Silent
		})
	}
	awaitSilent()
	require.Zero(t, look())
	pass(fulfillment.SilentBetweenQueryMax - time.Second)
	require.Zero(t, look(), "its time is not over")
	require.Equal(t, 1, log.Times(fulfillment.NamedSession), "but it is named")
	require.Zero(t, look())
	require.Equal(t, 1, log.Times(fulfillment.NamedSession), "once")

	_, err := hold.Exec(t.Context(), "SELECT 1")
	require.NoError(t, err)
	awaitSilent()
	pass(fulfillment.SilentBetweenQueryMax)
	require.Zero(t, look(), "it works on, slowly")
	pass(fulfillment.SilentBetweenQueryMax)
	awaitSilent()
	require.Equal(t, 1, look())
	require.Equal(t, 1, log.Times(fulfillment.EndedSession))
	for _, a := range answers {
		require.NoError(t, testshop.Answer(t, a))
	}
	_, err = hold.Exec(t.Context(), "SELECT 1")
	require.Error(t, err)
}
