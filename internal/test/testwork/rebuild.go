package testwork

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/upkeep/rebuild"
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
	required, err := r.Required(t.Context(), true)
	if err != nil {
		return err
	}
	failed := make([]error, partitions)
	var healing sync.WaitGroup
	for partition := range partitions {
		healing.Go(func() { _, failed[partition] = r.HealPartition(t.Context(), partition, required) })
	}
	healing.Wait()
	return errors.Join(failed...)
}
