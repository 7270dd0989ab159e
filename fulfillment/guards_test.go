package fulfillment_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/rebuild"
)

// onlyMissingGuard returns the only constraint or index that the database lacks, with the statements that restore it.
func onlyMissingGuard(s *testshop.Shop, t testing.TB) (sql.MissingGuard, []string) {
	t.Helper()
	_, missing, err := sql.Guards(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Len(t, missing, 1)
	return missing[0], strings.Split(missing[0].Mend, "; ")
}

func run(s *testshop.Shop, t testing.TB, statements ...string) {
	t.Helper()
	for _, statement := range statements {
		_, err := s.Pool.Exec(t.Context(), statement)
		require.NoError(t, err, statement)
	}
}

// After a loss of Redis while Postgres lacks a constraint or unique index, the rebuild succeeds
// immediately, or after the SQL in its error has restored the guard.
func TestRebuildSucceedsOrNamesMissingGuard(t *testing.T) {
	t.Parallel()
	s := testshop.NewLostShop(t)
	sale := s.Open(t, 40)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(s.Shop, t)
	guards := testshop.RowsOf(t, s.Pool,
		`SELECT conname::text FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype IN ('p', 'u', 'c',
			'f') AND coninhcount = 0 AND conrelid::regclass::text NOT IN ('goose_db_version', 'sales')
		UNION ALL SELECT 'sales_not_oversold' UNION ALL SELECT 'orders_one_live_per_user' UNION ALL SELECT
		'sale_events_idempotency'`)
	require.Greater(t, len(guards), 15)
	refused := 0
	for _, guard := range guards {
		t.Log(guard)
		run(s.Shop, t, `DO $$ DECLARE t regclass := (SELECT conrelid::regclass FROM pg_constraint WHERE conname = '`+guard+
			`' AND coninhcount = 0); BEGIN
			IF t IS NULL THEN DROP INDEX IF EXISTS `+guard+`; ELSE EXECUTE format('ALTER TABLE %s DROP CONSTRAINT `+guard+
			`', t); END IF; END $$`)
		missing, mend := onlyMissingGuard(s.Shop, t)
		require.Equal(t, guard, missing.Name)

		report := testwork.Audit(s.Shop, t, uuid.Nil)
		require.Equal(t, "DB", testwork.Broken(report), testwork.TextOf(t, report))
		require.Contains(t, testwork.TextOf(t, report), missing.What+": restore it with "+missing.Mend)
		require.Equal(t, "guard", testwork.LeftOf(testwork.Reconcile(s.Shop, t)))

		s.Flush(t)
		err := testwork.Heal(s.Shop, t, testwork.Rebuilder(s.Shop, t), 1)
		if slices.Contains(rebuild.NeededGuards, guard) {
			refused++
			require.ErrorIs(t, err, ledger.ErrGuardMissing)
			require.ErrorContains(t, err, missing.Mend)
			run(s.Shop, t, mend...)
			err = testwork.Heal(s.Shop, t, testwork.Rebuilder(s.Shop, t), 1)
		} else {
			run(s.Shop, t, mend...)
		}
		require.NoError(t, err)
		s.RequireSound(t)
		testwork.RequireNoNeeds(s.Shop, t, 1)
	}
	require.Equal(t, len(rebuild.NeededGuards), refused)
}

// A rebuild that could not finish closes no sale.
func TestRebuildWithMissingGuardClosesNoSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewLostShop(t)
	sale := s.Open(t, 40)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(s.Shop, t)
	run(s.Shop, t, "DROP INDEX orders_one_live_per_user")
	before := s.SaleInRedis(t, sale)
	for _, rebuildWith := range []func(*rebuild.Rebuilder) error{
		func(r *rebuild.Rebuilder) error {
			_, err := r.Partition(t.Context(), 0, rebuild.ReasonByHand)
			return err
		},
		func(r *rebuild.Rebuilder) error {
			_, err := r.Sale(t.Context(), sale, rebuild.ReasonByHand)
			return err
		},
	} {
		require.ErrorIs(t, rebuildWith(testwork.Rebuilder(s.Shop, t)), ledger.ErrGuardMissing)
		require.Equal(t, before, s.SaleInRedis(t, sale))
	}
	s.Buy(t, sale, "meanwhile")
}

// The error of an order that cannot be recorded names the missing guard. The order does not become a dead letter.
func TestOrderWaitsWhileGuardIsMissing(t *testing.T) {
	t.Parallel()
	s := testshop.NewLostShop(t)
	sale := s.Open(t, 40)
	o := testshop.Reserved(sale, "ann", 1)
	_, err := ledger.New(s.Pool).Record(t.Context(), []order.OrderReserved{o})
	require.NoError(t, err)
	run(s.Shop, t, "ALTER TABLE order_events DROP CONSTRAINT order_events_pkey")
	_, err = ledger.New(s.Pool).Record(t.Context(), []order.OrderReserved{o})
	require.ErrorIs(t, err, ledger.ErrGuardMissing)
	require.Equal(t, ledger.Transient, ledger.FaultOf(err))
	require.False(t, errors.Is(err, ledger.ErrContradiction))
}
