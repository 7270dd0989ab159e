package testwork

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/lua"
)

// GiveUnits lets a shard of a sale give half of its units to another shard, which does not take them, as if the
// ingress had crashed.
func GiveUnits(s *testshop.Shop, t testing.TB, sale uuid.UUID, from, to int) {
	t.Helper()
	partition := s.LayoutOf(t, sale).Partition(from)
	answer, err := s.Rdb.Eval(t.Context(), lua.FencedBy("test").Give.Source, []string{s.Keys.Sale(partition, sale)},
		s.EpochOf(t, sale), to, 0, 2).Text()
	require.NoError(t, err)
	require.Contains(t, answer, "given ")
}
