package audit_test

import (
	"context"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// Operators change the sale during both looks, so each look finds another difference.
func TestReconcileIgnoresSaleThatChangesBetweenAudits(t *testing.T) {
	t.Parallel()
	pause := func(s *testshop.Shop, sale uuid.UUID) error {
		_, err := s.Catalog.Pause(context.Background(), sale)
		return err
	}
	resume := func(s *testshop.Shop, sale uuid.UUID) error {
		_, err := s.Catalog.Resume(context.Background(), sale)
		return err
	}
	restock := func(units int64) func(*testshop.Shop, uuid.UUID) error {
		return func(s *testshop.Shop, sale uuid.UUID) error {
			_, err := s.Catalog.Restock(context.Background(), sale, units, "")
			return err
		}
	}
	rebuildSale := func(s *testshop.Shop, sale uuid.UUID) error {
		_, err := testwork.Rebuilder(t, s).Sale(context.Background(), sale, rebuild.ReasonByHand)
		return err
	}
	for name, changes := range map[string][]func(*testshop.Shop, uuid.UUID) error{
		"a restock and a pause":       {restock(5), pause},
		"two restocks":                {restock(5), restock(5)},
		"a restock and a lower stock": {restock(5), restock(-5)},
		"a pause and a resume":        {pause, resume},
		"two rebuilds":                {rebuildSale, rebuildSale},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := s.OpenPayable(t, 10)
			s.Crowd(t, sale, 3)
			testwork.Fulfil(t, s)
			rdb, err := connect.Control(testkit.RedisURL(t))
			require.NoError(t, err)
			defer func() { _ = rdb.Close() }()
			left := changes
			rdb.AddHook(afterHScan(func() {
				change := left[0]
				left = left[1:]
				require.NoError(t, change(s, sale))
			}))
			config := testwork.ReconcileConfig(t, s)
			config.Redis = rdb
			config.Explain = func(f audit.Finding) error {
				require.Equal(t, audit.RemedyWorker, f.Remedy, "no difference lasts: %s", f)
				return nil
			}
			report, err := audit.Reconcile(t.Context(), config)
			require.NoError(t, err)
			require.Empty(t, left, "two looks")
			require.Zero(t, report.Remaining)
			require.Zero(t,
				s.Count(t, "SELECT count(*) FROM sale_events WHERE type = 'SaleReconciled' OR data ->> 'reason' = 'reconciled'"),
				"nothing was repaired")
			testwork.RequireUnbroken(t, s, sale)
		})
	}
}
