package fulfillment_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

func run(t testing.TB, s *testshop.Shop, statements ...string) {
	t.Helper()
	for _, statement := range statements {
		_, err := s.Pool.Exec(t.Context(), statement)
		require.NoError(t, err, statement)
	}
}

// A rebuild that could not finish closes no sale.
func TestRebuildWithMissingGuardClosesNoSale(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 40)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(t, s)
	run(t, s, "DROP INDEX orders_one_live_per_user")
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
		require.ErrorIs(t, rebuildWith(testwork.Rebuilder(t, s)), ledger.ErrGuardMissing)
		require.Equal(t, before, s.SaleInRedis(t, sale))
	}
	s.Buy(t, sale, "meanwhile")
}

// The error of an order that cannot be recorded names the missing guard. The order does not become a dead letter.
func TestOrderWaitsWhileGuardIsMissing(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 40)
	o := testshop.Reserved(sale, "ann", 1)
	testwork.Record(t, ledger.New(s.Pool), []order.OrderReserved{o})
	run(t, s, "ALTER TABLE order_events DROP CONSTRAINT order_events_pkey")
	_, err := ledger.New(s.Pool).Record(t.Context(), []order.OrderReserved{o})
	require.ErrorIs(t, err, ledger.ErrGuardMissing)
	require.Equal(t, ledger.Transient, ledger.FaultOf(err))
	require.False(t, errors.Is(err, ledger.ErrContradiction))
}
