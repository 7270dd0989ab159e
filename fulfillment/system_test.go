//go:build system

package fulfillment_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/sql"
	"stampede/upkeep/rebuild"
)

func TestConcurrentSweepersExpireAndReleaseOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const perSale = 700 // more than one batch
	sales := []uuid.UUID{s.OpenPayable(t, perSale), s.OpenPayable(t, perSale), s.OpenPayable(t, perSale)}
	var orders []uuid.UUID
	for _, sale := range sales {
		require.Equal(t, perSale, s.Crowd(t, sale, perSale))
		for _, out := range testwork.Fulfil(t, s) {
			orders = append(orders, out.Event.OrderID)
		}
	}
	testwork.EndWindow(t, s.Pool, orders...)
	together := func(turn func(context.Context) (int, error)) {
		done := make([]int, 4)
		var all errgroup.Group
		for i := range done {
			all.Go(func() (err error) {
				done[i], err = turn(t.Context())
				return err
			})
		}
		require.NoError(t, all.Wait())
		left, err := turn(t.Context()) // a sweeper may stop while another one processes the rest
		require.NoError(t, err)
		require.Zero(t, left)
		require.Equal(t, len(orders), done[0]+done[1]+done[2]+done[3])
	}
	together(func(ctx context.Context) (int, error) { return testwork.TryExpire(ctx, s) })
	require.EqualValues(t, len(orders), s.Count(t, testshop.ExpiredOrders))
	require.EqualValues(t, len(orders), s.Count(t, testshop.PendingReleases))
	require.Zero(t, s.Count(t, testshop.BrokenLogs))
	testwork.RequireUnbroken(t, s, uuid.Nil)
	together(func(ctx context.Context) (int, error) { return testwork.TryReleaseUnits(ctx, s) })
	require.Zero(t, s.Count(t, testshop.PendingReleases))
	for _, sale := range sales {
		require.EqualValues(t, perSale, s.Left(t, sale))
		require.Zero(t, testshop.Sold(t, s.Pool, sale))
		require.Zero(t, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())
	}
}

// onlyMissingGuard returns the only constraint or index that the database lacks, with the statements that restore it.
func onlyMissingGuard(t testing.TB, s *testshop.Shop) (sql.MissingGuard, []string) {
	t.Helper()
	_, missing, err := sql.Guards(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Len(t, missing, 1)
	return missing[0], strings.Split(missing[0].Mend, "; ")
}

// After a loss of Redis while Postgres lacks a constraint or unique index, the rebuild succeeds
// immediately, or after the SQL in its error has restored the guard.
func TestRebuildSucceedsOrNamesMissingGuard(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 40)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(t, s)
	guards := testshop.Rows(t, s.Pool,
		`SELECT conname::text FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype IN ('p', 'u', 'c',
			'f') AND coninhcount = 0 AND conrelid::regclass::text NOT IN ('goose_db_version', 'sales')
		UNION ALL SELECT 'sales_not_oversold' UNION ALL SELECT 'orders_one_live_per_user' UNION ALL SELECT
		'sale_events_idempotency'`)
	require.Greater(t, len(guards), 15)
	refused := 0
	for _, guard := range guards {
		t.Log(guard)
		run(t, s, `DO $$ DECLARE t regclass := (SELECT conrelid::regclass FROM pg_constraint WHERE conname = '`+guard+
			`' AND coninhcount = 0); BEGIN
			IF t IS NULL THEN DROP INDEX IF EXISTS `+guard+`; ELSE EXECUTE format('ALTER TABLE %s DROP CONSTRAINT `+guard+
			`', t); END IF; END $$`)
		missing, mend := onlyMissingGuard(t, s)
		require.Equal(t, guard, missing.Name)

		report := testwork.Audit(t, s, uuid.Nil)
		require.Equal(t, "DB", testwork.Broken(report), testwork.Text(t, report))
		require.Contains(t, testwork.Text(t, report), missing.What+": restore it with "+missing.Mend)
		require.Equal(t, "guard", testwork.Unmended(testwork.Reconcile(t, s)))

		s.Flush(t)
		err := testwork.Heal(t, s, testwork.Rebuilder(t, s), 1)
		if slices.Contains(rebuild.NeededGuards, guard) {
			refused++
			require.ErrorIs(t, err, ledger.ErrGuardMissing)
			require.ErrorContains(t, err, missing.Mend)
			run(t, s, mend...)
			err = testwork.Heal(t, s, testwork.Rebuilder(t, s), 1)
		} else {
			run(t, s, mend...)
		}
		require.NoError(t, err)
		s.RequireSound(t)
		testwork.RequireNoNeeds(t, s, 1)
	}
	require.Equal(t, len(rebuild.NeededGuards), refused)
}

func TestHangingRedisDoesNotDelayExpiry(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	for range 6 {
		cancelledOrders(t, s, 1)
	}
	overdue := s.Buy(t, s.OpenPayable(t, 1), "ann")
	testwork.Fulfil(t, s)
	s.Server.Freeze()
	defer s.Server.Thaw()
	config, registry := testwork.Config(t, s), prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	testkit.Eventually(t, testshop.Soon, "the sweep of releases has waited for Redis", func() bool {
		return testshop.Metric(t, registry, "stampede_worker_failing", "release") == 1
	})
	testwork.EndWindow(t, s.Pool, overdue)
	testkit.Eventually(t, 20*time.Second, "the order expires",
		func() bool { return s.Count(t, testshop.ExpiredOrders) == 1 })
	require.EqualValues(t, 1, testshop.Metric(t, registry, "stampede_worker_failing", "release"),
		"Redis still hangs")
	s.Server.Thaw()
	testkit.Eventually(t, 30*time.Second, "all units are released",
		func() bool { return s.Count(t, testshop.PendingReleases) == 0 })
	stop()
}
