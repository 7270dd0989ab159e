package testwork

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment/rebuild"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
)

func Rebuilder(s *testshop.Shop, t testing.TB) *rebuild.Rebuilder {
	t.Helper()
	r, err := rebuild.New(rebuild.Config{
		Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Store: s.Store,
		Logger: testkit.Logger(t),
	})
	require.NoError(t, err)
	return r
}

// Rebuild rebuilds the only partition.
func Rebuild(s *testshop.Shop, t testing.TB) rebuild.Report {
	t.Helper()
	report, err := Rebuilder(s, t).Partition(t.Context(), 0, rebuild.ReasonByHand)
	require.NoError(t, err)
	return report
}

// Heal rebuilds what a worker with a full check would rebuild.
func Heal(s *testshop.Shop, t testing.TB, r *rebuild.Rebuilder, partitions int) error {
	t.Helper()
	_, err := r.Heal(t.Context(), partitions, true)
	return err
}
